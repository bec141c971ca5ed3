//! From f32 to stored bytes.

use half::{bf16, f16};

use crate::Format;

impl Format {
    /// Encodes a row.
    ///
    /// # Panics
    /// If `out` is not [`row_bytes`](Self::row_bytes) long, or if there is no encoder for the format.
    pub fn encode_row(self, values: &[f32], out: &mut [u8]) {
        assert_eq!(out.len(), self.row_bytes(values.len()), "a {self} row of {} values", values.len());
        let blocks = values.chunks(self.block_values()).zip(out.chunks_exact_mut(self.block_bytes()));
        match self {
            Self::F32 => blocks.for_each(|(x, out)| out.copy_from_slice(&x[0].to_le_bytes())),
            Self::F16 => blocks.for_each(|(x, out)| out.copy_from_slice(&f16::from_f32(x[0]).to_le_bytes())),
            Self::BF16 => blocks.for_each(|(x, out)| out.copy_from_slice(&bf16::from_f32(x[0]).to_le_bytes())),
            Self::Q8_0 => blocks.for_each(|(x, out)| q8_0(x, out)),
            _ => panic!("{self} is read, not written"),
        }
    }
}

/// The largest magnitude; NaN if any value is.
fn largest_magnitude(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |largest: f32, x| if x.abs() <= largest { largest } else { x.abs() })
}

/// As ggml does: scale `max |x| / 127`, halves rounded away from zero. A value that is not finite makes the block NaN.
fn q8_0(values: &[f32], out: &mut [u8]) {
    let scale = largest_magnitude(values) / 127.0;
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    let stored = if scale.is_finite() { f16::from_f32(scale.min(f16::MAX.to_f32())) } else { f16::NAN };
    let (head, codes) = out.split_at_mut(2);
    head.copy_from_slice(&stored.to_le_bytes());
    codes.fill(0);
    for (code, x) in codes.iter_mut().zip(values) {
        *code = (x * inverse).round() as i8 as u8;
    }
}
