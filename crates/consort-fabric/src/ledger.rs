//! What the two ends of a link with several rails know of each other's rails, so that nothing is lost with one of them.
//!
//! Frames on each rail are counted. A receiver tells the sender over the control connection how many have come whole, so that the
//! sender forgets them; until then it keeps what it sent. When a rail breaks, each end says how many frames had come whole
//! on it, and the other sends the rest again, over the control connection too: what waits on other rails may be for later.

use std::collections::{BTreeSet, VecDeque};
use std::sync::PoisonError;

use crate::channel::ControlMessage;
use crate::frame::{Frame, HEADER_BYTES};
use crate::sync::{AtomicU64, Mutex, Ordering};

/// What the link may leave waiting of what was sent again: more than sockets hold.
const RESENT_LIMIT_BYTES: usize = 1 << 30;

/// A frame of a message that has been sent, until the peer has it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct KeptFrame {
    rail: usize,
    /// Frames on its rail before it.
    index: u64,
    header: [u8; HEADER_BYTES],
    payload: Vec<u8>,
}

impl KeptFrame {
    /// The control message that carries it instead of its rail.
    pub fn resend(self) -> ControlMessage {
        ControlMessage::Resent { header: self.header.to_vec(), payload: self.payload }
    }
}

/// What the peer has said of one rail.
#[derive(Clone, Copy, Default)]
struct RailRecord {
    /// Frames that have come whole, at least.
    acknowledged: u64,
    /// Whether it uses the rail no more. Then no more frames than `acknowledged` will come.
    lost: bool,
}

#[derive(Default)]
struct State {
    rails: Vec<RailRecord>,
    kept: VecDeque<KeptFrame>,
    /// Frames that the peer sent again, for the link to take, and which have ever come so: a second control connection brings each
    /// of them twice.
    resent: Vec<(Frame, Vec<u8>)>,
    delivered: BTreeSet<(u64, u64)>,
    /// Buffers of frames that need not be kept any longer.
    spare: Vec<Vec<u8>>,
}

/// Shared by a link, which sends and receives, and the monitor, which hears what the peer says.
pub(crate) struct Ledger {
    /// Counts what the link should look at.
    news: AtomicU64,
    state: Mutex<State>,
}

/// What a link has not heard yet.
pub(crate) struct News {
    /// For each rail, whether the peer uses it no more.
    pub lost: Vec<bool>,
    /// Frames that came over the control connection.
    pub resent: Vec<(Frame, Vec<u8>)>,
}

impl Ledger {
    pub fn new(rails: usize) -> Self {
        let state = State { rails: vec![RailRecord::default(); rails], ..State::default() };
        Self { news: AtomicU64::new(0), state: Mutex::new(state) }
    }

    fn state(&self) -> impl std::ops::DerefMut<Target = State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What there is to hear since `seen`, if anything.
    pub fn news(&self, seen: &mut u64) -> Option<News> {
        let news = self.news.load(Ordering::Acquire);
        if news == std::mem::replace(seen, news) {
            return None;
        }
        let mut state = self.state();
        let lost = state.rails.iter().map(|rail| rail.lost).collect();
        Some(News { lost, resent: std::mem::take(&mut state.resent) })
    }

    /// Keeps a sent frame until the peer has it. Returns it if its rail is lost and it did not come: it must be sent again.
    pub fn keep(&self, rail: usize, index: u64, header: [u8; HEADER_BYTES], payload: &[u8]) -> Option<KeptFrame> {
        let mut state = self.state();
        let record = state.rails[rail];
        if index < record.acknowledged {
            return None;
        }
        let mut copy = state.spare.pop().unwrap_or_default();
        copy.extend_from_slice(payload);
        let frame = KeptFrame { rail, index, header, payload: copy };
        if record.lost {
            return Some(frame);
        }
        state.kept.push_back(frame);
        None
    }

