//! How one weight lies in its files, and how a part of it becomes row blocks.
//!
//! Schemes differ in where they keep their scales and in which order they pack their codes. All of them end here as an
//! [`Encoding`], of which any rows and any whole blocks can be read without touching other bytes.

use std::borrow::Cow;
use std::ops::Range;

use consort_compute::Format;
use consort_compute::decode::codes::e8m0;

use crate::packed::PackedIntegers;
use crate::source::Source;
use crate::{CheckpointError, TensorInfo};

/// A table of equally long rows in one file.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    /// Index of the file.
    pub file: usize,
    /// First byte.
    pub offset: u64,
    pub rows: usize,
    pub row_bytes: usize,
}

impl Part {
    /// The bytes `columns` of the rows `rows`, one row after another.
    pub fn gather<'s>(
        &self,
        source: &'s dyn Source,
        rows: &[Range<usize>],
        columns: &[Range<usize>],
    ) -> Result<Cow<'s, [u8]>, CheckpointError> {
        source.read(self.file, &self.ranges(rows, columns))
    }

    /// The file ranges of a selection.
    pub fn ranges(&self, rows: &[Range<usize>], columns: &[Range<usize>]) -> Vec<Range<u64>> {
        let at = |row: usize, byte: usize| self.offset + row as u64 * self.row_bytes as u64 + byte as u64;
        if let [all] = columns
            && *all == (0..self.row_bytes)
        {
            return rows.iter().map(|rows| at(rows.start, 0)..at(rows.end, 0)).collect();
        }
        let each = |row| columns.iter().map(move |bytes| at(row, bytes.start)..at(row, bytes.end));
        rows.iter().cloned().flatten().flat_map(each).collect()
    }

    /// All bytes of a row.
    pub fn whole(&self) -> Range<usize> {
        0..self.row_bytes
    }
}

/// How a stored number becomes one that a block holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Convert {
    /// Bytes as they are.
    Copy,
    /// bfloat16 to f32.
    FromBF16,
    /// IEEE half precision to f32.
    FromF16,
    /// An exponent byte (E8M0) to f32.
    FromE8M0,
}

/// Scales (or biases) that lie in a tensor of their own, one for each block of some rows.
#[derive(Clone, Debug)]
pub(crate) struct BlockScale {
    /// One row for each `rows_per_scale` weight rows, counted anew in each stack of `stack_rows` (an expert).
    pub part: Part,
    pub rows_per_scale: usize,
    pub stack_rows: usize,
    /// Bytes of one scale in the file.
    pub bytes: usize,
    pub convert: Convert,
}

impl BlockScale {
    fn row_of(&self, weight_row: usize) -> usize {
        let scale_rows = self.stack_rows.div_ceil(self.rows_per_scale);
        weight_row / self.stack_rows * scale_rows + weight_row % self.stack_rows / self.rows_per_scale
    }
}

/// f32 factors for whole rows: one, one for each row, or one for each of equally long runs of rows.
#[derive(Clone, Debug)]
pub(crate) struct RowScale {
    /// What the file calls it.
    pub name: String,
    pub part: Part,
    pub convert: Convert,
    pub role: RowFactor,
}

/// What a stored row factor means.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum RowFactor {
    /// It multiplies, after this constant has multiplied it.
    Times(f32),
    /// It divides (the global scale of compressed-tensors' NVFP4).
    Divides,
}

/// How a weight lies in its files.
#[derive(Clone, Debug)]
pub(crate) enum Encoding {
    /// Rows of row blocks, ready to use.
    Rows(Part),
    /// Rows of codes, with the scales of their blocks elsewhere.
    Blocks { codes: Part, scales: Vec<BlockScale> },
    /// Rows of blocks of `values` values in another order; `recode` turns one into blocks of the format.
    Recoded { part: Part, values: usize, recode: fn(&[u8], &mut Vec<u8>) },
    /// Plain values, stored `[stack, in, out]`: rows and columns change places.
    Transposed { part: Part, stack: usize },
    /// Integers packed along the input or output features (GPTQ, AWQ, compressed-tensors).
    Packed(PackedIntegers),
}

/// A weight: what is said about it and where it lies.
#[derive(Clone, Debug)]
pub(crate) struct Weight {
    pub info: TensorInfo,
    pub encoding: Encoding,
    pub row_scale: Option<RowScale>,
}

