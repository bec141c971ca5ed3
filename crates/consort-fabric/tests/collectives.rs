//! Every collective against a plain sum or copy, bit for bit: changing shapes, several groups, all transports.

mod common;

use common::{Order, Random, Run, report};
use consort_fabric::{Fabric, Group, Operation};
use half::bf16;

/// A value that any rank can work out for any other. Their sums round, so that order shows.
fn value(seed: u64, rank: usize, at: usize) -> f32 {
    let bits = Random(seed ^ (rank as u64) << 40 ^ at as u64).next();
    (bits as i32 as f32) * 1e-3 * [1.0, 1e4, 1e-5][(bits >> 60) as usize % 3]
}

fn values(seed: u64, rank: usize, length: usize) -> Vec<f32> {
    (0..length).map(|at| value(seed, rank, at)).collect()
}

fn plain_sum(seed: u64, ranks: &[usize], length: usize) -> Vec<f32> {
    let add = |at| ranks[1..].iter().fold(value(seed, ranks[0], at), |sum, &rank| sum + value(seed, rank, at));
    (0..length).map(add).collect()
}

fn assert_same_bits(got: &[f32], expected: &[f32], what: &str) {
    let differs = got.iter().zip(expected).position(|(got, expected)| got.to_bits() != expected.to_bits());
    assert_eq!((got.len(), differs), (expected.len(), None), "{what}");
}

const LENGTHS: [usize; 9] = [1, 7, 0, 576, 4097, 16_384, 16_385, 70_001, 300_007];

/// Cuts `length` into uneven parts, some of them empty.
fn uneven_parts(random: &mut Random, length: usize, members: usize) -> Vec<usize> {
    let mut cuts: Vec<usize> = (1..members).map(|_| random.below(length + 1)).collect();
    cuts.extend([0, length]);
    cuts.sort();
    cuts.windows(2).map(|pair| pair[1] - pair[0]).collect()
}

