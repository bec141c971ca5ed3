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
use std::slice::from_ref;

use consort_compute::{Activation, Backend, NormGain, RopeSpec, RouteScore, RouteSpec};
use serde_json::json;

use crate::attention::{Attention, AttentionBias, AttentionWork, Heads, Runs};
use crate::decoder::{Frame, FrameSpec, Residual, over_layers};
use crate::experts::{ExpertPlaces, expert_counts};
use crate::feed_forward::{FeedForward, FeedForwardWork, feed_forward_part};
use crate::gather::ColumnGather;
use crate::partition::{split, split_features};
use crate::registry::{Built, LoadOptions, Model};
use crate::rope::{RopeDefaults, rope};
use crate::{Config, ExpertDivision, Loader, ModelError, Pass};

/// `model_type`, with and without the wrapper that adds vision and audio.
pub(crate) const NAMES: &[&str] = &["muse_spark", "muse_spark_text"];

const PLACES: ExpertPlaces =
    ExpertPlaces { experts: "num_local_experts", width: "moe_intermediate_size", router: "mlp.gate.weight" };

/// Added to the sum of a token's router scores before they are divided by it.
const ROUTER_EPSILON: f32 = 1e-15;
/// Floor under the square of a residual gate's alpha.
const RESIDUAL_GATE_FLOOR: f32 = 1e-3;

/// One layer's share.
struct Layer<B: Backend> {
    /// `[hidden]`.
    attention_norm: B::Buffer,
    attention: Attention<B>,
    /// `[heads · head_dim, hidden]`.
    attention_gate: B::Weight,
    /// Whether queries and keys turn by position.
    turns: bool,
    attention_residual: ResidualGate<B>,
    /// `[hidden]`.
    feed_forward_norm: B::Buffer,
    feed_forward: Block<B>,
    /// `[hidden]`, applied before its norm.
    feed_forward_output_norm: B::Buffer,
    feed_forward_residual: ResidualGate<B>,
}

/// `x ← alpha · x + beta · branch`, per feature.
struct ResidualGate<B: Backend> {
    alpha: B::Buffer,
    beta: B::Buffer,
}

