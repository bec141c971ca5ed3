//! How fast each rail of a link is, measured when the fabric is set up, so that messages are striped in proportion.

use std::io;
use std::time::Instant;

use crate::rail::{Rail, receive_whole, send_whole};
use crate::vigil::Vigil;

/// Bytes that go over each rail and back: enough to outweigh its latency, little enough for a slow network (20 ms at 100 Mbit/s).
const PROBE_BYTES: usize = 256 << 10;
/// In round `round` of a tournament among `size` ranks, whom `rank` measures with: every pair meets once, and no rank has two
/// measurements at a time.
pub(crate) fn opponent(rank: usize, round: usize, size: usize) -> Option<usize> {
    let opponent = (round + size - rank % size) % size;
    (opponent != rank).then_some(opponent)
}

/// Measures all rails of a link, one after another; both ends call it together. The side that `leads` takes the times and tells
/// the other. Returns each rail's speed in bytes per millisecond. A message
/// that does not come while its sender lives is sent over a rail that is not working.
pub(crate) fn measure(rails: &mut [Box<dyn Rail>], leads: bool, vigil: Vigil) -> io::Result<Vec<u32>> {
    let mut speeds = vec![0u32; rails.len()];
    let mut probe = vec![0x5A; PROBE_BYTES];
    for (rail, speed) in rails.iter_mut().zip(&mut speeds) {
        if leads {
            let start = Instant::now();
            send_whole(&mut **rail, &probe, vigil.step())?;
            receive_whole(&mut **rail, &mut probe, vigil.step())?;
            let microseconds = start.elapsed().as_micros().max(1) as u64;
            *speed = (2 * PROBE_BYTES as u64 * 1000 / microseconds).clamp(1, u32::MAX as u64) as u32;
        } else {
            receive_whole(&mut **rail, &mut probe, vigil.step())?;
            send_whole(&mut **rail, &probe, vigil.step())?;
        }
    }
    for speed in &mut speeds {
        let mut bytes = speed.to_le_bytes();
        if leads {
            send_whole(&mut *rails[0], &bytes, vigil.step())?
        } else {
            receive_whole(&mut *rails[0], &mut bytes, vigil.step())?
        }
        *speed = u32::from_le_bytes(bytes).max(1);
    }
    Ok(speeds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_meets_once_and_nobody_twice_at_a_time() {
        for size in 2..10 {
            let mut meetings = vec![0; size * size];
            for round in 0..size {
                for rank in 0..size {
                    if let Some(other) = opponent(rank, round, size) {
                        assert_eq!(opponent(other, round, size), Some(rank));
                        meetings[rank * size + other] += 1;
                    }
                }
            }
            for rank in 0..size {
                for other in (0..size).filter(|&other| other != rank) {
                    assert_eq!(meetings[rank * size + other], 1);
                }
            }
        }
    }
}
