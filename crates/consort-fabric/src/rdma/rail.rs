//! One queue pair as a byte pipe: fixed slots, credits, and a sequence number in each message.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::device::Device;
use super::verbs::{
    self, Completion, CompletionQueue, GlobalRoute, Piece, QueuePair, QueuePairAttributes, QueuePairCapacity,
    QueuePairInit, RecvRequest, SendRequest, mask,
};
use crate::rail::{Rail, Wake, receive_whole, send_whole};

/// Bytes of one message. On macOS a send and its receive must cover the same number of 4096-byte frames: one.
const SLOT_BYTES: usize = if cfg!(target_os = "macos") { 4096 } else { 16 << 10 };
/// Messages under way in each direction. Devices with queues of 32 exist.
const SLOTS: usize = 16;
/// Registered memory of one rail: slots for both directions.
pub(crate) const RAIL_BYTES: usize = 2 * SLOTS * SLOT_BYTES;
/// Sequence number, credits, payload length, and room to align.
const PREFIX_BYTES: usize = 16;
const PAYLOAD_BYTES: usize = SLOT_BYTES - PREFIX_BYTES;
/// Slots that were emptied before a message says so that carries nothing else.
const CREDITS_OWED: u32 = SLOTS as u32 / 2;
/// How long a closing rail waits for its last messages to leave.
const CLOSING_PATIENCE: Duration = Duration::from_secs(1);
/// Set-up messages go over an existing connection.
const SETUP_PATIENCE: Duration = Duration::from_secs(10);

/// A queue pair that is not connected yet, or not any more.
struct Queues {
    device: Arc<Device>,
    completions: *mut CompletionQueue,
    pair: *mut QueuePair,
    reliable: bool,
}

impl Queues {
    fn new(device: &Arc<Device>, reliable: bool) -> io::Result<Self> {
        let failed = |what: &str| {
            let error = io::Error::last_os_error();
            io::Error::other(format!("RDMA device {}: {what} cannot be made: {error}", device.name))
        };
        let verbs = device.verbs;
        let null = std::ptr::null_mut();
        // SAFETY: the device is open; the queue has room for all requests of both directions.
        let completions = unsafe { (verbs.create_cq)(device.context, 2 * SLOTS as i32, null, null, 0) };
        if completions.is_null() {
            return Err(failed("a completion queue"));
        }
        let mut queues = Self { device: device.clone(), completions, pair: std::ptr::null_mut(), reliable };
        let capacity = QueuePairCapacity {
            max_send_requests: SLOTS as u32,
            max_recv_requests: SLOTS as u32,
            max_send_pieces: 1,
            max_recv_pieces: 1,
            max_inline_bytes: 0,
        };
        let mut init = QueuePairInit {
            context: null,
            send_cq: completions,
            recv_cq: completions,
            srq: null,
            capacity,
            kind: if reliable { verbs::KIND_RELIABLE } else { verbs::KIND_UNRELIABLE },
            signal_all: 1,
        };
        // SAFETY: domain and queue are alive, `init` has the layout that the call reads.
        queues.pair = unsafe { (verbs.create_qp)(device.domain, &mut init) };
        if queues.pair.is_null() { Err(failed("a queue pair")) } else { Ok(queues) }
    }

    fn number(&self) -> u32 {
        // SAFETY: alive while `self` is.
        unsafe { (*self.pair).number }
    }

    fn modify(&self, mut attributes: QueuePairAttributes, fields: i32, step: &str) -> io::Result<()> {
        // SAFETY: the pair is alive, `attributes` has the layout that the call reads.
        match unsafe { (self.device.verbs.modify_qp)(self.pair, &mut attributes, fields) } {
            0 => Ok(()),
            error => Err(io::Error::other(format!(
                "RDMA device {} (GID index {}): the queue pair cannot be made {step}: {}",
                self.device.name,
                self.device.gid.index,
                io::Error::from_raw_os_error(error)
            ))),
        }
    }

    fn initialize(&self) -> io::Result<()> {
        let attributes = QueuePairAttributes {
            state: verbs::STATE_INIT,
            port: Device::PORT,
            access: verbs::ACCESS_LOCAL_WRITE as u32,
            ..QueuePairAttributes::default()
        };
        self.modify(attributes, mask::STATE | mask::PKEY_INDEX | mask::PORT | mask::ACCESS, "ready to set up")
    }