/// The feed-forward half of a layer.
enum Block<B: Backend> {
    Dense(FeedForward<B>),
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

/// Buffers for the largest step.
struct Workspace<B: Backend> {
    residual: Residual<B>,
    attention: AttentionWork<B>,
    /// `[tokens, heads · head_dim]`.
    attention_gate: B::Buffer,
    dense: FeedForwardWork<B>,
    sparse: ExpertWork<B>,
}

/// Buffers of the experts; `pairs` are the (token, expert) pairs, `tokens · top_k`.
struct ExpertWork<B: Backend> {
    /// `[tokens, experts]`.
    scores: B::Buffer,
    routing: B::Routing,
    /// `[tokens, pooled]`.
    pooled: B::Buffer,
    /// `[tokens, pooled]`.
    combined: B::Buffer,
    /// `[pairs, width]`.
    gate: B::Buffer,
    /// `[pairs, width]`.
    up: B::Buffer,
    /// `[pairs, pooled]`.
    output: B::Buffer,
    /// `[pairs, 1]`.
    squares: B::Buffer,
    /// `[pairs, whole width]`, of a `gather` plan.
    gathered: B::Buffer,
    gather: ColumnGather,
}

/// What the experts of all layers have in common.
struct ExpertNumbers {
    pooled: usize,
    top_k: usize,
    epsilon: f32,
    post_epsilon: f32,
    logit_scale: f32,
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
    heads: Heads,
    experts: ExpertNumbers,
    hidden: usize,
    epsilon: f32,
    /// Of the norms after a half layer.
    post_epsilon: f32,
    query_scale: f32,
    output_multiplier: f32,
    softcap: f32,
}

impl<B: Backend> Model<B> for MuseSpark<B> {
    fn forward(&mut self, pass: &Pass<'_, B>, logits: &mut B::Buffer) -> Result<(), ModelError> {
        let (b, positions, runs) = (pass.backend, pass.batch.positions, Runs::new(pass.batch));
        let Self { hidden, epsilon, post_epsilon, query_scale, .. } = *self;
        let head_dim = self.heads.head_dim;
        let scale = query_scale * (head_dim as f32).powf(-0.5);
        let Workspace { residual: Residual { x, h, branch }, attention, attention_gate, dense, sparse } =
            &mut self.work;

        self.frame.enter(pass, x)?;
        if pass.ranks.previous.is_none() {
            b.rms_norm_in_place(x, hidden, NormGain::None, epsilon);
        }
        for layer in &mut self.layers {
            // Attention: x ← blend(x, norm(output(norm(attend(rope(norm(q)), rope(norm(k)), v)) · sigmoid(gate))))
            b.rms_norm(h, x, hidden, NormGain::After(&layer.attention_norm), epsilon);
            layer.attention.project(b, attention, h);
            b.matmul(attention_gate, h, &layer.attention_gate);
            b.rms_norm_in_place(&mut attention.q, head_dim, NormGain::None, epsilon);
            b.rms_norm_in_place(&mut attention.k, head_dim, NormGain::None, epsilon);
            if layer.turns {
                b.rope(&mut attention.q, positions, &self.rope);
                b.rope(&mut attention.k, positions, &self.rope);
            }
            layer.attention.attend(pass, &runs, &self.heads, attention, scale, None);
            b.rms_norm_in_place(&mut attention.attended, head_dim, NormGain::None, epsilon);
            b.sigmoid_gate(&mut attention.attended, attention_gate);
            layer.attention.output.apply(b, branch, &attention.attended); // this shard's part of the sum
            pass.all_reduce(branch)?;
            b.rms_norm_in_place(branch, hidden, NormGain::None, post_epsilon);
            layer.attention_residual.blend(b, x, branch);

            // Feed-forward: x ← blend(x, norm(block(norm(x))))
            b.rms_norm(h, x, hidden, NormGain::After(&layer.feed_forward_norm), epsilon);
            match &layer.feed_forward {
                Block::Dense(feed_forward) => {
                    feed_forward.apply(b, dense, branch, h, Activation::Silu); // this shard's part of the sum
                    pass.all_reduce(branch)?;
                }
                Block::Sparse(experts) => experts.apply(pass, &self.experts, sparse, branch, h)?,
            }
            b.rms_norm_in_place(branch, hidden, NormGain::Before(&layer.feed_forward_output_norm), post_epsilon);
            layer.feed_forward_residual.blend(b, x, branch);
        }
        if self.frame.leave(pass, x, logits)? {
            b.scale(logits, self.output_multiplier);
            b.softcap(logits, self.softcap);
        }
        Ok(())
    }
}

impl<B: Backend> Experts<B> {
    /// `out = unpool(Σ weight · norm(expert(norm(pool(h)))))`, `[tokens, hidden]`, whole on every shard.
    fn apply(
        &self,
        pass: &Pass<'_, B>,
        n: &ExpertNumbers,
        work: &mut ExpertWork<B>,
        out: &mut B::Buffer,
        h: &B::Buffer,
    ) -> Result<(), ModelError> {
        let b = pass.backend;
        b.matmul(&mut work.scores, h, &self.router);
        b.scale(&mut work.scores, n.logit_scale);
        let route = RouteSpec {
            top_k: n.top_k,
            score: RouteScore::Sigmoid,
            correction: Some(&self.correction),
            normalize_epsilon: Some(ROUTER_EPSILON),
            scale: n.routed_scale,
            local: n.local.clone(),
        };
        b.route(&mut work.routing, &work.scores, &route);

        b.matmul(&mut work.combined, h, &self.pool);
        b.rms_norm(&mut work.pooled, &work.combined, n.pooled, NormGain::After(&self.pool_norm), n.epsilon);
        b.expert_matmul(&mut work.gate, &work.pooled, &self.gate, &work.routing);
        b.expert_matmul(&mut work.up, &work.pooled, &self.up, &work.routing);
        b.gated(&mut work.gate, &work.up, Activation::Silu);
        match n.division {
            ExpertDivision::Width => {
                b.expert_matmul(&mut work.output, &work.gate, &self.down, &work.routing);
                pass.all_reduce(&mut work.output)?; // top_k vectors per token: a norm needs them whole
                self.norm_and_combine(b, n, work);
                b.matmul(out, &work.combined, &self.unpool);
            }
            ExpertDivision::Whole => {
                b.expert_matmul(&mut work.output, &work.gate, &self.down, &work.routing);
                self.norm_and_combine(b, n, work);
                pass.all_reduce(&mut work.combined)?; // one vector per token: each expert was whole somewhere
                b.matmul(out, &work.combined, &self.unpool);
            }
            ExpertDivision::Gather => {
                work.gather.gather(pass, &mut work.gathered, &mut work.gate)?;
                b.expert_matmul(&mut work.output, &work.gathered, &self.down, &work.routing);
                b.scale_columns(&mut work.output, &self.output_norm);
                b.sum_squares(&mut work.squares, &work.output);
                pass.all_reduce(&mut work.squares)?; // one number per token and expert
                b.scale_by_squares(&mut work.output, &work.squares, n.pooled, n.post_epsilon);
                b.expert_combine(&mut work.combined, &work.output, &work.routing);
                b.matmul(out, &work.combined, &self.unpool); // this shard's part of the sum
                pass.all_reduce(out)?;
            }
        }
        Ok(())
    }

