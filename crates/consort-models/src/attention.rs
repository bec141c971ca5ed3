//! Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245), divided by KV head group: the parts that do not differ
//! between families. What happens between projection and cache (norms, rotary embeddings) is each family's own.

use std::ops::Range;

use consort_compute::{AttentionSpec, Backend, Run};

use crate::decoder::check_head_cut;
use crate::partition::{HeadShare, scaled, split_heads};
use crate::projection::Projection;
use crate::registry::LoadOptions;
use crate::{Batch, Config, Loader, ModelError, Pass};

/// The heads of a model, and this shard's share of them.
pub(crate) struct Heads {
    /// Query heads of the whole model.
    pub heads: usize,
    /// KV heads of the whole model.
    pub kv_heads: usize,
    /// Features of a head.
    pub head_dim: usize,
    /// This shard's.
    pub share: HeadShare,
}

/// One layer's share. `heads` and `kv` count this shard's heads.
pub(crate) struct Attention<B: Backend> {
    /// `[heads · head_dim, hidden]`.
    pub query: Projection<B>,
    /// `[kv · head_dim, hidden]`.
    pub key: Projection<B>,
    /// `[kv · head_dim, hidden]`.
    pub value: Projection<B>,
    /// `[hidden, heads · head_dim]`.
    pub output: Projection<B>,
    pub cache: B::Cache,
    /// How far back this layer sees; `None`: all the way.
    pub window: Option<usize>,
}

/// Buffers for the largest step.
pub(crate) struct AttentionWork<B: Backend> {
    /// `[tokens, heads · head_dim]`.
    pub q: B::Buffer,
    /// `[tokens, kv · head_dim]`.
    pub k: B::Buffer,
    /// `[tokens, kv · head_dim]`.
    pub v: B::Buffer,
    /// `[tokens, heads · head_dim]`.
    pub attended: B::Buffer,
}

/// The runs of a step with either kind of block table.
pub(crate) struct Runs<'a> {
    pub full: Vec<Run<'a>>,
    ring: Vec<Run<'a>>,
}

/// Which projections of a layer have a bias.
#[derive(Clone, Copy)]
pub(crate) struct AttentionBias {
    /// Query, key and value.
    pub qkv: bool,
    pub output: bool,
}

impl Heads {
    /// Reads the usual keys, with `head_dim` where the config has none, and divides the heads among the shards of this stage.
    /// `layers` are the layers of the model that attend, whose query projection gives `outputs` values for each feature of a
    /// query.
    pub(crate) fn read<B: Backend>(
        config: &Config<'_>,
        loader: &Loader<'_, B>,
        head_dim: Option<usize>,
        layers: impl Iterator<Item = usize> + Clone,
        outputs: usize,
    ) -> Result<Self, ModelError> {
        let hidden = config.size("hidden_size")?;
        let heads = config.size("num_attention_heads")?;
        let kv_heads = config.size_or("num_key_value_heads", heads)?;
        let head_dim = config.size_or("head_dim", head_dim.unwrap_or(hidden / heads))?;
        if head_dim == 0 {
            let expected = format!("a head_dim beside it, or no more than hidden_size, which is {hidden}");
            return Err(config.bad("num_attention_heads", &expected));
        }
        if !heads.is_multiple_of(kv_heads) {
            return Err(config.bad("num_key_value_heads", &format!("a divisor of the {heads} query heads")));
        }
        let queries = layers.clone().map(|i| format!("model.layers.{i}.self_attn.q_proj.weight"));
        loader.confirm(config, "num_attention_heads", queries, &[outputs * heads * head_dim, hidden])?;
        let placement = loader.placement;
        let shares = split_heads(heads, kv_heads, &placement.shares).map_err(|reason| loader.does_not_fit(reason))?;
        let cuts: Vec<Range<usize>> = shares.iter().map(|s| s.heads.clone()).collect();
        let projections = layers.map(|i| format!("model.layers.{i}.self_attn.o_proj.weight"));
        check_head_cut(loader, &cuts, head_dim, projections)?;
        Ok(Self { heads, kv_heads, head_dim, share: shares[placement.shard].clone() })
    }

    /// This shard's features of the queries, which are also its columns of the output projection.
    pub(crate) fn query_part(&self) -> Range<usize> {
        scaled(&self.share.heads, self.head_dim)
    }

