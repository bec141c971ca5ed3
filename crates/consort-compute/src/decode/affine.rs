//! Groups of unsigned integers behind a scale and a bias.

use crate::ScaleFormat;

use super::{read_bf16, read_f16, read_f32};

impl ScaleFormat {
    pub(crate) fn read(self, bytes: &[u8]) -> f32 {
        match self {
            Self::F16 => read_f16(bytes),
            Self::BF16 => read_bf16(bytes),
            Self::F32 => read_f32(bytes),
        }
    }
}

pub fn affine(bits: u8, scale_format: ScaleFormat, block: &[u8], out: &mut [f32]) {
    let (head, codes) = block.split_at(2 * scale_format.bytes());
    let (scale, bias) = (scale_format.read(head), scale_format.read(&head[scale_format.bytes()..]));
    for (i, out) in out.iter_mut().enumerate() {
        *out = scale * f32::from(integer(codes, bits, i)) + bias;
    }
}

/// Integer `i` of a little-endian stream of `bits`-bit integers.
fn integer(stream: &[u8], bits: u8, i: usize) -> u8 {
    let first_bit = i * bits as usize;
    let low = stream[first_bit / 8];
    // An integer of at most 8 bits lies in two bytes; the last one of a stream may have no second byte.
    let high = stream.get(first_bit / 8 + 1).copied().unwrap_or(0);
    let word = u16::from_le_bytes([low, high]) >> (first_bit % 8);
    (word & ((1 << bits) - 1)) as u8
}
