//! Keys, netbench and doctor: what a user does before the first run on several machines.

mod support;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use consort_fabric::ReservedPort;
use serde_json::{Value, json};
use support::{Finished, consort, expected, fixture, ids, refused, run, run_json};
use tempfile::TempDir;

/// Small enough to be quick; every collective at two sizes.
const QUICK: [&str; 6] = ["netbench", "--max-bytes", "4KiB", "--repetitions", "20", "--hidden=64"];

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn new_key(directory: &TempDir) -> PathBuf {
    let path = directory.path().join("cluster.key");
    let finished = run(&["key", "new", text(&path)]);
    assert_eq!((finished.code, finished.stdout), (Some(0), format!("{}\n", text(&path))));
    path
}

fn write(directory: &TempDir, name: &str, content: &Value) -> PathBuf {
    let path = directory.path().join(name);
    std::fs::write(&path, content.to_string()).unwrap();
    path
}

/// A directory with an `ssh` that is this shell script.
fn fake_ssh(script: &str) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ssh");
    std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    directory
}

/// Runs the program with another `ssh` first in its path.
fn run_with_ssh(ssh: &TempDir, arguments: &[&str]) -> Finished {
    let path = format!("{}:{}", ssh.path().display(), std::env::var("PATH").unwrap());
    consort(arguments).env("PATH", path).output().unwrap().into()
}

/// Runs on this machine what it is asked to run on a host, and notes what other users would see of it.
const LOCAL_SSH: &str = r#"echo "$@" >> "$0.log"; while [ "$1" != -- ]; do shift; done; shift 2; exec sh -c "$1""#;

#[test]
fn a_key_is_private_and_never_overwritten() {
    let directory = tempfile::tempdir().unwrap();
    let path = new_key(&directory);
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let before = std::fs::read(&path).unwrap();
    refused(&["key", "new", text(&path)], "cluster.key cannot be made");
    assert_eq!(std::fs::read(&path).unwrap(), before);
}

#[test]
fn a_key_that_cannot_be_used_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = new_key(&directory);
    refused(&[&QUICK[..], &["--key", "/nowhere/key"]].concat(), "/nowhere/key cannot be read");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    refused(&[&QUICK[..], &["--key", text(&path)]].concat(), "chmod 600");
    refused(&[&QUICK[..], &["--encrypt", "--transport", "tcp"]].concat(), "`consort key new`");
    refused(&[&QUICK[..], &["--key", text(directory.path())]].concat(), "is a directory; name the file");
    let pipe = directory.path().join("pipe");
    assert!(Command::new("mkfifo").args(["-m", "600", text(&pipe)]).status().unwrap().success());
    refused(&[&QUICK[..], &["--key", text(&pipe)]].concat(), "pipe is not a regular file");
}

/// A digit too few, a character that is no digit, the wrong alphabet: none of it may end in a log.
#[test]
fn a_key_that_was_mistyped_is_not_shown() {
    let digits = "a997c3f0".repeat(8);
    for mistyped in [&digits[1..], &digits.replace('f', "g"), "qZfD8GJjm1c3Zk/x9+Hq0Zy1bV5uE7sTnRwLaK2oPiM="] {
        let hidden = |finished: Finished| {
            assert!(finished.code != Some(0) && !finished.stderr.contains(&mistyped[..8]), "{finished:?}");
            assert_eq!((finished.stderr.lines().count(), finished.stdout.as_str()), (1, ""), "{finished:?}");
            assert!(finished.stderr.contains("not shown"), "{finished:?}");
        };
        hidden(consort(&QUICK).env("CONSORT_KEY", mistyped).output().unwrap().into());
        if !mistyped.contains('/') {
            hidden(run(&[&QUICK[..], &["--key", mistyped]].concat()));
        }
    }
}

#[test]
fn other_machines_are_met_with_a_key_only() {
    let directory = tempfile::tempdir().unwrap();
    let hosts = json!([{"ssh": "m1", "ips": ["192.0.2.1"]}, {"ssh": "m2", "ips": ["192.0.2.2"]}]);
    let hosts = write(&directory, "hosts.json", &hosts);
    refused(&["netbench", "--hostfile", text(&hosts)], "192.0.2.1:29517, which other machines reach");
    let generate = ["generate", "-m", "x", "--tokens", "1"];
    refused(&[&["launch", "--hostfile", text(&hosts), "--"], &generate[..]].concat(), "`consort key new`");
}

