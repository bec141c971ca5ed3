//! From tiles to what the microkernels multiply: bytes with scales, or f32.
//!
//! Products unpack 256 input features of a panel at a time into memory that stays in the first-level cache, and multiply from
//! there. That costs a store and a load for each register of weights, which a product that waits for memory has time for and
//! a product with many rows pays once for all of them. In return each format is decoded in one place.

use super::layout::{Codes, Integers, Layout, Number, STEP, Scales};
use crate::isa::{LANES, Quads, Simd};

/// Input features that are unpacked at a time: a multiple of every tile's.
pub const CHUNK: usize = 256;

/// The finest groups are of 16 values.
const GROUPS: usize = CHUNK / 16;

/// A chunk of a panel as integers.
pub struct IntegerChunk {
    /// Quads of four columns, or pairs of two 16-bit columns for wide codes.
    pub codes: [Quads; CHUNK / 2],
    /// The factor of each group and row. Groups of more than 32 columns are repeated for each 32.
    pub scales: [[f32; LANES]; GROUPS],
    /// What is added to each value, if the layout has a bias.
    pub biases: [[f32; LANES]; GROUPS],
}

impl IntegerChunk {
    /// An empty chunk.
    pub const ZERO: Self =
        Self { codes: [[0; 4 * LANES]; CHUNK / 2], scales: [[0.0; LANES]; GROUPS], biases: [[0.0; LANES]; GROUPS] };

    /// Unpacks tiles of integers.
    #[inline(always)]
    pub fn unpack<S: Simd>(&mut self, simd: S, layout: &Layout, integers: &Integers, tiles: &[u8]) {
        let group = layout.group.min(STEP);
        for (tile, bytes) in tiles.chunks_exact(layout.tile_bytes()).enumerate() {
            let (scales, codes) = bytes.split_at(layout.scale_bytes());
            let first = tile * layout.block / group;
            let groups = layout.block / group;
            let repeat = layout.group / group;
            let scale_out = &mut self.scales[first..first + groups];
            unpack_scales(simd, layout, scales, scale_out, &mut self.biases[first..first + groups], repeat);
            let step_bytes = LANES * STEP * integers.bits as usize / 8;
            let quads = if integers.wide { STEP / 2 } else { STEP / 4 };
            let out = self.codes[tile * layout.block / STEP * quads..].chunks_exact_mut(quads);
            for (step, out) in codes.chunks_exact(step_bytes).zip(out) {
                unpack_step(simd, integers, step, out);
            }
        }
    }
}

/// 64-byte pieces.
#[inline(always)]
fn quads(bytes: &[u8]) -> &[Quads] {
    bytes.as_chunks().0
}

/// What [`pack_step`](super::pack) packed.
#[inline(always)]
fn unpack_step<S: Simd>(simd: S, integers: &Integers, step: &[u8], out: &mut [Quads]) {
    const MAIN: usize = 4;
    if integers.wide {
        return unpack_wide_step(simd, integers, step, out);
    }
    let out: &mut [Quads; STEP / 4] = out.try_into().expect("eight quads of four columns");
    let step = quads(step);
    match integers.bits {
        4 => {
            for (i, from) in step.iter().enumerate().take(MAIN) {
                let bytes = simd.load_bytes(from);
                let (mut low, mut high) = (simd.field(bytes, 0, 15), simd.field(bytes, 4, 15));
                if let Some(table) = &integers.table {
                    (low, high) = (simd.lookup(table, low), simd.lookup(table, high));
                }
                simd.store_bytes(low, &mut out[2 * i]);
                simd.store_bytes(high, &mut out[2 * i + 1]);
            }
        }
        5 => {
            let fifth = simd.load_bytes(&step[MAIN]);
            for (i, from) in step.iter().enumerate().take(MAIN) {
                let bytes = simd.load_bytes(from);
                let (low, high) = (simd.field(bytes, 0, 15), simd.field(bytes, 4, 15));
                simd.store_bytes(simd.or(low, bit(simd, fifth, 2 * i, 4)), &mut out[2 * i]);
                simd.store_bytes(simd.or(high, bit(simd, fifth, 2 * i + 1, 4)), &mut out[2 * i + 1]);
            }
        }
        6 => {
            for (i, from) in step.iter().enumerate().take(MAIN) {
                let bytes = simd.load_bytes(from);
                let top = simd.load_bytes(&step[MAIN + i / 2]);
                let (low, high) = (simd.field(bytes, 0, 15), simd.field(bytes, 4, 15));
                // Quads 2i and 2i + 1 are fields 2i % 4 and the next one of 2 bits each.
                let (low_top, high_top) = match i % 2 {
                    0 => (simd.field_left(top, 4, 0x30), simd.field_left(top, 2, 0x30)),
                    _ => (simd.field(top, 0, 0x30), simd.field(top, 2, 0x30)),
                };
                simd.store_bytes(simd.or(low, low_top), &mut out[2 * i]);
                simd.store_bytes(simd.or(high, high_top), &mut out[2 * i + 1]);
            }
        }
        // 2 and 3 bits.
        _ => {
            let third = step.get(2).map(|third| simd.load_bytes(third));
            for (i, out) in out.iter_mut().enumerate() {
                let low = simd.field(simd.load_bytes(&step[i / 4]), 2 * (i as u32 % 4), 3);
                let code = third.map_or(low, |third| simd.or(low, bit(simd, third, i, 2)));
                simd.store_bytes(code, out);
            }
        }
    }
}