impl Weight {
    /// Rows of the matrix: all dimensions but the last.
    pub fn rows(&self) -> usize {
        self.info.shape.split_last().map_or(1, |(_, outer)| outer.iter().product())
    }

    /// Columns of the matrix: the last dimension.
    pub fn cols(&self) -> usize {
        self.info.shape.last().copied().unwrap_or(1)
    }

    /// The blocks of `columns` in the rows `rows`, as row blocks of the format.
    pub fn read<'s>(
        &self,
        source: &'s dyn Source,
        rows: &[Range<usize>],
        columns: &[Range<usize>],
    ) -> Result<Cow<'s, [u8]>, CheckpointError> {
        let format = self.info.format;
        let blocks = block_ranges(format, columns);
        match &self.encoding {
            Encoding::Rows(part) => part.gather(source, rows, &scaled(&blocks, format.block_bytes())),
            Encoding::Blocks { codes, scales } => self.interleave(source, codes, scales, rows, &blocks),
            Encoding::Recoded { part, values, recode } => {
                recoded(source, part, rows, &blocks, (*values, format), *recode)
            }
            Encoding::Transposed { part, stack } => self.transpose(source, part, *stack, rows, columns),
            Encoding::Packed(packed) => packed.read(source, &self.info.name, rows, columns, format).map(Cow::Owned),
        }
    }

    /// The factors of `rows`.
    pub fn row_scales(&self, source: &dyn Source, rows: &[Range<usize>]) -> Result<Option<Vec<f32>>, CheckpointError> {
        let Some(scale) = &self.row_scale else { return Ok(None) };
        let stored = scale.part.gather(source, &[0..scale.part.rows], &[scale.part.whole()])?;
        let values = to_f32(&stored, scale.convert);
        let rows_per_value = (self.rows() / values.len().max(1)).max(1);
        let factor = |row: usize| {
            let value = values[row / rows_per_value];
            let (factor, expected) = match scale.role {
                RowFactor::Times(constant) => (value * constant, "a finite number, 0 or more"),
                RowFactor::Divides => (1.0 / value, "a finite number above zero, because it divides"),
            };
            if is_scale(value) && factor.is_finite() {
                return Ok(factor);
            }
            let reason = format!("is {value} for row {row}; a scale is {expected}");
            Err(CheckpointError::tensor(source.display(scale.part.file), &scale.name, reason))
        };
        rows.iter().cloned().flatten().map(factor).collect::<Result<_, _>>().map(Some)
    }

    /// Puts the scales of each block before its codes.
    fn interleave<'s>(
        &self,
        source: &'s dyn Source,
        codes: &Part,
        scales: &[BlockScale],
        rows: &[Range<usize>],
        blocks: &[Range<usize>],
    ) -> Result<Cow<'s, [u8]>, CheckpointError> {
        let block_bytes = self.info.format.block_bytes();
        let prefix: usize = scales.iter().map(|scale| converted_bytes(scale.bytes, scale.convert)).sum();
        let code_bytes = block_bytes - prefix;
        // The last block of a row may be stored without the values that are not there.
        let byte_range =
            |blocks: &Range<usize>| blocks.start * code_bytes..(blocks.end * code_bytes).min(codes.row_bytes);
        let columns: Vec<_> = blocks.iter().map(byte_range).collect();
        let row_code_bytes: usize = columns.iter().map(Range::len).sum();
        let row_blocks: usize = blocks.iter().map(Range::len).sum();
        let stored = codes.gather(source, rows, &columns)?;
        let tables =
            scales.iter().map(|scale| ScaleRows::read(source, scale, rows, blocks)).collect::<Result<Vec<_>, _>>()?;
        if self.info.format == Format::F8E4M3Block128 {
            let wrong = tables.iter().flat_map(|table| to_f32(&table.values, Convert::Copy)).find(|&it| !is_scale(it));
            if let Some(wrong) = wrong {
                let reason = format!("has a block scale of {wrong}; a scale is a finite number, 0 or more");
                return Err(CheckpointError::tensor(source.display(codes.file), &self.info.stored_name, reason));
            }
        }
        let row_count: usize = rows.iter().map(Range::len).sum();
        let mut out = Vec::with_capacity(row_count * row_blocks * block_bytes);
        for row in 0..row_count {
            let mut codes_left = &stored[row * row_code_bytes..(row + 1) * row_code_bytes];
            for block in 0..row_blocks {
                let end = out.len() + block_bytes;
                for table in &tables {
                    out.extend_from_slice(table.scale(row, block));
                }
                let (these, others) = codes_left.split_at(code_bytes.min(codes_left.len()));
                out.extend_from_slice(these);
                codes_left = others;
                out.resize(end, 0);
            }
        }
        Ok(Cow::Owned(out))
    }

    fn transpose<'s>(
        &self,
        source: &'s dyn Source,
        part: &Part,
        stack: usize,
        rows: &[Range<usize>],
        columns: &[Range<usize>],
    ) -> Result<Cow<'s, [u8]>, CheckpointError> {
        let value_bytes = self.info.format.block_bytes();
        let (stack_rows, cols) = (self.rows() / stack, self.cols());
        let mut out = Vec::new();
        // One stored table [in, out] for each stack; a run of rows may reach over several.
        for run in rows.iter().flat_map(|run| within_stacks(run, stack_rows)) {
            let first = run.start / stack_rows;
            let inside = run.start - first * stack_rows..run.end - first * stack_rows;
            let stored_rows: Vec<_> =
                columns.iter().map(|range| first * cols + range.start..first * cols + range.end).collect();
            let stored = part.gather(source, &stored_rows, &scaled(std::slice::from_ref(&inside), value_bytes))?;
            let width = inside.len();
            for row in 0..width {
                for line in stored.chunks_exact(width * value_bytes) {
                    out.extend_from_slice(&line[row * value_bytes..(row + 1) * value_bytes]);
                }
            }
        }
        Ok(Cow::Owned(out))
    }
}

