//! What a forward pass works with: the backend, the step, and the other ranks.

use consort_compute::{Backend, KvFormat, KvSpec};
use consort_fabric::Group;

use crate::{Batch, ModelError};

/// The groups in which a rank talks to others during a pass.
pub struct Ranks {
    /// The shards of this rank's stage.
    pub shards: Group,
    /// The same shard of the stage before and this one; none on the first stage.
    pub previous: Option<Group>,
    /// This one and the same shard of the stage after; none on the last stage.
    pub next: Option<Group>,
}

impl Ranks {
    /// One rank that does everything.
    pub fn solo() -> Self {
        Self { shards: Group::solo(), previous: None, next: None }
    }
}

/// How the caches of all layers are laid out. Block numbers in a step's tables count within these pools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheLayout {
    /// Tokens of one block.
    pub block_tokens: usize,
    /// Blocks of each layer that sees everything.
    pub blocks: usize,
    /// Blocks of each sliding-window layer.
    pub window_blocks: usize,
    /// Sequences that recurrent layers keep states for.
    pub slots: usize,
    /// How keys and values are stored.
    pub format: KvFormat,
}

impl CacheLayout {
    /// The cache of one layer with these heads.
    pub fn layer(&self, window: Option<usize>, heads: usize, key_dim: usize, value_dim: usize) -> KvSpec {
        let blocks = if window.is_some() { self.window_blocks } else { self.blocks };
        KvSpec { blocks, block_tokens: self.block_tokens, heads, key_dim, value_dim, format: self.format }
    }

    /// Blocks of the ring that a sequence needs in layers with this window, when a step holds up to `step_tokens` of it: the
    /// first query of a step still sees `window - 1` older positions while the whole step is already written.
    pub fn ring_blocks(window: usize, step_tokens: usize, block_tokens: usize) -> usize {
        (window - 1 + step_tokens).div_ceil(block_tokens) + 1
    }
}

/// One step's forward pass on one rank.
pub struct Pass<'a, B: Backend> {
    /// Where the arithmetic happens.
    pub backend: &'a B,
    /// The other ranks.
    pub ranks: &'a Ranks,
    /// What is run.
    pub batch: &'a Batch<'a>,
}

impl<B: Backend> Pass<'_, B> {
    /// Sums a buffer over the stage's shards.
    pub fn all_reduce(&self, x: &mut B::Buffer) -> Result<(), ModelError> {
        if self.ranks.shards.size() > 1 {
            self.backend.with_host(x, |values| self.ranks.shards.all_reduce(values))??;
        }
        Ok(())
    }
}
