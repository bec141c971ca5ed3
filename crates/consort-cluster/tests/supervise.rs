//! Runs shell scripts as ranks, under a launcher in a process of its own, and injects the faults that a run must survive.

use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use consort_cluster::{Host, Hostfile, Input, Launch, Recovery, supervise};
use tempfile::TempDir;

/// Ranks end within two seconds; the rest is for a busy machine.
const DEADLINE: Duration = Duration::from_secs(20);

/// What the launcher process runs: a script for all ranks, which tells them apart by `$CONSORT_RANK`.
const SCRIPT: &str = "TEST_SCRIPT";
/// A directory for the test's files.
const DIRECTORY: &str = "TEST_DIRECTORY";
/// The `ssh` names of its hosts, comma-separated.
const HOSTS: &str = "TEST_HOSTS";
/// Whether it forwards its standard input.
const FORWARD: &str = "TEST_FORWARD_INPUT";
/// How often ranks are started again, and with how few ranks the run goes on without those that were lost.
const RESTARTS: &str = "TEST_RESTARTS";
const LEAST_RANKS: &str = "TEST_LEAST_RANKS";

/// Not a test of its own: the launcher process of the others, which start this executable again with a script.
#[test]
fn launcher() {
    let Ok(script) = std::env::var(SCRIPT) else { return };
    let hosts = std::env::var(HOSTS).unwrap();
    let ips = vec![Ipv4Addr::LOCALHOST.into()];
    let host = |ssh: &str| Host { ssh: ssh.to_owned(), ips: ips.clone(), slots: 1, ..Host::default() };
    let hosts: Vec<Host> = hosts.split(',').map(host).collect();
    let launch = Launch {
        program: PathBuf::from("sh"),
        arguments: vec!["-c".into(), script.into()],
        ranks: hosts.len(),
        hostfile: Hostfile { hosts, ..Hostfile::default() },
        port: Some(1),
        bind: None,
        environment: Vec::new(),
        key: None,
        hang_timeout: Duration::from_secs(1),
        recovers: false,
        terminal: false,
    };
    let input = if std::env::var(FORWARD).is_ok() { Input::ToRankZero } else { Input::Unused };
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let replan = |hosts: &Hostfile, ranks: usize| match number(LEAST_RANKS).is_some_and(|least: usize| ranks < least) {
        true => Err(format!("{ranks} ranks are too few")),
        false => Ok(vec!["with".into(), format!("{ranks}/{}", hosts.slots()).into()]),
    };
    let replans = std::env::var_os(LEAST_RANKS).is_some();
    let recovery =
        Recovery { restarts: number(RESTARTS).unwrap_or(0), replan: if replans { Some(&replan) } else { None } };
    match supervise(launch, input, recovery) {
        Ok(()) => std::process::exit(0),
        Err(error) => {
            eprintln!("launcher: {error}");
            std::process::exit(error.exit_code().into())
        }
    }
}

/// A launcher that runs `script` on `hosts`. Each rank's process id is in the file `pid.RANK` of the directory, whose name the script
/// has in `$TEST_DIRECTORY`. It can wait for a file there (`await NAME`) and for the start of all ranks (`all_started`).
struct Run {
    directory: TempDir,
    launcher: std::process::Child,
}

fn start_on(hosts: &str, script: &str, configure: impl FnOnce(&mut Command, &Path)) -> Run {
    let directory = tempfile::tempdir().unwrap();
    // Written aside and renamed, so that a file is never seen before it is complete.
    let script = [
        "note_pid() { echo $2 > $TEST_DIRECTORY/new.$1; mv $TEST_DIRECTORY/new.$1 $TEST_DIRECTORY/pid.$1; }",
        "await() { while [ ! -e $TEST_DIRECTORY/$1 ]; do sleep 0.02; done; }",
        "all_started() { for rank in $(seq 0 $((CONSORT_SIZE - 1))); do await pid.$rank; done; }",
        "note_pid $CONSORT_RANK $$",
        script,
    ]
    .join("\n");
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "launcher", "--nocapture", "--quiet"]).env(SCRIPT, script).env(HOSTS, hosts);
    command.env(DIRECTORY, directory.path());
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    configure(&mut command, directory.path());
    Run { launcher: command.spawn().unwrap(), directory }
}

