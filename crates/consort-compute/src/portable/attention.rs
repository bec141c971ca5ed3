//! Causal attention over the cache.

use crate::{AttentionSpec, Run};

use super::{HostBuffer, HostCache, product::dot, rows::softcap_value};

impl<Buffer> AttentionSpec<'_, Buffer> {
    /// The local KV head that local query head `head` reads, of `kv_heads`.
    pub fn kv_head(&self, head: usize, kv_heads: usize) -> usize {
        match self.kv_head_of {
            Some(table) => table[head] as usize,
            None => head / (self.heads / kv_heads),
        }
    }

    /// The first position that a query at `position` sees.
    pub fn first_position(&self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }
}

/// Attention of queries `[n, heads · key_dim]` over the cache, which already holds this step's keys:
/// `out [n, heads · value_dim]`.
pub fn attention(
    out: &mut HostBuffer,
    q: &HostBuffer,
    cache: &HostCache,
    runs: &[Run<'_>],
    spec: &AttentionSpec<'_, HostBuffer>,
) {
    let (key_dim, value_dim) = (cache.spec().key_dim, cache.spec().value_dim);
    assert_eq!(q.cols(), spec.heads * key_dim, "queries of this cache");
    out.reshape(q.rows(), spec.heads * value_dim);
    let mut scratch = AttentionScratch::default();
    for run in runs {
        for (position, row) in (run.start..).zip(run.rows.clone()) {
            let heads = out.row_mut(row).chunks_exact_mut(value_dim).zip(q.row(row).chunks_exact(key_dim));
            for (head, (out, query)) in heads.enumerate() {
                attend(out, query, cache, run, position, head, spec, &mut scratch);
            }
        }
    }
}

/// Working memory of [`attend`], to be used again from one call to the next.
#[derive(Clone, Debug, Default)]
pub struct AttentionScratch {
    /// One logit, then one weight, for each visible position.
    weights: Vec<f32>,
    /// One key or value, decoded.
    row: Vec<f32>,
    /// The weighted values so far: in f64, so that a long context costs no precision.
    sums: Vec<f64>,
}

/// Attention of one query head at one position: `out = Σ_p softmax(scale · query · key_p)_p · value_p`.
///
/// The result depends on nothing but the query and the cache, so it has the same bits however a prompt is cut into chunks.
#[allow(clippy::too_many_arguments)]
pub fn attend(
    out: &mut [f32],
    query: &[f32],
    cache: &HostCache,
    run: &Run<'_>,
    position: usize,
    head: usize,
    spec: &AttentionSpec<'_, HostBuffer>,
    scratch: &mut AttentionScratch,
) {
    let layout = cache.spec();
    let kv_head = spec.kv_head(head, layout.heads);
    let visible = spec.first_position(position)..position + 1;
    let AttentionScratch { weights, row, sums } = scratch;

    row.resize(query.len(), 0.0);
    weights.clear();
    weights.extend(visible.clone().map(|position| {
        let (block, token) = layout.place(run, position);
        layout.read_key(cache.keys(block, kv_head), token, 0, row);
        let logit = spec.scale * dot(query, row);
        spec.softcap.map_or(logit, |cap| softcap_value(logit, cap))
    }));

    softmax_with_sink(weights, spec.sinks.map(|sinks| sinks.values()[head]));

    sums.clear();
    sums.resize(out.len(), 0.0);
    row.resize(out.len(), 0.0);
    for (position, weight) in visible.zip(weights) {
        let (block, token) = layout.place(run, position);
        layout.read_value(cache.values(block, kv_head), token, row);
        sums.iter_mut().zip(&*row).for_each(|(sum, value)| *sum += f64::from(*weight) * f64::from(*value));
    }
    out.iter_mut().zip(sums).for_each(|(out, sum)| *out = *sum as f32);
}

/// Softmax in place. A sink is one more logit, whose weight is dropped. A NaN logit makes every weight NaN.
pub fn softmax_with_sink(logits: &mut [f32], sink: Option<f32>) {
    let largest = logits.iter().copied().chain(sink).fold(f32::NEG_INFINITY, f32::max);
    logits.iter_mut().for_each(|logit| *logit = (*logit - largest).exp());
    let sum: f64 = logits.iter().chain(&sink.map(|sink| (sink - largest).exp())).map(|&weight| f64::from(weight)).sum();
    logits.iter_mut().for_each(|weight| *weight = (f64::from(*weight) / sum) as f32);
}
