//! Gathers a matrix whose columns are divided among the shards of a stage.

use std::ops::Range;

use consort_compute::Backend;
use half::bf16;

use crate::{ModelError, Pass};

/// Gathers activations `[rows, part]` of all shards into `[rows, width]`, in bf16 on the wire. The shard's own part is
/// rounded too, so that all shards hold the same values.
pub(crate) struct ColumnGather {
    /// Each shard's columns.
    parts: Vec<Range<usize>>,
    shard: usize,
    /// Pairs of bf16 values, one shard's rows after another's. Collectives move f32 words untouched.
    words: Vec<f32>,
    lengths: Vec<usize>,
}

impl ColumnGather {
    /// For matrices of up to `rows` rows. Parts begin and end at even columns.
    pub(crate) fn new(parts: Vec<Range<usize>>, shard: usize, rows: usize) -> Self {
        let width = parts.last().map_or(0, |part| part.end);
        Self { shard, words: Vec::with_capacity(rows * width / 2), lengths: Vec::with_capacity(parts.len()), parts }
    }

    pub(crate) fn gather<B: Backend>(
        &mut self,
        pass: &Pass<'_, B>,
        out: &mut B::Buffer,
        part: &mut B::Buffer,
    ) -> Result<(), ModelError> {
        let Self { parts, shard, words, lengths } = self;
        let (rows, _) = pass.backend.shape(part);
        let width = parts.last().map_or(0, |part| part.end);
        lengths.clear();
        lengths.extend(parts.iter().map(|part| rows * part.len() / 2));
        words.clear();
        words.resize(rows * width / 2, 0.0);
        let mine: usize = lengths[..*shard].iter().sum();
        pass.backend.with_host(part, |values| {
            for (word, pair) in words[mine..].iter_mut().zip(values.as_chunks::<2>().0) {
                *word = pack(*pair);
            }
        })?;
        pass.ranks.shards.all_gather(words, lengths)?;

        pass.backend.reshape(out, rows, width);
        pass.backend.with_host(out, |values| {
            let mut words = words.iter();
            for part in parts.iter() {
                for row in values.chunks_exact_mut(width) {
                    for (pair, word) in row[part.clone()].as_chunks_mut::<2>().0.iter_mut().zip(&mut words) {
                        *pair = unpack(*word);
                    }
                }
            }
        })?;
        Ok(())
    }
}

fn pack([low, high]: [f32; 2]) -> f32 {
    let bits = |x: f32| u32::from(bf16::from_f32(x).to_bits());
    f32::from_bits(bits(low) | bits(high) << 16)
}

fn unpack(word: f32) -> [f32; 2] {
    let bits = word.to_bits();
    [bits, bits >> 16].map(|half| bf16::from_bits(half as u16).to_f32())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_keep_their_order_and_round_to_bf16() {
        for pair in [[1.0, -2.5], [0.0, f32::INFINITY], [3.14159, -1e-30]] {
            assert_eq!(unpack(pack(pair)), pair.map(|x| bf16::from_f32(x).to_f32()));
        }
    }
}
