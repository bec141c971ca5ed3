//! The fuzzer's corpus: one input of each kind, written by this version and replayed here.

use std::path::PathBuf;

use crate::channel::{ControlMessage, Hello, Purpose, encode};
use crate::frame::{Frame, Message, Operation};
use crate::fuzzing::decode;
use crate::health::Failure;
use crate::relay::{Chunk, Flow};

fn directory() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/decoders")
}

fn messages() -> Vec<(&'static str, ControlMessage)> {
    let hello = |purpose| Hello {
        purpose,
        run_id: "run-1".into(),
        rank: 1,
        size: 2,
        host: "m1".into(),
        agreement: vec![("plan".into(), "tensor:2".into())],
        clock_ns: 1_790_000_000_000_000_000,
        machine: "b0/pid:[4026531836]/0".into(),
        cores: vec![0, 1],
        control_address: Some("192.168.1.2:40000".parse().unwrap()),
        rail_addresses: vec!["192.168.1.2:40001".parse().unwrap(), "[fe80::1]:40002".parse().unwrap()],
        rdma: Ok(vec![1, 0]),
        region: None,
    };
    let without = Hello { rdma: Err("no RDMA device is listed".into()), ..hello(Purpose::Spare) };
    vec![
        ("hello", ControlMessage::Hello(Box::new(hello(Purpose::Control)))),
        ("hello_spare", ControlMessage::Hello(Box::new(without))),
        ("hello_rail", ControlMessage::Hello(Box::new(hello(Purpose::Rail(1))))),
        ("hello_relay", ControlMessage::Hello(Box::new(hello(Purpose::Relay)))),
        ("roster", ControlMessage::Roster(vec![hello(Purpose::Control); 2])),
        ("refused", ControlMessage::Refused("ranks disagree on plan".into())),
        ("ready", ControlMessage::Ready),
        ("heartbeat", ControlMessage::Heartbeat),
        ("abort", ControlMessage::Abort(Failure { rank: 3, gave_up: false, cause: "its process ended".into() })),
        ("goodbye", ControlMessage::Goodbye),
        ("acknowledged", ControlMessage::Acknowledged { rail: 1, frames: 77 }),
        ("rail_lost", ControlMessage::RailLost { rail: 1, frames: u64::MAX }),
        (
            "resent",
            ControlMessage::Resent { header: frame(0, Operation::AllReduce).encode().to_vec(), payload: vec![7; 3] },
        ),
    ]
}

fn frame(at: u64, operation: Operation) -> Frame {
    let message = Message { operation, group: at as u32 * 0x0101_0101, length: 1 << (6 * at) };
    Frame { message, sequence: at, offset: 0, segment: message.length, checksum: at as u32 }
}

fn frames() -> impl Iterator<Item = (u64, Frame)> {
    (0..).zip(Operation::ALL).map(|(at, operation)| (at, frame(at, operation)))
}

fn chunks() -> [(&'static str, Chunk); 3] {
    [("chunk_data", Chunk::Data(16_384)), ("chunk_room", Chunk::Room(65_536)), ("chunk_end", Chunk::End)]
}

/// For a new version of the protocol: `cargo test -p consort-fabric --lib corpus -- --ignored`.
#[test]
#[ignore = "writes the corpus"]
fn the_corpus_is_written() {
    let directory = directory();
    std::fs::create_dir_all(&directory).unwrap();
    for (name, message) in messages() {
        std::fs::write(directory.join(name), encode(&message)).unwrap();
    }
    for (at, frame) in frames() {
        std::fs::write(directory.join(format!("frame_{at}")), frame.encode()).unwrap();
    }
    for (name, chunk) in chunks() {
        std::fs::write(directory.join(name), chunk.encode(Flow { source: 1, destination: 0x0203 })).unwrap();
    }
}

#[test]
fn the_corpus_is_replayed_whole_cut_and_damaged() {
    let inputs = std::fs::read_dir(directory()).unwrap();
    let mut known = [0; 3];
    for input in inputs.map(|entry| std::fs::read(entry.unwrap().path()).unwrap()) {
        known.iter_mut().zip(decode(&input)).for_each(|(known, is)| *known += usize::from(is));
        for at in 0..input.len() {
            decode(&input[..at]);
            for value in [0, 1, 0x7F, 0x80, 0xFF] {
                let mut damaged = input.clone();
                damaged[at] = value;
                decode(&damaged);
            }
        }
    }
    // Of another version they would all be refused at their first bytes, and tell nothing.
    let expected = [messages().len(), frames().count(), chunks().len()];
    assert_eq!(known, expected, "messages, frames and chunks that are understood");
}
