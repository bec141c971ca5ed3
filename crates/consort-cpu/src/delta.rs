//! Recurrent layers: heads and channels are independent, so they are what threads share out.

use consort_compute::portable::HostBuffer;
use consort_compute::portable::delta::{self, inverse_length};
use consort_compute::{DeltaSpec, Run};

use crate::isa::{Kernel, LANES, Simd};
use crate::memory::Disjoint;
use crate::product::Machine;

/// The gated delta rule: see [`Backend::delta_rule`](consort_compute::Backend::delta_rule).
#[allow(clippy::too_many_arguments)]
pub fn delta_rule(
    machine: Machine<'_>,
    out: &mut HostBuffer,
    qkv: &HostBuffer,
    decay: &HostBuffer,
    beta: &HostBuffer,
    state: &mut HostBuffer,
    runs: &[Run<'_>],
    spec: DeltaSpec,
) {
    let DeltaSpec { key_heads, value_heads, key_dim, value_dim } = spec;
    let (keys, values) = (key_heads * key_dim, value_heads * value_dim);
    assert_eq!((qkv.cols(), state.cols()), (2 * keys + values, values * key_dim), "shape of the layer");
    assert_eq!((decay.shape(), beta.shape()), ((qkv.rows(), value_heads), (qkv.rows(), value_heads)), "gates");
    if !value_dim.is_multiple_of(LANES) {
        return delta::delta_rule(out, qkv, decay, beta, state, runs, spec);
    }
    assert_apart(runs, qkv.rows(), state.rows());
    out.reshape(qkv.rows(), values);
    let state_cols = state.cols();
    let (out, states) = (Disjoint::new(out.values_mut()), Disjoint::new(state.values_mut()));
    machine.pool.run(runs.len() * value_heads, |task| {
        let (run, head) = (&runs[task / value_heads], task % value_heads);
        // SAFETY: no two runs have one slot, as was asserted, and no two tasks one head of one run.
        let state = unsafe { states.slice(run.slot * state_cols + head * key_dim * value_dim, key_dim * value_dim) };
        machine.isa.run(Head { out, qkv, decay, beta, state, run, spec, head });
    });
}

/// Runs are worked on side by side, each with its slot and its rows to itself.
///
/// # Panics
/// If two runs share a slot or a row, or one lies outside the buffers.
fn assert_apart(runs: &[Run<'_>], rows: usize, slots: usize) {
    for (i, run) in runs.iter().enumerate() {
        assert!(run.rows.end <= rows && run.slot < slots, "run {i} lies outside the buffers");
        for other in &runs[..i] {
            let rows_apart = run.rows.end <= other.rows.start || other.rows.end <= run.rows.start;
            assert!(rows_apart && run.slot != other.slot, "run {i} shares rows or a slot with another one");
        }
    }
}

/// All tokens of a run in one head.
struct Head<'a> {
    out: Disjoint<'a, f32>,
    qkv: &'a HostBuffer,
    decay: &'a HostBuffer,
    beta: &'a HostBuffer,
    state: &'a mut [f32],
    run: &'a Run<'a>,
    spec: DeltaSpec,
    head: usize,
}

impl Kernel for Head<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { out, qkv, decay, beta, state, run, spec, head } = self;
        let DeltaSpec { key_heads, value_heads, key_dim, value_dim } = spec;
        let keys = key_heads * key_dim;
        let key_head = head / (value_heads / key_heads) * key_dim;
        if run.start == 0 {
            state.fill(0.0);
        }
        let width = value_dim / LANES;
        let (state, _) = state.as_chunks_mut::<LANES>();
        for row in run.rows.clone() {
            let (q, kv) = qkv.row(row).split_at(keys);
            let (k, v) = kv.split_at(keys);
            let (q, k) = (&q[key_head..][..key_dim], &k[key_head..][..key_dim]);
            let v = &v[head * value_dim..][..value_dim];
            // SAFETY: no two runs have one row, as `delta_rule` asserted, and no two tasks one head of one run.
            let out = unsafe { out.slice((row * value_heads + head) * value_dim, value_dim) };
            let k_factor = inverse_length(k);
            let q_factor = inverse_length(q) / (key_dim as f32).sqrt();
            let (decay, beta) = (simd.splat(decay.row(row)[head].exp()), simd.splat(beta.row(row)[head]));
            // 16 features of the value at a time: nothing is shared among them.
            for (panel, (v, out)) in v.as_chunks().0.iter().zip(out.as_chunks_mut().0).enumerate() {
                let mut recalled = simd.splat(0.0);
                for (feature, k) in k.iter().enumerate() {
                    let state = &mut state[feature * width + panel];
                    let decayed = simd.mul(simd.load(state), decay);
                    simd.store(decayed, state);
                    recalled = simd.fma(simd.splat(k * k_factor), decayed, recalled);
                }
                let minus = simd.mul(recalled, simd.splat(-1.0));
                let correction = simd.mul(beta, simd.add(simd.load(v), minus));
                let mut sum = simd.splat(0.0);
                for (feature, (k, q)) in k.iter().zip(q).enumerate() {
                    let state = &mut state[feature * width + panel];
                    let corrected = simd.fma(simd.splat(k * k_factor), correction, simd.load(state));
                    simd.store(corrected, state);
                    sum = simd.fma(simd.splat(q * q_factor), corrected, sum);
                }
                simd.store(sum, out);
            }
        }
    }
}
