//! Products of whole numbers: int8 activations with weights that are whole numbers times a scale.

use super::{PANELS, Piece, Sums, Task};
use crate::activations::IntegerRow;
use crate::isa::{LANES, Quads, Simd};
use crate::weight::{CHUNK, IntegerChunk, Integers, STEP, piece as piece_of};

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
        let shape = Shape {
            steps: piece.columns.div_ceil(STEP),
            offset: codes.offset != 0,
            bias: layout.has_bias(),
            hold: if codes.wide { 0 } else { S::sums_hold(codes.largest) },
            pairs: layout.group.min(STEP) / 2,
        };
        let mut later: &[u8] = &[];
        for (panel, weights) in piece.panels.clone().zip(&mut *weights) {
            let (tiles, ahead) = self.w.chunk(panel, piece.chunk);
            let ahead = piece.now_and_later(ahead);
            weights.unpack(simd, layout, codes, tiles, ahead.0);
            later = ahead.1;
        }
        let weights = &weights[..piece.panels.len()];
        let mut from = 0;
        while from < self.rows.len() {
            let rows = next_block::<S>(self.rows.len() - from);
            let x = |i: usize| self.row(x, from + i);
            for (panel, weights) in weights.iter().enumerate() {
                let sums = PanelSums { rows: &mut sums[from..from + rows], panel, ahead: later };
                match (codes.wide, layout.group.min(STEP) / 4, shape.hold) {
                    (true, ..) => multiply_rows::<S, Wide>(simd, shape, weights, x, sums),
                    (_, 8, 8..) => multiply_rows::<S, Small<1, 8>>(simd, shape, weights, x, sums),
                    (_, 8, 4..) => multiply_rows::<S, Small<2, 4>>(simd, shape, weights, x, sums),
                    (_, 8, _) => multiply_rows::<S, Small<4, 2>>(simd, shape, weights, x, sums),
                    (.., 4..) => multiply_rows::<S, Small<1, 4>>(simd, shape, weights, x, sums),
                    _ => multiply_rows::<S, Small<2, 2>>(simd, shape, weights, x, sums),
                }
            }
            from += rows;
            later = &[];
        }
    }
}

/// Rows of the next register block: the most, unless two of equal size come out even. A row takes a sum of whole numbers and
/// one of floats.
#[inline(always)]
fn next_block<S: Simd>(rows: usize) -> usize {
    let most = if S::REGISTERS >= 32 { 8 } else { 6 };
    if rows <= most || rows >= 2 * most { rows.min(most) } else { rows.div_ceil(2) }
}

/// The sums of some rows, in one panel.
struct PanelSums<'a> {
    rows: &'a mut [[[f32; LANES]; PANELS]],
    panel: usize,
    /// What to ask memory for meanwhile.
    ahead: &'a [u8],
}

/// What [`multiply_integers`] has to do for a layout.
#[derive(Clone, Copy)]
struct Shape {
    steps: usize,
    offset: bool,
    bias: bool,
    /// Quads of small codes whose products a sum holds.
    hold: usize,
    /// Pairs of wide codes of a group.
    pairs: usize,
}

/// The whole products of one group of columns.
trait Group16 {
    /// Groups of 32 columns.
    const GROUPS_OF_STEP: usize;
    /// For each row of `x`, the sum of its products with each of 16 rows of weights.
    fn dot<S: Simd, const ROWS: usize>(
        simd: S,
        shape: Shape,
        group: usize,
        w: &IntegerChunk,
        x: &[&IntegerRow; ROWS],
    ) -> [S::Ints; ROWS];
}

/// The columns of one group, four bytes at a time, of each row.
#[inline(always)]
fn columns<'x, const FOURS: usize, const ROWS: usize>(
    group: usize,
    x: &[&'x IntegerRow; ROWS],
) -> [&'x [[u8; 4]; FOURS]; ROWS] {
    let mut columns = [&[[0; 4]; FOURS]; ROWS];
    for i in 0..ROWS {
        columns[i] = &x[i].codes.as_chunks().0.as_chunks().0[group];
    }
    columns
}

/// Groups of `PARTS · QUADS` quads of small codes, whose sums hold the products of `QUADS` quads.
struct Small<const PARTS: usize, const QUADS: usize>;

impl<const PARTS: usize, const QUADS: usize> Group16 for Small<PARTS, QUADS> {
    const GROUPS_OF_STEP: usize = STEP / 4 / QUADS / PARTS;

