//! From tiles to what the microkernels multiply: bytes with scales, or f32.
//!
//! Products unpack 256 input features of a panel at a time into memory that stays in the first-level cache, and multiply from
//! there. That costs a store and a load for each register of weights, which a product that waits for memory has time for and
//! a product with many rows pays once for all of them. In return each format is decoded in one place.

use super::layout::{Codes, Integers, Layout, Number, STEP, Scales};
use super::numbers::{Columns, E8M0, F16, F32, LoadNumber, LoadQuad, Pairs, PairsOfE4M3};
use super::scales::{Nested, Plain, ReadScales};
use crate::isa::{LANES, Quads, Simd};

/// Input features that are unpacked at a time: a multiple of every tile's.
pub const CHUNK: usize = 256;

/// The finest groups are of 16 values.
pub const GROUPS: usize = CHUNK / 16;
/// 64-byte vectors of a step's codes: quads of four columns.
pub const QUADS: usize = STEP / 4;

/// A chunk of a panel as integers.
#[repr(C, align(64))]
pub struct IntegerChunk {
    /// Quads of four columns, a byte for each.
    pub codes: [Quads; CHUNK / 4],
    /// Their factors.
    pub factors: Factors,
}

impl IntegerChunk {
    /// An empty chunk.
    pub const ZERO: Self = Self {
        codes: [[0; 4 * LANES]; CHUNK / 4],
        factors: Factors { scales: [[0.0; LANES]; GROUPS], biases: [[0.0; LANES]; GROUPS] },
    };

    /// Unpacks tiles of integers, and asks for the memory of `ahead` meanwhile.
    #[inline(always)]
    pub fn unpack<S: Simd>(&mut self, simd: S, layout: &Layout, integers: &Integers, tiles: &[u8], ahead: &[u8]) {
        self.unpack_scales(simd, layout, tiles);
        let mut out = self.codes.as_chunks_mut::<QUADS>().0.iter_mut().enumerate();
        for tile in tiles.chunks_exact(layout.tile_bytes) {
            let steps = tile[layout.scale_bytes..].chunks_exact(integers.step_bytes());
            for (step, (i, out)) in steps.zip(&mut out) {
                simd.prefetch(piece(ahead, i, CHUNK / STEP));
                let quads = unpack_step(simd, integers, step);
                for quad in 0..QUADS {
                    simd.store_bytes(quads[quad], &mut out[quad]);
                }
            }
        }
    }

    /// Unpacks the scales of tiles, and their biases.
    #[inline(always)]
    pub fn unpack_scales<S: Simd>(&mut self, simd: S, layout: &Layout, tiles: &[u8]) {
        for (i, tile) in tiles.chunks_exact(layout.tile_bytes).enumerate() {
            self.factors.unpack_tile(simd, layout, tile, i * layout.groups * layout.repeat);
        }
    }
}

/// What the codes of a chunk's groups are multiplied by.
#[repr(C, align(64))]
pub struct Factors {
    /// The factor of each group and row. Groups of more than 32 columns are repeated for each 32.
    pub scales: [[f32; LANES]; GROUPS],
    /// What is added to each value, if the layout has a bias.
    pub biases: [[f32; LANES]; GROUPS],
}

impl Factors {
    /// Unpacks those of a tile, which begins with group `first`.
    #[inline(always)]
    pub fn unpack_tile<S: Simd>(&mut self, simd: S, layout: &Layout, tile: &[u8], first: usize) {
        let tile = &tile[..layout.scale_bytes];
        match layout.scales {
            Scales::One => {}
            Scales::Plain { number, bias: false, factor } => {
                self.unpack_from(simd, layout, Plain::<Number, false> { number, factor }, tile, first);
            }
            Scales::Plain { number, bias: true, factor } => {
                self.unpack_from(simd, layout, Plain::<Number, true> { number, factor }, tile, first);
            }
            Scales::Nested { signed: false, minimum: false } => {
                self.unpack_from(simd, layout, Nested::<false, false>, tile, first);
            }
            Scales::Nested { signed: false, minimum: true } => {
                self.unpack_from(simd, layout, Nested::<false, true>, tile, first);
            }
            Scales::Nested { signed: true, minimum: false } => {
                self.unpack_from(simd, layout, Nested::<true, false>, tile, first);
            }
            Scales::Nested { signed: true, minimum: true } => {
                self.unpack_from(simd, layout, Nested::<true, true>, tile, first);
            }
        }
    }

    #[inline(always)]
    fn unpack_from<S: Simd, R: ReadScales>(&mut self, simd: S, layout: &Layout, read: R, tile: &[u8], first: usize) {
        let heads = read.heads(simd, tile);
        let mut next = first;
        for group in 0..layout.groups {
            let factor = read.group(simd, heads, tile, layout.groups, group);
            for _ in 0..layout.repeat {
                simd.store(factor.scale, &mut self.scales[next % GROUPS]);
                if R::BIAS {
                    simd.store(factor.bias, &mut self.biases[next % GROUPS]);
                }
                next += 1;
            }
        }
    }
}

