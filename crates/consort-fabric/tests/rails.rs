//! Rails that break in the middle of every collective: the run goes on, nothing is lost, and the user hears of it once.
#![cfg(target_os = "linux")] // The rails are told apart by addresses that only Linux gives every machine.

mod common;

use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::Ordering;
use std::time::Duration;

use common::{Order, Random, Run, WARNINGS, report};
use consort_fabric::{Fabric, Group};

/// The address of a rail.
fn address(rail: usize) -> Ipv4Addr {
    Ipv4Addr::new(127, 0, 0, 2 + rail as u8)
}

/// The address at both ends of the control connections. (Rails have it at one: the system connects from it.)
const CONTROL: Ipv4Addr = Ipv4Addr::LOCALHOST;

/// Resets every connection of this process that has the address at one of its ends, or control connections, as the tool `ss -K`
/// does; returns how many.
fn reset_connections(address: Ipv4Addr) -> usize {
    let wanted_ends = if address == CONTROL { 2 } else { 1 };
    let address = libc::in_addr { s_addr: u32::from(address).to_be() };
    let ends = |descriptor| {
        let mut length = size_of::<libc::sockaddr_in>() as u32;
        // SAFETY: all-zero is a valid address, and both calls write at most `length` bytes of it.
        unsafe {
            let (mut one, mut other): (libc::sockaddr_in, libc::sockaddr_in) = std::mem::zeroed();
            let connected = libc::getsockname(descriptor, (&raw mut one).cast(), &mut length) == 0
                && libc::getpeername(descriptor, (&raw mut other).cast(), &mut length) == 0;
            (connected && one.sin_family == libc::AF_INET as u16).then_some([one, other])
        }
    };
    let meant = |descriptor: &i32| {
        let at = |end: &&libc::sockaddr_in| end.sin_addr.s_addr == address.s_addr;
        ends(*descriptor).is_some_and(|ends| ends.iter().filter(at).count() >= wanted_ends)
    };
    let unspecified = libc::sockaddr { sa_family: libc::AF_UNSPEC as u16, sa_data: [0; 14] };
    // SAFETY: connecting to no address resets the connection; the address lives through the call.
    let reset = |descriptor| unsafe { libc::connect(descriptor, &unspecified, size_of::<libc::sockaddr>() as u32) };
    (3..1024).filter(meant).filter(|&descriptor| reset(descriptor) == 0).count()
}

/// One collective, with values that tell any displaced byte; checks what arrives.
fn check(world: &Group, operation: &str, step: usize, length: usize) {
    let (rank, size) = (world.rank(), world.size());
    let value = |rank: usize, at: usize| ((at * 7 + rank * 31 + step * 13) % 65_536) as f32;
    let mut values: Vec<f32> = (0..length).map(|at| value(rank, at)).collect();
    let parts: Vec<usize> = (0..size).map(|at| length * (at + 1) / size - length * at / size).collect();
    let owner = |at: usize| (0..size).find(|&rank| at < length * (rank + 1) / size).unwrap();
    let expect = |values: &[f32], expected: &dyn Fn(usize) -> Option<f32>| {
        let wrong = (0..length).find(|&at| expected(at).is_some_and(|expected| expected != values[at]));
        assert_eq!(wrong, None, "{operation}, step {step}");
    };
    let sum = |at: usize| (0..size).map(|rank| value(rank, at)).sum::<f32>();
    match operation {
        "all_reduce" => {
            world.all_reduce(&mut values).unwrap();
            expect(&values, &|at| Some(sum(at)));
        }
        "reduce_scatter" => {
            world.reduce_scatter(&mut values, &parts).unwrap();
            expect(&values, &|at| (owner(at) == rank).then(|| sum(at)));
        }
        "all_gather" => {
            world.all_gather(&mut values, &parts).unwrap();
            expect(&values, &|at| Some(value(owner(at), at)));
        }
        "broadcast" => {
            let root = step % size;
            let content = |root: usize| -> Vec<u8> { (0..length).map(|at| (at * 3 + root + step) as u8).collect() };
            let mut message = content(rank);
            world.broadcast(root, &mut message, step.is_multiple_of(2)).unwrap();
            assert!(message == content(root), "broadcast, step {step}");
        }
        "all_to_all" => {
            let mut incoming = vec![0.0; parts[rank] * size];
            world.all_to_all(&values, &parts, &mut incoming, &vec![parts[rank]; size]).unwrap();
            let start = length * rank / size;
            let expected = (0..size).flat_map(|from| (0..parts[rank]).map(move |at| value(from, start + at)));
            assert!(incoming.iter().copied().eq(expected), "all_to_all, step {step}");
        }
        "barrier" => world.barrier(step.is_multiple_of(2)).unwrap(),
        // A message in each direction between neighbours, one after another: much is on its way when the rail breaks.
        _ => {
            for from in [0, size - 1] {
                let to = (from + 1) % size;
                if rank == from {
                    world.send(to, &values).unwrap();
                } else if rank == to {
                    let mut received = vec![0.0; length];
                    world.recv(from, &mut received).unwrap();
                    expect(&received, &|at| Some(value(from, at)));
                }
            }
        }
    }
}

