//! Products of f32.
//!
//! Many rows multiply a chunk that was unpacked once for all of them. A few take the weights from memory themselves: each vector
//! of weights goes from the load to the sums in registers. Both add the products of a sum in the order of the columns, so they
//! give the same bits.
#![expect(clippy::needless_range_loop, reason = "indices name registers, and compilers unroll them")]

use super::{COPIED_ROWS, FEW_ROWS, PANELS, Piece, Sums, Task};
use crate::activations::FloatRow;
use crate::isa::{Kernel, LANES, Simd};
use crate::microkernel::{self, Vectors, multiply};
use crate::weight::{
    AHEAD_BYTES, CHUNK, Codes, FloatChunk, IntegerChunk, Integers, Layout, LoadNumber, LoadQuad, Number, QUADS, STEP,
    Scales, Scaling, numbers, numbers::Columns, unpack_step,
};

/// Columns between two requests for memory.
const BURST: usize = 8;

impl Task<'_> {
    /// Products of f32 activations with weights of any format.
    #[inline(always)]
    #[expect(clippy::too_many_arguments, reason = "what a task is made of, borrowed apart")]
    pub(super) fn floats<S: Simd>(
        &self,
        simd: S,
        piece: Piece,
        x: &[FloatRow],
        integers: &mut [IntegerChunk; PANELS],
        weights: &mut [FloatChunk; PANELS],
        copies: &mut [FloatRow; COPIED_ROWS],
        sums: &mut Sums,
    ) {
        if self.rows.len() <= FEW_ROWS && piece.columns.is_multiple_of(STEP) {
            return self.few_floats(simd, piece, x, integers, sums);
        }
        for (panel, weights) in piece.panels.clone().zip(&mut *weights) {
            let (tiles, ahead) = self.w.chunk(panel, piece.chunk);
            weights.unpack(simd, self.w.layout(), &mut integers[0], tiles, ahead);
        }
        let w = Vectors { lanes: FloatChunk::lanes(weights), stride: CHUNK, step: 1, count: piece.panels.len() };
        let all = self.rows.len();
        let rows = if self.neighbours(x, 0, all).is_some() { all } else { COPIED_ROWS };
        for from in (0..all).step_by(rows) {
            let x = self.gather(x, from, rows.min(all - from), copies);
            let mut sums = microkernel::Sums { lanes: sums[from..].as_flattened_mut(), stride: PANELS };
            multiply(simd, FloatRow::values(x), 0..piece.columns, w, &mut sums, &[]);
        }
    }

    /// Few rows: two panels at a time, so that sums wait less for each other.
    #[inline(always)]
    fn few_floats<S: Simd>(
        &self,
        simd: S,
        piece: Piece,
        x: &[FloatRow],
        integers: &mut [IntegerChunk; PANELS],
        sums: &mut Sums,
    ) {
        let layout = self.w.layout();
        let count = piece.panels.len();
        let mut tiles = [&[][..]; PANELS];
        for (tiles, panel) in tiles.iter_mut().zip(piece.panels.clone()) {
            *tiles = self.w.chunk(panel, piece.chunk).0;
        }
        let mut from = 0;
        while from < self.rows.len() {
            let rows = match self.rows.len() - from {
                8.. => 8,
                4.. => 4,
                left => left.min(2),
            };
            let block = Block { layout, tiles: &tiles, integers, count, sums: &mut sums[from..from + rows] };
            let x = |i: usize| self.row(x, from + i);
            match rows {
                8 => simd.call(Few::<8, 1>::new(block, x)),
                4 => simd.call(Few::<4, 2>::new(block, x)),
                2 => simd.call(Few::<2, 2>::new(block, x)),
                _ => simd.call(Few::<1, 2>::new(block, x)),
            }
            from += rows;
        }
    }
}

/// A chunk of some panels.
struct Block<'a> {
    layout: &'a Layout,
    tiles: &'a [&'a [u8]; PANELS],
    /// Memory for the scales of integer codes.
    integers: &'a mut [IntegerChunk; PANELS],
    /// How many panels.
    count: usize,
    /// Of some rows.
    sums: &'a mut [[[f32; LANES]; PANELS]],
}