/// Bit `from` of each byte, moved to place `to`.
#[inline(always)]
fn bit<S: Simd>(simd: S, bytes: S::Bytes, from: usize, to: usize) -> S::Bytes {
    if from >= to {
        simd.field(bytes, (from - to) as u32, 1 << to)
    } else {
        simd.field_left(bytes, (to - from) as u32, 1 << to)
    }
}

#[inline(always)]
fn unpack_wide_step<S: Simd>(simd: S, integers: &Integers, step: &[u8], out: &mut [Quads]) {
    let Some(table) = &integers.table else {
        for (from, out) in step.as_chunks().0.iter().zip(out) {
            simd.store_bytes(simd.widen_bytes(from), out);
        }
        return;
    };
    for (from, out) in quads(step).iter().zip(out.chunks_exact_mut(4)) {
        let bytes = simd.load_bytes(from);
        let (pairs, next_pairs) = out.split_at_mut(2);
        for (nibbles, out) in [(simd.field(bytes, 0, 15), pairs), (simd.field(bytes, 4, 15), next_pairs)] {
            let mut bytes = [0; 4 * LANES];
            simd.store_bytes(simd.lookup(table, nibbles), &mut bytes);
            for (half, out) in bytes.as_chunks().0.iter().zip(out) {
                simd.store_bytes(simd.widen_bytes(half), out);
            }
        }
    }
}

/// The factors and biases of a tile's groups, each `repeat` times.
#[inline(always)]
fn unpack_scales<S: Simd>(
    simd: S,
    layout: &Layout,
    bytes: &[u8],
    scales: &mut [[f32; LANES]],
    biases: &mut [[f32; LANES]],
    repeat: usize,
) {
    match layout.scales {
        Scales::One => {}
        Scales::Plain { number, bias, factor } => {
            let size = number.bytes() * LANES;
            let groups = scales.len() / repeat;
            let factor = simd.splat(factor);
            for (i, scale) in scales.iter_mut().enumerate() {
                let value = load_number(simd, number, &bytes[i / repeat * size..][..size]);
                simd.store(simd.mul(value, factor), scale);
            }
            if bias {
                for (i, bias) in biases.iter_mut().enumerate() {
                    let at = groups + i / repeat;
                    simd.store(load_number(simd, number, &bytes[at * size..][..size]), bias);
                }
            }
        }
        Scales::Nested { signed, minimum } => {
            let (heads, bytes) = bytes.split_at(2 * LANES * (1 + usize::from(minimum)));
            let (bytes, _) = bytes.as_chunks::<LANES>();
            let (heads, _) = heads.as_chunks();
            let d = simd.load_f16(&heads[0]);
            for (bytes, scale) in bytes.iter().zip(&mut *scales) {
                let value = if signed { simd.load_i8(bytes) } else { simd.load_u8(bytes) };
                simd.store(simd.mul(d, value), scale);
            }
            if minimum {
                let negative = simd.mul(simd.load_f16(&heads[1]), simd.splat(-1.0));
                for (bytes, bias) in bytes[scales.len()..].iter().zip(biases) {
                    simd.store(simd.mul(negative, simd.load_u8(bytes)), bias);
                }
            }
        }
    }
}

/// 16 numbers of one kind.
#[inline(always)]
fn load_number<S: Simd>(simd: S, number: Number, bytes: &[u8]) -> S::Floats {
    const SIZE: &str = "16 numbers";
    match number {
        Number::F32 => load_f32(simd, bytes),
        Number::F16 => simd.load_f16(bytes.try_into().expect(SIZE)),
        Number::BF16 => simd.load_bf16(bytes.try_into().expect(SIZE)),
        Number::E4M3 => simd.mul(simd.load_e4m3_div_256(bytes.try_into().expect(SIZE)), simd.splat(256.0)),
        Number::E8M0 => simd.load_e8m0(bytes.try_into().expect(SIZE)),
    }
}

