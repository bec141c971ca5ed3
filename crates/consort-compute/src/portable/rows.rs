//! Operations that look at one value, or one row, at a time.

use crate::Activation;

use super::HostBuffer;

fn same_shape(x: &HostBuffer, y: &HostBuffer) {
    assert_eq!(x.shape(), y.shape(), "both sides have one shape");
}

/// `x += y`.
pub fn add(x: &mut HostBuffer, y: &HostBuffer) {
    same_shape(x, y);
    x.values_mut().iter_mut().zip(y.values()).for_each(|(x, y)| *x += y);
}

/// `x[i] += row` for every row.
pub fn add_row(x: &mut HostBuffer, row: &HostBuffer) {
    let cols = x.cols();
    assert_eq!(row.values().len(), cols, "one value for each column");
    for x in x.values_mut().chunks_exact_mut(cols.max(1)) {
        x.iter_mut().zip(row.values()).for_each(|(x, y)| *x += y);
    }
}

/// `x = alpha · x + beta · y`, with `alpha` and `beta` of shape `[cols]`.
pub fn blend(x: &mut HostBuffer, alpha: &HostBuffer, y: &HostBuffer, beta: &HostBuffer) {
    same_shape(x, y);
    let cols = x.cols();
    assert_eq!((alpha.values().len(), beta.values().len()), (cols, cols), "one factor for each column");
    for row in 0..x.rows() {
        let factors = alpha.values().iter().zip(beta.values());
        for ((x, y), (alpha, beta)) in x.row_mut(row).iter_mut().zip(y.row(row)).zip(factors) {
            *x = alpha * *x + beta * y;
        }
    }
}

/// `x *= factor`.
pub fn scale(x: &mut HostBuffer, factor: f32) {
    x.values_mut().iter_mut().for_each(|x| *x *= factor);
}

/// `x[i] *= factors[i]` for every row.
pub fn scale_rows(x: &mut HostBuffer, factors: &[f32]) {
    assert_eq!(factors.len(), x.rows(), "one factor for each row");
    for (row, factor) in factors.iter().enumerate() {
        x.row_mut(row).iter_mut().for_each(|x| *x *= factor);
    }
}

/// `cap · tanh(x / cap)`.
pub fn softcap_value(x: f32, cap: f32) -> f32 {
    cap * (x / cap).tanh()
}

/// `x = cap · tanh(x / cap)`.
pub fn softcap(x: &mut HostBuffer, cap: f32) {
    x.values_mut().iter_mut().for_each(|x| *x = softcap_value(*x, cap));
}

/// `1 / (1 + e^-x)`.
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// `x · sigmoid(x)`.
pub fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// `x *= sigmoid(gate)`; each gate column serves `x.cols / gate.cols` consecutive columns.
pub fn sigmoid_gate(x: &mut HostBuffer, gate: &HostBuffer) {
    assert_eq!(x.rows(), gate.rows(), "one row of gates for each row");
    assert_eq!(x.cols() % gate.cols().max(1), 0, "each gate serves as many columns");
    if gate.values().is_empty() {
        return;
    }
    let width = x.cols() / gate.cols();
    for (x, gate) in x.values_mut().chunks_exact_mut(width).zip(gate.values()) {
        let factor = sigmoid(*gate);
        x.iter_mut().for_each(|x| *x *= factor);
    }
}

/// `activation(gate) · up` of one pair of values.
pub fn gated_value(gate: f32, up: f32, activation: Activation) -> f32 {
    match activation {
        Activation::Silu => silu(gate) * up,
        Activation::GeluTanh => {
            let inner = (2.0 / std::f32::consts::PI).sqrt() * (gate + 0.044715 * gate * gate * gate);
            0.5 * gate * (1.0 + inner.tanh()) * up
        }
        Activation::Gelu => 0.5 * gate * libm::erfcf(-gate * std::f32::consts::FRAC_1_SQRT_2) * up,
        Activation::ClampedSwiglu { alpha, limit } => {
            // Not `f32::min`, which would hide a NaN.
            let gate = if gate > limit { limit } else { gate };
            let up = up.clamp(-limit, limit);
            gate * sigmoid(alpha * gate) * (up + 1.0)
        }
    }
}

/// `gate = activation(gate) · up`.
pub fn gated(gate: &mut HostBuffer, up: &HostBuffer, activation: Activation) {
    same_shape(gate, up);
    gate.values_mut().iter_mut().zip(up.values()).for_each(|(g, u)| *g = gated_value(*g, *u, activation));
}

/// `out[i] = x[rows[i]]`.
pub fn select_rows(out: &mut HostBuffer, x: &HostBuffer, rows: &[u32]) {
    out.reshape(rows.len(), x.cols());
    for (i, &row) in rows.iter().enumerate() {
        out.row_mut(i).copy_from_slice(x.row(row as usize));
    }
}
