//! Ways between ranks without a link of their own: what one has for the other goes from neighbour to neighbour, the shortest way.
//!
//! To its two ends such a way is a rail like any other ([`RelayRail`]): one end of a socket pair, whose other end belongs to this rank's
//! relay. That is a thread with one connection to each neighbour, which all flows share. A flow is what one rank has for one other, and
//! goes in chunks. Each rank on its way holds at most a window of it, and its predecessor sends only what there is room for. So no
//! connection ever stands still because a rank does not read: flows cannot wait for each other, and nothing can deadlock. As
//! the thread needs nothing of its rank's other threads, what is passed on does not wait for their work either.
//!
//! Ranks that pass on must not leave early: each says goodbye when it needs nothing more, and ends when all have said it.

use std::collections::{HashMap, VecDeque};
use std::io::{self, ErrorKind, IoSlice, Write};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::health::Failure;
use crate::monitor::Watch;
use crate::rail::{Rail, Wake};
use crate::sys::{self, Interest};
use crate::tcp::{or_nothing, read_some};
use crate::topology::Topology;

/// The name of this transport.
pub(crate) const RELAYED: &str = "relay";
/// Most of a flow that one rank holds.
const WINDOW_BYTES: usize = 64 << 10;
/// Longest chunk: what others' chunks wait for.
const CHUNK_BYTES: usize = 16 << 10;
/// Room is told to the predecessor when there is so much of it.
const TOLD_BYTES: usize = WINDOW_BYTES / 4;
/// Chunks of one neighbour that are moved before others have their turn.
const CHUNKS_PER_TURN: usize = 8;
/// Longest sleep between two looks at the abort word, and shortest between two at a rail that wakes nobody.
const SLEEP_LIMIT: Duration = Duration::from_millis(50);
const LOOK_LEAST: Duration = Duration::from_micros(50);
/// The same while others are waited for at the end.
const CLOSING_SLEEP: Duration = Duration::from_millis(2);

/// A rail that leads through other ranks.
pub(crate) struct RelayRail {
    stream: UnixStream,
}

impl RelayRail {
    /// The rail, and the other end of its stream.
    pub fn new() -> io::Result<(Self, UnixStream)> {
        let (stream, other) = UnixStream::pair()?;
        stream.set_nonblocking(true)?;
        other.set_nonblocking(true)?;
        Ok((Self { stream }, other))
    }
}

impl Rail for RelayRail {
    fn try_send(&mut self, header: &[u8], payload: &[u8]) -> io::Result<usize> {
        or_nothing(self.stream.write_vectored(&[IoSlice::new(header), IoSlice::new(payload)]))
    }

    fn try_recv(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        read_some(&self.stream, bytes)
    }

    fn wake(&self) -> Wake {
        Wake::Descriptor(self.stream.as_raw_fd())
    }

    fn ends_in_band(&self) -> bool {
        true
    }

    fn transport(&self) -> &'static str {
        RELAYED
    }
}

/// What one rank has for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Flow {
    pub source: u16,
    pub destination: u16,
}

/// What goes over a connection between neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Chunk {
    /// So many bytes of the flow, which follow.
    Data(usize),
    /// There is room for so many more.
    Room(usize),
    /// The flow has ended.
    End,
}

const HEADER_BYTES: usize = 9;

impl Chunk {
    pub fn encode(self, flow: Flow) -> [u8; HEADER_BYTES] {
        let (kind, length) = match self {
            Self::Data(length) => (0, length),
            Self::Room(length) => (1, length),
            Self::End => (2, 0),
        };
        let mut bytes = [kind; HEADER_BYTES];
        bytes[1..3].copy_from_slice(&flow.source.to_le_bytes());
        bytes[3..5].copy_from_slice(&flow.destination.to_le_bytes());
        bytes[5..].copy_from_slice(&(length as u32).to_le_bytes());
        bytes
    }

    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<(Self, Flow)> {
        let [kind, s0, s1, d0, d1, length @ ..] = *bytes;
        let flow = Flow { source: u16::from_le_bytes([s0, s1]), destination: u16::from_le_bytes([d0, d1]) };
        let length = u32::from_le_bytes(length) as usize;
        let chunk = match (kind, length) {
            (0, 1..=CHUNK_BYTES) => Self::Data(length),
            (1, 1..=WINDOW_BYTES) => Self::Room(length),
            (2, 0) => Self::End,
            _ => return None,
        };
        Some((chunk, flow))
    }
}

/// Where a flow comes from or goes to, as one rank on its way sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// A neighbour, by its place among the hops.
    Hop(usize),
    /// This rank's own rail, by its place among the streams.
    Own(usize),
}

