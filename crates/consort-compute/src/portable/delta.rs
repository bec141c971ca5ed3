//! Recurrent layers: the short causal convolution and the gated delta rule (Yang et al. 2024, "Gated Delta Networks").
//!
//! Both go through a run token by token, so the result has the same bits however a prompt is cut into chunks.

use crate::{DeltaSpec, Run};

use super::{
    HostBuffer,
    rows::{sigmoid, silu},
};

/// Depthwise causal convolution and SiLU: `out[t, c] = silu(Σ_j weight[c, j] · x[t - kernel + 1 + j, c])`.
/// `weight` is `[channels, kernel]`; `state`, `[slots, (kernel - 1) · channels]`, holds the inputs before the run, oldest
/// first, and is updated.
pub fn causal_conv(
    out: &mut HostBuffer,
    x: &HostBuffer,
    weight: &HostBuffer,
    state: &mut HostBuffer,
    runs: &[Run<'_>],
) {
    let (channels, kernel) = weight.shape();
    assert_eq!((x.cols(), state.cols()), (channels, (kernel - 1) * channels), "channels");
    out.reshape(x.rows(), channels);
    for run in runs {
        let before = state.row_mut(run.slot);
        if run.start == 0 {
            before.fill(0.0);
        }
        for row in run.rows.clone() {
            let (now, out) = (x.row(row), out.row_mut(row));
            for channel in 0..channels {
                let taps = weight.row(channel);
                let past: f32 = (0..kernel - 1).map(|tap| taps[tap] * before[tap * channels + channel]).sum();
                out[channel] = silu(past + taps[kernel - 1] * now[channel]);
            }
            if kernel > 1 {
                before.copy_within(channels.., 0);
                before[(kernel - 2) * channels..].copy_from_slice(now);
            }
        }
    }
}

/// The gated delta rule. Queries and keys are L2-normalized per head and queries scaled by `key_dim^-0.5`. Per value head
/// with state `S [key_dim, value_dim]`: `S ← S · exp(decay)`, `S ← S + kᵀ · (beta · (v - k · S))`, `out = q · S`.
///
/// `qkv` is `[n, 2 · key_heads · key_dim + value_heads · value_dim]` in segments q, k, v; `decay` and `beta` are
/// `[n, value_heads]`; `state` is `[slots, value_heads · key_dim · value_dim]`.
pub fn delta_rule(
    out: &mut HostBuffer,
    qkv: &HostBuffer,
    decay: &HostBuffer,
    beta: &HostBuffer,
    state: &mut HostBuffer,
    runs: &[Run<'_>],
    spec: DeltaSpec,
) {
    let DeltaSpec { key_heads, value_heads, key_dim, value_dim, .. } = spec;
    let (keys, values) = (key_heads * key_dim, value_heads * value_dim);
    assert_eq!((qkv.cols(), state.cols()), (2 * keys + values, values * key_dim), "shape of the layer");
    assert_eq!((decay.shape(), beta.shape()), ((qkv.rows(), value_heads), (qkv.rows(), value_heads)), "gates");
    out.reshape(qkv.rows(), values);
    let mut scratch = vec![0.0; value_dim];
    for run in runs {
        if run.start == 0 {
            state.row_mut(run.slot).fill(0.0);
        }
        for row in run.rows.clone() {
            let (q, kv) = qkv.row(row).split_at(keys);
            let (k, v) = kv.split_at(keys);
            let states = state.row_mut(run.slot).chunks_exact_mut(key_dim * value_dim);
            let heads = out.row_mut(row).chunks_exact_mut(value_dim).zip(v.chunks_exact(value_dim)).zip(states);
            for (head, ((out, v), state)) in heads.enumerate() {
                let key_head = spec.key_head(head) * key_dim;
                let (q, k) = (&q[key_head..][..key_dim], &k[key_head..][..key_dim]);
                let (decay, beta) = (decay.row(row)[head].exp(), beta.row(row)[head]);
                delta_head(out, q, k, v, decay, beta, state, &mut scratch);
            }
        }
    }
}

/// One token of one value head. `decay` is the factor itself; `scratch` has `value_dim` values.
#[allow(clippy::too_many_arguments)]
pub fn delta_head(
    out: &mut [f32],
    q: &[f32],
    k: &[f32],
    v: &[f32],
    decay: f32,
    beta: f32,
    state: &mut [f32],
    scratch: &mut [f32],
) {
    let value_dim = v.len();
    let k_factor = inverse_length(k);
    let q_factor = inverse_length(q) / (q.len() as f32).sqrt();

    // What the decayed state recalls for this key.
    let recalled = scratch;
    recalled.fill(0.0);
    for (state, k) in state.chunks_exact_mut(value_dim).zip(k) {
        for (recalled, state) in recalled.iter_mut().zip(state) {
            *state *= decay;
            *recalled += k * k_factor * *state;
        }
    }
    let correction = recalled;
    correction.iter_mut().zip(v).for_each(|(recalled, v)| *recalled = beta * (v - *recalled));

    out.fill(0.0);
    for ((state, k), q) in state.chunks_exact_mut(value_dim).zip(k).zip(q) {
        for ((state, correction), out) in state.iter_mut().zip(&*correction).zip(&mut *out) {
            *state += k * k_factor * correction;
            *out += q * q_factor * *state;
        }
    }
}

/// Keeps the factor of a zero vector finite.
pub const NORMALIZE_EPSILON: f32 = 1e-6;

/// What a query or key is multiplied by to have length 1. The square of a large number leaves the range of f32, but not that
/// of f64.
pub fn inverse_length(x: &[f32]) -> f32 {
    let squares: f64 = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    (1.0 / (squares + f64::from(NORMALIZE_EPSILON)).sqrt()) as f32
}

/// The gates of a delta layer, in place: `a ← -exp(a_log) · softplus(a + dt_bias)`, `b ← sigmoid(b)`.
pub fn delta_gates(a: &mut HostBuffer, b: &mut HostBuffer, a_log: &HostBuffer, dt_bias: &HostBuffer) {
    for row in 0..a.rows() {
        let heads = a.row_mut(row).iter_mut().zip(a_log.values()).zip(dt_bias.values());
        heads.for_each(|((a, a_log), dt_bias)| *a = -a_log.exp() * softplus(*a + dt_bias));
    }
    b.values_mut().iter_mut().for_each(|b| *b = sigmoid(*b));
}

/// `ln(1 + e^x)`, in a form that does not overflow.
fn softplus(x: f32) -> f32 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}
