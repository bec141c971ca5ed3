//! A connected queue pair as a byte pipe: fixed slots, credits, and a sequence number in each message.
//!
//! A reliable connection loses nothing. On an unreliable one, a message stays in its slot until the peer has emptied its own, so
//! that it can be sent again: all that the peer is not known to have received goes out once more when nothing has been heard for
//! a while. The peer drops what it has already, and answers that it has; what came out of order it drops too, and gets again.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::time::{Duration, Instant};

use super::queues::{Queues, SLOTS};
use super::verbs::{self, Completion, Piece, RecvRequest, SendRequest};
use crate::frame::HEADER_BYTES;
use crate::rail::{Rail, Wake};

/// Bytes of one message: 16 KiB with a frame's header and this rail's prefix, in whole cache lines. On macOS a send and its receive
/// must cover the same number of 4096-byte frames: one.
const SLOT_BYTES: usize = if cfg!(target_os = "macos") { 4096 } else { (16 << 10) + HEADER_BYTES + 64 };
/// Registered memory of one rail: slots for both directions.
pub(crate) const RAIL_BYTES: usize = 2 * SLOTS * SLOT_BYTES;
/// Four words: sequence number, slots emptied, messages received, payload length.
const PREFIX_BYTES: usize = 16;
const PAYLOAD_BYTES: usize = SLOT_BYTES - PREFIX_BYTES;
/// How long a closing rail waits for its last messages to leave.
const CLOSING_PATIENCE: Duration = Duration::from_secs(1);
/// Bounds of the silence after which unanswered messages of an unreliable connection are sent again; it doubles each time.
const RESEND_LEAST: Duration = Duration::from_millis(20);
const RESEND_MOST: Duration = Duration::from_millis(320);
/// Ids of sends; receives have their slots' numbers.
const SEND_ID: u64 = 1 << 32;
const RESEND_ID: u64 = 2 << 32;
/// How often a rail on which nothing comes looks whether its port is still up; and at the clock, which costs as much as a look
/// at the queue.
const PORT_WATCH: Duration = Duration::from_millis(250);
const CLOCK_WATCH: u32 = 64;
/// Completions that are taken off the queue at a time: one message and the end of another is what a round trip has.
const POLLED: usize = 4;
/// Looks at the queue before a wait does anything else: they are cheap, and nothing else tells what has come.
const LOOKS_PER_TURN: usize = 4;

/// A connected queue pair. Counters run on for ever and wrap.
pub(super) struct RdmaRail {
    queues: Queues,
    /// Messages under way in each direction: a power of two, so that counters may wrap.
    depth: u32,
    /// Receive slots, then send slots.
    slots: *mut u8,
    /// Messages sent; so many of them have left; so many slots the peer has emptied.
    sent: u32,
    completed: u32,
    emptied_by_peer: u32,
    /// On an unreliable connection: how many messages the peer is known to have received, and which was the last with payload.
    received_by_peer: u32,
    last_payload: u32,
    /// Repetitions that have not left yet, and how many went out since the peer was heard.
    resends_under_way: u32,
    resends_unheard: u32,
    /// When something last went out or came in, and how much silence is too much.
    stirred: Instant,
    resend_after: Duration,
    /// The peer has sent something again: it does not know what was received.
    answer_due: bool,
    /// Messages received; so many slots this end has emptied; so many the peer knows of.
    received: u32,
    emptied: u32,
    emptied_told: u32,
    /// Slots with payload, in order, and its length; the first is taken up to `taken`.
    waiting: VecDeque<(usize, usize)>,
    taken: usize,
    /// When the port was last seen to be up, and looks in vain so far.
    port_seen: Instant,
    looks: u32,
}

// SAFETY: verbs objects may be used by any thread, and the slots are this rail's own.
unsafe impl Send for RdmaRail {}

impl RdmaRail {
    /// A rail over `queues`, `depth` messages deep, with its receives posted. `place` is its own part of the device's slab.
    pub fn new(queues: Queues, depth: usize, place: usize) -> io::Result<Self> {
        let mut rail = Self {
            // SAFETY: the slab has a part for every place, and each place is given to one rail.
            slots: unsafe { queues.device.slab().add(place * RAIL_BYTES) },
            queues,
            depth: depth as u32,
            sent: 0,
            completed: 0,
            emptied_by_peer: 0,
            received_by_peer: 0,
            last_payload: 0,
            resends_under_way: 0,
            resends_unheard: 0,
            stirred: Instant::now(),
            resend_after: RESEND_LEAST,
            answer_due: false,
            received: 0,
            emptied: 0,
            emptied_told: 0,
            waiting: VecDeque::with_capacity(depth),
            taken: 0,
            port_seen: Instant::now(),
            looks: 0,
        };
        for slot in 0..depth {
            rail.post_receive(slot)?;
        }
        Ok(rail)
    }