/// One flow on its way through this rank.
struct Passage {
    flow: Flow,
    from: End,
    to: End,
    held: VecDeque<u8>,
    /// What the next hop has room for.
    room: usize,
    /// Room here of which the previous hop has not been told.
    untold: usize,
    /// Whether nothing comes after what is held, and whether that has been passed on.
    ended: bool,
    end_passed: bool,
}

impl Passage {
    /// Takes the first of what is held.
    fn take(&mut self, count: usize) {
        self.held.drain(..count);
        self.untold += count;
    }

    fn passes_end(&mut self) -> bool {
        self.held.is_empty() && self.ended && !std::mem::replace(&mut self.end_passed, true)
    }
}

/// A neighbour.
struct Hop {
    rank: usize,
    /// None once it has been closed at the end of the run.
    rail: Option<Box<dyn Rail>>,
    /// The chunk that is going out, and how much of it has gone.
    outgoing: Vec<u8>,
    gone: usize,
    header: [u8; HEADER_BYTES],
    header_filled: usize,
    /// The passage whose data are coming in, and how much is yet to come.
    incoming: Option<(usize, usize)>,
    /// The passage whose turn it is.
    turn: usize,
}

/// What a relay works with.
#[derive(Default)]
pub(crate) struct RelayParts {
    /// Neighbours' ranks, and connections to them.
    pub hops: Vec<(usize, Box<dyn Rail>)>,
    /// Ranks that have no link to this one, and the other ends of their rails.
    pub streams: Vec<(usize, UnixStream)>,
}

/// The thread that passes on, and the means to end it.
pub(crate) struct Relay {
    thread: Option<JoinHandle<()>>,
    closing: Arc<AtomicBool>,
    watch: Arc<Watch>,
}

impl Relay {
    /// Starts to pass on what comes to `rank`.
    pub fn start(parts: RelayParts, rank: usize, topology: Arc<Topology>, watch: Arc<Watch>) -> io::Result<Self> {
        let closing = Arc::new(AtomicBool::new(false));
        let mut router = Router::new(parts, rank, topology, watch.clone(), closing.clone());
        let thread = std::thread::Builder::new().name("consort-relay".into()).spawn(move || router.run())?;
        Ok(Self { thread: Some(thread), closing, watch })
    }
}

impl Drop for Relay {
    /// Says goodbye, and goes on passing on until all ranks have said it.
    fn drop(&mut self) {
        self.watch.say_goodbye();
        self.closing.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Router {
    rank: usize,
    topology: Arc<Topology>,
    hops: Vec<Hop>,
    streams: Vec<(usize, UnixStream)>,
    passages: Vec<Passage>,
    places: HashMap<Flow, usize>,
    /// What comes in is read here first.
    arrived: Vec<u8>,
    watch: Arc<Watch>,
    closing: Arc<AtomicBool>,
}

/// A neighbour whose connection cannot go on, and why.
type HopFault = (usize, io::Error);

fn nonsense(what: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what)
}

impl Router {
    fn new(
        parts: RelayParts,
        rank: usize,
        topology: Arc<Topology>,
        watch: Arc<Watch>,
        closing: Arc<AtomicBool>,
    ) -> Self {
        let hop = |(rank, rail)| Hop {
            rank,
            rail: Some(rail),
            outgoing: Vec::with_capacity(HEADER_BYTES + CHUNK_BYTES),
            gone: 0,
            header: [0; HEADER_BYTES],
            header_filled: 0,
            incoming: None,
            turn: 0,
        };
        let hops = parts.hops.into_iter().map(hop).collect();
        let (passages, places) = (Vec::new(), HashMap::new());
        let arrived = vec![0; CHUNK_BYTES];
        let mut router =
            Self { rank, topology, hops, streams: parts.streams, passages, places, arrived, watch, closing };
        for at in 0..router.streams.len() {
            let flow = Flow { source: rank as u16, destination: router.streams[at].0 as u16 };
            if let Some(to) = router.next(flow) {
                router.open(flow, End::Own(at), to);
            }
        }
        router
    }

    /// Works until all ranks have said goodbye, or one has failed.
    fn run(&mut self) {
        loop {
            let others = (0..self.hops.len() + self.streams.len()).map(|at| match at.checked_sub(self.hops.len()) {
                None => self.hops[at].rank,
                Some(at) => self.streams[at].0,
            });
            let mut others = others.filter(|&rank| !self.watch.health.has_departed(rank));
            let closing = self.closing.load(Ordering::Acquire);
            if self.watch.health.has_failed() || closing && others.next().is_none() {
                return;
            }
            match self.turn() {
                Ok(true) => {}
                Ok(false) => self.sleep(if closing { CLOSING_SLEEP } else { SLEEP_LIMIT }),
                // Others may have heard the last goodbye before this rank has.
                Err((hop, _)) if closing => self.hops[hop].rail = None,
                Err((hop, error)) => {
                    self.watch.await_verdict();
                    let (rank, cause) = (self.hops[hop].rank, format!("its connection for relays broke: {error}"));
                    self.watch.report(Failure { rank: rank as u32, gave_up: false, cause });
                    return;
                }
            }
        }
    }

