//! The gated delta rule: heads are independent, so they are what threads share out.
//!
//! A long run goes chunk by chunk, in the form that Yang et al. 2024 ("Gated Delta Networks", section 3.3) give: with
//! `G_t` the sum of the chunk's decays up to token `t`, and `S` the state before it, what the tokens write is
//! `u_t = beta_t · (v_t - e^{G_t} k_t · S - Σ_{i<t} e^{G_t - G_i} (k_t · k_i) u_i)`, a triangular system, and then
//! `out_t = e^{G_t} q_t · S + Σ_{i<=t} e^{G_t - G_i} (q_t · k_i) u_i` and `S ← e^{G} S + Σ_t e^{G - G_t} k_tᵀ · u_t`:
//! nothing but products of matrices. Chunks end at multiples of their length, wherever a prompt is cut.

use std::cell::RefCell;
use std::ops::Range;

use consort_compute::portable::HostBuffer;
use consort_compute::portable::delta;
use consort_compute::{DeltaSpec, Run};

use crate::activations::FloatRow;
use crate::isa::{Kernel, LANES, Simd};
use crate::math::exp;
use crate::memory::Disjoint;
use crate::microkernel::{Sums, Vectors, multiply};
use crate::product::Machine;
use crate::weight::CHUNK;

/// Tokens of a chunk.
const TOKENS: usize = 64;
/// Fewer tokens go one by one.
const FEW_TOKENS: usize = 8;
/// A decay of so much leaves nothing, and the difference of two sums of such decays is a number.
const LEAST_DECAY: f64 = -1e4;

thread_local! {
    /// Memory of each thread that computes.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

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
    let DeltaSpec { key_heads, value_heads, key_dim, value_dim, .. } = spec;
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
        let head = Head { out, qkv, decay, beta, spec, head };
        SCRATCH.with_borrow_mut(|scratch| machine.isa.run(HeadOfRun { head, run, state, scratch }));
    });
}

/// Runs are worked on side by side, each with its slot and its rows to itself.
///
/// # Panics
/// If two runs share a slot or a row, or one lies outside the buffers.
pub fn assert_apart(runs: &[Run<'_>], rows: usize, slots: usize) {
    for (i, run) in runs.iter().enumerate() {
        assert!(run.rows.end <= rows && run.slot < slots, "run {i} lies outside the buffers");
        for other in &runs[..i] {
            let rows_apart = run.rows.end <= other.rows.start || other.rows.end <= run.rows.start;
            assert!(rows_apart && run.slot != other.slot, "run {i} shares rows or a slot with another one");
        }
    }
}

/// Working memory, taken once.
#[derive(Default)]
struct Scratch {
    /// `[token]`: normalized.
    q: Vec<FloatRow>,
    k: Vec<FloatRow>,
    /// `[feature][token]`.
    k_columns: Vec<[f32; TOKENS]>,
    /// `[token][earlier token]`: `q_t · k_i` and `k_t · k_i`, then what they are multiplied by to give results.
    q_by_k: Vec<[f32; TOKENS]>,
    k_by_k: Vec<[f32; TOKENS]>,
    /// `[token][value_dim]`.
    written: Vec<[f32; LANES]>,
    out: Vec<[f32; LANES]>,
}

/// One value head of the layer.
struct Head<'a> {
    out: Disjoint<'a, f32>,
    qkv: &'a HostBuffer,
    decay: &'a HostBuffer,
    beta: &'a HostBuffer,
    spec: DeltaSpec,
    head: usize,
}

impl<'a> Head<'a> {
    /// Query, key and value of a row.
    #[inline(always)]
    fn row(&self, row: usize) -> [&[f32]; 3] {
        let DeltaSpec { key_heads, key_dim, value_dim, .. } = self.spec;
        let (q, kv) = self.qkv.row(row).split_at(key_heads * key_dim);
        let (k, v) = kv.split_at(key_heads * key_dim);
        let key_head = self.spec.key_head(self.head) * key_dim;
        [&q[key_head..][..key_dim], &k[key_head..][..key_dim], &v[self.head * value_dim..][..value_dim]]
    }

