//! Products of whole numbers: int8 activations with weights that are whole numbers times a scale.
//!
//! Many rows multiply a chunk that was unpacked once for all of them. A few take a whole panel from memory themselves: codes and
//! scales go from the load to the products in registers. Both add the products of a group in [`Group::multiply`], so they give
//! the same bits.
#![expect(clippy::needless_range_loop, reason = "indices name registers, and compilers unroll them")]

use std::marker::PhantomData;

use super::{Piece, Sums, Task};
use crate::activations::IntegerRow;
use crate::isa::{Kernel, Quads, Simd};
use crate::weight::numbers::{E4M3, E8M0, F16};
use crate::weight::scales::{Factor, Nested, Plain, ReadScales};
use crate::weight::{CHUNK, IntegerChunk, Integers, Layout, Number, QUADS, STEP, Scales, unpack_bits};

/// Steps of a chunk.
const STEPS: usize = CHUNK / STEP;
/// Quads of half a step.
const HALF: usize = QUADS / 2;

impl Task<'_> {
    /// Products of rounded activations with one chunk of integer codes, for many rows.
    #[inline(always)]
    pub(super) fn integers<S: Simd>(
        &self,
        simd: S,
        piece: Piece,
        codes: &Integers,
        x: &[IntegerRow],
        weights: &mut [IntegerChunk],
        sums: &mut Sums,
    ) {
        let layout = self.w.layout();
        for (panel, weights) in piece.panels.clone().zip(&mut *weights) {
            let (tiles, ahead) = self.w.chunk(panel, piece.chunk);
            weights.unpack(simd, layout, codes, tiles, ahead);
        }
        let (bias, steps) = (layout.has_bias(), piece.columns.div_ceil(STEP));
        // Where sums hold the largest products, all are alike.
        let largest = if S::sums_hold(u8::MAX) > 0 { u8::MAX } else { codes.largest };
        for (panel, chunk) in weights[..piece.panels.len()].iter().enumerate() {
            match (largest, layout.group < STEP) {
                (..=15, false) => self.blocks(simd, Unpacked::<15, QUADS> { chunk, bias, steps }, x, panel, sums),
                (..=15, true) => self.blocks(simd, Unpacked::<15, HALF> { chunk, bias, steps }, x, panel, sums),
                (..=31, false) => self.blocks(simd, Unpacked::<31, QUADS> { chunk, bias, steps }, x, panel, sums),
                (..=31, true) => self.blocks(simd, Unpacked::<31, HALF> { chunk, bias, steps }, x, panel, sums),
                (..=63, false) => self.blocks(simd, Unpacked::<63, QUADS> { chunk, bias, steps }, x, panel, sums),
                (..=63, true) => self.blocks(simd, Unpacked::<63, HALF> { chunk, bias, steps }, x, panel, sums),
                (_, false) => self.blocks(simd, Unpacked::<255, QUADS> { chunk, bias, steps }, x, panel, sums),
                (_, true) => self.blocks(simd, Unpacked::<255, HALF> { chunk, bias, steps }, x, panel, sums),
            }
        }
    }

    /// Products of rounded activations with all chunks of integer codes, for few rows.
    #[inline(always)]
    pub(super) fn few_integers<S: Simd>(&self, simd: S, codes: &Integers, x: &[IntegerRow], sums: &mut Sums) {
        let layout = self.w.layout();
        let table = codes.table.as_ref().unwrap_or(&[0; 16]);
        for (index, panel) in self.panels.clone().enumerate() {
            let tiles = Tiles { layout, table, bytes: self.w.panel(panel) };
            // One line for each way in which codes and scales are stored, with what no other has as a constant.
            macro_rules! with {
                ($codes:ty, $scales:expr, $group:expr) => {
                    self.blocks(simd, Packed::<$codes, _, { $group }>::new(tiles, $scales), x, index, sums)
                };
            }
            match (layout.scales, codes.bits, codes.largest) {
                (Scales::Plain { number: Number::F16, bias: false, factor }, bits, largest) => {
                    let scales = Plain::<_, false> { number: F16, factor };
                    match (bits, largest) {
                        (4, ..=15) => with!(Codes<4, 15>, scales, QUADS),
                        (4, _) => with!(Table<255>, scales, QUADS),
                        (5, _) => with!(Codes<5, 31>, scales, QUADS),
                        _ => with!(Codes<8, 255>, scales, QUADS),
                    }
                }
                (Scales::Plain { number: Number::E4M3, factor, .. }, ..) => {
                    with!(Table<31>, Plain::<_, false> { number: E4M3, factor }, HALF)
                }
                (Scales::Plain { number: Number::E8M0, factor, .. }, ..) => {
                    with!(Table<31>, Plain::<_, false> { number: E8M0, factor }, QUADS)
                }
                (Scales::Plain { number: Number::F16, bias: true, factor }, 4, _) => {
                    with!(Codes<4, 15>, Plain::<_, true> { number: F16, factor }, QUADS)
                }
                (Scales::Plain { number, bias: true, factor }, bits, _) => {
                    let scales = Plain::<_, true> { number, factor };
                    match bits {
                        2 => with!(Codes<2, 15>, scales, QUADS),
                        3 => with!(Codes<3, 15>, scales, QUADS),
                        4 => with!(Codes<4, 15>, scales, QUADS),
                        5 => with!(Codes<5, 31>, scales, QUADS),
                        6 => with!(Codes<6, 63>, scales, QUADS),
                        _ => with!(Codes<8, 255>, scales, QUADS),
                    }
                }
                (Scales::Nested { minimum: true, .. }, 2, _) => with!(Codes<2, 15>, Nested::<false, true>, HALF),
                (Scales::Nested { minimum: true, .. }, 4, _) => with!(Codes<4, 15>, Nested::<false, true>, QUADS),
                (Scales::Nested { minimum: true, .. }, ..) => with!(Codes<5, 31>, Nested::<false, true>, QUADS),
                (Scales::Nested { .. }, 3, _) => with!(Codes<3, 15>, Nested::<true, false>, HALF),
                (Scales::Nested { .. }, 4, _) => with!(Table<255>, Nested::<true, false>, QUADS),
                (Scales::Nested { .. }, ..) => with!(Codes<6, 63>, Nested::<true, false>, HALF),
                (Scales::One | Scales::Plain { .. }, ..) => {
                    unreachable!("no format has integer codes with such scales")
                }
            }
        }
    }

    /// Adds the products of all rows with some weights to the sums of panel `panel`.
    #[inline(always)]
    fn blocks<S: Simd, W: Weights>(&self, simd: S, w: W, x: &[IntegerRow], panel: usize, sums: &mut Sums) {
        simd.call(Multiply { task: self, w, x, panel, sums });
    }
}

