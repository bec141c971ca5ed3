//! Runs that go on after they have lost a rank: what they say is what an undisturbed run says.

mod support;

use std::io::{BufRead, BufReader, Read};
use std::process::Child;
use std::time::Duration;

use serde_json::json;
use support::{
    Finished, children, consort, eventually, expected, fixture, has_ended, ids, no_more_shared_memory, run,
    shared_memory, signal, try_signal,
};

const START: Duration = Duration::from_secs(30);

/// When the fault comes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Moment {
    /// While the prompt runs, chunk by chunk.
    Prefill,
    /// When the answer has begun.
    Decode,
}

/// The tokens of an answer that is waited for, and of one that takes longer than anything that a test does meanwhile.
const SHORT: usize = 24;
const LONG: usize = 400;

/// A run of which prompt and short answer take about a second each: its links are slow. Random numbers are part of it, so that these
/// are tested too.
fn arguments(plan: &str, tokens: usize) -> Vec<String> {
    // The chunks of a prompt overlap in a pipeline unless they are slow to send.
    let link = if plan.starts_with("tensor") { "latency=3ms" } else { "latency=20ms,bandwidth=200kbit" };
    let words = format!(
        "--max-tokens {tokens} --ignore-eos --chunk 2 --temperature 1 --seed 7 --threads 1 --emulate-link {link}"
    );
    let (model, prompt) = (fixture("llama"), ids(&expected("llama")["prompt"]));
    let first = ["generate", "-m", model.to_str().unwrap(), "--tokens", &prompt, "--plan", plan];
    first.into_iter().chain(words.split(' ')).map(str::to_owned).collect()
}

fn start(plan: &str, tokens: usize, more: &[&str]) -> Child {
    let arguments = arguments(plan, tokens);
    let words: Vec<&str> = arguments.iter().map(String::as_str).chain(more.iter().copied()).collect();
    consort(&words).spawn().unwrap()
}

/// Waits for the moment and kills a rank. What was read to know the moment is returned.
fn strike(child: &mut Child, ranks: usize, victim: usize, moment: Moment) -> String {
    eventually("all ranks live", START, || children(child).len() == ranks);
    let pids = children(child);
    let mut seen = String::new();
    match moment {
        // The conditions are told when the model is loaded; what follows is the prompt.
        Moment::Prefill => {
            let mut stderr = BufReader::new(child.stderr.as_mut().unwrap());
            while !seen.contains("consort 0.") {
                assert!(stderr.read_line(&mut seen).unwrap() > 0, "{seen}");
            }
        }
        Moment::Decode => {
            let mut bytes = [0; 12];
            child.stdout.as_mut().unwrap().read_exact(&mut bytes).unwrap();
            seen = String::from_utf8(bytes.to_vec()).unwrap();
        }
    }
    // It may have done its work meanwhile.
    try_signal("KILL", pids[victim]);
    eventually("the rank has ended", START, || has_ended(pids[victim]));
    seen
}

/// A run that is struck in a moment, and then goes on to the end of the answer. Others may use the machine, so that a strike comes too
/// late for its moment: that changes no answer either, but is tried again.
fn struck(plan: &str, ranks: usize, victim: usize, moment: Moment, more: &[&str], answer: &str) -> Finished {
    let attempt = || {
        let mut child = start(plan, SHORT, more);
        let seen = strike(&mut child, ranks, victim, moment);
        let finished = finish(child, moment, &seen);
        let what = format!("{plan}, rank {victim} in {moment:?}: {finished:?}");
        assert_eq!((finished.code, finished.stdout.as_str()), (Some(0), answer), "{what}");
        let replayed = finished.stderr.split_once(" tokens to replay").map(|(before, _)| before.ends_with(" 0"));
        (replayed == Some(moment == Moment::Prefill)).then_some(finished)
    };
    (0..20).find_map(|_| attempt()).unwrap_or_else(|| panic!("{plan}, rank {victim}: never struck in {moment:?}"))
}

