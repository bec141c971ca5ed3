//! Products of whole numbers: int8 activations with weights that are whole numbers times a scale.
//!
//! Many rows multiply a chunk that was unpacked once for all of them. A few take the codes from memory themselves, step by
//! step: what they need is unpacked in registers while the products of the step before are summed up. It is one kernel,
//! because unpacked codes are codes of 8 bits.
#![expect(clippy::needless_range_loop, reason = "indices name registers, and compilers unroll them")]

use std::marker::PhantomData;

use super::{FEW_ROWS, PANELS, Piece, Sums, Task};
use crate::activations::IntegerRow;
use crate::isa::{Kernel, LANES, Quads, Simd};
use crate::weight::{AHEAD_BYTES, CHUNK, Factors, IntegerChunk, Integers, Layout, QUADS, STEP, unpack_bits};

/// Steps of a chunk.
const STEPS: usize = CHUNK / STEP;
/// Quads of half a step.
const HALF: usize = QUADS / 2;

impl Task<'_> {
    /// Products of rounded activations with integer codes.
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
        let few = self.rows.len() <= FEW_ROWS;
        let count = piece.panels.len();
        if !few {
            for (panel, weights) in piece.panels.clone().zip(&mut *weights) {
                let (tiles, ahead) = self.w.chunk(panel, piece.chunk);
                weights.unpack(simd, layout, codes, tiles, ahead);
            }
        }
        let halves = layout.group < STEP;
        for (index, (panel, weights)) in piece.panels.clone().zip(&mut weights[..count]).enumerate() {
            let mut from = 0;
            while from < self.rows.len() {
                let mut packed = Packed {
                    layout,
                    table: codes.table.as_ref().unwrap_or(&[0; 16]),
                    bytes: self.w.chunk(panel, piece.chunk).0,
                    factors: &mut weights.factors,
                };
                let rows = next_block::<S>(self.rows.len() - from);
                let sums = PanelSums { rows: &mut sums[from..from + rows], panel: index };
                let x = |i: usize| self.row(x, from + i);
                if few {
                    match (codes.bits, codes.largest, halves) {
                        (2, _, false) => rows_of::<S, Codes<2, 15, AHEAD_BYTES>, QUADS>(simd, packed, x, sums),
                        (2, _, true) => rows_of::<S, Codes<2, 15, AHEAD_BYTES>, HALF>(simd, packed, x, sums),
                        (3, _, false) => rows_of::<S, Codes<3, 15, AHEAD_BYTES>, QUADS>(simd, packed, x, sums),
                        (3, _, true) => rows_of::<S, Codes<3, 15, AHEAD_BYTES>, HALF>(simd, packed, x, sums),
                        (4, ..=15, _) => rows_of::<S, Codes<4, 15, AHEAD_BYTES>, QUADS>(simd, packed, x, sums),
                        (4, ..=31, false) => rows_of::<S, Table<31>, QUADS>(simd, packed, x, sums),
                        (4, ..=31, true) => rows_of::<S, Table<31>, HALF>(simd, packed, x, sums),
                        (4, ..) => rows_of::<S, Table<255>, QUADS>(simd, packed, x, sums),
                        (5, ..) => rows_of::<S, Codes<5, 31, AHEAD_BYTES>, QUADS>(simd, packed, x, sums),
                        (6, _, false) => rows_of::<S, Codes<6, 63, AHEAD_BYTES>, QUADS>(simd, packed, x, sums),
                        (6, _, true) => rows_of::<S, Codes<6, 63, AHEAD_BYTES>, HALF>(simd, packed, x, sums),
                        _ => rows_of::<S, Codes<8, 255, AHEAD_BYTES>, QUADS>(simd, packed, x, sums),
                    }
                } else {
                    let unpacked_bytes = piece.columns.div_ceil(STEP) * size_of::<[Quads; QUADS]>();
                    packed.bytes = &weights.codes.as_flattened()[..unpacked_bytes];
                    // Where sums hold the largest products, all are alike.
                    let largest = if S::sums_hold(u8::MAX) > 0 { u8::MAX } else { codes.largest };
                    match (largest, halves) {
                        (..=15, false) => rows_of::<S, Codes<8, 15, 0>, QUADS>(simd, packed, x, sums),
                        (..=15, true) => rows_of::<S, Codes<8, 15, 0>, HALF>(simd, packed, x, sums),
                        (..=31, false) => rows_of::<S, Codes<8, 31, 0>, QUADS>(simd, packed, x, sums),
                        (..=31, true) => rows_of::<S, Codes<8, 31, 0>, HALF>(simd, packed, x, sums),
                        (..=63, false) => rows_of::<S, Codes<8, 63, 0>, QUADS>(simd, packed, x, sums),
                        (..=63, true) => rows_of::<S, Codes<8, 63, 0>, HALF>(simd, packed, x, sums),
                        (_, false) => rows_of::<S, Codes<8, 255, 0>, QUADS>(simd, packed, x, sums),
                        (_, true) => rows_of::<S, Codes<8, 255, 0>, HALF>(simd, packed, x, sums),
                    }
                }
                from += rows;
            }
        }
    }
}

