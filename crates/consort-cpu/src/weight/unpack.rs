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
/// 64-byte vectors of a step's small codes: quads of four columns.
const QUADS: usize = STEP / 4;
/// 64-byte vectors of a step's wide codes: pairs of columns.
const PAIRS: usize = STEP / 2;

/// A chunk of a panel as integers.
#[repr(C, align(64))]
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

    /// Unpacks tiles of integers, and asks for the memory of `ahead` meanwhile. What differs from format to format is
    /// decided once for the whole chunk.
    #[inline(always)]
    pub fn unpack<S: Simd>(&mut self, simd: S, layout: &Layout, integers: &Integers, tiles: &[u8], ahead: &[u8]) {
        self.unpack_scales(simd, layout, tiles);
        let tiles = Tiles { bytes: tiles, tile: layout.tile_bytes, scales: layout.scale_bytes, ahead };
        match (integers.wide, integers.bits, &integers.table) {
            (true, _, None) => self.wide_codes(simd, tiles),
            (true, _, Some(table)) => self.wide_nibbles(simd, tiles, table),
            (_, 2, _) => self.small_codes::<S, 2>(simd, tiles, None),
            (_, 3, _) => self.small_codes::<S, 3>(simd, tiles, None),
            (_, 4, None) => self.small_codes::<S, 4>(simd, tiles, None),
            (_, 4, Some(table)) => self.small_codes::<S, 4>(simd, tiles, Some(table)),
            (_, 5, _) => self.small_codes::<S, 5>(simd, tiles, None),
            _ => self.small_codes::<S, 6>(simd, tiles, None),
        }
    }

    /// Unpacks the scales of tiles, and their biases.
    #[inline(always)]
    pub fn unpack_scales<S: Simd>(&mut self, simd: S, layout: &Layout, tiles: &[u8]) {
        let tiles = Tiles { bytes: tiles, tile: layout.tile_bytes, scales: layout.scale_bytes, ahead: &[] };
        match layout.scales {
            Scales::One => {}
            Scales::Plain { number: Number::F32, .. } => self.plain_scales::<S, F32>(simd, layout, tiles),
            Scales::Plain { number: Number::F16, .. } => self.plain_scales::<S, F16>(simd, layout, tiles),
            Scales::Plain { number: Number::BF16, .. } => self.plain_scales::<S, BF16>(simd, layout, tiles),
            Scales::Plain { number: Number::E4M3, .. } => self.plain_scales::<S, E4M3>(simd, layout, tiles),
            Scales::Plain { number: Number::E8M0, .. } => self.plain_scales::<S, E8M0>(simd, layout, tiles),
            Scales::Nested { signed, minimum } => self.nested_scales(simd, layout, tiles, signed, minimum),
        }
    }

    /// Codes of at most 6 bits, with `BITS` vectors to a step, as [`pack_step`](super::pack) packed them.
    #[inline(always)]
    fn small_codes<S: Simd, const BITS: usize>(&mut self, simd: S, tiles: Tiles<'_>, table: Option<&[u8; 16]>) {
        let (out, _) = self.codes.as_chunks_mut::<QUADS>();
        let mut out = out.iter_mut().enumerate();
        for tile in tiles.codes() {
            let (steps, _) = tile.as_chunks::<BITS>();
            for (step, (i, out)) in steps.iter().zip(&mut out) {
                simd.prefetch(piece(tiles.ahead, i, CHUNK / STEP));
                unpack_step(simd, step, table, out);
            }
        }
    }

    /// Signed bytes.
    #[inline(always)]
    fn wide_codes<S: Simd>(&mut self, simd: S, tiles: Tiles<'_>) {
        let mut out = self.codes.as_chunks_mut::<2>().0.iter_mut().enumerate();
        for tile in tiles.codes() {
            for (from, (i, out)) in tile.iter().zip(&mut out) {
                simd.prefetch(piece(tiles.ahead, i, CHUNK / 4));
                let (halves, _) = from.as_chunks();
                simd.store_bytes(simd.widen_bytes(&halves[0]), &mut out[0]);
                simd.store_bytes(simd.widen_bytes(&halves[1]), &mut out[1]);
            }
        }
    }

    /// Nibbles that stand for signed bytes.
    #[inline(always)]
    fn wide_nibbles<S: Simd>(&mut self, simd: S, tiles: Tiles<'_>, table: &[u8; 16]) {
        let mut out = self.codes.as_chunks_mut::<4>().0.iter_mut().enumerate();
        for tile in tiles.codes() {
            for (from, (i, out)) in tile.iter().zip(&mut out) {
                simd.prefetch(piece(tiles.ahead, i, CHUNK / 8));
                let nibbles = simd.load_bytes(from);
                let mut bytes = [[0; 4 * LANES]; 2];
                simd.store_bytes(simd.lookup(table, simd.field(nibbles, 0, 15)), &mut bytes[0]);
                simd.store_bytes(simd.lookup(table, simd.field(nibbles, 4, 15)), &mut bytes[1]);
                for (half, out) in bytes.as_flattened().as_chunks().0.iter().zip(out) {
                    simd.store_bytes(simd.widen_bytes(half), out);
                }
            }
        }
    }

    /// A number for each group, then perhaps a bias for each.
    #[inline(always)]
    fn plain_scales<S: Simd, N: LoadNumber>(&mut self, simd: S, layout: &Layout, tiles: Tiles<'_>) {
        let Scales::Plain { bias, factor, .. } = layout.scales else { unreachable!("plain scales") };
        let factor = simd.splat(factor);
        // Groups of more than a step are repeated for each of its steps.
        let (groups, repeat) = (layout.groups, layout.repeat);
        let size = N::BYTES * LANES;
        let mut next = 0;
        for tile in tiles.scales() {
            for group in 0..groups {
                let scale = simd.mul(N::load(simd, &tile[group * size..][..size]), factor);
                for _ in 0..repeat {
                    simd.store(scale, &mut self.scales[next % GROUPS]);
                    if bias {
                        simd.store(
                            N::load(simd, &tile[(groups + group) * size..][..size]),
                            &mut self.biases[next % GROUPS],
                        );
                    }
                    next += 1;
                }
            }
        }
    }

    /// Two factors of the tile, then a byte or two for each group.
    #[inline(always)]
    fn nested_scales<S: Simd>(&mut self, simd: S, layout: &Layout, tiles: Tiles<'_>, signed: bool, minimum: bool) {
        // A nested tile fills a chunk.
        for tile in tiles.scales() {
            let (heads, bytes) = tile.split_at(2 * LANES * (1 + usize::from(minimum)));
            let (bytes, _) = bytes.as_chunks::<LANES>();
            let (heads, _) = heads.as_chunks();
            let d = simd.load_f16(&heads[0]);
            for (bytes, scale) in bytes[..layout.groups].iter().zip(&mut self.scales) {
                let value = if signed { simd.load_i8(bytes) } else { simd.load_u8(bytes) };
                simd.store(simd.mul(d, value), scale);
            }
            if minimum {
                let negative = simd.mul(simd.load_f16(&heads[1]), simd.splat(-1.0));
                for (bytes, bias) in bytes[layout.groups..].iter().zip(&mut self.biases) {
                    simd.store(simd.mul(negative, simd.load_u8(bytes)), bias);
                }
            }
        }
    }
}