    /// This shard's features of keys and of values.
    pub(crate) fn kv_part(&self) -> Range<usize> {
        scaled(&self.share.kv_heads, self.head_dim)
    }

    /// `[out, in]` of the whole query projection.
    pub(crate) fn query_shape(&self, hidden: usize) -> [usize; 2] {
        [self.heads * self.head_dim, hidden]
    }

    /// `[out, in]` of the whole key and value projections.
    pub(crate) fn kv_shape(&self, hidden: usize) -> [usize; 2] {
        [self.kv_heads * self.head_dim, hidden]
    }

    /// A cache for one layer of this shard.
    pub(crate) fn cache<B: Backend>(&self, b: &B, window: Option<usize>, options: &LoadOptions) -> B::Cache {
        b.cache(options.cache.layer(window, self.share.kv_heads.len(), self.head_dim, self.head_dim))
    }
}

impl<B: Backend> Attention<B> {
    /// Loads this shard's part of the block `prefix` (`model.layers.0.self_attn`).
    pub(crate) fn load(
        loader: &mut Loader<'_, B>,
        prefix: &str,
        hidden: usize,
        heads: &Heads,
        bias: AttentionBias,
        window: Option<usize>,
        options: &LoadOptions,
    ) -> Result<Self, ModelError> {
        let at = |name: &str| format!("{prefix}.{name}");
        let (query, kv) = (heads.query_part(), heads.kv_part());
        let (query_shape, kv_shape) = (heads.query_shape(hidden), heads.kv_shape(hidden));
        let output_shape = [query_shape[1], query_shape[0]];
        Ok(Self {
            query: Projection::rows(loader, &at("q_proj"), query_shape, &query, bias.qkv)?,
            key: Projection::rows(loader, &at("k_proj"), kv_shape, &kv, bias.qkv)?,
            value: Projection::rows(loader, &at("v_proj"), kv_shape, &kv, bias.qkv)?,
            output: Projection::columns(loader, &at("o_proj"), output_shape, &query, bias.output)?,
            cache: heads.cache(loader.backend, window, options),
            window,
        })
    }

    /// Queries, keys and values of `h [tokens, hidden]`.
    pub(crate) fn project(&self, b: &B, work: &mut AttentionWork<B>, h: &B::Buffer) {
        self.query.apply(b, &mut work.q, h);
        self.key.apply(b, &mut work.k, h);
        self.value.apply(b, &mut work.v, h);
    }

    /// Remembers this step's keys and values and attends to all of the sequence's: `work.attended`.
    pub(crate) fn attend(
        &mut self,
        pass: &Pass<'_, B>,
        runs: &Runs<'_>,
        heads: &Heads,
        work: &mut AttentionWork<B>,
        scale: f32,
        sinks: Option<&B::Buffer>,
    ) {
        let (b, runs) = (pass.backend, runs.of(self.window));
        b.cache_write(&mut self.cache, &work.k, &work.v, runs);
        let attention = AttentionSpec {
            heads: heads.share.heads.len(),
            kv_head_of: heads.share.irregular(),
            scale,
            window: self.window,
            sinks,
            softcap: None,
        };
        b.attention(&mut work.attended, &work.q, &self.cache, runs, &attention);
    }
}

impl<B: Backend> AttentionWork<B> {
    pub(crate) fn new(b: &B, options: &LoadOptions, heads: &Heads) -> Self {
        let buffer = |columns: usize| b.buffer(options.max_tokens * columns);
        let (query, kv) = (heads.query_part().len(), heads.kv_part().len());
        Self { q: buffer(query), k: buffer(kv), v: buffer(kv), attended: buffer(query) }
    }
}

impl<'a> Runs<'a> {
    pub(crate) fn new(batch: &Batch<'a>) -> Self {
        Self {
            full: batch.runs.iter().map(|r| r.full.clone()).collect(),
            ring: batch.runs.iter().map(|r| r.window.clone()).collect(),
        }
    }

    /// The runs for a layer with or without a window.
    pub(crate) fn of(&self, window: Option<usize>) -> &[Run<'a>] {
        if window.is_some() { &self.ring } else { &self.full }
    }
}
