//! From stored bytes to f32.
//!
//! Every value is what the format's definition says, rounded to f32 at most once, in the last addition of formats that have
//! an offset. Codes that mean NaN decode to NaN, so that a damaged weight shows.

mod affine;
pub mod codes;
mod float;
mod k_quants;
mod legacy_quants;

pub use legacy_quants::IQ4_LEVELS;

use crate::{Format, Matrix};

/// Values of the largest block.
const LARGEST_BLOCK: usize = 256;

impl Format {
    /// Decodes the first `out.len()` values of a row.
    ///
    /// # Panics
    /// If `bytes` is shorter than that.
    pub fn decode_row(self, bytes: &[u8], out: &mut [f32]) {
        assert!(bytes.len() >= self.row_bytes(out.len()), "a {self} row of {} values", out.len());
        let rows = Row { format: self, bytes, out };
        match self {
            Self::F32 => rows.blocks(float::f32),
            Self::F16 => rows.blocks(float::f16),
            Self::BF16 => rows.blocks(float::bf16),
            Self::F8E4M3 => rows.blocks(float::f8_e4m3),
            Self::F8E4M3Block128 => rows.blocks(float::f8_e4m3_block),
            Self::MxFp8 => rows.blocks(float::mxfp8),
            Self::MxFp4 => rows.blocks(float::mxfp4),
            Self::NvFp4 => rows.blocks(float::nvfp4),
            Self::Affine { bits, scale, .. } => rows.blocks(|block, out| affine::affine(bits, scale, block, out)),
            Self::Q4_0 => rows.blocks(legacy_quants::q4_0),
            Self::Q4_1 => rows.blocks(legacy_quants::q4_1),
            Self::Q5_0 => rows.blocks(legacy_quants::q5_0),
            Self::Q5_1 => rows.blocks(legacy_quants::q5_1),
            Self::Q8_0 => rows.blocks(legacy_quants::q8_0),
            Self::IQ4NL => rows.blocks(legacy_quants::iq4_nl),
            Self::Q2K => rows.blocks(k_quants::q2_k),
            Self::Q3K => rows.blocks(k_quants::q3_k),
            Self::Q4K => rows.blocks(k_quants::q4_k),
            Self::Q5K => rows.blocks(k_quants::q5_k),
            Self::Q6K => rows.blocks(k_quants::q6_k),
            Self::IQ4XS => rows.blocks(k_quants::iq4_xs),
        }
    }
}

struct Row<'a> {
    format: Format,
    bytes: &'a [u8],
    out: &'a mut [f32],
}

impl Row<'_> {
    /// Applies the decoder of one whole block to each block; of the last one only what is asked for is kept.
    fn blocks(self, decode: impl Fn(&[u8], &mut [f32])) {
        let (values, bytes) = (self.format.block_values(), self.format.block_bytes());
        let whole = self.out.len() / values;
        let (blocks, rest) = self.out.split_at_mut(whole * values);
        for (block, out) in self.bytes.chunks_exact(bytes).zip(blocks.chunks_exact_mut(values)) {
            decode(block, out);
        }
        if !rest.is_empty() {
            let mut last = [0.0; LARGEST_BLOCK];
            decode(&self.bytes[whole * bytes..][..bytes], &mut last[..values]);
            rest.copy_from_slice(&last[..rest.len()]);
        }
    }
}

impl Matrix<'_> {
    /// Decodes row `row`, `[cols]`, row scale included.
    ///
    /// # Panics
    /// If `out` has not `cols` values.
    pub fn decode_row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.cols, "one place for each column");
        self.format.decode_row(self.row(row), out);
        if let Some(scales) = &self.row_scale {
            out.iter_mut().for_each(|value| *value *= scales[row]);
        }
    }
}

fn read_f16(bytes: &[u8]) -> f32 {
    half::f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
}

fn read_bf16(bytes: &[u8]) -> f32 {
    half::bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
}

fn read_f32(bytes: &[u8]) -> f32 {
    f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}