/// How the codes of a step are read.
trait Steps {
    /// Vectors of a step.
    const VECTORS: usize;
    /// No code is larger.
    const LARGEST: u8;
    /// How far ahead memory is asked for, if at all.
    const AHEAD_BYTES: usize;
    /// Reads them.
    fn unpack<S: Simd>(simd: S, step: &[Quads], table: &[u8; 16]) -> [S::Bytes; QUADS];
}

/// Codes of so many bits.
struct Codes<const BITS: usize, const LARGEST: u8, const AHEAD_BYTES: usize>;

impl<const BITS: usize, const LARGEST: u8, const AHEAD_BYTES: usize> Steps for Codes<BITS, LARGEST, AHEAD_BYTES> {
    const VECTORS: usize = BITS;
    const LARGEST: u8 = LARGEST;
    const AHEAD_BYTES: usize = AHEAD_BYTES;
    #[inline(always)]
    fn unpack<S: Simd>(simd: S, step: &[Quads], _table: &[u8; 16]) -> [S::Bytes; QUADS] {
        unpack_bits::<S, BITS>(simd, step, None)
    }
}

/// Codes of four bits that stand for others.
struct Table<const LARGEST: u8>;

impl<const LARGEST: u8> Steps for Table<LARGEST> {
    const VECTORS: usize = 4;
    const LARGEST: u8 = LARGEST;
    const AHEAD_BYTES: usize = AHEAD_BYTES;
    #[inline(always)]
    fn unpack<S: Simd>(simd: S, step: &[Quads], table: &[u8; 16]) -> [S::Bytes; QUADS] {
        unpack_bits::<S, 4>(simd, step, Some(table))
    }
}

/// Rows of the next register block. A row takes a sum of whole numbers and one of floats.
#[inline(always)]
fn next_block<S: Simd>(rows: usize) -> usize {
    match rows {
        8.. if S::REGISTERS >= 32 => 8,
        6.. => 6,
        4.. => 4,
        _ => rows,
    }
}

/// The sums of some rows, in one panel.
struct PanelSums<'a> {
    rows: &'a mut [[[f32; LANES]; PANELS]],
    panel: usize,
}

/// One chunk of a panel.
struct Packed<'a> {
    layout: &'a Layout,
    /// What codes stand for, if not for themselves.
    table: &'a [u8; 16],
    /// Tiles, or unpacked codes.
    bytes: &'a [u8],
    /// What the codes of each group are multiplied by; of tiles, memory for it.
    factors: &'a mut Factors,
}

/// `sums[i] += x[i] · w` for some rows, as many as [`next_block`] gives.
#[inline(always)]
fn rows_of<'a, S: Simd, C: Steps, const GROUP: usize>(
    simd: S,
    w: Packed<'a>,
    x: impl Fn(usize) -> &'a IntegerRow,
    sums: PanelSums<'a>,
) {
    match sums.rows.len() {
        1 => simd.call(Multiply::<C, GROUP, 1>::new(w, x, sums)),
        2 => simd.call(Multiply::<C, GROUP, 2>::new(w, x, sums)),
        3 => simd.call(Multiply::<C, GROUP, 3>::new(w, x, sums)),
        4 => simd.call(Multiply::<C, GROUP, 4>::new(w, x, sums)),
        6 => simd.call(Multiply::<C, GROUP, 6>::new(w, x, sums)),
        _ => simd.call(Multiply::<C, GROUP, 8>::new(w, x, sums)),
    }
}

/// `sums[i] += x[i] · w` for `ROWS` rows, in whole numbers within a group of `GROUP` quads. A kernel of its own for each code:
/// all of them in one function take compilers minutes.
struct Multiply<'a, C, const GROUP: usize, const ROWS: usize> {
    w: Packed<'a>,
    x: [&'a IntegerRow; ROWS],
    sums: PanelSums<'a>,
    steps: PhantomData<C>,
}

