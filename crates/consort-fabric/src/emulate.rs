//! A link that behaves like a slower one: for tests, and to learn what a cable would do before buying it.
//!
//! The sender stamps each run of bytes with the moment at which the emulated link would deliver it, and the receiver holds it
//! back until then. The stamps use the machine's monotonic clock, so both ends must be on one machine.

use std::io;
use std::str::FromStr;
use std::time::Duration;

use crate::FabricError;
use crate::rail::{Rail, Wake};
use crate::sys;

/// What the emulated link is like, in each direction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EmulatedLink {
    /// From one end to the other.
    pub latency: Duration,
    /// Of each rail; 0 for no limit.
    pub bits_per_second: f64,
    /// Share of packets that are lost. The transport below repeats them, so that a loss is a delay: a round trip and a millisecond
    /// in which nothing behind it arrives.
    pub loss: f64,
    /// Rails of each link.
    pub rails: usize,
    /// Which ranks are linked.
    pub linked: LinkedRanks,
    /// A rail of each link, and how long after its first frame it breaks.
    pub cut: Option<(usize, Duration)>,
    /// Byte of each rail's long payloads, counted from the start, of which a bit arrives as another. Short ones, of which there are
    /// now more and now fewer, are not counted.
    pub flip: Option<u64>,
}

/// Which ranks have an emulated link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkedRanks {
    /// Each with every other.
    All,
    /// Neighbours, and the first with the last: machines with two cables each.
    Ring,
    /// Pairs of the first sixteen ranks: bit `high * (high - 1) / 2 + low` of each.
    Listed(u128),
}

impl LinkedRanks {
    /// `mesh`, `ring`, or pairs such as `0-1/1-2`.
    fn read(text: &str) -> Option<Self> {
        match text {
            "mesh" => return Some(Self::All),
            "ring" => return Some(Self::Ring),
            _ => {}
        }
        let pair = |text: &str| {
            let (one, other) = text.split_once('-')?;
            Self::bit(one.parse().ok()?, other.parse().ok()?)
        };
        text.split('/').map(pair).try_fold(0, |bits, bit| Some(bits | bit?)).map(Self::Listed)
    }

    /// The highest rank that a list names.
    fn highest(self) -> Option<usize> {
        let Self::Listed(bits) = self else { return None };
        (1..16).rev().find(|high| bits >> (high * (high - 1) / 2) != 0)
    }

    /// The place of two different ranks below sixteen.
    fn bit(one: usize, other: usize) -> Option<u128> {
        let (low, high) = (one.min(other), one.max(other));
        (low < high && high < 16).then(|| 1 << (high * (high - 1) / 2 + low))
    }

    /// Whether two of `size` ranks have a link.
    pub fn are_linked(self, one: usize, other: usize, size: usize) -> bool {
        match self {
            Self::All => true,
            Self::Ring => [1, size - 1].contains(&one.abs_diff(other)),
            Self::Listed(bits) => Self::bit(one, other).is_some_and(|bit| bits & bit != 0),
        }
    }
}

impl Default for EmulatedLink {
    /// A perfect link.
    fn default() -> Self {
        let linked = LinkedRanks::All;
        Self { latency: Duration::ZERO, bits_per_second: 0.0, loss: 0.0, rails: 1, linked, cut: None, flip: None }
    }
}

/// The settings of an emulated link, and what each takes.
const SETTINGS: [(&str, &str); 7] = [
    ("latency", "a time from 0 to less than 60s, in us, ms or s, as in latency=50us"),
    ("bandwidth", "more than 0 kbit, mbit or gbit, as in bandwidth=10gbit"),
    ("loss", "a share of packets from 0 to less than 1, as in loss=1e-4"),
    ("rails", "a whole number from 1 to 8"),
    ("topology", "mesh, ring, or pairs of two of the ranks 0 to 15, as in topology=0-1/1-2"),
    ("cut", "a rail, counted from 0, and a time, as in cut=1@5s"),
    ("flip", "the number of a byte, as in flip=70000"),
];

impl EmulatedLink {
    /// Refuses links of ranks that a run does not have.
    ///
    /// # Errors
    /// The topology names a rank of `ranks` or more.
    pub fn check_ranks(&self, ranks: usize) -> Result<(), FabricError> {
        match self.linked.highest().filter(|&rank| rank >= ranks) {
            Some(rank) => Err(FabricError::Invalid(format!(
                "rank {rank} in the topology of the emulated link does not exist: the run has {ranks} ranks, the last is {}",
                ranks.saturating_sub(1)
            ))),
            None => Ok(()),
        }
    }
}

