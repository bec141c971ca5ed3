//! Ranks that another launcher starts, told who they are in its own way, and what they do when they differ.

mod support;

use std::io::Write;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use consort_fabric::ReservedPort;
use serde_json::{Value, json};
use support::{Finished, consort, expected, fixture, ids};

/// A port that nobody else gets while the test runs.
fn reserved() -> ReservedPort {
    ReservedPort::of([127, 0, 0, 1].into()).unwrap()
}

/// One rank of a generation by a model, with the variables of its launcher.
fn start(model: &Path, variables: &[(&str, String)], more: &[&str]) -> Child {
    let prompt = ids(&expected("llama")["prompt"]);
    let generate =
        ["generate", "-m", model.to_str().unwrap(), "--tokens", &prompt, "--ignore-eos", "--max-tokens", "8"];
    let exact = ["--activations", "exact", "--kv-format", "f32", "--threads", "1", "--json"];
    let mut command = consort(&[&generate[..], &exact, more].concat());
    command.envs(variables.iter().map(|(name, value)| (*name, value.as_str())));
    command.spawn().unwrap()
}

fn end(child: Child) -> Finished {
    child.wait_with_output().unwrap().into()
}

/// The variables of `mpirun` for one of two ranks of a run.
fn open_mpi(rank: usize, job: &str) -> Vec<(&'static str, String)> {
    let rank = rank.to_string();
    vec![
        ("OMPI_COMM_WORLD_RANK", rank.clone()),
        ("OMPI_COMM_WORLD_SIZE", "2".to_owned()),
        ("OMPI_COMM_WORLD_LOCAL_RANK", rank),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2".to_owned()),
        ("PMIX_NAMESPACE", job.to_owned()),
    ]
}

/// A job's name that no other test has.
fn job() -> String {
    static JOBS: AtomicUsize = AtomicUsize::new(0);
    format!("{}-{}", std::process::id(), JOBS.fetch_add(1, Ordering::Relaxed))
}

