//! A link: messages between two ranks, cut into frames over the link's rails.
//!
//! At any time at most one message goes out and one comes in. Both move in steps that never block, so that a collective can
//! turn over all its links and no large transfer can hold up the transfer that it waits for.
//!
//! A rail that breaks is dropped while another is left: see `ledger` for how its frames come all the same.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::channel::ControlMessage;
use crate::frame::{CHECKSUM_START, Frame, HEADER_BYTES, Message, checksum};
use crate::ledger::{Ledger, News};
use crate::rail::Rail;
use crate::receiving::{Receiving, mismatch};
use crate::sys::Interest;

/// Shorter messages go over the fastest rail alone: the others would only add their overhead.
const STRIPED_FROM_BYTES: usize = 16 << 10;
/// Longest frame where there are several rails: what is lost with a rail, and what must be kept, comes in such pieces.
const FRAME_LIMIT: usize = 256 << 10;
/// What may come on one of several rails before the sender is told that it need not be kept.
const ACKNOWLEDGED_BYTES: u64 = 1 << 20;
const ACKNOWLEDGED_FRAMES: u64 = 64;

/// Why a link cannot go on.
pub(crate) enum LinkFault {
    /// The connection broke.
    Broken(io::Error),
    /// The frame that came is not the one that was expected.
    Mismatch { expected: String, received: String },
}

impl From<io::Error> for LinkFault {
    fn from(error: io::Error) -> Self {
        Self::Broken(error)
    }
}

/// A rail that broke while others are left.
#[derive(Clone, Debug)]
pub(crate) struct LostRail {
    pub rail: usize,
    /// Rails that are left.
    pub left: usize,
    pub cause: String,
}

/// A frame on its way out of one rail.
struct Sending {
    header: [u8; HEADER_BYTES],
    start: usize,
    end: usize,
    /// Bytes of the header and the segment that have gone.
    gone: usize,
}

/// A frame of the outgoing message that was sent or is being sent.
struct SentFrame {
    rail: usize,
    /// Frames on its rail before it.
    index: u64,
    frame: Frame,
}

struct RailState {
    /// None once it is lost.
    rail: Option<Box<dyn Rail>>,
    /// Measured, in proportion to the others'.
    speed: f64,
    /// Parts of the outgoing message that are not cut into frames yet.
    backlog: VecDeque<Range<usize>>,
    sending: Option<Sending>,
    frames_sent: u64,
    receiving: Receiving,
    /// Why it was lost, until the peer has said so too.
    loss: Option<String>,
}

impl RailState {
    fn is_idle(&self) -> bool {
        self.sending.is_none() && self.backlog.is_empty()
    }
}

/// One direction's current message.
struct Transfer {
    message: Option<Message>,
    /// Messages before this one.
    sequence: u64,
    /// Bytes received.
    bytes: u64,
    /// Whether its first frame has been cut, or has come: an empty message has one frame too.
    started: bool,
}

impl Transfer {
    const NONE: Self = Self { message: None, sequence: 0, bytes: 0, started: false };

    fn begin(&mut self, message: Message) {
        assert!(self.message.is_none(), "one message at a time");
        (self.message, self.bytes, self.started) = (Some(message), 0, false);
    }

    fn end(&mut self) {
        self.message = None;
        self.sequence += 1;
    }
}

/// The messages between this rank and one peer.
pub(crate) struct Link {
    rails: Vec<RailState>,
    /// Whether frames carry a checksum of their payload.
    checksums: bool,
    outgoing: Transfer,
    incoming: Transfer,
    /// Where there are several rails: what the ends know of them.
    ledger: Option<Arc<Ledger>>,
    news_seen: u64,
    /// Frames of the outgoing message.
    frames: Vec<SentFrame>,
    /// Frames that the peer sent again, until their message's turn.
    resent: Vec<(Frame, Vec<u8>)>,
    /// Where messages that are reduced arrive if they cannot be read in the rail's own memory.
    staging: Vec<u8>,
    /// Bytes of the incoming message that lie ready, and those of them that have been taken.
    staged: usize,
    taken: usize,
    /// What the peer must hear.
    posts: Vec<ControlMessage>,
    /// Rails that both ends have given up.
    lost: Vec<LostRail>,
}