/// All ranks follow the same random schedule over several groups, without barriers in between.
fn random_sequence(fabric: &Fabric, rank: usize, size: usize, steps: usize, seed: u64) {
    let memberships: Vec<Vec<usize>> = vec![
        (0..size).collect(),
        (0..size).rev().collect(),
        vec![0, size - 1],
        (0..size).step_by(2).collect(),
        (0..size).collect(),
    ];
    let group = |ranks: &Vec<usize>| ranks.contains(&rank).then(|| fabric.group(ranks).unwrap());
    let groups: Vec<Option<Group>> = memberships.iter().map(group).collect();
    let mut random = Random(seed);
    for step in 0..steps {
        let seed = random.next();
        let chosen = random.below(groups.len());
        let ranks = &memberships[chosen];
        let length = LENGTHS[random.below(LENGTHS.len())];
        let (kind, root, other) = (random.below(13), random.below(ranks.len()), random.below(ranks.len()));
        let parts = uneven_parts(&mut random, length, ranks.len());
        let Some(group) = &groups[chosen] else { continue };
        let what = format!("step {step}: operation {kind} of {length} values in group {ranks:?}");
        let mine = values(seed, rank, length);
        let part = |position: usize| {
            let start: usize = parts[..position].iter().sum();
            start..start + parts[position]
        };
        match kind {
            0 => {
                let mut summed = mine;
                group.all_reduce(&mut summed).unwrap();
                assert_same_bits(&summed, &plain_sum(seed, ranks, length), &what);
            }
            1 => {
                let mut summed = mine;
                group.reduce_scatter(&mut summed, &parts).unwrap();
                let own = part(group.rank());
                assert_same_bits(&summed[own.clone()], &plain_sum(seed, ranks, length)[own], &what);
            }
            2 => {
                let mut gathered = vec![f32::NAN; length];
                gathered[part(group.rank())].copy_from_slice(&mine[part(group.rank())]);
                group.all_gather(&mut gathered, &parts).unwrap();
                for (position, &member) in ranks.iter().enumerate() {
                    let expected = values(seed, member, length);
                    assert_same_bits(&gathered[part(position)], &expected[part(position)], &what);
                }
            }
            3 => {
                let expected: Vec<u8> = (0..length).map(|at| (seed as usize + at) as u8).collect();
                let mut message = if group.rank() == root { expected.clone() } else { vec![1, 2, 3] };
                group.broadcast(root, &mut message, step % 2 == 0).unwrap();
                assert!(message == expected, "{what}");
            }
            4 => group.barrier(step % 2 == 0).unwrap(),
            5 => {
                // As many bytes as the member's part has values: lengths differ, and some are zero.
                let message = |position: usize| vec![(seed as usize + position) as u8; parts[position]];
                let messages = group.exchange(&message(group.rank()), step % 2 == 0).unwrap();
                let expected: Vec<_> = (0..ranks.len()).map(message).collect();
                assert!(messages == expected, "{what}");
            }
            6 if root == other => {}
            7 => {
                let most = |at| {
                    ranks[1..].iter().fold(value(seed, ranks[0], at), |most, &rank| most.max(value(seed, rank, at)))
                };
                let mut values = mine;
                group.all_reduce_max(&mut values).unwrap();
                assert_same_bits(&values, &(0..length).map(most).collect::<Vec<_>>(), &what);
            }
            8 => {
                // bf16 enters sums as it is; the sum, made in f32, is rounded once.
                let short = |rank: usize, at: usize| bf16::from_f32(value(seed, rank, at));
                let sum = |at| {
                    ranks[1..].iter().fold(short(ranks[0], at).to_f32(), |sum, &rank| sum + short(rank, at).to_f32())
                };
                let expected: Vec<bf16> = (0..length).map(|at| bf16::from_f32(sum(at))).collect();
                let mut values: Vec<bf16> = (0..length).map(|at| short(rank, at)).collect();
                group.all_reduce(&mut values).unwrap();
                assert!(values == expected, "{what}");
            }
            9 => {
                // Lengths differ between each two members, and some are zero.
                let length = |from: usize, to: usize| parts[(3 * from + to) % ranks.len()];
                let byte = |from: usize, to: usize, at: usize| (seed as usize + 5 * from + 3 * to + at) as u8;
                let me = group.rank();
                let lengths = |length: &dyn Fn(usize) -> usize| (0..ranks.len()).map(length).collect::<Vec<_>>();
                let (to_all, from_all) = (lengths(&|to| length(me, to)), lengths(&|from| length(from, me)));
                let bytes = |from, to| (0..length(from, to)).map(move |at| byte(from, to, at));
                let outgoing: Vec<u8> = (0..ranks.len()).flat_map(|to| bytes(me, to)).collect();
                let mut incoming = vec![0; from_all.iter().sum()];
                group.all_to_all(&outgoing, &to_all, &mut incoming, &from_all).unwrap();
                assert!(incoming == (0..ranks.len()).flat_map(|from| bytes(from, me)).collect::<Vec<_>>(), "{what}");
            }
            10 => {
                // Two beside this thread, in order, and one that comes after them.
                let reduce = |group: &Group, values: &mut Vec<f32>| group.all_reduce(values);
                let two = [mine.clone(), mine.clone()].map(|values| group.start(values, reduce).unwrap());
                let mut third = mine;
                group.all_reduce(&mut third).unwrap();
                let expected = plain_sum(seed, ranks, length);
                let results = two.map(|pending| pending.wait().unwrap());
                results.iter().chain([&third]).for_each(|sum| assert_same_bits(sum, &expected, &what));
            }
            6 if group.rank() == root => group.send_bytes(other, &vec![seed as u8; length]).unwrap(),
            6 if group.rank() == other => {
                let mut message = vec![1, 2, 3];
                group.recv_bytes(root, &mut message).unwrap();
                assert!(message == vec![seed as u8; length], "{what}");
            }
            6 => {}
            _ if root == other => {}
            _ if group.rank() == root => group.send(other, &mine).unwrap(),
            _ if group.rank() == other => {
                let mut received = vec![f32::NAN; length];
                group.recv(root, &mut received).unwrap();
                assert_same_bits(&received, &values(seed, ranks[root], length), &what);
            }
            _ => {}
        }
    }
}

