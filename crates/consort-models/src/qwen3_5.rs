//! Qwen 3.5 and later, dense and with experts, and its forerunner Qwen 3 Next (text).
//!
//! Facts: `modeling_qwen3_5.py`, `modeling_qwen3_5_moe.py` and `modeling_qwen3_next.py` of Hugging Face transformers 5.24. What
//! is special: three of four layers are gated delta nets instead of attention; attention is gated per feature, its query
//! projection giving query and gate head by head; only a quarter of a head's features turns by position. Gains are stored as
//! an offset from one, except that of the delta net. Weights of multi-token prediction (`mtp.*`) are left alone.
//!
//! Shards: attention is cut by KV head group, delta nets by key head, the feed-forward block by features or by expert; each
//! half of a layer ends in one all-reduce of `[tokens, hidden]`.

use std::ops::Range;

use consort_compute::{Backend, NormGain, RopeSpec};
use serde_json::json;

use crate::attention::{Attention, AttentionWork, Heads, Runs};
use crate::decoder::{Frame, FrameSpec, Residual};
use crate::delta_net::{DeltaHeads, DeltaNet, DeltaWork};
use crate::mixture::{Mixture, MixturePlan, MixtureWork};
use crate::projection::Projection;
use crate::registry::{Built, LoadOptions, Model};
use crate::rope::{RopeDefaults, rope};
use crate::{Config, Loader, ModelError, Pass};

/// `model_type`, with and without the wrappers that add vision.
pub(crate) const NAMES: &[&str] = &["qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"];

const HEAD_DIM: usize = 256;
const PARTIAL_ROTARY: f64 = 0.25;
/// Every fourth layer is attention where the config doesn't say otherwise.
const ATTENTION_PERIOD: usize = 4;

/// One layer's share.
struct Layer<B: Backend> {
    /// `[hidden]`.
    mixer_norm: B::Buffer,
    mixer: Mixer<B>,
    /// `[hidden]`.
    feed_forward_norm: B::Buffer,
    feed_forward: Mixture<B>,
}

/// What lets a token see others.
enum Mixer<B: Backend> {
    Attention(Box<GatedAttention<B>>),
    Delta(Box<DeltaNet<B>>),
}

struct GatedAttention<B: Backend> {
    attention: Attention<B>,
    /// `[heads · head_dim, hidden]`.
    gate: Projection<B>,
    /// `[head_dim]`.
    query_norm: B::Buffer,
    /// `[head_dim]`.
    key_norm: B::Buffer,
}

/// Buffers for the largest step.
struct Workspace<B: Backend> {
    residual: Residual<B>,
    attention: AttentionWork<B>,
    /// `[tokens, heads · head_dim]`.
    gate: B::Buffer,
    delta: DeltaWork<B>,
    feed_forward: MixtureWork<B>,
}

struct Qwen35<B: Backend> {
    frame: Frame<B>,
    layers: Vec<Layer<B>>,
    work: Workspace<B>,
    heads: Heads,
    delta_heads: DeltaHeads,
    mixture: MixturePlan,
    rope: RopeSpec,
    hidden: usize,
    epsilon: f32,
}

