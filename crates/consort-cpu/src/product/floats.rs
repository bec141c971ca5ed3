//! Products of f32.

use std::ops::Range;

use super::{BLOCK_ROWS, Piece, Sums, Task, next_block};
use crate::activations::FloatRow;
use crate::isa::{LANES, Simd};
use crate::weight::{CHUNK, FloatChunk, IntegerChunk};

impl Task<'_> {
    /// Products of f32 activations with weights of any format, unpacked to f32.
    #[inline(always)]
    pub(super) fn floats<S: Simd>(
        &self,
        simd: S,
        piece: Piece,
        x: &[FloatRow],
        integers: &mut IntegerChunk,
        weights: &mut [FloatChunk],
        sums: &mut [Sums],
    ) {
        for (panel, weights) in piece.panels.clone().zip(&mut *weights) {
            let (tiles, ahead) = self.w.chunk(panel, piece.chunk);
            weights.unpack(simd, self.w.layout(), integers, tiles, ahead);
        }
        let weights = &weights[..piece.panels.len()];
        let mut from = 0;
        while from < self.rows.len() {
            let rows = next_block(self.rows.len() - from);
            let x = |i: usize| &self.row(x, from + i).0;
            for (weights, sums) in weights.iter().zip(&mut *sums) {
                multiply_block(simd, 0..piece.columns, &weights.0, x, &mut sums[from..from + rows]);
            }
            from += rows;
        }
    }
}

/// `sums[i] += x(i) · w` for up to [`BLOCK_ROWS`] rows.
#[inline(always)]
fn multiply_block<'x, S: Simd>(
    simd: S,
    columns: Range<usize>,
    w: &[[f32; LANES]],
    x: impl Fn(usize) -> &'x [f32; CHUNK],
    sums: &mut [[f32; LANES]],
) {
    match sums.len() {
        1 => multiply_floats::<S, 1>(simd, columns, w, x, sums),
        2 => multiply_floats::<S, 2>(simd, columns, w, x, sums),
        3 => multiply_floats::<S, 3>(simd, columns, w, x, sums),
        4 => multiply_floats::<S, 4>(simd, columns, w, x, sums),
        5 => multiply_floats::<S, 5>(simd, columns, w, x, sums),
        _ => multiply_floats::<S, BLOCK_ROWS>(simd, columns, w, x, sums),
    }
}

/// `sums[i] += x[i] · w` for `ROWS` rows: the accumulators stay in registers.
#[inline(always)]
fn multiply_floats<'x, S: Simd, const ROWS: usize>(
    simd: S,
    columns: Range<usize>,
    w: &[[f32; LANES]],
    x: impl Fn(usize) -> &'x [f32; CHUNK],
    sums: &mut [[f32; LANES]],
) {
    let sums: &mut [[f32; LANES]; ROWS] = sums.try_into().expect("as many sums as rows");
    let x: [&[f32; CHUNK]; ROWS] = std::array::from_fn(x);
    let mut registers = [simd.splat(0.0); ROWS];
    for i in 0..ROWS {
        registers[i] = simd.load(&sums[i]);
    }
    assert!(columns.start <= columns.end && columns.end <= CHUNK, "columns of one chunk");
    for (offset, w) in w[..columns.len()].iter().enumerate() {
        let w = simd.load(w);
        for i in 0..ROWS {
            // SAFETY: the offset is below the number of columns, all of which are in the chunk, as was just checked. The
            // compiler does not see it and would check again for each product.
            let x = unsafe { *x[i].get_unchecked(columns.start + offset) };
            registers[i] = simd.fma(simd.splat(x), w, registers[i]);
        }
    }
    for i in 0..ROWS {
        simd.store(registers[i], &mut sums[i]);
    }
}