/// Goes on until each rank knows of as many lost rails as it should: one end finds out by using a rail, the other may have to be told.
fn all_hear_of(fabric: &Fabric, lost: usize) {
    for _ in 0..1000 {
        let mut waiting = [f32::from(u8::from(fabric.rails_lost() < lost))];
        fabric.world().all_reduce(&mut waiting).unwrap();
        if waiting == [0.0] {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

const STEPS: usize = 60;
/// In the middle of this step, or one soon after, a rail breaks.
const BREAK: usize = 20;

#[test]
#[ignore = "started by the other tests, once per rank"]
fn rank_process() {
    let Some(mut order) = Order::received() else { return };
    let (operation, seed) = order.argument.split_once(' ').unwrap();
    let operation = operation.to_owned();
    let mut random = Random(seed.parse().unwrap());
    let rails = std::mem::take(&mut order.options.rail_addresses).len();
    order.options.rail_addresses = (0..rails).map(|rail| IpAddr::V4(address(rail))).collect();
    let fabric = order.connect().unwrap();
    let world = fabric.world();
    // The second control connection runs beside the last rail.
    let without_control = order.program == "without control";
    let breakable = rails.saturating_sub(usize::from(without_control)).max(1);
    let (broken, delay_us, victim) = (random.below(breakable), random.below(4000), random.below(world.size()));
    if order.program == "only" {
        // The first rank cuts the only rail in the middle of an operation.
        let cutter = (world.rank() == 0).then(|| {
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_micros(delay_us as u64));
                assert!(reset_connections(address(0)) > 0);
            })
        });
        let mut values = vec![1.0; 300_000];
        let error = loop {
            if let Err(error) = world.all_reduce(&mut values) {
                break error.to_string();
            }
            values.fill(1.0);
        };
        cutter.into_iter().for_each(|thread| thread.join().unwrap());
        return report(&error);
    }
    if order.program == "one by one" {
        // The first rank cuts one rail after another, in an order of its own, until one is left.
        let mut left: Vec<usize> = (0..rails).collect();
        for step in 0..60 * rails {
            if step % 60 == 30 && left.len() > 1 {
                let rail = left.swap_remove(random.below(left.len()));
                assert!(world.rank() != 0 || reset_connections(address(rail)) > 0);
            }
            check(&world, &operation, step, [100_000, 576, 300_001, 7][random.below(4)]);
        }
        let lost = if world.rank() == 0 { (rails - 1) * (world.size() - 1) } else { rails - 1 };
        all_hear_of(&fabric, lost);
        assert_eq!(fabric.rails_lost(), lost);
        return report("equal");
    }
    let mut cutter = None;
    for step in 0..STEPS {
        if step == BREAK / 2 && without_control && world.rank() == victim {
            assert_eq!(reset_connections(CONTROL), world.size() - 1);
        }
        if step == BREAK && rails > 0 && world.rank() == victim {
            let cut = move || {
                std::thread::sleep(Duration::from_micros(delay_us as u64));
                reset_connections(address(broken))
            };
            cutter = Some(std::thread::spawn(cut));
        }
        if step == STEPS - 10 {
            cutter.take().into_iter().for_each(|thread| assert!(thread.join().unwrap() > 0));
        }
        // Small messages use one rail, large ones all.
        let length = if operation == "barrier" { 0 } else { [100_000, 576, 300_001, 7][random.below(4)] };
        check(&world, &operation, step, length);
    }
    if !["barrier", "send"].contains(&operation.as_str()) {
        let expected = if rails > 0 && world.rank() != victim { 1 } else { world.size() - 1 };
        all_hear_of(&fabric, expected);
        assert_eq!((fabric.rails_lost(), WARNINGS.load(Ordering::Relaxed)), (expected, expected), "rails lost");
    }
    report("equal");
}

#[test]
fn a_rail_that_breaks_costs_no_byte() {
    let operations = ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "barrier", "send"];
    for (at, operation) in operations.into_iter().enumerate() {
        for size in 2..=4 {
            let argument = format!("{operation} {}", 10 * at + size);
            let run = Run { argument, rails: 2 + at % 2, checksums: at % 2 == 0, ..Run::new("", size, "tcp") };
            assert_eq!(run.succeed(), vec!["equal"; size], "{operation}");
        }
    }
}

#[test]
fn what_the_first_control_connection_said_the_second_goes_on_to_say() {
    // Its cable breaks, and later a rail's: what was lost with this one comes over the second connection.
    for (size, seed) in [(2, 1), (3, 2), (4, 3), (2, 4)] {
        let argument = format!("all_reduce {seed}");
        let run = Run { argument, rails: 3, ..Run::new("without control", size, "tcp") };
        assert_eq!(run.succeed(), vec!["equal"; size], "seed {seed}");
    }
}

#[test]
fn rails_may_break_one_after_another() {
    for (size, encrypt, seed) in [(2, false, 1), (3, false, 2), (2, true, 3)] {
        let (argument, key) = (format!("all_reduce {seed}"), if encrypt { |_| Some('a') } else { |_| None });
        let run = Run { argument, rails: 4, encrypt, key, ..Run::new("one by one", size, "tcp") };
        assert_eq!(run.succeed(), vec!["equal"; size], "seed {seed}");
    }
}

#[test]
fn the_only_rail_that_breaks_is_an_error_that_names_its_end() {
    for (size, seed) in [(2, 1), (3, 2), (4, 3)] {
        for said in (Run { argument: format!("all_reduce {seed}"), ..Run::new("only", size, "tcp") }).succeed() {
            assert!(said.contains("was lost during all_reduce: its data connection broke"), "{said}");
        }
    }
}

#[test]
fn an_encrypted_rail_that_breaks_costs_no_byte() {
    let argument = "all_reduce 5".to_owned();
    let run = Run { argument, rails: 2, encrypt: true, key: |_| Some('a'), ..Run::new("", 3, "tcp") };
    assert_eq!(run.succeed(), ["equal"; 3]);
}

#[test]
fn a_cut_emulated_rail_costs_no_byte() {
    let emulate = Some("bandwidth=4gbit,rails=2,cut=1@20ms");
    let run = Run { argument: "all_reduce 6".into(), rails: 0, emulate, ..Run::new("", 2, "tcp") };
    assert_eq!(run.succeed(), ["equal"; 2]);
}