/// Encryption needs the key on every rank, and only the launcher was told where it is.
#[test]
fn remote_ranks_get_the_key_unseen() {
    let directory = tempfile::tempdir().unwrap();
    let key = new_key(&directory);
    let hosts = json!([{"ssh": "m1", "ips": ["127.0.0.1"]}, {"ssh": "m2", "ips": ["127.0.0.1"]}]);
    let hosts = write(&directory, "hosts.json", &hosts);
    let reserved = ReservedPort::of([127, 0, 0, 1].into()).unwrap();
    let port = reserved.address().port().to_string();
    let ssh = fake_ssh(LOCAL_SSH);
    let path = format!("{}:{}", ssh.path().display(), std::env::var("PATH").unwrap());
    let flags = ["--transport", "tcp", "--encrypt", "--port", &port, "--json", "--hostfile", text(&hosts)];
    for named in [text(&key), std::fs::read_to_string(&key).unwrap().trim()] {
        let mut command = consort(&[&QUICK[..], &flags].concat());
        let finished: Finished = command.env("PATH", &path).env("CONSORT_KEY", named).output().unwrap().into();
        assert_eq!(finished.code, Some(0), "{finished:?}");
        let answer: Value = serde_json::from_str(&finished.stdout).unwrap();
        assert_eq!(answer["conditions"]["encrypted"], true);
        assert_eq!(answer["conditions"]["hosts"], json!(["m1", "m2"]));
    }
    let seen = std::fs::read_to_string(ssh.path().join("ssh.log")).unwrap();
    assert!(seen.contains("netbench") && seen.contains("CONSORT_RANK="), "{seen}");
    assert!(!seen.contains(std::fs::read_to_string(&key).unwrap().trim()), "{seen}");
    assert!(!seen.contains("CONSORT_KEY"), "{seen}");
}

#[test]
fn netbench_measures_every_collective_and_checks_the_values() {
    for transport in ["shm", "tcp"] {
        let answer = run_json(&[&QUICK[..], &["-n", "3", "--transport", transport]].concat());
        assert_eq!(answer["conditions"]["transport"], transport);
        let measurements = answer["measurements"].as_array().unwrap();
        for name in ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send/recv"] {
            let sizes: Vec<&Value> =
                measurements.iter().filter(|it| it["collective"] == name).map(|it| &it["bytes"]).collect();
            assert_eq!(sizes, [1024, 4096], "{name}");
        }
        assert!(measurements.iter().any(|it| it["collective"] == "barrier"));
        let step = measurements.iter().find(|it| it["collective"] == "step send/recv").unwrap();
        assert_eq!(step["bytes"], 64 * 4);
        let train = measurements.iter().find(|it| it["collective"] == "all_reduce train").unwrap();
        assert_eq!(train["bytes"], 64 * 4);
        for measurement in measurements {
            assert_eq!(measurement["correct"], true, "{measurement}");
            let time = |name: &str| measurement[name].as_f64().unwrap();
            assert!(0.0 < time("min_us") && time("min_us") <= time("median_us") && time("median_us") <= time("p99_us"));
        }
    }
}

/// Four ranks in a ring: sums go along it, and two pairs have no link to measure.
#[test]
fn netbench_measures_a_ring_and_names_what_changes_its_figures() {
    let ring = ["-n", "4", "--emulate-link", "topology=ring", "--wire", "bf16"];
    let answer = run_json(&[&QUICK[..], &ring, &["--algorithm", "line"]].concat());
    assert_eq!((&answer["conditions"]["wire"], &answer["conditions"]["algorithm"]), (&json!("bf16"), &json!("line")));
    assert!(answer["measurements"].as_array().unwrap().iter().all(|it| it["correct"] == true), "{answer}");
    let answer = run_json(&[&["netbench", "--links"][..], &ring].concat());
    let ends = |link: &Value| link["from"].as_u64().unwrap().abs_diff(link["to"].as_u64().unwrap());
    let links = answer["links"].as_array().unwrap();
    assert_eq!((links.len(), links.iter().any(|link| ends(link) == 2)), (8, false));
}

/// A pipeline whose stages have no link to the next one, and tensor parallel ranks that have none to each other.
#[test]
fn plans_run_over_whatever_links_there_are() {
    let llama = fixture("llama");
    let expected = expected("llama");
    let prompt = ids(&expected["prompt"]);
    let generate = ["generate", "-m", text(&llama), "--tokens", &prompt, "--max-tokens", "8", "--activations", "exact"];
    let tokens = |arguments: &[&str]| run_json(&[&generate[..], arguments].concat())["tokens"].clone();
    let alone = tokens(&[]);
    assert!(alone.is_array(), "{alone}");
    for (plan, links) in [("pipeline:3", "topology=0-2/2-1"), ("tensor:3", "topology=0-1/0-2")] {
        for transport in ["shm", "tcp"] {
            assert_eq!(tokens(&["--plan", plan, "--emulate-link", links, "--transport", transport]), alone, "{plan}");
        }
    }
    refused(
        &[&generate[..], &["--plan", "pipeline:3", "--emulate-link", "topology=0-1"]].concat(),
        "ranks 0 and 2 have no link, and no way through other ranks either",
    );
}