/// Multiplies all rows of a task with some weights. A kernel of its own for each kind of weights: all of them in one function
/// take compilers minutes.
struct Multiply<'a, 't, W> {
    task: &'a Task<'t>,
    w: W,
    /// One or more chunks.
    x: &'a [IntegerRow],
    panel: usize,
    sums: &'a mut Sums,
}

impl<W: Weights> Kernel for Multiply<'_, '_, W> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let (all, most) = (self.task.rows.len(), if S::REGISTERS >= 32 { 8 } else { 6 });
        let mut from = 0;
        while from < all {
            // Where there is no block of so many rows, the last one is multiplied more than once.
            from += match most.min(all - from) {
                1 => self.block::<S, 1>(simd, from),
                2 => self.block::<S, 2>(simd, from),
                3 => self.block::<S, 3>(simd, from),
                4 => self.block::<S, 4>(simd, from),
                5 | 6 => self.block::<S, 6>(simd, from),
                _ => self.block::<S, 8>(simd, from),
            };
        }
    }
}

impl<W: Weights> Multiply<'_, '_, W> {
    /// Multiplies `ROWS` rows from row `from` on, or as many as there are. Returns how many.
    #[inline(always)]
    fn block<S: Simd, const ROWS: usize>(&mut self, simd: S, from: usize) -> usize {
        let Self { task, w, x, panel, sums } = self;
        let last = task.rows.len() - 1;
        let row = |i: usize| task.group.rows.input(task.rows.start + last.min(from + i));
        let x = Rows { x, rows_of_chunk: task.x_rows, rows: std::array::from_fn(row) };
        let sums: &mut [_; ROWS] = (&mut sums[from..from + ROWS]).try_into().expect("as many sums as rows");
        let mut registers = [simd.splat(0.0); ROWS];
        for i in 0..ROWS {
            registers[i] = simd.load(&sums[i][*panel]);
        }
        w.multiply(simd, x, &mut registers);
        for i in 0..ROWS {
            simd.store(registers[i], &mut sums[i][*panel]);
        }
        ROWS
    }
}

/// `ROWS` rows of activations.
#[derive(Clone, Copy)]
struct Rows<'a, const ROWS: usize> {
    /// One or more chunks.
    x: &'a [IntegerRow],
    rows_of_chunk: usize,
    rows: [usize; ROWS],
}