    #[inline(always)]
    fn dot<S: Simd, const ROWS: usize>(
        simd: S,
        shape: Shape,
        group: usize,
        w: &IntegerChunk,
        x: &[&IntegerRow; ROWS],
    ) -> [S::Ints; ROWS] {
        let mut totals = [simd.splat_int(0); ROWS];
        for part in 0..PARTS {
            let w: &[Quads; QUADS] = &w.codes.as_chunks().0[group * PARTS + part];
            let x = columns::<QUADS, ROWS>(group * PARTS + part, x);
            let mut sums = [simd.zero_sums(); ROWS];
            // All of them, but the compiler must not see that: it would unroll the loop, go row by row, and run out of
            // registers.
            for quad in 0..shape.hold.min(QUADS) {
                let w = simd.load_bytes(&w[quad]);
                for i in 0..ROWS {
                    sums[i] = simd.dot_bytes(sums[i], w, x[i][quad]);
                }
            }
            for i in 0..ROWS {
                totals[i] = simd.add_ints(totals[i], simd.total(sums[i]));
            }
        }
        totals
    }
}

/// Groups of 16 pairs of wide codes.
struct Wide;

impl Group16 for Wide {
    const GROUPS_OF_STEP: usize = 1;

    #[inline(always)]
    fn dot<S: Simd, const ROWS: usize>(
        simd: S,
        shape: Shape,
        group: usize,
        w: &IntegerChunk,
        x: &[&IntegerRow; ROWS],
    ) -> [S::Ints; ROWS] {
        const PAIRS: usize = STEP / 2;
        let w: &[Quads; PAIRS] = &w.codes.as_chunks().0[group];
        let x = columns::<PAIRS, ROWS>(group, x);
        let mut totals = [simd.splat_int(0); ROWS];
        // All of them, as above.
        for pair in 0..shape.pairs.min(PAIRS) {
            let w = simd.load_bytes(&w[pair]);
            for i in 0..ROWS {
                totals[i] = simd.dot_shorts(totals[i], w, x[i][pair]);
            }
        }
        totals
    }
}

/// `sums[i] += x[i] · w` for up to 8 rows.
#[inline(always)]
fn multiply_rows<'x, S: Simd, G: Group16>(
    simd: S,
    shape: Shape,
    w: &IntegerChunk,
    x: impl Fn(usize) -> &'x IntegerRow,
    sums: PanelSums<'_>,
) {
    match sums.rows.len() {
        1 => multiply_integers::<S, G, 1>(simd, shape, w, x, sums),
        2 => multiply_integers::<S, G, 2>(simd, shape, w, x, sums),
        3 => multiply_integers::<S, G, 3>(simd, shape, w, x, sums),
        4 => multiply_integers::<S, G, 4>(simd, shape, w, x, sums),
        5 => multiply_integers::<S, G, 5>(simd, shape, w, x, sums),
        6 => multiply_integers::<S, G, 6>(simd, shape, w, x, sums),
        7 => multiply_integers::<S, G, 7>(simd, shape, w, x, sums),
        _ => multiply_integers::<S, G, 8>(simd, shape, w, x, sums),
    }
}

/// `sums[i] += x[i] · w` for `ROWS` rows, in whole numbers within a group.
#[inline(always)]
fn multiply_integers<'x, S: Simd, G: Group16, const ROWS: usize>(
    simd: S,
    shape: Shape,
    w: &IntegerChunk,
    x: impl Fn(usize) -> &'x IntegerRow,
    sums: PanelSums<'_>,
) {
    let PanelSums { rows: sums, panel, ahead } = sums;
    let sums: &mut [[[f32; LANES]; PANELS]; ROWS] = sums.try_into().expect("as many sums as rows");
    let x: [&IntegerRow; ROWS] = std::array::from_fn(x);
    let mut registers = [simd.splat(0.0); ROWS];
    for i in 0..ROWS {
        registers[i] = simd.load(&sums[i][panel]);
    }
    // Where the compiler sees that no index is past a chunk, it checks none.
    for group in 0..(shape.steps * G::GROUPS_OF_STEP).min(CHUNK / STEP * G::GROUPS_OF_STEP) {
        simd.prefetch(piece_of(ahead, group, CHUNK / STEP * G::GROUPS_OF_STEP));
        let mut totals = G::dot(simd, shape, group, w, &x);
        let scale = simd.load(&w.scales[group]);
        for i in 0..ROWS {
            if shape.offset {
                totals[i] = simd.add_ints(totals[i], simd.splat_int(x[i].offsets[group]));
            }
            let scale = simd.mul(scale, simd.splat(x[i].scales[group]));
            registers[i] = simd.fma(simd.to_floats(totals[i]), scale, registers[i]);
        }
        if shape.bias {
            let bias = simd.load(&w.biases[group]);
            for i in 0..ROWS {
                registers[i] = simd.fma(bias, simd.splat(x[i].sums[group]), registers[i]);
            }
        }
    }
    for i in 0..ROWS {
        simd.store(registers[i], &mut sums[i][panel]);
    }
}
