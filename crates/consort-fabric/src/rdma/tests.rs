//! Rails over the double: what a device may do wrong, and what must come of it.

use std::io;
use std::net::{Ipv6Addr, TcpListener, TcpStream};
use std::sync::atomic::Ordering;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use super::double::{FakeDevice, Fault, LIBRARY, plug_in, unplug_all};
use super::{Device, RAIL_BYTES, connect};
use crate::channel::RailStream;
use crate::health::Health;
use crate::rail::{Rail, receive_whole, send_whole};
use crate::tcp;
use crate::vigil::Vigil;

type Connected = Result<Box<dyn Rail>, String>;

fn open(name: &str, rails: usize) -> Result<Arc<Device>, String> {
    Device::open(&LIBRARY, Some(name), rails * RAIL_BYTES).map(Arc::new)
}

/// Nobody is lost here.
fn vigil() -> Vigil<'static> {
    static HEALTH: LazyLock<Health> = LazyLock::new(|| Health::new(1));
    Vigil::new(&HEALTH, Instant::now() + PATIENCE, PATIENCE)
}

/// The two ends of a plain connection.
fn side() -> [Box<dyn Rail>; 2] {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let other = listener.accept().unwrap().0;
    [one, other].map(|stream| {
        stream.set_nonblocking(true).unwrap();
        tcp::rail(RailStream { stream, ciphers: None }, false)
    })
}

/// Has two devices make a rail between them, each the `place`th of its own.
fn join(devices: [&Arc<Device>; 2], place: usize) -> [Connected; 2] {
    let [mut one, mut other] = side();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| connect(devices[0], place, &mut *one, true, vigil()).unwrap());
        let second = connect(devices[1], place, &mut *other, false, vigil()).unwrap();
        [first.join().unwrap(), second]
    })
}

/// Two devices and a rail between them.
fn rails(one: FakeDevice, other: FakeDevice) -> ([Arc<FakeDevice>; 2], [Box<dyn Rail>; 2]) {
    unplug_all();
    let fakes = [plug_in(one), plug_in(other)];
    let devices = ["one", "other"].map(|name| open(name, 1).unwrap());
    let rails = join([&devices[0], &devices[1]], 0).map(|rail| rail.unwrap_or_else(|reason| panic!("{reason}")));
    (fakes, rails)
}

fn one() -> FakeDevice {
    FakeDevice::new("one")
}

fn other() -> FakeDevice {
    FakeDevice::new("other")
}

fn unreliable(device: FakeDevice) -> FakeDevice {
    FakeDevice { has_reliable: false, ..device }
}

fn gid(address: &str) -> [u8; 16] {
    address.parse::<Ipv6Addr>().unwrap().octets()
}

const PATIENCE: Duration = Duration::from_secs(20);

/// Sends messages both ways at once and compares what arrives.
fn exchange(rails: &mut [Box<dyn Rail>; 2], lengths: &[usize]) -> io::Result<()> {
    let message =
        |end: usize, length: usize| (0..length).map(|at| (at * 31 + end * 7 + length) as u8).collect::<Vec<_>>();
    for &length in lengths {
        let outgoing = [message(0, length), message(1, length)];
        let (mut sent, mut received) = ([0; 2], [vec![0; length], vec![0; length]]);
        let mut come = [0; 2];
        let start = Instant::now();
        while sent != [length; 2] || come != [length; 2] {
            if start.elapsed() > PATIENCE {
                return Err(io::ErrorKind::TimedOut.into());
            }
            for end in 0..2 {
                sent[end] += rails[end].try_send(&[], &outgoing[end][sent[end]..])?;
                let from = come[end];
                come[end] += rails[end].try_recv(&mut received[end][from..])?;
            }
        }
        assert!(received[0] == outgoing[1] && received[1] == outgoing[0], "messages of {length} bytes");
    }
    Ok(())
}

/// Lengths around those of slots and frames.
const LENGTHS: [usize; 10] = [1, 7, 4096, 4097, 16_432, 16_433, 65_536, 1, (1 << 20) + 3, 2];

#[test]
fn bytes_arrive_whole_and_in_order_on_both_kinds_of_connection() {
    let (_, mut reliable) = rails(one(), other());
    assert_eq!(reliable[0].transport(), "rdma");
    exchange(&mut reliable, &LENGTHS).unwrap();
    // One end without reliable connections: both take the other kind.
    let (_, mut mixed) = rails(one(), unreliable(other()));
    assert_eq!(mixed.each_ref().map(|rail| rail.transport()), ["rdma (unreliable connection)"; 2]);
    exchange(&mut mixed, &LENGTHS).unwrap();
}