    /// Where the result of a row goes.
    #[inline(always)]
    fn out(&self, row: usize) -> &'a mut [[f32; LANES]] {
        let DeltaSpec { value_heads, value_dim, .. } = self.spec;
        // SAFETY: no two runs have one row, as `delta_rule` asserted, and no two tasks one head of one run.
        let out = unsafe { self.out.slice((row * value_heads + self.head) * value_dim, value_dim) };
        out.as_chunks_mut().0
    }

    /// What queries are multiplied by besides their inverse length.
    fn q_scale(&self) -> f32 {
        1.0 / (self.spec.key_dim as f32).sqrt()
    }

    /// One token.
    #[inline(always)]
    fn token<S: Simd>(&self, simd: S, row: usize, state: &mut [[f32; LANES]]) {
        let [q, k, v] = self.row(row);
        let (k_factor, q_factor) = (inverse_length(simd, k), inverse_length(simd, q) * self.q_scale());
        let (decay, beta) =
            (simd.splat(self.decay.row(row)[self.head].exp()), simd.splat(self.beta.row(row)[self.head]));
        // 16 features of the value at a time: nothing is shared among them.
        let width = self.spec.value_dim / LANES;
        for (panel, (v, out)) in v.as_chunks().0.iter().zip(self.out(row)).enumerate() {
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

    /// Up to 64 tokens.
    #[inline(always)]
    fn chunk<S: Simd>(&self, simd: S, rows: Range<usize>, state: &mut [[f32; LANES]], scratch: &mut Scratch) {
        let DeltaSpec { key_dim, value_dim, .. } = self.spec;
        let (tokens, width) = (rows.len(), value_dim / LANES);
        let Scratch { q, k, k_columns, q_by_k, k_by_k, written, out } = scratch;
        q.resize(TOKENS, FloatRow([0.0; CHUNK]));
        k.resize(TOKENS, FloatRow([0.0; CHUNK]));
        k_columns.resize(key_dim.next_multiple_of(LANES), [0.0; TOKENS]);
        q_by_k.resize(TOKENS, [0.0; TOKENS]);
        k_by_k.resize(TOKENS, [0.0; TOKENS]);
        written.resize(TOKENS * width, [0.0; LANES]);
        out.resize(TOKENS * width, [0.0; LANES]);

        let mut decays = [0f64; TOKENS];
        let mut sum = 0.0;
        for (t, row) in rows.clone().enumerate() {
            let [query, key, _] = self.row(row);
            normalize(simd, query, self.q_scale(), &mut q[t]);
            normalize(simd, key, 1.0, &mut k[t]);
            let decay = f64::from(self.decay.row(row)[self.head]);
            sum += if decay < LEAST_DECAY { LEAST_DECAY } else { decay };
            decays[t] = sum;
        }
        k[tokens..].fill(FloatRow([0.0; CHUNK]));
        transpose(simd, k, k_columns);

        // Products of keys and queries with the keys up to their own, 16 tokens at a time.
        let keys = Vectors { lanes: lanes(k_columns), stride: 1, step: TOKENS / LANES, count: 0 };
        for (by_k, x) in [(&mut *k_by_k, &*k), (&mut *q_by_k, &*q)] {
            by_k[..tokens].fill([0.0; TOKENS]);
            for first in (0..tokens).step_by(LANES) {
                let block = first..tokens.min(first + LANES);
                let mut sums = Sums { lanes: lanes_mut(&mut by_k[block.clone()]), stride: TOKENS / LANES };
                let keys = Vectors { count: first / LANES + 1, ..keys };
                multiply(simd, FloatRow::values(&x[block]), 0..key_dim, keys, &mut sums, &[]);
            }
        }
        // What the state recalls.
        let state_vectors = Vectors { lanes: state, stride: 1, step: width, count: width };
        for (sums, x) in [(&mut *written, &*k), (&mut *out, &*q)] {
            sums[..tokens * width].fill([0.0; LANES]);
            let mut sums = Sums { lanes: sums, stride: width };
            multiply(simd, FloatRow::values(&x[..tokens]), 0..key_dim, state_vectors, &mut sums, &[]);
        }
        // Gates.
        for (t, row) in rows.clone().enumerate() {
            let decay = (decays[t] as f32).exp();
            let beta = self.beta.row(row)[self.head];
            let minus_beta = simd.splat(-beta);
            let (by_key, by_query) = (&mut k_by_k[t], &mut q_by_k[t]);
            let mut between = [f32::NEG_INFINITY; TOKENS];
            for i in 0..=t {
                between[i] = (decays[t] - decays[i]) as f32;
            }
            let vectors = by_key.as_chunks_mut::<LANES>().0.iter_mut().zip(by_query.as_chunks_mut::<LANES>().0);
            for ((by_key, by_query), between) in vectors.zip(between.as_chunks::<LANES>().0).take(t / LANES + 1) {
                let decay = exp(simd, simd.load(between));
                simd.store(simd.mul(simd.mul(simd.load(by_key), decay), minus_beta), by_key);
                simd.store(simd.mul(simd.load(by_query), decay), by_query);
            }
            by_key[t..].fill(0.0);
            by_query[t + 1..].fill(0.0);
            let [_, _, v] = self.row(row);
            let (decay, beta) = (simd.splat(decay), simd.splat(beta));
            let minus_decay = simd.mul(decay, simd.splat(-1.0));
            for (i, v) in v.as_chunks().0.iter().enumerate() {
                let (written, out) = (&mut written[t * width + i], &mut out[t * width + i]);
                let correction = simd.fma(minus_decay, simd.load(written), simd.load(v));
                simd.store(simd.mul(beta, correction), written);
                simd.store(simd.mul(decay, simd.load(out)), out);
            }
        }
        // The triangular system: what earlier blocks have written, then what the tokens of the block have.
        for first in (0..tokens).step_by(LANES) {
            let block = first..tokens.min(first + LANES);
            let (before, here) = written.split_at_mut(first * width);
            let earlier = Vectors { lanes: before, stride: 1, step: width, count: width };
            multiply(simd, &k_by_k[block.clone()], 0..first, earlier, &mut Sums { lanes: here, stride: width }, &[]);
            for t in 1..block.len() {
                let (before, here) = here.split_at_mut(t * width);
                for (before, factor) in before.chunks_exact(width).zip(&k_by_k[first + t][first..]) {
                    let factor = simd.splat(*factor);
                    for (before, here) in before.iter().zip(&mut *here) {
                        simd.store(simd.fma(factor, simd.load(before), simd.load(here)), here);
                    }
                }
            }
        }
        let vectors = Vectors { lanes: written, stride: 1, step: width, count: width };
        multiply(simd, &q_by_k[..tokens], 0..tokens, vectors, &mut Sums { lanes: out, stride: width }, &[]);
        for (t, row) in rows.enumerate() {
            self.out(row).copy_from_slice(&out[t * width..(t + 1) * width]);
        }
        // The state after the chunk.
        let decay = simd.splat((sum as f32).exp());
        for state in &mut *state {
            simd.store(simd.mul(simd.load(state), decay), state);
        }
        for (written, decay) in written.chunks_exact_mut(width).zip(&decays[..tokens]) {
            let decay = simd.splat(((sum - decay) as f32).exp());
            for written in written {
                simd.store(simd.mul(simd.load(written), decay), written);
            }
        }
        let vectors = Vectors { lanes: written, stride: 1, step: width, count: width };
        multiply(simd, &k_columns[..key_dim], 0..tokens, vectors, &mut Sums { lanes: state, stride: width }, &[]);
    }
}

/// All tokens of a run in one head.
struct HeadOfRun<'a> {
    head: Head<'a>,
    run: &'a Run<'a>,
    state: &'a mut [f32],
    scratch: &'a mut Scratch,
}

