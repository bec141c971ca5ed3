//! Ranks that die, stop, disagree or never come, and strangers on the port: always a clear error in time, never a hang.

mod common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{Order, Rank, Run, announce, report};
use consort_fabric::{Fabric, FabricError, FabricOptions, Group};

const PATIENCE: Duration = Duration::from_secs(120);
/// From the death of a rank to the end of all others. Tens of milliseconds where a core is free, but others may use the machine;
/// half of the time after which silence alone would have told.
const LOSS_BOUND: Duration = Duration::from_secs(60);
/// Silence that ranks bear where one is killed, and where one is stopped: more than a busy machine keeps a rank from its core.
const PATIENT_MS: u64 = 120_000;
const IMPATIENT_MS: u64 = 5000;

/// Repeats one operation until it fails.
fn repeat(group: &Group, operation: &str) -> FabricError {
    let (rank, size) = (group.rank(), group.size());
    let mut values = vec![1.0f32; 100_000];
    let parts: Vec<usize> = (0..size).map(|at| 100_000 * (at + 1) / size - 100_000 * at / size).collect();
    let mut message = vec![7; 100_000];
    loop {
        let result = match operation {
            "all_reduce" => group.all_reduce(&mut values[..576]),
            "large_all_reduce" => group.all_reduce(&mut values),
            "all_gather" => group.all_gather(&mut values, &parts),
            "reduce_scatter" => group.reduce_scatter(&mut values, &parts),
            "broadcast" => group.broadcast(0, &mut message, false),
            "barrier" => group.barrier(false),
            "all_to_all" => {
                let lengths = vec![values.len() / size; size];
                let total = lengths[0] * size;
                let outgoing = values[..total].to_vec();
                group.all_to_all(&outgoing, &lengths, &mut values[..total], &lengths)
            }
            "exchange" => group.exchange(&message, false).map(drop),
            "background" => group
                .start(values.clone(), |group, values| group.all_reduce(values))
                .and_then(|pending| pending.wait())
                .map(drop),
            "send" if rank % 2 == 0 && rank + 1 < size => group.send(rank + 1, &values),
            "send" if rank % 2 == 1 => group.recv(rank - 1, &mut values),
            // Across a line: what the ends have for each other goes through all others, who wait.
            "ends" if rank == 0 => group.send(size - 1, &values),
            "ends" if rank + 1 == size => group.recv(0, &mut values),
            "ends" => group.barrier(false),
            "send" => group.barrier(false), // The odd one out waits for a barrier that nobody else enters.
            "idle" if rank == 0 => {
                std::thread::sleep(Duration::from_millis(100));
                group.broadcast(0, &mut message, true)
            }
            "idle" => group.broadcast(0, &mut message, true),
            other => panic!("unknown operation {other}"),
        };
        if let Err(error) = result {
            return error;
        }
        values.fill(1.0);
    }
}

fn describe(error: &FabricError) -> String {
    match error {
        FabricError::PeerLost { rank, host, .. } => format!("lost {rank} {host}"),
        other => format!("other: {other}"),
    }
}