#[test]
fn netbench_refuses_what_it_cannot_measure() {
    refused(&["netbench", "-n", "1"], "1 is not in 2..=1024");
    refused(&["netbench", "--max-bytes", "much"], "expected a size");
    for (setting, expected) in [
        ("latency=50", "cannot read \"latency=50\" of an emulated link: latency takes a time from 0 to less than 60s"),
        ("latency=-1us", "latency takes a time from 0"),
        ("loss=2", "loss takes a share of packets from 0 to less than 1"),
        ("rails=99", "rails takes a whole number from 1 to 8"),
        ("speed=1", "its settings are latency, bandwidth, loss, rails, topology, cut, flip"),
        ("topology=0-5", "rank 5 in the topology of the emulated link does not exist: the run has 2 ranks"),
    ] {
        refused(&["netbench", "--emulate-link", setting], expected);
    }
    refused(&["netbench", "--only", "foo"], "there are all_reduce, all_gather, reduce_scatter, all_to_all, broadcast");
    refused(&["netbench", "--min-bytes", "1000", "--max-bytes", "10"], "--min-bytes 1000 is more than --max-bytes 8");
    let large = ["netbench", "-n", "1024", "--min-bytes", "1TiB", "--max-bytes", "1TiB"];
    refused(&large, "netbench needs 3377.7 TB for 1024 ranks on this machine");
    refused(
        &["netbench", "-n", "1024", "--hidden", "4294967295"],
        "netbench needs 17.6 TB for 1024 ranks on this machine",
    );
    let directory = tempfile::tempdir().unwrap();
    let hosts = write(&directory, "hosts.json", &json!([{"ssh": "localhost"}]));
    refused(&["netbench", "--hostfile", text(&hosts)], "takes two ranks");
    // An address of documentation: no machine has it.
    let hosts = write(&directory, "hosts.json", &json!([{"ssh": "localhost", "slots": 2, "ips": ["192.0.2.1"]}]));
    let netbench = ["netbench", "--hostfile", text(&hosts)];
    refused(&netbench, "host 0 (localhost): rank 0 cannot listen on 192.0.2.1");
    refused(&netbench, "must be an address of this machine");
}

#[test]
fn ssh_says_once_why_it_cannot_connect() {
    let directory = tempfile::tempdir().unwrap();
    let hosts = json!([{"ssh": "localhost", "ips": ["127.0.0.1"]}, {"ssh": "m2"}]);
    let hosts = write(&directory, "hosts.json", &hosts);
    let ssh = fake_ssh("echo 'ssh: connect to host m2 port 22: Connection refused' >&2; exit 255");
    let finished = run_with_ssh(&ssh, &["netbench", "--hostfile", text(&hosts)]);
    assert_eq!((finished.code, finished.stderr.matches("Connection refused").count()), (Some(255), 1), "{finished:?}");
    let last = finished.stderr.lines().last().unwrap();
    assert!(
        last.starts_with("error: rank 1 (m2) was lost: ssh could not connect") && last.ends_with("refused"),
        "{last}"
    );
}

#[test]
fn an_emulated_link_is_as_slow_as_asked_and_every_figure_says_so() {
    let words = "latency=2ms,bandwidth=100mbit";
    let answer = run_json(&["netbench", "--links", "--transport", "tcp", "--emulate-link", words]);
    assert_eq!(answer["conditions"]["emulated_link"], words);
    let links = answer["links"].as_array().unwrap();
    assert_eq!(links.iter().map(|link| (&link["from"], &link["to"])).collect::<Vec<_>>().len(), 2);
    for link in links {
        assert!(link["latency_us"].as_f64().unwrap() >= 2000.0, "{link}");
        assert!(link["bandwidth_gb_s"].as_f64().unwrap() <= 0.0125 * 1.02, "{link}");
    }
    let llama = fixture("llama");
    let prompt = ids(&expected("llama")["prompt"]);
    let generate = ["generate", "-m", text(&llama), "--tokens", &prompt, "-n", "2", "--max-tokens", "2"];
    let answer = run_json(&[&generate[..], &["--emulate-link", "latency=100us"]].concat());
    assert_eq!(answer["conditions"]["emulated_link"], "latency=100us");
}