impl Link {
    /// A link over `rails`, whose measured `speeds` decide how much of a message each carries.
    pub fn new(rails: Vec<Box<dyn Rail>>, speeds: &[u32], checksums: bool) -> Self {
        assert_eq!(rails.len(), speeds.len());
        let ledger = (rails.len() > 1).then(|| Arc::new(Ledger::new(rails.len())));
        let state = |(rail, &speed): (Box<dyn Rail>, &u32)| RailState {
            rail: Some(rail),
            speed: f64::from(speed),
            backlog: VecDeque::new(),
            sending: None,
            frames_sent: 0,
            receiving: Receiving::NONE,
            loss: None,
        };
        Self {
            rails: rails.into_iter().zip(speeds).map(state).collect(),
            checksums,
            outgoing: Transfer::NONE,
            incoming: Transfer::NONE,
            ledger,
            news_seen: 0,
            frames: Vec::new(),
            resent: Vec::new(),
            staging: Vec::new(),
            staged: 0,
            taken: 0,
            posts: Vec::new(),
            lost: Vec::new(),
        }
    }

    /// The rails in use.
    pub fn rails(&self) -> impl Iterator<Item = &dyn Rail> {
        self.rails.iter().filter_map(|state| state.rail.as_deref())
    }

    /// Where the monitor writes what the peer says of the rails, if there are several.
    pub fn ledger(&self) -> Option<Arc<Ledger>> {
        self.ledger.clone()
    }

    /// What the peer must hear over the control connection, and rails that were lost, since the last call.
    pub fn take_posts(&mut self) -> Option<(Vec<ControlMessage>, Vec<LostRail>)> {
        if self.posts.is_empty() && self.lost.is_empty() {
            return None;
        }
        Some((std::mem::take(&mut self.posts), std::mem::take(&mut self.lost)))
    }

    /// The rails that this link's messages wait for, and what for. A rail whose segment has gone has no need of room, and one
    /// that is ahead of the others is not read, however much has come on it.
    pub fn waiting_rails(&self) -> impl Iterator<Item = (&dyn Rail, Interest)> {
        let (receiving, sequence) = (self.is_receiving(), self.incoming.sequence);
        self.rails.iter().filter_map(move |state| {
            let read = receiving && !state.receiving.is_ahead_of(sequence);
            let interest = Interest { read, write: !state.is_idle() };
            state.rail.as_deref().filter(|_| interest.read || interest.write).map(|rail| (rail, interest))
        })
    }

    /// See [`Rail::ends_in_band`].
    pub fn ends_in_band(&self) -> bool {
        self.rails().all(|rail| rail.ends_in_band())
    }

    /// Waits a little, until what was sent has left.
    pub fn finish(&mut self) {
        self.rails.iter_mut().filter_map(|state| state.rail.as_mut()).for_each(|rail| rail.finish());
    }

    /// Where there are several rails, drops those that are broken without having said so.
    pub fn check(&mut self, silence: Duration) -> Result<(), LinkFault> {
        for at in 0..self.rails.len() * usize::from(self.ledger.is_some()) {
            if let Some(Err(error)) = self.rails[at].rail.as_ref().map(|rail| rail.check(silence)) {
                self.take_down(at, error)?;
            }
        }
        self.hear_news()
    }

    /// Whether a rail was lost and the peer has not said yet what came over it.
    pub fn is_settling(&self) -> bool {
        self.rails.iter().any(|state| state.loss.is_some())
    }

    /// Starts sending a message; its bytes are given to [`Link::send_step`].
    pub fn begin_send(&mut self, message: Message) {
        self.outgoing.begin(message);
    }

    pub fn is_sending(&self) -> bool {
        self.outgoing.message.is_some()
    }

    pub fn is_receiving(&self) -> bool {
        self.incoming.message.is_some()
    }

    /// Starts receiving a message; its bytes go where [`Link::receive_step`] is told, or [`Link::stage_step`] keeps them.
    pub fn begin_receive(&mut self, message: Message) {
        self.incoming.begin(message);
        (self.staged, self.taken) = (0, 0);
    }

    /// How many bytes of the outgoing message, of so many, will not be looked at again, from its start on.
    pub fn sent_prefix(&self, length: usize) -> usize {
        match (&self.rails[..], self.is_sending()) {
            (_, false) => length,
            ([only], true) => only.sending.as_ref().map_or(0, |sending| sending.gone.saturating_sub(HEADER_BYTES)),
            _ => 0,
        }
    }

