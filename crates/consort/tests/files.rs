//! Where a model's files are: on one machine only, on several and not the same, on none.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use support::{Finished, children, consort, eventually, fixture, run_json, signal};
use tempfile::TempDir;

/// A tokenizer of one letter.
const TOKENIZER: &str = r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
    "pre_tokenizer": null, "post_processor": null, "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
    "use_regex": true}, "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
    "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false, "vocab": {"a": 0}, "merges": []}}"#;

/// Hosts that are this machine and have models in directories of their own.
struct Hosts {
    scratch: TempDir,
    count: usize,
}

impl Hosts {
    /// One host for each entry, with a copy of the fixture or with an empty disk.
    fn new(has_files: &[bool]) -> Self {
        let hosts = Self { scratch: tempfile::tempdir().unwrap(), count: has_files.len() };
        let mut entries = Vec::new();
        for (host, &has_files) in has_files.iter().enumerate() {
            let weights = hosts.weights(host);
            fs::create_dir(&weights).unwrap();
            if has_files {
                fs::create_dir(weights.join("llama")).unwrap();
                for file in ["config.json", "model.safetensors"] {
                    fs::copy(fixture("llama").join(file), hosts.file(host, file)).unwrap();
                }
                fs::write(hosts.file(host, "tokenizer.json"), TOKENIZER).unwrap();
                fs::write(hosts.file(host, "chat_template.jinja"), "{{ messages }}").unwrap();
            }
            let weights = weights.display();
            entries.push(format!(r#"{{"ssh": "localhost", "ips": ["127.0.0.1"], "weights": "{weights}"}}"#));
        }
        fs::write(hosts.hostfile(), format!(r#"{{"hosts": [{}]}}"#, entries.join(", "))).unwrap();
        hosts
    }

    fn hostfile(&self) -> PathBuf {
        self.scratch.path().join("hosts.json")
    }

    fn weights(&self, host: usize) -> PathBuf {
        self.scratch.path().join(host.to_string())
    }

    fn file(&self, host: usize, name: &str) -> PathBuf {
        self.weights(host).join("llama").join(name)
    }

    fn keep(&self) -> PathBuf {
        self.scratch.path().join("kept")
    }

    fn command(&self, flags: &[&str]) -> Command {
        let mut command = consort(&["launch", "--hostfile", self.hostfile().to_str().unwrap(), "--", "generate"]);
        command.args(["-m", "llama", "--tokens", "5,6,7", "--max-tokens", "8", "--ignore-eos", "--json"]).args(flags);
        assert!(self.count > 1);
        command
    }

    fn run(&self, flags: &[&str]) -> Finished {
        self.command(flags).output().unwrap().into()
    }

    /// The tokens of a run, which must succeed, and what it said.
    fn tokens(&self, flags: &[&str]) -> (Value, String) {
        let finished = self.run(flags);
        assert_eq!(finished.code, Some(0), "{flags:?}: {finished:?}");
        let answer: Value = serde_json::from_str(&finished.stdout).unwrap();
        (answer["tokens"].clone(), finished.stderr)
    }
}

fn tokens_of_one_rank() -> Value {
    let path = fixture("llama");
    let model = ["generate", "-m", path.to_str().unwrap(), "--tokens", "5,6,7", "--max-tokens", "8", "--ignore-eos"];
    run_json(&model)["tokens"].clone()
}

#[test]
fn a_rank_with_an_empty_disk_gets_its_part_from_another() {
    let expected = tokens_of_one_rank();
    for (has_files, plan, transport) in [
        (&[true, false][..], "pipeline:2", "shm"),
        (&[false, true], "pipeline:2", "tcp"),
        (&[true, false], "tensor:2", "tcp"),
        (&[false, true], "tensor:2", "shm"),
        (&[false, true, false, false], "pipeline:2,tensor:2", "auto"),
        (&[true, false, false, true], "pipeline:2,tensor:2", "tcp"),
    ] {
        let hosts = Hosts::new(has_files);
        let (tokens, said) = hosts.tokens(&["--plan", plan, "--transport", transport]);
        assert_eq!(tokens, expected, "{has_files:?} {plan} {transport}");
        let without = has_files.iter().filter(|has_files| !**has_files).count();
        assert_eq!(said.matches("llama is not on this machine").count(), without, "{said}");
        for (host, _) in has_files.iter().enumerate().filter(|(_, has_files)| !**has_files) {
            assert_eq!(fs::read_dir(hosts.weights(host)).unwrap().count(), 0, "nothing is kept unasked");
        }
    }
}

/// How many bytes came and how many had been kept, as the run says it.
fn traffic(said: &str) -> (String, String) {
    let line = said.lines().find(|line| line.contains("is not on this machine")).unwrap_or_else(|| panic!("{said}"));
    let (_, rest) = line.split_once("machine: ").unwrap();
    let (fetched, rest) = rest.split_once(" came from other ranks, ").unwrap();
    (fetched.to_owned(), rest.trim_end_matches(" had been kept").to_owned())
}

#[test]
fn what_is_kept_serves_later_runs() {
    let hosts = Hosts::new(&[true, false]);
    let keep = hosts.keep();
    let run = |plan: &str| hosts.tokens(&["--plan", plan, "--keep", keep.to_str().unwrap()]);
    let (first, said) = run("pipeline:2");
    assert_eq!(traffic(&said).1, "0 bytes");
    let (second, said) = run("pipeline:2");
    assert_eq!((traffic(&said).0.as_str(), &second), ("0 bytes", &first));
    // Another plan takes what it can use of it, and completes it.
    let (third, said) = run("tensor:2");
    assert!(traffic(&said).0 != "0 bytes" && traffic(&said).1 != "0 bytes", "{said}");
    assert_eq!((traffic(&run("tensor:2").1).0.as_str(), &third), ("0 bytes", &first));
}

#[test]
fn a_transfer_that_breaks_off_ends_the_run_and_goes_on_in_the_next() {
    let hosts = Hosts::new(&[true, false]);
    let keep = hosts.keep();
    let flags = ["--plan", "pipeline:2", "--keep", keep.to_str().unwrap()];
    let slow = ["--emulate-link", "bandwidth=100kbit"];
    let child = hosts.command(&[&flags[..], &slow].concat()).spawn().unwrap();
    eventually("both ranks start", Duration::from_secs(30), || children(&child).len() == 2);
    let some_lines = |directory: &Path| {
        let logs = fs::read_dir(directory).into_iter().flatten().flatten();
        logs.map(|entry| fs::read_to_string(entry.path().join("consort-kept.jsonl")).unwrap_or_default())
            .any(|log| log.lines().count() >= 5)
    };
    eventually("something arrives", Duration::from_secs(30), || some_lines(&keep));
    signal("KILL", children(&child)[0]);
    let finished: Finished = child.wait_with_output().unwrap().into();
    assert!(finished.stderr.contains("error: rank 0 (localhost) was killed by signal 9"), "{finished:?}");
    let (tokens, said) = hosts.tokens(&flags);
    assert_eq!(tokens, tokens_of_one_rank());
    let (fetched, kept) = traffic(&said);
    assert!(fetched != "0 bytes" && kept != "0 bytes", "{said}");
}

#[test]
fn a_model_that_nobody_has_is_refused_with_a_remedy() {
    let finished = Hosts::new(&[false, false]).run(&[]);
    assert_eq!(finished.code, Some(1), "{finished:?}");
    assert!(finished.stderr.contains("none of the 2 ranks has llama; put it on one of the machines"), "{finished:?}");
}

#[test]
fn files_that_differ_are_refused_by_name() {
    let change = |text: &str, from: &str, to: &str| {
        assert!(text.contains(from), "{text}");
        text.replacen(from, to, 1)
    };
    let changes: [(&str, &dyn Fn(&str) -> String); 3] = [
        ("config.json", &|text| change(text, "\"rope_theta\": 10000", "\"rope_theta\": 50000")),
        ("tokenizer.json", &|_| "[]".to_owned()),
        ("chat_template.jinja", &|_| "{{ messages }}, formerly".to_owned()),
    ];
    for (name, change) in changes {
        let hosts = Hosts::new(&[true, true]);
        let text = fs::read_to_string(hosts.file(1, name)).unwrap();
        fs::write(hosts.file(1, name), change(&text)).unwrap();
        let finished = hosts.run(&[]);
        assert!(matches!(finished.code, Some(1..)), "{name}: {finished:?}");
        let expected = format!("ranks disagree on model file {name}: rank 0 (localhost) has ");
        assert!(finished.stderr.contains(&expected), "{finished:?}");
        assert!(finished.stderr.contains(", rank 1 (localhost) has "), "{finished:?}");
    }
    // Of three ranks the one without files takes no side.
    let hosts = Hosts::new(&[false, true, true]);
    fs::write(hosts.file(2, "tokenizer.json"), "[]").unwrap();
    let said = hosts.run(&["--plan", "tensor:3"]).stderr;
    assert!(said.contains("model file tokenizer.json: rank 1 (localhost) has "), "{said}");
}

#[test]
fn one_flipped_byte_of_a_weight_is_found_when_contents_are_compared() {
    let hosts = Hosts::new(&[true, true]);
    let path = hosts.file(1, "model.safetensors");
    let mut content = fs::read(&path).unwrap();
    let at = content.len() - 1000;
    content[at] ^= 1;
    fs::write(&path, content).unwrap();
    assert_eq!(hosts.run(&[]).code, Some(0));
    let finished = hosts.run(&["--verify"]);
    assert!(finished.stderr.contains("ranks disagree on model file model.safetensors: rank 0"), "{finished:?}");
    let hosts = Hosts::new(&[true, false]);
    assert_eq!(hosts.tokens(&["--verify"]).0, tokens_of_one_rank());
}

/// What a file browser or a copied configuration leaves is no model, and what is not read may differ.
#[test]
fn only_weights_make_a_model_and_only_what_is_read_must_agree() {
    let hosts = Hosts::new(&[true, false]);
    fs::create_dir(hosts.weights(1).join("llama")).unwrap();
    for name in [".DS_Store", "README.md", "config.json", "tokenizer.json"] {
        fs::write(hosts.file(1, name), "{}").unwrap();
    }
    let (tokens, said) = hosts.tokens(&["--plan", "pipeline:2"]);
    assert_eq!(tokens, tokens_of_one_rank());
    assert!(said.contains("llama is not on this machine"), "{said}");
    let hosts = Hosts::new(&[true, true]);
    for name in ["preprocessor_config.json", "vocab.json", "LICENSE.txt"] {
        fs::write(hosts.file(1, name), "{}").unwrap();
    }
    assert_eq!(hosts.tokens(&[]).0, tokens_of_one_rank());
}

/// The directory of a rank that was killed goes when the next one starts, and that of a living one stays.
#[test]
fn what_a_killed_rank_left_is_removed_by_the_next() {
    let hosts = Hosts::new(&[true, false]);
    let passing = tempfile::tempdir().unwrap();
    let command = |flags: &[&str]| {
        let mut command = hosts.command(flags);
        command.env("TMPDIR", passing.path());
        command
    };
    let directories = || {
        let names = fs::read_dir(passing.path()).unwrap().map(|it| it.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.ends_with(".consort-files")).collect::<Vec<_>>()
    };
    // For minutes, if it is let.
    let slow = ["--plan", "pipeline:2", "--emulate-link", "bandwidth=10kbit"];
    let child = command(&slow).spawn().unwrap();
    eventually("a directory for the files", Duration::from_secs(30), || directories().len() == 1);
    let first = directories();
    // Beside a living one.
    let finished: Finished = command(&["--plan", "pipeline:2"]).output().unwrap().into();
    assert_eq!((finished.code, directories()), (Some(0), first.clone()), "{finished:?}");
    // It alone: a rank that sees another die has the time to tidy up.
    signal("KILL", children(&child)[1]);
    child.wait_with_output().unwrap();
    assert_eq!(directories(), first, "nobody could remove it");
    let finished: Finished = command(&["--plan", "pipeline:2"]).output().unwrap().into();
    assert_eq!((finished.code, directories()), (Some(0), Vec::new()), "{finished:?}");
}

/// A bit of the weights changes between two ranks: the one that asked for them says in which file and who sent it.
#[test]
fn a_flipped_bit_on_the_way_ends_the_run() {
    for transport in ["shm", "tcp"] {
        let hosts = Hosts::new(&[true, false]);
        let flip = ["--plan", "pipeline:2", "--transport", transport, "--emulate-link", "flip=70000"];
        let finished = hosts.run(&flip);
        assert!(matches!(finished.code, Some(1..)), "{finished:?}");
        let expected = "model.safetensors: what rank 0 (localhost) sent is damaged: ";
        assert!(finished.stderr.contains(expected), "{transport}: {finished:?}");
        assert!(finished.stderr.contains("changed on their way (SHA-256 differs)"), "{transport}: {finished:?}");
        // None of it is kept.
        let keep = hosts.keep();
        let with_keep = [&flip[..], &["--keep", keep.to_str().unwrap()]].concat();
        assert!(matches!(hosts.run(&with_keep).code, Some(1..)));
        let (tokens, said) = hosts.tokens(&["--plan", "pipeline:2", "--keep", keep.to_str().unwrap()]);
        assert_eq!(tokens, tokens_of_one_rank(), "{said}");
    }
}

/// A file of the hub's cache is compared with the hash that it was published under.
#[test]
fn damage_since_the_download_is_found() {
    use sha2::{Digest, Sha256};

    let repository = tempfile::tempdir().unwrap();
    let (snapshot, blobs) = (repository.path().join("snapshots/abc"), repository.path().join("blobs"));
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(&blobs).unwrap();
    fs::copy(fixture("llama").join("config.json"), snapshot.join("config.json")).unwrap();
    let mut content = fs::read(fixture("llama").join("model.safetensors")).unwrap();
    let hash: String = Sha256::digest(&content).iter().map(|byte| format!("{byte:02x}")).collect();
    std::os::unix::fs::symlink(format!("../../blobs/{hash}"), snapshot.join("model.safetensors")).unwrap();
    fs::write(blobs.join(&hash), &content).unwrap();
    let arguments = ["generate", "-m", snapshot.to_str().unwrap(), "--tokens", "5", "--max-tokens", "1"];
    assert_eq!(support::run(&[&arguments[..], &["--verify"]].concat()).code, Some(0));
    let last = content.len() - 1;
    content[last] ^= 1;
    fs::write(blobs.join(&hash), &content).unwrap();
    assert_eq!(support::run(&arguments).code, Some(0), "unless asked, nobody reads it all");
    support::refused(&[&arguments[..], &["--verify"]].concat(), "delete it and pull the model again");
}
