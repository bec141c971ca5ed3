//! How fast the fabric is: every collective over a range of sizes, and the one that matters for decoding, a train of dependent
//! all-reduces of one hidden vector. All ranks call [`run`] together; times are taken on all of them.

use std::time::{Duration, Instant};

use serde::Serialize;

use crate::{FabricError, Group, Plain};

/// What to measure.
#[derive(Clone, Debug)]
pub struct NetbenchOptions {
    /// Only collectives whose name begins like this; empty for all.
    pub only: String,
    /// Smallest message.
    pub smallest_bytes: usize,
    /// Largest message; each size is four times the one before.
    pub largest_bytes: usize,
    /// Repetitions of each measurement; large messages get fewer.
    pub repetitions: usize,
    /// Values of the hidden vector in the train of all-reduces.
    pub hidden: usize,
}

impl Default for NetbenchOptions {
    fn default() -> Self {
        Self { only: String::new(), smallest_bytes: 1 << 10, largest_bytes: 256 << 20, repetitions: 1000, hidden: 4096 }
    }
}

impl NetbenchOptions {
    /// Bytes of messages, from the smallest to the largest.
    fn sizes(&self) -> impl Iterator<Item = usize> {
        let largest = self.largest_bytes;
        let each = std::iter::successors(Some(self.smallest_bytes), |bytes| bytes.checked_mul(4));
        each.take_while(move |&bytes| bytes <= largest)
    }

    /// Memory that each rank fills with what it sends and receives.
    pub fn needed_bytes(&self) -> u64 {
        let collectives =
            if CASES.iter().any(|case| case.name.starts_with(&self.only)) { self.sizes().last() } else { None };
        let hidden = (self.hidden as u64).saturating_mul(size_of::<f32>() as u64);
        (collectives.unwrap_or(0) as u64).saturating_mul(BUFFERS).max(hidden)
    }
}

/// The names of all that can be measured.
pub fn names() -> impl Iterator<Item = &'static str> {
    CASES.iter().map(|case| case.name).chain([STEP, TRAIN_NAME])
}

/// One line of the result: a collective at one size. Times are taken over all repetitions on all ranks.
#[derive(Clone, Debug, Serialize)]
pub struct Measurement {
    /// Name of the collective.
    pub collective: &'static str,
    /// Bytes of the whole buffer on each rank.
    pub bytes: usize,
    /// Repetitions on each rank.
    pub repetitions: usize,
    /// Fastest repetition.
    pub min_us: f64,
    /// Half of the repetitions were faster.
    pub median_us: f64,
    /// 99 of 100 repetitions were faster.
    pub p99_us: f64,
    /// Buffer bytes per median time.
    pub algorithm_gb_s: f64,
    /// Bytes that the busiest link must carry per median time: comparable between collectives and numbers of ranks.
    pub bus_gb_s: f64,
    /// Whether all results on all ranks were what they should be.
    pub correct: bool,
}

/// All-reduces in a train.
const TRAIN: usize = 200;
/// The name of the hop of a step, and of a train.
const STEP: &str = "step send/recv";
const TRAIN_NAME: &str = "all_reduce train";
/// Buffers of the size of a message that a collective under test has: see [`Buffers`].
const BUFFERS: u64 = 3;
/// What a rank computes on, and for how long, between two hops of a step.
const COMPUTED_BYTES: usize = 256 << 10;
const COMPUTES: Duration = Duration::from_micros(500);
/// No measurement of one size takes much longer.
const TIME_LIMIT: Duration = Duration::from_secs(1);

/// One collective under test.
struct Case {
    name: &'static str,
    /// Share of the buffer that crosses the busiest link, for `ranks` ranks.
    bus_share: fn(f64) -> f64,
    run: fn(&Group, &mut Buffers) -> Result<(), FabricError>,
    /// What member `position` of `size` must hold at `at` of `length` afterwards; `None` where anything goes.
    expected: fn(at: usize, length: usize, position: usize, size: usize) -> Option<f32>,
}

struct Buffers {
    values: Vec<f32>,
    /// What other members' values come into, where that is another buffer.
    incoming: Vec<f32>,
    bytes: Vec<u8>,
    /// Parts of all members.
    lengths: Vec<usize>,
}

/// Every rank fills its buffer with small whole numbers, whose sums are exact.
fn filled(at: usize, position: usize) -> f32 {
    ((at + position) % 8) as f32
}

fn sum(at: usize, size: usize) -> f32 {
    (0..size).map(|position| filled(at, position)).sum()
}

/// Where member `position`'s part of `length` values starts.
fn part_start(length: usize, size: usize, position: usize) -> usize {
    length / size * position + (length % size).min(position)
}

