//! Llama and its close relatives: Llama 2–3.x, SmolLM, Mistral, Qwen 2 and 2.5, Qwen 3 (dense).
//!
//! A pre-norm decoder (Touvron et al. 2023, arXiv 2302.13971) with grouped-query attention, rotary positions and a gated
//! feed-forward block. The relatives differ in a few optional parts, which [`FAMILIES`] lists.
//!
//! Shards: attention is cut by KV head group, the feed-forward block by features; each half of a layer ends in one
//! all-reduce of `[tokens, hidden]`.

use std::ops::Range;

use consort_compute::{Activation, AttentionSpec, Backend, NormGain, RopeSpec, Run};
use serde_json::json;

use crate::decoder::{Frame, FrameSpec, check_head_cut, over_layers};
use crate::partition::{HeadShare, scaled, split_features, split_heads};
use crate::registry::{Built, LoadOptions, Model};
use crate::rope::rope;
use crate::{Config, Loader, ModelError, Pass};

/// What sets a relative apart.
struct Family {
    name: &'static str,
    /// Query, key and value projections always have a bias (elsewhere `attention_bias` says so, for the output too).
    qkv_bias: bool,
    /// Queries and keys pass an RMS norm per head before the rotary embedding.
    head_norm: bool,
}

const FAMILIES: [Family; 4] = [
    Family { name: "llama", qkv_bias: false, head_norm: false },
    Family { name: "mistral", qkv_bias: false, head_norm: false },
    Family { name: "qwen2", qkv_bias: true, head_norm: false },
    Family { name: "qwen3", qkv_bias: false, head_norm: true },
];

/// `model_type` of the families of this file.
pub(crate) const NAMES: &[&str] = &["llama", "mistral", "qwen2", "qwen3"];

/// One layer's share. `heads` and `kv` count this shard's heads, `width` its feed-forward features.
struct Layer<B: Backend> {
    /// `[hidden]`.
    attention_norm: B::Buffer,
    /// `[heads · head_dim, hidden]`.
    query: Projection<B>,
    /// `[kv · head_dim, hidden]`.
    key: Projection<B>,
    /// `[kv · head_dim, hidden]`.
    value: Projection<B>,
    /// `[head_dim]` each.
    head_norms: Option<(B::Buffer, B::Buffer)>,
    /// `[hidden, heads · head_dim]`.
    output: Projection<B>,
    cache: B::Cache,
    /// How far back this layer sees; `None`: all the way.
    window: Option<usize>,

    /// `[hidden]`.
    feed_forward_norm: B::Buffer,
    /// `[width, hidden]`.
    gate: Projection<B>,
    /// `[width, hidden]`.
    up: Projection<B>,
    /// `[hidden, width]`.
    down: Projection<B>,
}

/// A linear layer with an optional bias.
struct Projection<B: Backend> {
    weight: B::Weight,
    bias: Option<B::Buffer>,
}

/// Buffers for the largest step.
struct Workspace<B: Backend> {
    /// The residual stream, `[tokens, hidden]`.
    x: B::Buffer,
    /// What a half layer reads and writes, `[tokens, hidden]`.
    h: B::Buffer,
    /// `[tokens, heads · head_dim]`.
    q: B::Buffer,
    /// `[tokens, kv · head_dim]`.
    k: B::Buffer,
    /// `[tokens, kv · head_dim]`.
    v: B::Buffer,
    /// `[tokens, heads · head_dim]`.
    attended: B::Buffer,
    /// `[tokens, width]`.
    gate: B::Buffer,
    /// `[tokens, width]`.
    up: B::Buffer,
}

struct Llama<B: Backend> {
    frame: Frame<B>,
    layers: Vec<Layer<B>>,
    work: Workspace<B>,
    rope: RopeSpec,
    heads: HeadShare,
    head_dim: usize,
    hidden: usize,
    epsilon: f32,
}