#[test]
#[ignore = "started by the other tests, once per rank"]
fn rank_process() {
    let Some(order) = Order::received() else { return };
    let rank = order.options.rank;
    if order.program == "meet" {
        match order.connect() {
            Ok(fabric) => {
                fabric.world().barrier(false).unwrap();
                report("met");
            }
            Err(error) => report(&error.to_string()),
        }
        return;
    }
    if order.program == "late" {
        // The last rank comes to the barrier when the others' operation timeout is long over, or never.
        let options = FabricOptions { operation_timeout: Duration::from_millis(200), ..order.options };
        let fabric = Fabric::connect(options).unwrap();
        if rank == 1 {
            std::thread::sleep(if order.argument == "idle" { Duration::from_millis(1000) } else { PATIENCE });
        }
        let result = fabric.world().barrier(order.argument == "idle");
        report(&result.map_or_else(|error| error.to_string(), |()| "met".into()));
        return;
    }
    let fabric = order.connect().unwrap();
    let world = fabric.world();
    match order.program.as_str() {
        "repeat" => {
            announce();
            report(&describe(&repeat(&world, &order.argument)));
        }
        // The middle of a line needs nothing more: it stays until the others are done.
        "done" => {
            announce();
            if rank != 1 {
                report(&describe(&repeat(&world, &order.argument)));
            }
        }
        "still" => {
            announce();
            repeat(&world, "all_reduce");
            // What failed once fails at once, and no thread goes on looking.
            world.barrier(false).unwrap_err();
            let before = processor_time();
            std::thread::sleep(Duration::from_millis(1500));
            report(quiet_since(before));
        }
        "abort" if rank == 1 => {
            fabric.abort("its disk is full");
            report(&world.barrier(false).unwrap_err().to_string());
        }
        "leave" if rank == 1 => report("left"),
        "panic" if rank == 1 => {
            report("panicked");
            panic!("on purpose");
        }
        "abort" | "leave" | "panic" => report(&world.barrier(false).unwrap_err().to_string()),
        "mismatch" => {
            let mut values = vec![0.0; 10 + rank];
            report(&world.all_reduce(&mut values).unwrap_err().to_string());
        }
        "quiet" => {
            // Uses next to no processor time while it waits.
            if rank == 0 {
                std::thread::sleep(Duration::from_millis(1500));
            }
            let before = processor_time();
            world.broadcast(0, &mut vec![1], true).unwrap();
            report(quiet_since(before));
        }
        "crossing" if rank == 0 => {
            // The peer's message is here already, but it is not this message's turn.
            let before = processor_time();
            world.send(1, &vec![1.0; 8 << 20]).unwrap();
            report(quiet_since(before));
            world.recv(1, &mut [0.0]).unwrap();
        }
        "crossing" => {
            world.send(0, &[1.0]).unwrap();
            std::thread::sleep(Duration::from_millis(2000));
            world.recv(0, &mut vec![0.0; 8 << 20]).unwrap();
            report("quiet");
        }
        other => panic!("unknown program {other}"),
    }
}

/// Whether this process has used much less processor time than the second or two that it waited.
fn quiet_since(before: Duration) -> &'static str {
    if processor_time() - before < Duration::from_millis(400) { "quiet" } else { "busy" }
}

fn processor_time() -> Duration {
    // SAFETY: all-zero is a valid value, and the call only writes it.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &mut usage) };
    let time = |time: libc::timeval| Duration::new(time.tv_sec as u64, time.tv_usec as u32 * 1000);
    time(usage.ru_utime) + time(usage.ru_stime)
}

/// Starts `size` ranks on an operation, ends one of them with `signal` and checks what the others say, and when.
/// Returns how long the last of them took.
fn strike(run: Run, operation: &str, victim: usize, signal: i32, wait: Duration) -> Duration {
    let (size, transport) = (run.size, run.transport);
    let hang_ms = if signal == libc::SIGSTOP { IMPATIENT_MS } else { PATIENT_MS };
    let mut ranks = Run { argument: operation.into(), hang_ms, ..run }.start();
    ranks.iter_mut().for_each(Rank::wait_until_up);
    // Long enough to be in the middle of it, and at another point each time.
    std::thread::sleep(wait);
    ranks[victim].signal(signal);
    let struck = Instant::now();
    let mut last = Duration::ZERO;
    for (rank, process) in ranks.iter_mut().enumerate().filter(|&(rank, _)| rank != victim) {
        let ended = process.ended(PATIENCE).duration_since(struck);
        let said = process.report(PATIENCE);
        let context = format!("{operation} over {transport}, {size} ranks, victim {victim}: rank {rank}");
        assert_eq!(said, format!("lost {victim} host{victim}"), "{context}");
        assert!(ended <= LOSS_BOUND, "{context} took {ended:?}");
        last = last.max(ended);
    }
    last
}

const OPERATIONS: [&str; 11] = [
    "all_reduce",
    "large_all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "exchange",
    "barrier",
    "send",
    "background",
    "idle",
];