fn start(ranks: usize, script: &str) -> Run {
    start_on(&vec!["localhost"; ranks].join(","), script, |_, _| ())
}

impl Run {
    /// A process id that a rank noted, its own under the rank's number, once it has started.
    fn pid(&self, name: &str) -> u32 {
        let path = self.directory.path().join(format!("pid.{name}"));
        eventually("a rank starts", || std::fs::read_to_string(&path).is_ok());
        std::fs::read_to_string(&path).unwrap().trim().parse().unwrap()
    }

    fn pids(&self, ranks: usize) -> Vec<u32> {
        (0..ranks).map(|rank| self.pid(&rank.to_string())).collect()
    }

    fn finish(self) -> Finished {
        let started = Instant::now();
        let Output { status, stdout, stderr } = self.launcher.wait_with_output().unwrap();
        Finished {
            code: status.code(),
            stdout: String::from_utf8(stdout).unwrap(),
            stderr: String::from_utf8(stderr).unwrap(),
            took: started.elapsed(),
        }
    }
}

#[derive(Debug)]
struct Finished {
    code: Option<i32>,
    stdout: String,
    stderr: String,
    took: Duration,
}

impl Finished {
    /// What the launcher itself said in the end.
    fn verdict(&self) -> &str {
        self.stderr.split_once("launcher: ").map_or("", |(_, verdict)| verdict.trim_end())
    }
}

fn signal(name: &str, pid: u32) {
    assert!(Command::new("kill").args(["-s", name, &pid.to_string()]).status().unwrap().success());
}

/// A process that nobody has waited for yet still has a number, but it has ended.
fn has_ended(pid: u32) -> bool {
    let output = Command::new("ps").args(["-o", "stat=", "-p", &pid.to_string()]).output().unwrap();
    let state = String::from_utf8(output.stdout).unwrap();
    state.trim().is_empty() || state.starts_with('Z')
}

fn eventually(what: &str, condition: impl Fn() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < DEADLINE, "{what}: not within {DEADLINE:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn all_end(pids: &[u32]) {
    for &pid in pids {
        eventually("a rank ends", || has_ended(pid));
    }
}

#[test]
fn success_is_success_and_rank_0_owns_standard_output() {
    let run = start(3, "case $CONSORT_RANK in 0) printf 'one\\r\\ntwo'; echo progress >&2;; *) echo note;; esac");
    let finished = run.finish();
    assert_eq!(finished.code, Some(0), "{finished:?}");
    assert!(finished.stdout.contains("one\r\ntwo") && !finished.stdout.contains("note"), "{finished:?}");
    let mut lines: Vec<&str> = finished.stderr.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[rank 1 localhost] note", "[rank 2 localhost] note", "progress"]);
}

#[test]
fn the_failing_rank_is_named_with_its_error_and_its_exit_code() {
    let run =
        start(3, "case $CONSORT_RANK in 1) all_started; echo 'error: disk full' >&2; exit 3;; *) exec sleep 60;; esac");
    let pids = run.pids(3);
    let finished = run.finish();
    assert_eq!(finished.verdict(), "rank 1 (localhost) failed with exit code 3: disk full");
    assert_eq!(finished.stderr.matches("disk full").count(), 1, "said once: {finished:?}");
    assert_eq!(finished.code, Some(3));
    assert!(finished.took < DEADLINE, "{finished:?}");
    all_end(&pids);
}

#[test]
fn without_an_error_of_its_own_the_last_lines_speak() {
    let finished = start(2, "case $CONSORT_RANK in 1) seq 1 9 >&2; exit 4;; *) exec sleep 60;; esac").finish();
    let expected = "rank 1 (localhost) failed with exit code 4; its last lines:\n    5\n    6\n    7\n    8\n    9";
    assert_eq!(finished.verdict(), expected);
}

#[test]
fn a_rank_that_lost_a_peer_is_a_witness_not_the_culprit() {
    let script =
        "await struck; case $CONSORT_RANK in 1) kill -9 $$;; *) echo 'error: rank 1 was lost' >&2; exit 69;; esac";
    let run = start(3, script);
    let pids = run.pids(3);
    // The launcher finds all of them ended at once, and rank 0 first: the order of their ends tells nothing.
    signal("STOP", run.launcher.id());
    std::fs::write(run.directory.path().join("struck"), "").unwrap();
    all_end(&pids);
    signal("CONT", run.launcher.id());
    let finished = run.finish();
    assert!(finished.verdict().starts_with("rank 1 (localhost) was killed by signal 9 (SIGKILL)"), "{finished:?}");
    assert_eq!(finished.code, Some(137));
}