#[test]
fn ranks_of_other_launchers_find_each_other_and_answer() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, value: &Value| {
        let path = directory.path().join(name);
        std::fs::write(&path, value.to_string()).unwrap();
        path.display().to_string()
    };
    let ports = [reserved(), reserved(), reserved()];
    let [first, second, coordinator] = ports.each_ref().map(|port| port.address().to_string());
    let ring = write("ring.json", &json!([[first], [second]]));
    let devices = write("devices.json", &json!([[null, "rdma_en5"], ["rdma_en5", null]]));
    let job = job();
    let mlx_ring = |rank: usize| vec![("MLX_RANK", rank.to_string()), ("MLX_HOSTFILE", ring.clone())];
    let jaccl = |rank: usize| {
        let rank = rank.to_string();
        vec![("MLX_RANK", rank), ("MLX_IBV_DEVICES", devices.clone()), ("MLX_JACCL_COORDINATOR", coordinator.clone())]
    };
    let slurm = |rank: usize| {
        let rank = rank.to_string();
        vec![
            ("SLURM_PROCID", rank.clone()),
            ("SLURM_STEP_NUM_TASKS", "2".to_owned()),
            ("SLURM_LOCALID", rank),
            ("SLURM_STEP_TASKS_PER_NODE", "2".to_owned()),
            ("SLURM_JOB_ID", job.clone()),
        ]
    };
    let mpi = |rank: usize| open_mpi(rank, &job);
    let reference = &expected("llama")["continuation"];
    let launchers: [(&str, &dyn Fn(usize) -> Vec<(&'static str, String)>); 4] =
        [("mlx ring", &mlx_ring), ("jaccl", &jaccl), ("slurm", &slurm), ("mpi", &mpi)];
    for (name, variables) in launchers {
        let ranks: Vec<Child> = (0..2).map(|rank| start(&fixture("llama"), &variables(rank), &[])).collect();
        let finished: Vec<Finished> = ranks.into_iter().map(end).collect();
        assert!(finished.iter().all(|finished| finished.code == Some(0)), "{name}: {finished:?}");
        let answer: Value = serde_json::from_str(&finished[0].stdout).unwrap();
        assert_eq!(answer["conditions"]["ranks"], 2, "{name}");
        assert_eq!(answer["tokens"].as_array().unwrap()[..], reference.as_array().unwrap()[..8], "{name}");
        assert_eq!(finished[1].stdout, "", "{name}: rank 0 answers");
    }
}

#[test]
fn a_rank_says_whom_it_waits_for_and_then_who_never_came() {
    let port = reserved();
    let address = port.address().to_string();
    let variables = |rank: usize| [open_mpi(rank, &job()), vec![("CONSORT_RENDEZVOUS", address.clone())]].concat();
    // Each alone, one after the other.
    let finished = end(start(&fixture("llama"), &variables(1), &["--connect-timeout", "8"]));
    let waiting = format!("still waiting for rank 0 at {address}: Connection refused");
    assert!(finished.stderr.contains(&waiting), "{finished:?}");
    assert!(finished.stderr.contains(&format!("error: cannot reach rank 0 at {address} within 8 s")), "{finished:?}");
    let finished = end(start(&fixture("llama"), &variables(0), &["--connect-timeout", "8"]));
    assert!(finished.stderr.contains(&format!("still waiting for rank 1 to come to {address}")), "{finished:?}");
    assert!(
        finished.stderr.contains(&format!("error: 1 of 2 ranks came to {address} within 8 s; missing: [1]")),
        "{finished:?}"
    );
}

/// Two ranks that differ: rank 0 must say in what, and who has which value.
fn disagree(models: [&Path; 2], variables: [&[(&'static str, String)]; 2], more: [&[&str]; 2], expected: &str) {
    let (job, port) = (job(), reserved());
    let meet = [("CONSORT_RENDEZVOUS", port.address().to_string())];
    let start =
        |rank: usize| start(models[rank], &[&open_mpi(rank, &job), variables[rank], &meet].concat(), more[rank]);
    for finished in [start(0), start(1)].map(end) {
        assert!(finished.stderr.contains("ranks disagree on "), "{finished:?}");
        assert!(finished.stderr.contains(expected), "{expected}: {finished:?}");
        assert!(finished.stderr.contains("rank 0 (") && finished.stderr.contains("rank 1 ("), "{finished:?}");
        assert!(matches!(finished.code, Some(1..)), "{finished:?}");
    }
}

#[test]
fn what_differs_between_ranks_has_a_name() {
    let llama = fixture("llama");
    let only_here = [("CONSORT_ISA", "portable".to_owned())];
    disagree([&llama; 2], [&[], &only_here], [&[]; 2], "environment variable CONSORT_ISA: ");
    disagree([&llama; 2], [&only_here, &[]], [&[]; 2], "has portable, rank 1 (");
    disagree([&llama; 2], [&[], &[]], [&["--plan", "tensor:2"], &["--plan", "pipeline:2"]], "plan: ");
    disagree([&llama; 2], [&[], &[]], [&["--transport", "tcp"], &["--transport", "auto"]], "transport: ");
    disagree([&llama; 2], [&[], &[]], [&["--context", "100"], &["--context", "101"]], "context: ");
}

#[test]
fn model_files_that_differ_are_named() {
    let llama = fixture("llama");
    let copy = |change: &dyn Fn(&Path)| {
        let directory = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(&llama).unwrap().map(Result::unwrap) {
            std::fs::copy(entry.path(), directory.path().join(entry.file_name())).unwrap();
        }
        change(directory.path());
        directory
    };
    let replace = |file: &'static str, from: &'static str, to: &'static str| {
        move |directory: &Path| {
            let text = std::fs::read_to_string(directory.join(file)).unwrap();
            assert!(text.contains(from));
            std::fs::write(directory.join(file), text.replace(from, to)).unwrap();
        }
    };
    let changes: [(&str, &dyn Fn(&Path)); 4] = [
        ("model file config.json", &replace("config.json", "\"rms_norm_eps\": 1e-06", "\"rms_norm_eps\": 1e-05")),
        ("model file tokenizer.json", &|directory| std::fs::write(directory.join("tokenizer.json"), "{}").unwrap()),
        ("model file chat_template.jinja", &|directory| {
            std::fs::write(directory.join("chat_template.jinja"), "{{ messages }}").unwrap();
        }),
        // Another name of a tensor's metadata: the header differs, and every tensor is still there.
        ("model file model.safetensors", &|directory| {
            let path = directory.join("model.safetensors");
            let mut bytes = std::fs::read(&path).unwrap();
            let header_bytes = u64::from_le_bytes(bytes[..8].try_into().unwrap());
            bytes[..8].copy_from_slice(&(header_bytes + 1).to_le_bytes());
            bytes.insert(8 + header_bytes as usize, b' ');
            std::fs::write(&path, bytes).unwrap();
        }),
    ];
    for (name, change) in changes {
        let other = copy(change);
        disagree([&llama, other.path()], [&[]; 2], [&[]; 2], &format!("{name}: "));
    }
    // A model that nobody has is told by all.
    let (nowhere, job, port) = (Path::new("/nowhere/model"), job(), reserved());
    let meet = vec![("CONSORT_RENDEZVOUS", port.address().to_string())];
    let start = |rank: usize| start(nowhere, &[open_mpi(rank, &job), meet.clone()].concat(), &[]);
    for finished in [start(0), start(1)].map(end) {
        assert!(finished.stderr.contains("none of the 2 ranks has /nowhere/model"), "{finished:?}");
    }
}

#[test]
fn launch_inside_of_another_launcher_is_refused() {
    let mut command = consort(&["launch", "--hostfile", "hosts.json", "--", "generate", "-m", "x", "-p", "y"]);
    command.envs(open_mpi(1, "x").iter().map(|(name, value)| (*name, value.as_str())));
    let finished: Finished = command.output().unwrap().into();
    assert!(
        finished.stderr.contains("another launcher started this as rank 1 of 2: leave out `launch"),
        "{finished:?}"
    );
    assert_eq!(finished.code, Some(1));
}

#[test]
fn a_remote_rank_that_hears_nothing_of_its_launcher_ends() {
    // It looks for a rank 0 that never comes, for as long as its launcher lives; the channel stays open, as it does where a cable
    // was pulled.
    let port = reserved();
    let address = port.address().to_string();
    let variables = ["RANK=1", "SIZE=2", "LOCAL_RANK=0", "LOCAL_SIZE=1", "RUN_ID=x", "HOST=m2", "ADDRESSES="];
    let mut command =
        consort(&["generate", "-m", fixture("llama").to_str().unwrap(), "--tokens", "1", "--plan", "pipeline:2"]);
    for variable in variables {
        let (name, value) = variable.split_once('=').unwrap();
        command.env(format!("CONSORT_{name}"), value);
    }
    command.env("CONSORT_RENDEZVOUS", address).env("CONSORT_CONTROL", "stdin+heartbeats").stdin(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut control = child.stdin.take().unwrap();
    for _ in 0..3 {
        std::thread::sleep(Duration::from_secs(1));
        control.write_all(b"~\n").unwrap();
    }
    assert!(child.try_wait().unwrap().is_none(), "it lives as long as its launcher does");
    let silent_since = Instant::now();
    assert_eq!(child.wait().unwrap().code(), Some(129));
    assert!(silent_since.elapsed() > Duration::from_secs(8), "{:?}", silent_since.elapsed());
    drop(control);
}