    /// The peer has so many frames of a rail. False if there is no such rail.
    pub fn acknowledge(&self, rail: usize, frames: u64) -> bool {
        let mut state = self.state();
        let State { rails, kept, spare, .. } = &mut *state;
        let Some(record) = rails.get_mut(rail) else { return false };
        record.acknowledged = record.acknowledged.max(frames);
        let acknowledged = record.acknowledged;
        kept.retain_mut(|frame| {
            let keep = frame.rail != rail || frame.index >= acknowledged;
            if !keep {
                frame.payload.clear();
                spare.push(std::mem::take(&mut frame.payload));
            }
            keep
        });
        true
    }

    /// The peer uses a rail no more, and has so many of its frames: returns the others, which must be sent again.
    /// `None` if there is no such rail.
    pub fn lose(&self, rail: usize, frames: u64) -> Option<Vec<KeptFrame>> {
        if !self.acknowledge(rail, frames) {
            return None;
        }
        let mut state = self.state();
        state.rails[rail].lost = true;
        let (lost, kept) = std::mem::take(&mut state.kept).into_iter().partition(|frame| frame.rail == rail);
        state.kept = kept;
        drop(state);
        self.news.fetch_add(1, Ordering::Release);
        Some(VecDeque::into(lost))
    }

    /// The peer has sent a frame again. False if it is none, or one too many.
    pub fn deliver(&self, header: &[u8], payload: Vec<u8>) -> bool {
        let decoded = header.try_into().ok().and_then(|header| Frame::decode(header).ok());
        let Some(frame) = decoded.filter(|frame| frame.segment == payload.len() as u64) else { return false };
        let mut state = self.state();
        if !state.delivered.insert((frame.sequence, frame.offset)) {
            return true;
        }
        let waiting: usize = state.resent.iter().map(|(_, payload)| payload.len()).sum();
        if waiting + payload.len() > RESENT_LIMIT_BYTES {
            return false;
        }
        state.resent.push((frame, payload));
        drop(state);
        self.news.fetch_add(1, Ordering::Release);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{Message, Operation};

    fn header(sequence: u64) -> [u8; HEADER_BYTES] {
        let message = Message { operation: Operation::AllReduce, group: 0, length: 3 };
        Frame { message, sequence, offset: 0, segment: 3, checksum: 0 }.encode()
    }

    #[test]
    fn exactly_what_did_not_come_is_sent_again() {
        let ledger = Ledger::new(2);
        for index in 0..5 {
            assert_eq!(ledger.keep(index as usize % 2, index / 2, header(index), &[index as u8; 3]), None);
        }
        assert!(ledger.acknowledge(0, 1) && !ledger.acknowledge(2, 1));
        // Of rail 0, frames 0 to 2 were sent; the peer has two of them.
        let again = ledger.lose(0, 2).unwrap();
        assert_eq!(again.len(), 1);
        assert_eq!(again[0].payload, [4; 3]);
        // A message that ends later still has a frame on the lost rail.
        assert_eq!(ledger.keep(0, 1, header(9), &[9; 3]), None, "it came");
        assert_eq!(ledger.keep(0, 3, header(9), &[9; 3]).unwrap().payload, [9; 3]);
        let news = ledger.news(&mut 0).unwrap();
        assert_eq!((news.lost, news.resent), (vec![true, false], vec![]));
    }

    #[test]
    fn only_whole_frames_are_delivered() {
        let (ledger, mut seen) = (Ledger::new(2), 0);
        assert!(ledger.news(&mut seen).is_none());
        assert!(!ledger.deliver(&[0; 3], vec![1; 3]) && !ledger.deliver(&[0; HEADER_BYTES], vec![1; 3]));
        assert!(!ledger.deliver(&header(0), vec![1; 4]) && ledger.deliver(&header(0), vec![1; 3]));
        // Over the other control connection, before and after the link has taken it.
        assert!(ledger.deliver(&header(0), vec![1; 3]));
        assert_eq!(ledger.news(&mut seen).unwrap().resent.len(), 1);
        assert!(ledger.deliver(&header(0), vec![1; 3]));
        assert!(ledger.news(&mut seen).is_none());
    }
}