/// Piece `i` of `pieces` of about the same size.
#[inline(always)]
pub fn piece(bytes: &[u8], i: usize, pieces: usize) -> &[u8] {
    let len = bytes.len().div_ceil(pieces);
    &bytes[bytes.len().min(i * len)..bytes.len().min((i + 1) * len)]
}

/// The codes of a step, as `pack_step` packed them.
#[inline(always)]
pub fn unpack_step<S: Simd>(simd: S, integers: &Integers, step: &[u8]) -> [S::Bytes; QUADS] {
    let (step, _) = step.as_chunks();
    match (integers.bits, &integers.table) {
        (2, _) => unpack_bits::<S, 2>(simd, step, None),
        (3, _) => unpack_bits::<S, 3>(simd, step, None),
        (4, None) => unpack_bits::<S, 4>(simd, step, None),
        (4, Some(table)) => unpack_bits::<S, 4>(simd, step, Some(table)),
        (5, _) => unpack_bits::<S, 5>(simd, step, None),
        (6, _) => unpack_bits::<S, 6>(simd, step, None),
        _ => unpack_bits::<S, 8>(simd, step, None),
    }
}

/// Codes of `BITS` bits, with as many vectors to a step.
#[inline(always)]
pub fn unpack_bits<S: Simd, const BITS: usize>(simd: S, step: &[Quads], table: Option<&[u8; 16]>) -> [S::Bytes; QUADS] {
    let step: &[Quads; BITS] = step.try_into().expect("as many vectors as bits");
    let mut out = [simd.load_bytes(&step[0]); QUADS];
    if BITS == 8 {
        for quad in 1..QUADS {
            out[quad] = simd.load_bytes(&step[quad % BITS]);
        }
    } else if BITS < 4 {
        for quad in 0..QUADS {
            out[quad] = simd.field(simd.load_bytes(&step[quad / 4]), 2 * (quad as u32 % 4), 3);
            if BITS == 3 {
                out[quad] = simd.or(out[quad], bit(simd, simd.load_bytes(&step[BITS - 1]), quad, 2));
            }
        }
    } else {
        for i in 0..QUADS / 2 {
            let nibbles = simd.load_bytes(&step[i]);
            let (mut low, mut high) = (simd.field(nibbles, 0, 15), simd.field(nibbles, 4, 15));
            if let Some(table) = table {
                (low, high) = (simd.lookup(table, low), simd.lookup(table, high));
            }
            if BITS == 5 {
                let fifth = simd.load_bytes(&step[BITS - 1]);
                (low, high) = (simd.or(low, bit(simd, fifth, 2 * i, 4)), simd.or(high, bit(simd, fifth, 2 * i + 1, 4)));
            }
            if BITS == 6 {
                // Each byte holds two bits of four quads.
                let top = simd.load_bytes(&step[BITS - 2 + i / 2]);
                let (low_top, high_top) = match i % 2 {
                    0 => (simd.field_left(top, 4, 0x30), simd.field_left(top, 2, 0x30)),
                    _ => (simd.field(top, 0, 0x30), simd.field(top, 2, 0x30)),
                };
                (low, high) = (simd.or(low, low_top), simd.or(high, high_top));
            }
            (out[2 * i], out[2 * i + 1]) = (low, high);
        }
    }
    out
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

/// A chunk of a panel as f32: 16 rows side by side, column after column.
#[derive(Clone)]
#[repr(C, align(64))]
pub struct FloatChunk(pub [[f32; LANES]; CHUNK]);

impl FloatChunk {
    /// An empty chunk.
    pub const ZERO: Self = Self([[0.0; LANES]; CHUNK]);

    /// The columns of all chunks, one chunk after the other.
    pub fn lanes(chunks: &[Self]) -> &[[f32; LANES]] {
        // SAFETY: a chunk is an array of columns and nothing else, and the alignment of a column is no larger.
        unsafe { std::slice::from_raw_parts(chunks.as_ptr().cast(), CHUNK * chunks.len()) }
    }

    /// Unpacks tiles of any format, and asks for the memory of `ahead` meanwhile; `integers` is working memory.
    #[inline(always)]
    pub fn unpack<S: Simd>(
        &mut self,
        simd: S,
        layout: &Layout,
        integers: &mut IntegerChunk,
        tiles: &[u8],
        ahead: &[u8],
    ) {
        match &layout.codes {
            Codes::Integers(codes) => {
                integers.unpack(simd, layout, codes, tiles, ahead);
                self.scale_integers(simd, layout, codes, integers);
            }
            Codes::F32 => self.columns::<S, Columns<F32>>(simd, tiles, ahead),
            Codes::F16 => self.columns::<S, Columns<F16>>(simd, tiles, ahead),
            Codes::BF16 => self.columns::<S, Pairs>(simd, tiles, ahead),
            Codes::E4M3 => {
                let (tile_bytes, pieces) = (layout.tile_bytes, CHUNK / layout.block);
                for (i, (out, tile)) in self.0.chunks_mut(layout.block).zip(tiles.chunks_exact(tile_bytes)).enumerate()
                {
                    simd.prefetch(piece(ahead, i, pieces));
                    let (scale, codes) = tile.split_at(layout.scale_bytes);
                    let scale = match layout.scales {
                        Scales::Plain { number: Number::E8M0, .. } => E8M0::load(simd, scale),
                        Scales::Plain { .. } => F32::load(simd, scale),
                        Scales::One | Scales::Nested { .. } => simd.splat(1.0),
                    };
                    let quads = codes.chunks_exact(PairsOfE4M3::BYTES);
                    for (out, bytes) in out.as_chunks_mut::<4>().0.iter_mut().zip(quads) {
                        let columns = PairsOfE4M3::load(simd, bytes);
                        for column in 0..4 {
                            simd.store(simd.mul(columns[column], scale), &mut out[column]);
                        }
                    }
                }
            }
        }
    }

    /// Numbers without a scale.
    #[inline(always)]
    fn columns<S: Simd, Q: LoadQuad>(&mut self, simd: S, tiles: &[u8], ahead: &[u8]) {
        let quads = tiles.chunks_exact(Q::BYTES);
        for (i, (out, bytes)) in self.0.as_chunks_mut::<4>().0.iter_mut().zip(quads).enumerate() {
            simd.prefetch(piece(ahead, i, CHUNK / 4));
            let columns = Q::load(simd, bytes);
            for column in 0..4 {
                simd.store(columns[column], &mut out[column]);
            }
        }
    }

    /// `scale · (code - offset) + bias`, in the order of operations that the formats are defined by. Goes on to the end of
    /// the chunk: what is past the last column is not looked at.
    #[inline(always)]
    fn scale_integers<S: Simd>(&mut self, simd: S, layout: &Layout, codes: &Integers, from: &IntegerChunk) {
        if layout.group < STEP {
            self.scale_groups::<S, { QUADS / 2 }>(simd, layout, codes, from);
        } else {
            self.scale_groups::<S, QUADS>(simd, layout, codes, from);
        }
    }

    #[inline(always)]
    fn scale_groups<S: Simd, const QUADS: usize>(
        &mut self,
        simd: S,
        layout: &Layout,
        codes: &Integers,
        from: &IntegerChunk,
    ) {
        let (out, _) = self.0.as_chunks_mut::<4>();
        let groups = out.as_chunks_mut::<QUADS>().0.iter_mut().zip(from.codes.as_chunks::<QUADS>().0);
        for (group, (out, quads)) in groups.enumerate() {
            let (scale, bias) = (simd.load(&from.factors.scales[group]), simd.load(&from.factors.biases[group]));
            for (out, quad) in out.iter_mut().zip(quads) {
                let columns = columns_of_quad(simd, simd.load_bytes(quad), codes.offset);
                for column in 0..4 {
                    let product = simd.mul(scale, columns[column]);
                    let value = if layout.has_bias() { simd.add(product, bias) } else { product };
                    simd.store(value, &mut out[column]);
                }
            }
        }
    }

    /// Unpacks the whole numbers of tiles that are multiplied with scales later, which go to `integers`; asks for the memory of
    /// `ahead` meanwhile.
    #[inline(always)]
    pub fn unpack_codes<S: Simd>(
        &mut self,
        simd: S,
        layout: &Layout,
        codes: &Integers,
        integers: &mut IntegerChunk,
        tiles: &[u8],
        ahead: &[u8],
    ) {
        integers.unpack(simd, layout, codes, tiles, ahead);
        for (out, quad) in self.0.as_chunks_mut::<4>().0.iter_mut().zip(&integers.codes) {
            let columns = columns_of_quad(simd, simd.load_bytes(quad), codes.offset);
            for column in 0..4 {
                simd.store(columns[column], &mut out[column]);
            }
        }
    }
}

/// The columns of a quad of codes, less their offset.
#[inline(always)]
pub fn columns_of_quad<S: Simd>(simd: S, quad: S::Bytes, offset: i16) -> [S::Floats; 4] {
    let offset = simd.splat_int(-i32::from(offset));
    [
        simd.to_floats(simd.add_ints(simd.byte_of_lane::<0>(quad), offset)),
        simd.to_floats(simd.add_ints(simd.byte_of_lane::<1>(quad), offset)),
        simd.to_floats(simd.add_ints(simd.byte_of_lane::<2>(quad), offset)),
        simd.to_floats(simd.add_ints(simd.byte_of_lane::<3>(quad), offset)),
    ]
}