    /// Moves what can be moved of the outgoing message, whose whole content is `payload`; true if anything moved.
    pub fn send_step(&mut self, payload: &[u8]) -> Result<bool, LinkFault> {
        let Some(message) = self.outgoing.message else { return Ok(false) };
        debug_assert_eq!(payload.len() as u64, message.length);
        self.hear_news()?;
        if !self.outgoing.started {
            self.outgoing.started = true;
            self.distribute(0..payload.len());
        }
        let mut moved = false;
        for at in 0..self.rails.len() {
            match self.send_on(at, message, payload) {
                Ok(some) => moved |= some,
                Err(error) => self.take_down(at, error)?,
            }
        }
        if self.rails.iter().all(RailState::is_idle) {
            self.finish_sending(payload);
        }
        Ok(moved)
    }

    /// Hands a part of the outgoing message to the rails in use.
    fn distribute(&mut self, part: Range<usize>) {
        let total: f64 = self.rails.iter().filter(|state| state.rail.is_some()).map(|state| state.speed).sum();
        let fastest = self.fastest();
        let striped = part.len() >= STRIPED_FROM_BYTES;
        let (mut start, mut speeds) = (part.start, 0.0);
        for (at, state) in self.rails.iter_mut().enumerate().filter(|(_, state)| state.rail.is_some()) {
            speeds += state.speed;
            let end = match striped {
                // Rounding must not leave anything behind.
                true if speeds >= total * (1.0 - 1e-9) => part.end,
                true => part.start + (part.len() as f64 * speeds / total) as usize / 64 * 64,
                false if at == fastest => part.end,
                false => start,
            };
            // An empty message has one frame too.
            if end > start || (part.is_empty() && at == fastest) {
                state.backlog.push_back(start..end);
            }
            start = end;
        }
    }

    fn fastest(&self) -> usize {
        let live = (0..self.rails.len()).filter(|&at| self.rails[at].rail.is_some());
        live.max_by(|&one, &other| self.rails[one].speed.total_cmp(&self.rails[other].speed)).unwrap_or(0)
    }

    /// Moves what one rail can take.
    fn send_on(&mut self, at: usize, message: Message, payload: &[u8]) -> io::Result<bool> {
        let state = &mut self.rails[at];
        let Some(rail) = &mut state.rail else { return Ok(false) };
        let mut moved = false;
        loop {
            let sending = match &mut state.sending {
                Some(sending) => sending,
                empty => {
                    let Some(part) = state.backlog.front_mut() else { break };
                    let limit = if self.ledger.is_some() { FRAME_LIMIT } else { usize::MAX };
                    let (start, end) = (part.start, part.end.min(part.start.saturating_add(limit)));
                    part.start = end;
                    if part.start == part.end {
                        state.backlog.pop_front();
                    }
                    let checksum = if self.checksums { checksum(CHECKSUM_START, &payload[start..end]) } else { 0 };
                    let (offset, segment) = (start as u64, (end - start) as u64);
                    let frame = Frame { message, sequence: self.outgoing.sequence, offset, segment, checksum };
                    if self.ledger.is_some() {
                        self.frames.push(SentFrame { rail: at, index: state.frames_sent, frame });
                    }
                    state.frames_sent += 1;
                    rail.begin_frame(true)?;
                    empty.insert(Sending { header: frame.encode(), start, end, gone: 0 })
                }
            };
            let header = &sending.header[sending.gone.min(HEADER_BYTES)..];
            let segment = &payload[sending.start + sending.gone.saturating_sub(HEADER_BYTES)..sending.end];
            let count = rail.try_send(header, segment)?;
            sending.gone += count;
            moved |= count > 0;
            if header.len() + segment.len() > count {
                break;
            }
            state.sending = None;
        }
        Ok(moved)
    }

    /// All of the outgoing message has gone, as far as the rails can tell: what may yet be lost with a rail is kept.
    fn finish_sending(&mut self, payload: &[u8]) {
        if let Some(ledger) = &self.ledger {
            let several = self.rails.iter().filter(|state| state.rail.is_some()).count() > 1;
            for SentFrame { rail, index, frame } in self.frames.drain(..) {
                // What the last rail does not bring, nothing will.
                if several || self.rails[rail].rail.is_none() {
                    let segment = &payload[frame.offset as usize..(frame.offset + frame.segment) as usize];
                    let again = ledger.keep(rail, index, frame.encode(), segment);
                    self.posts.extend(again.map(|frame| frame.resend()));
                }
            }
        }
        self.outgoing.end();
    }