/// Multiplies `COUNT` panels at a time with `ROWS` rows. The last panel takes all places that are left.
struct Few<'a, const ROWS: usize, const COUNT: usize> {
    block: Block<'a>,
    x: [&'a FloatRow; ROWS],
}

impl<'a, const ROWS: usize, const COUNT: usize> Few<'a, ROWS, COUNT> {
    #[inline(always)]
    fn new(block: Block<'a>, x: impl Fn(usize) -> &'a FloatRow) -> Self {
        Self { block, x: std::array::from_fn(x) }
    }
}

impl<const ROWS: usize, const COUNT: usize> Kernel for Few<'_, ROWS, COUNT> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { block: Block { layout, tiles, integers, count, sums }, x } = self;
        for first in (0..count).step_by(COUNT) {
            let place = |p: usize| (first + p).min(count - 1);
            let panels = Panels { layout, tiles: std::array::from_fn(|p| tiles[place(p)]) };
            let mut registers = [[simd.splat(0.0); COUNT]; ROWS];
            for i in 0..ROWS {
                for p in 0..COUNT {
                    registers[i][p] = simd.load(&sums[i][place(p)]);
                }
            }
            match &layout.codes {
                Codes::F32 => panels.columns::<S, Columns<numbers::F32>, ROWS>(simd, x, &mut registers),
                Codes::F16 => panels.columns::<S, Columns<numbers::F16>, ROWS>(simd, x, &mut registers),
                Codes::BF16 => panels.columns::<S, numbers::Pairs, ROWS>(simd, x, &mut registers),
                Codes::E4M3 => panels.columns::<S, numbers::PairsOfE4M3, ROWS>(simd, x, &mut registers),
                Codes::Integers(codes) if layout.group < STEP => {
                    panels.steps::<S, { QUADS / 2 }, ROWS>(simd, codes, integers, x, &mut registers);
                }
                Codes::Integers(codes) => panels.steps::<S, QUADS, ROWS>(simd, codes, integers, x, &mut registers),
            }
            for i in 0..ROWS {
                for p in 0..COUNT {
                    simd.store(registers[i][p], &mut sums[i][place(p)]);
                }
            }
        }
    }
}

/// A chunk of `COUNT` panels.
struct Panels<'a, const COUNT: usize> {
    layout: &'a Layout,
    tiles: [&'a [u8]; COUNT],
}