impl FromStr for EmulatedLink {
    type Err = FabricError;

    /// `latency=50us,bandwidth=10gbit,loss=1e-4,rails=2,topology=ring,cut=1@5s,flip=70000`; what is left out is perfect. A topology
    /// is `mesh`, `ring`, or the pairs of ranks that are linked: `0-1/1-2`.
    fn from_str(text: &str) -> Result<Self, FabricError> {
        let mut link = Self::default();
        for item in text.split(',').filter(|item| !item.trim().is_empty()) {
            let (name, value) =
                item.split_once('=').map(|(name, value)| (name.trim(), value.trim())).unwrap_or((item, ""));
            let understood = match name {
                "latency" => duration(value).filter(|&time| time < LATENCY_LIMIT).map(|time| link.latency = time),
                "bandwidth" => with_unit(value, &[("kbit", 1e3), ("mbit", 1e6), ("gbit", 1e9)])
                    .filter(|&bits| bits > 0.0)
                    .map(|bits| link.bits_per_second = bits),
                "loss" => value.parse().ok().filter(|loss| (0.0..1.0).contains(loss)).map(|loss| link.loss = loss),
                "rails" => value.parse().ok().filter(|rails| (1..=8).contains(rails)).map(|rails| link.rails = rails),
                "flip" => value.parse().ok().map(|byte| link.flip = Some(byte)),
                "topology" => LinkedRanks::read(value).map(|linked| link.linked = linked),
                "cut" => value
                    .split_once('@')
                    .and_then(|(rail, time)| Some((rail.parse().ok()?, duration(time)?)))
                    .map(|cut| link.cut = Some(cut)),
                _ => None,
            };
            if understood.is_none() {
                let remedy = match SETTINGS.iter().find(|(known, _)| *known == name) {
                    Some((_, range)) => format!("{name} takes {range}"),
                    None => format!("its settings are {}", SETTINGS.map(|(name, _)| name).join(", ")),
                };
                return Err(FabricError::Invalid(format!("cannot read {item:?} of an emulated link: {remedy}")));
            }
        }
        match link.cut {
            Some((rail, _)) if rail >= link.rails => {
                Err(FabricError::Invalid(format!("rail {rail} of an emulated link with {} does not exist", link.rails)))
            }
            _ => Ok(link),
        }
    }
}

const LATENCY_LIMIT: Duration = Duration::from_secs(60);

/// A time with its unit.
fn duration(text: &str) -> Option<Duration> {
    let seconds = with_unit(text, &[("us", 1e-6), ("ms", 1e-3), ("s", 1.0)])?;
    Duration::try_from_secs_f64(seconds).ok()
}

/// A non-negative number with one of the units.
fn with_unit(text: &str, units: &[(&str, f64)]) -> Option<f64> {
    let (number, factor) = units.iter().find_map(|(unit, factor)| Some((text.strip_suffix(unit)?, factor)))?;
    number
        .trim()
        .parse::<f64>()
        .ok()
        .filter(|number| number.is_finite() && *number >= 0.0)
        .map(|number| number * factor)
}

/// Before each run of bytes: its length and the moment of its delivery.
const STAMP_BYTES: usize = 12;
/// Bytes that travel under one stamp where packets are lost: a packet.
const PACKET_BYTES: usize = 1500;
/// Elsewhere, as many as leave in so much time, within bounds: each stamp costs time of its own.
const RUN_TIME: Duration = Duration::from_micros(10);
const RUN_MOST_BYTES: usize = 64 << 10;
/// Payloads from this length on are long: weights and activations, but not what ranks tell each other while they wait.
const LONG_PAYLOAD_BYTES: usize = 1 << 10;
/// Runs that are taken at a time: stamping them takes time, in which other rails of the link must not stand still.
const RUNS_PER_CALL: usize = 8;
/// How far ahead the emulated link takes bytes before they have left: more than a sleeping sender oversleeps.
const QUEUE_NS: u64 = 10_000_000;

impl EmulatedLink {
    fn run_bytes(&self) -> usize {
        match (self.loss > 0.0, self.bits_per_second) {
            (true, _) => PACKET_BYTES,
            (false, 0.0) => RUN_MOST_BYTES,
            (false, bits) => ((bits / 8.0 * RUN_TIME.as_secs_f64()) as usize).clamp(PACKET_BYTES, RUN_MOST_BYTES),
        }
    }
}

