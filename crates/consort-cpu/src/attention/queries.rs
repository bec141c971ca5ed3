//! Who asks: the query heads that share a key head, for some tokens of a run.

use std::ops::Range;

use consort_compute::portable::HostBuffer;
use consort_compute::{AttentionSpec, KvSpec, Run};

use crate::activations::FloatRow;
use crate::weight::CHUNK;

use super::cached::Cached;

/// Query heads of one KV head, for consecutive tokens.
pub struct Queries<'a> {
    pub q: &'a HostBuffer,
    pub cached: Cached<'a>,
    pub run: &'a Run<'a>,
    pub spec: &'a AttentionSpec<'a, HostBuffer>,
    pub heads: Range<usize>,
    pub tokens: Range<usize>,
}

impl Queries<'_> {
    pub fn len(&self) -> usize {
        self.heads.len() * self.tokens.len()
    }

    /// Token and head of query `i`. Queries of one token follow each other.
    pub fn place(&self, i: usize) -> (usize, usize) {
        (self.tokens.start + i / self.heads.len(), self.heads.start + i % self.heads.len())
    }

    /// The shape of the cache.
    pub fn cache(&self) -> &KvSpec {
        self.cached.cache.spec()
    }

    /// Positions that query `i` sees.
    pub fn visible(&self, i: usize) -> Range<usize> {
        let position = self.run.start + self.place(i).0;
        self.spec.first_position(position)..position + 1
    }

    /// Positions that any of the queries sees.
    pub fn visible_to_any(&self) -> Range<usize> {
        self.visible(0).start..self.visible(self.len() - 1).end
    }

    /// Copies the queries, times `factor`, to where products read them: `[chunk of features][query]`.
    #[inline(always)]
    pub fn load(&self, factor: f32, out: &mut [FloatRow]) {
        let (n, key_dim) = (self.len(), self.cache().key_dim);
        for i in 0..n {
            let (token, head) = self.place(i);
            let query = &self.q.row(self.run.rows.start + token)[head * key_dim..][..key_dim];
            for (chunk, values) in query.chunks(CHUNK).enumerate() {
                out[chunk * n + i].0.iter_mut().zip(values).for_each(|(out, x)| *out = x * factor);
            }
        }
    }
}
