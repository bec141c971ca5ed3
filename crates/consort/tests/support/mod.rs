//! Drives the built program, on the reference's small checkpoints.

// Every test file is a crate of its own and uses its own part of this module.
#![allow(dead_code)]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// The reference's checkpoint with a name.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../oracle/fixtures").join(name)
}

/// What the reference says of a checkpoint.
pub fn expected(name: &str) -> Value {
    let text = std::fs::read_to_string(fixture(name).join("expected.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// A list of token ids as `--tokens` takes it.
pub fn ids(list: &Value) -> String {
    list.as_array().unwrap().iter().map(Value::to_string).collect::<Vec<_>>().join(",")
}

/// The program with some arguments.
pub fn consort(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_consort"));
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// A program that ran to its end.
#[derive(Debug)]
pub struct Finished {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl From<Output> for Finished {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

/// Runs the program to its end.
pub fn run(arguments: &[&str]) -> Finished {
    consort(arguments).output().unwrap().into()
}

/// Runs the program, which must succeed, and returns the object that it printed.
pub fn run_json(arguments: &[&str]) -> Value {
    let finished = run(&[arguments, &["--json"]].concat());
    assert_eq!(finished.code, Some(0), "{arguments:?}: {finished:?}");
    serde_json::from_str(&finished.stdout).unwrap()
}

/// Runs the program, which must refuse with one clear line that contains `expected`, and print nothing else.
pub fn refused(arguments: &[&str], expected: &str) {
    let finished = run(arguments);
    assert!(matches!(finished.code, Some(1..)), "{arguments:?}: {finished:?}");
    assert_eq!(finished.stdout, "", "{arguments:?}");
    assert_eq!(finished.stderr.lines().count(), 1, "{arguments:?} said:\n{}", finished.stderr);
    assert!(finished.stderr.starts_with("error: "), "{arguments:?} said: {}", finished.stderr);
    assert!(finished.stderr.contains(expected), "{arguments:?} said: {}\n  expected: {expected}", finished.stderr);
}

/// Waits for a condition.
pub fn eventually(what: &str, deadline: Duration, condition: impl Fn() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < deadline, "{what}: not within {deadline:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Sends a signal to a process.
pub fn signal(name: &str, pid: u32) {
    assert!(try_signal(name, pid), "no process {pid}");
}

/// Sends a signal to a process, and says whether there is one with this number.
pub fn try_signal(name: &str, pid: u32) -> bool {
    Command::new("kill").args(["-s", name, &pid.to_string()]).stderr(Stdio::null()).status().unwrap().success()
}

/// Whether a process has ended. One that nobody has waited for yet still has a number.
pub fn has_ended(pid: u32) -> bool {
    let output = Command::new("ps").args(["-o", "stat=", "-p", &pid.to_string()]).output().unwrap();
    let state = String::from_utf8(output.stdout).unwrap();
    state.trim().is_empty() || state.starts_with('Z')
}

/// The processes that `parent` started, in the order of their start.
pub fn children(parent: &Child) -> Vec<u32> {
    let output = Command::new("pgrep").args(["-P", &parent.id().to_string()]).output().unwrap();
    let mut pids: Vec<u32> =
        String::from_utf8(output.stdout).unwrap().split_whitespace().map(|pid| pid.parse().unwrap()).collect();
    pids.sort_unstable();
    pids
}

/// Waits until no more segments of shared memory are left than there were: those of tests that run beside this one go too.
pub fn no_more_shared_memory(before: &[String]) {
    eventually("nothing is left in shared memory", Duration::from_secs(30), || {
        shared_memory().iter().all(|name| before.contains(name))
    });
}

/// The names of the segments of shared memory on this machine.
pub fn shared_memory() -> Vec<String> {
    let Ok(entries) = std::fs::read_dir("/dev/shm") else { return Vec::new() };
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.retain(|name| name.contains("consort"));
    names.sort();
    names
}

/// The reference's logits of a checkpoint: one list per kept position.
pub fn expected_logits(name: &str, positions: usize) -> Vec<Vec<f32>> {
    let bytes = std::fs::read(fixture(name).join("expected.safetensors")).unwrap();
    let header_bytes = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + header_bytes]).unwrap();
    let offset = |i: usize| 8 + header_bytes + header["logits"]["data_offsets"][i].as_u64().unwrap() as usize;
    let (values, _) = bytes[offset(0)..offset(1)].as_chunks();
    let values: Vec<f32> = values.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    values.chunks_exact(values.len() / positions).map(<[f32]>::to_vec).collect()
}
