//! GGUF metadata in the shape of Hugging Face's `config.json`.
//!
//! Keys of our own say what a GGUF converter has done to the weights:
//!
//! * `consort_rope_pairs`: `"interleaved"` where the rows of q and k were permuted for a rotary embedding over neighbours,
//!   `"halves"` otherwise.
//! * `consort_norm_offset_applied`: `true` where RMS norm gains already contain the `+1` that the architecture adds.
//! * `rope_parameters.rope_type = "factors"`: inverse frequencies are divided by the listed `factors`, one for each pair
//!   (the `rope_freqs` tensor).
//! * `consort_delta_heads_tiled`: `true` where the value heads of delta nets go round the key heads.
//! * `consort_delta_rates_applied`: `true` where decay rates are stored as `-exp(A_log)`.
//! * `consort_gguf_architecture`: the prefix of the metadata keys that all this comes from, for [`metadata_key`].

use std::collections::BTreeMap;

use serde_json::{Map, Value as Json, json};

use super::names::{self, DELTA_NAMES, GEMMA_NAMES, GPT_OSS_NAMES, LayerNames};
use super::{Gguf, Value};
use crate::error::excerpt;
use crate::{CheckpointError, TensorName};

/// What is particular about one GGUF architecture.
struct Architecture {
    /// `general.architecture`.
    gguf: &'static str,
    /// `model_type` of the same architecture at Hugging Face.
    model_type: &'static str,
    /// How rotary features pair up in the permuted or unpermuted weights.
    rope_pairs: &'static str,
    layer_names: LayerNames,
    /// What the metadata leaves to the reader's knowledge of the architecture.
    complete: fn(&Keys<'_>, &mut Map<String, Json>) -> Result<(), CheckpointError>,
}

const ARCHITECTURES: &[Architecture] = &[
    Architecture { gguf: "llama", model_type: "llama", rope_pairs: "interleaved", layer_names: &[], complete: llama },
    Architecture {
        gguf: "mistral3",
        model_type: "ministral3",
        rope_pairs: "interleaved",
        layer_names: &[],
        complete: plain,
    },
    Architecture { gguf: "qwen2", model_type: "qwen2", rope_pairs: "halves", layer_names: &[], complete: plain },
    Architecture { gguf: "qwen3", model_type: "qwen3", rope_pairs: "halves", layer_names: &[], complete: plain },
    Architecture {
        gguf: "qwen3moe",
        model_type: "qwen3_moe",
        rope_pairs: "halves",
        layer_names: &[],
        complete: qwen3_moe,
    },
    Architecture {
        gguf: "gemma3",
        model_type: "gemma3_text",
        rope_pairs: "halves",
        layer_names: GEMMA_NAMES,
        complete: gemma3,
    },
    Architecture {
        gguf: "gpt-oss",
        model_type: "gpt_oss",
        rope_pairs: "halves",
        layer_names: GPT_OSS_NAMES,
        complete: gpt_oss,
    },
    Architecture {
        gguf: "qwen35",
        model_type: "qwen3_5_text",
        rope_pairs: "halves",
        layer_names: DELTA_NAMES,
        complete: qwen3_5,
    },
    Architecture {
        gguf: "qwen35moe",
        model_type: "qwen3_5_moe_text",
        rope_pairs: "halves",
        layer_names: DELTA_NAMES,
        complete: qwen3_5,
    },
    Architecture {
        gguf: "qwen3next",
        model_type: "qwen3_next",
        rope_pairs: "halves",
        layer_names: DELTA_NAMES,
        complete: qwen3_next,
    },
];

/// Integers that have the same meaning in every architecture: GGUF key, Hugging Face key, whether it must be there.
const INTEGERS: &[(&str, &str, bool)] = &[
    ("embedding_length", "hidden_size", true),
    ("block_count", "num_hidden_layers", true),
    ("attention.head_count", "num_attention_heads", true),
    ("attention.head_count_kv", "num_key_value_heads", false),
    ("attention.key_length", "head_dim", false),
    ("feed_forward_length", "intermediate_size", false),
    ("context_length", "max_position_embeddings", true),
    ("attention.sliding_window", "sliding_window", false),
    ("expert_count", "num_experts", false),
    ("expert_used_count", "num_experts_per_tok", false),
    ("expert_feed_forward_length", "moe_intermediate_size", false),
];

/// Real numbers likewise.
const NUMBERS: &[(&str, &str, bool)] = &[
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps", true),
    ("attn_logit_softcapping", "attn_logit_softcapping", false),
    ("final_logit_softcapping", "final_logit_softcapping", false),
];

/// Keys that change the computation, and their values that do not: truth is 1.
const NEUTRAL: &[(&str, &[f64])] = &[
    ("attention.causal", &[1.0]),
    ("attention.max_alibi_bias", &[0.0]),
    ("attention.clamp_kqv", &[0.0]),
    ("use_parallel_residual", &[0.0]),
    ("leading_dense_block_count", &[0.0]),
    ("expert_group_count", &[0.0, 1.0]),
    ("expert_group_used_count", &[0.0, 1.0]),
    ("expert_shared_count", &[0.0, 1.0]),
    ("expert_weights_scale", &[0.0, 1.0]),
    ("expert_weights_norm", &[1.0]),
    // Softmax over all experts, or over the chosen ones: the same after norming.
    ("expert_gating_func", &[0.0, 1.0, 3.0]),
    ("rope.scaling.yarn_ext_factor", &[-1.0, 1.0]),
];

/// A model's configuration and the canonical names of its tensors, in the order of [`Gguf::tensors`].
pub struct Translated {
    /// In the shape of `config.json`.
    pub config: Json,
    /// What the tensors are called.
    pub names: Vec<TensorName>,
}

/// Translates metadata and names. `rope_factors` are the values of the `rope_freqs` tensor, if there is one.
///
/// # Errors
/// [`CheckpointError::UnknownArchitecture`]; [`CheckpointError::Config`] for a key that is missing or no number.
pub fn translate(gguf: &Gguf, rope_factors: Option<&[f32]>, path: &str) -> Result<Translated, CheckpointError> {
    const KIND: &str = "general.architecture";
    let kind = gguf.metadata().get(KIND).ok_or_else(|| CheckpointError::config(path, KIND, "is missing"))?;
    let name = kind.as_str().ok_or_else(|| CheckpointError::config(path, KIND, format!("{kind} is not a text")))?;
    let architecture = ARCHITECTURES.iter().find(|known| known.gguf == name).ok_or_else(|| {
        let known: Vec<_> = ARCHITECTURES.iter().map(|known| known.gguf).collect();
        CheckpointError::UnknownArchitecture { path: path.into(), architecture: name.into(), known: known.join(", ") }
    })?;
    let keys = Keys { metadata: gguf.metadata(), architecture: architecture.gguf, path };
    check_general(&keys)?;
    keys.only_neutral()?;
    let mut config = Map::new();
    config.insert("model_type".into(), architecture.model_type.into());
    config.insert("consort_rope_pairs".into(), architecture.rope_pairs.into());
    config.insert(ARCHITECTURE.into(), architecture.gguf.into());
    for &(from, to, required) in INTEGERS {
        if let Some(value) = keys.integer(from, required)? {
            config.insert(to.into(), value.into());
        }
    }
    for &(from, to, required) in NUMBERS {
        // Without a cap converters write none, or 0.
        let is_none = |value: f64| value == 0.0 && to.ends_with("softcapping");
        if let Some(value) = keys.number(from, required)?.filter(|&value| !is_none(value)) {
            config.insert(to.into(), value.into());
        }
    }
    if config["num_hidden_layers"].as_u64() > Some(MAX_LAYERS) {
        let blocks = &config["num_hidden_layers"];
        return Err(keys.wrong("block_count", format!("{blocks} is more than {MAX_LAYERS} layers")));
    }
    let has = |name: &str| gguf.tensors().iter().any(|tensor| tensor.name == name);
    let embedding = gguf.tensors().iter().find(|tensor| tensor.name == "token_embd.weight");
    let vocab_size = match embedding {
        Some(embedding) => embedding.shape[0] as u64,
        None => keys.integer("vocab_size", true)?.unwrap_or_default(),
    };
    config.insert("vocab_size".into(), vocab_size.into());
    config.insert("tie_word_embeddings".into(), (!has("output.weight")).into());
    config.insert("attention_bias".into(), has("blk.0.attn_q.bias").into());
    let heads = keys.integer("attention.head_count", true)?.unwrap_or(1).max(1);
    let hidden = keys.integer("embedding_length", true)?.unwrap_or_default();
    config.entry("num_key_value_heads").or_insert(heads.into());
    if heads > hidden && !config.contains_key("head_dim") {
        return Err(keys.wrong("attention.head_count", format!("{heads} heads, but embedding_length is {hidden}")));
    }
    let head_dim = config.entry("head_dim").or_insert((hidden / heads).into()).as_u64().unwrap_or(1).max(1);
    if let Some(length) = keys.integer("attention.value_length", false)?.filter(|&length| length != head_dim) {
        let reason = format!("{length} features of a value beside {head_dim} of a key are not supported");
        return Err(keys.wrong("attention.value_length", reason));
    }
    if let Some(rotary_dims) = keys.integer("rope.dimension_count", false)?.filter(|&dims| dims != head_dim) {
        if rotary_dims == 0 || rotary_dims > head_dim || !rotary_dims.is_multiple_of(2) {
            let reason = format!("{rotary_dims} is no even number from 2 to {head_dim}, the features of a head");
            return Err(keys.wrong("rope.dimension_count", reason));
        }
        config.insert("partial_rotary_factor".into(), (rotary_dims as f64 / head_dim as f64).into());
    }
    end_tokens(&keys, vocab_size, &mut config)?;
    let rope = rope_parameters(&keys, rope_factors)?;
    config.insert("rope_theta".into(), rope["rope_theta"].clone());
    config.insert("rope_parameters".into(), rope);
    (architecture.complete)(&keys, &mut config)?;
    let names = gguf.tensors().iter().map(|tensor| names::translated(&tensor.name, architecture.layer_names)).collect();
    Ok(Translated { config: Json::Object(config), names })
}

/// Where a translated configuration keeps the prefix of its metadata keys.
const ARCHITECTURE: &str = "consort_gguf_architecture";

/// Keys that architectures rename, or that are nested: Hugging Face key, GGUF key.
const RENAMED: &[(&str, &str)] = &[
    ("num_local_experts", "expert_count"),
    ("rope_theta", "rope.freq_base"),
    ("rope_parameters.rope_theta", "rope.freq_base"),
    ("rope_parameters.factor", "rope.scaling.factor"),
    ("rope_parameters.original_max_position_embeddings", "rope.scaling.original_context_length"),
    ("partial_rotary_factor", "rope.dimension_count"),
    ("linear_conv_kernel_dim", "ssm.conv_kernel"),
    ("linear_key_head_dim", "ssm.state_size"),
    ("linear_num_key_heads", "ssm.group_count"),
    ("linear_num_value_heads", "ssm.time_step_rank"),
    ("linear_value_head_dim", "ssm.inner_size"),
    ("shared_expert_intermediate_size", "expert_shared_feed_forward_length"),
];

/// What a GGUF file calls a key of the configuration that was translated from it: for messages. `None` for other models.
pub fn metadata_key(config: &Json, key: &str) -> Option<String> {
    let architecture = config.get(ARCHITECTURE)?.as_str()?;
    let tables = INTEGERS.iter().chain(NUMBERS).map(|&(gguf, ours, _)| (ours, gguf)).chain(RENAMED.iter().copied());
    let known = tables.into_iter().find(|(ours, _)| *ours == key).map(|(_, gguf)| gguf);
    Some(match known {
        Some(gguf) => format!("GGUF metadata: key \"{architecture}.{gguf}\""),
        None => format!("GGUF metadata: what stands for {key:?}"),
    })
}

/// What a GGUF file calls a tensor, where the configuration was translated from one: for messages. `None` for other models.
pub fn tensor_name(config: &Json, canonical: &str) -> Option<String> {
    let name = config.get(ARCHITECTURE)?.as_str()?;
    let architecture = ARCHITECTURES.iter().find(|known| known.gguf == name)?;
    names::stored(canonical, architecture.layer_names)
}

/// Far beyond any model; lists with an entry for each layer are made from this number.
const MAX_LAYERS: u64 = 1 << 16;

/// The tensor that holds one frequency divisor for each rotary pair.
pub const ROPE_FACTORS: &str = "rope_freqs.weight";

fn end_tokens(keys: &Keys<'_>, vocabulary: u64, config: &mut Map<String, Json>) -> Result<(), CheckpointError> {
    let token = |name: &str| {
        let key = format!("tokenizer.ggml.{name}_token_id");
        let Some(value) = keys.metadata.get(&key) else { return Ok(None) };
        let wrong = || {
            let reason = format!("{value} is no token of the vocabulary of {vocabulary}");
            CheckpointError::config(keys.path, &key, reason)
        };
        value.as_u64().filter(|&id| id < vocabulary).map(Some).ok_or_else(wrong)
    };
    let mut ends: Vec<u64> = Vec::new();
    for name in ["eos", "eot", "eom"] {
        ends.extend(token(name)?);
    }
    ends.dedup();
    config.insert("eos_token_id".into(), ends.into());
    if let Some(begin) = token("bos")? {
        config.insert("bos_token_id".into(), begin.into());
    }
    Ok(())
}

fn rope_parameters(keys: &Keys<'_>, factors: Option<&[f32]>) -> Result<Json, CheckpointError> {
    let theta = keys.number("rope.freq_base", false)?.unwrap_or(10_000.0);
    const TYPE: &str = "rope.scaling.type";
    let told = keys.text(TYPE)?;
    // Old files have but a number.
    let old_factor = keys.number("rope.scale_linear", false)?;
    let factor = keys.number("rope.scaling.factor", matches!(told, Some("linear" | "yarn")) && old_factor.is_none())?;
    let factor = factor.or(old_factor).filter(|&factor| factor != 0.0);
    let scaling = told.unwrap_or(if factor.is_some_and(|factor| factor != 1.0) { "linear" } else { "none" });
    let mut rope = match (scaling, factors) {
        ("none", Some(factors)) => json!({ "rope_type": "factors", "factors": factors }),
        (other, Some(_)) => {
            return Err(keys.wrong(TYPE, format!("{:?} beside {ROPE_FACTORS} is not supported", excerpt(other))));
        }
        ("none", None) => json!({ "rope_type": "default" }),
        ("linear", None) => json!({ "rope_type": "linear", "factor": factor }),
        ("yarn", None) => yarn(keys, factor.unwrap_or(1.0))?,
        (other, None) => return Err(keys.wrong(TYPE, format!("{:?} is not supported", excerpt(other)))),
    };
    rope["rope_theta"] = theta.into();
    if let Some(beta) = keys.number("attention.temperature_scale", false)? {
        rope["llama_4_scaling_beta"] = beta.into();
        rope["original_max_position_embeddings"] = keys.integer("rope.scaling.original_context_length", true)?.into();
    }
    Ok(rope)
}

/// Refuses files that hold something else than a model, or formats of a later version.
fn check_general(keys: &Keys<'_>) -> Result<(), CheckpointError> {
    const KIND: &str = "general.type";
    const VERSION: &str = "general.quantization_version";
    const LATEST: u64 = 2;
    if let Some(kind) = keys.metadata.get(KIND).filter(|kind| kind.as_str() != Some("model")) {
        return Err(CheckpointError::config(keys.path, KIND, format!("is {kind}; a model is needed")));
    }
    let is_read = |version: &&Value| version.as_u64().is_some_and(|version| version <= LATEST);
    match keys.metadata.get(VERSION).filter(|version| !is_read(version)) {
        Some(version) => {
            let reason = format!("is {version}; versions up to {LATEST} are read");
            Err(CheckpointError::config(keys.path, VERSION, reason))
        }
        None => Ok(()),
    }
}

/// YaRN. GGUF writes the attention factor as the logarithmic multiplier of the denominator (`mscale_all_dim`), which is 0
/// where the key is missing; `attn_factor` multiplies what comes out.
fn yarn(keys: &Keys<'_>, factor: f64) -> Result<Json, CheckpointError> {
    let magnitude = |multiplier: f64| if factor <= 1.0 { 1.0 } else { 0.1 * multiplier * factor.ln() + 1.0 };
    let number = |key, default| Ok::<_, CheckpointError>(keys.number(key, false)?.unwrap_or(default));
    let multiplier = number("rope.scaling.yarn_log_multiplier", 0.0)?;
    let own_factor = number("rope.scaling.attn_factor", 1.0)? * number("rope.scaling.yarn_attn_factor", 1.0)?;
    Ok(json!({
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length", true)?,
        "beta_fast": number("rope.scaling.yarn_beta_fast", 32.0)?,
        "beta_slow": number("rope.scaling.yarn_beta_slow", 1.0)?,
        "attention_factor": own_factor * magnitude(1.0) / magnitude(multiplier),
    }))
}

fn plain(_: &Keys<'_>, _: &mut Map<String, Json>) -> Result<(), CheckpointError> {
    Ok(())
}

/// `llama` with experts is Mixtral.
fn llama(_: &Keys<'_>, config: &mut Map<String, Json>) -> Result<(), CheckpointError> {
    match config.remove("num_experts").filter(|experts| experts.as_u64() != Some(0)) {
        Some(experts) => {
            config.insert("model_type".into(), "mixtral".into());
            config.insert("num_local_experts".into(), experts);
        }
        None => {
            config.remove("num_experts_per_tok");
        }
    }
    Ok(())
}

fn qwen3_moe(_: &Keys<'_>, config: &mut Map<String, Json>) -> Result<(), CheckpointError> {
    config.insert("norm_topk_prob".into(), true.into());
    config.insert("decoder_sparse_step".into(), 1.into());
    config.insert("mlp_only_layers".into(), json!([]));
    Ok(())
}

/// The converter of these models puts the value heads of delta nets in an order that suits ggml: round the key heads.
fn qwen3_5(keys: &Keys<'_>, config: &mut Map<String, Json>) -> Result<(), CheckpointError> {
    config.insert("consort_delta_heads_tiled".into(), true.into());
    qwen3_next(keys, config)
}

/// Full attention where no key says otherwise: every fourth layer.
const ATTENTION_PERIOD: u64 = 4;

fn qwen3_next(keys: &Keys<'_>, config: &mut Map<String, Json>) -> Result<(), CheckpointError> {
    config.insert("consort_norm_offset_applied".into(), true.into());
    config.insert("consort_delta_rates_applied".into(), true.into());
    config.insert("norm_topk_prob".into(), true.into());
    let size = |key| Ok::<_, CheckpointError>(keys.integer(key, true)?.unwrap_or_default());
    let value_heads = size("ssm.time_step_rank")?;
    let values = size("ssm.inner_size")?;
    if value_heads == 0 || !values.is_multiple_of(value_heads) {
        return Err(keys.wrong("ssm.inner_size", format!("{values} does not divide into {value_heads} heads")));
    }
    for (key, value) in [
        ("linear_conv_kernel_dim", size("ssm.conv_kernel")?),
        ("linear_key_head_dim", size("ssm.state_size")?),
        ("linear_num_key_heads", size("ssm.group_count")?),
        ("linear_num_value_heads", value_heads),
        ("linear_value_head_dim", values / value_heads),
        ("shared_expert_intermediate_size", keys.integer("expert_shared_feed_forward_length", false)?.unwrap_or(0)),
    ] {
        config.insert(key.into(), value.into());
    }
    // The last blocks predict further tokens; they are no layers of the model itself.
    let blocks = size("block_count")?;
    let layers = blocks.saturating_sub(keys.integer("nextn_predict_layers", false)?.unwrap_or(0));
    config.insert("num_hidden_layers".into(), layers.into());
    let period = keys.integer("full_attention_interval", false)?.unwrap_or(ATTENTION_PERIOD).max(1);
    let recurs: Vec<bool> = match keys.get("attention.recurrent_layers") {
        Some(flags) => keys.flags("attention.recurrent_layers", flags)?,
        None => (0..layers).map(|layer| (layer + 1) % period != 0).collect(),
    };
    if ![layers, blocks].contains(&(recurs.len() as u64)) {
        let reason = format!("{} flags for {blocks} layers", recurs.len());
        return Err(keys.wrong("attention.recurrent_layers", reason));
    }
    let kinds = recurs.iter().take(layers as usize);
    let kinds = kinds.map(|&recurs| if recurs { "linear_attention" } else { "full_attention" });
    config.insert("layer_types".into(), kinds.collect::<Vec<_>>().into());
    Ok(())
}

fn gemma3(keys: &Keys<'_>, config: &mut Map<String, Json>) -> Result<(), CheckpointError> {
    config.insert("consort_norm_offset_applied".into(), true.into());
    config.insert("hidden_activation".into(), "gelu_pytorch_tanh".into());
    let local_base = keys.number("rope.freq_base_swa", false)?.unwrap_or(10_000.0);
    config.insert("rope_local_base_freq".into(), local_base.into());
    let layers = keys.integer("block_count", true)?.unwrap_or_default();
    // The 27B model, known by its 62 layers, is the only one that scales queries by hidden / heads.
    let scalar = if layers == 62 {
        keys.integer("embedding_length", true)?.unwrap_or_default()
            / keys.integer("attention.head_count", true)?.unwrap_or(1).max(1)
    } else {
        config["head_dim"].as_u64().unwrap_or_default()
    };
    config.insert("query_pre_attn_scalar".into(), scalar.into());
    layer_types(keys, config, 6)
}

fn gpt_oss(keys: &Keys<'_>, config: &mut Map<String, Json>) -> Result<(), CheckpointError> {
    keys.integer("attention.sliding_window", true)?;
    let experts = keys.integer("expert_count", true)?;
    config.remove("num_experts");
    config.insert("num_local_experts".into(), experts.into());
    let width = keys.integer("expert_feed_forward_length", true)?;
    config.remove("moe_intermediate_size");
    config.insert("intermediate_size".into(), width.into());
    config.insert("swiglu_limit".into(), 7.0.into());
    config["rope_parameters"]["truncate"] = false.into();
    layer_types(keys, config, 2)
}

/// Every `period`-th layer sees everything, the rest a window; the metadata may carry another period or a flag per layer.
fn layer_types(keys: &Keys<'_>, config: &mut Map<String, Json>, period: u64) -> Result<(), CheckpointError> {
    if !config.contains_key("sliding_window") {
        return Ok(());
    }
    let layers = keys.integer("block_count", true)?.unwrap_or_default();
    const KEY: &str = "attention.sliding_window_pattern";
    let slides: Vec<bool> = match keys.get(KEY) {
        Some(flags) if flags.as_array().is_some() => keys.flags(KEY, flags)?,
        _ => {
            let period = keys.integer(KEY, false)?.unwrap_or(period);
            if period == 0 {
                return Err(keys.wrong(KEY, "is 0; a period or a flag for each layer is needed"));
            }
            (0..layers).map(|layer| (layer + 1) % period != 0).collect()
        }
    };
    if slides.len() as u64 != layers {
        return Err(keys.wrong(KEY, format!("{} flags for {layers} layers", slides.len())));
    }
    let types = slides.iter().map(|&slides| if slides { "sliding_attention" } else { "full_attention" });
    config.insert("layer_types".into(), types.collect::<Vec<_>>().into());
    Ok(())
}

/// The architecture's own keys, `ARCHITECTURE.KEY`.
struct Keys<'a> {
    metadata: &'a BTreeMap<String, Value>,
    architecture: &'a str,
    path: &'a str,
}