    /// `combined = Σ weight · norm(output)`, of whole expert outputs.
    fn norm_and_combine(&self, b: &B, n: &ExpertNumbers, work: &mut ExpertWork<B>) {
        b.rms_norm_in_place(&mut work.output, n.pooled, NormGain::Before(&self.output_norm), n.post_epsilon);
        b.expert_combine(&mut work.combined, &work.output, &work.routing);
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
    let layers = config.layers()?;
    let pooled = config.size("moe_hidden_size")?;
    let expert_width = config.size(PLACES.width)?;
    let dense_width = config.size("intermediate_size")?;
    let epsilon = config.epsilon("rms_norm_eps", 1e-5)?;
    let post_epsilon = config.epsilon("post_norm_eps", 1e-8)?;
    let output_multiplier = config.multiplier("output_multiplier")? as f32;
    let temperature = config.multiplier_or("residual_gate_temperature", 0.3)? as f32;
    let sparse = config.sparse_layers()?;
    let turns = config.turning_layers()?;
    let windows = config.windows_unless(|i| !turns[i])?;
    if !sparse.contains(&true) {
        return Err(config.unsupported("mlp_layer_types"));
    }

    let (placement, b) = (loader.placement, loader.backend);
    let heads = Heads::read(config, loader, None, 0..layers, 1)?;
    let (experts, top_k) = expert_counts(config, loader, &PLACES, (0..layers).filter(|&i| sparse[i]))?;
    let cut = |loader: &Loader<'_, B>, what: &str, width: usize, weight: &str| {
        let unit = loader.column_unit(over_layers(layers, weight));
        split_features(what, width, unit, &placement.shares).map_err(|reason| loader.does_not_fit(reason))
    };
    let mine = |parts: &[Range<usize>]| parts[placement.shard].clone();
    let my_dense = match sparse.iter().all(|&s| s) {
        true => 0..0,
        false => feed_forward_part(loader, dense_width, over_layers(layers, "mlp.down_proj.weight"))?,
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

    let frame = Frame::load(loader, &FrameSpec::read(config, epsilon, false)?, options)?;
    let no_bias = AttentionBias { qkv: false, output: false };
    let mut loaded = Vec::with_capacity(placement.layers.len());
    for i in placement.layers.clone() {
        let at = |part: &str| format!("model.layers.{i}.{part}");
        let centred = |loader: &mut Loader<'_, B>, name: &str, part: &Range<usize>, length: usize| {
            loader.vector_map(&at(name), length, part, |g| 1.0 + g)
        };
        let residual =
            |loader: &mut Loader<'_, B>, name: &str| ResidualGate::load(loader, &at(name), hidden, temperature);
        let block = match sparse[i] {
            false => Block::Dense(FeedForward::load(loader, &at("mlp"), [dense_width, hidden], &my_dense, false)?),
            true => {
                // gate_up_proj stacks, per expert, the gate's rows and then the up projection's.
                let half = |offset: usize| -> Vec<Range<usize>> {
                    let start = |e: usize| e * 2 * expert_width + offset;
                    local.clone().map(|e| start(e) + my_width.start..start(e) + my_width.end).collect()
                };
                let outputs: Vec<Range<usize>> =
                    local.clone().map(|e| e * pooled + my_outputs.start..e * pooled + my_outputs.end).collect();
                let (fused, fused_shape) = (at("mlp.experts.gate_up_proj.weight"), [experts, 2 * expert_width, pooled]);
                let (down, down_shape) = (at("mlp.experts.down_proj.weight"), [experts, pooled, expert_width]);
                Block::Sparse(Box::new(Experts {
                    router: loader.whole(&at("mlp.gate.weight"), [experts, hidden])?,
                    correction: loader.vector(&at("mlp.gate.e_score_correction_bias"), experts)?,
                    pool: loader.whole(&at("mlp.pre_expert_proj.weight"), [pooled, hidden])?,
                    pool_norm: centred(loader, "mlp.pre_expert_norm.weight", &(0..pooled), pooled)?,
                    gate: loader.matrix(&[&fused], &fused_shape, &half(0), None)?,
                    up: loader.matrix(&[&fused], &fused_shape, &half(expert_width), None)?,
                    down: loader.matrix(&[&down], &down_shape, &outputs, (!gathers).then_some(from_ref(&my_width)))?,
                    output_norm: centred(loader, "mlp.experts.post_expert_norm.weight", &my_outputs, pooled)?,
                    unpool: loader.columns(&at("mlp.post_expert_proj.weight"), [hidden, pooled], &my_outputs)?,
                }))
            }
        };
        let (gate_shape, gate_part) = (heads.query_shape(hidden), heads.query_part());
        loaded.push(Layer {
            attention_norm: centred(loader, "input_layernorm.weight", &(0..hidden), hidden)?,
            attention: Attention::load(loader, &at("self_attn"), hidden, &heads, no_bias, windows[i], options)?,
            attention_gate: loader.rows(&at("self_attn.gate_proj.weight"), gate_shape, &gate_part)?,
            turns: turns[i],
            attention_residual: residual(loader, "post_attention_residual_gate.gate")?,
            feed_forward_norm: centred(loader, "pre_feedforward_layernorm.weight", &(0..hidden), hidden)?,
            feed_forward: block,
            feed_forward_output_norm: centred(loader, "post_feedforward_layernorm.weight", &(0..hidden), hidden)?,
            feed_forward_residual: residual(loader, "post_feedforward_residual_gate.gate")?,
        });
    }

