//! Integers of four or eight bits packed into 32-bit words: GPTQ, AWQ, and `pack-quantized` of compressed-tensors.
//!
//! All store one scale and one integer zero point for each group of input features and each output feature:
//! `value = scale · (code - zero)`. As an affine block that is `scale · code + bias` with `bias = -scale · zero`; in f32 the product
//! of a half-precision scale and an integer of eight bits is exact.
//!
//! Where neighbouring input features are of different groups (`desc_act`, "act-order"), no block has one scale. Such weights are
//! read as plain values of the scales' own type, which is also what the kernels of these libraries make of them: four times the
//! memory of four bits.

use std::collections::BTreeSet;
use std::ops::Range;

use consort_compute::Format;

use crate::CheckpointError;
use crate::source::Source;
use crate::weight::{Convert, Part, scaled, to_f32};

const WORD_BITS: usize = 32;

/// Which way the words run, and where the zero points are off by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Packing {
    /// A word holds eight input features of one output; zero points are stored less `zero_offset`.
    Gptq { zero_offset: u32 },
    /// A word holds eight outputs of one input feature, even ones first.
    Awq,
    /// Rows as they are, a word holds neighbours of this many bits, low ones first; a code is its integer plus half the range.
    Compressed { bits: usize },
}

/// The position in a word of each of its eight output features. AWQ packs them in the order 0 2 4 6 1 3 5 7.
const AWQ_POSITIONS: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

impl Packing {
    fn bits(self) -> usize {
        if let Self::Compressed { bits } = self { bits } else { 4 }
    }

    /// Codes in one word.
    pub fn word_codes(self) -> usize {
        WORD_BITS / self.bits()
    }

    /// The bit of a word where the code of its `index`-th feature begins.
    fn bit(self, index: usize) -> usize {
        self.bits() * if self == Self::Awq { AWQ_POSITIONS[index] } else { index }
    }

    /// Whether tables have a row for each group, and not one for each output.
    fn is_transposed(self) -> bool {
        !matches!(self, Self::Compressed { .. })
    }
}

/// A weight of packed integers.
#[derive(Clone, Debug)]
pub(crate) struct PackedIntegers {
    pub packing: Packing,
    /// GPTQ: `[in / 8, out]` words; AWQ: `[in, out / 8]`; compressed-tensors: `[out, in / 8]`.
    pub codes: Part,
    /// `[groups, out / 8]` words; compressed-tensors: `[out / 8, groups]`, and none where zero is half the range.
    pub zeros: Option<Part>,
    /// `[groups, out]`; compressed-tensors: `[out, groups]`.
    pub scales: Part,
    pub scale_convert: Convert,
    pub outputs: usize,
    /// Input features of one group.
    pub group: usize,
    pub groups: usize,
    /// The group of each input feature, `[in]` words.
    pub group_index: Option<Part>,
    /// `[out, in]` as the file itself says, two integers: compressed-tensors.
    pub stored_shape: Option<Part>,
    /// All zero points are half the range, also those that are stored: GPTQ.
    pub symmetric: bool,
}

impl PackedIntegers {
    /// The output features `rows` and input features `columns`, which are whole blocks of `format`: affine blocks (f32 scale,
    /// f32 bias, codes), or plain values.
    pub fn read(
        &self,
        source: &dyn Source,
        name: &str,
        rows: &[Range<usize>],
        columns: &[Range<usize>],
        format: Format,
    ) -> Result<Vec<u8>, CheckpointError> {
        self.check_shape(source, name)?;
        let inputs: Vec<usize> = columns.iter().cloned().flatten().collect();
        let outputs = rows.iter().map(Range::len).sum();
        let group_of = self.group_of(source, name, &inputs, format)?;
        let tables = Tables::read(self, source, rows, &group_of)?;
        if self.symmetric
            && let Some((group, output, zero)) = tables.off_centre(&group_of)
        {
            let path = source.display(self.codes.file);
            let reason =
                format!("sym is true, but the zero point of output {output} in group {group} is {zero}, not 8");
            return Err(CheckpointError::scheme(path, name, "GPTQ", reason));
        }
        let codes = Codes::read(self, source, rows, columns)?;
        let block = format.block_values();
        let mut out = Vec::with_capacity(outputs * inputs.len() / block * format.block_bytes());
        for output in 0..outputs {
            for start in (0..inputs.len()).step_by(block) {
                let (scale, zero) = tables.get(group_of[start], output);
                match format {
                    Format::Affine { .. } => {
                        out.extend_from_slice(&scale.to_le_bytes());
                        out.extend_from_slice(&(-scale * zero).to_le_bytes());
                        codes.push(&mut out, start..start + block, output);
                    }
                    _ => push_value(&mut out, scale * (codes.get(start, output) as f32 - zero), format),
                }
            }
        }
        Ok(out)
    }

