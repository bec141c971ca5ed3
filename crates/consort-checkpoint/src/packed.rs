//! GPTQ and AWQ: four-bit integers packed eight to a 32-bit word, read as affine groups.
//!
//! Both store the transposed matrix with one scale and one integer zero point for each group of input features and each
//! output feature: `value = scale · (code - zero)`. As an affine block that is `scale · code + bias` with
//! `bias = -scale · zero`; in f32 the product of a half-precision scale and a four-bit integer is exact.

use std::ops::Range;

use crate::CheckpointError;
use crate::source::Source;
use crate::weight::{Convert, Part, scaled, to_f32};

/// Codes in one word.
const WORD_CODES: usize = 8;

/// Which way the words run, and where the zero points are off by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Packing {
    /// A word holds eight input features of one output; zero points are stored less `zero_offset`.
    Gptq { zero_offset: u32 },
    /// A word holds eight outputs of one input feature, even ones first.
    Awq,
}

/// The position in a word of each of its eight output features. AWQ packs them in the order 0 2 4 6 1 3 5 7.
const GPTQ_POSITIONS: [usize; WORD_CODES] = [0, 1, 2, 3, 4, 5, 6, 7];
const AWQ_POSITIONS: [usize; WORD_CODES] = [0, 4, 1, 5, 2, 6, 3, 7];

/// A weight of GPTQ or AWQ.
#[derive(Clone, Debug)]
pub(crate) struct PackedIntegers {
    pub packing: Packing,
    /// GPTQ: `[in / 8, out]` words; AWQ: `[in, out / 8]` words.
    pub codes: Part,
    /// `[in / group, out / 8]` words.
    pub zeros: Part,
    /// `[in / group, out]`.
    pub scales: Part,
    pub scale_convert: Convert,
    /// Input features of one group.
    pub group: usize,
    /// The group of each input feature, `[in]` words. Only the plain order can be read.
    pub group_index: Option<Part>,
}

impl PackedIntegers {
    pub fn parts(&self) -> Vec<&Part> {
        [&self.codes, &self.zeros, &self.scales].into_iter().chain(&self.group_index).collect()
    }

    /// Affine blocks (f32 scale, f32 bias, codes) of the output features `rows` and the groups `groups`.
    pub fn read(
        &self,
        source: &dyn Source,
        name: &str,
        rows: &[Range<usize>],
        groups: &[Range<usize>],
    ) -> Result<Vec<u8>, CheckpointError> {
        self.check_group_index(source, name)?;
        let outputs: Vec<usize> = rows.iter().cloned().flatten().collect();
        let group_count: usize = groups.iter().map(Range::len).sum();
        let scale_bytes = self.scales.row_bytes / (self.zeros.row_bytes / 4 * WORD_CODES);
        let scales = to_f32(&self.scales.gather(source, groups, &scaled(rows, scale_bytes))?, self.scale_convert);
        let zeros = Nibbles::read(source, &self.zeros, groups, rows, self.positions())?;
        let offset = if let Packing::Gptq { zero_offset } = self.packing { zero_offset } else { 0 };
        let inputs = scaled(groups, self.group);
        let codes = match self.packing {
            Packing::Gptq { .. } => {
                let words: Vec<_> = inputs.iter().map(|run| run.start / WORD_CODES..run.end / WORD_CODES).collect();
                Codes::Words(self.codes.gather(source, &words, &scaled(rows, 4))?.into_owned())
            }
            Packing::Awq => Codes::Nibbles(Nibbles::read(source, &self.codes, &inputs, rows, AWQ_POSITIONS)?),
        };
        let mut out = Vec::with_capacity(outputs.len() * group_count * (8 + self.group / 2));
        for output in 0..outputs.len() {
            for group in 0..group_count {
                let scale = scales[group * outputs.len() + output];
                // AutoGPTQ wraps a stored 15 to zero point 16, as its own kernels do.
                let zero = (zeros.get(group, output) + offset) as f32;
                out.extend_from_slice(&scale.to_le_bytes());
                out.extend_from_slice(&(-scale * zero).to_le_bytes());
                codes.push(&mut out, group * self.group, self.group, output, outputs.len());
            }
        }
        Ok(out)
    }

    fn positions(&self) -> [usize; WORD_CODES] {
        if self.packing == Packing::Awq { AWQ_POSITIONS } else { GPTQ_POSITIONS }
    }

    fn check_group_index(&self, source: &dyn Source, name: &str) -> Result<(), CheckpointError> {
        let Some(index) = &self.group_index else { return Ok(()) };
        let stored = index.gather(source, &[0..index.rows], &[index.whole()])?;
        let groups = stored.as_chunks().0.iter().map(|&word| u32::from_le_bytes(word) as usize);
        match groups.enumerate().find(|&(feature, group)| group != feature / self.group) {
            Some((feature, group)) => {
                let reason = format!("g_idx puts input feature {feature} in group {group}: act-order is not supported");
                Err(CheckpointError::scheme(name, "gptq", reason))
            }
            None => Ok(()),
        }
    }
}

/// The codes of a selection.
enum Codes {
    /// `[in / 8, outputs]` words, little-endian: eight neighbouring inputs of one output.
    Words(Vec<u8>),
    /// `[in, outputs]` by nibble.
    Nibbles(Nibbles),
}

impl Codes {
    /// Appends the codes of inputs `start..start + count` for one of `outputs` outputs, two to a byte, low nibble first.
    fn push(&self, out: &mut Vec<u8>, start: usize, count: usize, output: usize, outputs: usize) {
        match self {
            Self::Words(words) => {
                for word in start / WORD_CODES..(start + count) / WORD_CODES {
                    let at = (word * outputs + output) * 4;
                    out.extend_from_slice(&words[at..at + 4]);
                }
            }
            Self::Nibbles(nibbles) => {
                let pair = |input| nibbles.get(input, output) | nibbles.get(input + 1, output) << 4;
                out.extend((start..start + count).step_by(2).map(|input| pair(input) as u8));
            }
        }
    }
}

/// Selected rows of words that are packed along the output features.
struct Nibbles {
    words: Vec<u32>,
    words_per_row: usize,
    /// For each selected output: its word in a row, and the bit where its nibble begins.
    places: Vec<(usize, usize)>,
}

impl Nibbles {
    fn read(
        source: &dyn Source,
        part: &Part,
        rows: &[Range<usize>],
        outputs: &[Range<usize>],
        positions: [usize; WORD_CODES],
    ) -> Result<Self, CheckpointError> {
        let covering: Vec<_> = outputs.iter().map(|run| run.start / WORD_CODES..run.end.div_ceil(WORD_CODES)).collect();
        let stored = part.gather(source, rows, &scaled(&covering, 4))?;
        let words = stored.as_chunks().0.iter().map(|&word| u32::from_le_bytes(word)).collect();
        let mut places = Vec::new();
        let mut words_per_row = 0;
        for (run, cover) in outputs.iter().zip(&covering) {
            let place =
                |output: usize| (words_per_row + output / WORD_CODES - cover.start, 4 * positions[output % WORD_CODES]);
            places.extend(run.clone().map(place));
            words_per_row += cover.len();
        }
        Ok(Self { words, words_per_row, places })
    }

    fn get(&self, row: usize, output: usize) -> u32 {
        let (word, bit) = self.places[output];
        self.words[row * self.words_per_row + word] >> bit & 15
    }
}