#[test]
fn doctor_measures_this_machine_and_writes_what_it_found() {
    let directory = tempfile::tempdir().unwrap();
    let hosts =
        json!({"envs": ["A=1"], "hosts": [{"ssh": "localhost", "slots": 2}, {"ssh": "127.0.0.1", "memory": "1GB"}]});
    let hosts = write(&directory, "hosts.json", &hosts);
    let written = directory.path().join("written.json");
    let llama = fixture("llama");
    let answer = run_json(&["doctor", "--hostfile", text(&hosts), "-m", text(&llama), "--write", text(&written)]);
    assert_eq!(answer["failures"], json!([]));
    for host in answer["hosts"].as_array().unwrap() {
        assert_eq!(host["facts"]["version"], env!("CARGO_PKG_VERSION"), "{host}");
        assert!(host["facts"]["memory_bytes"].as_u64().unwrap() > 1 << 20, "{host}");
        assert!(host["facts"]["model"]["manifest_hash"]["Ok"].is_string(), "{host}");
    }
    let ways: Vec<(u64, u64)> = answer["links"]
        .as_array()
        .unwrap()
        .iter()
        .map(|link| (link["from"].as_u64().unwrap(), link["to"].as_u64().unwrap()))
        .collect();
    assert_eq!(ways, [(0, 1), (1, 0)]);

    let file: Value = serde_json::from_str(&std::fs::read_to_string(&written).unwrap()).unwrap();
    assert_eq!(file["envs"], json!(["A=1"]));
    assert_eq!((&file["hosts"][0]["slots"], &file["hosts"][1]["memory_bytes"]), (&json!(2), &json!(1_000_000_000)));
    assert!(file["hosts"][0]["memory_bytes"].as_u64().unwrap() > 1 << 20);
    assert_eq!(file["hosts"][0]["links"][0], Value::Null);
    assert!(file["hosts"][0]["links"][1]["bytes_per_s"].as_u64().unwrap() > 0);
    let again = run_json(&["netbench", "--links", "--hostfile", text(&written)]);
    assert_eq!(again["links"].as_array().unwrap().len(), 3 * 2);
}

#[test]
fn doctor_gives_a_remedy_for_each_failure() {
    let directory = tempfile::tempdir().unwrap();
    let hosts = json!([{"ssh": "localhost"}, {"ssh": "m2", "ips": ["192.0.2.2"]},
                       {"ssh": "localhost", "executable": "/nowhere/consort"}]);
    let hosts = write(&directory, "hosts.json", &hosts);
    let ssh = fake_ssh("echo 'm2: Permission denied (publickey).' >&2; exit 255");
    let finished = run_with_ssh(&ssh, &["doctor", "--hostfile", text(&hosts), "-m", "/nowhere/model"]);
    assert_eq!(finished.code, Some(1), "{finished:?}");
    for expected in [
        "localhost: the model cannot be used",
        "m2: ssh cannot connect: m2: Permission denied",
        "remedy: let this user log in there without a password: ssh-copy-id m2",
        "localhost: /nowhere/consort could not be started",
    ] {
        assert!(finished.stdout.contains(expected), "{expected}:\n{}", finished.stdout);
    }
    assert_eq!(finished.stderr, "error: 3 failures found\n");
}

#[test]
fn doctor_names_the_link_that_fails() {
    let directory = tempfile::tempdir().unwrap();
    // An address of documentation: no machine has it, so rank 0 cannot listen there.
    let hosts = json!([{"ssh": "localhost"}, {"ssh": "127.0.0.1"}, {"ssh": "::1", "ips": ["192.0.2.3"]}]);
    let hosts = write(&directory, "hosts.json", &hosts);
    let key = new_key(&directory);
    let finished = run(&["doctor", "--hostfile", text(&hosts), "--key", text(&key), "--json"]);
    assert_eq!(finished.code, Some(1), "{finished:?}");
    let answer: Value = serde_json::from_str(&finished.stdout).unwrap();
    let places: Vec<&str> =
        answer["failures"].as_array().unwrap().iter().map(|failure| failure["place"].as_str().unwrap()).collect();
    assert_eq!(places, ["::1", "localhost <-> ::1", "127.0.0.1 <-> ::1"], "{answer}");
    assert_eq!(answer["links"].as_array().unwrap().len(), 2, "{answer}");
}

#[test]
fn cache_format_and_chunk_are_conditions_and_chunks_change_no_token() {
    let llama = fixture("llama");
    let prompt = ids(&expected("llama")["prompt"]);
    let generate = ["generate", "-m", text(&llama), "--tokens", &prompt, "--activations", "exact", "--max-tokens", "8"];
    let whole = run_json(&[&generate[..], &["--kv-format", "f32"]].concat());
    let chunks = run_json(&[&generate[..], &["--kv-format", "f32", "--chunk", "3", "--plan", "pipeline:2"]].concat());
    assert_eq!(whole["tokens"], chunks["tokens"]);
    assert_eq!((&chunks["conditions"]["chunk"], &chunks["conditions"]["kv_format"]), (&json!(3), &json!("F32")));
    for format in ["f16", "bf16", "fp8", "q8"] {
        let answer = run_json(&[&generate[..], &["--kv-format", format]].concat());
        assert_eq!(answer["conditions"]["kv_format"], format.to_uppercase());
    }
    refused(&[&generate[..], &["--chunk", "0"]].concat(), "0 is not in 1..");
}