    let tokens = options.max_tokens;
    let buffer = |columns: usize| b.buffer(tokens * columns);
    let work = Workspace {
        residual: Residual::new(b, options, hidden),
        attention: AttentionWork::new(b, options, &heads),
        attention_gate: buffer(heads.query_part().len()),
        dense: FeedForwardWork::new(b, options, my_dense.len()),
        sparse: ExpertWork {
            scores: buffer(experts),
            routing: b.routing(tokens, top_k),
            pooled: buffer(pooled),
            combined: buffer(pooled),
            gate: buffer(top_k * my_width.len()),
            up: buffer(top_k * my_width.len()),
            output: buffer(top_k * my_outputs.len()),
            squares: buffer(top_k),
            gathered: buffer(if gathers { top_k * expert_width } else { 0 }),
            gather: ColumnGather::new(widths, placement.shard, if gathers { tokens * top_k } else { 0 }),
        },
    };
    let numbers = ExpertNumbers {
        pooled,
        top_k,
        epsilon,
        post_epsilon,
        logit_scale: output_multiplier,
        routed_scale: config.multiplier_or("routed_scaling_factor", 1.0)? as f32,
        local,
        division: placement.experts,
    };
    Ok(Box::new(MuseSpark {
        frame,
        layers: loaded,
        work,
        rope: rope(config, heads.head_dim, RopeDefaults::default())?,
        heads,
        experts: numbers,
        hidden,
        epsilon,
        post_epsilon,
        query_scale: config.multiplier_or("qk_scale_factor", 5.4730064863875)? as f32,
        output_multiplier,
        softcap: config.multiplier("final_logit_softcapping")? as f32,
    }))
}