    /// A rail has broken. Its frames will come another way; an error if it was the last.
    fn take_down(&mut self, at: usize, error: io::Error) -> Result<(), LinkFault> {
        let state = &mut self.rails[at];
        state.rail = None;
        if self.rails().next().is_none() {
            return Err(LinkFault::Broken(error));
        }
        let state = &mut self.rails[at];
        state.loss = Some(error.to_string());
        state.sending = None;
        let (frames, backlog) = (state.receiving.frames, std::mem::take(&mut state.backlog));
        self.incoming.bytes -= state.receiving.discard(self.incoming.sequence);
        self.posts.push(ControlMessage::RailLost { rail: at as u8, frames });
        backlog.into_iter().for_each(|part| self.distribute(part));
        Ok(())
    }

    /// Looks at what the peer has said over the control connection.
    fn hear_news(&mut self) -> Result<(), LinkFault> {
        let Some(ledger) = &self.ledger else { return Ok(()) };
        let Some(News { lost, resent }) = ledger.news(&mut self.news_seen) else { return Ok(()) };
        self.resent.extend(resent);
        for rail in (0..lost.len()).filter(|&rail| lost[rail]) {
            if self.rails[rail].rail.is_some() {
                self.take_down(rail, io::Error::new(io::ErrorKind::ConnectionAborted, "the other end lost it"))?;
            }
            if let Some(cause) = self.rails[rail].loss.take() {
                self.lost.push(LostRail { rail, left: self.rails().count(), cause });
            }
        }
        Ok(())
    }

    /// For a message whose length only the sender knows: its length, once its first header is here.
    pub fn learn_length(&mut self, limit: u64) -> Result<Option<u64>, LinkFault> {
        let Some(expected) = self.incoming.message else { return Ok(None) };
        self.hear_news()?;
        let sequence = self.incoming.sequence;
        let mut first = self.resent.iter().map(|(frame, _)| *frame).find(|frame| frame.sequence == sequence);
        for at in 0..self.rails.len() {
            let state = &mut self.rails[at];
            let (Some(rail), None) = (&mut state.rail, first) else { continue };
            match state.receiving.header_step(&mut **rail, &mut false, sequence) {
                Ok(frame) => first = frame.filter(|frame| self.ledger.is_none() || frame.sequence <= sequence),
                Err(LinkFault::Broken(error)) => self.take_down(at, error)?,
                Err(fault) => return Err(fault),
            }
        }
        let Some(frame) = first else { return Ok(None) };
        let length = frame.message.length;
        if frame.sequence != sequence || length > limit {
            return Err(mismatch(&expected, sequence, &frame));
        }
        self.incoming.message = Some(Message { length, ..expected });
        Ok(Some(length))
    }

    /// Moves what can be moved of the incoming message into `payload`, which has the message's length; true if anything moved.
    pub fn receive_step(&mut self, payload: &mut [u8]) -> Result<bool, LinkFault> {
        let Some(expected) = self.incoming.message else { return Ok(false) };
        debug_assert_eq!(payload.len() as u64, expected.length);
        self.hear_news()?;
        let mut moved = self.receive_resent(&expected, payload)?;
        for at in 0..self.rails.len() {
            match self.receive_on(at, &expected, payload) {
                Ok(some) => moved |= some,
                Err(LinkFault::Broken(error)) => self.take_down(at, error)?,
                Err(fault) => return Err(fault),
            }
        }
        if self.incoming.started && self.incoming.bytes == expected.length {
            self.incoming.end();
        }
        Ok(moved)
    }

    /// Takes what one rail has brought.
    fn receive_on(&mut self, at: usize, expected: &Message, payload: &mut [u8]) -> Result<bool, LinkFault> {
        let (state, sequence) = (&mut self.rails[at], self.incoming.sequence);
        let Some(rail) = &mut state.rail else { return Ok(false) };
        let (receiving, mut moved) = (&mut state.receiving, false);
        while self.incoming.bytes < expected.length || !self.incoming.started {
            let Some(frame) = receiving.header_step(&mut **rail, &mut moved, sequence)? else { break };
            if self.ledger.is_some() && frame.sequence > sequence {
                break; // This rail is ahead of the others: its frame waits for its message.
            }
            if frame.sequence != sequence || frame.message != *expected {
                return Err(mismatch(expected, sequence, &frame));
            }
            self.incoming.started = true;
            let target =
                &mut payload[(frame.offset + receiving.come) as usize..(frame.offset + frame.segment) as usize];
            if !target.is_empty() {
                let count = rail.try_recv(target)?;
                if count == 0 {
                    break;
                }
                moved = true;
                receiving.take(&frame, &target[..count]);
                self.incoming.bytes += count as u64;
            }
            if receiving.come == frame.segment {
                receiving.finish_segment(&frame)?;
                if self.ledger.is_some() && receiving.owes(ACKNOWLEDGED_FRAMES, ACKNOWLEDGED_BYTES) {
                    self.posts.push(ControlMessage::Acknowledged { rail: at as u8, frames: receiving.frames });
                }
            }
        }
        Ok(moved)
    }

