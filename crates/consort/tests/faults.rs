//! Ranks that die, fall silent or are told to end, while they work: the command ends soon, says which rank it was, and leaves
//! nothing behind.

mod support;

use std::process::Child;
use std::time::{Duration, Instant};

use support::{
    Finished, children, consort, eventually, fixture, has_ended, no_more_shared_memory, shared_memory, signal,
};

/// The promise is two seconds; the rest is for a busy machine. Only what hangs takes longer: a rank that dies must be noticed
/// by other means than its silence, for which [`PATIENT`] ranks wait longer.
const DEADLINE: Duration = Duration::from_secs(30);
const PATIENT: [&str; 2] = ["--hang-timeout", "120"];
const START: Duration = Duration::from_secs(30);

/// A run that generates for longer than any test lasts, and the process ids of its ranks.
fn endless(plan: &str, ranks: usize, more: &[&str]) -> (Child, Vec<u32>) {
    let directory = fixture("llama");
    let bench = ["bench", "-m", directory.to_str().unwrap(), "--plan", plan, "--repetitions", "4000000000"];
    let lengths = ["--prompt-tokens", "64", "--generation-tokens", "256"];
    let child = consort(&[&bench[..], &lengths, more].concat()).spawn().unwrap();
    eventually("all ranks start", START, || children(&child).len() == ranks);
    let pids = children(&child);
    // The model is tiny: by then they have loaded it and generate.
    std::thread::sleep(Duration::from_millis(700));
    (child, pids)
}

/// Waits for the end, which must come soon and leave nothing.
fn finish(child: Child, pids: &[u32], segments_before: &[String]) -> Finished {
    let started = Instant::now();
    let finished: Finished = child.wait_with_output().unwrap().into();
    assert!(started.elapsed() < DEADLINE, "took {:?}: {finished:?}", started.elapsed());
    for &pid in pids {
        eventually("every rank ends", DEADLINE, || has_ended(pid));
    }
    no_more_shared_memory(segments_before);
    finished
}

#[test]
fn a_killed_rank_is_named_and_nothing_is_left() {
    for (plan, transport) in [("tensor:2", "shm"), ("tensor:2", "tcp"), ("pipeline:2", "shm"), ("pipeline:2", "tcp")] {
        for victim in [0, 1] {
            let before = shared_memory();
            let (child, pids) = endless(plan, 2, &[&PATIENT[..], &["--transport", transport]].concat());
            signal("KILL", pids[victim]);
            let finished = finish(child, &pids, &before);
            let expected = format!("error: rank {victim} (localhost) was killed by signal 9 (SIGKILL)");
            assert!(finished.stderr.contains(&expected), "{plan} {transport}: {finished:?}");
            assert_eq!(finished.code, Some(137), "{finished:?}");
            assert_eq!(finished.stderr.matches("error: ").count(), 1, "the others are witnesses: {finished:?}");
        }
    }
}

#[test]
fn a_rank_that_is_killed_while_the_others_gather_or_load_is_named_and_a_new_run_needs_no_cleaning() {
    for wait_ms in [0, 15, 60] {
        let before = shared_memory();
        let directory = fixture("llama");
        let generate = ["generate", "-m", directory.to_str().unwrap(), "--tokens", "1,2", "--plan", "tensor:3"];
        let long = ["--max-tokens", "500", "--ignore-eos", "--emulate-link", "latency=5ms"];
        let child = consort(&[&generate[..], &long, &PATIENT].concat()).spawn().unwrap();
        eventually("all ranks start", START, || children(&child).len() == 3);
        let pids = children(&child);
        std::thread::sleep(Duration::from_millis(wait_ms));
        signal("KILL", pids[1]);
        let finished = finish(child, &pids, &before);
        assert!(finished.stderr.contains("error: rank 1 (localhost) was killed by signal 9"), "{finished:?}");
        assert_eq!(finished.code, Some(137), "{finished:?}");
    }
}

#[test]
fn one_of_four_is_named() {
    let before = shared_memory();
    let (child, pids) = endless("pipeline:2,tensor:2", 4, &PATIENT);
    signal("KILL", pids[2]);
    let finished = finish(child, &pids, &before);
    assert!(finished.stderr.contains("error: rank 2 (localhost) was killed by signal 9"), "{finished:?}");
}

#[test]
fn an_interrupt_ends_all_ranks() {
    for (name, code) in [("INT", 130), ("TERM", 143)] {
        let before = shared_memory();
        let (child, pids) = endless("tensor:2", 2, &PATIENT);
        signal(name, child.id());
        let finished = finish(child, &pids, &before);
        assert_eq!(finished.code, Some(code), "{finished:?}");
    }
}

#[test]
fn ranks_do_not_outlive_a_killed_launcher() {
    let before = shared_memory();
    let (child, pids) = endless("tensor:2", 2, &PATIENT);
    signal("KILL", child.id());
    finish(child, &pids, &before);
}

#[test]
fn a_silent_rank_is_noticed_after_the_hang_timeout() {
    let before = shared_memory();
    let (child, pids) = endless("tensor:2", 2, &["--hang-timeout", "2"]);
    signal("STOP", pids[1]);
    let finished = finish(child, &pids, &before);
    assert!(finished.stderr.contains("rank 1 (localhost) was lost"), "{finished:?}");
    assert!(matches!(finished.code, Some(1..)), "{finished:?}");
}
