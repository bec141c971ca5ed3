//! What other programs call the architectures that can be converted, and their configuration.

use serde_json::{Map, Value as Json, json};

use super::{ConvertError, Target};

/// An architecture whose converted form has been loaded elsewhere.
pub(super) struct Family {
    /// `model_type` in `config.json`.
    model_type: &'static str,
    /// The class that transformers loads.
    class: &'static str,
}

const FAMILIES: &[Family] = &[
    Family { model_type: "llama", class: "LlamaForCausalLM" },
    Family { model_type: "mistral", class: "MistralForCausalLM" },
    Family { model_type: "ministral3", class: "Ministral3ForCausalLM" },
    Family { model_type: "qwen2", class: "Qwen2ForCausalLM" },
    Family { model_type: "qwen3", class: "Qwen3ForCausalLM" },
    Family { model_type: "qwen3_moe", class: "Qwen3MoeForCausalLM" },
    Family { model_type: "gemma3_text", class: "Gemma3ForCausalLM" },
];

/// Keys that say how the source was stored or wrapped, or that name code to run.
const DROPPED: &[&str] =
    &["quantization", "quantization_config", "vision_config", "audio_config", "auto_map", "model_file"];

impl Family {
    /// The family of a model.
    ///
    /// # Errors
    /// [`ConvertError::Architecture`] if nobody has checked what its tensors are called elsewhere.
    pub fn of(config: &Json, target: Target) -> Result<&'static Self, ConvertError> {
        let architecture = config["model_type"].as_str().unwrap_or("");
        FAMILIES.iter().find(|family| family.model_type == architecture).ok_or_else(|| {
            let known: Vec<_> = FAMILIES.iter().map(|family| family.model_type).collect();
            let (architecture, target) = (architecture.to_string(), target.to_string());
            ConvertError::Architecture { architecture, target, known: known.join(", ") }
        })
    }

    /// `config.json` of the converted model; `plain` are the modules that stay in BF16.
    ///
    /// # Errors
    /// [`ConvertError::Config`] for settings that only a GGUF file can express.
    pub fn config(&self, source: &Json, target: Target, plain: &[&str]) -> Result<Json, ConvertError> {
        let mut config = source.as_object().cloned().unwrap_or_default();
        if config.get("consort_norm_offset_applied").is_some_and(|applied| applied == true) {
            let reason = "norm gains of this GGUF file contain the added one; convert the original model instead";
            return Err(ConvertError::Config { key: "model_type", reason: reason.into() });
        }
        if config.get("consort_rope_pairs").is_some_and(|pairs| pairs == "interleaved")
            && config.contains_key("partial_rotary_factor")
        {
            let reason =
                "only a part of each head turns, in an order of this GGUF file; convert the original model instead";
            return Err(ConvertError::Config { key: "partial_rotary_factor", reason: reason.into() });
        }
        config.retain(|key, _| !key.starts_with("consort_") && !DROPPED.contains(&key.as_str()));
        config.insert("architectures".into(), json!([self.class]));
        config.insert("dtype".into(), "bfloat16".into());
        config.insert("torch_dtype".into(), "bfloat16".into());
        match config.get("eos_token_id").and_then(Json::as_array).map(Vec::as_slice) {
            Some([]) => _ = config.remove("eos_token_id"),
            Some([only]) => _ = config.insert("eos_token_id".into(), only.clone()),
            _ => {}
        }
        rope(&mut config)?;
        if let Some((key, block)) = target.quantization(plain) {
            config.insert(key.into(), block);
        }
        Ok(Json::Object(config))
    }
}

/// Writes the rotary settings in the new form (`rope_parameters`) and the old one, which mlx_lm reads.
fn rope(config: &mut Map<String, Json>) -> Result<(), ConvertError> {
    let Some(parameters) = config.get("rope_parameters").filter(|rope| rope["rope_type"].is_string()) else {
        return Ok(());
    };
    let mut parameters = parameters.clone();
    if parameters["rope_type"] == "factors" {
        let head_dim = config.get("head_dim").and_then(Json::as_u64).unwrap_or(0) as usize;
        parameters = llama3(&parameters, head_dim).ok_or_else(|| ConvertError::Config {
            key: "rope_parameters",
            reason: "the GGUF file divides its rotary frequencies by factors that are not those of Llama 3".into(),
        })?;
        config.insert("rope_parameters".into(), parameters.clone());
    }
    if let Some(theta) = parameters.get("rope_theta") {
        config.insert("rope_theta".into(), theta.clone());
    }
    let scaled = parameters["rope_type"] != "default";
    config.insert("rope_scaling".into(), if scaled { parameters } else { Json::Null });
    Ok(())
}

/// The settings of Llama 3 that give these frequency divisors, which is all that a GGUF file keeps of them.
fn llama3(parameters: &Json, head_dim: usize) -> Option<Json> {
    /// What all models of this kind were published with.
    const LOW: f64 = 1.0;
    const HIGH: f64 = 4.0;
    const ORIGINAL_CONTEXT: f64 = 8192.0;
    let factors: Vec<f64> = parameters["factors"].as_array()?.iter().filter_map(Json::as_f64).collect();
    let theta = parameters["rope_theta"].as_f64()?;
    let factor = factors.last().copied().filter(|_| factors.len() * 2 == head_dim)?;
    let expected = (0..factors.len()).map(|pair| {
        let wavelength = std::f64::consts::TAU * theta.powf(2.0 * pair as f64 / head_dim as f64);
        let smooth = ((ORIGINAL_CONTEXT / wavelength - LOW) / (HIGH - LOW)).clamp(0.0, 1.0);
        1.0 / ((1.0 - smooth) / factor + smooth)
    });
    let close = factors.iter().zip(expected).all(|(&found, expected)| (found / expected - 1.0).abs() < 1e-4);
    close.then(|| {
        json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": LOW,
            "high_freq_factor": HIGH,
            "original_max_position_embeddings": ORIGINAL_CONTEXT as u64,
            "rope_theta": theta,
        })
    })
}