#[test]
fn a_witness_speaks_when_there_is_no_culprit() {
    let script =
        "case $CONSORT_RANK in 0) all_started; echo 'error: rank 1 is silent' >&2; exit 69;; 1) kill -STOP $$;; esac";
    let run = start(2, script);
    let pids = run.pids(2);
    let finished = run.finish();
    assert_eq!(finished.verdict(), "rank 0 (localhost) failed with exit code 69: rank 1 is silent");
    all_end(&pids);
}

#[test]
fn a_killed_rank_ends_the_run() {
    for victim in [0, 1, 2] {
        let run = start(3, "echo Loading >&2; exec sleep 60");
        let pids = run.pids(3);
        signal("KILL", pids[victim]);
        let finished = run.finish();
        let expected = format!("rank {victim} (localhost) was killed by signal 9 (SIGKILL)");
        assert!(finished.verdict().starts_with(&expected), "{finished:?}");
        assert!(!finished.verdict().contains("Loading"), "what it said before explains nothing: {finished:?}");
        assert!(finished.took < DEADLINE, "{finished:?}");
        all_end(&pids);
    }
}

#[test]
fn an_interrupt_ends_all_ranks_even_those_that_will_not() {
    for (name, code) in [("INT", 130), ("TERM", 143), ("HUP", 129)] {
        let run = start(2, "trap '' TERM INT HUP; sleep 60 & while true; do wait; done");
        let pids = run.pids(2);
        signal(name, run.launcher.id());
        let finished = run.finish();
        assert_eq!(finished.code, Some(code), "{finished:?}");
        assert!(finished.took < DEADLINE, "{finished:?}");
        all_end(&pids);
    }
}

#[test]
fn a_second_interrupt_is_obeyed_too() {
    let run = start(2, "trap '' TERM; while true; do sleep 0.1; done");
    let pids = run.pids(2);
    signal("INT", run.launcher.id());
    signal("INT", run.launcher.id());
    let finished = run.finish();
    assert_eq!(finished.code, Some(130), "{finished:?}");
    all_end(&pids);
}

#[test]
fn what_a_rank_started_ends_with_it() {
    let run = start(1, "sleep 60 & note_pid child $!; wait");
    let pids = [run.pid("0"), run.pid("child")];
    signal("INT", run.launcher.id());
    assert_eq!(run.finish().code, Some(130));
    all_end(&pids);
}

#[test]
fn ranks_do_not_outlive_a_killed_launcher() {
    // These neither read their control channel nor heed SIGTERM.
    let mut run = start(2, "trap '' TERM HUP; while true; do sleep 0.1; done");
    let pids = run.pids(2);
    run.launcher.kill().unwrap();
    run.launcher.wait().unwrap();
    all_end(&pids);
}

