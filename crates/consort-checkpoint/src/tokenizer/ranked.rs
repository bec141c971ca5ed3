//! Byte pair encoding as tiktoken does it: every token of the vocabulary has a rank, and of all neighbours in a word the pair whose
//! union has the lowest rank is joined first, the leftmost of equals.
//!
//! A list of merges, which the `tokenizers` crate wants, says which two parts make a token; here any two do. So the two can differ
//! in rare words, and the ranks are used as they are.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

/// A vocabulary of byte strings, which rank by their ids.
pub(super) struct RankedVocabulary {
    ids: HashMap<Vec<u8>, u32>,
}

impl RankedVocabulary {
    /// From tokens and their ids. Ids must rise with the rank.
    pub(super) fn new(tokens: impl IntoIterator<Item = (Vec<u8>, u32)>) -> Self {
        Self { ids: tokens.into_iter().collect() }
    }

    /// The id of the token that is exactly `bytes`.
    pub(super) fn id(&self, bytes: &[u8]) -> Option<u32> {
        self.ids.get(bytes).copied()
    }

    /// The ids of one word; the byte that the vocabulary lacks, if there is one.
    ///
    /// Work grows with `n log n`, so that a long run of one character is no burden.
    pub(super) fn encode(&self, word: &[u8]) -> Result<Vec<u32>, u8> {
        if let Some(id) = self.id(word) {
            return Ok(vec![id]);
        }
        // Part `i` begins at byte `i`: where it ends (0 for parts that have been joined to the one before), and where the part
        // before it begins.
        let mut ends: Vec<usize> = (1..=word.len()).collect();
        let mut before: Vec<usize> = (0..word.len()).map(|at| at.saturating_sub(1)).collect();
        let mut pairs = BinaryHeap::new();
        let pair = |ends: &[usize], start: usize| {
            let end = *ends.get(ends[start])?;
            Some(Reverse((self.id(&word[start..end])?, start, end)))
        };
        pairs.extend((0..word.len()).filter_map(|start| pair(&ends, start)));
        while let Some(Reverse((_, start, end))) = pairs.pop() {
            let middle = ends[start];
            // Either part may have been joined to another since.
            if middle == 0 || ends.get(middle) != Some(&end) {
                continue;
            }
            (ends[start], ends[middle]) = (end, 0);
            if let Some(next) = before.get_mut(end) {
                *next = start;
            }
            pairs.extend(pair(&ends, start));
            if start > 0 {
                pairs.extend(pair(&ends, before[start]));
            }
        }
        let parts = (0..word.len()).filter(|&start| ends[start] > 0);
        parts.map(|start| self.id(&word[start..ends[start]]).ok_or(word[start])).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition, word by word: look at all pairs, join the best, begin again.
    fn by_definition(vocabulary: &RankedVocabulary, word: &[u8]) -> Vec<u32> {
        if let Some(id) = vocabulary.id(word) {
            return vec![id];
        }
        let mut parts: Vec<Vec<u8>> = word.iter().map(|&byte| vec![byte]).collect();
        loop {
            let joined = |at: usize| vocabulary.id(&parts[at..at + 2].concat());
            let best = (0..parts.len().saturating_sub(1)).filter_map(|at| Some((joined(at)?, at))).min();
            let Some((_, at)) = best else { break };
            let right = parts.remove(at + 1);
            parts[at].extend(right);
        }
        parts.iter().map(|part| vocabulary.id(part).unwrap()).collect()
    }

    proptest! {
        #[test]
        fn the_best_pair_is_joined_first(
            words in prop::collection::vec("[abc]{2,5}", 1..20), text in "[abc]{0,40}",
        ) {
            let letters = ["a", "b", "c"].map(str::to_owned).into_iter();
            let mut tokens: Vec<String> = Vec::new();
            letters.chain(words).for_each(|word| if !tokens.contains(&word) { tokens.push(word) });
            let ranked = tokens.into_iter().zip(0..).map(|(token, id)| (token.into_bytes(), id));
            let vocabulary = RankedVocabulary::new(ranked);
            let expected = if text.is_empty() { vec![] } else { by_definition(&vocabulary, text.as_bytes()) };
            prop_assert_eq!(vocabulary.encode(text.as_bytes()), Ok(expected));
        }
    }

    #[test]
    fn a_missing_byte_is_named() {
        let vocabulary = RankedVocabulary::new([(b"a".to_vec(), 0)]);
        assert_eq!(vocabulary.encode(b"ab"), Err(b'b'));
    }
}
