//! A stored block taken apart: one byte for each code, and the scales as they are.

use consort_compute::{Format, ScaleFormat};

/// Splits one block of an integer or FP8 format into a byte for each value, and its scales in the order of
/// [`Layout::scale_sizes`](super::Layout::scale_sizes).
pub fn split(format: Format, block: &[u8], codes: &mut [u8], scales: &mut [u8]) {
    match format {
        Format::F32 | Format::F16 | Format::BF16 => unreachable!("plain floats are copied as they are"),
        Format::F8E4M3 => codes.copy_from_slice(block),
        Format::F8E4M3Block128 => head(block, 4, scales, |rest| codes.copy_from_slice(rest)),
        Format::MxFp8 => head(block, 1, scales, |rest| codes.copy_from_slice(rest)),
        Format::MxFp4 | Format::NvFp4 => head(block, 1, scales, |rest| adjacent_nibbles(rest, codes)),
        Format::Affine { bits, scale, .. } => affine(block, bits, scale, codes, scales),
        Format::Q4_0 | Format::IQ4NL => head(block, 2, scales, |rest| distant_nibbles(rest, codes)),
        Format::Q4_1 => head(block, 4, scales, |rest| distant_nibbles(rest, codes)),
        Format::Q5_0 => head(block, 2, scales, |rest| distant_nibbles_and_fifth_bits(rest, codes)),
        Format::Q5_1 => head(block, 4, scales, |rest| distant_nibbles_and_fifth_bits(rest, codes)),
        // Signed bytes, moved up by 128.
        Format::Q8_0 => {
            head(block, 2, scales, |rest| codes.iter_mut().zip(rest).for_each(|(code, x)| *code = x ^ 0x80))
        }
        Format::Q2K => q2_k(block, codes, scales),
        Format::Q3K => q3_k(block, codes, scales),
        Format::Q4K => {
            nested_pairs(block, scales);
            runs_of_nibbles(&block[16..], codes);
        }
        Format::Q5K => {
            nested_pairs(block, scales);
            runs_of_nibbles(&block[48..], codes);
            for (i, code) in codes.iter_mut().enumerate() {
                *code |= (block[16 + i % 32] >> (i / 32) & 1) << 4;
            }
        }
        Format::Q6K => q6_k(block, codes, scales),
        Format::IQ4XS => iq4_xs(block, codes, scales),
    }
}

/// The first `bytes` of a block are its scales.
fn head(block: &[u8], bytes: usize, scales: &mut [u8], rest: impl FnOnce(&[u8])) {
    let (head, tail) = block.split_at(bytes);
    scales[..bytes].copy_from_slice(head);
    rest(tail);
}

/// Value `2i` is the low nibble of byte `i`.
fn adjacent_nibbles(bytes: &[u8], codes: &mut [u8]) {
    for (pair, byte) in codes.chunks_exact_mut(2).zip(bytes) {
        pair.copy_from_slice(&[byte & 15, byte >> 4]);
    }
}

/// Value `i` is the low nibble of byte `i`, value `16 + i` the high one.
fn distant_nibbles(bytes: &[u8], codes: &mut [u8]) {
    let (low, high) = codes.split_at_mut(bytes.len());
    for ((low, high), byte) in low.iter_mut().zip(high).zip(bytes) {
        (*low, *high) = (byte & 15, byte >> 4);
    }
}

fn distant_nibbles_and_fifth_bits(bytes: &[u8], codes: &mut [u8]) {
    let (bits, nibbles) = bytes.split_at(4);
    distant_nibbles(nibbles, codes);
    for (i, code) in codes.iter_mut().enumerate() {
        *code |= (bits[i / 8] >> (i % 8) & 1) << 4;
    }
}

/// 32 low nibbles, then 32 high nibbles, of each 32 bytes.
fn runs_of_nibbles(bytes: &[u8], codes: &mut [u8]) {
    for (codes, bytes) in codes.chunks_exact_mut(64).zip(bytes.chunks_exact(32)) {
        distant_nibbles(bytes, codes);
    }
}