    /// The codes must be of a matrix of the size that the file says: words may be filled up, which nothing else would show.
    fn check_shape(&self, source: &dyn Source, name: &str) -> Result<(), CheckpointError> {
        let Some(part) = &self.stored_shape else { return Ok(()) };
        let bytes = part.gather(source, &[0..1], &[part.whole()])?;
        let mut value_bytes = [0; 8];
        let found = bytes.chunks(part.row_bytes / 2).map(|value| {
            value_bytes[..value.len()].copy_from_slice(value);
            u64::from_le_bytes(value_bytes)
        });
        let (found, read): (Vec<u64>, _) =
            (found.collect(), [self.outputs as u64, self.groups as u64 * self.group as u64]);
        if found == read {
            return Ok(());
        }
        let reason = format!("weight_shape is {found:?}, but weight_packed holds {read:?}");
        Err(CheckpointError::scheme(source.display(part.file), name, "pack-quantized", reason))
    }

    /// The group of each of `inputs`.
    fn group_of(
        &self,
        source: &dyn Source,
        name: &str,
        inputs: &[usize],
        format: Format,
    ) -> Result<Vec<usize>, CheckpointError> {
        let Some(index) = &self.group_index else {
            return Ok(inputs.iter().map(|input| input / self.group).collect());
        };
        let stored = index.gather(source, &[0..index.rows], &[index.whole()])?;
        let groups: Vec<usize> = stored.as_chunks().0.iter().map(|&word| u32::from_le_bytes(word) as usize).collect();
        let plain_order = |(input, &group): (usize, &usize)| group == input / self.group;
        let wrong = match format {
            Format::Affine { .. } => groups.iter().enumerate().find(|&entry| !plain_order(entry)),
            _ => groups.iter().enumerate().find(|(_, group)| **group >= self.groups),
        };
        if let Some((input, group)) = wrong {
            let reason = format!(
                "g_idx puts input feature {input} in group {group} of {}, which the configuration (desc_act) does not declare",
                self.groups
            );
            return Err(CheckpointError::scheme(source.display(index.file), name, "packed integers", reason));
        }
        Ok(inputs.iter().map(|&input| groups[input]).collect())
    }
}

fn push_value(out: &mut Vec<u8>, value: f32, format: Format) {
    match format {
        Format::F16 => out.extend_from_slice(&half::f16::from_f32(value).to_le_bytes()),
        Format::BF16 => out.extend_from_slice(&half::bf16::from_f32(value).to_le_bytes()),
        _ => out.extend_from_slice(&value.to_le_bytes()),
    }
}

/// Scales and zero points of a selection.
struct Tables {
    /// The first group that was read, and how many.
    groups: Range<usize>,
    scales: Vec<f32>,
    zeros: Option<Words>,
    outputs: usize,
    packing: Packing,
}

impl Tables {
    fn read(
        packed: &PackedIntegers,
        source: &dyn Source,
        rows: &[Range<usize>],
        group_of: &[usize],
    ) -> Result<Self, CheckpointError> {
        let packing = packed.packing;
        let groups = match (group_of.iter().min(), group_of.iter().max()) {
            (Some(&first), Some(&last)) => first..last + 1,
            _ => 0..0,
        };
        let along_groups = std::slice::from_ref(&groups);
        let width = if packing.is_transposed() { packed.outputs } else { packed.groups };
        let scale_bytes = packed.scales.row_bytes / width.max(1);
        let stored = match packing.is_transposed() {
            true => packed.scales.gather(source, along_groups, &scaled(rows, scale_bytes))?,
            false => packed.scales.gather(source, rows, &scaled(along_groups, scale_bytes))?,
        };
        let zeros = match &packed.zeros {
            Some(part) if packing.is_transposed() => {
                Some(Words::along_columns(source, part, along_groups, rows, packing)?)
            }
            Some(part) => Some(Words::along_rows(source, part, rows, along_groups, packing)?),
            None => None,
        };
        let outputs = rows.iter().map(Range::len).sum();
        Ok(Self { scales: to_f32(&stored, packed.scale_convert), zeros, outputs, packing, groups })
    }

    /// The first stored zero point that is not half the range: its group, its output in the selection, and what it is.
    fn off_centre(&self, group_of: &[usize]) -> Option<(usize, usize, f32)> {
        let centre = (1 << (self.packing.bits() - 1)) as f32;
        self.zeros.as_ref()?;
        let groups: BTreeSet<usize> = group_of.iter().copied().collect();
        let mut zeros = groups
            .into_iter()
            .flat_map(|group| (0..self.outputs).map(move |output| (group, output, self.get(group, output).1)));
        zeros.find(|(.., zero)| *zero != centre)
    }

    /// Scale and zero point of a group for one of the outputs.
    fn get(&self, group: usize, output: usize) -> (f32, f32) {
        let group = group - self.groups.start;
        let offset = if let Packing::Gptq { zero_offset } = self.packing { zero_offset } else { 0 };
        let (scale, zero) = match (self.packing.is_transposed(), &self.zeros) {
            // AutoGPTQ wraps a stored 15 to zero point 16, as its own kernels do.
            (true, Some(zeros)) => (group * self.outputs + output, zeros.get(group, output) + offset),
            (false, Some(zeros)) => (output * self.groups.len() + group, zeros.get(output, group)),
            (_, None) => (output * self.groups.len() + group, 1 << (self.packing.bits() - 1)),
        };
        (self.scales[scale], zero as f32)
    }
}

