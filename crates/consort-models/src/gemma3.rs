//! Gemma 3 (text).
//!
//! Facts: the Gemma 3 technical report (arXiv 2503.19786) and `modeling_gemma3.py` of Hugging Face transformers 5.24. What is
//! special, in the order of the pass: embeddings are scaled by `sqrt(hidden)`; each half of a layer is normed before and
//! after; queries and keys pass a norm per head; five of six layers slide over a window and turn by a base of their own; the
//! feed-forward block is gated by GELU. Gains are stored as an offset from one.
//!
//! Shards: attention is cut by KV head group, the feed-forward block by features. The norm after a half layer needs the sum,
//! so it comes after the all-reduce.

use consort_compute::{Activation, Backend, NormGain, RopeSpec};
use serde_json::json;

use crate::attention::{Attention, AttentionBias, AttentionWork, Heads, Runs};
use crate::decoder::{Frame, FrameSpec, Residual, over_layers};
use crate::feed_forward::{FeedForward, FeedForwardWork, feed_forward_part};
use crate::registry::{Built, LoadOptions, Model};
use crate::rope::{RopeDefaults, plain_rope, rope, rope_in};
use crate::{Config, Loader, ModelError, Pass};

/// `model_type`, with and without the wrapper that adds vision.
pub(crate) const NAMES: &[&str] = &["gemma3", "gemma3_text"];

/// Every sixth layer sees everything where the config doesn't say otherwise.
const FULL_LAYER_PERIOD: usize = 6;
const GLOBAL_THETA: f64 = 1_000_000.0;
const LOCAL_THETA: f64 = 10_000.0;
const HEAD_DIM: usize = 256;
const QUERY_SCALAR: f64 = 256.0;

/// One layer's share. Norms are `[hidden]`, those of heads `[head_dim]`.
struct Layer<B: Backend> {
    attention_norm: B::Buffer,
    attention: Attention<B>,
    query_norm: B::Buffer,
    key_norm: B::Buffer,
    attention_output_norm: B::Buffer,
    feed_forward_norm: B::Buffer,
    feed_forward: FeedForward<B>,
    feed_forward_output_norm: B::Buffer,
}

/// Buffers for the largest step.
struct Workspace<B: Backend> {
    residual: Residual<B>,
    attention: AttentionWork<B>,
    feed_forward: FeedForwardWork<B>,
}

struct Gemma3<B: Backend> {
    frame: Frame<B>,
    layers: Vec<Layer<B>>,
    work: Workspace<B>,
    heads: Heads,
    global_rope: RopeSpec,
    local_rope: RopeSpec,
    hidden: usize,
    epsilon: f32,
    /// Factor on `q · k`.
    attention_scale: f32,
}

impl<B: Backend> Model<B> for Gemma3<B> {
    fn forward(&mut self, pass: &Pass<'_, B>, logits: &mut B::Buffer) -> Result<(), ModelError> {
        let (b, positions, runs) = (pass.backend, pass.batch.positions, Runs::new(pass.batch));
        let Self { hidden, epsilon, attention_scale, .. } = *self;
        let head_dim = self.heads.head_dim;
        let Workspace { residual: Residual { x, h, branch }, attention, feed_forward } = &mut self.work;

        self.frame.enter(pass, x)?;
        if pass.ranks.previous.is_none() {
            b.scale(x, (hidden as f32).sqrt());
        }
        for layer in &mut self.layers {
            // Attention: x += norm(output(attend(rope(norm(q)), rope(norm(k)), v))), q, k, v of norm(x)
            b.rms_norm(h, x, hidden, NormGain::After(&layer.attention_norm), epsilon);
            layer.attention.project(b, attention, h);
            b.rms_norm_in_place(&mut attention.q, head_dim, NormGain::After(&layer.query_norm), epsilon);
            b.rms_norm_in_place(&mut attention.k, head_dim, NormGain::After(&layer.key_norm), epsilon);
            let rope = if layer.attention.window.is_some() { &self.local_rope } else { &self.global_rope };
            b.rope(&mut attention.q, positions, rope);
            b.rope(&mut attention.k, positions, rope);
            layer.attention.attend(pass, &runs, &self.heads, attention, attention_scale, None);
            layer.attention.output.apply(b, branch, &attention.attended); // this shard's part of the sum
            pass.all_reduce(branch)?;
            b.rms_norm_in_place(branch, hidden, NormGain::After(&layer.attention_output_norm), epsilon);
            b.add(x, branch);

            // Feed-forward: x += norm(down(gelu(gate(h)) · up(h))), h = norm(x)
            b.rms_norm(h, x, hidden, NormGain::After(&layer.feed_forward_norm), epsilon);
            layer.feed_forward.apply(b, feed_forward, branch, h, Activation::GeluTanh); // this shard's part of the sum
            pass.all_reduce(branch)?;
            b.rms_norm_in_place(branch, hidden, NormGain::After(&layer.feed_forward_output_norm), epsilon);
            b.add(x, branch);
        }
        self.frame.leave(pass, x, logits)?;
        Ok(())
    }
}

