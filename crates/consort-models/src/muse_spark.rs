//! Muse Spark (text): a mixture of experts that run at a compressed width, with a norm on each expert's output.
//!
//! Facts: `modeling_muse_spark.py` of Hugging Face transformers 5.24. What is special, in the order of the pass: the embedding
//! is normed; queries and keys pass a scaleless norm per head, queries are scaled; three of four layers slide over a window
//! and turn by position, every fourth sees everything and has no positions; the attention output is normed per head and
//! gated; residuals are blended by stored gates; norms are zero-centred; experts work between two projections.
//!
//! Shards: attention by KV head group. A router picks `top_k` experts per token and *each* one's output is normed before the
//! outputs are combined, so whoever norms needs an expert's output whole:
//! * by width (the default): all shards hold a slice of every expert and sum `top_k` vectors of `[tokens, pooled]`;
//! * `expert`: a shard holds whole experts and norms where an expert lives; one combined vector is summed;
//! * `gather`: the activations between an expert's halves are gathered, the second half is cut by output, and only
//!   sums of squares are reduced for the norm.

use std::ops::Range;

use consort_compute::{Activation, AttentionSpec, Backend, NormGain, RopeSpec, RouteScore, RouteSpec, Run};
use serde_json::json;

use crate::decoder::{Frame, FrameSpec, check_head_cut, over_layers};
use crate::gather::ColumnGather;
use crate::partition::{HeadShare, scaled, split, split_features, split_heads};
use crate::registry::{Built, LoadOptions, Model};
use crate::rope::rope;
use crate::{Config, ExpertDivision, Loader, ModelError, Pass};

/// `model_type`, with and without the wrapper that adds vision and audio.
pub(crate) const NAMES: &[&str] = &["muse_spark", "muse_spark_text"];

/// Added to the sum of a token's router scores before they are divided by it.
const ROUTER_EPSILON: f32 = 1e-15;
/// Floor under the square of a residual gate's alpha.
const RESIDUAL_GATE_FLOOR: f32 = 1e-3;

/// One layer's share.
struct Layer<B: Backend> {
    /// `[hidden]`.
    attention_norm: B::Buffer,
    attention: Attention<B>,
    attention_gate: ResidualGate<B>,
    /// `[hidden]`.
    feed_forward_norm: B::Buffer,
    feed_forward: FeedForward<B>,
    /// `[hidden]`, applied before its norm.
    feed_forward_output_norm: B::Buffer,
    feed_forward_gate: ResidualGate<B>,
}

struct Attention<B: Backend> {
    /// `[heads · head_dim, hidden]`.
    query: B::Weight,
    /// `[kv · head_dim, hidden]`.
    key: B::Weight,
    /// `[kv · head_dim, hidden]`.
    value: B::Weight,
    /// `[heads · head_dim, hidden]`.
    gate: B::Weight,
    /// `[hidden, heads · head_dim]`.
    output: B::Weight,
    cache: B::Cache,
    window: Option<usize>,
    turns: bool,
}

/// `x ← alpha · x + beta · h`, per feature.
struct ResidualGate<B: Backend> {
    alpha: B::Buffer,
    beta: B::Buffer,
}

enum FeedForward<B: Backend> {
    /// `gate`, `up [width, hidden]`, `down [hidden, width]`.
    Dense {
        gate: B::Weight,
        up: B::Weight,
        down: B::Weight,
    },
    Sparse(Box<Experts<B>>),
}

struct Experts<B: Backend> {
    /// `[experts, hidden]`.
    router: B::Weight,
    /// `[experts]`.
    correction: B::Buffer,
    /// `[pooled, hidden]`.
    pool: B::Weight,
    /// `[pooled]`.
    pool_norm: B::Buffer,
    /// `[local experts · width, pooled]`.
    gate: B::Weight,
    /// `[local experts · width, pooled]`.
    up: B::Weight,
    /// `[local experts · pooled, width]`. `gather`: this shard's part of the outputs, of the whole width.
    down: B::Weight,
    /// `[pooled]`, applied before its norm. `gather`: this shard's part, and so below.
    output_norm: B::Buffer,
    /// `[hidden, pooled]`.
    unpool: B::Weight,
}

