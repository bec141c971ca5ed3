//! From f32 to stored bytes: for conversion, for the KV cache, and for tests.
//!
//! Codes are rounded to the nearest value, ties to the even code, and saturate: no finite number becomes NaN or infinite
//! for being large. A block with a value that is not finite becomes NaN as far as its format has one, so that a broken
//! weight shows. The scales are chosen as the program does whose format it is, so that it reads what is written here as its
//! own: MLX for affine groups and microscaling, ggml for Q8_0.

use std::borrow::Cow;

use half::{bf16, f16};

use crate::{
    Format, Matrix, ScaleFormat,
    decode::codes::{E2M1, E4M3, e8m0},
};

/// The largest number in each small format, and the code of its NaN.
const E4M3_MAX: f32 = 448.0;
const E4M3_NAN: u8 = 0x7F;
const E2M1_MAX: f32 = 6.0;
const E8M0_NAN: u8 = 0xFF;

impl Format {
    /// Whether values can be encoded in this format.
    pub const fn can_encode(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::BF16 | Self::F8E4M3 | Self::F8E4M3Block128)
            || matches!(self, Self::MxFp8 | Self::MxFp4 | Self::NvFp4 | Self::Affine { .. } | Self::Q8_0)
    }

    /// Encodes a row. Where the format has a row scale, `values` are already divided by it.
    ///
    /// # Panics
    /// If `out` is not [`row_bytes`](Self::row_bytes) long, or if the format is only read
    /// ([`can_encode`](Self::can_encode)).
    pub fn encode_row(self, values: &[f32], out: &mut [u8]) {
        assert_eq!(out.len(), self.row_bytes(values.len()), "a {self} row of {} values", values.len());
        out.fill(0);
        let blocks = values.chunks(self.block_values()).zip(out.chunks_exact_mut(self.block_bytes()));
        match self {
            Self::F32 => blocks.for_each(|(x, out)| out.copy_from_slice(&x[0].to_le_bytes())),
            Self::F16 => blocks.for_each(|(x, out)| out.copy_from_slice(&f16_saturating(x[0]).to_le_bytes())),
            Self::BF16 => blocks.for_each(|(x, out)| out.copy_from_slice(&bf16_saturating(x[0]).to_le_bytes())),
            Self::F8E4M3 => blocks.for_each(|(x, out)| out[0] = e4m3_code(x[0])),
            Self::F8E4M3Block128 => blocks.for_each(|(x, out)| f8_e4m3_block(x, out)),
            Self::MxFp8 => blocks.for_each(|(x, out)| mxfp8(x, out)),
            Self::MxFp4 => blocks.for_each(|(x, out)| mxfp4(x, out)),
            Self::NvFp4 => blocks.for_each(|(x, out)| nvfp4(x, out)),
            Self::Affine { bits, scale, .. } => blocks.for_each(|(x, out)| affine(bits, scale, x, out)),
            Self::Q8_0 => blocks.for_each(|(x, out)| q8_0(x, out)),
            _ => panic!("{self} is read, not written"),
        }
    }
}

impl Matrix<'static> {
    /// Encodes `[rows, cols]` values. FP8 gets a scale for each row, NVFP4 one for the whole matrix; both map the largest
    /// magnitude to the largest number.
    ///
    /// # Panics
    /// If there are not `rows · cols` values, or if the format is only read.
    pub fn encode(format: Format, rows: usize, cols: usize, values: &[f32]) -> Self {
        assert_eq!(values.len(), rows * cols, "values of a matrix [{rows}, {cols}]");
        let row_scale = match format {
            Format::F8E4M3 => {
                Some(values.chunks_exact(cols).map(|row| nonzero(largest_magnitude(row) / E4M3_MAX)).collect())
            }
            Format::NvFp4 => Some(vec![nonzero(largest_magnitude(values) / (E4M3_MAX * E2M1_MAX)); rows]),
            _ => None,
        };
        let row_bytes = format.row_bytes(cols);
        let mut data = vec![0; rows * row_bytes];
        for (row, out) in data.chunks_exact_mut(row_bytes).enumerate() {
            let mut values = Cow::Borrowed(&values[row * cols..][..cols]);
            if let Some(scales) = &row_scale {
                let scales: &Vec<f32> = scales;
                values.to_mut().iter_mut().for_each(|x| *x /= scales[row]);
            }
            format.encode_row(&values, out);
        }
        Matrix { row_scale, ..Matrix::new(format, rows, cols, data) }
    }
}

/// A scale to divide by: anything does for values that are all zero.
fn nonzero(scale: f32) -> f32 {
    if scale == 0.0 { 1.0 } else { scale }
}

/// The largest magnitude; NaN if any value is.
fn largest_magnitude(values: &[f32]) -> f32 {
    values
        .iter()
        .map(|x| x.abs())
        .fold(0.0, |largest: f32, x| if largest.is_nan() || x <= largest { largest } else { x })
}

fn f16_saturating(x: f32) -> f16 {
    f16::from_f32(if x.is_finite() { x.clamp(f16::MIN.to_f32(), f16::MAX.to_f32()) } else { x })
}

fn bf16_saturating(x: f32) -> bf16 {
    bf16::from_f32(if x.is_finite() { x.clamp(bf16::MIN.to_f32(), bf16::MAX.to_f32()) } else { x })
}

/// The index of the nearest of `numbers`, which ascend from zero; of two equally near, the even one.
fn nearest(numbers: &[f32], magnitude: f32) -> u8 {
    let above = numbers.partition_point(|&number| number < magnitude);
    if above == 0 {
        return 0;
    }
    let below = above - 1;
    let Some(&next) = numbers.get(above) else { return below as u8 };
    let middle = (numbers[below] + next) / 2.0;
    let up = magnitude > middle || magnitude == middle && above % 2 == 0;
    (if up { above } else { below }) as u8
}