/// Reads a config and loads one rank's part of the model.
pub(crate) fn build<B: Backend>(config: &Config<'_>, loader: &mut Loader<'_, B>, options: &LoadOptions) -> Built<B> {
    config.only("hidden_activation", &[json!("gelu_pytorch_tanh")])?;
    config.only("attn_logit_softcapping", &[])?;
    config.only("final_logit_softcapping", &[])?;

    let hidden = config.size("hidden_size")?;
    let layers = config.layers()?;
    let width = config.size("intermediate_size")?;
    let epsilon = config.epsilon("rms_norm_eps", 1e-6)?;
    let attention_bias = config.flag_or("attention_bias", false)?;
    let bias = AttentionBias { qkv: attention_bias, output: attention_bias };
    let period = match config.get("_sliding_window_pattern") {
        Some(_) => config.size("_sliding_window_pattern")?,
        None => config.size_or("sliding_window_pattern", FULL_LAYER_PERIOD)?,
    };
    let windows = config.windows_unless(|i| (i + 1).is_multiple_of(period))?;
    let norm_offset = if config.flag_or("consort_norm_offset_applied", false)? { 0.0 } else { 1.0 };

    let heads = Heads::read(config, loader, Some(HEAD_DIM), 0..layers, 1)?;
    let part = feed_forward_part(loader, width, over_layers(layers, "mlp.down_proj.weight"))?;
    let frame = FrameSpec { norm_offset, ..FrameSpec::read(config, epsilon, true)? };
    let frame = Frame::load(loader, &frame, options)?;
    let mut loaded = Vec::with_capacity(loader.placement.layers.len());
    for i in loader.placement.layers.clone() {
        let at = |part: &str| format!("model.layers.{i}.{part}");
        let gain = |loader: &mut Loader<'_, B>, name: &str, length: usize| {
            loader.vector_map(&at(name), length, &(0..length), |g| norm_offset + g)
        };
        loaded.push(Layer {
            attention_norm: gain(loader, "input_layernorm.weight", hidden)?,
            attention: Attention::load(loader, &at("self_attn"), hidden, &heads, bias, windows[i], options)?,
            query_norm: gain(loader, "self_attn.q_norm.weight", heads.head_dim)?,
            key_norm: gain(loader, "self_attn.k_norm.weight", heads.head_dim)?,
            attention_output_norm: gain(loader, "post_attention_layernorm.weight", hidden)?,
            feed_forward_norm: gain(loader, "pre_feedforward_layernorm.weight", hidden)?,
            feed_forward: FeedForward::load(loader, &at("mlp"), [width, hidden], &part, false)?,
            feed_forward_output_norm: gain(loader, "post_feedforward_layernorm.weight", hidden)?,
        });
    }

    let b = loader.backend;
    let work = Workspace {
        residual: Residual::new(b, options, hidden),
        attention: AttentionWork::new(b, options, &heads),
        feed_forward: FeedForwardWork::new(b, options, part.len()),
    };
    let (global_rope, local_rope) = ropes(config, heads.head_dim)?;
    let attention_scale = config.multiplier_or("query_pre_attn_scalar", QUERY_SCALAR)?.powf(-0.5) as f32;
    Ok(Box::new(Gemma3 {
        frame,
        layers: loaded,
        work,
        heads,
        global_rope,
        local_rope,
        hidden,
        epsilon,
        attention_scale,
    }))
}

/// The rotary embeddings of layers that see everything and of those that slide. Newer configs have a section for each;
/// in older ones the usual keys are the former's, and `rope_local_base_freq` the latter's.
fn ropes(config: &Config<'_>, head_dim: usize) -> Result<(RopeSpec, RopeSpec), ModelError> {
    let global = RopeDefaults { theta: GLOBAL_THETA, ..RopeDefaults::default() };
    let local = RopeDefaults { theta: LOCAL_THETA, theta_key: "rope_local_base_freq", ..RopeDefaults::default() };
    let sections = ["rope_parameters.full_attention", "rope_parameters.sliding_attention"];
    if sections.iter().all(|section| config.get(section).is_none()) {
        return Ok((rope(config, head_dim, global)?, plain_rope(config, head_dim, local)?));
    }
    if let Some(absent) = sections.iter().find(|section| config.get(section).is_none()) {
        return Err(ModelError::MissingKey { key: config.place(absent) });
    }
    let [full, sliding] = sections;
    let described = rope_in(config, full, head_dim, global)?;
    if config.get("rope_scaling").is_some() && rope_in(config, "rope_scaling", head_dim, global)? != described {
        return Err(config.bad("rope_scaling", "the same as rope_parameters.full_attention"));
    }
    Ok((described, rope_in(config, sliding, head_dim, local)?))
}