/// Buffers for the largest step; `pairs` are the (token, expert) pairs, `tokens · top_k`.
struct Workspace<B: Backend> {
    /// The residual stream, `[tokens, hidden]`.
    x: B::Buffer,
    /// `[tokens, hidden]`.
    h: B::Buffer,
    /// `[tokens, hidden]`.
    branch: B::Buffer,
    /// `[tokens, heads · head_dim]`, three times.
    q: B::Buffer,
    gate: B::Buffer,
    attended: B::Buffer,
    /// `[tokens, kv · head_dim]`, twice.
    k: B::Buffer,
    v: B::Buffer,
    /// `[tokens, dense width]`, twice.
    dense_gate: B::Buffer,
    dense_up: B::Buffer,
    /// `[tokens, experts]`.
    scores: B::Buffer,
    routing: B::Routing,
    /// `[tokens, pooled]`, twice.
    pooled: B::Buffer,
    combined: B::Buffer,
    /// `[pairs, width]`, twice.
    expert_gate: B::Buffer,
    expert_up: B::Buffer,
    /// `[pairs, pooled]`.
    expert_out: B::Buffer,
    /// `[pairs, 1]`.
    squares: B::Buffer,
    /// `[pairs, whole width]`, of a `gather` plan.
    gathered: B::Buffer,
    gather: ColumnGather,
}

/// The numbers that the pass needs.
#[derive(Clone)]
struct Numbers {
    hidden: usize,
    head_dim: usize,
    heads: HeadShare,
    epsilon: f32,
    post_epsilon: f32,
    query_scale: f32,
    output_multiplier: f32,
    softcap: f32,
    pooled: usize,
    top_k: usize,
    routed_scale: f32,
    /// The experts that this shard holds.
    local: Range<usize>,
    division: ExpertDivision,
}

struct MuseSpark<B: Backend> {
    frame: Frame<B>,
    layers: Vec<Layer<B>>,
    work: Workspace<B>,
    rope: RopeSpec,
    numbers: Numbers,
}

impl<B: Backend> Model<B> for MuseSpark<B> {
    fn forward(&mut self, pass: &Pass<'_, B>, logits: &mut B::Buffer) -> Result<(), ModelError> {
        let (b, n, work) = (pass.backend, &self.numbers, &mut self.work);

        self.frame.enter(pass, &mut work.x)?;
        if pass.ranks.previous.is_none() {
            b.rms_norm_in_place(&mut work.x, n.hidden, NormGain::None, n.epsilon);
        }
        for layer in &mut self.layers {
            // x ← blend(x, norm(attention(norm(x))))
            b.rms_norm(&mut work.h, &work.x, n.hidden, NormGain::After(&layer.attention_norm), n.epsilon);
            layer.attention.forward(pass, n, &self.rope, work)?;
            b.rms_norm_in_place(&mut work.branch, n.hidden, NormGain::None, n.post_epsilon);
            layer.attention_gate.blend(b, &mut work.x, &work.branch);

            // x ← blend(x, norm(feed_forward(norm(x))))
            b.rms_norm(&mut work.h, &work.x, n.hidden, NormGain::After(&layer.feed_forward_norm), n.epsilon);
            match &layer.feed_forward {
                FeedForward::Dense { gate, up, down } => {
                    b.matmul(&mut work.dense_gate, &work.h, gate);
                    b.matmul(&mut work.dense_up, &work.h, up);
                    b.gated(&mut work.dense_gate, &work.dense_up, Activation::Silu);
                    b.matmul(&mut work.branch, &work.dense_gate, down);
                    pass.all_reduce(&mut work.branch)?;
                }
                FeedForward::Sparse(experts) => experts.forward(pass, n, work)?,
            }
            let gain = NormGain::Before(&layer.feed_forward_output_norm);
            b.rms_norm_in_place(&mut work.branch, n.hidden, gain, n.post_epsilon);
            layer.feed_forward_gate.blend(b, &mut work.x, &work.branch);
        }
        if self.frame.leave(pass, &mut work.x, logits)? {
            b.scale(logits, n.output_multiplier);
            b.softcap(logits, n.softcap);
        }
        Ok(())
    }
}

