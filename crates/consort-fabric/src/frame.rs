//! The frame: what precedes every run of payload bytes on every transport, so that no byte lands in a buffer meant for another.

use crate::FabricError;

/// First bytes of every frame.
const MAGIC: u32 = 0x4F53_4E43;
/// Version of the frame layout.
const VERSION: u8 = 2;
/// Bytes of an encoded frame header: a cache line, so that in aligned memory the payload is aligned too.
pub(crate) const HEADER_BYTES: usize = 64;

/// What a group does; also the row of its counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Operation {
    /// Sum over the group, the same for all.
    AllReduce,
    /// Parts of all members, to all.
    AllGather,
    /// Sum over the group, a part for each.
    ReduceScatter,
    /// One member's message to all.
    Broadcast,
    /// Wait for all.
    Barrier,
    /// One member's values to another.
    PointToPoint,
    /// A part from each member to each.
    AllToAll,
}

impl Operation {
    /// All operations, in the order of their counters.
    pub const ALL: [Self; 7] = [
        Self::AllReduce,
        Self::AllGather,
        Self::ReduceScatter,
        Self::Broadcast,
        Self::Barrier,
        Self::PointToPoint,
        Self::AllToAll,
    ];

    /// The name in messages and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::Broadcast => "broadcast",
            Self::Barrier => "barrier",
            Self::PointToPoint => "send/recv",
            Self::AllToAll => "all_to_all",
        }
    }
}

/// One message from one rank to another: what both ends must agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    pub operation: Operation,
    /// The group's identity.
    pub group: u32,
    /// Bytes of the whole message.
    pub length: u64,
}

/// One frame: a segment of a message on one rail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    pub message: Message,
    /// Messages on this link and direction before this one.
    pub sequence: u64,
    /// Where the segment starts in the message.
    pub offset: u64,
    /// Bytes of payload that follow.
    pub segment: u64,
    /// Of the payload; 0 where the sender makes none.
    pub checksum: u32,
}

impl Frame {
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4] = VERSION;
        bytes[5] = self.message.operation as u8;
        bytes[8..12].copy_from_slice(&self.message.group.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.checksum.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.message.length.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.offset.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.segment.to_le_bytes());
        bytes
    }

    /// Reads a header; the error says what is wrong with it.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, String> {
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let long = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        if word(0) != MAGIC {
            return Err(format!("bytes that are no frame (they begin with {:#010x})", word(0)));
        }
        if bytes[4] != VERSION {
            return Err(format!("a frame of version {} (this build speaks {VERSION})", bytes[4]));
        }
        if bytes[6..8] != [0; 2] || bytes[48..] != [0; 16] {
            return Err("a frame whose reserved bytes are in use".into());
        }
        let operation = *Operation::ALL
            .get(bytes[5] as usize)
            .ok_or_else(|| format!("a frame of unknown operation {}", bytes[5]))?;
        let frame = Self {
            message: Message { operation, group: word(8), length: long(24) },
            checksum: word(12),
            sequence: long(16),
            offset: long(32),
            segment: long(40),
        };
        match frame.offset.checked_add(frame.segment) {
            Some(end) if end <= frame.message.length => Ok(frame),
            _ => Err(format!(
                "a frame of {} bytes at {} that overruns its message of {} bytes",
                frame.segment, frame.offset, frame.message.length
            )),
        }
    }

    /// How messages name a frame.
    pub fn describe(message: &Message, sequence: u64) -> String {
        let Message { operation, group, length } = message;
        format!("{} of {length} bytes in group {group:08x}, message {sequence}", operation.name())
    }
}

/// A frame that is not the one that this rank's operation needs.
pub(crate) fn mismatch(rank: usize, host: &str, expected: String, received: String) -> FabricError {
    FabricError::FrameMismatch { rank, host: host.to_owned(), expected, received }
}

/// FNV-1a: small, and good enough to notice a wrong buffer.
pub(crate) fn checksum(state: u32, bytes: &[u8]) -> u32 {
    bytes.iter().fold(state, |hash, &byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

/// The checksum of nothing.
pub(crate) const CHECKSUM_START: u32 = 0x811C_9DC5;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_survive_and_damage_does_not_pass_unseen() {
        let message = Message { operation: Operation::Broadcast, group: 0xABCD_1234, length: 1 << 40 };
        let frame = Frame { message, sequence: 7, offset: 1 << 39, segment: 1 << 38, checksum: 99 };
        let bytes = frame.encode();
        assert_eq!(Frame::decode(&bytes), Ok(frame));
        for bit in 0..8 * HEADER_BYTES {
            let mut damaged = bytes;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(Frame::decode(&damaged), Ok(frame), "bit {bit}");
        }
        let mut reserved = bytes;
        reserved[7] = 1;
        assert!(Frame::decode(&reserved).unwrap_err().contains("reserved"));
        let overrun = Frame { offset: u64::MAX, segment: 2, ..frame };
        assert!(Frame::decode(&overrun.encode()).unwrap_err().contains("overruns"));
    }
}