/// Kills a rank in the middle of each operation; as many times as `FABRIC_TEST_TRIES` says, and then tells how long it took.
fn kill_in_every_operation(transport: &'static str, rails: usize) {
    let tries = std::env::var("FABRIC_TEST_TRIES").map_or(1, |tries| tries.parse().unwrap());
    for (at, operation) in OPERATIONS.into_iter().enumerate() {
        let mut times: Vec<_> = (0..tries)
            .map(|attempt| {
                let size = 2 + (at + attempt) % 3;
                let run = Run { rails, ..Run::new("repeat", size, transport) };
                let wait = Duration::from_micros(30_000 + 4711 * (at + 7 * attempt) as u64 % 100_000);
                strike(run, operation, (at + attempt / 3) % size, libc::SIGKILL, wait)
            })
            .collect();
        times.sort();
        if tries > 1 {
            let slow = times.iter().filter(|&&time| time > Duration::from_secs(1)).count();
            let (median, most) = (times[tries / 2], times[tries - 1]);
            eprintln!(
                "{operation} over {transport}, {rails} rails: {tries} kills, median {median:?}, most {most:?}, {slow} above 1 s"
            );
        }
    }
}

#[test]
fn a_killed_rank_is_named_by_all_over_shared_memory() {
    kill_in_every_operation("shm", 1);
}

#[test]
fn a_killed_rank_is_named_by_all_over_tcp() {
    kill_in_every_operation("tcp", 1);
}

#[test]
fn a_killed_rank_is_named_by_all_over_several_rails() {
    kill_in_every_operation("tcp", 2);
}

#[test]
fn a_stopped_rank_is_named_after_the_hang_timeout() {
    let run = |transport| Run::new("repeat", 3, transport);
    strike(run("shm"), "all_reduce", 1, libc::SIGSTOP, Duration::from_millis(100));
    strike(run("tcp"), "idle", 2, libc::SIGSTOP, Duration::from_millis(100));
}

/// Through whom others talk is missed by those, too, and named; also after it has said that it needs nothing more itself.
#[test]
fn a_rank_that_passes_on_is_named_when_it_is_lost() {
    for (transport, victim, signal) in
        [("shm", 1, libc::SIGKILL), ("tcp", 2, libc::SIGKILL), ("tcp", 1, libc::SIGSTOP), ("tcp", 3, libc::SIGKILL)]
    {
        let line = Run { rails: 0, emulate: Some("topology=0-1/1-2/2-3"), ..Run::new("repeat", 4, transport) };
        strike(line, "ends", victim, signal, Duration::from_millis(300));
    }
    for signal in [libc::SIGKILL, libc::SIGSTOP] {
        let line = Run { rails: 0, emulate: Some("topology=0-1/1-2"), ..Run::new("done", 3, "tcp") };
        strike(line, "ends", 1, signal, Duration::from_millis(300));
    }
}

#[test]
fn a_rank_that_gives_up_says_why() {
    for mut rank in Run::new("abort", 3, "shm").start() {
        assert_eq!(rank.report(PATIENCE), "rank 1 (host1) gave up: its disk is full");
    }
}

#[test]
fn a_rank_that_leaves_is_missed() {
    let mut ranks = Run::new("leave", 2, "tcp").start();
    assert_eq!(ranks[1].report(PATIENCE), "left");
    let said = ranks[0].report(PATIENCE);
    assert!(said.starts_with("rank 1 (host1) was lost during barrier:"), "{said}");
}

#[test]
fn a_panic_reaches_the_others() {
    let mut ranks = Run::new("panic", 2, "shm").start();
    assert_eq!(ranks[0].report(PATIENCE), "rank 1 (host1) gave up: it panicked");
}

#[test]
fn different_operations_are_told_apart() {
    for mut rank in Run::new("mismatch", 2, "shm").start() {
        let said = rank.report(PATIENCE);
        assert!(said.contains("all_reduce of 40 bytes") && said.contains("all_reduce of 44 bytes"), "{said}");
    }
}

#[test]
fn waiting_for_the_next_request_is_quiet() {
    for transport in ["shm", "tcp"] {
        for mut rank in Run::new("quiet", 3, transport).start() {
            assert_eq!(rank.report(PATIENCE), "quiet");
        }
    }
}