/// A rail that delays what goes over another.
pub(crate) struct EmulatedRail {
    inner: Box<dyn Rail>,
    link: EmulatedLink,
    /// When the emulated wire has sent all that it was given.
    wire_free_ns: u64,
    random: u64,
    /// Longest run.
    run_bytes: usize,
    /// The run on its way into the inner rail, stamp included; its bytes count as sent when all of it has gone.
    outgoing: Vec<u8>,
    gone: usize,
    stamp: [u8; STAMP_BYTES],
    stamp_filled: usize,
    /// Bytes left of the run that is being received, once its stamp is here.
    run_left: Option<usize>,
    due_ns: u64,
    /// How long after the first frame the cable is cut, and when that is.
    cut: Option<Duration>,
    cut_ns: u64,
    /// Bytes of long payloads that have come through here.
    long_bytes: u64,
}

impl EmulatedRail {
    /// The rail of index `at` of an emulated link.
    pub fn new(inner: Box<dyn Rail>, link: EmulatedLink, at: usize) -> Self {
        Self {
            inner,
            link,
            wire_free_ns: 0,
            random: 0x9E37_79B9_7F4A_7C15,
            run_bytes: link.run_bytes(),
            outgoing: Vec::with_capacity(STAMP_BYTES + link.run_bytes()),
            gone: 0,
            stamp: [0; STAMP_BYTES],
            stamp_filled: 0,
            run_left: None,
            due_ns: 0,
            cut: link.cut.filter(|&(rail, _)| rail == at).map(|(_, time)| time),
            cut_ns: u64::MAX,
            long_bytes: 0,
        }
    }

    fn check_cable(&self) -> io::Result<()> {
        match sys::monotonic_ns() < self.cut_ns {
            true => Ok(()),
            false => Err(io::Error::new(io::ErrorKind::ConnectionReset, "the emulated cable is cut")),
        }
    }

    /// Whether the next packet is lost (xorshift: repeatable, and good enough).
    fn loses(&mut self) -> bool {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) as f64 / (1u64 << 53) as f64 <= self.link.loss && self.link.loss > 0.0
    }

    /// Puts the start of what is to be sent under a stamp.
    fn stamp_run(&mut self, header: &[u8], payload: &[u8], now_ns: u64) {
        let latency_ns = self.link.latency.as_nanos() as u64;
        self.outgoing.clear();
        self.outgoing.extend_from_slice(&[0; STAMP_BYTES]);
        self.outgoing.extend_from_slice(&header[..header.len().min(self.run_bytes)]);
        let room = self.run_bytes - (self.outgoing.len() - STAMP_BYTES);
        let is_long = payload.len() >= LONG_PAYLOAD_BYTES;
        let payload = &payload[..payload.len().min(room)];
        let start = self.outgoing.len();
        self.outgoing.extend_from_slice(payload);
        if is_long {
            let place = self.link.flip.and_then(|byte| byte.checked_sub(self.long_bytes));
            if let Some(place) = place.filter(|&place| place < payload.len() as u64) {
                self.outgoing[start + place as usize] ^= 1;
            }
            self.long_bytes += payload.len() as u64;
        }
        let length = self.outgoing.len() - STAMP_BYTES;
        let wire_ns = match self.link.bits_per_second {
            0.0 => 0,
            bits => (length as f64 * 8e9 / bits) as u64,
        };
        self.wire_free_ns = self.wire_free_ns.max(now_ns) + wire_ns;
        if self.loses() {
            self.wire_free_ns += 2 * latency_ns + 1_000_000;
        }
        self.outgoing[..4].copy_from_slice(&(length as u32).to_le_bytes());
        self.outgoing[4..STAMP_BYTES].copy_from_slice(&(self.wire_free_ns + latency_ns).to_le_bytes());
        self.gone = 0;
    }
}

impl Rail for EmulatedRail {
    fn try_send(&mut self, header: &[u8], payload: &[u8]) -> io::Result<usize> {
        if let Some(time) = self.cut.take_if(|_| !header.is_empty()) {
            self.cut_ns = sys::monotonic_ns().saturating_add(time.as_nanos() as u64);
        }
        self.check_cable()?;
        let (mut taken, mut runs) = (0, 0);
        let total = header.len() + payload.len();
        while taken < total && runs < RUNS_PER_CALL {
            if self.outgoing.is_empty() {
                let now_ns = sys::monotonic_ns();
                if self.wire_free_ns > now_ns + QUEUE_NS {
                    break;
                }
                let payload_start = taken.saturating_sub(header.len());
                self.stamp_run(&header[taken.min(header.len())..], &payload[payload_start..], now_ns);
            }
            self.gone += self.inner.try_send(&self.outgoing[self.gone..], &[])?;
            if self.gone < self.outgoing.len() {
                break;
            }
            taken += self.outgoing.len() - STAMP_BYTES;
            runs += 1;
            self.outgoing.clear();
        }
        Ok(taken)
    }

