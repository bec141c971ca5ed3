//! Sums in progress: a softmax that never sees all its logits at once (Milakov and Gimelshein 2018).

use crate::isa::{LANES, Simd};
use crate::memory::Disjoint;

use super::queries::Queries;
use super::stored::unit;

/// Below any logit, and such that the difference of two is a number.
pub const LOWEST: f32 = -1e30;

/// The sums of some queries: the largest logit, the sum of weights, and the weighted values. Logits are powers of two. All
/// f32, so that it can lie in plain memory.
pub struct Sums<'a> {
    pub largest: &'a mut [f32],
    pub weight: &'a mut [f32],
    /// `[query][value_dim in whole vectors]`.
    pub values: &'a mut [[f32; LANES]],
}

impl<'a> Sums<'a> {
    /// Values that the sums of so many queries take.
    pub fn len(queries: usize, value_dim: usize) -> usize {
        queries * (2 + value_dim.next_multiple_of(LANES))
    }

    pub fn new(memory: &'a mut [f32], queries: usize) -> Self {
        let (largest, rest) = memory.split_at_mut(queries);
        let (weight, rest) = rest.split_at_mut(queries);
        Self { largest, weight, values: rest.as_chunks_mut().0 }
    }

    pub fn clear(&mut self) {
        self.largest.fill(LOWEST);
        self.weight.fill(0.0);
        self.values.fill([0.0; LANES]);
    }

    /// Vectors of one query.
    pub fn vectors(&self) -> usize {
        self.values.len() / self.largest.len()
    }

    /// The weighted values of one query.
    fn of(&mut self, query: usize) -> &mut [[f32; LANES]] {
        let vectors = self.vectors();
        &mut self.values[query * vectors..][..vectors]
    }

    /// Makes room for a logit `largest`, and multiplies what a query has summed accordingly.
    #[inline(always)]
    pub fn raise<S: Simd>(&mut self, simd: S, query: usize, largest: f32) {
        let before = self.largest[query];
        if before == largest {
            return;
        }
        let factor = (before - largest).exp2();
        self.largest[query] = largest;
        self.weight[query] *= factor;
        let factor = simd.splat(factor);
        for values in self.of(query) {
            simd.store(simd.mul(simd.load(values), factor), values);
        }
    }

    /// Adds the sums of a later segment.
    #[inline(always)]
    pub fn merge<S: Simd>(&mut self, simd: S, later: &mut Sums<'_>) {
        for query in 0..self.largest.len() {
            let (mine, its) = (self.largest[query], later.largest[query]);
            let largest = if its > mine { its } else { mine };
            self.raise(simd, query, largest);
            let factor = (its - largest).exp2();
            self.weight[query] += later.weight[query] * factor;
            let factor = simd.splat(factor);
            for (values, later) in self.of(query).iter_mut().zip(later.of(query)) {
                simd.store(simd.fma(simd.load(later), factor, simd.load(values)), values);
            }
        }
    }

    /// Divides by the weights and writes the results.
    #[inline(always)]
    pub fn finish<S: Simd>(&mut self, simd: S, queries: &Queries<'_>, out: Disjoint<'_, f32>) {
        let value_dim = queries.cache().value_dim;
        for i in 0..queries.len() {
            let (token, head) = queries.place(i);
            if let Some(sinks) = queries.spec.sinks {
                let sink = sinks.values()[head] * std::f32::consts::LOG2_E;
                self.raise(simd, i, if sink > self.largest[i] { sink } else { self.largest[i] });
                self.weight[i] += (sink - self.largest[i]).exp2();
            }
            let factor = simd.splat(unit(queries.cache().format) / self.weight[i]);
            let row = queries.run.rows.start + token;
            // SAFETY: each query has its own place, and belongs to one task.
            let out = unsafe { out.slice((row * queries.spec.heads + head) * value_dim, value_dim) };
            for (sums, out) in self.of(i).iter().zip(out.chunks_mut(LANES)) {
                let mut values = [0.0; LANES];
                simd.store(simd.mul(simd.load(sums), factor), &mut values);
                out.copy_from_slice(&values[..out.len()]);
            }
        }
    }
}