/// Puts a program called `ssh` before the real one, which runs what it is given on this machine, as a child.
fn with_pretended_ssh(command: &mut Command, directory: &Path) {
    let ssh = directory.join("ssh");
    let script = "#!/bin/sh\nwhile [ \"$1\" != -- ]; do shift; done\nhost=$2\n[ $host = unreachable ] && exit 255\nsh -c \"$3\"\n";
    std::fs::write(&ssh, script).unwrap();
    std::fs::set_permissions(&ssh, std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = std::env::var("PATH").unwrap();
    command.env("PATH", format!("{}:{path}", directory.display()));
}

#[test]
fn a_remote_rank_ends_when_its_control_channel_does() {
    // The kernel's help does not reach it: it is a child of the process that the launcher started.
    let mut run = start_on("127.0.0.1,m2", "cat > /dev/null", with_pretended_ssh);
    let pids = run.pids(2);
    run.launcher.kill().unwrap();
    run.launcher.wait().unwrap();
    all_end(&pids);
}

#[test]
fn an_unreachable_host_is_named() {
    let run = start_on("127.0.0.1,unreachable", "exec sleep 60", with_pretended_ssh);
    let finished = run.finish();
    assert!(finished.verdict().starts_with("rank 1 (unreachable) was lost: ssh could not connect"), "{finished:?}");
    assert_eq!(finished.code, Some(255));
}

#[test]
fn lines_of_different_ranks_do_not_mix() {
    let script =
        "i=0; while [ $i -lt 300 ]; do printf 'a%s' $CONSORT_RANK >&2; printf 'b%s\\n' $i >&2; i=$((i+1)); done";
    let finished = start(4, script).finish();
    assert_eq!(finished.code, Some(0));
    for rank in 0..4 {
        let label = if rank == 0 { String::new() } else { format!("[rank {rank} localhost] ") };
        let prefix = format!("{label}a{rank}b");
        let numbers: Vec<usize> =
            finished.stderr.lines().filter_map(|line| line.strip_prefix(&prefix)?.parse().ok()).collect();
        assert_eq!(numbers, (0..300).collect::<Vec<_>>(), "rank {rank}");
    }
}

#[test]
fn input_reaches_rank_0_and_its_end_does_not_end_the_rank() {
    let script = "case $CONSORT_RANK in
        0) read -r a; read -r b; read -r c; sleep 0.2; echo \"got $a $b $c\";;
        1) cat > /dev/null & sleep 0.3;; esac";
    let mut run = start_on("localhost,localhost", script, |command, _| {
        command.env(FORWARD, "1");
    });
    let mut input = run.launcher.stdin.take().unwrap();
    std::io::Write::write_all(&mut input, b"hello\nworld\n").unwrap();
    drop(input);
    let finished = run.finish();
    assert!(finished.stdout.contains("got =hello =world ."), "{finished:?}");
    assert_eq!(finished.code, Some(0), "{finished:?}");
}

#[test]
fn a_rank_that_stays_behind_is_stopped_and_named() {
    let run = start(2, "case $CONSORT_RANK in 0) all_started; exit 0;; 1) exec sleep 60;; esac");
    let pids = run.pids(2);
    let finished = run.finish();
    assert_eq!(finished.verdict(), "rank 1 (localhost) did not end after rank 0 had finished, and was stopped");
    all_end(&pids);
}

#[test]
fn a_stopped_rank_is_told_of_and_then_lost() {
    let run = start(2, "echo up >&2; exec sleep 60");
    let pids = run.pids(2);
    signal("STOP", pids[1]);
    let finished = run.finish();
    assert_eq!(finished.code, Some(69), "{finished:?}");
    assert!(
        finished.stderr.contains(&format!("rank 1 (localhost) is stopped: `kill -CONT {}`", pids[1])),
        "{finished:?}"
    );
    assert!(finished.verdict().contains("rank 1 (localhost) was lost: its process was stopped"), "{finished:?}");
}

#[test]
fn a_rank_that_cannot_be_started_is_named_and_the_others_end() {
    let mut hosts = Hostfile::local(1).hosts;
    hosts.push(Host { executable: Some("/nowhere/consort".into()), ..hosts[0].clone() });
    let launch = Launch {
        key: None,
        hang_timeout: Duration::from_secs(1),
        recovers: false,
        terminal: false,
        program: "sleep".into(),
        arguments: vec!["60".into()],
        ranks: 2,
        hostfile: Hostfile { hosts, ..Hostfile::default() },
        port: Some(1),
        bind: None,
        environment: Vec::new(),
    };
    let started = Instant::now();
    let error = supervise(launch, Input::Unused, Recovery::default()).unwrap_err().to_string();
    assert!(error.starts_with("rank 1 (localhost) could not be started: /nowhere/consort: "), "{error}");
    assert!(started.elapsed() < DEADLINE);
}

/// A rank 0 that says five tokens and tells of them, from what it is told it has said; a rank dies once in the middle, when three are said.
const SPEAKER: &str =
    "count=$(ls $TEST_DIRECTORY | grep -c start.$CONSORT_RANK); : > $TEST_DIRECTORY/start.$CONSORT_RANK.$count
    if [ $CONSORT_RANK != 0 ]; then
        [ $count != 0 ] || [ $CONSORT_RANK != $TEST_VICTIM ] || { await said; kill -9 $$; }
        exec sleep 1
    fi
    read -r known; printf 'known:%s\\n' \"$known\" >&2
    i=0; for word in a b c d e; do
        case \",$known,\" in *,$i,*) ;; *) printf '\\036token 0 %s %s\\n' $i $i >&2;; esac
        printf '%s ' $word; i=$((i+1))
        [ $i != 3 ] || [ $count != 0 ] || { [ $TEST_VICTIM = 0 ] && kill -9 $$; : > $TEST_DIRECTORY/said; exec sleep 60; }
    done; echo";