impl<const COUNT: usize> Panels<'_, COUNT> {
    /// Numbers, column by column.
    #[inline(always)]
    fn columns<S: Simd, Q: LoadQuad, const ROWS: usize>(
        &self,
        simd: S,
        x: [&FloatRow; ROWS],
        sums: &mut [[S::Floats; COUNT]; ROWS],
    ) {
        let Layout { tile_bytes, scale_bytes, block, scales, .. } = *self.layout;
        let burst_bytes = BURST / 4 * Q::BYTES;
        let (mut at, mut column) = (0, 0);
        while at < self.tiles[0].len() {
            let mut scale = [simd.splat(1.0); COUNT];
            for p in 0..COUNT {
                let head = &self.tiles[p][at..at + tile_bytes];
                scale[p] = match scales {
                    Scales::Plain { number: Number::E8M0, .. } => numbers::E8M0::load(simd, head),
                    Scales::Plain { .. } => numbers::F32::load(simd, head),
                    Scales::One | Scales::Nested { .. } => scale[p],
                };
            }
            at += scale_bytes;
            for _ in 0..block / BURST {
                let mut columns = [&[][..]; COUNT];
                for p in 0..COUNT {
                    columns[p] = &self.tiles[p][at..at + burst_bytes];
                    for line in columns[p].as_chunks().0 {
                        simd.prefetch_after(line, AHEAD_BYTES);
                    }
                }
                at += burst_bytes;
                for quad in 0..BURST / 4 {
                    let mut quads = [[simd.splat(0.0); 4]; COUNT];
                    for p in 0..COUNT {
                        quads[p] = Q::load(simd, &columns[p][quad * Q::BYTES..(quad + 1) * Q::BYTES]);
                    }
                    for k in 0..4 {
                        let mut lanes = [simd.splat(0.0); COUNT];
                        for p in 0..COUNT {
                            lanes[p] = if scale_bytes > 0 { simd.mul(quads[p][k], scale[p]) } else { quads[p][k] };
                        }
                        add(simd, x, column + 4 * quad + k, lanes, sums);
                    }
                }
                column += BURST;
            }
        }
    }

    /// Integer codes in groups of `GROUP` quads, step by step.
    #[inline(always)]
    fn steps<S: Simd, const GROUP: usize, const ROWS: usize>(
        &self,
        simd: S,
        codes: &Integers,
        memory: &mut [IntegerChunk; PANELS],
        x: [&FloatRow; ROWS],
        sums: &mut [[S::Floats; COUNT]; ROWS],
    ) {
        let Layout { tile_bytes, scale_bytes, block, .. } = *self.layout;
        let step_bytes = codes.step_bytes();
        let (mut at, mut place) = (0, 0);
        while at < self.tiles[0].len() {
            for p in 0..COUNT {
                let tile = &self.tiles[p][at..at + tile_bytes];
                memory[p].factors.unpack_tile(simd, self.layout, tile, QUADS / GROUP * place);
                for line in tile[..scale_bytes].as_chunks().0 {
                    simd.prefetch_after(line, AHEAD_BYTES);
                }
            }
            at += scale_bytes;
            for _ in 0..block / STEP {
                for p in 0..COUNT {
                    let quads = unpack_step(simd, codes, &self.tiles[p][at..at + step_bytes]);
                    for line in self.tiles[p][at..at + step_bytes].as_chunks().0 {
                        simd.prefetch_after(line, AHEAD_BYTES);
                    }
                    for quad in 0..QUADS {
                        simd.store_bytes(quads[quad], &mut memory[p].codes[quad]);
                    }
                }
                at += step_bytes;
                for half in 0..QUADS / GROUP {
                    let group = QUADS / GROUP * place + half;
                    let mut scaling = [Scaling::new(simd, self.layout, codes, &memory[0].factors, group); COUNT];
                    for p in 1..COUNT {
                        scaling[p] = Scaling::new(simd, self.layout, codes, &memory[p].factors, group);
                    }
                    for quad in GROUP * half..GROUP * (half + 1) {
                        let first = STEP * place + 4 * quad;
                        let mut quads = [simd.load_bytes(&memory[0].codes[quad]); COUNT];
                        for p in 1..COUNT {
                            quads[p] = simd.load_bytes(&memory[p].codes[quad]);
                        }
                        add_bytes::<S, 0, ROWS, COUNT>(simd, x, first, &quads, &scaling, sums);
                        add_bytes::<S, 1, ROWS, COUNT>(simd, x, first, &quads, &scaling, sums);
                        add_bytes::<S, 2, ROWS, COUNT>(simd, x, first, &quads, &scaling, sums);
                        add_bytes::<S, 3, ROWS, COUNT>(simd, x, first, &quads, &scaling, sums);
                    }
                }
                place = (place + 1) % (CHUNK / STEP);
            }
        }
    }
}

/// Adds the products of byte `BYTE` of a quad, which begins with column `first`.
#[inline(always)]
fn add_bytes<S: Simd, const BYTE: u32, const ROWS: usize, const COUNT: usize>(
    simd: S,
    x: [&FloatRow; ROWS],
    first: usize,
    quads: &[S::Bytes; COUNT],
    scaling: &[Scaling<S>; COUNT],
    sums: &mut [[S::Floats; COUNT]; ROWS],
) {
    let mut lanes = [simd.splat(0.0); COUNT];
    for p in 0..COUNT {
        lanes[p] = scaling[p].apply(simd, simd.byte_of_lane::<BYTE>(quads[p]));
    }
    add::<S, ROWS, COUNT>(simd, x, first + BYTE as usize, lanes, sums);
}

/// Adds the products of one column.
#[inline(always)]
fn add<S: Simd, const ROWS: usize, const COUNT: usize>(
    simd: S,
    x: [&FloatRow; ROWS],
    column: usize,
    lanes: [S::Floats; COUNT],
    sums: &mut [[S::Floats; COUNT]; ROWS],
) {
    for i in 0..ROWS {
        let x = simd.splat(x[i].0[column % CHUNK]);
        for p in 0..COUNT {
            sums[i][p] = simd.fma(x, lanes[p], sums[i][p]);
        }
    }
}