    fn connect(&self, own: &End, peer: &End) -> io::Result<()> {
        let infiniband = self.device.port.link_layer == verbs::LINK_LAYER_INFINIBAND;
        let mut attributes = QueuePairAttributes {
            state: verbs::STATE_READY_TO_RECEIVE,
            path_mtu: own.mtu.min(peer.mtu),
            receive_psn: peer.psn,
            destination: peer.pair,
            max_destination_reads: 1,
            min_not_ready_timer: 12,
            ..QueuePairAttributes::default()
        };
        attributes.address.destination_lid = peer.lid;
        attributes.address.port = Device::PORT;
        if !infiniband {
            attributes.address.is_global = 1;
            attributes.address.route = GlobalRoute {
                destination: bytemuck::cast(peer.gid),
                source_index: self.device.gid.index,
                hop_limit: 64,
                ..GlobalRoute::default()
            };
        }
        let common = mask::STATE | mask::ADDRESS | mask::PATH_MTU | mask::DESTINATION | mask::RECEIVE_PSN;
        let reliable = mask::MAX_DESTINATION_READS | mask::NOT_READY_TIMER;
        self.modify(attributes, common | if self.reliable { reliable } else { 0 }, "ready to receive")?;
        let attributes = QueuePairAttributes {
            state: verbs::STATE_READY_TO_SEND,
            send_psn: own.psn,
            timeout: 14, // 4.096 us times two to this: 67 ms until a message is repeated.
            retries: 7,
            not_ready_retries: 7,
            max_reads: 1,
            ..QueuePairAttributes::default()
        };
        let reliable = mask::TIMEOUT | mask::RETRIES | mask::NOT_READY_RETRIES | mask::MAX_READS;
        let fields = mask::STATE | mask::SEND_PSN | if self.reliable { reliable } else { 0 };
        self.modify(attributes, fields, "ready to send")
    }
}

impl Drop for Queues {
    fn drop(&mut self) {
        // SAFETY: made by `new` (or null), used by nothing else; the device is still held.
        unsafe {
            if !self.pair.is_null() {
                (self.device.verbs.destroy_qp)(self.pair);
            }
            (self.device.verbs.destroy_cq)(self.completions);
        }
    }
}

/// What the two ends of a queue pair must know of each other.
struct End {
    pair: u32,
    psn: u32,
    gid: [u8; 16],
    lid: u16,
    mtu: i32,
}

impl End {
    const BYTES: usize = 32;

    fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[0..4].copy_from_slice(&self.pair.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.psn.to_le_bytes());
        bytes[8..24].copy_from_slice(&self.gid);
        bytes[24..26].copy_from_slice(&self.lid.to_le_bytes());
        bytes[26] = self.mtu as u8;
        bytes
    }

    fn decode(bytes: &[u8; Self::BYTES]) -> Self {
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        Self {
            pair: word(0),
            psn: word(4),
            gid: bytes[8..24].try_into().expect("sixteen bytes"),
            lid: u16::from_le_bytes([bytes[24], bytes[25]]),
            mtu: i32::from(bytes[26]),
        }
    }
}

/// Says `ours` to the other end and hears the same from it.
fn swap<const N: usize>(side: &mut dyn Rail, ours: &[u8; N]) -> io::Result<[u8; N]> {
    let mut theirs = [0; N];
    send_whole(side, ours, SETUP_PATIENCE)?;
    receive_whole(side, &mut theirs, SETUP_PATIENCE)?;
    Ok(theirs)
}

/// Connects a queue pair with the other end of `side`, an existing connection to the same peer. `place` is the rail's own part
/// of the device's slab.
pub(crate) fn connect(device: &Arc<Device>, place: usize, side: &mut dyn Rail) -> io::Result<Box<dyn Rail>> {
    // Reliable connections if both devices have them.
    let reliable = Queues::new(device, true);
    let queues = match swap(side, &[u8::from(reliable.is_ok())])? {
        [1] if reliable.is_ok() => reliable?,
        _ => Queues::new(device, false)?,
    };
    queues.initialize()?;
    let own = End {
        pair: queues.number(),
        psn: queues.number() & 0xFF_FFFF,
        gid: device.gid.gid,
        lid: device.port.lid,
        mtu: device.port.active_mtu,
    };
    let peer = End::decode(&swap(side, &own.encode())?);
    let mut rail = RdmaRail {
        queues,
        // SAFETY: the slab has a part for every place, and each place is given to one rail.
        slots: unsafe { device.slab().add(place * RAIL_BYTES) },
        sent: 0,
        completed: 0,
        emptied_by_peer: 0,
        received: 0,
        emptied: 0,
        emptied_told: 0,
        waiting: VecDeque::with_capacity(SLOTS),
        taken: 0,
    };
    for slot in 0..SLOTS {
        rail.post_receive(slot)?;
    }
    rail.queues.connect(&own, &peer)?;
    // Nobody sends before both can receive.
    swap(side, &[1])?;
    Ok(Box::new(rail))
}

/// A connected queue pair. Counters run on for ever and wrap.
struct RdmaRail {
    queues: Queues,
    /// Receive slots, then send slots.
    slots: *mut u8,
    /// Messages sent; so many of them have left; so many slots the peer has emptied.
    sent: u32,
    completed: u32,
    emptied_by_peer: u32,
    /// Messages received; so many slots this end has emptied; so many the peer knows of.
    received: u32,
    emptied: u32,
    emptied_told: u32,
    /// Slots with payload, in order, and its length; the first is taken up to `taken`.
    waiting: VecDeque<(usize, usize)>,
    taken: usize,
}

// SAFETY: verbs objects may be used by any thread, and the slots are this rail's own.
unsafe impl Send for RdmaRail {}