fn owner(at: usize, length: usize, size: usize) -> usize {
    let (part, longer) = (length / size, length % size);
    let in_longer = longer * (part + 1);
    if at < in_longer { at / (part + 1) } else { longer + (at - in_longer) / part.max(1) }
}

const CASES: [Case; 7] = [
    Case {
        name: "all_reduce",
        bus_share: |ranks| 2.0 * (ranks - 1.0) / ranks,
        run: |group, buffers| group.all_reduce(&mut buffers.values),
        expected: |at, _, _, size| Some(sum(at, size)),
    },
    Case {
        name: "all_gather",
        bus_share: |ranks| (ranks - 1.0) / ranks,
        run: |group, buffers| group.all_gather(&mut buffers.values, &buffers.lengths),
        expected: |at, length, _, size| Some(filled(at, owner(at, length, size))),
    },
    Case {
        name: "reduce_scatter",
        bus_share: |ranks| (ranks - 1.0) / ranks,
        run: |group, buffers| group.reduce_scatter(&mut buffers.values, &buffers.lengths),
        expected: |at, length, position, size| (owner(at, length, size) == position).then(|| sum(at, size)),
    },
    Case {
        name: "all_to_all",
        bus_share: |ranks| (ranks - 1.0) / ranks,
        run: |group, buffers| {
            // All members have parts of the shortest length for each other.
            let length = buffers.lengths.iter().copied().min().unwrap_or(0);
            let lengths = vec![length; group.size()];
            let total = length * group.size();
            buffers.incoming.resize(total, 0.0);
            group.all_to_all(&buffers.values[..total], &lengths, &mut buffers.incoming, &lengths)?;
            buffers.values[..total].copy_from_slice(&buffers.incoming);
            Ok(())
        },
        expected: |at, length, position, size| {
            let part = length / size;
            (at < part * size).then(|| filled(position * part + at % part, at / part))
        },
    },
    Case {
        name: "broadcast",
        bus_share: |_| 1.0,
        run: |group, buffers| {
            if group.rank() == 0 {
                buffers.bytes.copy_from_slice(f32::bytes(&buffers.values));
            }
            group.broadcast(0, &mut buffers.bytes, false)?;
            if group.rank() != 0 {
                f32::bytes_mut(&mut buffers.values).copy_from_slice(&buffers.bytes);
            }
            Ok(())
        },
        expected: |at, _, _, _| Some(filled(at, 0)),
    },
    Case {
        name: "send/recv",
        bus_share: |_| 1.0,
        run: ping_pong,
        expected: |at, _, position, _| Some(filled(at, if position == 1 { 0 } else { position })),
    },
    Case { name: "barrier", bus_share: |_| 0.0, run: |group, _| group.barrier(false), expected: |_, _, _, _| None },
];

/// There and back between the first two members; the time is that of both ways, for the second member too, which waits until the
/// first has it.
fn ping_pong(group: &Group, buffers: &mut Buffers) -> Result<(), FabricError> {
    match group.rank() {
        0 => {
            group.send(1, &buffers.values)?;
            group.recv(1, &mut buffers.values)?;
            group.send::<u8>(1, &[])
        }
        1 => {
            group.recv(0, &mut buffers.values)?;
            group.send(0, &buffers.values)?;
            group.recv::<u8>(0, &mut [])
        }
        _ => Ok(()),
    }
}

/// Measures. All members of the group call it with equal options and get equal results.
///
/// # Errors
/// Whatever ends a collective.
pub fn run(group: &Group, options: &NetbenchOptions) -> Result<Vec<Measurement>, FabricError> {
    let mut measurements = Vec::new();
    for case in CASES.iter().filter(|case| case.name.starts_with(&options.only)) {
        for bytes in options.sizes() {
            measurements.push(measure(group, case, bytes, options.repetitions)?);
            if case.name == "barrier" {
                break;
            }
        }
    }
    if STEP.starts_with(&options.only) {
        measurements.push(step(group, options)?);
    }
    measurements.push(train(group, options)?);
    Ok(measurements)
}

