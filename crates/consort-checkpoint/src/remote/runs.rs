//! Byte ranges in a form that is short to write down: a block of columns of a matrix is one run, however many rows it has.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Equally long byte ranges at equal distances. A single range is a run of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// First byte of the first range.
    pub start: u64,
    /// Bytes of each range.
    pub length: u64,
    /// From the start of one range to the start of the next.
    pub stride: u64,
    /// Ranges.
    pub count: u64,
}

/// Where a byte stands with respect to a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// In a range, which ends here.
    Inside(u64),
    /// In none; the next range begins here.
    Before(u64),
    /// Behind the last range.
    Behind,
}

impl Run {
    /// The run of one range.
    pub fn of(range: &Range<u64>) -> Self {
        let length = range.end.saturating_sub(range.start);
        Self { start: range.start, length, stride: length, count: 1 }
    }

    /// The ranges, in order.
    pub fn ranges(&self) -> impl Iterator<Item = Range<u64>> + use<> {
        let Self { start, length, stride, count } = *self;
        (0..count).map(move |at| start + at * stride..start + at * stride + length)
    }

    /// Bytes of all ranges, and one past the last byte; `None` for numbers that make no sense. A run that came from another
    /// machine is asked this before anything else.
    pub fn extent(&self) -> Option<(u64, u64)> {
        let Self { start, length, stride, count } = *self;
        if count == 0 || length == 0 || stride < length {
            return None;
        }
        let end = start.checked_add(stride.checked_mul(count - 1)?)?.checked_add(length)?;
        Some((length.checked_mul(count)?, end))
    }

    /// Where `position` stands.
    pub(crate) fn place(&self, position: u64) -> Place {
        let Self { start, length, stride, count } = *self;
        if position < start {
            return Place::Before(start);
        }
        let at = (position - start) / stride;
        let next = start + (at + 1) * stride;
        match (position - start) % stride < length {
            true if at < count => Place::Inside(start + at * stride + length),
            false if at + 1 < count => Place::Before(next),
            _ => Place::Behind,
        }
    }
}

/// Packs ranges, which are not empty and in ascending order, into lists of runs of at most `limit_bytes` bytes and `RUN_LIMIT`
/// runs each. The bytes of the lists, one after another, are those of the ranges.
pub(crate) fn pack(ranges: &[Range<u64>], limit_bytes: u64) -> Vec<Vec<Run>> {
    /// More runs than this make a message of their own.
    const RUN_LIMIT: usize = 4096;
    let mut lists = Vec::new();
    let (mut runs, mut bytes): (Vec<Run>, u64) = (Vec::new(), 0);
    for range in ranges {
        let mut rest = range.clone();
        while rest.start < rest.end {
            if bytes == limit_bytes || runs.len() == RUN_LIMIT {
                lists.push(std::mem::take(&mut runs));
                bytes = 0;
            }
            let piece = rest.start..rest.end.min(rest.start + limit_bytes - bytes);
            rest.start = piece.end;
            bytes += piece.end - piece.start;
            if !runs.last_mut().is_some_and(|run| run.extend(&piece)) {
                runs.push(Run::of(&piece));
            }
        }
    }
    if !runs.is_empty() {
        lists.push(runs);
    }
    lists
}

impl Run {
    /// Takes a range in if it goes on where this run ends; the second range decides the stride.
    fn extend(&mut self, piece: &Range<u64>) -> bool {
        if self.count == 1 && piece.start >= self.start + self.length {
            self.stride = piece.start - self.start;
        }
        let goes_on = piece.end - piece.start == self.length && piece.start == self.start + self.count * self.stride;
        self.count += u64::from(goes_on);
        goes_on
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_block_of_columns_is_one_run() {
        let ranges: Vec<_> = (0..1000).map(|row| 64 + row * 512..64 + row * 512 + 128).collect();
        let lists = pack(&ranges, 1 << 20);
        assert_eq!(lists, [[Run { start: 64, length: 128, stride: 512, count: 1000 }]]);
        assert_eq!(lists[0][0].extent(), Some((128_000, 64 + 999 * 512 + 128)));
    }

    #[test]
    fn numbers_that_make_no_sense_are_refused() {
        let run = |start, length, stride, count| Run { start, length, stride, count };
        let senseless = [
            run(0, 0, 1, 1),
            run(0, 1, 1, 0),
            run(0, 2, 1, 2),
            run(u64::MAX, 1, 1, 1),
            run(1, 1, u64::MAX, 2),
            run(0, 1, 1 << 40, 1 << 40),
        ];
        assert!(senseless.iter().all(|run| run.extent().is_none()));
    }

    proptest! {
        #[test]
        fn runs_hold_exactly_the_bytes_of_the_ranges(
            steps in proptest::collection::vec((0u64..5, 1u64..9, 1usize..6), 1..20),
            limit_bytes in 1u64..40,
        ) {
            let (mut ranges, mut at) = (Vec::new(), 0);
            for (gap, length, count) in steps {
                for _ in 0..count {
                    ranges.push(at + gap..at + gap + length);
                    at += gap + length;
                }
            }
            let wanted: Vec<u64> = ranges.iter().cloned().flatten().collect();
            let lists = pack(&ranges, limit_bytes);
            let packed: Vec<u64> = lists.iter().flatten().flat_map(Run::ranges).flatten().collect();
            prop_assert_eq!(&packed, &wanted);
            for list in &lists {
                let bytes: u64 = list.iter().map(|run| run.extent().unwrap().0).sum();
                prop_assert!(bytes <= limit_bytes);
            }
            for run in lists.iter().flatten() {
                let ranges: Vec<_> = run.ranges().collect();
                for position in 0..at + 2 {
                    let expected = match ranges.iter().find(|range| range.end > position) {
                        Some(range) if range.start <= position => Place::Inside(range.end),
                        Some(range) => Place::Before(range.start),
                        None => Place::Behind,
                    };
                    // Ranges that touch may be told apart or not.
                    match (run.place(position), expected) {
                        (Place::Inside(end), Place::Inside(at_least)) => prop_assert!(end == at_least),
                        (place, expected) => prop_assert_eq!(place, expected),
                    }
                }
            }
        }
    }
}