/// Whether a factor can be meant: one of 0 makes a part of a weight 0, as it is where nothing was learned.
fn is_scale(factor: f32) -> bool {
    factor.is_finite() && factor >= 0.0
}

/// Splits a run of rows where one stack ends and the next begins.
fn within_stacks(run: &Range<usize>, stack_rows: usize) -> impl Iterator<Item = Range<usize>> + use<> {
    let (mut start, end) = (run.start, run.end);
    std::iter::from_fn(move || {
        let next = end.min((start / stack_rows + 1) * stack_rows);
        let piece = start..next;
        start = next;
        (!piece.is_empty()).then_some(piece)
    })
}

/// The scales of a selection, converted, and which row of them each selected weight row uses.
struct ScaleRows {
    values: Vec<u8>,
    value_bytes: usize,
    row_bytes: usize,
    row_of: Vec<usize>,
}

impl ScaleRows {
    fn read(
        source: &dyn Source,
        scale: &BlockScale,
        rows: &[Range<usize>],
        blocks: &[Range<usize>],
    ) -> Result<Self, CheckpointError> {
        let mut stored_rows: Vec<Range<usize>> = Vec::new();
        let mut row_of = Vec::new();
        let (mut last, mut count) = (None, 0);
        for row in rows.iter().cloned().flatten().map(|row| scale.row_of(row)) {
            if last != Some(row) {
                match stored_rows.last_mut() {
                    Some(range) if range.end == row => range.end += 1,
                    _ => stored_rows.push(row..row + 1),
                }
                (last, count) = (Some(row), count + 1);
            }
            row_of.push(count - 1);
        }
        let stored = scale.part.gather(source, &stored_rows, &scaled(blocks, scale.bytes))?;
        let values = match scale.convert {
            Convert::Copy => stored.into_owned(),
            convert => to_f32(&stored, convert).into_iter().flat_map(f32::to_le_bytes).collect(),
        };
        let value_bytes = converted_bytes(scale.bytes, scale.convert);
        let row_bytes = blocks.iter().map(Range::len).sum::<usize>() * value_bytes;
        Ok(Self { values, value_bytes, row_bytes, row_of })
    }

    fn scale(&self, row: usize, block: usize) -> &[u8] {
        let start = self.row_of[row] * self.row_bytes + block * self.value_bytes;
        &self.values[start..start + self.value_bytes]
    }
}