/// The tiles of a chunk.
#[derive(Clone, Copy)]
struct Tiles<'a> {
    bytes: &'a [u8],
    tile: usize,
    scales: usize,
    /// What comes later.
    ahead: &'a [u8],
}

/// Piece `i` of `pieces` of about the same size.
#[inline(always)]
pub fn piece(bytes: &[u8], i: usize, pieces: usize) -> &[u8] {
    let len = bytes.len().div_ceil(pieces);
    &bytes[bytes.len().min(i * len)..bytes.len().min((i + 1) * len)]
}

impl<'a> Tiles<'a> {
    #[inline(always)]
    fn scales(self) -> impl Iterator<Item = &'a [u8]> {
        self.bytes.chunks_exact(self.tile).map(move |tile| &tile[..self.scales])
    }

    #[inline(always)]
    fn codes(self) -> impl Iterator<Item = &'a [Quads]> {
        self.bytes.chunks_exact(self.tile).map(move |tile| tile[self.scales..].as_chunks().0)
    }
}

/// One step of small codes.
#[inline(always)]
fn unpack_step<S: Simd, const BITS: usize>(
    simd: S,
    step: &[Quads; BITS],
    table: Option<&[u8; 16]>,
    out: &mut [Quads; QUADS],
) {
    if BITS < 4 {
        for quad in 0..QUADS {
            let mut code = simd.field(simd.load_bytes(&step[quad / 4]), 2 * (quad as u32 % 4), 3);
            if BITS == 3 {
                code = simd.or(code, bit(simd, simd.load_bytes(&step[BITS - 1]), quad, 2));
            }
            simd.store_bytes(code, &mut out[quad]);
        }
        return;
    }
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
        simd.store_bytes(low, &mut out[2 * i]);
        simd.store_bytes(high, &mut out[2 * i + 1]);
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

/// How 16 scales are read.
trait LoadNumber {
    const BYTES: usize;
    fn load<S: Simd>(simd: S, bytes: &[u8]) -> S::Floats;
}

struct F32;
struct F16;
struct BF16;
struct E4M3;
struct E8M0;

impl LoadNumber for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    fn load<S: Simd>(simd: S, bytes: &[u8]) -> S::Floats {
        let (values, _) = bytes.as_chunks();
        let mut floats = [0.0; LANES];
        for (float, bytes) in floats.iter_mut().zip(values) {
            *float = f32::from_le_bytes(*bytes);
        }
        simd.load(&floats)
    }
}