#[test]
fn the_address_is_chosen_from_the_table_and_used_for_the_way() {
    let table = |entries: &[(&str, Option<bool>)]| entries.iter().map(|&(text, kind)| (gid(text), kind)).collect();
    for (gids, chosen) in [
        (table(&[("fe80::1", None)]), Ok(0)),
        (table(&[("::", None), ("::", None), ("::ffff:10.0.0.1", None)]), Ok(2)),
        (table(&[("::ffff:10.0.0.1", Some(false)), ("::ffff:10.0.0.1", Some(true))]), Ok(1)),
        (table(&[("fe80::1", Some(true)), ("fe80::1", Some(true)), ("::ffff:10.0.0.1", Some(true))]), Ok(2)),
        (table(&[]), Err("RDMA device one: its GID table is empty")),
        (table(&[("::", None)]), Err("RDMA device one: no usable address among its 1 GIDs")),
    ] {
        let gids: Vec<([u8; 16], Option<bool>)> = gids;
        unplug_all();
        let fakes = [plug_in(FakeDevice { gids, ..one() }), plug_in(other())];
        match (open("one", 1), chosen) {
            (Ok(device), Ok(chosen)) => {
                assert!(join([&device, &open("other", 1).unwrap()], 0).iter().all(Result::is_ok));
                assert_eq!(fakes[0].paths.lock().unwrap()[0].1, chosen);
            }
            (Err(error), Err(expected)) => assert!(error.starts_with(expected), "{error}"),
            (opened, expected) => panic!("{:?} and {expected:?}", opened.map(|_| ())),
        }
    }
    assert_eq!(open("absent", 1).err().unwrap(), "there is no RDMA device absent");
}

/// The best address may lead nowhere, at either end or at both, in silence or with an error: then others are tried.
#[test]
fn an_address_that_leads_nowhere_gives_way_to_the_next() {
    let gids = || ["::ffff:10.0.0.1", "::ffff:10.1.0.1", "2001:db8::1"].map(|text| (gid(text), Some(true))).to_vec();
    for (dead, refused, chosen) in [
        ([vec![0], vec![0]], [vec![], vec![]], [1, 1]),
        ([vec![0], vec![1]], [vec![], vec![]], [1, 0]),
        ([vec![], vec![0]], [vec![0], vec![]], [1, 1]),
        ([vec![0, 1], vec![]], [vec![], vec![0, 1]], [2, 2]),
    ] {
        let what = format!("dead {dead:?}, refused {refused:?}");
        let ([dead_one, dead_other], [refused_one, refused_other]) = (dead, refused);
        let one = FakeDevice { gids: gids(), dead_gids: dead_one, refused_gids: refused_one, ..unreliable(one()) };
        let other = FakeDevice { gids: gids(), dead_gids: dead_other, refused_gids: refused_other, ..other() };
        let (fakes, mut rails) = rails(one, other);
        let last = |fake: &FakeDevice| fake.paths.lock().unwrap().last().unwrap().1;
        assert_eq!([last(&fakes[0]), last(&fakes[1])], chosen, "{what}");
        exchange(&mut rails, &[5, 70_000]).unwrap();
        drop(rails);
        assert_eq!(fakes.each_ref().map(|fake| fake.pairs.load(Ordering::SeqCst)), [0; 2], "{what}");
    }
    unplug_all();
    plug_in(FakeDevice { gids: gids(), dead_gids: vec![0, 1, 2], ..unreliable(one()) });
    plug_in(FakeDevice { gids: gids()[..1].to_vec(), ..other() });
    let devices = ["one", "other"].map(|name| open(name, 1).unwrap());
    for (end, indices) in join([&devices[0], &devices[1]], 0).into_iter().zip(["0, 1, 2", "0, 0, 0"]) {
        let reason = end.err().unwrap();
        assert!(
            reason.contains("no message comes through; do the devices that are listed lead to each other"),
            "{reason}"
        );
        assert!(
            reason.ends_with(&format!("(3 pairs of addresses were tried, here GID indices {indices})")),
            "{reason}"
        );
    }
}

