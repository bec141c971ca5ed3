//! Gathers a matrix whose columns are divided among the shards of a stage.

use std::ops::Range;

use consort_compute::Backend;

use crate::{ModelError, Pass};

/// Gathers activations `[rows, part]` of all shards into `[rows, width]`.
pub(crate) struct ColumnGather {
    /// Each shard's columns.
    parts: Vec<Range<usize>>,
    shard: usize,
    /// One shard's rows after another's: the order of the wire.
    values: Vec<f32>,
    lengths: Vec<usize>,
}

impl ColumnGather {
    /// For matrices of up to `rows` rows.
    pub(crate) fn new(parts: Vec<Range<usize>>, shard: usize, rows: usize) -> Self {
        let width = parts.last().map_or(0, |part| part.end);
        Self { shard, values: Vec::with_capacity(rows * width), lengths: Vec::with_capacity(parts.len()), parts }
    }

    pub(crate) fn gather<B: Backend>(
        &mut self,
        pass: &Pass<'_, B>,
        out: &mut B::Buffer,
        part: &mut B::Buffer,
    ) -> Result<(), ModelError> {
        let Self { parts, shard, values, lengths } = self;
        let (rows, _) = pass.backend.shape(part);
        let width = parts.last().map_or(0, |part| part.end);
        lengths.clear();
        lengths.extend(parts.iter().map(|part| rows * part.len()));
        values.clear();
        values.resize(rows * width, 0.0);
        let mine: usize = lengths[..*shard].iter().sum();
        pass.backend.with_host(part, |part| values[mine..][..part.len()].copy_from_slice(part))?;
        pass.ranks.shards.all_gather(values, lengths)?;

        pass.backend.reshape(out, rows, width);
        pass.backend.with_host(out, |out| {
            let mut rest = &values[..];
            for part in parts.iter() {
                for row in out.chunks_exact_mut(width) {
                    let (first, others) = rest.split_at(part.len());
                    row[part.clone()].copy_from_slice(first);
                    rest = others;
                }
            }
        })?;
        Ok(())
    }
}