fn measure(group: &Group, case: &Case, bytes: usize, most: usize) -> Result<Measurement, FabricError> {
    let length = bytes / size_of::<f32>();
    let start = |position: usize| part_start(length, group.size(), position);
    let lengths = (0..group.size()).map(|position| start(position + 1) - start(position)).collect();
    let bytes = length * size_of::<f32>();
    let mut buffers = Buffers { values: vec![0.0; length], incoming: Vec::new(), bytes: vec![1; bytes], lengths };
    let refill = |values: &mut [f32]| {
        values.iter_mut().enumerate().for_each(|(at, value)| *value = filled(at, group.rank()));
    };
    let repeat = |buffers: &mut Buffers| {
        refill(&mut buffers.values);
        group.barrier(false)?;
        let start = Instant::now();
        (case.run)(group, buffers)?;
        Ok::<_, FabricError>(start.elapsed())
    };
    repeat(&mut buffers)?; // The first use touches memory for the first time.
    let one = repeat(&mut buffers)?.max(Duration::from_nanos(100));
    let wrong = buffers.values.iter().enumerate().any(|(at, &value)| {
        (case.expected)(at, length, group.rank(), group.size()).is_some_and(|expected| expected != value)
    });
    let mut agreed = [(TIME_LIMIT.as_nanos() / one.as_nanos()).clamp(5, most.max(5) as u128) as f32, f32::from(wrong)];
    group.all_reduce(&mut agreed)?;
    let repetitions = agreed[0] as usize / group.size();
    let mut times = Vec::with_capacity(repetitions);
    for _ in 0..repetitions {
        times.push(repeat(&mut buffers)?.as_secs_f32() * 1e6);
    }
    summarize(group, case.name, bytes, (case.bus_share)(group.size() as f64), &times, agreed[1] == 0.0)
}

/// The decode path: each all-reduce needs the result of the one before.
fn train(group: &Group, options: &NetbenchOptions) -> Result<Measurement, FabricError> {
    let mut values = vec![1.0f32; options.hidden];
    let mut times = Vec::new();
    let scale = 1.0 / group.size() as f32;
    for _ in 0..20 {
        group.barrier(false)?;
        let start = Instant::now();
        for _ in 0..TRAIN {
            group.all_reduce(&mut values)?;
            values.iter_mut().for_each(|value| *value *= scale);
        }
        times.push(start.elapsed().as_secs_f32() * 1e6 / TRAIN as f32);
    }
    let bytes = options.hidden * size_of::<f32>();
    let correct = values.iter().all(|value| (value - 1.0).abs() < 1e-3);
    let bus_share = 2.0 * (group.size() as f64 - 1.0) / group.size() as f64;
    summarize(group, TRAIN_NAME, bytes, bus_share, &times, correct)
}

/// What a pipeline's hop costs while a step runs: one hidden vector there and back between the first two members. The first computes
/// before each repetition, so the second has waited for longer than it spins, and the first finds its caches full of other values.
/// Times are the first member's.
fn step(group: &Group, options: &NetbenchOptions) -> Result<Measurement, FabricError> {
    let mut values = vec![1.0f32; options.hidden];
    let mut layer = vec![1.0f32; COMPUTED_BYTES / size_of::<f32>()];
    let mut times = vec![0.0; options.repetitions.clamp(1, 500)];
    for time in &mut times {
        match group.rank() {
            0 => {
                let start = Instant::now();
                while start.elapsed() < COMPUTES {
                    layer.iter_mut().for_each(|value| *value = *value * 0.5 + 0.5);
                }
                let start = Instant::now();
                group.send(1, &values)?;
                group.recv(1, &mut values)?;
                *time = start.elapsed().as_secs_f32() * 1e6;
            }
            1 => {
                group.recv(0, &mut values)?;
                group.send(0, &values)?;
            }
            _ => {}
        }
    }
    let correct = values.iter().chain(&layer).all(|&value| value == 1.0);
    group.barrier(false)?;
    let mut message = f32::bytes(&times).to_vec();
    group.broadcast(0, &mut message, false)?;
    f32::bytes_mut(&mut times).copy_from_slice(&message);
    summarize(group, STEP, size_of_val(&values[..]), 1.0, &times, correct)
}

/// Puts all ranks' times together.
fn summarize(
    group: &Group,
    collective: &'static str,
    bytes: usize,
    bus_share: f64,
    times: &[f32],
    correct: bool,
) -> Result<Measurement, FabricError> {
    let mut all = vec![0.0; times.len() * group.size()];
    all[group.rank() * times.len()..][..times.len()].copy_from_slice(times);
    group.all_gather(&mut all, &vec![times.len(); group.size()])?;
    all.sort_by(f32::total_cmp);
    let percentile = |percent: usize| f64::from(all[(all.len() * percent / 100).min(all.len() - 1)]);
    let algorithm_gb_s = if collective == "barrier" { 0.0 } else { bytes as f64 / percentile(50) / 1e3 };
    Ok(Measurement {
        collective,
        bytes,
        repetitions: times.len(),
        min_us: percentile(0),
        median_us: percentile(50),
        p99_us: percentile(99),
        algorithm_gb_s,
        bus_gb_s: algorithm_gb_s * bus_share,
        correct,
    })
}