#[test]
fn the_path_carries_what_both_ends_can() {
    for mtus in [[3, 5], [5, 3], [5, 5]] {
        let (fakes, _rails) =
            rails(FakeDevice { active_mtu: mtus[0], ..one() }, FakeDevice { active_mtu: mtus[1], ..other() });
        for fake in &fakes {
            assert_eq!(fake.paths.lock().unwrap()[0].0, mtus[0].min(mtus[1]));
        }
    }
}

#[test]
fn what_goes_wrong_with_a_message_is_an_error_that_says_so() {
    for (fault, expected) in [
        (Fault::FailSend(12), "status 12, transport retries exceeded: the peer does not answer"),
        (Fault::FailReceive(1), "status 1, local length error"),
        (Fault::RefuseSend(libc::ENOMEM), "a send was refused (error 12)"),
        (Fault::CutTo(900), "of 4096 bytes came with 884 of them"),
        (Fault::CutTo(3), "a message of 3 bytes came, shorter than its prefix"),
    ] {
        for number in [0, 1, 17] {
            let (fakes, mut rails) = rails(unreliable(one()), unreliable(other()));
            exchange(&mut rails, &[4096]).unwrap();
            fakes[0].strike(number, fault);
            let error = exchange(&mut rails, &[4096; 30]).unwrap_err().to_string();
            assert!(error.starts_with("RDMA device o") && error.contains(expected), "{fault:?} at {number}: {error}");
        }
    }
}

#[test]
fn a_lost_message_is_an_error_where_none_may_be_lost() {
    let (fakes, mut rails) = rails(one(), other());
    fakes[0].strike(3, Fault::Lose);
    let error = exchange(&mut rails, &[1 << 20]).unwrap_err().to_string();
    assert!(error.contains("came in place of") && error.contains("one was lost"), "{error}");
}

#[test]
fn an_unreliable_connection_makes_up_for_lost_messages() {
    // Each message of a short exchange lost in turn, at either end: payload, credits, and the last one, after which nothing comes.
    for end in 0..2 {
        for number in 0..20 {
            let (fakes, mut rails) = rails(unreliable(one()), unreliable(other()));
            fakes[end].strike(number, Fault::Lose);
            exchange(&mut rails, &[100, 70_000, 5, 70_000]).unwrap_or_else(|error| panic!("{end} {number}: {error}"));
        }
    }
    // Many lost, at both ends, of many.
    for device in [one(), FakeDevice { granted_requests: Some(4), ..one() }] {
        let lossy = |device| FakeDevice { lose_every: Some(37), ..unreliable(device) };
        let (_, mut rails) = rails(lossy(device), lossy(other()));
        exchange(&mut rails, &LENGTHS).unwrap();
    }
}

#[test]
fn a_port_that_goes_down_is_noticed_by_the_end_that_waits() {
    let (fakes, mut rails) = rails(unreliable(one()), unreliable(other()));
    exchange(&mut rails, &[100]).unwrap();
    fakes[1].state.store(1, Ordering::SeqCst);
    let start = Instant::now();
    let error = receive_whole(&mut *rails[1], &mut [0; 10], vigil()).unwrap_err();
    assert!(error.to_string().contains("other: its port is not active (state 1)"), "{error}");
    assert!(start.elapsed() < PATIENCE / 2);
    // A port that is down from the start is found when the device is opened.
    let error = open("other", 1).err().unwrap();
    assert!(error.contains("its port is not active"), "{error}");
}

#[test]
fn a_shallow_queue_is_used_as_deep_as_it_is() {
    for shallow in [
        FakeDevice { granted_requests: Some(5), ..one() },
        FakeDevice { granted_requests: Some(4), ..one() },
        FakeDevice { granted_requests: Some(64), ..one() },
        FakeDevice { most_requests: 4, ..one() },
    ] {
        let (_, mut rails) = rails(shallow, unreliable(other()));
        exchange(&mut rails, &LENGTHS).unwrap();
    }
    unplug_all();
    let fakes = [plug_in(FakeDevice { granted_requests: Some(3), ..one() }), plug_in(other())];
    let devices = ["one", "other"].map(|name| open(name, 1).unwrap());
    let [here, there] = join([&devices[0], &devices[1]], 0).map(|rail| rail.err().unwrap());
    assert_eq!(here, "RDMA device one: its queue pairs hold 3 requests, and 4 are needed");
    assert_eq!(there, format!("the other end: {here}"));
    drop(fakes);
}