impl<B: Backend> Attention<B> {
    /// `branch = output(norm(attend(q, k, v)) · sigmoid(gate))` of `h`, summed over the shards.
    fn forward(
        &mut self,
        pass: &Pass<'_, B>,
        n: &Numbers,
        rope: &RopeSpec,
        work: &mut Workspace<B>,
    ) -> Result<(), ModelError> {
        let b = pass.backend;
        let runs: Vec<Run<'_>> = match self.window {
            Some(_) => pass.batch.runs.iter().map(|r| r.window.clone()).collect(),
            None => pass.batch.runs.iter().map(|r| r.full.clone()).collect(),
        };
        b.matmul(&mut work.q, &work.h, &self.query);
        b.matmul(&mut work.k, &work.h, &self.key);
        b.matmul(&mut work.v, &work.h, &self.value);
        b.matmul(&mut work.gate, &work.h, &self.gate);
        b.rms_norm_in_place(&mut work.q, n.head_dim, NormGain::None, n.epsilon);
        b.rms_norm_in_place(&mut work.k, n.head_dim, NormGain::None, n.epsilon);
        if self.turns {
            b.rope(&mut work.q, pass.batch.positions, rope);
            b.rope(&mut work.k, pass.batch.positions, rope);
        }
        b.cache_write(&mut self.cache, &work.k, &work.v, &runs);
        let attention = AttentionSpec {
            heads: n.heads.heads.len(),
            kv_head_of: n.heads.irregular(),
            scale: n.query_scale * (n.head_dim as f32).powf(-0.5),
            window: self.window,
            sinks: None,
            softcap: None,
        };
        b.attention(&mut work.attended, &work.q, &self.cache, &runs, &attention);
        b.rms_norm_in_place(&mut work.attended, n.head_dim, NormGain::None, n.epsilon);
        b.sigmoid_gate(&mut work.attended, &work.gate);
        b.matmul(&mut work.branch, &work.attended, &self.output); // this shard's part of the sum
        pass.all_reduce(&mut work.branch)
    }
}

impl<B: Backend> Experts<B> {
    /// `branch = unpool(Σ weight · norm(expert(norm(pool(h)))))`.
    fn forward(&self, pass: &Pass<'_, B>, n: &Numbers, work: &mut Workspace<B>) -> Result<(), ModelError> {
        let b = pass.backend;
        b.matmul(&mut work.scores, &work.h, &self.router);
        b.scale(&mut work.scores, n.output_multiplier);
        let route = RouteSpec {
            top_k: n.top_k,
            score: RouteScore::Sigmoid,
            correction: Some(&self.correction),
            normalize_epsilon: Some(ROUTER_EPSILON),
            scale: n.routed_scale,
            local: n.local.clone(),
        };
        b.route(&mut work.routing, &work.scores, &route);

        b.matmul(&mut work.combined, &work.h, &self.pool);
        b.rms_norm(&mut work.pooled, &work.combined, n.pooled, NormGain::After(&self.pool_norm), n.epsilon);
        b.expert_matmul(&mut work.expert_gate, &work.pooled, &self.gate, &work.routing);
        b.expert_matmul(&mut work.expert_up, &work.pooled, &self.up, &work.routing);
        b.gated(&mut work.expert_gate, &work.expert_up, Activation::Silu);
        match n.division {
            ExpertDivision::Width => {
                b.expert_matmul(&mut work.expert_out, &work.expert_gate, &self.down, &work.routing);
                pass.all_reduce(&mut work.expert_out)?; // top_k vectors per token: a norm needs them whole
                self.norm_and_combine(b, n, work);
                b.matmul(&mut work.branch, &work.combined, &self.unpool);
            }
            ExpertDivision::Whole => {
                b.expert_matmul(&mut work.expert_out, &work.expert_gate, &self.down, &work.routing);
                self.norm_and_combine(b, n, work);
                pass.all_reduce(&mut work.combined)?; // one vector per token: each expert was whole somewhere
                b.matmul(&mut work.branch, &work.combined, &self.unpool);
            }
            ExpertDivision::Gather => {
                work.gather.gather(pass, &mut work.gathered, &mut work.expert_gate)?;
                b.expert_matmul(&mut work.expert_out, &work.gathered, &self.down, &work.routing);
                b.scale_columns(&mut work.expert_out, &self.output_norm);
                b.sum_squares(&mut work.squares, &work.expert_out);
                pass.all_reduce(&mut work.squares)?; // one number per token and expert
                b.scale_by_squares(&mut work.expert_out, &work.squares, n.pooled, n.post_epsilon);
                b.expert_combine(&mut work.combined, &work.expert_out, &work.routing);
                b.matmul(&mut work.branch, &work.combined, &self.unpool); // this shard's part of the sum
                pass.all_reduce(&mut work.branch)?;
            }
        }
        Ok(())
    }

