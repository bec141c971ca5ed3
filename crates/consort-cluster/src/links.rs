//! How fast each link of a fabric is, in both directions: what `consort doctor` writes into a hostfile, and a plan starts from.
//!
//! One pair of ranks at a time measures, so that links which share a cable or a switch do not disturb each other.

use std::time::{Duration, Instant};

use consort_fabric::{Fabric, FabricError, Group};
use serde::{Deserialize, Serialize};

use crate::hostfile::LinkSpeed;

/// What one rank measured on its way to another.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// The sending rank.
    pub from: usize,
    /// The receiving rank.
    pub to: usize,
    /// What carries its data.
    pub transport: String,
    /// Cables or sockets.
    pub rails: usize,
    /// Half of a round trip of a few bytes: the median.
    pub latency_us: f64,
    /// Gigabytes (10⁹) per second of large messages.
    pub bandwidth_gb_s: f64,
    /// The same of each rail by itself, where there are several, as a short probe found it.
    pub rails_gb_s: Vec<f64>,
}

impl Link {
    /// As a hostfile keeps it.
    pub fn speed(&self) -> LinkSpeed {
        LinkSpeed { latency_ns: (self.latency_us * 1e3) as u64, bytes_per_s: (self.bandwidth_gb_s * 1e9) as u64 }
    }
}

/// Transports by the number that stands for them while results are gathered.
const TRANSPORTS: [&str; 7] = ["none", "shm", "tcp", "tcp+noise", "rdma", "rdma (unreliable connection)", "mixed"];
/// Values of one result: latency in µs, bandwidth in GB/s, number of the transport, rails, and the speed of each rail.
const FIELDS: usize = 4 + MOST_RAILS;
/// Rails of a link, at most.
const MOST_RAILS: usize = 8;
/// Round trips of the latency's median, if they take no longer than `ENOUGH`.
const ROUND_TRIPS: usize = 200;
/// Fewer would be no median.
const LEAST_ROUND_TRIPS: usize = 5;
/// Values of a large message: 1 MiB.
const MESSAGE_VALUES: usize = 1 << 18;
/// Most messages in a row: 256 MiB.
const MOST_MESSAGES: usize = 256;
/// A measurement that took so long says enough.
const ENOUGH: Duration = Duration::from_millis(200);

/// Measures all links. All ranks call it together and get the same results, ordered by `from` and `to`.
///
/// # Errors
/// Whatever ends a transfer.
pub fn measure(fabric: &Fabric) -> Result<Vec<Link>, FabricError> {
    let world = fabric.world();
    let size = world.size();
    let all = || (0..size).flat_map(|from| (0..size).map(move |to| (from, to)));
    let pairs = || all().filter(|&(from, to)| fabric.are_linked(from, to));
    // Each rank fills in its own results, and the sum over all ranks is the whole.
    let mut results = vec![0f32; size * size * FIELDS];
    for (first, second) in pairs().filter(|(first, second)| first < second) {
        world.barrier(true)?;
        if ![first, second].contains(&world.rank()) {
            continue;
        }
        let pair = fabric.group(&[first, second])?;
        for (from, to) in [(first, second), (second, first)] {
            if world.rank() != from {
                let sender = usize::from(from == second);
                answer(&pair, sender)?;
                drain(&pair, sender)?;
                continue;
            }
            let receiver = usize::from(to == second);
            let latency_us = round_trip(&pair, receiver)?.as_secs_f32() * 1e6 / 2.0;
            let bandwidth_gb_s = fill(&pair, receiver)? / 1e9;
            let transport = TRANSPORTS.iter().position(|name| *name == pair.transport()).unwrap_or(0);
            let rails = fabric.peers()[to].rails;
            results[(from * size + to) * FIELDS..][..4].copy_from_slice(&[
                latency_us,
                bandwidth_gb_s,
                transport as f32,
                rails as f32,
            ]);
            let result = &mut results[(from * size + to) * FIELDS + 4..][..MOST_RAILS];
            let speeds = fabric.peers()[to].rail_bytes_per_ms.iter().filter(|_| rails > 1);
            for (value, speed) in result.iter_mut().zip(speeds) {
                *value = *speed as f32 / 1e6;
            }
        }
    }
    world.all_reduce(&mut results)?;
    let link = |(from, to): (usize, usize)| {
        let result = &results[(from * size + to) * FIELDS..][..FIELDS];
        Link {
            from,
            to,
            transport: TRANSPORTS[result[2] as usize].to_owned(),
            rails: result[3] as usize,
            latency_us: f64::from(result[0]),
            bandwidth_gb_s: f64::from(result[1]),
            rails_gb_s: result[4..].iter().filter(|&&speed| speed > 0.0).map(|&speed| f64::from(speed)).collect(),
        }
    };
    Ok(pairs().map(link).collect())
}

/// The median time of a small message there and back; [`answer`] is the other side.
fn round_trip(pair: &Group, receiver: usize) -> Result<Duration, FabricError> {
    let mut times = Vec::with_capacity(ROUND_TRIPS);
    let begin = Instant::now();
    while times.len() < LEAST_ROUND_TRIPS || (times.len() < ROUND_TRIPS && begin.elapsed() < ENOUGH) {
        let start = Instant::now();
        pair.send(receiver, &[1.0f32])?;
        pair.recv(receiver, &mut [0.0f32])?;
        times.push(start.elapsed());
    }
    pair.send(receiver, &[0.0f32])?;
    times.sort_unstable();
    Ok(times[times.len() / 2])
}

/// Sends small messages back until one says that it was the last.
fn answer(pair: &Group, sender: usize) -> Result<(), FabricError> {
    let mut message = [0.0f32];
    loop {
        pair.recv(sender, &mut message)?;
        if message == [0.0] {
            return Ok(());
        }
        pair.send(sender, &message)?;
    }
}

/// Bytes per second of large messages in a row, of which there are ever more until they take long enough; [`drain`] is the other
/// side.
fn fill(pair: &Group, receiver: usize) -> Result<f32, FabricError> {
    let message = vec![1.0f32; MESSAGE_VALUES];
    let mut count = 1;
    loop {
        pair.send(receiver, &[count as f32])?;
        let start = Instant::now();
        for _ in 0..count {
            pair.send(receiver, &message)?;
        }
        pair.recv(receiver, &mut [0.0f32])?;
        let elapsed = start.elapsed();
        if elapsed >= ENOUGH || count >= MOST_MESSAGES {
            pair.send(receiver, &[0.0f32])?;
            return Ok((count * size_of_val(&message[..])) as f32 / elapsed.as_secs_f32());
        }
        count *= 4;
    }
}

/// Takes large messages until a count of none is announced.
fn drain(pair: &Group, sender: usize) -> Result<(), FabricError> {
    let mut message = vec![0.0f32; MESSAGE_VALUES];
    let mut count = [0.0f32];
    loop {
        pair.recv(sender, &mut count)?;
        if count == [0.0] {
            return Ok(());
        }
        for _ in 0..count[0] as usize {
            pair.recv(sender, &mut message)?;
        }
        pair.send(sender, &count)?;
    }
}
