//! Rotary position embedding (Su et al. 2021).

use crate::{PairLayout, RopeSpec};

use super::HostBuffer;

/// Turns each head of `x` `[n, heads · head_dim]` by its row's position.
pub fn rope(x: &mut HostBuffer, positions: &[u32], spec: &RopeSpec) {
    assert_eq!(positions.len(), x.rows(), "one position for each row");
    for (row, &position) in positions.iter().enumerate() {
        rope_row(x.row_mut(row), position, spec);
    }
}

/// Turns the heads of one token.
pub fn rope_row(heads: &mut [f32], position: u32, spec: &RopeSpec) {
    let pairs = spec.inverse_frequencies.len();
    assert!(2 * pairs <= spec.head_dim && heads.len().is_multiple_of(spec.head_dim), "whole heads");
    for (pair, frequency) in spec.inverse_frequencies.iter().enumerate() {
        let (a, b) = match spec.pairs {
            PairLayout::Halves => (pair, pair + pairs),
            PairLayout::Interleaved => (2 * pair, 2 * pair + 1),
        };
        // Models were trained with the angle rounded to f32, so it is rounded here too; what follows is exact.
        let angle = position as f32 * frequency;
        let (sin, cos) = f64::from(angle).sin_cos();
        let (sin, cos) = (sin as f32 * spec.magnitude, cos as f32 * spec.magnitude);
        for head in heads.chunks_exact_mut(spec.head_dim) {
            (head[a], head[b]) = (head[a] * cos - head[b] * sin, head[b] * cos + head[a] * sin);
        }
    }
}