impl<'a, C: Steps, const GROUP: usize, const ROWS: usize> Multiply<'a, C, GROUP, ROWS> {
    #[inline(always)]
    fn new(w: Packed<'a>, x: impl Fn(usize) -> &'a IntegerRow, sums: PanelSums<'a>) -> Self {
        Self { w, x: std::array::from_fn(x), sums, steps: PhantomData }
    }
}

impl<C: Steps, const GROUP: usize, const ROWS: usize> Kernel for Multiply<'_, C, GROUP, ROWS> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { w, x, sums: PanelSums { rows: sums, panel }, .. } = self;
        let sums: &mut [[[f32; LANES]; PANELS]; ROWS] = sums.try_into().expect("as many sums as rows");
        let mut registers = [simd.splat(0.0); ROWS];
        for i in 0..ROWS {
            registers[i] = simd.load(&sums[i][panel]);
        }
        let bias = w.layout.has_bias();
        let step_bytes = C::VECTORS * size_of::<Quads>();
        let groups = QUADS / GROUP;
        let packed = C::AHEAD_BYTES > 0;
        let steps = if packed { w.layout.block / STEP } else { w.bytes.len() / step_bytes };
        if packed {
            w.factors.unpack_tile(simd, w.layout, w.bytes, 0);
        }
        let (mut at, mut place) = (0, 0);
        while at < w.bytes.len() {
            if packed {
                // Scales are unpacked a tile ahead: what has just been stored is slow to load.
                let next = at + w.layout.tile_bytes;
                if next < w.bytes.len() {
                    w.factors.unpack_tile(simd, w.layout, &w.bytes[next..], groups * (place + steps));
                }
                for line in w.bytes[at..at + w.layout.scale_bytes].as_chunks::<{ size_of::<Quads>() }>().0 {
                    simd.prefetch_after(line, C::AHEAD_BYTES);
                }
                at += w.layout.scale_bytes;
            }
            for _ in 0..steps {
                let step = w.bytes[at..at + step_bytes].as_chunks().0;
                at += step_bytes;
                if packed {
                    for line in 0..C::VECTORS {
                        simd.prefetch_after(&step[line], C::AHEAD_BYTES);
                    }
                }
                let quads = C::unpack(simd, step, w.table);
                for half in 0..groups {
                    let group = groups * place + half;
                    let scale = simd.load(&w.factors.scales[group]);
                    for i in 0..ROWS {
                        let x = x[i];
                        let columns: &[[u8; 4]; QUADS] = &x.codes.as_chunks().0.as_chunks().0[place];
                        let offset = simd.splat_int(x.offsets[group]);
                        let total = dot::<S, C, GROUP>(simd, &quads, columns, GROUP * half, offset);
                        let scale = simd.mul(scale, simd.splat(x.scales[group]));
                        registers[i] = simd.fma(simd.to_floats(total), scale, registers[i]);
                    }
                    if bias {
                        let bias = simd.load(&w.factors.biases[group]);
                        for i in 0..ROWS {
                            registers[i] = simd.fma(bias, simd.splat(x[i].sums[group]), registers[i]);
                        }
                    }
                }
                // Where the compiler sees that no place is past a chunk, it checks none.
                place = (place + 1) % STEPS;
            }
        }
        for i in 0..ROWS {
            simd.store(registers[i], &mut sums[i][panel]);
        }
    }
}

/// The products of the group that begins with quad `first`, and `total`.
#[inline(always)]
fn dot<S: Simd, C: Steps, const GROUP: usize>(
    simd: S,
    w: &[S::Bytes; QUADS],
    x: &[[u8; 4]; QUADS],
    first: usize,
    mut total: S::Ints,
) -> S::Ints {
    let hold = S::sums_hold(C::LARGEST).min(GROUP);
    if hold == 0 {
        for quad in first..first + GROUP {
            total = simd.dot_centered_bytes(total, w[quad], x[quad]);
        }
        return total;
    }
    // A power of two, so that whole sums fill a group.
    let hold = 1 << hold.ilog2();
    for part in 0..GROUP / hold {
        let mut sums = simd.start_sums(total);
        for quad in 0..hold {
            let quad = first + hold * part + quad;
            sums = simd.dot_bytes(sums, w[quad], x[quad]);
        }
        total = simd.total(sums, total);
    }
    total
}