fn undisturbed(plan: &str) -> String {
    let arguments = arguments(plan, SHORT);
    let finished = run(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(finished.code, Some(0), "{finished:?}");
    assert_eq!(finished.stdout.split_whitespace().count(), SHORT);
    finished.stdout
}

/// Standard output and error, with what was read before.
fn finish(child: Child, moment: Moment, seen: &str) -> Finished {
    let mut finished: Finished = child.wait_with_output().unwrap().into();
    match moment {
        Moment::Prefill => finished.stderr.insert_str(0, seen),
        Moment::Decode => finished.stdout.insert_str(0, seen),
    }
    finished
}

#[test]
fn after_a_loss_the_answer_goes_on_where_it_was() {
    for plan in ["tensor:2", "pipeline:2"] {
        let answer = undisturbed(plan);
        for (victim, moment) in [(0, Moment::Prefill), (1, Moment::Prefill), (0, Moment::Decode), (1, Moment::Decode)] {
            let before = shared_memory();
            let finished = struck(plan, 2, victim, moment, &["--restart", "1"], &answer);
            assert!(finished.stderr.contains("all ranks are started again (start 2 of 2"), "{finished:?}");
            let told = finished.stderr.contains(" that were replayed: first token after ");
            assert_eq!(told, moment == Moment::Decode, "{finished:?}");
            no_more_shared_memory(&before);
        }
    }
}

#[test]
fn one_rank_alone_can_be_started_again_too() {
    // Without links a tiny model is done soon: a long answer, any moment will do, and if it was too late another try.
    let (model, prompt) = (fixture("llama"), ids(&expected("llama")["prompt"]));
    let words = ["generate", "-m", model.to_str().unwrap(), "--tokens", &prompt, "--max-tokens", "470", "--ignore-eos"];
    let sampled = ["--temperature", "1", "--chunk", "1", "--threads", "1"];
    let answer = run(&[&words[..], &sampled].concat()).stdout;
    let was_struck = || {
        let child = consort(&[&words[..], &sampled, &["--restart", "1"]].concat()).spawn().unwrap();
        eventually("it starts", START, || !children(&child).is_empty() || has_ended(child.id()));
        for pid in children(&child) {
            try_signal("KILL", pid);
        }
        let finished: Finished = child.wait_with_output().unwrap().into();
        assert_eq!((finished.code, &finished.stdout), (Some(0), &answer), "{finished:?}");
        finished.stderr.contains("start 2 of 2")
    };
    assert!((0..20).any(|_| was_struck()), "it was never started again");
}

#[test]
fn when_no_start_is_left_the_error_is_the_usual_one() {
    let mut child = start("tensor:2", LONG, &["--restart", "1"]);
    eventually("all ranks live", START, || children(&child).len() == 2);
    let first = children(&child);
    strike(&mut child, 2, 1, Moment::Decode);
    // The second start says nothing new for a while: wait for its ranks.
    eventually("it is started again", START, || {
        let second = children(&child);
        second.len() == 2 && second.iter().all(|pid| !first.contains(pid))
    });
    signal("KILL", children(&child)[0]);
    let finished: Finished = child.wait_with_output().unwrap().into();
    assert_eq!(finished.code, Some(137), "{finished:?}");
    let error = finished.stderr.lines().last().unwrap();
    assert!(error.starts_with("error: rank 0 (localhost) was killed by signal 9 (SIGKILL)"), "{finished:?}");
}

#[test]
fn a_run_goes_on_with_the_ranks_that_are_left() {
    // A pipeline gives the bits of one rank however many stages it has.
    let answer = undisturbed("pipeline:3");
    let finished = struck("pipeline:3", 3, 1, Moment::Decode, &["--replan"], &answer);
    assert!(finished.stderr.contains("going on with --plan pipeline:2 --ranks 2 (start 2 of 3"), "{finished:?}");
}

#[test]
fn what_does_not_fit_on_what_is_left_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let hosts = directory.path().join("hosts.json");
    let host = |name: &str| json!({"ssh": name, "memory": "200kB"});
    std::fs::write(&hosts, json!([host("localhost"), host("127.0.0.1")]).to_string()).unwrap();
    let mut words = vec!["launch".to_owned(), "--hostfile".to_owned(), hosts.display().to_string(), "--".to_owned()];
    words.extend(arguments("pipeline:2", LONG).into_iter().chain(["--replan".to_owned()]));
    let mut child = consort(&words.iter().map(String::as_str).collect::<Vec<_>>()).spawn().unwrap();
    strike(&mut child, 2, 1, Moment::Decode);
    let finished: Finished = child.wait_with_output().unwrap().into();
    let error = finished.stderr.lines().last().unwrap();
    assert!(error.contains("rank 1 (127.0.0.1) was killed by signal 9"), "{finished:?}");
    assert!(
        error.contains(
            "cannot go on with what is left: tensor:1 takes 246.2 kB of weights on localhost, which has 200.0 kB"
        ),
        "{error}"
    );
    assert_eq!(finished.code, Some(137));
}