/// The codes of a selection; outputs are counted in it.
struct Codes {
    words: Words,
    packing: Packing,
}

impl Codes {
    fn read(
        packed: &PackedIntegers,
        source: &dyn Source,
        rows: &[Range<usize>],
        columns: &[Range<usize>],
    ) -> Result<Self, CheckpointError> {
        let packing = packed.packing;
        let words = match packing {
            Packing::Gptq { .. } => Words::along_rows(source, &packed.codes, columns, rows, packing)?,
            Packing::Awq => Words::along_columns(source, &packed.codes, columns, rows, packing)?,
            Packing::Compressed { .. } => Words::along_columns(source, &packed.codes, rows, columns, packing)?,
        };
        Ok(Self { words, packing })
    }

    fn get(&self, input: usize, output: usize) -> u32 {
        match self.packing {
            Packing::Compressed { .. } => self.words.get(output, input),
            _ => self.words.get(input, output),
        }
    }

    /// Appends the codes of whole words of `inputs`, low bits first.
    fn push(&self, out: &mut Vec<u8>, inputs: Range<usize>, output: usize) {
        let codes = self.packing.word_codes();
        for first in inputs.step_by(codes) {
            let word = match self.packing {
                Packing::Gptq { .. } => self.words.word(first, output),
                Packing::Compressed { .. } => self.words.word(output, first),
                Packing::Awq => (0..codes).fold(0, |word, at| word | self.get(first + at, output) << (4 * at)),
            };
            out.extend_from_slice(&word.to_le_bytes());
        }
    }
}

/// A selection of a table of words, each of which holds several neighbours of one column, or of one row.
struct Words {
    words: Vec<u32>,
    words_per_row: usize,
    /// For each selected row or column: its row or column of words.
    row_places: Vec<usize>,
    column_places: Vec<usize>,
    /// For each selected feature of the packed side, the bit where its code begins.
    bits: Vec<usize>,
    packed_rows: bool,
    mask: u32,
}

impl Words {
    /// Words that hold neighbouring columns of one row.
    fn along_columns(
        source: &dyn Source,
        part: &Part,
        rows: &[Range<usize>],
        columns: &[Range<usize>],
        packing: Packing,
    ) -> Result<Self, CheckpointError> {
        let (covering, column_places, bits) = places(columns, packing);
        let stored = part.gather(source, rows, &scaled(&covering, 4))?;
        let row_places = (0..rows.iter().map(Range::len).sum()).collect();
        let words_per_row = covering.iter().map(Range::len).sum();
        Ok(Self::new(&stored, words_per_row, row_places, column_places, bits, false, packing))
    }

    /// Words that hold neighbouring rows of one column.
    fn along_rows(
        source: &dyn Source,
        part: &Part,
        rows: &[Range<usize>],
        columns: &[Range<usize>],
        packing: Packing,
    ) -> Result<Self, CheckpointError> {
        let (covering, row_places, bits) = places(rows, packing);
        let stored = part.gather(source, &covering, &scaled(columns, 4))?;
        let words_per_row = columns.iter().map(Range::len).sum();
        Ok(Self::new(&stored, words_per_row, row_places, (0..words_per_row).collect(), bits, true, packing))
    }

    fn new(
        stored: &[u8],
        words_per_row: usize,
        row_places: Vec<usize>,
        column_places: Vec<usize>,
        bits: Vec<usize>,
        packed_rows: bool,
        packing: Packing,
    ) -> Self {
        let words = stored.as_chunks().0.iter().map(|&word| u32::from_le_bytes(word)).collect();
        Self { words, words_per_row, row_places, column_places, bits, packed_rows, mask: (1 << packing.bits()) - 1 }
    }

    /// The word that holds a code.
    fn word(&self, row: usize, column: usize) -> u32 {
        self.words[self.row_places[row] * self.words_per_row + self.column_places[column]]
    }

    fn get(&self, row: usize, column: usize) -> u32 {
        let bit = self.bits[if self.packed_rows { row } else { column }];
        self.word(row, column) >> bit & self.mask
    }
}

/// The words that hold the features of `runs`, and for each feature its word among them and the bit where its code begins.
fn places(runs: &[Range<usize>], packing: Packing) -> (Vec<Range<usize>>, Vec<usize>, Vec<usize>) {
    let codes = packing.word_codes();
    let covering: Vec<Range<usize>> = runs.iter().map(|run| run.start / codes..run.end.div_ceil(codes)).collect();
    let (mut words, mut bits, mut before) = (Vec::new(), Vec::new(), 0);
    for (run, cover) in runs.iter().zip(&covering) {
        words.extend(run.clone().map(|feature| before + feature / codes - cover.start));
        bits.extend(run.clone().map(|feature| packing.bit(feature % codes)));
        before += cover.len();
    }
    (covering, words, bits)
}