impl<B: Backend> Model<B> for Qwen35<B> {
    fn forward(&mut self, pass: &Pass<'_, B>, logits: &mut B::Buffer) -> Result<(), ModelError> {
        let (b, positions, runs) = (pass.backend, pass.batch.positions, Runs::new(pass.batch));
        let Self { hidden, epsilon, .. } = *self;
        let head_dim = self.heads.head_dim;
        let scale = (head_dim as f32).powf(-0.5);
        let Workspace { residual: Residual { x, h, branch }, attention, gate, delta, feed_forward } = &mut self.work;

        self.frame.enter(pass, x)?;
        for layer in &mut self.layers {
            b.rms_norm(h, x, hidden, NormGain::After(&layer.mixer_norm), epsilon);
            match &mut layer.mixer {
                // x += output(attend(rope(norm(q)), rope(norm(k)), v) · sigmoid(gate)), all of h = norm(x)
                Mixer::Attention(mixer) => {
                    mixer.attention.project(b, attention, h);
                    mixer.gate.apply(b, gate, h);
                    b.rms_norm_in_place(&mut attention.q, head_dim, NormGain::After(&mixer.query_norm), epsilon);
                    b.rms_norm_in_place(&mut attention.k, head_dim, NormGain::After(&mixer.key_norm), epsilon);
                    b.rope(&mut attention.q, positions, &self.rope);
                    b.rope(&mut attention.k, positions, &self.rope);
                    mixer.attention.attend(pass, &runs, &self.heads, attention, scale, None);
                    b.sigmoid_gate(&mut attention.attended, gate);
                    mixer.attention.output.apply(b, branch, &attention.attended); // this shard's part of the sum
                }
                // x += output(norm(recall(h)) · silu(gate(h))), h = norm(x)
                Mixer::Delta(mixer) => {
                    mixer.recall(pass, &runs, &self.delta_heads, delta, h, epsilon);
                    mixer.output.apply(b, branch, &delta.gated); // this shard's part of the sum
                }
            }
            pass.all_reduce(branch)?;
            b.add(x, branch);

            // Feed-forward: x += down(silu(gate(h)) · up(h)), h = norm(x), or experts
            b.rms_norm(h, x, hidden, NormGain::After(&layer.feed_forward_norm), epsilon);
            layer.feed_forward.apply(b, &self.mixture, feed_forward, branch, h); // this shard's part of the sum
            pass.all_reduce(branch)?;
            b.add(x, branch);
        }
        self.frame.leave(pass, x, logits)?;
        Ok(())
    }
}

impl<B: Backend> GatedAttention<B> {
    /// Loads this shard's part of the block `prefix`. Of each head, `q_proj` gives the query and then the gate.
    fn load(
        loader: &mut Loader<'_, B>,
        prefix: &str,
        hidden: usize,
        heads: &Heads,
        bias: bool,
        norm_offset: f32,
        options: &LoadOptions,
    ) -> Result<Self, ModelError> {
        let at = |name: &str| format!("{prefix}.{name}");
        let head_dim = heads.head_dim;
        let half = |first: usize| -> Vec<Range<usize>> {
            let row = |head: usize| (2 * head + first) * head_dim;
            heads.share.heads.clone().map(|head| row(head)..row(head) + head_dim).collect()
        };
        let fused_shape = [2 * heads.heads * head_dim, hidden];
        let kv_shape = heads.kv_shape(hidden);
        let output_shape = [hidden, heads.heads * head_dim];
        let gain = |loader: &mut Loader<'_, B>, name: &str| {
            loader.vector_map(&at(name), head_dim, &(0..head_dim), |g| norm_offset + g)
        };
        Ok(Self {
            attention: Attention {
                query: Projection::segments(loader, &at("q_proj"), fused_shape, &half(0), bias)?,
                key: Projection::rows(loader, &at("k_proj"), kv_shape, &heads.kv_part(), bias)?,
                value: Projection::rows(loader, &at("v_proj"), kv_shape, &heads.kv_part(), bias)?,
                output: Projection::columns(loader, &at("o_proj"), output_shape, &heads.query_part(), bias)?,
                cache: heads.cache(loader.backend, None, options),
                window: None,
            },
            gate: Projection::segments(loader, &at("q_proj"), fused_shape, &half(1), bias)?,
            query_norm: gain(loader, "q_norm.weight")?,
            key_norm: gain(loader, "k_norm.weight")?,
        })
    }
}

