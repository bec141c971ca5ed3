//! GGUF's blocks of 256 values: groups of 16 or 32, each with an integer scale (and an integer minimum, in some) that a
//! floating point factor of the block multiplies.

use super::{
    legacy_quants::{IQ4_LEVELS, nibbles},
    read_f16,
};

pub fn q2_k(block: &[u8], out: &mut [f32]) {
    let (scales, codes) = (&block[..16], &block[16..80]);
    let (d, d_min) = (read_f16(&block[80..]), read_f16(&block[82..]));
    for (group, out) in out.chunks_exact_mut(16).enumerate() {
        let scale = d * f32::from(scales[group] & 15);
        let minimum = d_min * f32::from(scales[group] >> 4);
        let (codes, shift) = two_bit_codes(codes, group);
        for (out, &code) in out.iter_mut().zip(codes) {
            *out = scale * f32::from((code >> shift) & 3) - minimum;
        }
    }
}

pub fn q3_k(block: &[u8], out: &mut [f32]) {
    let (high, codes, scales) = (&block[..32], &block[32..96], &block[96..108]);
    let d = read_f16(&block[108..]);
    for (group, out) in out.chunks_exact_mut(16).enumerate() {
        let low_bits = (scales[group % 8] >> (group / 8 * 4)) & 15;
        let high_bits = (scales[8 + group % 4] >> (group / 4 * 2)) & 3;
        let scale = d * (f32::from(low_bits | high_bits << 4) - 32.0);
        let (codes, shift) = two_bit_codes(codes, group);
        // The third bit of each run of 32 values is one bit of the 32 high bytes.
        let high = &high[group % 2 * 16..][..16];
        for ((out, &code), &high) in out.iter_mut().zip(codes).zip(high) {
            let third_bit = ((high >> (group / 2)) & 1) << 2;
            *out = scale * (f32::from((code >> shift) & 3 | third_bit) - 4.0);
        }
    }
}

/// The 16 bytes that hold the 2-bit codes of a group of 16 values, and the shift within them. 128 values share 32 bytes:
/// the first 32 values have the lowest bits, and so on.
fn two_bit_codes(codes: &[u8], group: usize) -> (&[u8], usize) {
    let bytes = group / 8 * 32 + group % 2 * 16;
    (&codes[bytes..][..16], group % 8 / 2 * 2)
}

/// Scale and minimum of a group of 32 values: 6 bits each, eight of both in 12 bytes.
fn six_bit_scales(packed: &[u8], group: usize) -> (f32, f32) {
    let (scale, minimum) = if group < 4 {
        (packed[group] & 63, packed[group + 4] & 63)
    } else {
        let low = packed[group + 4];
        (low & 15 | packed[group - 4] >> 6 << 4, low >> 4 | packed[group] >> 6 << 4)
    };
    (f32::from(scale), f32::from(minimum))
}

pub fn q4_k(block: &[u8], out: &mut [f32]) {
    four_bits_and_a_fifth(block, &block[16..], out, |_, _| 0);
}

pub fn q5_k(block: &[u8], out: &mut [f32]) {
    let high = &block[16..48];
    four_bits_and_a_fifth(block, &block[48..], out, |group, i| ((high[i] >> group) & 1) << 4);
}

/// Q4_K and Q5_K. Each 64 values share 32 bytes of nibbles: the low ones first.
fn four_bits_and_a_fifth(head: &[u8], codes: &[u8], out: &mut [f32], fifth_bit: impl Fn(usize, usize) -> u8) {
    let (d, d_min, scales) = (read_f16(head), read_f16(&head[2..]), &head[4..16]);
    for (group, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, minimum) = six_bit_scales(scales, group);
        let (scale, minimum) = (d * scale, d_min * minimum);
        let (codes, shift) = (&codes[group / 2 * 32..], group % 2 * 4);
        for (i, out) in out.iter_mut().enumerate() {
            let code = (codes[i] >> shift) & 15 | fifth_bit(group, i);
            *out = scale * f32::from(code) - minimum;
        }
    }
}

pub fn q6_k(block: &[u8], out: &mut [f32]) {
    let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let d = read_f16(&block[208..]);
    for (group, out) in out.chunks_exact_mut(16).enumerate() {
        let scale = d * f32::from(scales[group] as i8);
        // 128 values share 64 bytes of nibbles and 32 bytes of 2-bit tops; a run of 32 values takes one position in them.
        let (part, run, half_run) = (group / 8, group % 8 / 2, group % 2 * 16);
        let low = &low[part * 64 + run % 2 * 32 + half_run..];
        let high = &high[part * 32 + half_run..];
        for (i, out) in out.iter_mut().enumerate() {
            let code = (low[i] >> (run / 2 * 4)) & 15 | ((high[i] >> (run * 2)) & 3) << 4;
            *out = scale * (f32::from(code) - 32.0);
        }
    }
}

pub fn iq4_xs(block: &[u8], out: &mut [f32]) {
    let (d, high, low) = (read_f16(block), u16::from_le_bytes([block[2], block[3]]), &block[4..8]);
    for (group, (out, codes)) in out.chunks_exact_mut(32).zip(block[8..].chunks_exact(16)).enumerate() {
        let scale = (low[group / 2] >> (group % 2 * 4)) & 15 | (((high >> (group * 2)) & 3) as u8) << 4;
        let scale = d * (f32::from(scale) - 32.0);
        nibbles(codes, out, |_, q| scale * f32::from(IQ4_LEVELS[q as usize]));
    }
}
