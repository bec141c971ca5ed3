//! Register-blocked products of f32 rows and vectors: `out[i][v] += Σ_k x[i][k] · w[v][k]`.
//!
//! Rows hold their numbers one after the other, and each is broadcast to 16 lanes; vectors hold 16 lanes for each `k`. The
//! sums of a block of rows and vectors stay in registers. Every sum goes through `k` in order, in a lane of its own, so it
//! does not depend on which rows and vectors are computed together.

use std::ops::Range;

use crate::isa::{LANES, Simd};

const LINE_BYTES: usize = 64;
/// Columns between two requests for memory.
const BURST: usize = 8;

/// Vectors side by side, for each `k`.
#[derive(Clone, Copy)]
pub struct Vectors<'a> {
    pub lanes: &'a [[f32; LANES]],
    /// From one vector to the next.
    pub stride: usize,
    /// From one `k` to the next.
    pub step: usize,
    /// How many.
    pub count: usize,
}

/// Sums, one row after the other.
pub struct Sums<'a> {
    /// `[row][vector]`; rows begin `stride` apart.
    pub lanes: &'a mut [[f32; LANES]],
    /// From one row to the next.
    pub stride: usize,
}

/// Adds the products of columns `columns` of the rows `x` with `w`, whose first `k` is the first of these columns. Asks for the
/// memory `ahead` meanwhile, as far as there is time: a line for two columns.
#[inline(always)]
pub fn multiply<S: Simd, const COLS: usize>(
    simd: S,
    x: &[[f32; COLS]],
    columns: Range<usize>,
    w: Vectors<'_>,
    out: &mut Sums<'_>,
    ahead: &[u8],
) {
    let mut ahead = ahead.chunks((columns.len() / 2).max(1) * LINE_BYTES);
    assert!(columns.start <= columns.end && columns.end <= COLS, "columns of a row");
    let wide = S::REGISTERS >= 32;
    let mut vector = 0;
    while vector < w.count {
        // Two vectors for each row where registers are many: every number that is broadcast is used twice.
        let two = wide && w.count - vector >= 2;
        let mut row = 0;
        while row < x.len() {
            let ahead = if row == 0 { ahead.next().unwrap_or_default() } else { &[] };
            let block = Block { x: &x[row..], columns: columns.clone(), w, vector, row, ahead };
            row += match (two, x.len() - row) {
                (true, 12..) => block.multiply::<S, 12, 2>(simd, out),
                (true, 8..) => block.multiply::<S, 8, 2>(simd, out),
                (true, 6..) => block.multiply::<S, 6, 2>(simd, out),
                (true, 4..) => block.multiply::<S, 4, 2>(simd, out),
                (true, 3) => block.multiply::<S, 3, 2>(simd, out),
                (true, 2) => block.multiply::<S, 2, 2>(simd, out),
                (true, _) => block.multiply::<S, 1, 2>(simd, out),
                (false, 6..) => block.multiply::<S, 6, 1>(simd, out),
                (false, 4..) => block.multiply::<S, 4, 1>(simd, out),
                (false, 3) => block.multiply::<S, 3, 1>(simd, out),
                (false, 2) => block.multiply::<S, 2, 1>(simd, out),
                (false, _) => block.multiply::<S, 1, 1>(simd, out),
            };
        }
        vector += if two { 2 } else { 1 };
    }
}

/// Some rows and vectors.
struct Block<'a, const COLS: usize> {
    /// The first of its rows, and those after it.
    x: &'a [[f32; COLS]],
    columns: Range<usize>,
    w: Vectors<'a>,
    vector: usize,
    row: usize,
    ahead: &'a [u8],
}

impl<const COLS: usize> Block<'_, COLS> {
    /// Does so many rows and vectors, and returns the number of rows.
    // Places of registers: iterators over them would be harder to read.
    #[allow(clippy::needless_range_loop)]
    #[inline(always)]
    fn multiply<S: Simd, const ROWS: usize, const VECTORS: usize>(self, simd: S, out: &mut Sums<'_>) -> usize {
        let depth = self.columns.len();
        let x: &[[f32; COLS]; ROWS] = self.x[..ROWS].try_into().expect("as many rows");
        let w = self.w.lanes;
        let (step, mut at) = (self.w.step, self.vector * self.w.stride);
        let last = at + (VECTORS - 1) * self.w.stride + depth.saturating_sub(1) * step;
        assert!(depth == 0 || last < w.len(), "as many vectors");
        let mut sums = [[simd.splat(0.0); VECTORS]; ROWS];
        for i in 0..ROWS {
            for v in 0..VECTORS {
                sums[i][v] = simd.load(&out.lanes[(self.row + i) * out.stride + self.vector + v]);
            }
        }
        // In two loops: with a branch in the inner one, the compiler runs out of registers.
        let burst = if self.ahead.is_empty() { depth } else { BURST };
        let mut ahead = self.ahead.chunks(BURST / 2 * LINE_BYTES);
        let mut first = 0;
        while first < depth {
            if let Some(lines) = ahead.next() {
                simd.prefetch_early(lines);
            }
            let end = depth.min(first + burst);
            for k in first..end {
                let mut lanes = [simd.splat(0.0); VECTORS];
                for v in 0..VECTORS {
                    // SAFETY: the last place of the last vector is in bounds, as was just checked.
                    lanes[v] = simd.load(unsafe { w.get_unchecked(at + v * self.w.stride) });
                }
                at += step;
                for i in 0..ROWS {
                    // SAFETY: `multiply` has checked that all columns lie in a row.
                    let x = simd.splat(unsafe { *x[i].get_unchecked(self.columns.start + k) });
                    for v in 0..VECTORS {
                        sums[i][v] = simd.fma(x, lanes[v], sums[i][v]);
                    }
                }
            }
            first = end;
        }
        for i in 0..ROWS {
            for v in 0..VECTORS {
                simd.store(sums[i][v], &mut out.lanes[(self.row + i) * out.stride + self.vector + v]);
            }
        }
        ROWS
    }
}