    /// Moves what can be moved; whether anything did.
    fn turn(&mut self) -> Result<bool, HopFault> {
        let mut moved = false;
        for at in 0..self.passages.len() {
            moved |= self.read_own(at) | self.write_own(at);
        }
        for at in 0..self.hops.len() {
            let sent = self.send_to(at).map_err(|error| (at, error))?;
            let received = self.receive_from(at).map_err(|error| (at, error))?;
            moved |= sent | received;
        }
        Ok(moved)
    }

    /// Where a flow goes from here.
    fn next(&self, flow: Flow) -> Option<End> {
        if flow.destination as usize == self.rank {
            return self.streams.iter().position(|&(rank, _)| rank == flow.source as usize).map(End::Own);
        }
        let next = self.topology.next_hop(self.rank, flow.destination as usize);
        self.hops.iter().position(|hop| hop.rank == next).map(End::Hop)
    }

    fn open(&mut self, flow: Flow, from: End, to: End) -> usize {
        let (room, held) = (WINDOW_BYTES, VecDeque::new());
        self.passages.push(Passage { flow, from, to, held, room, untold: 0, ended: false, end_passed: false });
        self.places.insert(flow, self.passages.len() - 1);
        self.passages.len() - 1
    }

    /// What this rank has for another.
    fn read_own(&mut self, at: usize) -> bool {
        let passage = &mut self.passages[at];
        let End::Own(stream) = passage.from else { return false };
        let room = (WINDOW_BYTES - passage.held.len()).min(CHUNK_BYTES);
        if room == 0 || passage.ended {
            return false;
        }
        match read_some(&self.streams[stream].1, &mut self.arrived[..room]) {
            Ok(count) => {
                passage.held.extend(&self.arrived[..count]);
                count > 0
            }
            Err(_) => {
                passage.ended = true;
                true
            }
        }
    }

    /// What another has for this rank.
    fn write_own(&mut self, at: usize) -> bool {
        let passage = &mut self.passages[at];
        let End::Own(stream) = passage.to else { return false };
        let mut stream = &self.streams[stream].1;
        let (first, second) = passage.held.as_slices();
        let count = match first.is_empty() {
            true => 0,
            // Nobody reads any more what was sent to a rank that is done.
            false => or_nothing(stream.write_vectored(&[IoSlice::new(first), IoSlice::new(second)]))
                .unwrap_or(passage.held.len()),
        };
        passage.take(count);
        let ends = passage.passes_end();
        if ends {
            let _ = stream.shutdown(Shutdown::Write);
        }
        count > 0 || ends
    }

    fn send_to(&mut self, at: usize) -> io::Result<bool> {
        let mut moved = false;
        for _ in 0..CHUNKS_PER_TURN {
            if self.hops[at].outgoing.is_empty() && !self.cut_chunk(at) {
                break;
            }
            let hop = &mut self.hops[at];
            let Some(rail) = &mut hop.rail else { break };
            let count = rail.try_send(&[], &hop.outgoing[hop.gone..])?;
            hop.gone += count;
            moved |= count > 0;
            if hop.gone < hop.outgoing.len() {
                break;
            }
            hop.outgoing.clear();
            hop.gone = 0;
        }
        Ok(moved)
    }

    /// Makes the next chunk for a neighbour, if there is one; passages have it in turn.
    fn cut_chunk(&mut self, at: usize) -> bool {
        let Hop { outgoing, turn, .. } = &mut self.hops[at];
        let count = self.passages.len();
        for _ in 0..count {
            let passage = &mut self.passages[*turn % count];
            *turn = (*turn + 1) % count;
            if passage.from == End::Hop(at) && passage.untold >= TOLD_BYTES {
                outgoing.extend(Chunk::Room(std::mem::take(&mut passage.untold)).encode(passage.flow));
                return true;
            }
            if passage.to != End::Hop(at) {
                continue;
            }
            let length = passage.held.len().min(passage.room).min(CHUNK_BYTES);
            if length > 0 {
                outgoing.extend(Chunk::Data(length).encode(passage.flow));
                outgoing.extend(passage.held.range(..length));
                passage.room -= length;
                passage.take(length);
                return true;
            }
            if passage.passes_end() {
                outgoing.extend(Chunk::End.encode(passage.flow));
                return true;
            }
        }
        false
    }