/// Messages of changing lengths without anything in between, as point-to-point transfers of a pipeline make them.
fn changing_shapes(world: &Group, repeats: usize) {
    const SHAPES: [usize; 7] = [1, 7, 4096, 4097, 65_536, 1, (1 << 20) + 3];
    for repeat in 0..repeats {
        let shape = if repeat % 50 == 0 { 6 } else { repeat % 6 };
        if world.rank() == 0 {
            world.send(1, &values(repeat as u64, 0, SHAPES[shape])).unwrap();
        } else {
            let mut received = vec![0.0; SHAPES[shape]];
            world.recv(0, &mut received).unwrap();
            assert_same_bits(&received, &values(repeat as u64, 0, SHAPES[shape]), "point to point");
        }
    }
}

#[test]
#[ignore = "started by the other tests, once per rank"]
fn rank_process() {
    let Some(order) = Order::received() else { return };
    let fabric = order.connect().unwrap();
    let (rank, size) = (order.options.rank, order.options.size);
    let world = fabric.world();
    match order.program.as_str() {
        "random" => {
            let seed = order.argument.parse().unwrap();
            random_sequence(&fabric, rank, size, 120, seed);
            report("equal");
        }
        "wire" => {
            // Contributions are rounded; of long vectors, which are scattered and gathered, the sums too.
            let short = |rank: usize, at: usize| bf16::from_f32(value(3, rank, at)).to_f32();
            let mut rounded = Vec::new();
            for length in [96, 300_000] {
                let mut sums = values(3, rank, length);
                world.all_reduce(&mut sums).unwrap();
                let sum = |at: usize| (1..size).fold(short(0, at), |sum, rank| sum + short(rank, at));
                let expected: Vec<f32> = (0..length).map(sum).collect();
                let again: Vec<f32> = expected.iter().map(|&sum| bf16::from_f32(sum).to_f32()).collect();
                rounded.push(sums == again);
                assert_same_bits(&sums, if sums == again { &again } else { &expected }, "sums");
                let parts = vec![length / size; size];
                let mut own = values(3, rank, length);
                world.reduce_scatter(&mut own, &parts).unwrap();
                let own_part = length / size * rank..length / size * (rank + 1);
                assert_same_bits(&own[own_part.clone()], &expected[own_part], "own sums");
            }
            let (_, counter) = world.counters()[0];
            report(&format!("{rounded:?} {}", counter.bytes_sent));
        }
        "shapes" => {
            changing_shapes(&world, 600);
            report("equal");
        }
        "flows" => {
            // Two pairs exchange through each other's ranks, each in its own time; the last of each pair is done long after the others.
            let values = |from: usize| values(5, from, 500_000);
            let pairs = [[0, 2], [1, 3]];
            let pair = fabric.group(&pairs[rank % 2]).unwrap();
            assert_eq!(pair.transport(), "relay");
            for round in 0..4 {
                if (round + rank) % 3 == 0 {
                    std::thread::sleep(std::time::Duration::from_millis(50));
                }
                let peer = 1 - pair.rank();
                let received = if pair.rank() == 0 {
                    pair.send(peer, &values(rank)).unwrap();
                    let mut received = vec![0.0; 500_000];
                    pair.recv(peer, &mut received).unwrap();
                    received
                } else {
                    let mut received = vec![0.0; 500_000];
                    pair.recv(peer, &mut received).unwrap();
                    pair.send(peer, &values(rank)).unwrap();
                    received
                };
                assert_same_bits(&received, &values(pair.ranks()[peer]), "relayed");
            }
            // What rank 0 sends last must arrive though 0 leaves, and 1, through which it goes, has long done so.
            match rank {
                0 => pair.send(1, &values(0)).unwrap(),
                2 => {
                    std::thread::sleep(std::time::Duration::from_millis(600));
                    let mut received = vec![0.0; 500_000];
                    pair.recv(0, &mut received).unwrap();
                    assert_same_bits(&received, &values(0), "sent by a rank that has left");
                }
                _ => {}
            }
            report("equal");
        }
        "counters" => {
            let mut values = vec![1.0; 1000];
            for _ in 0..3 {
                world.all_reduce(&mut values).unwrap();
            }
            let (operation, counter) = world.counters()[0];
            assert_eq!(operation, Operation::AllReduce);
            // The receiver of a broadcast waits once, its root for nobody.
            world.broadcast(0, &mut vec![7; 100], false).unwrap();
            let (operation, broadcast) = world.counters()[3];
            assert_eq!((operation, broadcast.hops), (Operation::Broadcast, rank as u64));
            let transport = world.transport();
            let rails = fabric.peers()[1 - rank].rails;
            report(&format!("{transport} {rails} {} {} {}", counter.calls, counter.bytes_sent, counter.hops));
        }
        "transfer" => {
            // The time until a message of so many values is here: from before the receiver lets its sender begin, so that it is never
            // told too short.
            let mut values = vec![1.0; order.argument.parse().unwrap()];
            world.barrier(false).unwrap();
            let start = std::time::Instant::now();
            world.barrier(false).unwrap();
            if rank == 0 {
                world.send(1, &values).unwrap();
            } else {
                world.recv(0, &mut values).unwrap();
            }
            report(&start.elapsed().as_micros().to_string());
        }
        other => panic!("unknown program {other}"),
    }
}

