//! Muse Glimmer (text): the small dense sibling of Muse Spark.
//!
//! Facts: `modeling_muse_glimmer.py` of Hugging Face transformers 5.24. What is special, in the order of the pass: the
//! embedding is normed; each half of a layer is normed before and after, with zero-centred gains; queries and keys pass a
//! scaleless norm per head, queries are scaled; three of four layers slide over a window and turn by position, every fourth,
//! counted from the last, sees everything and has no positions; the attention output is gated; logits are scaled and capped.
//!
//! Shards: attention is cut by KV head group, its gate alike, the feed-forward block by features. The norm after a half
//! layer needs the sum, so it comes after the all-reduce.

use consort_compute::{Activation, Backend, NormGain, RopeSpec};
use serde_json::json;

use crate::attention::{Attention, AttentionBias, AttentionWork, Heads, Runs};
use crate::decoder::{Frame, FrameSpec, Residual, over_layers};
use crate::feed_forward::{FeedForward, FeedForwardWork, feed_forward_part};
use crate::registry::{Built, LoadOptions, Model};
use crate::rope::{RopeDefaults, rope};
use crate::{Config, Loader, ModelError, Pass};

/// `model_type`, with and without the wrapper that adds vision.
pub(crate) const NAMES: &[&str] = &["muse_glimmer", "muse_glimmer_text"];

/// One layer's share. Norms are `[hidden]`.
struct Layer<B: Backend> {
    attention_norm: B::Buffer,
    attention: Attention<B>,
    /// `[heads · head_dim, hidden]`.
    attention_gate: B::Weight,
    /// Whether queries and keys turn by position.
    turns: bool,
    attention_output_norm: B::Buffer,
    feed_forward_norm: B::Buffer,
    feed_forward: FeedForward<B>,
    feed_forward_output_norm: B::Buffer,
}

/// Buffers for the largest step.
struct Workspace<B: Backend> {
    residual: Residual<B>,
    attention: AttentionWork<B>,
    /// `[tokens, heads · head_dim]`.
    attention_gate: B::Buffer,
    feed_forward: FeedForwardWork<B>,
}

struct MuseGlimmer<B: Backend> {
    frame: Frame<B>,
    layers: Vec<Layer<B>>,
    work: Workspace<B>,
    heads: Heads,
    rope: RopeSpec,
    hidden: usize,
    epsilon: f32,
    /// Of the norms after a half layer.
    post_epsilon: f32,
    query_scale: f32,
    output_multiplier: f32,
    softcap: f32,
}

impl<B: Backend> Model<B> for MuseGlimmer<B> {
    fn forward(&mut self, pass: &Pass<'_, B>, logits: &mut B::Buffer) -> Result<(), ModelError> {
        let (b, positions, runs) = (pass.backend, pass.batch.positions, Runs::new(pass.batch));
        let Self { hidden, epsilon, post_epsilon, query_scale, .. } = *self;
        let head_dim = self.heads.head_dim;
        let scale = query_scale * (head_dim as f32).powf(-0.5);
        let Workspace { residual: Residual { x, h, branch }, attention, attention_gate, feed_forward } = &mut self.work;

        self.frame.enter(pass, x)?;
        if pass.ranks.previous.is_none() {
            b.rms_norm_in_place(x, hidden, NormGain::None, epsilon);
        }
        for layer in &mut self.layers {
            // Attention: x += norm(output(attend(rope(norm(q)), rope(norm(k)), v) · sigmoid(gate))), all of norm(x)
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
            b.sigmoid_gate(&mut attention.attended, attention_gate);
            layer.attention.output.apply(b, branch, &attention.attended); // this shard's part of the sum
            pass.all_reduce(branch)?;
            b.rms_norm_in_place(branch, hidden, NormGain::After(&layer.attention_output_norm), post_epsilon);
            b.add(x, branch);

            // Feed-forward: x += norm(down(silu(gate(h)) · up(h))), h = norm(x)
            b.rms_norm(h, x, hidden, NormGain::After(&layer.feed_forward_norm), epsilon);
            layer.feed_forward.apply(b, feed_forward, branch, h, Activation::Silu); // this shard's part of the sum
            pass.all_reduce(branch)?;
            b.rms_norm_in_place(branch, hidden, NormGain::After(&layer.feed_forward_output_norm), post_epsilon);
            b.add(x, branch);
        }
        if self.frame.leave(pass, x, logits)? {
            b.scale(logits, self.output_multiplier);
            b.softcap(logits, self.softcap);
        }
        Ok(())
    }
}

/// Reads a config and loads one rank's part of the model.
pub(crate) fn build<B: Backend>(config: &Config<'_>, loader: &mut Loader<'_, B>, options: &LoadOptions) -> Built<B> {
    config.only("hidden_activation", &[json!("silu")])?;

    let hidden = config.size("hidden_size")?;
    let layers = config.layers()?;
    let width = config.size("intermediate_size")?;
    let epsilon = config.epsilon("rms_norm_eps", 1e-5)?;
    let attention_bias = config.flag_or("attention_bias", false)?;
    let bias = AttentionBias { qkv: attention_bias, output: attention_bias };
    let turns = config.turning_layers()?;
    let windows = config.windows_unless(|i| (layers - 1 - i).is_multiple_of(4))?;

    let heads = Heads::read(config, loader, None, 0..layers, 1)?;
    let part = feed_forward_part(loader, width, over_layers(layers, "mlp.down_proj.weight"))?;
    let frame = Frame::load(loader, &FrameSpec::read(config, epsilon, false)?, options)?;
    let mut loaded = Vec::with_capacity(loader.placement.layers.len());
    for i in loader.placement.layers.clone() {
        let at = |part: &str| format!("model.layers.{i}.{part}");
        let centred =
            |loader: &mut Loader<'_, B>, name: &str| loader.vector_map(&at(name), hidden, &(0..hidden), |g| 1.0 + g);
        let gate = loader.rows(&at("self_attn.gate_proj.weight"), heads.query_shape(hidden), &heads.query_part())?;
        loaded.push(Layer {
            attention_norm: centred(loader, "input_layernorm.weight")?,
            attention: Attention::load(loader, &at("self_attn"), hidden, &heads, bias, windows[i], options)?,
            attention_gate: gate,
            turns: turns[i],
            attention_output_norm: centred(loader, "post_attention_layernorm.weight")?,
            feed_forward_norm: centred(loader, "pre_feedforward_layernorm.weight")?,
            feed_forward: FeedForward::load(loader, &at("mlp"), [width, hidden], &part, false)?,
            feed_forward_output_norm: centred(loader, "post_feedforward_layernorm.weight")?,
        });
    }

    let b = loader.backend;
    let work = Workspace {
        residual: Residual::new(b, options, hidden),
        attention: AttentionWork::new(b, options, &heads),
        attention_gate: b.buffer(options.max_tokens * heads.query_part().len()),
        feed_forward: FeedForwardWork::new(b, options, part.len()),
    };
    Ok(Box::new(MuseGlimmer {
        frame,
        layers: loaded,
        work,
        rope: rope(config, heads.head_dim, RopeDefaults::default())?,
        heads,
        hidden,
        epsilon,
        post_epsilon: config.epsilon("post_norm_eps", 1e-8)?,
        query_scale: config.multiplier_or("qk_scale_factor", 3.87)? as f32,
        output_multiplier: config.multiplier_or("output_multiplier", ((hidden as f64) / 256.0).powf(-0.5))? as f32,
        softcap: config.multiplier_or("final_logit_softcapping", 20.0)? as f32,
    }))
}