    pub fn queues(&self) -> &Queues {
        &self.queues
    }

    fn receive_slot(&self, slot: usize) -> *mut u8 {
        // SAFETY: within this rail's part of the slab.
        unsafe { self.slots.add(slot * SLOT_BYTES) }
    }

    fn send_slot(&self, slot: usize) -> *mut u8 {
        self.receive_slot(SLOTS + slot)
    }

    fn piece(&self, address: *mut u8, length: usize) -> Piece {
        Piece { address: address as u64, length: length as u32, local_key: self.queues.device.local_key() }
    }

    fn post_receive(&mut self, slot: usize) -> io::Result<()> {
        let mut piece = self.piece(self.receive_slot(slot), SLOT_BYTES);
        let mut request =
            RecvRequest { id: slot as u64, next: std::ptr::null_mut(), pieces: &mut piece, piece_count: 1 };
        // SAFETY: the pair is alive; the slot is registered and not looked at until its completion.
        match unsafe { verbs::post_recv(self.queues.pair, &mut request) } {
            0 => Ok(()),
            error => Err(self.failure(&format!("a receive was refused (error {error})"))),
        }
    }

    /// Sends the start of `header` and `payload` in one message; returns how much of them.
    fn post(&mut self, header: &[u8], payload: &[u8]) -> io::Result<usize> {
        let header = &header[..header.len().min(PAYLOAD_BYTES)];
        let payload = &payload[..payload.len().min(PAYLOAD_BYTES - header.len())];
        let length = header.len() + payload.len();
        let slot = self.send_slot((self.sent % self.depth) as usize);
        // SAFETY: the slot's last message has left (its completion came), and the three parts fit into it.
        unsafe {
            std::ptr::copy_nonoverlapping(header.as_ptr(), slot.add(PREFIX_BYTES), header.len());
            std::ptr::copy_nonoverlapping(payload.as_ptr(), slot.add(PREFIX_BYTES + header.len()), payload.len());
        }
        self.post_slot(self.sent, length, SEND_ID)?;
        self.sent = self.sent.wrapping_add(1);
        if length > 0 {
            self.last_payload = self.sent;
        }
        if !self.queues.reliable {
            self.stirred = Instant::now();
        }
        Ok(length)
    }

    /// Sends the message that is in its slot, with `length` bytes of payload, after a fresh prefix.
    fn post_slot(&mut self, sequence: u32, length: usize, id: u64) -> io::Result<()> {
        let slot = self.send_slot((sequence % self.depth) as usize);
        let words = [sequence, self.emptied, self.received, length as u32];
        let prefix: [u8; PREFIX_BYTES] = bytemuck::cast(words.map(u32::to_le));
        // SAFETY: the slot begins with its prefix, and none of its sends is under way.
        unsafe { std::ptr::copy_nonoverlapping(prefix.as_ptr(), slot, PREFIX_BYTES) };
        let mut piece = self.piece(slot, PREFIX_BYTES + length);
        // What the device takes with the request itself it need not fetch.
        let inline = if PREFIX_BYTES + length <= self.queues.inline_bytes { verbs::FLAG_INLINE } else { 0 };
        let mut request = SendRequest {
            id,
            next: std::ptr::null_mut(),
            pieces: &mut piece,
            piece_count: 1,
            opcode: verbs::OPCODE_SEND,
            flags: verbs::FLAG_SIGNALED | inline,
            immediate: 0,
            unused: [0; 4],
            unused_xrc: 0,
            unused_bind: [0; 6],
        };
        // SAFETY: the pair is alive; the slot is registered and stays as it is until its completion.
        match unsafe { verbs::post_send(self.queues.pair, &mut request) } {
            0 => {
                self.emptied_told = self.emptied;
                Ok(())
            }
            error => Err(self.failure(&format!("a send was refused (error {error})"))),
        }
    }