fn affine(block: &[u8], bits: u8, scale: ScaleFormat, codes: &mut [u8], scales: &mut [u8]) {
    head(block, 2 * scale.bytes(), scales, |stream| {
        for (i, code) in codes.iter_mut().enumerate() {
            let bit = i * bits as usize;
            let word = u16::from_le_bytes([stream[bit / 8], stream.get(bit / 8 + 1).copied().unwrap_or(0)]);
            *code = (word >> (bit % 8) & ((1 << bits) - 1)) as u8;
        }
    });
}

/// The scales and minima of Q4_K and Q5_K: 6 bits each, eight of both in 12 bytes behind the block's two factors.
fn nested_pairs(block: &[u8], scales: &mut [u8]) {
    scales[..4].copy_from_slice(&block[..4]);
    let packed = &block[4..16];
    for group in 0..8 {
        let (scale, minimum) = if group < 4 {
            (packed[group] & 63, packed[group + 4] & 63)
        } else {
            let low = packed[group + 4];
            (low & 15 | packed[group - 4] >> 6 << 4, low >> 4 | packed[group] >> 6 << 4)
        };
        (scales[4 + group], scales[12 + group]) = (scale, minimum);
    }
}

/// Code `i` of Q2_K and Q3_K: 2 bits; 128 values share 32 bytes, the first 32 of them the lowest bits.
fn two_bits(bytes: &[u8], i: usize) -> u8 {
    bytes[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3
}

fn q2_k(block: &[u8], codes: &mut [u8], scales: &mut [u8]) {
    scales[..4].copy_from_slice(&block[80..84]);
    for (group, byte) in block[..16].iter().enumerate() {
        (scales[4 + group], scales[20 + group]) = (byte & 15, byte >> 4);
    }
    for (i, code) in codes.iter_mut().enumerate() {
        *code = two_bits(&block[16..80], i);
    }
}

fn q3_k(block: &[u8], codes: &mut [u8], scales: &mut [u8]) {
    let (high, low, packed) = (&block[..32], &block[32..96], &block[96..108]);
    scales[..2].copy_from_slice(&block[108..110]);
    for group in 0..16 {
        let low_bits = packed[group % 8] >> (group / 8 * 4) & 15;
        let high_bits = packed[8 + group % 4] >> (group / 4 * 2) & 3;
        scales[2 + group] = (low_bits | high_bits << 4).wrapping_sub(32);
    }
    for (i, code) in codes.iter_mut().enumerate() {
        *code = two_bits(low, i) | (high[i % 32] >> (i / 32) & 1) << 2;
    }
}

fn q6_k(block: &[u8], codes: &mut [u8], scales: &mut [u8]) {
    let (low, high) = (&block[..128], &block[128..192]);
    scales[..2].copy_from_slice(&block[208..210]);
    scales[2..18].copy_from_slice(&block[192..208]);
    for (i, code) in codes.iter_mut().enumerate() {
        // 128 values share 64 bytes of nibbles and 32 bytes of 2-bit tops; a run of 32 values has one place in them.
        let (part, run, within) = (i / 128, i % 128 / 32, i % 32);
        let nibble = low[part * 64 + run % 2 * 32 + within] >> (run / 2 * 4) & 15;
        *code = nibble | (high[part * 32 + within] >> (run * 2) & 3) << 4;
    }
}

fn iq4_xs(block: &[u8], codes: &mut [u8], scales: &mut [u8]) {
    scales[..2].copy_from_slice(&block[..2]);
    let high = u16::from_le_bytes([block[2], block[3]]);
    for group in 0..8 {
        let low_bits = block[4 + group / 2] >> (group % 2 * 4) & 15;
        let high_bits = (high >> (group * 2) & 3) as u8;
        scales[2 + group] = (low_bits | high_bits << 4).wrapping_sub(32);
    }
    for (codes, bytes) in codes.chunks_exact_mut(32).zip(block[8..].chunks_exact(16)) {
        distant_nibbles(bytes, codes);
    }
}