fn speaker(victim: usize, restarts: &str) -> Run {
    start_on("localhost,localhost", SPEAKER, |command, _| {
        command.env("TEST_VICTIM", victim.to_string()).env(RESTARTS, restarts);
    })
}

#[test]
fn ranks_that_are_lost_are_started_again_and_nothing_is_said_twice() {
    for victim in [0, 1] {
        let finished = speaker(victim, "2").finish();
        assert_eq!(finished.code, Some(0), "{finished:?}");
        assert_eq!(finished.stdout.matches("a b c d e").count(), 1, "{finished:?}");
        assert!(finished.stderr.contains("known:\n") && finished.stderr.contains("known:0,1,2\n"), "{finished:?}");
        assert!(finished.stderr.contains("(start 2 of 3, 3 tokens to replay)"), "{finished:?}");
        assert!(!finished.stderr.contains("token 0"), "records are not for the user: {finished:?}");
    }
}

#[test]
fn when_no_start_is_left_the_error_is_the_usual_one() {
    let run =
        start_on("localhost,localhost", "case $CONSORT_RANK in 1) kill -9 $$;; *) exec cat;; esac", |command, _| {
            command.env(RESTARTS, "1");
        });
    let finished = run.finish();
    assert!(finished.verdict().starts_with("rank 1 (localhost) was killed by signal 9 (SIGKILL)"), "{finished:?}");
    assert_eq!((finished.code, finished.stderr.matches("start 2 of 2").count()), (Some(137), 1), "{finished:?}");
}

#[test]
fn an_error_of_its_own_is_no_reason_to_start_a_rank_again() {
    let run = start_on("localhost", "echo 'error: no such model' >&2; exit 1", |command, _| {
        command.env(RESTARTS, "3");
    });
    let finished = run.finish();
    assert_eq!(
        (finished.verdict(), finished.code),
        ("rank 0 (localhost) failed with exit code 1: no such model", Some(1))
    );
}

#[test]
fn a_run_goes_on_without_the_lost_ranks_as_long_as_it_can() {
    let script = "case $CONSORT_RANK in 1) kill -9 $$;; *) exec cat;; esac";
    let run = start_on("localhost,localhost,localhost", script, |command, _| {
        command.env(RESTARTS, "5").env(LEAST_RANKS, "2");
    });
    let finished = run.finish();
    assert!(finished.stderr.contains("going on with with 2/2"), "{finished:?}");
    let expected = "rank 1 (localhost) was killed by signal 9 (SIGKILL) (if nobody did that, the machine ran out of memory); \
                    the run cannot go on with what is left: 1 ranks are too few";
    assert_eq!((finished.verdict(), finished.code), (expected, Some(137)), "{finished:?}");
}

#[test]
fn input_that_was_typed_before_a_loss_reaches_the_next_rank_0() {
    let script = "read -r known; read -r a; read -r b; : > $TEST_DIRECTORY/heard
        [ -e $TEST_DIRECTORY/again ] || { : > $TEST_DIRECTORY/again; kill -9 $$; }; read -r c; echo \"got $a $b $c\"";
    let mut run = start_on("localhost", script, |command, _| {
        command.env(FORWARD, "1").env(RESTARTS, "1");
    });
    let mut input = run.launcher.stdin.take().unwrap();
    std::io::Write::write_all(&mut input, b"hello\nworld\n").unwrap();
    let again = run.directory.path().join("again");
    eventually("rank 0 has heard it once", || again.exists());
    std::io::Write::write_all(&mut input, b"late\n").unwrap();
    drop(input);
    let finished = run.finish();
    assert!(finished.stdout.contains("got =hello =world =late"), "{finished:?}");
    assert_eq!(finished.code, Some(0), "{finished:?}");
}
