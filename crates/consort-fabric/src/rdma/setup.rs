//! How the two ends of a rail come to share a queue pair, over an existing connection between them.
//!
//! Both ends go through the same stages, and after each they tell each other whether it went well: so that they always agree on
//! whether there is a rail, whichever of them could not make one.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::device::{Device, GidEntry};
use super::queues::{End, Queues};
use super::rail::RdmaRail;
use crate::rail::{Rail, receive_whole, send_whole};
use crate::vigil::Vigil;

/// A queue pair that has not carried its first message by then carries none.
const PROBE_PATIENCE: Duration = Duration::from_secs(2);
/// What each end sends as the first message.
const PROBE: [u8; 8] = *b"consort?";
/// Bytes in which an end says what is in its way.
const REASON_BYTES: usize = 240;

/// Says `ours` to the other end and hears the same from it.
fn swap<const N: usize>(side: &mut dyn Rail, ours: &[u8; N], vigil: Vigil) -> io::Result<[u8; N]> {
    let mut theirs = [0; N];
    send_whole(side, ours, vigil.step())?;
    receive_whole(side, &mut theirs, vigil.step())?;
    Ok(theirs)
}

/// Tells the other end how a stage went here, and hears how it went there. Goes on only if it went well at both.
fn agree<T>(side: &mut dyn Rail, here: io::Result<T>, vigil: Vigil) -> io::Result<Result<T, String>> {
    let here = here.map_err(|error| error.to_string());
    let mut ours = [0; REASON_BYTES];
    if let Err(reason) = &here {
        let length = reason.floor_char_boundary(REASON_BYTES);
        ours[..length].copy_from_slice(&reason.as_bytes()[..length]);
    }
    let theirs = swap(side, &ours, vigil)?;
    let theirs = String::from_utf8_lossy(&theirs);
    Ok(match theirs.trim_end_matches('\0') {
        "" => here,
        reason => here.and(Err(format!("the other end: {reason}"))),
    })
}

/// Most pairs of addresses that are tried: one that leads nowhere costs seconds.
const MOST_WAYS: usize = 6;
/// An address as the other end must know it: the GID, and whether it is routable.
const GID_BYTES: usize = 17;
const TABLE_BYTES: usize = 8 * GID_BYTES;

fn encode_gids(gids: &[GidEntry]) -> [u8; TABLE_BYTES] {
    let mut bytes = [0; TABLE_BYTES];
    for (place, entry) in bytes.as_chunks_mut::<GID_BYTES>().0.iter_mut().zip(gids) {
        place[..16].copy_from_slice(&entry.gid);
        place[16] = entry.routable.map_or(2, u8::from);
    }
    bytes
}

fn decode_gids(bytes: &[u8; TABLE_BYTES]) -> Vec<GidEntry> {
    let entry = |(index, bytes): (usize, &[u8; GID_BYTES])| GidEntry {
        index: index as u8,
        gid: bytes[..16].try_into().expect("sixteen bytes"),
        routable: [Some(false), Some(true), None][usize::from(bytes[16].min(2))],
    };
    let entries = bytes.as_chunks().0.iter().enumerate().map(entry);
    entries.take_while(|entry| entry.gid != [0; 16]).collect()
}

/// Which of the first end's addresses is tried with which of the second's, by their places: addresses of one kind first, and
/// better ones first. Both ends find the same.
fn ways(first: &[GidEntry], second: &[GidEntry]) -> Vec<(usize, usize)> {
    let kind = |entry: &GidEntry| (entry.routable, entry.is_ipv4(), entry.is_link_local());
    let mut ways: Vec<(usize, usize)> =
        (0..first.len()).flat_map(|one| (0..second.len()).map(move |other| (one, other))).collect();
    ways.sort_by_key(|&(one, other)| (kind(&first[one]) != kind(&second[other]), one + other, one));
    ways.truncate(MOST_WAYS);
    ways
}

