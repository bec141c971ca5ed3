//! A link: messages between two ranks, cut into frames over the link's rails.
//!
//! At any time at most one message goes out and one comes in. Both move in steps that never block, so that a collective can
//! turn over all its links and no large transfer can hold up the transfer that it waits for.

use std::io;

use crate::frame::{CHECKSUM_START, Frame, HEADER_BYTES, Message, checksum};
use crate::rail::Rail;
use crate::sys::Interest;

/// Shorter messages go over the fastest rail alone: the others would only add their overhead.
const STRIPED_FROM_BYTES: u64 = 16 << 10;

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

/// A segment on its way out of one rail.
struct Sending {
    header: [u8; HEADER_BYTES],
    start: usize,
    end: usize,
    /// Bytes of the header and the segment that have gone.
    gone: usize,
}

/// What one rail is receiving.
struct Receiving {
    header: [u8; HEADER_BYTES],
    header_filled: usize,
    /// The decoded header, until its segment is complete.
    frame: Option<Frame>,
    /// Bytes of the segment that have come.
    come: u64,
    checksum: u32,
}

struct RailState {
    rail: Box<dyn Rail>,
    /// The share of a striped message that ends with this rail's segment: the speeds of the rails up to this one, over all.
    share_end: f64,
    sending: Option<Sending>,
    receiving: Receiving,
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
        debug_assert!(self.message.is_none(), "one message at a time");
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
    fastest: usize,
    /// Whether frames carry a checksum of their payload.
    checksums: bool,
    outgoing: Transfer,
    incoming: Transfer,
}

impl Link {
    /// A link over `rails`, whose measured `speeds` decide how much of a message each carries.
    pub fn new(rails: Vec<Box<dyn Rail>>, speeds: &[u32], checksums: bool) -> Self {
        assert_eq!(rails.len(), speeds.len());
        let total: f64 = speeds.iter().copied().map(f64::from).sum();
        let state = |(at, rail)| RailState {
            rail,
            share_end: speeds[..=at].iter().copied().map(f64::from).sum::<f64>() / total,
            sending: None,
            receiving: Receiving::NONE,
        };
        let fastest = (0..speeds.len()).max_by_key(|&at| speeds[at]).expect("a link has a rail");
        let rails = rails.into_iter().enumerate().map(state).collect();
        Self { rails, fastest, checksums, outgoing: Transfer::NONE, incoming: Transfer::NONE }
    }

    pub fn rails(&self) -> impl Iterator<Item = &dyn Rail> {
        self.rails.iter().map(|state| &*state.rail)
    }

    /// The rails that this link's messages wait for, and what for. A rail whose segment has gone has no need of room, and one
    /// that is ahead of the others is not read, however much has come on it.
    pub fn waiting_rails(&self) -> impl Iterator<Item = (&dyn Rail, Interest)> {
        let (receiving, sequence) = (self.is_receiving(), self.incoming.sequence);
        let interest = move |state: &RailState| Interest {
            read: receiving && state.receiving.frame.is_none_or(|frame| frame.sequence <= sequence),
            write: state.sending.is_some(),
        };
        let rails = self.rails.iter().map(move |state| (&*state.rail, interest(state)));
        rails.filter(|(_, interest)| interest.read || interest.write)
    }

