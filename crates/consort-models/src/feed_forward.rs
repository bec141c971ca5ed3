//! The gated feed-forward block (Shazeer 2020, arXiv 2002.05202).

use std::ops::Range;

use consort_compute::{Activation, Backend};

use crate::partition::split_features;
use crate::projection::Projection;
use crate::registry::LoadOptions;
use crate::{Loader, ModelError};

/// One shard's part of a block: `width` counts its features.
pub(crate) struct FeedForward<B: Backend> {
    /// `[width, hidden]`.
    gate: Projection<B>,
    /// `[width, hidden]`.
    up: Projection<B>,
    /// `[hidden, width]`.
    down: Projection<B>,
}

/// Buffers for the largest step.
pub(crate) struct FeedForwardWork<B: Backend> {
    /// `[tokens, width]`.
    gate: B::Buffer,
    /// `[tokens, width]`.
    up: B::Buffer,
}

/// This shard's features of a block of `width`, the same in all layers. `downs` are the names of the block's down
/// projections, which may be quantized differently from layer to layer: a cut respects the blocks of all.
pub(crate) fn feed_forward_part<B: Backend>(
    loader: &Loader<'_, B>,
    width: usize,
    downs: impl IntoIterator<Item = String>,
) -> Result<Range<usize>, ModelError> {
    let unit = loader.column_unit(downs);
    let parts = split_features("feed-forward width", width, unit, &loader.placement.shares)
        .map_err(|reason| loader.does_not_fit(reason))?;
    Ok(parts[loader.placement.shard].clone())
}

impl<B: Backend> FeedForward<B> {
    /// Loads `part` of the block `prefix` (`model.layers.0.mlp`), whose gate is `[width, hidden]`.
    pub(crate) fn load(
        loader: &mut Loader<'_, B>,
        prefix: &str,
        [width, hidden]: [usize; 2],
        part: &Range<usize>,
        bias: bool,
    ) -> Result<Self, ModelError> {
        let at = |name: &str| format!("{prefix}.{name}");
        Ok(Self {
            gate: Projection::rows(loader, &at("gate_proj"), [width, hidden], part, bias)?,
            up: Projection::rows(loader, &at("up_proj"), [width, hidden], part, bias)?,
            down: Projection::columns(loader, &at("down_proj"), [hidden, width], part, bias)?,
        })
    }

    /// `out = down(activation(gate(x)) · up(x))`: this shard's part of the sum, `[tokens, hidden]`.
    pub(crate) fn apply(
        &self,
        b: &B,
        work: &mut FeedForwardWork<B>,
        out: &mut B::Buffer,
        x: &B::Buffer,
        activation: Activation,
    ) {
        self.gate.apply(b, &mut work.gate, x);
        self.up.apply(b, &mut work.up, x);
        b.gated(&mut work.gate, &work.up, activation);
        self.down.apply(b, out, &work.gate);
    }
}

impl<B: Backend> FeedForwardWork<B> {
    pub(crate) fn new(b: &B, options: &LoadOptions, width: usize) -> Self {
        let buffer = || b.buffer(options.max_tokens * width);
        Self { gate: buffer(), up: buffer() }
    }
}