#[test]
fn nothing_spins_after_a_failure() {
    for transport in ["shm", "tcp"] {
        let mut ranks = Run::new("still", 3, transport).start();
        ranks.iter_mut().for_each(Rank::wait_until_up);
        ranks[1].signal(libc::SIGKILL);
        for rank in [0, 2] {
            assert_eq!(ranks[rank].report(PATIENCE), "quiet", "rank {rank} over {transport}");
        }
    }
}

#[test]
fn sending_is_quiet_while_another_message_is_waiting() {
    assert_eq!(Run::new("crossing", 2, "tcp").succeed(), ["quiet", "quiet"]);
}

#[test]
fn only_an_idle_barrier_outlasts_the_operation_timeout() {
    for transport in ["shm", "tcp"] {
        assert_eq!(Run { argument: "idle".into(), ..Run::new("late", 2, transport) }.succeed(), ["met", "met"]);
    }
    let said = Run::new("late", 2, "shm").start()[0].report(PATIENCE);
    assert!(said.contains("barrier") && said.contains("rank 1 (host1)"), "{said}");
}

#[test]
fn rdma_is_refused_where_encryption_is_asked_for() {
    let run = Run { encrypt: true, key: |_| Some('7'), ..Run::new("meet", 2, "rdma") };
    let said = run.start_rank(0).report(PATIENCE);
    assert!(said.ends_with("RDMA carries no encryption; use --transport tcp"), "{said}");
}

#[test]
fn ranks_that_disagree_are_refused_with_both_values() {
    let run = Run { plan: |rank| ["tensor:2", "pipeline:2"][rank / 2], ..Run::new("meet", 3, "shm") };
    let start = Instant::now();
    for mut rank in run.start() {
        let said = rank.report(PATIENCE);
        assert!(
            said.ends_with("ranks disagree on plan: rank 0 (host0) has tensor:2, rank 2 (host2) has pipeline:2"),
            "{said}"
        );
    }
    assert!(start.elapsed() < Duration::from_millis(run.connect_ms / 2), "they waited for the connect timeout");
}

#[test]
fn a_missing_rank_and_a_missing_rank_0_are_named() {
    let run = Run { connect_ms: 10_000, ..Run::new("meet", 3, "tcp") };
    let mut ranks = [run.start_rank(0), run.start_rank(2)];
    let said = ranks[0].report(PATIENCE);
    assert_eq!(said, format!("2 of 3 ranks came to {} within 10 s; missing: [1]", run.rendezvous));
    assert!(ranks[1].report(PATIENCE).contains("refused this rank"));

    let run = Run { connect_ms: 500, ..Run::new("meet", 2, "tcp") };
    let said = run.start_rank(1).report(PATIENCE);
    assert!(said.starts_with(&format!("cannot reach rank 0 at {}", run.rendezvous)), "{said}");
}

/// Two ranks whose connection carries nothing more once rank 0 has said its first word, though it stays open: while they wait for a
/// third rank, or while they set up their links.
#[test]
fn silence_before_all_ranks_are_ready_is_noticed() {
    for size in [3, 2] {
        let run = Run { hang_ms: 2000, ..Run::new("meet", size, "tcp") };
        let between = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut first = run.start_rank(0);
        let mut second = Run { rendezvous: between.local_addr().unwrap().to_string(), ..run.clone() }.start_rank(1);
        let (near, far) = (between.accept().unwrap().0, knock(&run.rendezvous));
        let is_silent = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut bytes = [0; 4096];
                while let Ok(count @ 1..) = (&near).read(&mut bytes) {
                    if !is_silent.load(Ordering::Acquire) {
                        (&far).write_all(&bytes[..count]).unwrap();
                    }
                }
            });
            (&far).read_exact(&mut [0]).unwrap();
            is_silent.store(true, Ordering::Release);
            let said = first.report(PATIENCE);
            assert_eq!(said, "rank 1 (host1) was lost during set-up: no sign of life for 2000 ms", "{size} ranks");
            let said = second.report(PATIENCE);
            assert!(said.starts_with("rank 0 (127.0.0.1:"), "{said}");
            assert!(said.contains(" was lost during set-up: no sign of life for 2000 ms"), "{said}");
        });
    }
}