    fn receive_from(&mut self, at: usize) -> io::Result<bool> {
        let mut moved = false;
        for _ in 0..CHUNKS_PER_TURN {
            let hop = &mut self.hops[at];
            let Some(rail) = &mut hop.rail else { break };
            if let Some((place, left)) = hop.incoming {
                let count = rail.try_recv(&mut self.arrived[..left])?;
                self.passages[place].held.extend(&self.arrived[..count]);
                hop.incoming = (left > count).then_some((place, left - count));
                moved |= count > 0;
                if left > count {
                    break;
                }
                continue;
            }
            let count = rail.try_recv(&mut hop.header[hop.header_filled..])?;
            moved |= count > 0;
            hop.header_filled += count;
            if hop.header_filled < HEADER_BYTES {
                break;
            }
            hop.header_filled = 0;
            let (chunk, flow) = Chunk::decode(&hop.header).ok_or_else(|| nonsense("bytes that are no chunk"))?;
            self.accept(at, chunk, flow)?;
        }
        Ok(moved)
    }

    /// Looks at what a neighbour announces, which must be what this rank expects from it.
    fn accept(&mut self, at: usize, chunk: Chunk, flow: Flow) -> io::Result<()> {
        let known = self.places.get(&flow).copied();
        if let Chunk::Room(length) = chunk {
            let passage = known.map(|place| &mut self.passages[place]).filter(|passage| passage.to == End::Hop(at));
            let passage = passage.ok_or_else(|| nonsense("room for a flow that does not go there"))?;
            passage.room += length;
            let right = passage.room <= WINDOW_BYTES;
            return if right { Ok(()) } else { Err(nonsense("room that was never taken")) };
        }
        let place = match known {
            Some(place) => place,
            None => {
                let size = self.hops.len() + self.streams.len() + 1;
                let exists = flow.source.max(flow.destination) < size as u16;
                let to = if exists { self.next(flow) } else { None };
                let to = to.filter(|&to| to != End::Hop(at)).ok_or_else(|| nonsense("a flow that leads nowhere"))?;
                self.open(flow, End::Hop(at), to)
            }
        };
        let passage = &mut self.passages[place];
        if passage.from != End::Hop(at) || passage.ended {
            return Err(nonsense("a flow that cannot come from there"));
        }
        match chunk {
            Chunk::Data(length) if passage.held.len() + passage.untold + length > WINDOW_BYTES => {
                return Err(nonsense("more than there was room for"));
            }
            Chunk::Data(length) => self.hops[at].incoming = Some((place, length)),
            _ => passage.ended = true,
        }
        Ok(())
    }

    fn sleep(&self, mut limit: Duration) {
        let mut entries = Vec::with_capacity(self.hops.len() + self.streams.len());
        for hop in &self.hops {
            let Some(rail) = &hop.rail else { continue };
            if let Some(moment) = rail.busy_until_ns() {
                limit = limit.min(Duration::from_nanos(moment.saturating_sub(sys::monotonic_ns())));
            }
            match rail.wake() {
                Wake::Descriptor(descriptor) => {
                    let interest = Interest { read: true, write: !hop.outgoing.is_empty() };
                    entries.push(sys::poll_entry(descriptor, interest));
                }
                Wake::Bell | Wake::Look => limit = LOOK_LEAST,
            }
        }
        for (at, (_, stream)) in self.streams.iter().enumerate() {
            let outgoing = self.passages.iter().find(|passage| passage.from == End::Own(at));
            let read = outgoing.is_some_and(|passage| !passage.ended && passage.held.len() < WINDOW_BYTES);
            let incoming = self.passages.iter().find(|passage| passage.to == End::Own(at));
            let write = incoming.is_some_and(|passage| !passage.held.is_empty());
            if read || write {
                entries.push(sys::poll_entry(stream.as_raw_fd(), Interest { read, write }));
            }
        }
        // Shorter sleeps than the system's wait for descriptors can make.
        if limit < Duration::from_millis(1) {
            return std::thread::sleep(limit.max(LOOK_LEAST));
        }
        // A failing poll returns at once; the abort word and the end of the run still end the thread.
        let _ = sys::poll(&mut entries, limit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_survive_and_others_are_refused() {
        let flow = Flow { source: 3, destination: 700 };
        for chunk in [Chunk::Data(1), Chunk::Data(CHUNK_BYTES), Chunk::Room(WINDOW_BYTES), Chunk::End] {
            assert_eq!(Chunk::decode(&chunk.encode(flow)), Some((chunk, flow)));
        }
        for (kind, length) in [(0, 0), (0, CHUNK_BYTES + 1), (1, 0), (1, WINDOW_BYTES + 1), (2, 1), (3, 1), (255, 0)] {
            let mut bytes = Chunk::Data(length).encode(flow);
            bytes[0] = kind;
            assert_eq!(Chunk::decode(&bytes), None, "kind {kind}, {length} bytes");
        }
    }
}