impl Kernel for HeadOfRun<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { head, run, state, scratch } = self;
        if run.start == 0 {
            state.fill(0.0);
        }
        let (state, _) = state.as_chunks_mut::<LANES>();
        let (mut row, mut position) = (run.rows.start, run.start);
        while row < run.rows.end {
            let tokens = (run.rows.end - row).min(TOKENS - position % TOKENS);
            if tokens < FEW_TOKENS || head.spec.key_dim > CHUNK {
                for row in row..row + tokens {
                    head.token(simd, row, state);
                }
            } else {
                head.chunk(simd, row..row + tokens, state, scratch);
            }
            (row, position) = (row + tokens, position + tokens);
        }
    }
}

/// What a query or key is multiplied by to have length 1.
#[inline(always)]
fn inverse_length<S: Simd>(simd: S, x: &[f32]) -> f32 {
    let (vectors, rest) = x.as_chunks();
    let mut squares = simd.splat(0.0);
    for x in vectors {
        let x = simd.load(x);
        squares = simd.fma(x, x, squares);
    }
    let squares = rest.iter().fold(simd.sum(squares), |sum, x| sum + x * x);
    // Beyond f32, the portable sum is wider.
    if squares.is_finite() { 1.0 / (squares + delta::NORMALIZE_EPSILON).sqrt() } else { delta::inverse_length(x) }
}

/// A query or key of length `scale`.
#[inline(always)]
fn normalize<S: Simd>(simd: S, x: &[f32], scale: f32, out: &mut FloatRow) {
    let factor = inverse_length(simd, x) * scale;
    for (out, x) in out.0.iter_mut().zip(x) {
        *out = x * factor;
    }
}

/// The first features of each row, side by side with those of the others.
#[inline(always)]
fn transpose<S: Simd>(simd: S, rows: &[FloatRow], columns: &mut [[f32; TOKENS]]) {
    for (block, columns) in columns.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
        for (first, rows) in rows.as_chunks::<LANES>().0.iter().enumerate() {
            let (mut from, mut to) = ([[0.0; LANES]; LANES], [[0.0; LANES]; LANES]);
            for (from, row) in from.iter_mut().zip(rows) {
                *from = row.0.as_chunks().0[block];
            }
            simd.transpose(&from, &mut to);
            for (column, to) in columns.iter_mut().zip(&to) {
                column.as_chunks_mut().0[first] = *to;
            }
        }
    }
}

/// Rows as vectors.
fn lanes(rows: &[[f32; TOKENS]]) -> &[[f32; LANES]] {
    rows.as_flattened().as_chunks().0
}

fn lanes_mut(rows: &mut [[f32; TOKENS]]) -> &mut [[f32; LANES]] {
    rows.as_flattened_mut().as_chunks_mut().0
}
