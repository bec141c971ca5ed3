//! Products of f32.

use super::{COPIED_ROWS, PANELS, Piece, Sums, Task};
use crate::activations::FloatRow;
use crate::isa::Simd;
use crate::microkernel::{self, Vectors, multiply};
use crate::weight::{CHUNK, FloatChunk, IntegerChunk};

impl Task<'_> {
    /// Products of f32 activations with weights of any format, unpacked to f32.
    #[inline(always)]
    #[expect(clippy::too_many_arguments, reason = "what a task is made of, borrowed apart")]
    pub(super) fn floats<S: Simd>(
        &self,
        simd: S,
        piece: Piece,
        x: &[FloatRow],
        integers: &mut IntegerChunk,
        weights: &mut [FloatChunk; PANELS],
        copies: &mut [FloatRow; COPIED_ROWS],
        sums: &mut Sums,
    ) {
        let mut later: &[u8] = &[];
        for (panel, weights) in piece.panels.clone().zip(&mut *weights) {
            let (tiles, ahead) = self.w.chunk(panel, piece.chunk);
            let ahead = piece.now_and_later(ahead);
            weights.unpack(simd, self.w.layout(), integers, tiles, ahead.0);
            later = ahead.1;
        }
        let w = Vectors { lanes: FloatChunk::lanes(weights), stride: CHUNK, step: 1, count: piece.panels.len() };
        let all = self.rows.len();
        let rows = if self.neighbours(x, 0, all).is_some() { all } else { COPIED_ROWS };
        for from in (0..all).step_by(rows) {
            let x = self.gather(x, from, rows.min(all - from), copies);
            let mut sums = microkernel::Sums { lanes: sums[from..].as_flattened_mut(), stride: PANELS };
            multiply(simd, FloatRow::values(x), 0..piece.columns, w, &mut sums, later);
        }
    }
}