fn e4m3_code(x: f32) -> u8 {
    let sign = (x.is_sign_negative() as u8) << 7;
    /// Numbers below this, 2^-6, are whole multiples of 2^-9.
    const LEAST_NORMAL: f32 = 1.0 / 64.0;
    let magnitude = x.abs();
    sign | if !x.is_finite() {
        E4M3_NAN
    } else if magnitude < LEAST_NORMAL {
        (magnitude * 512.0).round_ties_even() as u8
    } else {
        // Three bits of mantissa stay, and the exponent's bias goes from 127 to 7.
        let bits = magnitude.to_bits();
        let rounded = bits + 0x7_FFFF + (bits >> 20 & 1);
        ((rounded >> 20) - ((127 - 7) << 3)).min(u32::from(E4M3_NAN) - 1) as u8
    }
}

fn e2m1_code(x: f32) -> u8 {
    (x.is_sign_negative() as u8) << 3 | nearest(&E2M1[..8], x.abs())
}

/// The smallest power of two that is not below `x >= 0`, so that no value of the block saturates.
fn e8m0_code(x: f32) -> u8 {
    if !x.is_finite() {
        return E8M0_NAN;
    }
    let (exponent, fraction) = (x.to_bits() >> 23, x.to_bits() & 0x7F_FFFF);
    match exponent {
        // A subnormal number: code 0 is 2^-127, half of the smallest normal one.
        0 => u8::from(fraction > 1 << 22),
        _ => (exponent + u32::from(fraction > 0)).min(254) as u8,
    }
}

fn f8_e4m3_block(values: &[f32], out: &mut [u8]) {
    let scale = nonzero(largest_magnitude(values) / E4M3_MAX);
    out[..4].copy_from_slice(&scale.to_le_bytes());
    put_bytes(values, scale, &mut out[4..]);
}

fn mxfp8(values: &[f32], out: &mut [u8]) {
    out[0] = e8m0_code(largest_magnitude(values) / E4M3_MAX);
    put_bytes(values, e8m0(out[0]), &mut out[1..]);
}

fn mxfp4(values: &[f32], out: &mut [u8]) {
    out[0] = e8m0_code(largest_magnitude(values) / E2M1_MAX);
    put_nibbles(values, e8m0(out[0]), &mut out[1..]);
}

fn nvfp4(values: &[f32], out: &mut [u8]) {
    out[0] = e4m3_code(largest_magnitude(values) / E2M1_MAX);
    let scale = E4M3[out[0] as usize];
    // A scale that rounds to zero makes every value of the block zero.
    put_nibbles(values, if scale == 0.0 { f32::INFINITY } else { scale }, &mut out[1..]);
}

fn put_bytes(values: &[f32], scale: f32, out: &mut [u8]) {
    out.iter_mut().zip(values).for_each(|(out, x)| *out = e4m3_code(x / scale));
}

fn put_nibbles(values: &[f32], scale: f32, out: &mut [u8]) {
    for (i, x) in values.iter().enumerate() {
        out[i / 2] |= e2m1_code(x / scale) << (i % 2 * 4);
    }
}

/// Scale and bias are such that the value farther from zero is met exactly, before they are rounded to `scale_format`, and
/// that zero is met exactly too. The codes follow from the scale and bias before rounding, as in MLX.
fn affine(bits: u8, scale_format: ScaleFormat, values: &[f32], out: &mut [u8]) {
    /// The least scale of a group.
    const LEAST_SCALE: f32 = 1e-7;
    let last_code = ((1u32 << bits) - 1) as f32;
    let smallest = values.iter().copied().fold(f32::INFINITY, f32::min);
    let largest = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let step = ((largest - smallest) / last_code).max(LEAST_SCALE);
    let (edge, step) = if smallest.abs() > largest.abs() { (smallest, step) } else { (largest, -step) };
    let steps_to_zero = (edge / step).round_ties_even();
    let (scale, bias) = if steps_to_zero == 0.0 { (step, 0.0) } else { (edge / steps_to_zero, edge) };

    let (head, codes) = out.split_at_mut(2 * scale_format.bytes());
    let (stored_scale, stored_bias) = head.split_at_mut(scale_format.bytes());
    scale_format.write(scale, stored_scale);
    scale_format.write(bias, stored_bias);
    for (i, x) in values.iter().enumerate() {
        let code = ((x - bias) / scale).round_ties_even().clamp(0.0, last_code) as u16;
        let first_bit = i * bits as usize;
        let [low, high] = (code << (first_bit % 8)).to_le_bytes();
        codes[first_bit / 8] |= low;
        if high != 0 {
            codes[first_bit / 8 + 1] |= high;
        }
    }
}

impl ScaleFormat {
    fn write(self, x: f32, out: &mut [u8]) {
        match self {
            Self::F16 => out.copy_from_slice(&f16_saturating(x).to_le_bytes()),
            Self::BF16 => out.copy_from_slice(&bf16_saturating(x).to_le_bytes()),
            Self::F32 => out.copy_from_slice(&x.to_le_bytes()),
        }
    }
}

/// Scale `max |x| / 127`, kept as f16; halves are rounded away from zero, as in ggml.
fn q8_0(values: &[f32], out: &mut [u8]) {
    let scale = largest_magnitude(values) / 127.0;
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    let (head, codes) = out.split_at_mut(2);
    head.copy_from_slice(&(if scale.is_finite() { f16_saturating(scale) } else { f16::NAN }).to_le_bytes());
    for (code, x) in codes.iter_mut().zip(values) {
        *code = (x * inverse).round() as i8 as u8;
    }
}