impl<B: Backend> Model<B> for Llama<B> {
    fn forward(&mut self, pass: &Pass<'_, B>, logits: &mut B::Buffer) -> Result<(), ModelError> {
        let b = pass.backend;
        let Self { hidden, head_dim, epsilon, .. } = *self;
        let Workspace { x, h, q, k, v, attended, gate, up } = &mut self.work;
        let full: Vec<Run<'_>> = pass.batch.runs.iter().map(|r| r.full.clone()).collect();
        let ring: Vec<Run<'_>> = pass.batch.runs.iter().map(|r| r.window.clone()).collect();

        self.frame.enter(pass, x)?;
        for layer in &mut self.layers {
            // Attention: x += output(attend(rope(query(h)), rope(key(h)), value(h))), h = norm(x)
            b.rms_norm(h, x, hidden, NormGain::After(&layer.attention_norm), epsilon);
            layer.query.apply(b, q, h);
            layer.key.apply(b, k, h);
            layer.value.apply(b, v, h);
            if let Some((query_norm, key_norm)) = &layer.head_norms {
                b.rms_norm_in_place(q, head_dim, NormGain::After(query_norm), epsilon);
                b.rms_norm_in_place(k, head_dim, NormGain::After(key_norm), epsilon);
            }
            b.rope(q, pass.batch.positions, &self.rope);
            b.rope(k, pass.batch.positions, &self.rope);
            let runs = if layer.window.is_some() { &ring } else { &full };
            b.cache_write(&mut layer.cache, k, v, runs);
            let attention = AttentionSpec {
                heads: self.heads.heads.len(),
                kv_head_of: self.heads.irregular(),
                scale: (head_dim as f32).powf(-0.5),
                window: layer.window,
                sinks: None,
                softcap: None,
            };
            b.attention(attended, q, &layer.cache, runs, &attention);
            layer.output.apply(b, h, attended); // this shard's part of the sum
            pass.all_reduce(h)?;
            b.add(x, h);

            // Feed-forward: x += down(silu(gate(h)) · up(h)), h = norm(x)
            b.rms_norm(h, x, hidden, NormGain::After(&layer.feed_forward_norm), epsilon);
            layer.gate.apply(b, gate, h);
            layer.up.apply(b, up, h);
            b.gated(gate, up, Activation::Silu);
            layer.down.apply(b, h, gate); // this shard's part of the sum
            pass.all_reduce(h)?;
            b.add(x, h);
        }
        self.frame.leave(pass, x, logits)?;
        Ok(())
    }
}

impl<B: Backend> Projection<B> {
    /// `out = x · wᵀ + bias`.
    fn apply(&self, b: &B, out: &mut B::Buffer, x: &B::Buffer) {
        b.matmul(out, x, &self.weight);
        if let Some(bias) = &self.bias {
            b.add_row(out, bias);
        }
    }

    /// Loads the output features `part` of `name`.
    fn rows(
        loader: &mut Loader<'_, B>,
        name: &str,
        shape: [usize; 2],
        part: &Range<usize>,
        bias: bool,
    ) -> Result<Self, ModelError> {
        Ok(Self {
            weight: loader.rows(&format!("{name}.weight"), shape, part)?,
            bias: bias.then(|| loader.vector_part(&format!("{name}.bias"), shape[0], part)).transpose()?,
        })
    }

    /// Loads the input features `part` of `name`. The bias belongs to the sum, so only the first shard adds it.
    fn columns(
        loader: &mut Loader<'_, B>,
        name: &str,
        shape: [usize; 2],
        part: &Range<usize>,
        bias: bool,
    ) -> Result<Self, ModelError> {
        let bias = bias && loader.placement.shard == 0;
        Ok(Self {
            weight: loader.columns(&format!("{name}.weight"), shape, part)?,
            bias: bias.then(|| loader.vector(&format!("{name}.bias"), shape[0])).transpose()?,
        })
    }
}