impl<'a, const ROWS: usize> Rows<'a, ROWS> {
    /// Of one chunk.
    #[inline(always)]
    fn chunk(&self, chunk: usize) -> [&'a IntegerRow; ROWS] {
        let x = &self.x[chunk * self.rows_of_chunk..];
        self.rows.map(|row| &x[row])
    }
}

/// Weights of one panel.
trait Weights: Copy {
    /// `sums[i] += x[i] · w`.
    fn multiply<S: Simd, const ROWS: usize>(self, simd: S, x: Rows<'_, ROWS>, sums: &mut [S::Floats; ROWS]);
}

/// A chunk that was unpacked, in groups of `GROUP` quads.
#[derive(Clone, Copy)]
struct Unpacked<'a, const LARGEST: u8, const GROUP: usize> {
    chunk: &'a IntegerChunk,
    bias: bool,
    steps: usize,
}

impl<const LARGEST: u8, const GROUP: usize> Weights for Unpacked<'_, LARGEST, GROUP> {
    #[inline(always)]
    fn multiply<S: Simd, const ROWS: usize>(self, simd: S, x: Rows<'_, ROWS>, sums: &mut [S::Floats; ROWS]) {
        let x = x.chunk(0);
        let codes = self.chunk.codes.as_chunks::<GROUP>().0;
        let groups = (QUADS / GROUP * self.steps).min(codes.len());
        for group in 0..groups {
            let mut quads = [simd.load_bytes(&codes[group][0]); GROUP];
            for quad in 1..GROUP {
                quads[quad] = simd.load_bytes(&codes[group][quad]);
            }
            let factors = &self.chunk.factors;
            let scale = simd.load(&factors.scales[group]);
            let bias = if self.bias { Some(simd.load(&factors.biases[group])) } else { None };
            Group::<S, GROUP> { quads, largest: LARGEST, scale, bias }.multiply(simd, x, group, sums);
        }
    }
}

/// A panel as it is stored.
#[derive(Clone, Copy)]
struct Tiles<'a> {
    layout: &'a Layout,
    /// What codes stand for, if not for themselves.
    table: &'a [u8; 16],
    bytes: &'a [u8],
}

/// A panel as it is stored, and how its codes and scales are read, in groups of `GROUP` quads.
#[derive(Clone, Copy)]
struct Packed<'a, C, R, const GROUP: usize> {
    tiles: Tiles<'a>,
    scales: R,
    codes: PhantomData<C>,
}

impl<'a, C: Steps, R: ReadScales, const GROUP: usize> Packed<'a, C, R, GROUP> {
    #[inline(always)]
    fn new(tiles: Tiles<'a>, scales: R) -> Self {
        Self { tiles, scales, codes: PhantomData }
    }
}

impl<C: Steps, R: ReadScales, const GROUP: usize> Weights for Packed<'_, C, R, GROUP> {
    #[inline(always)]
    fn multiply<S: Simd, const ROWS: usize>(self, simd: S, x: Rows<'_, ROWS>, sums: &mut [S::Floats; ROWS]) {
        let Self { tiles: Tiles { layout, table, bytes }, scales, .. } = self;
        let ahead = ahead_bytes(ROWS, C::VECTORS);
        let step_bytes = C::VECTORS * size_of::<Quads>();
        let groups_of_step = QUADS / GROUP;
        let groups = R::STEPS * groups_of_step;
        let scale_bytes = scales.bytes(groups);
        assert_eq!((groups, scale_bytes), (layout.groups, layout.scale_bytes), "the layout that this is for");
        let mut at = 0;
        let mut chunk = 0;
        while at < bytes.len() {
            let x = x.chunk(chunk);
            chunk += 1;
            let mut place = 0;
            while place < STEPS && at < bytes.len() {
                let head = &bytes[at..at + scale_bytes];
                at += scale_bytes;
                for line in head.as_chunks().0 {
                    simd.prefetch_after(line, ahead);
                }
                let heads = scales.heads(simd, head);
                for step in 0..R::STEPS {
                    for _ in 0..layout.repeat {
                        let codes = bytes[at..at + step_bytes].as_chunks().0;
                        at += step_bytes;
                        for line in 0..C::VECTORS {
                            simd.prefetch_after(&codes[line], ahead);
                        }
                        let all = C::unpack(simd, codes, table);
                        for half in 0..groups_of_step {
                            let mut quads = [all[0]; GROUP];
                            quads.copy_from_slice(&all[GROUP * half..GROUP * (half + 1)]);
                            let group = groups_of_step * step + half;
                            let Factor { scale, bias } = scales.group(simd, heads, head, groups, group);
                            let bias = if R::BIAS { Some(bias) } else { None };
                            // Where the compiler sees that no place is past a chunk, it checks none.
                            let group = groups_of_step * (place % STEPS) + half;
                            Group { quads, largest: C::LARGEST, scale, bias }.multiply(simd, x, group, sums);
                        }
                        place += 1;
                    }
                }
            }
        }
    }
}

