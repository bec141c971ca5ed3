//! GGUF's blocks of 32 values. Value `i` of a block of nibbles is the low nibble of byte `i`, value `16 + i` the high one.

use super::read_f16;

/// Sixteen levels, closer together near zero (llama.cpp's `kvalues_iq4nl`, part of the format).
pub const IQ4_LEVELS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Spreads 16 bytes of nibbles over 32 values.
pub fn nibbles(bytes: &[u8], out: &mut [f32], value: impl Fn(usize, u8) -> f32) {
    let (low, high) = out.split_at_mut(16);
    for (i, &byte) in bytes.iter().enumerate() {
        low[i] = value(i, byte & 15);
        high[i] = value(16 + i, byte >> 4);
    }
}

pub fn q4_0(block: &[u8], out: &mut [f32]) {
    let d = read_f16(block);
    nibbles(&block[2..], out, |_, q| d * (f32::from(q) - 8.0));
}

pub fn q4_1(block: &[u8], out: &mut [f32]) {
    let (d, m) = (read_f16(block), read_f16(&block[2..]));
    nibbles(&block[4..], out, |_, q| d * f32::from(q) + m);
}

/// The fifth bit of value `i`, in place.
fn fifth_bit(bits: &[u8], i: usize) -> u8 {
    ((bits[i / 8] >> (i % 8)) & 1) << 4
}

pub fn q5_0(block: &[u8], out: &mut [f32]) {
    let (d, high) = (read_f16(block), &block[2..6]);
    nibbles(&block[6..], out, |i, q| d * (f32::from(q | fifth_bit(high, i)) - 16.0));
}

pub fn q5_1(block: &[u8], out: &mut [f32]) {
    let (d, m, high) = (read_f16(block), read_f16(&block[2..]), &block[4..8]);
    nibbles(&block[8..], out, |i, q| d * f32::from(q | fifth_bit(high, i)) + m);
}

pub fn q8_0(block: &[u8], out: &mut [f32]) {
    let d = read_f16(block);
    for (out, &q) in out.iter_mut().zip(&block[2..]) {
        *out = d * f32::from(q as i8);
    }
}

pub fn iq4_nl(block: &[u8], out: &mut [f32]) {
    let d = read_f16(block);
    nibbles(&block[2..], out, |_, q| d * f32::from(IQ4_LEVELS[q as usize]));
}
