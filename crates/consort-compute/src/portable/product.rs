//! Matrix products with a weight in its stored format.

use crate::Matrix;

use super::HostBuffer;

/// Sum of products, in f64: the portable product is the yardstick of faster ones and should add no error of its own.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    // Independent partial sums let the compiler use vector registers.
    const LANES: usize = 8;
    let mut sums = [0f64; LANES];
    let (a_lanes, b_lanes) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest = a_lanes.remainder().iter().zip(b_lanes.remainder()).map(|(&a, &b)| f64::from(a) * f64::from(b));
    let rest: f64 = rest.sum();
    for (a, b) in a_lanes.zip(b_lanes) {
        for lane in 0..LANES {
            sums[lane] += f64::from(a[lane]) * f64::from(b[lane]);
        }
    }
    (sums.iter().sum::<f64>() + rest) as f32
}

/// Rows of the embedding table: `out[i] = w[tokens[i]]`; a token past its end gives zeros.
pub fn embed(out: &mut HostBuffer, w: &Matrix<'_>, tokens: &[u32]) {
    out.reshape(tokens.len(), w.cols);
    for (i, &token) in tokens.iter().enumerate() {
        if (token as usize) < w.rows {
            w.decode_row(token as usize, out.row_mut(i));
        } else {
            out.row_mut(i).fill(0.0);
        }
    }
}

/// `out = x · wᵀ`: `[n, cols] · [rows, cols]ᵀ → [n, rows]`.
pub fn matmul(out: &mut HostBuffer, x: &HostBuffer, w: &Matrix<'_>) {
    assert_eq!(x.cols(), w.cols, "input features");
    out.reshape(x.rows(), w.rows);
    let mut weights = vec![0.0; w.cols];
    for feature in 0..w.rows {
        w.decode_row(feature, &mut weights);
        for token in 0..x.rows() {
            out.row_mut(token)[feature] = dot(x.row(token), &weights);
        }
    }
}