/// Reads whole stored blocks, recodes them, and keeps the wanted blocks of the format, which may be smaller.
fn recoded<'s>(
    source: &'s dyn Source,
    part: &Part,
    rows: &[Range<usize>],
    blocks: &[Range<usize>],
    (stored_values, format): (usize, Format),
    recode: fn(&[u8], &mut Vec<u8>),
) -> Result<Cow<'s, [u8]>, CheckpointError> {
    let per_stored = stored_values / format.block_values();
    let row_stored_blocks: Vec<_> =
        blocks.iter().map(|range| range.start / per_stored..range.end.div_ceil(per_stored)).collect();
    let stored_bytes = stored_block_bytes(stored_values, format);
    let columns = scaled(&row_stored_blocks, stored_bytes);
    let stored = part.gather(source, rows, &columns)?;
    let mut out = Vec::new();
    let mut scratch = Vec::new();
    let row_bytes: usize = columns.iter().map(Range::len).sum();
    if row_bytes == 0 {
        return Ok(Cow::Owned(out));
    }
    for mut row in stored.chunks_exact(row_bytes) {
        for (wanted, range) in blocks.iter().zip(&row_stored_blocks) {
            let (these, others) = row.split_at(range.len() * stored_bytes);
            row = others;
            scratch.clear();
            these.chunks_exact(stored_bytes).for_each(|block| recode(block, &mut scratch));
            let skip = (wanted.start - range.start * per_stored) * format.block_bytes();
            out.extend_from_slice(&scratch[skip..skip + wanted.len() * format.block_bytes()]);
        }
    }
    Ok(Cow::Owned(out))
}

/// A stored block holds the same bits as the blocks it becomes.
fn stored_block_bytes(stored_values: usize, format: Format) -> usize {
    stored_values / format.block_values() * format.block_bytes()
}

/// Column ranges in blocks.
fn block_ranges(format: Format, columns: &[Range<usize>]) -> Vec<Range<usize>> {
    let block = format.block_values();
    columns.iter().map(|range| range.start / block..range.end.div_ceil(block)).collect()
}

pub(crate) fn scaled(ranges: &[Range<usize>], factor: usize) -> Vec<Range<usize>> {
    ranges.iter().map(|range| range.start * factor..range.end * factor).collect()
}

fn converted_bytes(stored: usize, convert: Convert) -> usize {
    if convert == Convert::Copy { stored } else { 4 }
}

pub(crate) fn to_f32(bytes: &[u8], convert: Convert) -> Vec<f32> {
    let halves = |decode: fn([u8; 2]) -> f32| bytes.as_chunks().0.iter().map(|&pair| decode(pair)).collect();
    match convert {
        Convert::Copy => bytes.as_chunks().0.iter().map(|&four| f32::from_le_bytes(four)).collect(),
        Convert::FromBF16 => halves(|pair| half::bf16::from_le_bytes(pair).to_f32()),
        Convert::FromF16 => halves(|pair| half::f16::from_le_bytes(pair).to_f32()),
        Convert::FromE8M0 => bytes.iter().map(|&exponent| e8m0(exponent)).collect(),
    }
}

/// A plain format's values.
pub(crate) fn plain_to_f32(format: Format, bytes: &[u8]) -> Option<Vec<f32>> {
    match format {
        Format::F32 => Some(to_f32(bytes, Convert::Copy)),
        Format::BF16 => Some(to_f32(bytes, Convert::FromBF16)),
        Format::F16 => Some(to_f32(bytes, Convert::FromF16)),
        _ => None,
    }
}

/// GGUF MXFP4: value `i` in the low and `i + 16` in the high nibble of byte `i`.
pub(crate) fn recode_gguf_mxfp4(block: &[u8], out: &mut Vec<u8>) {
    out.push(block[0]);
    neighbours(&block[1..], out);
}

/// GGUF NVFP4: four scales, then four runs of 8 bytes with value `i` in the low and `i + 8` in the high nibble.
pub(crate) fn recode_gguf_nvfp4(block: &[u8], out: &mut Vec<u8>) {
    let (scales, codes) = block.split_at(4);
    for (&scale, codes) in scales.iter().zip(codes.chunks_exact(8)) {
        // ggml's scales have no sign, and it reads the NaN code as zero.
        let scale = scale & 0x7f;
        out.push(if scale == 0x7f { 0 } else { scale });
        neighbours(codes, out);
    }
}

/// Puts values that lie half a block apart in the nibbles of a byte beside each other.
fn neighbours(codes: &[u8], out: &mut Vec<u8>) {
    let nibble = |value: usize| if value < codes.len() { codes[value] & 15 } else { codes[value - codes.len()] >> 4 };
    out.extend((0..codes.len()).map(|byte| nibble(2 * byte) | nibble(2 * byte + 1) << 4));
}