/// Why there is no rail.
enum Obstacle {
    /// It would be no other way either.
    Device(String),
    /// These addresses do not lead to each other.
    Way(String),
}

/// Makes a rail with the other end of `side`, an existing connection to the same peer, and sends a first message over it in both
/// directions. Addresses are tried until one pair of them carries it. `place` is the rail's own part of the device's slab; one end
/// is the `first`. The inner error says why there can be none, and then the other end has one too; the outer one is a
/// failure of `side`.
pub(crate) fn connect(
    device: &Arc<Device>,
    place: usize,
    side: &mut dyn Rail,
    first: bool,
    vigil: Vigil,
) -> io::Result<Result<Box<dyn Rail>, String>> {
    let own = &device.gids;
    let theirs = decode_gids(&swap(side, &encode_gids(own), vigil)?);
    let ways = if first { ways(own, &theirs) } else { ways(&theirs, own) };
    let mut obstacle = "the other end has no address".to_owned();
    let mut tried = Vec::new();
    for way in ways {
        let gid = own[if first { way.0 } else { way.1 }];
        match attempt(device, gid, place, side, vigil)? {
            Ok(rail) => return Ok(Ok(Box::new(rail))),
            Err(Obstacle::Device(reason)) => return Ok(Err(reason)),
            // The first addresses are the best, and so is what is in their way.
            Err(Obstacle::Way(reason)) if tried.is_empty() => obstacle = reason,
            Err(Obstacle::Way(_)) => {}
        }
        tried.push(gid.index.to_string());
    }
    if tried.len() > 1 {
        obstacle += &format!(" ({} pairs of addresses were tried, here GID indices {})", tried.len(), tried.join(", "));
    }
    Ok(Err(obstacle))
}

/// Makes a rail that is known by the address `gid`.
fn attempt(
    device: &Arc<Device>,
    gid: GidEntry,
    place: usize,
    side: &mut dyn Rail,
    vigil: Vigil,
) -> io::Result<Result<RdmaRail, Obstacle>> {
    // Reliable connections if both devices have them.
    let reliable = Queues::new(device, gid, true);
    let both_reliable = swap(side, &[u8::from(reliable.is_ok())], vigil)? == [1] && reliable.is_ok();
    let queues = if both_reliable { reliable } else { Queues::new(device, gid, false) };
    let queues = match agree(side, queues.and_then(|queues| queues.initialize().map(|()| queues)), vigil)? {
        Ok(queues) => queues,
        Err(reason) => return Ok(Err(Obstacle::Device(reason))),
    };
    let own = End::of(&queues);
    let peer = End::decode(&swap(side, &own.encode(), vigil)?);
    let ready = RdmaRail::new(queues, own.depth.min(peer.depth), place)
        .and_then(|rail| rail.queues().connect(&own, &peer).map(|()| rail));
    // Nobody sends before both can receive.
    let mut rail = match agree(side, ready, vigil)? {
        Ok(rail) => rail,
        Err(reason) => return Ok(Err(Obstacle::Way(reason))),
    };
    let probed = probe(&mut rail, vigil.within(PROBE_PATIENCE));
    Ok(agree(side, probed, vigil)?.map(|()| rail).map_err(Obstacle::Way))
}

/// That both ends have a device, and a port that is up, does not mean that a way leads from one to the other.
fn probe(rail: &mut RdmaRail, vigil: Vigil) -> io::Result<()> {
    let mut heard = [0; PROBE.len()];
    let result = send_whole(rail, &PROBE, vigil).and_then(|()| receive_whole(rail, &mut heard, vigil));
    match result {
        Err(error) if error.kind() == io::ErrorKind::TimedOut => Err(io::Error::other(format!(
            "RDMA device {}: no message comes through; do the devices that are listed lead to each other, with addresses in one network?",
            rail.queues().device.name
        ))),
        Ok(()) if heard != PROBE => Err(io::Error::other("another message came than the one that was sent")),
        result => result,
    }
}
