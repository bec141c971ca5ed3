//! How the two ends of a rail come to share a queue pair, over an existing connection between them.
//!
//! Both ends go through the same stages, and after each they tell each other whether it went well: so that they always agree on
//! whether there is a rail, whichever of them could not make one.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::device::Device;
use super::queues::{End, Queues};
use super::rail::RdmaRail;
use crate::rail::{Rail, receive_whole, send_whole};

/// Set-up messages go over an existing connection.
const PATIENCE: Duration = Duration::from_secs(10);
/// A queue pair that has not carried its first message by then carries none.
const PROBE_PATIENCE: Duration = Duration::from_secs(2);
/// What each end sends as the first message.
const PROBE: [u8; 8] = *b"consort?";
/// Bytes in which an end says what is in its way.
const REASON_BYTES: usize = 240;

/// Says `ours` to the other end and hears the same from it.
fn swap<const N: usize>(side: &mut dyn Rail, ours: &[u8; N]) -> io::Result<[u8; N]> {
    let mut theirs = [0; N];
    send_whole(side, ours, PATIENCE)?;
    receive_whole(side, &mut theirs, PATIENCE)?;
    Ok(theirs)
}

/// Tells the other end how a stage went here, and hears how it went there. Goes on only if it went well at both.
fn agree<T>(side: &mut dyn Rail, here: io::Result<T>) -> io::Result<Result<T, String>> {
    let here = here.map_err(|error| error.to_string());
    let mut ours = [0; REASON_BYTES];
    if let Err(reason) = &here {
        let length = reason.floor_char_boundary(REASON_BYTES);
        ours[..length].copy_from_slice(&reason.as_bytes()[..length]);
    }
    let theirs = swap(side, &ours)?;
    let theirs = String::from_utf8_lossy(&theirs);
    Ok(match theirs.trim_end_matches('\0') {
        "" => here,
        reason => here.and(Err(format!("the other end: {reason}"))),
    })
}

/// Makes a rail with the other end of `side`, an existing connection to the same peer, and sends a first message over it in both
/// directions. `place` is the rail's own part of the device's slab. The inner error says why there can be none, and then the
/// other end has one too; the outer one is a failure of `side`.
pub(crate) fn connect(
    device: &Arc<Device>,
    place: usize,
    side: &mut dyn Rail,
) -> io::Result<Result<Box<dyn Rail>, String>> {
    // Reliable connections if both devices have them.
    let reliable = Queues::new(device, true);
    let both_reliable = swap(side, &[u8::from(reliable.is_ok())])? == [1] && reliable.is_ok();
    let queues = if both_reliable { reliable } else { Queues::new(device, false) };
    let queues = match agree(side, queues.and_then(|queues| queues.initialize().map(|()| queues)))? {
        Ok(queues) => queues,
        Err(reason) => return Ok(Err(reason)),
    };
    let own = End::of(&queues);
    let peer = End::decode(&swap(side, &own.encode())?);
    let ready = RdmaRail::new(queues, own.depth.min(peer.depth), place)
        .and_then(|rail| rail.queues().connect(&own, &peer).map(|()| rail));
    // Nobody sends before both can receive.
    let mut rail = match agree(side, ready)? {
        Ok(rail) => rail,
        Err(reason) => return Ok(Err(reason)),
    };
    let probed = probe(&mut rail);
    Ok(agree(side, probed)?.map(|()| Box::new(rail) as Box<dyn Rail>))
}

/// That both ends have a device, and a port that is up, does not mean that a way leads from one to the other.
fn probe(rail: &mut RdmaRail) -> io::Result<()> {
    let mut heard = [0; PROBE.len()];
    let result =
        send_whole(rail, &PROBE, PROBE_PATIENCE).and_then(|()| receive_whole(rail, &mut heard, PROBE_PATIENCE));
    match result {
        Err(error) if error.kind() == io::ErrorKind::TimedOut => Err(io::Error::other(format!(
            "RDMA device {}: no message comes through; do the devices that are listed lead to each other?",
            rail.queues().device.name
        ))),
        Ok(()) if heard != PROBE => Err(io::Error::other("another message came than the one that was sent")),
        result => result,
    }
}