    /// `combined = Σ weight · norm(expert_out)`, of whole expert outputs.
    fn norm_and_combine(&self, b: &B, n: &Numbers, work: &mut Workspace<B>) {
        b.rms_norm_in_place(&mut work.expert_out, n.pooled, NormGain::Before(&self.output_norm), n.post_epsilon);
        b.expert_combine(&mut work.combined, &work.expert_out, &work.routing);
    }
}

impl<B: Backend> ResidualGate<B> {
    /// Stored is a logit per feature: `beta = sigmoid(g / t)`, `alpha² = max((1 - beta)(1 + beta), floor)`.
    fn load(loader: &mut Loader<'_, B>, name: &str, hidden: usize, temperature: f32) -> Result<Self, ModelError> {
        let sigmoid = |w: f32| 1.0 / (1.0 + (-w).exp());
        let logits: Vec<f32> = loader.values(name, hidden)?.iter().map(|g| g / temperature).collect();
        let beta: Vec<f32> = logits.iter().map(|&w| sigmoid(w)).collect();
        let alpha: Vec<f32> =
            logits.iter().zip(&beta).map(|(&w, b)| (sigmoid(-w) * (1.0 + b)).max(RESIDUAL_GATE_FLOOR).sqrt()).collect();
        Ok(Self { alpha: loader.backend.vector(&alpha), beta: loader.backend.vector(&beta) })
    }

    fn blend(&self, b: &B, x: &mut B::Buffer, branch: &B::Buffer) {
        b.blend(x, &self.alpha, branch, &self.beta);
    }
}