    /// Sends again what the peer is not known to have received, as far as it is sure to have slots for it, and one message in
    /// any case, if only for its prefix: where no receive waits, an unreliable connection drops it without harm (InfiniBand Architecture, UC responder).
    fn resend(&mut self) -> io::Result<()> {
        let missing = self.sent.wrapping_sub(self.received_by_peer);
        let unread = self.sent.wrapping_sub(self.emptied_by_peer);
        let room = (self.depth - unread).saturating_sub(self.resends_unheard).max(1);
        let first = if missing == 0 { self.sent.wrapping_sub(1) } else { self.received_by_peer };
        for at in 0..missing.clamp(1, room) {
            let sequence = first.wrapping_add(at);
            let mut length = [0; 4];
            // SAFETY: the slot holds the message until the peer has emptied its own, which comes after receiving it.
            unsafe {
                let slot = self.send_slot((sequence % self.depth) as usize);
                std::ptr::copy_nonoverlapping(slot.add(PREFIX_BYTES - 4), length.as_mut_ptr(), 4);
            }
            self.post_slot(sequence, u32::from_le_bytes(length) as usize, RESEND_ID)?;
            self.resends_under_way += 1;
            self.resends_unheard += 1;
        }
        self.stirred = Instant::now();
        self.resend_after = (self.resend_after * 2).min(RESEND_MOST);
        Ok(())
    }

    /// On an unreliable connection: answers a peer that repeats itself, and repeats what a silent peer may have missed.
    fn make_up_for_losses(&mut self) -> io::Result<()> {
        if self.resends_under_way > 0 || self.completed != self.sent {
            return Ok(());
        }
        let unheard = self.last_payload.wrapping_sub(self.received_by_peer) as i32 > 0;
        if self.answer_due {
            self.answer_due = false;
            // A full window keeps its last messages: one of these carries the answer then.
            if self.may_send(0) { self.post(&[], &[]).map(|_| ()) } else { self.resend() }
        } else if unheard && self.stirred.elapsed() > self.resend_after {
            self.resend()
        } else {
            Ok(())
        }
    }

    /// Whether a message may go: its slot has left, and the peer has a slot for it. The last of the peer's slots is kept for
    /// messages that carry credits alone.
    fn may_send(&self, spare: u32) -> bool {
        let under_way = self.sent.wrapping_sub(self.completed);
        let unread = self.sent.wrapping_sub(self.emptied_by_peer);
        under_way < self.depth && unread + spare < self.depth && self.resends_under_way == 0
    }

    /// Takes all finished requests off the queue.
    fn poll(&mut self) -> io::Result<()> {
        let mut finished = [Completion::default(); POLLED];
        loop {
            // SAFETY: the queue is alive.
            let count = unsafe { verbs::poll(self.queues.completions, &mut finished) };
            if count < 0 {
                return Err(self.failure("its completion queue cannot be read"));
            }
            for completion in &finished[..count as usize] {
                if completion.status != 0 {
                    let (status, vendor) = (completion.status, completion.vendor_error);
                    let meaning = verbs::status_name(status);
                    let what = format!("a request ended with status {status}, {meaning} (vendor error {vendor:#x})");
                    return Err(self.failure(&what));
                }
                match completion.id {
                    SEND_ID => self.completed = self.completed.wrapping_add(1),
                    RESEND_ID => self.resends_under_way -= 1,
                    slot => self.accept(slot as usize, completion.length as usize)?,
                }
            }
            if (count as usize) < finished.len() {
                break;
            }
        }
        self.tell_emptied()?;
        if self.queues.reliable { Ok(()) } else { self.make_up_for_losses() }
    }

    /// Looks a few times whether there is payload.
    fn wait_briefly(&mut self) -> io::Result<()> {
        for _ in 0..LOOKS_PER_TURN {
            if !self.waiting.is_empty() {
                break;
            }
            self.poll()?;
        }
        Ok(())
    }

    /// Half of the slots may be emptied before a message says so that carries nothing else.
    fn tell_emptied(&mut self) -> io::Result<()> {
        if self.emptied.wrapping_sub(self.emptied_told) >= self.depth / 2 && self.may_send(0) {
            self.post(&[], &[])?;
        }
        Ok(())
    }

    /// Takes bytes off the first slot with payload; gives the slot back when it is empty.
    fn take(&mut self, count: usize) -> io::Result<()> {
        self.taken += count;
        if let Some((slot, _)) = self.waiting.pop_front_if(|&mut (_, length)| length == self.taken) {
            self.taken = 0;
            self.empty(slot)?;
            self.tell_emptied()?;
        }
        Ok(())
    }

    /// On which nothing comes: looks now and then whether the port is still up. A dead cable on an unreliable connection fails
    /// no request.
    fn watch_port(&mut self) -> io::Result<()> {
        self.looks = self.looks.wrapping_add(1);
        if self.looks.is_multiple_of(CLOCK_WATCH) && self.port_seen.elapsed() > PORT_WATCH {
            self.queues.device.check_port().map_err(|what| self.failure(&what))?;
            self.port_seen = Instant::now();
        }
        Ok(())
    }