/// Reads a config and loads one rank's part of the model.
pub(crate) fn build<B: Backend>(config: &Config<'_>, loader: &mut Loader<'_, B>, options: &LoadOptions) -> Built<B> {
    config.only("hidden_act", &[json!("silu")])?;

    let hidden = config.size("hidden_size")?;
    let epsilon = config.epsilon("rms_norm_eps", 1e-6)?;
    let attention_bias = config.flag_or("attention_bias", false)?;
    let attends = &attention_layers(config)?;
    let norm_offset = norm_offset(config, loader)?;

    let of_kind = |kind: bool| (0..attends.len()).filter(move |&i| attends[i] == kind);
    let heads = Heads::read(config, loader, Some(HEAD_DIM), of_kind(true), 2)?;
    let delta_heads = DeltaHeads::read(config, loader, of_kind(false))?;
    let mixture = MixturePlan::read(config, loader, true)?;
    let frame = FrameSpec { norm_offset, ..FrameSpec::read(config, epsilon, false)? };
    let frame = Frame::load(loader, &frame, options)?;
    let mut loaded = Vec::with_capacity(loader.placement.layers.len());
    for i in loader.placement.layers.clone() {
        let at = |part: &str| format!("model.layers.{i}.{part}");
        let gain = |loader: &mut Loader<'_, B>, name: &str| {
            loader.vector_map(&at(name), hidden, &(0..hidden), |g| norm_offset + g)
        };
        let (attention, delta) = (at("self_attn"), at("linear_attn"));
        let mixer = match attends[i] {
            true => Mixer::Attention(Box::new(GatedAttention::load(
                loader,
                &attention,
                hidden,
                &heads,
                attention_bias,
                norm_offset,
                options,
            )?)),
            false => Mixer::Delta(Box::new(DeltaNet::load(loader, &delta, hidden, &delta_heads, options)?)),
        };
        loaded.push(Layer {
            mixer_norm: gain(loader, "input_layernorm.weight")?,
            mixer,
            feed_forward_norm: gain(loader, "post_attention_layernorm.weight")?,
            feed_forward: Mixture::load(loader, &mixture, i)?,
        });
    }

    let b = loader.backend;
    let work = Workspace {
        residual: Residual::new(b, options, hidden),
        attention: AttentionWork::new(b, options, &heads),
        gate: b.buffer(options.max_tokens * heads.query_part().len()),
        delta: DeltaWork::new(b, options, &delta_heads),
        feed_forward: MixtureWork::new(b, options, &mixture),
    };
    let defaults = RopeDefaults { partial: PARTIAL_ROTARY, ..RopeDefaults::default() };
    let rope = rope(config, heads.head_dim, defaults)?;
    Ok(Box::new(Qwen35 { frame, layers: loaded, work, heads, delta_heads, mixture, rope, hidden, epsilon }))
}

/// For each layer whether it is attention; the others are delta nets. There are layers of both kinds.
fn attention_layers(config: &Config<'_>) -> Result<Vec<bool>, ModelError> {
    let (key, attends) = match config.layer_types()? {
        Some(kinds) => {
            let attends = |kind: &&str| match *kind {
                "full_attention" => Some(true),
                "linear_attention" => Some(false),
                _ => None,
            };
            ("layer_types", kinds.iter().map(attends).collect::<Option<Vec<_>>>())
        }
        None => {
            let (key, layers) = ("full_attention_interval", config.layers()?);
            let period = config.size_or(key, ATTENTION_PERIOD)?;
            (key, Some((0..layers).map(|i| (i + 1).is_multiple_of(period)).collect()))
        }
    };
    let has_both = |attends: &Vec<bool>| attends.contains(&true) && attends.contains(&false);
    attends.filter(has_both).ok_or_else(|| config.unsupported(key))
}

/// What to add to stored gains. Converters to MLX add the one themselves; what tells their files from published ones is
/// that they also turn the convolution's `[channels, 1, kernel]` into `[channels, kernel, 1]`.
fn norm_offset<B: Backend>(config: &Config<'_>, loader: &Loader<'_, B>) -> Result<f32, ModelError> {
    if config.flag_or("consort_norm_offset_applied", false)? {
        return Ok(0.0);
    }
    let kernel = config.size("linear_conv_kernel_dim")?;
    let is_convolution = |name: &str| name.ends_with("linear_attn.conv1d.weight");
    let Some(convolution) = loader.checkpoint.tensors().iter().find(|info| is_convolution(&info.name)) else {
        return Ok(1.0);
    };
    match convolution.shape[..] {
        [_, 1, taps] if taps == kernel && kernel > 1 => Ok(1.0),
        [_, taps, 1] if taps == kernel && kernel > 1 => Ok(0.0),
        ref shape => Err(ModelError::Unsupported {
            architecture: config.architecture()?.to_string(),
            feature: format!("{} of shape {shape:?} (is 1 added to norm gains or not?)", convolution.name),
        }),
    }
}