#[test]
fn a_port_in_use_is_one_clear_line() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let rendezvous = listener.local_addr().unwrap().to_string();
    let said = Run { rendezvous: rendezvous.clone(), ..Run::new("meet", 2, "tcp") }.start_rank(0).report(PATIENCE);
    assert!(said.starts_with(&format!("cannot listen on {rendezvous}")), "{said}");
}

#[test]
fn only_ranks_with_the_key_come_in() {
    let keyed = Run { key: |_| Some('7'), ..Run::new("meet", 3, "tcp") };
    for mut rank in keyed.start() {
        assert_eq!(rank.report(PATIENCE), "met");
    }
    type Keys = fn(usize) -> Option<char>;
    let cases: [(Keys, &str); 3] = [
        (|rank| Some(if rank == 1 { '8' } else { '7' }), "the cluster keys differ"),
        (|rank| (rank == 0).then_some('7'), "one side has a cluster key and the other has none"),
        (|rank| (rank == 1).then_some('7'), "one side has a cluster key and the other has none"),
    ];
    let start = |(key, expected)| (Run { key, connect_ms: 10_000, ..Run::new("meet", 2, "tcp") }.start(), expected);
    for (mut ranks, expected) in cases.map(start) {
        let (host, guest) = (ranks[0].report(PATIENCE), ranks[1].report(PATIENCE));
        assert!(guest.contains(expected), "{guest}");
        assert!(host.contains("missing: [1]; a connection from 127.0.0.1:") && host.contains(expected), "{host}");
    }
}

#[test]
fn without_a_key_other_machines_are_kept_out() {
    let run = Run { rendezvous: "0.0.0.0:0".into(), ..Run::new("meet", 2, "tcp") };
    let said = run.start_rank(0).report(PATIENCE);
    assert!(said.contains("open to other machines, which takes a cluster key"), "{said}");
}

/// Opens a connection to a rank 0 that is about to listen.
fn knock(address: &str) -> TcpStream {
    let start = Instant::now();
    loop {
        match TcpStream::connect(address) {
            Ok(stream) => return stream,
            Err(error) => assert!(start.elapsed() < PATIENCE, "{error}"),
        }
    }
}

#[test]
fn strangers_on_the_port_harm_nothing() {
    harass(Run::new("meet", 2, "tcp"));
    harass(Run { key: |_| Some('f'), ..Run::new("meet", 2, "tcp") });
}

fn harass(run: Run) {
    let mut first = run.start_rank(0);
    // More than this process may hold at a time, and more than rank 0 waits for.
    let mut half_open = std::collections::VecDeque::new();
    for _ in 0..10_000 {
        half_open.push_back(knock(&run.rendezvous));
        if half_open.len() > 600 {
            half_open.pop_front();
        }
    }
    let prefix = |length: u32| [&b"CNST\x04\x00"[..], &length.to_le_bytes()].concat();
    let hostile: Vec<Vec<u8>> = vec![
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        vec![0; 100_000],
        vec![0xFF; 64],
        prefix(u32::MAX),
        prefix(0),
        [prefix(64), vec![0xFF; 64]].concat(),
        [prefix(5), vec![4; 5]].concat(),
        b"CNST\x63\x00\x00\x00\x00\x00".to_vec(),
        [&b"CNSK\xff"[..], &[0; 255]].concat(),
        [&b"CNSK\x30"[..], &[9; 48]].concat(),
        b"CNS".to_vec(),
    ];
    let mut open = Vec::new();
    for bytes in &hostile {
        let mut stream = knock(&run.rendezvous);
        let _ = stream.write_all(bytes);
        open.push(stream);
    }
    // All but the last, which may still become a hello, are closed.
    open.pop();
    for (stream, sent) in open.iter_mut().zip(&hostile) {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let closed = stream
            .read_to_end(&mut Vec::new())
            .map_or_else(|error| error.kind() == std::io::ErrorKind::ConnectionReset, |_| true);
        assert!(closed, "after {:?}", &sent[..sent.len().min(20)]);
    }
    let mut second = run.start_rank(1);
    assert_eq!((first.report(PATIENCE), second.report(PATIENCE)), ("met".into(), "met".into()));
}
