//! The fabric over RDMA. Skipped by name where there is no device; `tests/rdma-vm/run.sh` runs it in a virtual machine that has one.

mod common;

use std::time::{Duration, Instant};

use common::{Order, Random, Rank, Run, announce, report};
use consort_fabric::{FabricError, Group};

/// The device of the virtual machine.
const DEVICE: &str = "rxe0";
const PATIENCE: Duration = Duration::from_secs(60);

/// Whether this machine is said to have a device.
fn has_device(test: &str) -> bool {
    let has = std::env::var_os("FABRIC_TEST_RDMA").is_some();
    if !has {
        eprintln!(
            "skipped: {test}: set FABRIC_TEST_RDMA=1 on a machine with an RDMA device, or use tests/rdma-vm/run.sh"
        );
    }
    has
}

/// Collectives of changing shapes; every value is a whole number, so that sums are exact.
fn mixed_collectives(world: &Group, steps: usize) {
    const LENGTHS: [usize; 8] = [1, 7, 0, 576, 4096, 8192, 40_000, 200_003];
    let (rank, size) = (world.rank(), world.size());
    let mut random = Random(42);
    for step in 0..steps {
        let length = LENGTHS[random.below(LENGTHS.len())];
        let value = |rank: usize, at: usize| ((at + 3 * rank + step) % 1000) as f32;
        let mut values: Vec<f32> = (0..length).map(|at| value(rank, at)).collect();
        match random.below(4) {
            0 => {
                world.all_reduce(&mut values).unwrap();
                let sum = |at| (0..size).map(|rank| value(rank, at)).sum::<f32>();
                assert!(values.iter().enumerate().all(|(at, &got)| got == sum(at)), "all_reduce of {length}");
            }
            1 => {
                let parts: Vec<usize> = (0..size).map(|at| length * (at + 1) / size - length * at / size).collect();
                world.all_gather(&mut values, &parts).unwrap();
                let owner = |at: usize| (0..size).find(|&rank| at < length * (rank + 1) / size).unwrap();
                assert!(
                    values.iter().enumerate().all(|(at, &got)| got == value(owner(at), at)),
                    "all_gather of {length}"
                );
            }
            2 => {
                let mut message: Vec<u8> = (0..length).map(|at| (at * 7 + step + rank) as u8).collect();
                world.broadcast(step % size, &mut message, false).unwrap();
                assert!(
                    (0..length).all(|at| message[at] == (at * 7 + step + step % size) as u8),
                    "broadcast of {length}"
                );
            }
            _ if rank == 0 => world.send(1, &values).unwrap(),
            _ if rank == 1 => {
                world.recv(0, &mut values).unwrap();
                assert!(values.iter().enumerate().all(|(at, &got)| got == value(0, at)), "send of {length}");
            }
            _ => {}
        }
    }
}

/// The median time of 300 repetitions, in microseconds.
fn median_us(mut repeat: impl FnMut()) -> f64 {
    let mut times: Vec<f64> = (0..300)
        .map(|_| {
            let start = Instant::now();
            repeat();
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// One message of that many values there and back.
fn round_trip_us(world: &Group, values: usize) -> f64 {
    let mut values = vec![1.0; values];
    median_us(|| {
        if world.rank() == 0 {
            world.send(1, &values).and_then(|()| world.recv(1, &mut values)).unwrap();
        } else {
            world.recv(0, &mut values).and_then(|()| world.send(0, &values)).unwrap();
        }
    })
}

/// An all-reduce of that many values.
fn all_reduce_us(world: &Group, values: usize) -> f64 {
    let mut values = vec![0.0; values];
    median_us(|| world.all_reduce(&mut values).unwrap())
}

#[test]
#[ignore = "started by the other tests, once per rank"]
fn rank_process() {
    let Some(mut order) = Order::received() else { return };
    if order.argument == "cables" {
        // From the last rank to each other; these have none between them.
        let (rank, last) = (order.options.rank, order.options.size - 1);
        let cabled = |peer: usize| peer != rank && [peer, rank].contains(&last);
        let devices = |peer| Vec::from_iter(cabled(peer).then(|| DEVICE.to_owned()));
        order.options.rdma_devices = (0..=last).map(devices).collect();
    }
    let fabric = match order.connect() {
        Ok(fabric) => fabric,
        Err(error) => return report(&error.to_string()),
    };
    let world = fabric.world();
    match order.program.as_str() {
        "mixed" => {
            mixed_collectives(&world, 150);
            report(&format!("equal over {}", world.transport()));
        }
        "latency" => {
            let (small, large) = (round_trip_us(&world, 16), round_trip_us(&world, 4096));
            let reduced = all_reduce_us(&world, 8192);
            report(&format!(
                "64 bytes {small:.0} us, 16 KiB {large:.0} us there and back; all_reduce of 32 KiB {reduced:.0} us"
            ));
        }
        "repeat" => {
            announce();
            let mut values = vec![1.0; 20_000];
            let error = loop {
                values.fill(1.0);
                if let Err(error) = world.all_reduce(&mut values) {
                    break error;
                }
            };
            let FabricError::PeerLost { rank, .. } = error else { panic!("{error}") };
            report(&format!("lost {rank}"));
        }
        other => panic!("unknown program {other}"),
    }
}

#[test]
fn collectives_of_changing_shapes() {
    if has_device("collectives_of_changing_shapes") {
        for size in [2, 3] {
            let said = Run::new("mixed", size, "rdma").succeed();
            assert!(said.iter().all(|said| said.starts_with("equal over rdma")), "{said:?}");
        }
    }
}

#[test]
fn ranks_without_a_cable_talk_through_others() {
    if has_device("ranks_without_a_cable_talk_through_others") {
        let said = Run { argument: "cables".into(), ..Run::new("mixed", 3, "rdma") }.succeed();
        assert!(said.iter().all(|said| said.starts_with("equal over rdma")), "{said:?}");
    }
}

#[test]
fn round_trips_are_measured() {
    if has_device("round_trips_are_measured") {
        let said = Run::new("latency", 2, "rdma").succeed();
        assert!(said.iter().all(|said| said.contains("there and back")), "{said:?}");
        eprintln!("medians: {}", said[0]);
    }
}

#[test]
fn a_killed_rank_is_named() {
    if has_device("a_killed_rank_is_named") {
        for victim in [0, 1] {
            let mut ranks = Run::new("repeat", 3, "rdma").start();
            ranks.iter_mut().for_each(Rank::wait_until_up);
            std::thread::sleep(Duration::from_millis(500));
            ranks[victim].signal(libc::SIGKILL);
            let struck = Instant::now();
            for (_, process) in ranks.iter_mut().enumerate().filter(|&(rank, _)| rank != victim) {
                let ended = process.ended(PATIENCE).duration_since(struck);
                assert_eq!(process.report(PATIENCE), format!("lost {victim}"));
                // The machine may be an interpreted one; silence alone would have told after ten seconds.
                assert!(ended < Duration::from_secs(8), "{ended:?}");
            }
        }
    }
}

#[test]
fn without_a_device_one_line_says_so() {
    if !has_device("(the others)") {
        let said =
            Run::new("mixed", 2, "rdma").start().iter_mut().map(|rank| rank.report(PATIENCE)).collect::<Vec<_>>();
        assert!(said[0].contains("cannot use RDMA") && said[0].contains("use --transport tcp"), "{said:?}");
    }
}
