//! Llama and its close relatives: Llama 2–3.x, SmolLM, Mistral and Ministral 3, Qwen 2, 2.5 and 3, dense and with experts.
//!
//! A pre-norm decoder (Touvron et al. 2023, arXiv 2302.13971) with grouped-query attention, rotary positions and a gated
//! feed-forward block. The relatives differ in a few optional parts, which [`FAMILIES`] lists, and in the feed-forward
//! block, which may be a mixture of experts.
//!
//! Shards: attention is cut by KV head group, the feed-forward block by features or by expert; each half of a layer ends in
//! one all-reduce of `[tokens, hidden]`.

use consort_compute::{Backend, NormGain, RopeSpec};
use serde_json::json;

use crate::attention::{Attention, AttentionBias, AttentionWork, Heads, Runs};
use crate::decoder::{Frame, FrameSpec, Residual};
use crate::mixture::{Mixture, MixturePlan, MixtureWork};
use crate::registry::{Built, LoadOptions, Model};
use crate::rope::{RopeDefaults, rope};
use crate::{Config, Loader, ModelError, Pass};

/// What sets a relative apart.
struct Family {
    name: &'static str,
    /// Query, key and value projections always have a bias and the output never has; elsewhere `attention_bias` speaks for all.
    qkv_bias: bool,
    /// Queries and keys pass an RMS norm per head before the rotary embedding.
    head_norm: bool,
}

const FAMILIES: [Family; 8] = [
    Family { name: "llama", qkv_bias: false, head_norm: false },
    Family { name: "mistral", qkv_bias: false, head_norm: false },
    Family { name: "ministral3", qkv_bias: false, head_norm: false },
    // The wrapper that adds vision to Mistral or Ministral 3.
    Family { name: "mistral3", qkv_bias: false, head_norm: false },
    Family { name: "qwen2", qkv_bias: true, head_norm: false },
    Family { name: "qwen2_moe", qkv_bias: true, head_norm: false },
    Family { name: "qwen3", qkv_bias: false, head_norm: true },
    Family { name: "qwen3_moe", qkv_bias: false, head_norm: true },
];

/// `model_type` of the families of this file.
pub(crate) const NAMES: &[&str] =
    &["llama", "mistral", "ministral3", "mistral3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"];

/// One layer's share.
struct Layer<B: Backend> {
    /// `[hidden]`.
    attention_norm: B::Buffer,
    attention: Attention<B>,
    /// `[head_dim]` each.
    head_norms: Option<(B::Buffer, B::Buffer)>,
    /// `[hidden]`.
    feed_forward_norm: B::Buffer,
    feed_forward: Mixture<B>,
}

/// Buffers for the largest step.
struct Workspace<B: Backend> {
    residual: Residual<B>,
    attention: AttentionWork<B>,
    feed_forward: MixtureWork<B>,
}

struct Llama<B: Backend> {
    frame: Frame<B>,
    layers: Vec<Layer<B>>,
    work: Workspace<B>,
    heads: Heads,
    rope: RopeSpec,
    query_growth: Option<QueryGrowth>,
    mixture: MixturePlan,
    hidden: usize,
    epsilon: f32,
}

/// Queries grow with the logarithm of their position past the original context, as in Llama 4, so that attention stays
/// sharp over long texts: a factor of `1 + beta · ln(1 + floor(position / context))`.
struct QueryGrowth {
    beta: f32,
    context: usize,
}