fn random_run(run: Run) {
    for seed in 1..=2 {
        let argument = (seed * 1000 + run.size as u64).to_string();
        assert_eq!(Run { argument, checksums: seed == 1, ..run.clone() }.succeed(), vec!["equal"; run.size]);
    }
}

#[test]
fn random_sequences_over_shared_memory() {
    random_run(Run::new("random", 2, "shm"));
    random_run(Run::new("random", 4, "shm"));
}

#[test]
fn random_sequences_over_tcp() {
    random_run(Run::new("random", 2, "tcp"));
    random_run(Run::new("random", 3, "tcp"));
}

#[test]
fn random_sequences_over_several_rails() {
    random_run(Run { rails: 3, ..Run::new("random", 3, "tcp") });
}

#[test]
fn every_algorithm_gives_the_same_bits() {
    for (algorithm, transport, rails) in
        [("direct", "tcp", 1), ("scatter", "shm", 1), ("line", "shm", 1), ("line", "tcp", 2)]
    {
        random_run(Run { algorithm, rails, ..Run::new("random", 4, transport) });
    }
}

#[test]
fn random_sequences_in_a_ring() {
    for (size, transport, emulate) in [(4, "shm", "topology=ring"), (5, "tcp", "topology=ring,rails=2")] {
        random_run(Run { rails: 0, emulate: Some(emulate), ..Run::new("random", size, transport) });
    }
}

/// Every operation between all ranks, whatever links there are: lines, stars, trees, rings with chords.
#[test]
fn random_sequences_where_some_ranks_have_no_link() {
    for (size, transport, emulate) in [
        (3, "shm", "topology=1-0/0-2"),
        (4, "tcp", "topology=0-1/1-2/2-3"),
        (4, "shm", "topology=2-0/2-1/2-3"),
        (5, "tcp", "topology=0-3/3-1/1-4/4-2/2-0/0-1,rails=2"),
        (4, "tcp", "topology=0-2/2-1/1-3,latency=100us,loss=1e-3"),
    ] {
        random_run(Run { rails: 0, emulate: Some(emulate), ..Run::new("random", size, transport) });
    }
    let mut random = Random(11);
    for size in [6, 8] {
        // A random tree, and one link more.
        let mut pairs: Vec<String> = (1..size).map(|rank| format!("{rank}-{}", random.below(rank))).collect();
        pairs.push(format!("0-{}", size - 1));
        let emulate = Some(&*format!("topology={}", pairs.join("/")).leak());
        random_run(Run { rails: 0, emulate, ..Run::new("random", size, ["shm", "tcp"][random.below(2)]) });
    }
    let encrypted = Run { encrypt: true, key: |_| Some('a'), rails: 0, ..Run::new("random", 4, "tcp") };
    random_run(Run { emulate: Some("topology=0-2/2-1/1-3"), ..encrypted });
}

/// All at once through few: more than every rank on the way holds, in both directions, while the ranks on the way do something else.
#[test]
fn flows_through_the_same_ranks_do_not_wait_for_each_other() {
    for transport in ["shm", "tcp"] {
        let run = Run { rails: 0, emulate: Some("topology=0-1/1-2/2-3"), ..Run::new("flows", 4, transport) };
        assert_eq!(run.succeed(), ["equal"; 4]);
    }
}