#[inline(always)]
fn load_f32<S: Simd>(simd: S, bytes: &[u8]) -> S::Floats {
    let (values, _) = bytes.as_chunks();
    let mut floats = [0.0; LANES];
    floats.iter_mut().zip(values).for_each(|(float, bytes)| *float = f32::from_le_bytes(*bytes));
    simd.load(&floats)
}

/// A chunk of a panel as f32: 16 rows side by side, column after column.
pub struct FloatChunk(pub [[f32; LANES]; CHUNK]);

impl FloatChunk {
    /// An empty chunk.
    pub const ZERO: Self = Self([[0.0; LANES]; CHUNK]);

    /// Unpacks tiles of any format; `integers` is working memory.
    #[inline(always)]
    pub fn unpack<S: Simd>(&mut self, simd: S, layout: &Layout, integers: &mut IntegerChunk, tiles: &[u8]) {
        match &layout.codes {
            Codes::Integers(codes) => {
                integers.unpack(simd, layout, codes, tiles);
                let columns = tiles.len() / layout.tile_bytes() * layout.block;
                self.scale_integers(simd, layout, codes, integers, columns);
            }
            Codes::F32 => {
                for (out, bytes) in self.0.iter_mut().zip(quads(tiles)) {
                    simd.store(load_f32(simd, bytes), out);
                }
            }
            Codes::F16 => {
                for (out, bytes) in self.0.iter_mut().zip(tiles.as_chunks().0) {
                    simd.store(simd.load_f16(bytes), out);
                }
            }
            Codes::BF16 => {
                for (out, bytes) in self.0.iter_mut().zip(tiles.as_chunks().0) {
                    simd.store(simd.load_bf16(bytes), out);
                }
            }
            Codes::E4M3 => {
                for (out, bytes) in self.0.chunks_mut(layout.block).zip(tiles.chunks_exact(layout.tile_bytes())) {
                    let (scale, codes) = bytes.split_at(layout.scale_bytes());
                    let scale = match layout.scales {
                        Scales::Plain { number, .. } => load_number(simd, number, scale),
                        Scales::One | Scales::Nested { .. } => simd.splat(1.0),
                    };
                    for (out, bytes) in out.iter_mut().zip(codes.as_chunks().0) {
                        simd.store(simd.mul(simd.load_e4m3_div_256(bytes), scale), out);
                    }
                }
            }
        }
    }

    /// `scale · (code - offset) + bias`, in the order of operations that the formats are defined by.
    #[inline(always)]
    fn scale_integers<S: Simd>(
        &mut self,
        simd: S,
        layout: &Layout,
        codes: &Integers,
        from: &IntegerChunk,
        columns: usize,
    ) {
        let offset = simd.splat_int(-i32::from(codes.offset));
        let group = layout.group.min(STEP);
        let groups = self.0[..columns].chunks_exact_mut(group).zip(&from.scales).zip(&from.biases);
        for (g, ((out, scale), bias)) in groups.enumerate() {
            let scale = simd.load(scale);
            let bias = layout.has_bias().then(|| simd.load(bias));
            let finish = |code| {
                let product = simd.mul(scale, simd.to_floats(simd.add_ints(code, offset)));
                bias.map_or(product, |bias| simd.add(product, bias))
            };
            if codes.wide {
                let (out, _) = out.as_chunks_mut::<2>();
                for (out, pair) in out.iter_mut().zip(&from.codes[g * group / 2..]) {
                    let pair = simd.load_bytes(pair);
                    simd.store(finish(simd.short_of_lane::<0>(pair)), &mut out[0]);
                    simd.store(finish(simd.short_of_lane::<1>(pair)), &mut out[1]);
                }
            } else {
                let (out, _) = out.as_chunks_mut::<4>();
                for (out, quad) in out.iter_mut().zip(&from.codes[g * group / 4..]) {
                    let quad = simd.load_bytes(quad);
                    simd.store(finish(simd.byte_of_lane::<0>(quad)), &mut out[0]);
                    simd.store(finish(simd.byte_of_lane::<1>(quad)), &mut out[1]);
                    simd.store(finish(simd.byte_of_lane::<2>(quad)), &mut out[2]);
                    simd.store(finish(simd.byte_of_lane::<3>(quad)), &mut out[3]);
                }
            }
        }
    }
}
