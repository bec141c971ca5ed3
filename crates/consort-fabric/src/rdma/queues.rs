//! A queue pair, from its making to the moment at which both ends can send.

use std::io;
use std::sync::Arc;

use super::device::{Device, GidEntry};
use super::verbs::{
    self, CompletionQueue, GlobalRoute, QueuePair, QueuePairAttributes, QueuePairCapacity, QueuePairInit, mask,
};

/// Messages under way in each direction, where the device takes as many. Devices with queues of 32 exist.
pub(super) const SLOTS: usize = 16;
/// With fewer, messages that only give back slots would use up all that they give back.
const LEAST_SLOTS: usize = 4;
/// Messages so short are better sent with their request, where the device takes them so: a short vector with its header.
const INLINE_BYTES: usize = 192;

/// A queue pair with the queue of its completions.
pub(super) struct Queues {
    pub device: Arc<Device>,
    pub completions: *mut CompletionQueue,
    pub pair: *mut QueuePair,
    pub reliable: bool,
    /// The address that it is known by.
    pub gid: GidEntry,
    /// Requests that it takes in each direction; a power of two.
    pub depth: usize,
    /// Longest message that it takes with the request itself.
    pub inline_bytes: usize,
}

impl Queues {
    /// A queue pair that leads nowhere yet, as deep as the device allows.
    pub fn new(device: &Arc<Device>, gid: GidEntry, reliable: bool) -> io::Result<Self> {
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
        let mut queues = Self {
            device: device.clone(),
            completions,
            pair: std::ptr::null_mut(),
            reliable,
            gid,
            depth: SLOTS,
            inline_bytes: INLINE_BYTES,
        };
        while queues.pair.is_null() {
            let capacity = QueuePairCapacity {
                max_send_requests: queues.depth as u32,
                max_recv_requests: queues.depth as u32,
                max_send_pieces: 1,
                max_recv_pieces: 1,
                max_inline_bytes: queues.inline_bytes as u32,
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
            // SAFETY: domain and queue are alive, `init` has the layout that the call reads and writes.
            queues.pair = unsafe { (verbs.create_qp)(device.domain, &mut init) };
            if !queues.pair.is_null() {
                // The device says how deep the queues have become.
                let granted = init.capacity.max_send_requests.min(init.capacity.max_recv_requests) as usize;
                if granted < LEAST_SLOTS {
                    return Err(io::Error::other(format!(
                        "RDMA device {}: its queue pairs hold {granted} requests, and {LEAST_SLOTS} are needed",
                        device.name
                    )));
                }
                queues.depth = 1 << granted.min(SLOTS).ilog2();
            } else if queues.inline_bytes > 0 {
                queues.inline_bytes = 0;
            } else if queues.depth == LEAST_SLOTS {
                return Err(failed("a queue pair"));
            } else {
                queues.depth /= 2;
            }
        }
        Ok(queues)
    }

    pub fn number(&self) -> u32 {
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
                self.gid.index,
                io::Error::from_raw_os_error(error)
            ))),
        }
    }

    pub fn initialize(&self) -> io::Result<()> {
        let attributes = QueuePairAttributes {
            state: verbs::STATE_INIT,
            port: Device::PORT,
            access: verbs::ACCESS_LOCAL_WRITE as u32,
            ..QueuePairAttributes::default()
        };
        self.modify(attributes, mask::STATE | mask::PKEY_INDEX | mask::PORT | mask::ACCESS, "ready to set up")
    }

    /// From here on the pair receives from `peer` and can send to it.
    pub fn connect(&self, own: &End, peer: &End) -> io::Result<()> {
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
                source_index: self.gid.index,
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
pub(super) struct End {
    pub pair: u32,
    psn: u32,
    gid: [u8; 16],
    lid: u16,
    mtu: i32,
    pub depth: usize,
}

impl End {
    pub const BYTES: usize = 32;

    pub fn of(queues: &Queues) -> Self {
        let (gid, port) = (queues.gid, &queues.device.port);
        let pair = queues.number();
        let (psn, depth) = (pair & 0xFF_FFFF, queues.depth);
        Self { pair, psn, gid: gid.gid, lid: port.lid, mtu: port.active_mtu, depth }
    }

    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[0..4].copy_from_slice(&self.pair.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.psn.to_le_bytes());
        bytes[8..24].copy_from_slice(&self.gid);
        bytes[24..26].copy_from_slice(&self.lid.to_le_bytes());
        bytes[26] = self.mtu as u8;
        bytes[27] = self.depth as u8;
        bytes
    }

    pub fn decode(bytes: &[u8; Self::BYTES]) -> Self {
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        Self {
            pair: word(0),
            psn: word(4),
            gid: bytes[8..24].try_into().expect("sixteen bytes"),
            lid: u16::from_le_bytes([bytes[24], bytes[25]]),
            mtu: i32::from(bytes[26]),
            depth: usize::from(bytes[27]),
        }
    }
}