/// Reads a config and loads one rank's part of the model.
pub(crate) fn build<B: Backend>(config: &Config<'_>, loader: &mut Loader<'_, B>, options: &LoadOptions) -> Built<B> {
    let name = config.architecture()?;
    let family = FAMILIES.iter().find(|f| f.name == name).expect("the registry asks for names of this file only");
    config.only("hidden_act", &[json!("silu")])?;

    let hidden = config.size("hidden_size")?;
    let layers = config.size("num_hidden_layers")?;
    let heads = config.size("num_attention_heads")?;
    let kv_heads = config.size_or("num_key_value_heads", heads)?;
    let head_dim = config.size_or("head_dim", hidden / heads)?;
    let width = config.size("intermediate_size")?;
    let epsilon = config.number_or("rms_norm_eps", 1e-6)? as f32;
    let attention_bias = config.flag_or("attention_bias", false)?;
    let mlp_bias = config.flag_or("mlp_bias", false)?;
    let windows = config.windows()?;
    if heads % kv_heads != 0 {
        return Err(config.unsupported("num_key_value_heads"));
    }

    let (placement, b) = (loader.placement, loader.backend);
    let shares = split_heads(heads, kv_heads, &placement.shares).map_err(|reason| loader.does_not_fit(reason))?;
    let cuts: Vec<Range<usize>> = shares.iter().map(|s| s.heads.clone()).collect();
    check_head_cut(loader, &cuts, head_dim, over_layers(layers, "self_attn.o_proj.weight"))?;
    let unit = loader.column_unit(over_layers(layers, "mlp.down_proj.weight"));
    let widths = split_features("feed-forward width", width, unit, &placement.shares)
        .map_err(|reason| loader.does_not_fit(reason))?;
    let (share, my_width) = (shares[placement.shard].clone(), widths[placement.shard].clone());
    let (query_rows, kv_rows) = (scaled(&share.heads, head_dim), scaled(&share.kv_heads, head_dim));

    let frame = FrameSpec {
        vocabulary: config.size("vocab_size")?,
        hidden,
        tied: config.flag_or("tie_word_embeddings", false)?,
        epsilon,
        norm_offset: 0.0,
    };
    let frame = Frame::load(loader, &frame, options)?;
    let mut loaded = Vec::with_capacity(placement.layers.len());
    for i in placement.layers.clone() {
        let at = |part: &str| format!("model.layers.{i}.{part}");
        let qkv_bias = family.qkv_bias || attention_bias;
        let (query_shape, kv_shape) = ([heads * head_dim, hidden], [kv_heads * head_dim, hidden]);
        let (qkv, columns) = (Projection::rows, Projection::columns);
        loaded.push(Layer {
            attention_norm: loader.vector(&at("input_layernorm.weight"), hidden)?,
            query: qkv(loader, &at("self_attn.q_proj"), query_shape, &query_rows, qkv_bias)?,
            key: qkv(loader, &at("self_attn.k_proj"), kv_shape, &kv_rows, qkv_bias)?,
            value: qkv(loader, &at("self_attn.v_proj"), kv_shape, &kv_rows, qkv_bias)?,
            head_norms: match family.head_norm {
                true => Some((
                    loader.vector(&at("self_attn.q_norm.weight"), head_dim)?,
                    loader.vector(&at("self_attn.k_norm.weight"), head_dim)?,
                )),
                false => None,
            },
            output: columns(loader, &at("self_attn.o_proj"), [hidden, heads * head_dim], &query_rows, attention_bias)?,
            cache: b.cache(options.cache.layer(windows[i], share.kv_heads.len(), head_dim, head_dim)),
            window: windows[i],
            feed_forward_norm: loader.vector(&at("post_attention_layernorm.weight"), hidden)?,
            gate: Projection::rows(loader, &at("mlp.gate_proj"), [width, hidden], &my_width, mlp_bias)?,
            up: Projection::rows(loader, &at("mlp.up_proj"), [width, hidden], &my_width, mlp_bias)?,
            down: columns(loader, &at("mlp.down_proj"), [hidden, width], &my_width, mlp_bias)?,
        });
    }

    let buffer = |columns: usize| b.buffer(options.max_tokens * columns);
    let work = Workspace {
        x: buffer(hidden),
        h: buffer(hidden),
        q: buffer(query_rows.len()),
        k: buffer(kv_rows.len()),
        v: buffer(kv_rows.len()),
        attended: buffer(query_rows.len()),
        gate: buffer(my_width.len()),
        up: buffer(my_width.len()),
    };
    let rope = rope(config, head_dim)?;
    Ok(Box::new(Llama { frame, layers: loaded, work, rope, heads: share, head_dim, hidden, epsilon }))
}