    /// Takes the incoming message's frames that came over the control connection.
    fn receive_resent(&mut self, expected: &Message, payload: &mut [u8]) -> Result<bool, LinkFault> {
        let (sequence, before) = (self.incoming.sequence, self.resent.len());
        while let Some(at) = self.resent.iter().position(|(frame, _)| frame.sequence <= sequence) {
            let (frame, bytes) = self.resent.swap_remove(at);
            if frame.sequence != sequence || frame.message != *expected {
                return Err(mismatch(expected, sequence, &frame));
            }
            payload[frame.offset as usize..][..bytes.len()].copy_from_slice(&bytes);
            self.incoming.started = true;
            self.incoming.bytes += frame.segment;
        }
        Ok(self.resent.len() < before)
    }
}

/// Messages that are reduced: their bytes are read once, in order, where they lie.
impl Link {
    /// Gets what can be got of the incoming message; true if anything came.
    pub fn stage_step(&mut self) -> Result<bool, LinkFault> {
        let Some(expected) = self.incoming.message else { return Ok(false) };
        if self.in_place().is_some() {
            return self.look(&expected);
        }
        let mut staging = std::mem::take(&mut self.staging);
        let length = expected.length as usize;
        if staging.len() < length {
            staging.resize(length, 0);
        }
        let result = self.receive_step(&mut staging[..length]);
        self.staging = staging;
        // Several rails fill a message from several points on.
        let whole = self.incoming.message.is_none();
        self.staged = match (whole, self.rails.len()) {
            (true, _) => length,
            (false, 1) => self.incoming.bytes as usize,
            (false, _) => 0,
        };
        result
    }

    /// The bytes of the incoming message that lie ready and have not been taken.
    pub fn staged(&self) -> &[u8] {
        match self.in_place() {
            Some(rail) => rail.arrived(self.staged - self.taken),
            None => &self.staging[self.taken..self.staged],
        }
    }

    /// Takes the first of the bytes that lie ready.
    pub fn take_staged(&mut self, count: usize) -> Result<(), LinkFault> {
        if self.in_place().is_some() {
            let [RailState { rail: Some(rail), receiving, .. }] = &mut self.rails[..] else { return Ok(()) };
            if let (Some(frame), Some(_)) = (receiving.frame(), self.incoming.message) {
                receiving.take(&frame, rail.arrived(count));
                rail.consume(count)?;
                self.incoming.bytes += count as u64;
                if receiving.come == frame.segment {
                    receiving.finish_segment(&frame)?;
                    self.incoming.end();
                }
            }
        }
        self.taken += count;
        Ok(())
    }

    /// The only rail, if it lets what arrives be read where it lies.
    fn in_place(&self) -> Option<&dyn Rail> {
        match &self.rails[..] {
            [RailState { rail: Some(rail), .. }] if rail.reads_in_place() => Some(&**rail),
            _ => None,
        }
    }

    fn look(&mut self, expected: &Message) -> Result<bool, LinkFault> {
        let sequence = self.incoming.sequence;
        let [RailState { rail: Some(rail), receiving, .. }] = &mut self.rails[..] else { return Ok(false) };
        let mut moved = false;
        let Some(frame) = receiving.header_step(&mut **rail, &mut moved, sequence)? else { return Ok(moved) };
        if frame.sequence != sequence || frame.message != *expected {
            return Err(mismatch(expected, sequence, &frame));
        }
        let staged = self.taken + rail.look((frame.segment - receiving.come) as usize)?;
        moved |= staged > self.staged;
        self.staged = staged;
        if frame.segment == 0 {
            self.take_staged(0)?;
        }
        Ok(moved)
    }
}