/// How far ahead memory is asked for. A processor looks ahead by itself, if it has time to; what it is asked for takes some of
/// the few misses that a core holds open. So the products of few rows ask only for what the second-level cache has by then,
/// and those of more, which take longer than memory, for what it has not.
const fn ahead_bytes(rows: usize, vectors_of_step: usize) -> usize {
    if rows * QUADS > 5 * vectors_of_step { 2048 } else { 256 }
}

/// How the codes of a step are read.
trait Steps: Copy {
    /// Vectors of a step.
    const VECTORS: usize;
    /// No code is larger.
    const LARGEST: u8;
    /// Reads them.
    fn unpack<S: Simd>(simd: S, step: &[Quads], table: &[u8; 16]) -> [S::Bytes; QUADS];
}

/// Codes of so many bits.
#[derive(Clone, Copy)]
struct Codes<const BITS: usize, const LARGEST: u8>;

impl<const BITS: usize, const LARGEST: u8> Steps for Codes<BITS, LARGEST> {
    const VECTORS: usize = BITS;
    const LARGEST: u8 = LARGEST;
    #[inline(always)]
    fn unpack<S: Simd>(simd: S, step: &[Quads], _table: &[u8; 16]) -> [S::Bytes; QUADS] {
        unpack_bits::<S, BITS>(simd, step, None)
    }
}

/// Codes of four bits that stand for others.
#[derive(Clone, Copy)]
struct Table<const LARGEST: u8>;

impl<const LARGEST: u8> Steps for Table<LARGEST> {
    const VECTORS: usize = 4;
    const LARGEST: u8 = LARGEST;
    #[inline(always)]
    fn unpack<S: Simd>(simd: S, step: &[Quads], table: &[u8; 16]) -> [S::Bytes; QUADS] {
        unpack_bits::<S, 4>(simd, step, Some(table))
    }
}

/// `GROUP` quads of weights that share a scale.
struct Group<S: Simd, const GROUP: usize> {
    quads: [S::Bytes; GROUP],
    /// No code is larger: a constant wherever this is used.
    largest: u8,
    scale: S::Floats,
    bias: Option<S::Floats>,
}

impl<S: Simd, const GROUP: usize> Group<S, GROUP> {
    /// Adds the products with group `group` of some rows of activations, which are whole numbers before they are scaled.
    #[inline(always)]
    fn multiply<const ROWS: usize>(&self, simd: S, x: [&IntegerRow; ROWS], group: usize, sums: &mut [S::Floats; ROWS]) {
        let mut totals = [simd.splat_int(0); ROWS];
        let mut columns = [&[[0; 4]; GROUP]; ROWS];
        for i in 0..ROWS {
            totals[i] = simd.splat_int(x[i].offsets[group]);
            columns[i] = &x[i].codes.as_chunks().0.as_chunks().0[group];
        }
        self.dot(simd, columns, &mut totals);
        for i in 0..ROWS {
            let scale = simd.mul(self.scale, simd.splat(x[i].scales[group]));
            sums[i] = simd.fma(simd.to_floats(totals[i]), scale, sums[i]);
        }
        if let Some(bias) = self.bias {
            for i in 0..ROWS {
                sums[i] = simd.fma(bias, simd.splat(x[i].sums[group]), sums[i]);
            }
        }
    }

    /// `totals[i] += x[i] · w`.
    #[inline(always)]
    fn dot<const ROWS: usize>(&self, simd: S, x: [&[[u8; 4]; GROUP]; ROWS], totals: &mut [S::Ints; ROWS]) {
        let hold = S::sums_hold(self.largest).min(GROUP);
        if hold == 0 {
            for quad in 0..GROUP {
                for i in 0..ROWS {
                    totals[i] = simd.dot_centered_bytes(totals[i], self.quads[quad], x[i][quad]);
                }
            }
            return;
        }
        // A power of two, so that whole sums fill a group.
        let hold = 1 << hold.ilog2();
        for first in (0..GROUP).step_by(hold) {
            let mut sums = [simd.start_sums(totals[0]); ROWS];
            for i in 1..ROWS {
                sums[i] = simd.start_sums(totals[i]);
            }
            for quad in first..first + hold {
                for i in 0..ROWS {
                    sums[i] = simd.dot_bytes(sums[i], self.quads[quad], x[i][quad]);
                }
            }
            for i in 0..ROWS {
                totals[i] = simd.total(sums[i], totals[i]);
            }
        }
    }
}
