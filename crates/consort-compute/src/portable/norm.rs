//! RMS norm (Zhang and Sennrich 2019).

use crate::NormGain;

use super::HostBuffer;

/// RMS norm of each run of `width` values of `x`, in place: `x / sqrt(mean(x²) + epsilon)`, with the gain before or after.
pub fn rms_norm_in_place(x: &mut [f32], width: usize, gain: &NormGain<'_, HostBuffer>, epsilon: f32) {
    assert_eq!(x.len() % width, 0, "whole groups");
    if let NormGain::Before(gain) | NormGain::After(gain) = gain {
        assert_eq!(gain.values().len(), width, "one gain for each column of a group");
    }
    for group in x.chunks_exact_mut(width) {
        if let NormGain::Before(gain) = gain {
            group.iter_mut().zip(gain.values()).for_each(|(x, gain)| *x *= gain);
        }
        // In f64, because the square of a large activation leaves the range of f32 and a long sum its precision.
        let squares: f64 = group.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
        let factor = (1.0 / (squares / width as f64 + f64::from(epsilon)).sqrt()) as f32;
        group.iter_mut().for_each(|x| *x *= factor);
        if let NormGain::After(gain) = gain {
            group.iter_mut().zip(gain.values()).for_each(|(x, gain)| *x *= gain);
        }
    }
}

/// The same into another buffer.
pub fn rms_norm(out: &mut HostBuffer, x: &HostBuffer, width: usize, gain: &NormGain<'_, HostBuffer>, epsilon: f32) {
    out.copy_from(x);
    rms_norm_in_place(out.values_mut(), width, gain, epsilon);
}

/// `x[i] *= gain` for every row.
pub fn scale_columns(x: &mut HostBuffer, gain: &HostBuffer) {
    assert_eq!(x.cols(), gain.values().len(), "one gain for each column");
    for row in 0..x.rows() {
        x.row_mut(row).iter_mut().zip(gain.values()).for_each(|(x, gain)| *x *= gain);
    }
}

/// `out[i] = Σ x[i]²`, `[n, 1]`.
pub fn sum_squares(out: &mut HostBuffer, x: &HostBuffer) {
    out.reshape(x.rows(), 1);
    for row in 0..x.rows() {
        out.row_mut(row)[0] = x.row(row).iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>() as f32;
    }
}

/// `x[i] /= sqrt(squares[i] / width + epsilon)`.
pub fn scale_by_squares(x: &mut HostBuffer, squares: &HostBuffer, width: usize, epsilon: f32) {
    assert_eq!(x.rows(), squares.rows(), "one sum for each row");
    for row in 0..x.rows() {
        let mean = f64::from(squares.row(row)[0]) / width as f64;
        // An infinite sum would give the factor 0, and a row that vanishes in silence.
        let factor = if mean.is_finite() { (1.0 / (mean + f64::from(epsilon)).sqrt()) as f32 } else { f32::NAN };
        x.row_mut(row).iter_mut().for_each(|x| *x *= factor);
    }
}