#[test]
fn short_messages_go_with_their_request_where_the_device_takes_them_so() {
    for (most_inline_bytes, expected) in [(192, 3), (0, 0)] {
        let (fakes, mut rails) = rails(FakeDevice { most_inline_bytes, ..one() }, other());
        // The first message of a new rail is short too. Then one that fits with its prefix, and two that don't.
        exchange(&mut rails, &[8, 176, 177, 5000]).unwrap();
        assert_eq!(fakes[0].inline.load(Ordering::SeqCst), expected, "{most_inline_bytes} bytes");
    }
}

#[test]
fn what_arrives_is_read_where_it_lies() {
    for devices in [[one(), other()], [unreliable(one()), other()]] {
        let [first, second] = devices;
        let (_, mut rails) = rails(first, second);
        assert!(rails[1].reads_in_place());
        let message: Vec<u8> = (0..100_000).map(|at| (at * 7 % 251) as u8).collect();
        let (mut sent, mut received) = (0, Vec::new());
        let start = Instant::now();
        while received.len() < message.len() {
            assert!(start.elapsed() < PATIENCE);
            sent += rails[0].try_send(&[], &message[sent..]).unwrap();
            let length = rails[1].look(message.len() - received.len()).unwrap();
            // Not all that lies there is taken at once.
            let length = length.min(7000);
            received.extend_from_slice(rails[1].arrived(length));
            rails[1].consume(length).unwrap();
        }
        assert!(received == message);
    }
}

#[test]
fn a_small_device_carries_as_many_rails_as_it_has_queue_pairs_in_one_region() {
    let limits = |device| FakeDevice { most_pairs: 10, most_regions: 100, ..device };
    let fakes = [plug_in(limits(one())), plug_in(limits(other()))];
    let devices = ["one", "other"].map(|name| open(name, 11).unwrap());
    let mut rails: Vec<_> =
        (0..10).map(|place| join([&devices[0], &devices[1]], place).map(|rail| rail.ok().unwrap())).collect();
    assert_eq!(fakes.each_ref().map(|fake| fake.regions.load(Ordering::SeqCst)), [1, 1]);
    for ends in join([&devices[0], &devices[1]], 10) {
        let reason = ends.err().unwrap();
        assert!(reason.contains("a queue pair cannot be made: Device or resource busy"), "{reason}");
    }
    for rails in &mut rails {
        exchange(rails, &[40_000]).unwrap();
    }
    drop((rails, devices));
    let left = fakes.map(|fake| (fake.pairs.load(Ordering::SeqCst), fake.regions.load(Ordering::SeqCst)));
    assert_eq!(left, [(0, 0); 2], "everything is given back");
}

#[test]
fn a_way_that_carries_nothing_is_found_by_both_ends() {
    let fakes = [plug_in(unreliable(one())), plug_in(unreliable(other()))];
    fakes[0].strike(0, Fault::Lose);
    let devices = ["one", "other"].map(|name| open(name, 1).unwrap());
    let [here, there] = join([&devices[0], &devices[1]], 0).map(|rail| rail.err().unwrap());
    assert!(there.contains("RDMA device other: no message comes through"), "{there}");
    assert!(here.starts_with("the other end: RDMA device other: no message"), "{here}");
}

#[test]
fn memory_that_cannot_be_registered_is_told_with_its_remedy() {
    plug_in(FakeDevice { most_regions: 0, ..one() });
    let error = open("one", 1).err().unwrap();
    assert!(error.contains("cannot be registered") && error.contains("ulimit -l"), "{error}");
}

#[test]
fn what_is_sent_last_is_received_before_the_rail_ends() {
    let (_, [mut one, mut other]) = rails(one(), other());
    send_whole(&mut *one, &[5; 100], vigil()).unwrap();
    one.finish();
    drop(one);
    let mut bytes = [0; 100];
    receive_whole(&mut *other, &mut bytes, vigil()).unwrap();
    assert_eq!(bytes, [5; 100]);
}

#[test]
fn devices_are_listed_with_what_is_in_their_way() {
    plug_in(one());
    plug_in(FakeDevice { gids: Vec::new(), ..other() });
    let listed = super::device::devices(&LIBRARY);
    assert_eq!(listed.len(), 2);
    assert_eq!(listed[0].state, Ok("address 10.0.0.1 (GID index 0), packets of 4096 bytes".to_owned()));
    assert_eq!(listed[1].state, Err("RDMA device other: its GID table is empty".to_owned()));
}