/// Reads a config and loads one rank's part of the model.
pub(crate) fn build<B: Backend>(config: &Config<'_>, loader: &mut Loader<'_, B>, options: &LoadOptions) -> Built<B> {
    config.only("hidden_act", &[json!("silu")])?;
    config.only("attention_bias", &[json!(false)])?;
    config.only("num_shared_experts", &[json!(0)])?;

    let hidden = config.size("hidden_size")?;
    let layers = config.size("num_hidden_layers")?;
    let heads = config.size("num_attention_heads")?;
    let kv_heads = config.size("num_key_value_heads")?;
    let head_dim = config.size_or("head_dim", hidden / heads)?;
    let experts = config.size("num_local_experts")?;
    let pooled = config.size("moe_hidden_size")?;
    let expert_width = config.size("moe_intermediate_size")?;
    let temperature = config.number_or("residual_gate_temperature", 0.3)? as f32;
    let sparse = config.sparse_layers()?;
    let turns = config.turning_layers()?;
    let windows = match config.get("layer_types") {
        Some(_) => config.windows()?,
        None => config.windows()?.into_iter().zip(&turns).map(|(window, &turns)| window.filter(|_| turns)).collect(),
    };
    let top_k = config.size("num_experts_per_tok")?;
    if top_k > experts {
        return Err(config.unsupported("num_experts_per_tok"));
    }

    let (placement, b) = (loader.placement, loader.backend);
    let shares = split_heads(heads, kv_heads, &placement.shares).map_err(|reason| loader.does_not_fit(reason))?;
    let cuts: Vec<Range<usize>> = shares.iter().map(|s| s.heads.clone()).collect();
    check_head_cut(loader, &cuts, head_dim, over_layers(layers, "self_attn.o_proj.weight"))?;
    let share = shares[placement.shard].clone();
    let (query_rows, kv_rows) = (scaled(&share.heads, head_dim), scaled(&share.kv_heads, head_dim));

    let cut = |loader: &Loader<'_, B>, what: &str, width: usize, weight: &str| {
        let unit = loader.column_unit(over_layers(layers, weight));
        split_features(what, width, unit, &placement.shares).map_err(|reason| loader.does_not_fit(reason))
    };
    let mine = |parts: &[Range<usize>]| parts[placement.shard].clone();
    let dense_width = config.size("intermediate_size")?;
    let my_dense = match sparse.iter().all(|&s| s) {
        true => 0..0,
        false => mine(&cut(loader, "feed-forward width", dense_width, "mlp.down_proj.weight")?),
    };
    // Whole experts or a slice of every expert's width; and all features of an expert's output or, to `gather`, a slice.
    let whole = placement.experts == ExpertDivision::Whole;
    let gathers = placement.experts == ExpertDivision::Gather;
    if whole && experts < placement.shards() {
        return Err(loader.does_not_fit(format!("{experts} experts for {} shards", placement.shards())));
    }
    let local = if whole { mine(&split(experts, &placement.shares)) } else { 0..experts };
    let widths = match whole {
        true => vec![0..expert_width; placement.shards()],
        false => cut(loader, "expert width", expert_width, "mlp.experts.down_proj.weight")?,
    };
    let my_width = mine(&widths);
    let my_outputs = match gathers {
        true => mine(&cut(loader, "expert output", pooled, "mlp.post_expert_proj.weight")?),
        false => 0..pooled,
    };

    let frame = FrameSpec {
        vocabulary: config.size("vocab_size")?,
        hidden,
        tied: config.flag_or("tie_word_embeddings", false)?,
        epsilon: config.number_or("rms_norm_eps", 1e-5)? as f32,
        norm_offset: 0.0,
    };
    let numbers = Numbers {
        hidden,
        head_dim,
        heads: share,
        epsilon: frame.epsilon,
        post_epsilon: config.number_or("post_norm_eps", 1e-8)? as f32,
        query_scale: config.number_or("qk_scale_factor", 5.4730064863875)? as f32,
        output_multiplier: config.number("output_multiplier")? as f32,
        softcap: config.number("final_logit_softcapping")? as f32,
        pooled,
        top_k,
        routed_scale: config.number_or("routed_scaling_factor", 1.0)? as f32,
        local: local.clone(),
        division: placement.experts,
    };

    let frame = Frame::load(loader, &frame, options)?;
    let mut loaded = Vec::with_capacity(placement.layers.len());
    for i in placement.layers.clone() {
        let at = |part: &str| format!("model.layers.{i}.{part}");
        let centred = |loader: &mut Loader<'_, B>, name: &str, length: usize| {
            loader.vector_map(&at(name), length, &(0..length), |g| 1.0 + g)
        };
        let (query_shape, kv_shape) = ([heads * head_dim, hidden], [kv_heads * head_dim, hidden]);
        let attention = Attention {
            query: loader.rows(&at("self_attn.q_proj.weight"), query_shape, &query_rows)?,
            key: loader.rows(&at("self_attn.k_proj.weight"), kv_shape, &kv_rows)?,
            value: loader.rows(&at("self_attn.v_proj.weight"), kv_shape, &kv_rows)?,
            gate: loader.rows(&at("self_attn.gate_proj.weight"), query_shape, &query_rows)?,
            output: loader.columns(&at("self_attn.o_proj.weight"), [hidden, heads * head_dim], &query_rows)?,
            cache: b.cache(options.cache.layer(windows[i], numbers.heads.kv_heads.len(), head_dim, head_dim)),
            window: windows[i],
            turns: turns[i],
        };
        let feed_forward = match sparse[i] {
            false => FeedForward::Dense {
                gate: loader.rows(&at("mlp.gate_proj.weight"), [dense_width, hidden], &my_dense)?,
                up: loader.rows(&at("mlp.up_proj.weight"), [dense_width, hidden], &my_dense)?,
                down: loader.columns(&at("mlp.down_proj.weight"), [hidden, dense_width], &my_dense)?,
            },
            true => {
                // gate_up_proj stacks, per expert, the gate's rows and then the up projection's.
                let half = |offset: usize| -> Vec<Range<usize>> {
                    let start = |e: usize| e * 2 * expert_width + offset;
                    local.clone().map(|e| start(e) + my_width.start..start(e) + my_width.end).collect()
                };
                let (fused, fused_shape) =
                    (at("mlp.experts.gate_up_proj.weight"), [experts * 2 * expert_width, pooled]);
                let (down, down_shape) = (at("mlp.experts.down_proj.weight"), [experts * pooled, expert_width]);
                let output = |e: usize| e * pooled + my_outputs.start..e * pooled + my_outputs.end;
                let outputs: Vec<Range<usize>> = local.clone().map(output).collect();
                FeedForward::Sparse(Box::new(Experts {
                    router: loader.whole(&at("mlp.gate.weight"), [experts, hidden])?,
                    correction: loader.vector(&at("mlp.gate.e_score_correction_bias"), experts)?,
                    pool: loader.whole(&at("mlp.pre_expert_proj.weight"), [pooled, hidden])?,
                    pool_norm: centred(loader, "mlp.pre_expert_norm.weight", pooled)?,
                    gate: loader.matrix(&[&fused], fused_shape, &half(0), None)?,
                    up: loader.matrix(&[&fused], fused_shape, &half(expert_width), None)?,
                    down: loader.matrix(&[&down], down_shape, &outputs, (!gathers).then_some(&my_width))?,
                    output_norm: loader.vector_map(
                        &at("mlp.experts.post_expert_norm.weight"),
                        pooled,
                        &my_outputs,
                        |g| 1.0 + g,
                    )?,
                    unpool: loader.columns(&at("mlp.post_expert_proj.weight"), [hidden, pooled], &my_outputs)?,
                }))
            }
        };
        loaded.push(Layer {
            attention_norm: centred(loader, "input_layernorm.weight", hidden)?,
            attention,
            attention_gate: ResidualGate::load(loader, &at("post_attention_residual_gate.gate"), hidden, temperature)?,
            feed_forward_norm: centred(loader, "pre_feedforward_layernorm.weight", hidden)?,
            feed_forward,
            feed_forward_output_norm: centred(loader, "post_feedforward_layernorm.weight", hidden)?,
            feed_forward_gate: ResidualGate::load(
                loader,
                &at("post_feedforward_residual_gate.gate"),
                hidden,
                temperature,
            )?,
        });
    }

    let tokens = options.max_tokens;
    let buffer = |columns: usize| b.buffer(tokens * columns);
    let work = Workspace {
        x: buffer(hidden),
        h: buffer(hidden),
        branch: buffer(hidden),
        q: buffer(query_rows.len()),
        gate: buffer(query_rows.len()),
        attended: buffer(query_rows.len()),
        k: buffer(kv_rows.len()),
        v: buffer(kv_rows.len()),
        dense_gate: buffer(my_dense.len()),
        dense_up: buffer(my_dense.len()),
        scores: buffer(experts),
        routing: b.routing(tokens, top_k),
        pooled: buffer(pooled),
        combined: buffer(pooled),
        expert_gate: buffer(top_k * my_width.len()),
        expert_up: buffer(top_k * my_width.len()),
        expert_out: buffer(top_k * my_outputs.len()),
        squares: buffer(top_k),
        gathered: buffer(if gathers { top_k * expert_width } else { 0 }),
        gather: ColumnGather::new(widths, placement.shard, if gathers { tokens * top_k } else { 0 }),
    };
    Ok(Box::new(MuseSpark { frame, layers: loaded, work, rope: rope(config, head_dim)?, numbers }))
}