    fn try_recv(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.check_cable()?;
        let mut taken = 0;
        while taken < bytes.len() {
            let Some(left) = self.run_left else {
                self.stamp_filled += self.inner.try_recv(&mut self.stamp[self.stamp_filled..])?;
                if self.stamp_filled < STAMP_BYTES {
                    break;
                }
                let (length, due) = self.stamp.split_at(4);
                self.run_left = Some(u32::from_le_bytes(length.try_into().expect("four bytes")) as usize);
                self.due_ns = u64::from_le_bytes(due.try_into().expect("eight bytes"));
                continue;
            };
            if sys::monotonic_ns() < self.due_ns {
                break;
            }
            let wanted = left.min(bytes.len() - taken);
            let count = self.inner.try_recv(&mut bytes[taken..taken + wanted])?;
            taken += count;
            match left - count {
                0 => (self.run_left, self.stamp_filled) = (None, 0),
                left => self.run_left = Some(left),
            }
            if count < wanted {
                break;
            }
        }
        Ok(taken)
    }

    fn wake(&self) -> Wake {
        self.inner.wake()
    }

    fn busy_until_ns(&self) -> Option<u64> {
        // Held-back bytes and a full wire both end by themselves, unseen by the descriptor.
        let held = self.run_left.map(|_| self.due_ns);
        let queued = Some(self.wire_free_ns.saturating_sub(QUEUE_NS));
        held.into_iter().chain(queued).filter(|&moment| moment > sys::monotonic_ns()).min()
    }

    fn ends_in_band(&self) -> bool {
        self.inner.ends_in_band()
    }

    fn check(&self, silence: Duration) -> io::Result<()> {
        self.check_cable().and_then(|()| self.inner.check(silence))
    }

    fn finish(&mut self) {
        self.inner.finish();
    }

    fn transport(&self) -> &'static str {
        self.inner.transport()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_with_their_units() {
        let link: EmulatedLink =
            "latency=50us, bandwidth=10gbit,loss=1e-4,rails=2,topology=ring,cut=1@2ms,flip=9".parse().unwrap();
        let expected = EmulatedLink {
            latency: Duration::from_micros(50),
            bits_per_second: 1e10,
            loss: 1e-4,
            rails: 2,
            linked: LinkedRanks::Ring,
            cut: Some((1, Duration::from_millis(2))),
            flip: Some(9),
        };
        assert_eq!(link, expected);
        assert_eq!("".parse::<EmulatedLink>().unwrap(), EmulatedLink::default());
        let listed = LinkedRanks::read("0-1/15-2").unwrap();
        for one in 0..16 {
            for other in (0..16).filter(|&other| other != one) {
                let expected = [(0, 1), (1, 0), (2, 15), (15, 2)].contains(&(one, other));
                assert_eq!(listed.are_linked(one, other, 16), expected, "{one} and {other}");
            }
        }
        for wrong in [
            "latency=50",
            "latency=-1us",
            "latency=infs",
            "bandwidth=0gbit",
            "loss=1",
            "rails=0",
            "speed=1",
            "rails",
            "cut=1",
            "flip=-1",
            "cut=1@2s",
            "rails=2,cut=1@2",
            "topology=star",
            "topology=0-0",
            "topology=0-1/1",
            "topology=0-16",
        ] {
            let error = wrong.parse::<EmulatedLink>().expect_err(wrong).to_string();
            let setting = wrong.rsplit(',').next().and_then(|item| item.split('=').next()).unwrap();
            let expected = if setting == "speed" { "its settings are latency" } else { setting };
            assert!(error.contains(expected) || error.starts_with("rail "), "{wrong}: {error}");
        }
    }

    #[test]
    fn a_topology_names_ranks_of_the_run_only() {
        let check =
            |topology: &str, ranks| format!("topology={topology}").parse::<EmulatedLink>().unwrap().check_ranks(ranks);
        for (topology, ranks, missing) in [("0-5", 2, 5), ("0-1/1-2", 2, 2), ("15-0/3-4", 15, 15)] {
            let error = check(topology, ranks).unwrap_err().to_string();
            assert!(error.starts_with(&format!("rank {missing} in the topology")), "{error}");
            check(topology, missing + 1).unwrap();
        }
        for topology in ["mesh", "ring"] {
            check(topology, 2).unwrap();
        }
    }
}