impl Keys<'_> {
    fn get(&self, key: &str) -> Option<&Value> {
        self.metadata.get(&format!("{}.{key}", self.architecture))
    }

    fn wrong(&self, key: &str, reason: impl Into<String>) -> CheckpointError {
        let key = format!("{}.{key}", self.architecture);
        CheckpointError::Config { path: self.path.into(), key, reason: reason.into() }
    }

    fn text(&self, key: &str) -> Result<Option<&str>, CheckpointError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.wrong(key, format!("{value} is not a text")))
    }

    /// Refuses what would have to be done and is not.
    fn only_neutral(&self) -> Result<(), CheckpointError> {
        for (key, done) in NEUTRAL {
            let Some(value) = self.get(key) else { continue };
            let number = value.as_bool().map(f64::from).or(value.as_f64());
            if !number.is_some_and(|number| done.contains(&number)) {
                return Err(self.wrong(key, format!("{value} is not supported")));
            }
        }
        Ok(())
    }

    /// A flag for each layer, as truth values or as 0 and 1.
    fn flags(&self, key: &str, value: &Value) -> Result<Vec<bool>, CheckpointError> {
        let flag = |value: &Value| match (value.as_bool(), value.as_u64()) {
            (Some(flag), _) => Some(flag),
            (None, Some(number @ (0 | 1))) => Some(number == 1),
            _ => None,
        };
        let flags = value.as_array().and_then(|values| values.iter().map(flag).collect());
        flags.ok_or_else(|| self.wrong(key, format!("{value} is not a list of truth values")))
    }

    fn integer(&self, key: &str, required: bool) -> Result<Option<u64>, CheckpointError> {
        self.scalar(key, required, "a whole number", Value::as_u64)
    }

    fn number(&self, key: &str, required: bool) -> Result<Option<f64>, CheckpointError> {
        // Single precision is what the file holds; its shortest decimal form is what the author wrote (1e-5).
        let finite = |value: f64| (value as f32).is_finite().then_some(value);
        self.scalar(key, required, "a finite number", |value| match value {
            Value::F32(single) => finite(single.to_string().parse().ok()?),
            other => finite(other.as_f64()?),
        })
    }

    /// One number; a list with one entry for each layer must repeat it.
    fn scalar<T>(
        &self,
        key: &str,
        required: bool,
        what: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, CheckpointError> {
        let value = match self.get(key) {
            None if required => return Err(self.wrong(key, "is missing")),
            None => return Ok(None),
            Some(value) => value,
        };
        let blocks = self.get("block_count").and_then(Value::as_u64);
        let one = match value.as_array() {
            Some(list) if Some(list.len() as u64) != blocks => {
                let expected = blocks.map_or("one number".into(), |blocks| format!("one for each of {blocks} layers"));
                return Err(self.wrong(key, format!("is a list of {}, not {expected}", list.len())));
            }
            Some([first, rest @ ..]) if rest.iter().all(|other| other == first) => first,
            Some(_) => return Err(self.wrong(key, "differs from layer to layer, which is not supported")),
            None => value,
        };
        read(one).map(Some).ok_or_else(|| self.wrong(key, format!("{one} is not {what}")))
    }
}
