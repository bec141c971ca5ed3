//! Every operation as plain loops: the definition of what each one means.
//!
//! The functions are public so that a faster backend on host memory uses them for whatever it does not accelerate.

pub mod attention;
mod buffer;
mod cache;
pub mod delta;
pub mod experts;
pub mod norm;
pub mod product;
pub mod rope;
pub mod rows;

use crate::{
    Activation, AttentionSpec, Backend, ComputeError, DeltaSpec, Format, KvSpec, Matrix, NormGain, RopeSpec, RouteSpec,
    Run,
};

pub use buffer::{ALIGNMENT_BYTES, AlignedBytes, HostBuffer};
pub use cache::{HostCache, PANEL_TOKENS};
pub use experts::HostRouting;

/// The portable backend.
#[derive(Clone, Copy, Debug, Default)]
pub struct Portable;

impl Backend for Portable {
    type Buffer = HostBuffer;
    type Weight = Matrix<'static>;
    type Cache = HostCache;
    type Routing = HostRouting;

    fn buffer(&self, capacity: usize) -> HostBuffer {
        HostBuffer::with_capacity(capacity)
    }

    fn upload(&self, out: &mut HostBuffer, rows: usize, cols: usize, values: &[f32]) {
        out.upload(rows, cols, values);
    }

    fn shape(&self, x: &HostBuffer) -> (usize, usize) {
        x.shape()
    }

    fn reshape(&self, x: &mut HostBuffer, rows: usize, cols: usize) {
        x.reshape(rows, cols);
    }

    fn with_host<R>(&self, x: &mut HostBuffer, f: impl FnOnce(&mut [f32]) -> R) -> Result<R, ComputeError> {
        Ok(f(x.values_mut()))
    }

    fn empty_weight(&self, format: Format, rows: usize, cols: usize) -> Matrix<'static> {
        Matrix::new(format, rows, cols, vec![0; rows * format.row_bytes(cols)])
    }

    fn fill_weight(&self, w: &mut Matrix<'static>, first_row: usize, piece: &Matrix<'_>) {
        let rows = w.rows;
        let start = first_row * w.format.row_bytes(w.cols);
        w.data.to_mut()[start..start + piece.data.len()].copy_from_slice(&piece.data);
        if let Some(factors) = &piece.row_scale {
            let row_scale = w.row_scale.get_or_insert_with(|| vec![1.0; rows]);
            row_scale[first_row..first_row + factors.len()].copy_from_slice(factors);
        }
    }

    fn weight_bytes(&self, w: &Matrix<'static>) -> usize {
        w.bytes()
    }

    fn embed(&self, out: &mut HostBuffer, w: &Matrix<'static>, tokens: &[u32]) {
        product::embed(out, w, tokens);
    }

    fn matmul(&self, out: &mut HostBuffer, x: &HostBuffer, w: &Matrix<'static>) {
        product::matmul(out, x, w);
    }

    fn rms_norm(
        &self,
        out: &mut HostBuffer,
        x: &HostBuffer,
        width: usize,
        gain: NormGain<'_, HostBuffer>,
        epsilon: f32,
    ) {
        norm::rms_norm(out, x, width, &gain, epsilon);
    }

    fn rms_norm_in_place(&self, x: &mut HostBuffer, width: usize, gain: NormGain<'_, HostBuffer>, epsilon: f32) {
        norm::rms_norm_in_place(x.values_mut(), width, &gain, epsilon);
    }

    fn scale_columns(&self, x: &mut HostBuffer, gain: &HostBuffer) {
        norm::scale_columns(x, gain);
    }

    fn sum_squares(&self, out: &mut HostBuffer, x: &HostBuffer) {
        norm::sum_squares(out, x);
    }

    fn scale_by_squares(&self, x: &mut HostBuffer, squares: &HostBuffer, width: usize, epsilon: f32) {
        norm::scale_by_squares(x, squares, width, epsilon);
    }

    fn add(&self, x: &mut HostBuffer, y: &HostBuffer) {
        rows::add(x, y);
    }

    fn add_row(&self, x: &mut HostBuffer, row: &HostBuffer) {
        rows::add_row(x, row);
    }

    fn blend(&self, x: &mut HostBuffer, alpha: &HostBuffer, y: &HostBuffer, beta: &HostBuffer) {
        rows::blend(x, alpha, y, beta);
    }

    fn scale(&self, x: &mut HostBuffer, factor: f32) {
        rows::scale(x, factor);
    }

    fn scale_rows(&self, x: &mut HostBuffer, factors: &[f32]) {
        rows::scale_rows(x, factors);
    }

    fn softcap(&self, x: &mut HostBuffer, cap: f32) {
        rows::softcap(x, cap);
    }

    fn sigmoid_gate(&self, x: &mut HostBuffer, gate: &HostBuffer) {
        rows::sigmoid_gate(x, gate);
    }

    fn gated(&self, gate: &mut HostBuffer, up: &HostBuffer, activation: Activation) {
        rows::gated(gate, up, activation);
    }

    fn select_rows(&self, out: &mut HostBuffer, x: &HostBuffer, rows: &[u32]) {
        rows::select_rows(out, x, rows);
    }

    fn cache(&self, spec: KvSpec) -> HostCache {
        HostCache::new(spec)
    }

    fn rope(&self, x: &mut HostBuffer, positions: &[u32], spec: &RopeSpec) {
        rope::rope(x, positions, spec);
    }

    fn cache_write(&self, cache: &mut HostCache, k: &HostBuffer, v: &HostBuffer, runs: &[Run<'_>]) {
        cache.write(k, v, runs);
    }

    fn attention(
        &self,
        out: &mut HostBuffer,
        q: &HostBuffer,
        cache: &HostCache,
        runs: &[Run<'_>],
        spec: &AttentionSpec<'_, HostBuffer>,
    ) {
        attention::attention(out, q, cache, runs, spec);
    }

    fn routing(&self, tokens: usize, top_k: usize) -> HostRouting {
        HostRouting::with_capacity(tokens, top_k)
    }

    fn route(&self, out: &mut HostRouting, logits: &HostBuffer, spec: &RouteSpec<'_, HostBuffer>) {
        out.route(logits, spec);
    }

    fn expert_matmul(&self, out: &mut HostBuffer, x: &HostBuffer, w: &Matrix<'static>, routing: &HostRouting) {
        experts::expert_matmul(out, x, w, routing);
    }

    fn expert_add(&self, x: &mut HostBuffer, bias: &HostBuffer, routing: &HostRouting) {
        experts::expert_add(x, bias, routing);
    }

    fn expert_combine(&self, out: &mut HostBuffer, x: &HostBuffer, routing: &HostRouting) {
        experts::expert_combine(out, x, routing);
    }

    fn causal_conv(
        &self,
        out: &mut HostBuffer,
        x: &HostBuffer,
        weight: &HostBuffer,
        state: &mut HostBuffer,
        runs: &[Run<'_>],
    ) {
        delta::causal_conv(out, x, weight, state, runs);
    }

    fn delta_rule(
        &self,
        out: &mut HostBuffer,
        qkv: &HostBuffer,
        decay: &HostBuffer,
        beta: &HostBuffer,
        state: &mut HostBuffer,
        runs: &[Run<'_>],
        spec: DeltaSpec,
    ) {
        delta::delta_rule(out, qkv, decay, beta, state, runs, spec);
    }

    fn delta_gates(&self, a: &mut HostBuffer, b: &mut HostBuffer, a_log: &HostBuffer, dt_bias: &HostBuffer) {
        delta::delta_gates(a, b, a_log, dt_bias);
    }
}