impl RdmaRail {
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
        let slot = self.send_slot(self.sent as usize % SLOTS);
        let mut prefix = [0; PREFIX_BYTES];
        prefix[0..4].copy_from_slice(&self.sent.to_le_bytes());
        prefix[4..8].copy_from_slice(&self.emptied.to_le_bytes());
        prefix[8..12].copy_from_slice(&(length as u32).to_le_bytes());
        // SAFETY: the slot's last message has left (its completion came), and the three parts fit into it.
        unsafe {
            std::ptr::copy_nonoverlapping(prefix.as_ptr(), slot, PREFIX_BYTES);
            std::ptr::copy_nonoverlapping(header.as_ptr(), slot.add(PREFIX_BYTES), header.len());
            std::ptr::copy_nonoverlapping(payload.as_ptr(), slot.add(PREFIX_BYTES + header.len()), payload.len());
        }
        let mut piece = self.piece(slot, PREFIX_BYTES + length);
        let mut request = SendRequest {
            id: SLOTS as u64,
            next: std::ptr::null_mut(),
            pieces: &mut piece,
            piece_count: 1,
            opcode: verbs::OPCODE_SEND,
            flags: verbs::FLAG_SIGNALED,
            immediate: 0,
            unused: [0; 4],
            unused_xrc: 0,
            unused_bind: [0; 6],
        };
        // SAFETY: the pair is alive; the slot is registered and stays as it is until its completion.
        match unsafe { verbs::post_send(self.queues.pair, &mut request) } {
            0 => {
                self.sent = self.sent.wrapping_add(1);
                self.emptied_told = self.emptied;
                Ok(length)
            }
            error => Err(self.failure(&format!("a send was refused (error {error})"))),
        }
    }

    /// Whether a message may go: its slot has left, and the peer has a slot for it. The last of the peer's slots is kept for
    /// messages that carry credits alone.
    fn may_send(&self, spare: u32) -> bool {
        let under_way = self.sent.wrapping_sub(self.completed);
        let unread = self.sent.wrapping_sub(self.emptied_by_peer);
        under_way < SLOTS as u32 && unread + spare < SLOTS as u32
    }

    /// Takes all finished requests off the queue.
    fn poll(&mut self) -> io::Result<()> {
        let mut finished = [Completion::default(); SLOTS];
        loop {
            // SAFETY: the queue is alive.
            let count = unsafe { verbs::poll(self.queues.completions, &mut finished) };
            if count < 0 {
                return Err(self.failure("its completion queue cannot be read"));
            }
            for completion in &finished[..count as usize] {
                if completion.status != 0 {
                    let (status, vendor) = (completion.status, completion.vendor_error);
                    return Err(
                        self.failure(&format!("a request ended with status {status} (vendor error {vendor:#x})"))
                    );
                }
                match completion.opcode & verbs::COMPLETION_RECV {
                    0 => self.completed = self.completed.wrapping_add(1),
                    _ => self.accept(completion.id as usize, completion.length as usize)?,
                }
            }
            if (count as usize) < finished.len() {
                break;
            }
        }
        if self.emptied.wrapping_sub(self.emptied_told) >= CREDITS_OWED && self.may_send(0) {
            self.post(&[], &[])?;
        }
        Ok(())
    }

    /// Looks at a message that has come.
    fn accept(&mut self, slot: usize, arrived: usize) -> io::Result<()> {
        let mut prefix = [0; PREFIX_BYTES];
        // SAFETY: the receive has completed, so the slot holds still until it is posted again.
        unsafe { std::ptr::copy_nonoverlapping(self.receive_slot(slot), prefix.as_mut_ptr(), PREFIX_BYTES) };
        let word = |at: usize| u32::from_le_bytes(prefix[at..at + 4].try_into().expect("four bytes"));
        let (sequence, emptied, length) = (word(0), word(4), word(8) as usize);
        if sequence != self.received || PREFIX_BYTES + length > arrived {
            let expected = self.received;
            return Err(self.failure(&format!("message {sequence} came in place of {expected}: one was lost")));
        }
        self.received = self.received.wrapping_add(1);
        self.emptied_by_peer = emptied;
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
        self.poll()?;
        let (total, mut taken) = (header.len() + payload.len(), 0);
        while taken < total && self.may_send(1) {
            let payload_start = taken.saturating_sub(header.len());
            taken += self.post(&header[taken.min(header.len())..], &payload[payload_start..])?;
        }
        Ok(taken)
    }

    fn try_recv(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        if self.waiting.is_empty() {
            self.poll()?;
        }
        let mut filled = 0;
        while let Some(&(slot, length)) = self.waiting.front() {
            let count = (length - self.taken).min(bytes.len() - filled);
            // SAFETY: the slot holds `length` bytes of payload and still until it is posted again.
            unsafe {
                let source = self.receive_slot(slot).add(PREFIX_BYTES + self.taken);
                std::ptr::copy_nonoverlapping(source, bytes[filled..].as_mut_ptr(), count);
            }
            filled += count;
            self.taken += count;
            if self.taken < length {
                break;
            }
            self.waiting.pop_front();
            self.taken = 0;
            self.empty(slot)?;
        }
        if filled > 0 {
            self.poll()?; // Perhaps the peer must hear of emptied slots.
        }
        Ok(filled)
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