#[test]
fn sums_in_bf16_on_the_wire_have_the_same_bits_on_all_ranks() {
    let run =
        |size, transport, algorithm| Run { wire: "bf16", algorithm, ..Run::new("wire", size, transport) }.succeed();
    // Half of the bytes: 2 (n - 1) / n of the long vector, and all of the short one to each.
    assert_eq!(run(2, "shm", "auto"), ["[false, false] 600192"; 2]);
    assert_eq!(run(3, "tcp", "auto"), ["[false, true] 800384"; 3]);
    assert_eq!(run(3, "shm", "line").len(), 3);
}

#[test]
fn random_sequences_over_encrypted_rails() {
    let run =
        Run { argument: "77".into(), rails: 2, encrypt: true, key: |_| Some('a'), ..Run::new("random", 3, "tcp") };
    assert_eq!(run.succeed(), ["equal"; 3]);
    let emulated = Run { rails: 0, emulate: Some("latency=10us,rails=2"), ..run };
    assert_eq!(emulated.succeed(), ["equal"; 3]);
    let run = Run { encrypt: true, key: |_| Some('a'), ..Run::new("counters", 2, "tcp") };
    assert_eq!(run.succeed(), ["tcp+noise 1 3 12000 3"; 2]);
}

#[test]
fn point_to_point_with_changing_shapes() {
    for transport in ["shm", "tcp"] {
        assert_eq!(Run::new("shapes", 2, transport).succeed(), ["equal", "equal"]);
    }
}

#[test]
fn many_ranks_on_few_cores() {
    assert_eq!(Run { argument: "5".into(), ..Run::new("random", 9, "shm") }.succeed(), ["equal"; 9]);
}

#[test]
fn counters_tell_transport_rails_bytes_and_hops() {
    assert_eq!(Run::new("counters", 2, "auto").succeed(), ["shm 1 3 12000 3"; 2]);
    assert_eq!(Run { rails: 2, ..Run::new("counters", 2, "tcp") }.succeed(), ["tcp 2 3 12000 3"; 2]);
}

#[test]
fn a_group_of_one_needs_nobody() {
    let solo = Group::solo();
    let mut values = [1.0, 2.0];
    solo.all_reduce(&mut values).unwrap();
    solo.all_gather(&mut values, &[2]).unwrap();
    solo.broadcast(0, &mut vec![1], true).unwrap();
    solo.barrier(false).unwrap();
    assert_eq!(solo.exchange(&[7], true).unwrap(), [[7]]);
    assert_eq!((values, solo.rank(), solo.size(), solo.transport()), ([1.0, 2.0], 0, 1, "none"));
    assert!(solo.all_gather(&mut values, &[1]).is_err());
    assert!(solo.send(0, &values).is_err());
    let fabric = Fabric::connect(Default::default()).unwrap();
    fabric.world().all_reduce(&mut values).unwrap();
    assert!(fabric.group(&[1]).is_err() && fabric.group(&[0, 0]).is_err() && fabric.group(&[]).is_err());
}

#[test]
fn random_sequences_over_a_bad_emulated_link() {
    let emulate = Some("latency=100us,bandwidth=2gbit,loss=1e-3,rails=2");
    for transport in ["tcp", "auto"] {
        let run = Run { argument: "9".into(), rails: 0, emulate, ..Run::new("random", 2, transport) };
        assert_eq!(run.succeed(), ["equal"; 2]);
    }
}

#[test]
fn an_emulated_link_takes_its_time() {
    let received_us = |transport, emulate, values: usize| {
        let run = Run {
            argument: values.to_string(),
            rails: 0,
            emulate: Some(emulate),
            ..Run::new("transfer", 2, transport)
        };
        run.succeed()[1].parse::<f64>().unwrap()
    };
    // 2^18 values are 8.4 Mbit: a second at 8 Mbit/s, half of that over two such rails.
    let one = received_us("tcp", "bandwidth=8mbit", 1 << 18);
    assert!(one > 1.0e6, "{one}");
    // Never faster than that; as fast in one of a few tries, since others may use the machine.
    let two = || received_us("tcp", "bandwidth=8mbit,rails=2", 1 << 18);
    assert!((0..8).any(|_| {
        let two = two();
        assert!(two > 0.5e6, "{two}");
        two < 0.9e6
    }));
}
