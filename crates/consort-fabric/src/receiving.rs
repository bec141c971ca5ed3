//! What one rail is receiving: a header, then its segment, then the next.

use crate::frame::{CHECKSUM_START, Frame, HEADER_BYTES, Message, checksum};
use crate::link::LinkFault;
use crate::rail::Rail;

/// The frame on its way in.
pub(crate) struct Receiving {
    header: [u8; HEADER_BYTES],
    header_filled: usize,
    /// The decoded header, until its segment is complete.
    frame: Option<Frame>,
    /// Bytes of the segment that have come.
    pub come: u64,
    checksum: u32,
    /// Frames that have come whole.
    pub frames: u64,
    /// Frames and bytes that the sender does not know to have come.
    owed_frames: u64,
    owed_bytes: u64,
}

impl Receiving {
    pub const NONE: Self = Self {
        header: [0; HEADER_BYTES],
        header_filled: 0,
        frame: None,
        come: 0,
        checksum: CHECKSUM_START,
        frames: 0,
        owed_frames: 0,
        owed_bytes: 0,
    };

    /// The current frame's header, read as far as it is there.
    pub fn header_step(
        &mut self,
        rail: &mut dyn Rail,
        moved: &mut bool,
        sequence: u64,
    ) -> Result<Option<Frame>, LinkFault> {
        if self.frame.is_none() {
            if self.header_filled == 0 && !rail.begin_frame(false)? {
                return Ok(None);
            }
            let count = rail.try_recv(&mut self.header[self.header_filled..])?;
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

    /// The current frame, if its header is here.
    pub fn frame(&self) -> Option<Frame> {
        self.frame
    }

    /// Whether the current frame belongs to a later message.
    pub fn is_ahead_of(&self, sequence: u64) -> bool {
        self.frame.is_some_and(|frame| frame.sequence > sequence)
    }

    /// Counts bytes of the segment that have come.
    pub fn take(&mut self, frame: &Frame, bytes: &[u8]) {
        self.come += bytes.len() as u64;
        if frame.checksum != 0 {
            self.checksum = checksum(self.checksum, bytes);
        }
    }

    /// The segment is whole.
    pub fn finish_segment(&mut self, frame: &Frame) -> Result<(), LinkFault> {
        if frame.checksum != 0 && frame.checksum != self.checksum {
            return Err(LinkFault::Mismatch {
                expected: format!("a payload with checksum {:08x}", frame.checksum),
                received: format!("one with {:08x}", self.checksum),
            });
        }
        (self.header_filled, self.frame, self.come, self.checksum) = (0, None, 0, CHECKSUM_START);
        self.frames += 1;
        self.owed_frames += 1;
        self.owed_bytes += frame.segment;
        Ok(())
    }

    /// Whether the sender should hear what has come. Then it will.
    pub fn owes(&mut self, frames: u64, bytes: u64) -> bool {
        let owes = self.owed_frames >= frames || self.owed_bytes >= bytes;
        if owes {
            (self.owed_frames, self.owed_bytes) = (0, 0);
        }
        owes
    }

    /// The rail is lost, and the rest of the frame with it: returns how many bytes of message `sequence` had come in vain.
    pub fn discard(&mut self, sequence: u64) -> u64 {
        let frame = self.frame.take();
        self.header_filled = 0;
        let come = std::mem::take(&mut self.come);
        if frame.is_some_and(|frame| frame.sequence == sequence) { come } else { 0 }
    }
}

/// The fault of a frame that is not the expected message's.
pub(crate) fn mismatch(expected: &Message, sequence: u64, frame: &Frame) -> LinkFault {
    LinkFault::Mismatch {
        expected: Frame::describe(expected, sequence),
        received: Frame::describe(&frame.message, frame.sequence),
    }
}
