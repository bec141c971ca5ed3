//! gpt-oss.
//!
//! Facts: the gpt-oss model card (arXiv 2508.10925) and `modeling_gpt_oss.py` of Hugging Face transformers 5.24. What is
//! special: every other layer slides over a window; the softmax of attention has a learned sink per head; all projections
//! have biases; the router takes a softmax over the chosen logits only; experts are gated by a clamped SwiGLU, their gate and
//! up projections fused row by row in turn.
//!
//! Shards: attention is cut by KV head group with its sinks, experts by features or whole.

use consort_compute::{Activation, Backend, NormGain, RopeSpec, RouteScore};
use serde_json::json;

use crate::attention::{Attention, AttentionBias, AttentionWork, Heads, Runs};
use crate::decoder::{Frame, FrameSpec, Residual};
use crate::experts::{ExpertPlaces, ExpertSet, ExpertWork, Experts, FusedOrder};
use crate::projection::Projection;
use crate::registry::{Built, LoadOptions, Model};
use crate::rope::{RopeDefaults, rope};
use crate::{Config, Loader, ModelError, Pass};

/// `model_type`.
pub(crate) const NAMES: &[&str] = &["gpt_oss"];

const PLACES: ExpertPlaces =
    ExpertPlaces { experts: "num_local_experts", width: "intermediate_size", router: "mlp.router.weight" };
const HEAD_DIM: usize = 64;
const THETA: f64 = 150_000.0;
/// Steepness and clamp of the experts' gate.
const SWIGLU_ALPHA: f64 = 1.702;
const SWIGLU_LIMIT: f64 = 7.0;

/// One layer's share.
struct Layer<B: Backend> {
    /// `[hidden]`.
    attention_norm: B::Buffer,
    attention: Attention<B>,
    /// `[heads]`.
    sinks: B::Buffer,
    /// `[hidden]`.
    feed_forward_norm: B::Buffer,
    experts: Experts<B>,
}

/// Buffers for the largest step.
struct Workspace<B: Backend> {
    residual: Residual<B>,
    attention: AttentionWork<B>,
    experts: ExpertWork<B>,
}

struct GptOss<B: Backend> {
    frame: Frame<B>,
    layers: Vec<Layer<B>>,
    work: Workspace<B>,
    heads: Heads,
    experts: ExpertSet,
    activation: Activation,
    rope: RopeSpec,
    hidden: usize,
    epsilon: f32,
}

impl<B: Backend> Model<B> for GptOss<B> {
    fn forward(&mut self, pass: &Pass<'_, B>, logits: &mut B::Buffer) -> Result<(), ModelError> {
        let (b, positions, runs) = (pass.backend, pass.batch.positions, Runs::new(pass.batch));
        let Self { hidden, epsilon, activation, .. } = *self;
        let scale = (self.heads.head_dim as f32).powf(-0.5);
        let Workspace { residual: Residual { x, h, branch }, attention, experts } = &mut self.work;

        self.frame.enter(pass, x)?;
        for layer in &mut self.layers {
            // Attention: x += output(attend(rope(query(h)), rope(key(h)), value(h), sinks)), h = norm(x)
            b.rms_norm(h, x, hidden, NormGain::After(&layer.attention_norm), epsilon);
            layer.attention.project(b, attention, h);
            b.rope(&mut attention.q, positions, &self.rope);
            b.rope(&mut attention.k, positions, &self.rope);
            layer.attention.attend(pass, &runs, &self.heads, attention, scale, Some(&layer.sinks));
            layer.attention.output.apply(b, branch, &attention.attended); // this shard's part of the sum
            pass.all_reduce(branch)?;
            b.add(x, branch);

            // Feed-forward: x += Σ weight · expert(h), h = norm(x)
            b.rms_norm(h, x, hidden, NormGain::After(&layer.feed_forward_norm), epsilon);
            layer.experts.apply(b, &self.experts, experts, branch, h, activation); // this shard's part of the sum
            pass.all_reduce(branch)?;
            b.add(x, branch);
        }
        self.frame.leave(pass, x, logits)?;
        Ok(())
    }
}

/// Reads a config and loads one rank's part of the model.
pub(crate) fn build<B: Backend>(config: &Config<'_>, loader: &mut Loader<'_, B>, options: &LoadOptions) -> Built<B> {
    config.only("hidden_act", &[json!("silu")])?;

    let hidden = config.size("hidden_size")?;
    let layers = config.layers()?;
    let epsilon = config.epsilon("rms_norm_eps", 1e-5)?;
    let attention_bias = config.flag_or("attention_bias", true)?;
    let bias = AttentionBias { qkv: attention_bias, output: attention_bias };
    let windows = config.windows_unless(|i| i % 2 == 1)?;

    let heads = Heads::read(config, loader, Some(HEAD_DIM), 0..layers, 1)?;
    let set = ExpertSet::read(config, loader, &PLACES, 0..layers, RouteScore::SoftmaxOfTop, false)?;
    let frame = Frame::load(loader, &FrameSpec::read(config, epsilon, false)?, options)?;
    let mut loaded = Vec::with_capacity(loader.placement.layers.len());
    for i in loader.placement.layers.clone() {
        let at = |part: &str| format!("model.layers.{i}.{part}");
        let router = Projection::rows(loader, &at("mlp.router"), [set.experts, hidden], &(0..set.experts), true)?;
        loaded.push(Layer {
            attention_norm: loader.vector(&at("input_layernorm.weight"), hidden)?,
            attention: Attention::load(loader, &at("self_attn"), hidden, &heads, bias, windows[i], options)?,
            sinks: loader.vector_map(&at("self_attn.sinks"), heads.heads, &heads.share.heads, |sink| sink)?,
            feed_forward_norm: loader.vector(&at("post_attention_layernorm.weight"), hidden)?,
            experts: Experts::load(loader, &at("mlp.experts"), router, &set, FusedOrder::Interleaved, true)?,
        });
    }

    let b = loader.backend;
    let work = Workspace {
        residual: Residual::new(b, options, hidden),
        attention: AttentionWork::new(b, options, &heads),
        experts: ExpertWork::new(b, options, &set),
    };
    let activation = Activation::ClampedSwiglu {
        alpha: config.multiplier_or("swiglu_alpha", SWIGLU_ALPHA)? as f32,
        limit: config.limit_or("swiglu_limit", SWIGLU_LIMIT)? as f32,
    };
    let defaults = RopeDefaults { theta: THETA, ..RopeDefaults::default() };
    let rope = rope(config, heads.head_dim, defaults)?;
    Ok(Box::new(GptOss { frame, layers: loaded, work, heads, experts: set, activation, rope, hidden, epsilon }))
}