    /// Looks at a message that has come.
    fn accept(&mut self, slot: usize, arrived: usize) -> io::Result<()> {
        if arrived < PREFIX_BYTES {
            return Err(self.failure(&format!("a message of {arrived} bytes came, shorter than its prefix")));
        }
        let mut prefix = [0; PREFIX_BYTES];
        // SAFETY: the receive has completed, so the slot holds still until it is posted again.
        unsafe { std::ptr::copy_nonoverlapping(self.receive_slot(slot), prefix.as_mut_ptr(), PREFIX_BYTES) };
        let [sequence, emptied, received, length] = bytemuck::cast::<_, [u32; 4]>(prefix).map(u32::from_le);
        let length = length as usize;
        let ahead = sequence.wrapping_sub(self.received) as i32;
        if ahead != 0 && self.queues.reliable {
            let expected = self.received;
            return Err(self.failure(&format!("message {sequence} came in place of {expected}: one was lost")));
        }
        if PREFIX_BYTES + length != arrived {
            let payload = arrived - PREFIX_BYTES;
            return Err(self.failure(&format!("message {sequence} of {length} bytes came with {payload} of them")));
        }
        // Old news may come late.
        if emptied.wrapping_sub(self.emptied_by_peer) as i32 > 0 {
            self.emptied_by_peer = emptied;
        }
        if received.wrapping_sub(self.received_by_peer) as i32 > 0 {
            self.received_by_peer = received;
        }
        if ahead != 0 {
            self.answer_due |= ahead < 0;
            return self.post_receive(slot);
        }
        if !self.queues.reliable {
            (self.stirred, self.resend_after, self.resends_unheard) = (Instant::now(), RESEND_LEAST, 0);
        }
        self.received = self.received.wrapping_add(1);
        if length == 0 {
            return self.empty(slot);
        }
        self.waiting.push_back((slot, length));
        Ok(())
    }

    /// Gives a slot back to the device, for the peer to fill.
    fn empty(&mut self, slot: usize) -> io::Result<()> {
        self.post_receive(slot)?;
        self.emptied = self.emptied.wrapping_add(1);
        Ok(())
    }

    fn failure(&self, what: &str) -> io::Error {
        io::Error::new(ErrorKind::ConnectionAborted, format!("RDMA device {}: {what}", self.queues.device.name))
    }
}

impl Rail for RdmaRail {
    fn try_send(&mut self, header: &[u8], payload: &[u8]) -> io::Result<usize> {
        if !self.may_send(1) {
            self.poll()?;
        }
        let (total, mut taken) = (header.len() + payload.len(), 0);
        while taken < total && self.may_send(1) {
            let payload_start = taken.saturating_sub(header.len());
            taken += self.post(&header[taken.min(header.len())..], &payload[payload_start..])?;
        }
        Ok(taken)
    }

    fn try_recv(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.wait_briefly()?;
        let mut filled = 0;
        while let Some(&(slot, length)) = self.waiting.front() {
            let count = (length - self.taken).min(bytes.len() - filled);
            // SAFETY: the slot holds `length` bytes of payload and still until it is posted again.
            unsafe {
                let source = self.receive_slot(slot).add(PREFIX_BYTES + self.taken);
                std::ptr::copy_nonoverlapping(source, bytes[filled..].as_mut_ptr(), count);
            }
            filled += count;
            self.take(count)?;
            if filled == bytes.len() {
                break;
            }
        }
        if filled == 0 {
            self.watch_port()?;
        }
        Ok(filled)
    }

    fn reads_in_place(&self) -> bool {
        true
    }

    fn look(&mut self, wanted: usize) -> io::Result<usize> {
        self.wait_briefly()?;
        match self.waiting.front() {
            Some(&(_, length)) => Ok(wanted.min(length - self.taken)),
            None => self.watch_port().map(|()| 0),
        }
    }

    fn arrived(&self, length: usize) -> &[u8] {
        let Some(&(slot, held)) = self.waiting.front() else { return &[] };
        assert!(length <= held - self.taken, "no more than there is");
        // SAFETY: the slot holds `held` bytes of payload and still until it is posted again, which takes a mutable reference.
        unsafe { std::slice::from_raw_parts(self.receive_slot(slot).add(PREFIX_BYTES + self.taken), length) }
    }

    fn consume(&mut self, length: usize) -> io::Result<()> {
        self.take(length)
    }

    fn wake(&self) -> Wake {
        Wake::Look
    }

    fn finish(&mut self) {
        // Destroying the queue pair takes back what has not left yet.
        let start = Instant::now();
        while self.completed != self.sent && start.elapsed() < CLOSING_PATIENCE && self.poll().is_ok() {
            std::thread::yield_now();
        }
    }

    fn transport(&self) -> &'static str {
        if self.queues.reliable { "rdma" } else { "rdma (unreliable connection)" }
    }
}