impl<B: Backend> Model<B> for Llama<B> {
    fn forward(&mut self, pass: &Pass<'_, B>, logits: &mut B::Buffer) -> Result<(), ModelError> {
        let (b, positions, runs) = (pass.backend, pass.batch.positions, Runs::new(pass.batch));
        let Self { hidden, epsilon, .. } = *self;
        let head_dim = self.heads.head_dim;
        let scale = (head_dim as f32).powf(-0.5);
        let growth = self.query_growth.as_ref().map(|growth| growth.factors(positions));
        let Workspace { residual: Residual { x, h, branch }, attention, feed_forward } = &mut self.work;

        self.frame.enter(pass, x)?;
        for layer in &mut self.layers {
            // Attention: x += output(attend(rope(query(h)), rope(key(h)), value(h))), h = norm(x)
            b.rms_norm(h, x, hidden, NormGain::After(&layer.attention_norm), epsilon);
            layer.attention.project(b, attention, h);
            if let Some((query_norm, key_norm)) = &layer.head_norms {
                b.rms_norm_in_place(&mut attention.q, head_dim, NormGain::After(query_norm), epsilon);
                b.rms_norm_in_place(&mut attention.k, head_dim, NormGain::After(key_norm), epsilon);
            }
            b.rope(&mut attention.q, positions, &self.rope);
            b.rope(&mut attention.k, positions, &self.rope);
            if let Some(factors) = &growth {
                b.scale_rows(&mut attention.q, factors);
            }
            layer.attention.attend(pass, &runs, &self.heads, attention, scale, None);
            layer.attention.output.apply(b, branch, &attention.attended); // this shard's part of the sum
            pass.all_reduce(branch)?;
            b.add(x, branch);

            // Feed-forward: x += down(silu(gate(h)) · up(h)), h = norm(x), or a weighted sum of such blocks
            b.rms_norm(h, x, hidden, NormGain::After(&layer.feed_forward_norm), epsilon);
            layer.feed_forward.apply(b, &self.mixture, feed_forward, branch, h); // this shard's part of the sum
            pass.all_reduce(branch)?;
            b.add(x, branch);
        }
        self.frame.leave(pass, x, logits)?;
        Ok(())
    }
}

impl QueryGrowth {
    fn read(config: &Config<'_>) -> Result<Option<Self>, ModelError> {
        if config.get("rope_parameters.llama_4_scaling_beta").is_none() {
            return Ok(None);
        }
        Ok(Some(Self {
            beta: config.number_in("rope_parameters.llama_4_scaling_beta", 0.0..=1e3)? as f32,
            context: config.size("rope_parameters.original_max_position_embeddings")?,
        }))
    }

    fn factors(&self, positions: &[u32]) -> Vec<f32> {
        let contexts = |position: u32| (position as usize / self.context) as f32;
        positions.iter().map(|&position| 1.0 + self.beta * contexts(position).ln_1p()).collect()
    }
}

/// Reads a config and loads one rank's part of the model.
pub(crate) fn build<B: Backend>(config: &Config<'_>, loader: &mut Loader<'_, B>, options: &LoadOptions) -> Built<B> {
    let name = config.architecture()?;
    let family = FAMILIES.iter().find(|f| f.name == name).expect("the registry asks for names of this file only");
    config.only("hidden_act", &[json!("silu")])?;

    let hidden = config.size("hidden_size")?;
    let epsilon = config.epsilon("rms_norm_eps", 1e-6)?;
    let attention_bias = config.flag_or("attention_bias", false)?;
    let bias = AttentionBias { qkv: family.qkv_bias || attention_bias, output: attention_bias && !family.qkv_bias };
    let first_window = config.count_or("max_window_layers", 0)?; // Qwen
    let windows = config.windows_unless(|i| i < first_window)?;

    let heads = Heads::read(config, loader, None, 0..config.layers()?, 1)?;
    let mixture = MixturePlan::read(config, loader, false)?;
    let frame = Frame::load(loader, &FrameSpec::read(config, epsilon, false)?, options)?;
    let mut loaded = Vec::with_capacity(loader.placement.layers.len());
    for i in loader.placement.layers.clone() {
        let at = |part: &str| format!("model.layers.{i}.{part}");
        loaded.push(Layer {
            attention_norm: loader.vector(&at("input_layernorm.weight"), hidden)?,
            attention: Attention::load(loader, &at("self_attn"), hidden, &heads, bias, windows[i], options)?,
            head_norms: match family.head_norm {
                true => Some((
                    loader.vector(&at("self_attn.q_norm.weight"), heads.head_dim)?,
                    loader.vector(&at("self_attn.k_norm.weight"), heads.head_dim)?,
                )),
                false => None,
            },
            feed_forward_norm: loader.vector(&at("post_attention_layernorm.weight"), hidden)?,
            feed_forward: Mixture::load(loader, &mixture, i)?,
        });
    }

    let b = loader.backend;
    let work = Workspace {
        residual: Residual::new(b, options, hidden),
        attention: AttentionWork::new(b, options, &heads),
        feed_forward: MixtureWork::new(b, options, &mixture),
    };
    let (rope, query_growth) = (rope(config, heads.head_dim, RopeDefaults::default())?, QueryGrowth::read(config)?);
    Ok(Box::new(Llama { frame, layers: loaded, work, heads, rope, query_growth, mixture, hidden, epsilon }))
}