    /// Waits a little, until what was sent has left.
    pub fn finish(&mut self) {
        self.rails.iter_mut().for_each(|state| state.rail.finish());
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

    /// Starts receiving a message; its bytes go where [`Link::receive_step`] is told.
    pub fn begin_receive(&mut self, message: Message) {
        self.incoming.begin(message);
    }

    /// Moves what can be moved of the outgoing message, whose whole content is `payload`; true if anything moved.
    pub fn send_step(&mut self, payload: &[u8]) -> Result<bool, LinkFault> {
        let Some(message) = self.outgoing.message else { return Ok(false) };
        debug_assert_eq!(payload.len() as u64, message.length);
        if !self.outgoing.started {
            self.cut(message, payload);
        }
        let (mut moved, mut left) = (false, false);
        for state in &mut self.rails {
            let Some(sending) = &mut state.sending else { continue };
            let header = &sending.header[sending.gone.min(HEADER_BYTES)..];
            let segment = &payload[sending.start + sending.gone.saturating_sub(HEADER_BYTES)..sending.end];
            let count = state.rail.try_send(header, segment)?;
            sending.gone += count;
            moved |= count > 0;
            match header.len() + segment.len() == count {
                true => state.sending = None,
                false => left = true,
            }
        }
        if !left {
            self.outgoing.end();
        }
        Ok(moved)
    }

    /// Cuts the outgoing message into one segment per rail.
    fn cut(&mut self, message: Message, payload: &[u8]) {
        self.outgoing.started = true;
        let striped = message.length >= STRIPED_FROM_BYTES;
        let (mut start, last) = (0, self.rails.len() - 1);
        for (at, state) in self.rails.iter_mut().enumerate() {
            let end = match striped {
                true => (payload.len() as f64 * state.share_end) as usize / 64 * 64,
                false if at == self.fastest => payload.len(),
                false => start,
            };
            // The last rail takes what rounding leaves. An empty message has one frame too.
            let end = if striped && at == last { payload.len() } else { end };
            if end > start || (payload.is_empty() && at == self.fastest) {
                let checksum = if self.checksums { checksum(CHECKSUM_START, &payload[start..end]) } else { 0 };
                let (offset, segment) = (start as u64, (end - start) as u64);
                let frame = Frame { message, sequence: self.outgoing.sequence, offset, segment, checksum };
                state.sending = Some(Sending { header: frame.encode(), start, end, gone: 0 });
            }
            start = end;
        }
    }

    /// For a message whose length only the sender knows: its length, once its first header is here.
    pub fn learn_length(&mut self, limit: u64) -> Result<Option<u64>, LinkFault> {
        let Some(expected) = self.incoming.message else { return Ok(None) };
        let several_rails = self.rails.len() > 1;
        for state in &mut self.rails {
            let Some(frame) =
                state.receiving.header_step(&mut *state.rail, &mut false, self.incoming.sequence, several_rails)?
            else {
                continue;
            };
            let length = frame.message.length;
            if several_rails && frame.sequence > self.incoming.sequence {
                continue; // This rail is ahead of the others.
            }
            if frame.sequence == self.incoming.sequence && length <= limit {
                self.incoming.message = Some(Message { length, ..expected });
                return Ok(Some(length));
            }
            return Err(mismatch(&expected, self.incoming.sequence, &frame));
        }
        Ok(None)
    }

    /// Moves what can be moved of the incoming message into `payload`, which has the message's length; true if anything moved.
    pub fn receive_step(&mut self, payload: &mut [u8]) -> Result<bool, LinkFault> {
        let Some(expected) = self.incoming.message else { return Ok(false) };
        debug_assert_eq!(payload.len() as u64, expected.length);
        let several_rails = self.rails.len() > 1;
        let mut moved = false;
        for state in &mut self.rails {
            while self.incoming.bytes < expected.length || !self.incoming.started {
                let receiving = &mut state.receiving;
                let sequence = self.incoming.sequence;
                let Some(frame) = receiving.header_step(&mut *state.rail, &mut moved, sequence, several_rails)? else {
                    break;
                };
                if several_rails && frame.sequence > sequence {
                    break; // This rail is ahead of the others: its frame waits for its message.
                }
                if frame.sequence != sequence || frame.message != expected {
                    return Err(mismatch(&expected, sequence, &frame));
                }
                self.incoming.started = true;
                let target =
                    &mut payload[(frame.offset + receiving.come) as usize..(frame.offset + frame.segment) as usize];
                if !target.is_empty() {
                    let count = state.rail.try_recv(target)?;
                    if count == 0 {
                        break;
                    }
                    moved = true;
                    if frame.checksum != 0 {
                        receiving.checksum = checksum(receiving.checksum, &target[..count]);
                    }
                    receiving.come += count as u64;
                    self.incoming.bytes += count as u64;
                }
                if receiving.come == frame.segment {
                    receiving.finish_segment(&frame)?;
                }
            }
        }
        if self.incoming.started && self.incoming.bytes == expected.length {
            self.incoming.end();
        }
        Ok(moved)
    }
}

fn mismatch(expected: &Message, sequence: u64, frame: &Frame) -> LinkFault {
    LinkFault::Mismatch {
        expected: Frame::describe(expected, sequence),
        received: Frame::describe(&frame.message, frame.sequence),
    }
}

impl Receiving {
    const NONE: Self =
        Self { header: [0; HEADER_BYTES], header_filled: 0, frame: None, come: 0, checksum: CHECKSUM_START };

    /// The current frame's header, read as far as it is there.
    fn header_step(
        &mut self,
        rail: &mut dyn Rail,
        moved: &mut bool,
        sequence: u64,
        several_rails: bool,
    ) -> Result<Option<Frame>, LinkFault> {
        if self.frame.is_none() {
            let count = match rail.try_recv(&mut self.header[self.header_filled..]) {
                // The peer has closed this rail in good order. If it is really gone, the others or the monitor will say so.
                Err(error)
                    if error.kind() == io::ErrorKind::UnexpectedEof && several_rails && self.header_filled == 0 =>
                {
                    0
                }
                result => result?,
            };
            *moved |= count > 0;
            self.header_filled += count;
            if self.header_filled == HEADER_BYTES {
                let frame = Frame::decode(&self.header).map_err(|received| LinkFault::Mismatch {
                    expected: format!("the header of message {sequence}"),
                    received,
                })?;
                self.frame = Some(frame);
            }
        }
        Ok(self.frame)
    }

    fn finish_segment(&mut self, frame: &Frame) -> Result<(), LinkFault> {
        if frame.checksum != 0 && frame.checksum != self.checksum {
            return Err(LinkFault::Mismatch {
                expected: format!("a payload with checksum {:08x}", frame.checksum),
                received: format!("one with {:08x}", self.checksum),
            });
        }
        (self.header_filled, self.frame, self.come, self.checksum) = (0, None, 0, CHECKSUM_START);
        Ok(())
    }
}