impl LoadNumber for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    fn load<S: Simd>(simd: S, bytes: &[u8]) -> S::Floats {
        simd.load_f16(&bytes.as_chunks().0[0])
    }
}

impl LoadNumber for BF16 {
    const BYTES: usize = 2;
    #[inline(always)]
    fn load<S: Simd>(simd: S, bytes: &[u8]) -> S::Floats {
        simd.load_bf16(&bytes.as_chunks().0[0])
    }
}

impl LoadNumber for E4M3 {
    const BYTES: usize = 1;
    #[inline(always)]
    fn load<S: Simd>(simd: S, bytes: &[u8]) -> S::Floats {
        simd.mul(simd.load_e4m3_div_256(&bytes.as_chunks().0[0]), simd.splat(256.0))
    }
}

impl LoadNumber for E8M0 {
    const BYTES: usize = 1;
    #[inline(always)]
    fn load<S: Simd>(simd: S, bytes: &[u8]) -> S::Floats {
        simd.load_e8m0(&bytes.as_chunks().0[0])
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
            Codes::F32 => {
                for (i, (out, bytes)) in self.0.iter_mut().zip(tiles.as_chunks::<{ 4 * LANES }>().0).enumerate() {
                    simd.prefetch(piece(ahead, i, CHUNK));
                    simd.store(F32::load(simd, bytes), out);
                }
            }
            Codes::F16 => {
                let (out, _) = self.0.as_chunks_mut::<2>();
                for (i, (out, bytes)) in out.iter_mut().zip(tiles.as_chunks().0.as_chunks::<2>().0).enumerate() {
                    simd.prefetch(piece(ahead, i, CHUNK / 2));
                    simd.store(simd.load_f16(&bytes[0]), &mut out[0]);
                    simd.store(simd.load_f16(&bytes[1]), &mut out[1]);
                }
            }
            Codes::BF16 => {
                let (out, _) = self.0.as_chunks_mut::<2>();
                for (i, (out, bytes)) in out.iter_mut().zip(tiles.as_chunks().0.as_chunks::<2>().0).enumerate() {
                    simd.prefetch(piece(ahead, i, CHUNK / 2));
                    simd.store(simd.load_bf16(&bytes[0]), &mut out[0]);
                    simd.store(simd.load_bf16(&bytes[1]), &mut out[1]);
                }
            }
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
                    for (out, bytes) in out.iter_mut().zip(codes.as_chunks().0) {
                        simd.store(simd.mul(simd.load_e4m3_div_256(bytes), scale), out);
                    }
                }
            }
        }
    }

    /// `scale · (code - offset) + bias`, in the order of operations that the formats are defined by. Goes on to the end of
    /// the chunk: what is past the last column is not looked at.
    #[inline(always)]
    fn scale_integers<S: Simd>(&mut self, simd: S, layout: &Layout, codes: &Integers, from: &IntegerChunk) {
        match (codes.wide, layout.group < STEP) {
            (true, _) => self.scale_wide(simd, layout, codes, from),
            (false, true) => self.scale_small::<S, { QUADS / 2 }>(simd, layout, codes, from),
            (false, false) => self.scale_small::<S, QUADS>(simd, layout, codes, from),
        }
    }

    #[inline(always)]
    fn scale_small<S: Simd, const QUADS: usize>(
        &mut self,
        simd: S,
        layout: &Layout,
        codes: &Integers,
        from: &IntegerChunk,
    ) {
        let (out, _) = self.0.as_chunks_mut::<4>();
        let groups = out.as_chunks_mut::<QUADS>().0.iter_mut().zip(from.codes.as_chunks::<QUADS>().0);
        for (group, (out, quads)) in groups.enumerate() {
            let scaling = Scaling::new(simd, layout, codes, from, group);
            for (out, quad) in out.iter_mut().zip(quads) {
                let quad = simd.load_bytes(quad);
                simd.store(scaling.apply(simd, simd.byte_of_lane::<0>(quad)), &mut out[0]);
                simd.store(scaling.apply(simd, simd.byte_of_lane::<1>(quad)), &mut out[1]);
                simd.store(scaling.apply(simd, simd.byte_of_lane::<2>(quad)), &mut out[2]);
                simd.store(scaling.apply(simd, simd.byte_of_lane::<3>(quad)), &mut out[3]);
            }
        }
    }

    #[inline(always)]
    fn scale_wide<S: Simd>(&mut self, simd: S, layout: &Layout, codes: &Integers, from: &IntegerChunk) {
        let (out, _) = self.0.as_chunks_mut::<2>();
        let groups = out.as_chunks_mut::<PAIRS>().0.iter_mut().zip(from.codes.as_chunks::<PAIRS>().0);
        for (group, (out, pairs)) in groups.enumerate() {
            let scaling = Scaling::new(simd, layout, codes, from, group);
            for (out, pair) in out.iter_mut().zip(pairs) {
                let pair = simd.load_bytes(pair);
                simd.store(scaling.apply(simd, simd.short_of_lane::<0>(pair)), &mut out[0]);
                simd.store(scaling.apply(simd, simd.short_of_lane::<1>(pair)), &mut out[1]);
            }
        }
    }
}

/// What turns the whole codes of a group into values.
struct Scaling<S: Simd> {
    offset: S::Ints,
    scale: S::Floats,
    bias: S::Floats,
    biased: bool,
}

impl<S: Simd> Scaling<S> {
    #[inline(always)]
    fn new(simd: S, layout: &Layout, codes: &Integers, from: &IntegerChunk, group: usize) -> Self {
        Self {
            offset: simd.splat_int(-i32::from(codes.offset)),
            scale: simd.load(&from.scales[group]),
            bias: simd.load(&from.biases[group]),
            biased: layout.has_bias(),
        }
    }

    #[inline(always)]
    fn apply(&self, simd: S, code: S::Ints) -> S::Floats {
        let product = simd.mul(self.scale, simd.to_floats(simd.add_ints(code, self.offset)));
        if self.biased { simd.add(product, self.bias) } else { product }
    }
}
