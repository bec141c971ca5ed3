//! Plain floating point formats, and small floating point codes behind a scale.

use super::{
    codes::{E2M1, E4M3, e8m0},
    read_bf16, read_f16, read_f32,
};

pub fn f32(block: &[u8], out: &mut [f32]) {
    out[0] = read_f32(block);
}

pub fn f16(block: &[u8], out: &mut [f32]) {
    out[0] = read_f16(block);
}

pub fn bf16(block: &[u8], out: &mut [f32]) {
    out[0] = read_bf16(block);
}

pub fn f8_e4m3(block: &[u8], out: &mut [f32]) {
    out[0] = E4M3[block[0] as usize];
}

pub fn f8_e4m3_block(block: &[u8], out: &mut [f32]) {
    scaled_bytes(read_f32(block), &block[4..], out);
}

pub fn mxfp8(block: &[u8], out: &mut [f32]) {
    scaled_bytes(e8m0(block[0]), &block[1..], out);
}

pub fn mxfp4(block: &[u8], out: &mut [f32]) {
    scaled_nibbles(e8m0(block[0]), &block[1..], out);
}

pub fn nvfp4(block: &[u8], out: &mut [f32]) {
    scaled_nibbles(E4M3[block[0] as usize], &block[1..], out);
}

fn scaled_bytes(scale: f32, codes: &[u8], out: &mut [f32]) {
    for (out, &code) in out.iter_mut().zip(codes) {
        *out = scale * E4M3[code as usize];
    }
}

/// Two values a byte, the first in the low nibble.
fn scaled_nibbles(scale: f32, codes: &[u8], out: &mut [f32]) {
    for (out, &code) in out.chunks_exact_mut(2).zip(codes) {
        out[0] = scale * E2M1[(code & 15) as usize];
        out[1] = scale * E2M1[(code >> 4) as usize];
    }
}
