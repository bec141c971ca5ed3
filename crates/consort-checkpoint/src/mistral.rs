//! Mistral's own form of a model: `params.json`, `consolidated*.safetensors`, `tekken.json`.
//!
//! Rows of q and k are in the order for a rotary embedding over neighbours, as in GGUF files of these models (see
//! [`crate::gguf::config`]); the published Hugging Face directories have them reordered.

use serde_json::{Map, Value as Json, json};

use crate::{CheckpointError, TensorName, huggingface};

/// The configuration.
pub(crate) const PARAMS: &str = "params.json";

/// Keys of `params.json`, those of `config.json` with the same meaning, and whether they must be there.
const KEYS: &[(&str, &str, bool)] = &[
    ("dim", "hidden_size", true),
    ("n_layers", "num_hidden_layers", true),
    ("n_heads", "num_attention_heads", true),
    ("n_kv_heads", "num_key_value_heads", false),
    ("head_dim", "head_dim", false),
    ("hidden_dim", "intermediate_size", true),
    ("norm_eps", "rms_norm_eps", true),
    ("vocab_size", "vocab_size", true),
    ("sliding_window", "sliding_window", false),
    ("max_position_embeddings", "max_position_embeddings", false),
    ("max_seq_len", "max_position_embeddings", false),
    ("tied_embeddings", "tie_word_embeddings", false),
    ("causal", "is_causal", false),
];

/// What the programs that read this form allow where the file says nothing.
const DEFAULT_CONTEXT: u64 = 128_000;
const DEFAULT_THETA: f64 = 10_000.0;

/// Other architectures that come in this form; each key, if it has a value, names one that is not read here.
const REFUSED: &[&str] = &["moe", "q_lora_rank", "kv_lora_rank", "use_biases", "attn_bias", "qk_norm"];

/// `params.json` in the shape of `config.json`.
///
/// # Errors
/// [`CheckpointError::Config`] for a key that is missing, or whose value means an architecture that is not read here.
pub(crate) fn translate(params: &Map<String, Json>, path: &str) -> Result<Map<String, Json>, CheckpointError> {
    let wrong = |key: &str, reason: String| CheckpointError::Config { path: path.into(), key: key.into(), reason };
    let given = |key: &str| params.get(key).filter(|value| !value.is_null());
    if let Some(key) = REFUSED.iter().find(|key| given(key).is_some_and(|value| *value != json!(false))) {
        return Err(wrong(key, "is not supported in this form; use the Hugging Face version of the model".into()));
    }
    let mut config = Map::new();
    for &(from, to, required) in KEYS {
        match given(from) {
            Some(value) => _ = config.entry(to).or_insert_with(|| value.clone()),
            None if required => return Err(wrong(from, "is missing".into())),
            None => {}
        }
    }
    config.entry("max_position_embeddings").or_insert(DEFAULT_CONTEXT.into());
    config.entry("tie_word_embeddings").or_insert(false.into());
    let heads = config["num_attention_heads"].clone();
    config.entry("num_key_value_heads").or_insert(heads);
    let scaling = given("llama_4_scaling");
    let model_type = if scaling.is_some() { "ministral3" } else { "mistral" };
    config.insert("model_type".into(), model_type.into());
    config.insert("hidden_act".into(), given("activation").cloned().unwrap_or("silu".into()));
    config.insert("consort_rope_pairs".into(), "interleaved".into());

    let mut rope = match given("yarn") {
        Some(yarn) => yarn_parameters(yarn).map_err(|(key, reason)| wrong(&format!("yarn.{key}"), reason.into()))?,
        None => json!({ "rope_type": "default" }),
    };
    rope["rope_theta"] = given("rope_theta").cloned().unwrap_or(DEFAULT_THETA.into());
    if let Some(scaling) = scaling {
        const ORIGINAL: &str = "original_max_position_embeddings";
        if let Some(key) = ["beta", ORIGINAL].into_iter().find(|key| !scaling[*key].is_number()) {
            return Err(wrong(&format!("llama_4_scaling.{key}"), "is no number".into()));
        }
        if rope.get(ORIGINAL).is_some_and(|original| original.as_f64() != scaling[ORIGINAL].as_f64()) {
            let reason = format!("{ORIGINAL} is {}, but that of yarn is {}", scaling[ORIGINAL], rope[ORIGINAL]);
            return Err(wrong("llama_4_scaling", reason));
        }
        rope["llama_4_scaling_beta"] = scaling["beta"].clone();
        rope[ORIGINAL] = scaling[ORIGINAL].clone();
    }
    config.insert("rope_parameters".into(), rope);
    if let Some(quantization) = given("quantization") {
        config.insert("quantization_config".into(), fp8(quantization).map_err(|reason| wrong("quantization", reason))?);
    }
    Ok(config)
}

/// The `yarn` block, or the key that is wrong and why. `apply_scale` says whether cosine and sine are scaled by YaRN's factor,
/// which is left to each model: Mistral Medium 3.5 does, Mistral Large 3 does not.
fn yarn_parameters(yarn: &Json) -> Result<Json, (&'static str, &'static str)> {
    let number = |key: &'static str| yarn[key].as_f64().ok_or((key, "is no number"));
    let scales = match &yarn["apply_scale"] {
        Json::Null => true,
        scales => scales.as_bool().ok_or(("apply_scale", "is neither true nor false"))?,
    };
    let factor = number("factor")?;
    let magnitude = if scales && factor > 1.0 { 0.1 * factor.ln() + 1.0 } else { 1.0 };
    Ok(json!({
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": number("original_max_position_embeddings")?,
        "beta_fast": number("beta")?,
        "beta_slow": number("alpha")?,
        "attention_factor": magnitude,
    }))
}

/// The one quantization that these files have: E4M3 with a scale for the tensor.
fn fp8(quantization: &Json) -> Result<Json, String> {
    match quantization["qformat_weight"].as_str() {
        Some("fp8_e4m3") => Ok(json!({ "quant_method": "fp8", "activation_scheme": "static" })),
        _ => Err(format!("{quantization} is not supported; fp8_e4m3 weights are")),
    }
}

/// Mistral's names outside and inside a layer, and the canonical ones.
const NAMES: &[(&str, &str)] = &[
    ("tok_embeddings", "model.embed_tokens"),
    ("norm", "model.norm"),
    ("output", "lm_head"),
    ("attention.wq", "self_attn.q_proj"),
    ("attention.wk", "self_attn.k_proj"),
    ("attention.wv", "self_attn.v_proj"),
    ("attention.wo", "self_attn.o_proj"),
    ("attention_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("feed_forward.w1", "mlp.gate_proj"),
    ("feed_forward.w2", "mlp.down_proj"),
    ("feed_forward.w3", "mlp.up_proj"),
];
const PARAMETERS: &[(&str, &str)] = &[("qscale_weight", "weight_scale_inv"), ("qscale_act", "activation_scale")];
/// Names that begin like this belong to vision.
const OTHER_TOWERS: &[&str] = &["pre_mm_projector_norm."];

/// What a tensor is called.
pub(crate) fn translated(name: &str) -> TensorName {
    if OTHER_TOWERS.iter().any(|tower| name.starts_with(tower)) || huggingface::canonical(name).is_none() {
        return TensorName::PassedOver;
    }
    let find = |table: &[(&str, &'static str)], wanted: &str| {
        table.iter().find(|(found, _)| *found == wanted).map(|(_, canonical)| *canonical)
    };
    let canonical = || {
        let (module, parameter) = name.rsplit_once('.')?;
        let parameter = find(PARAMETERS, parameter).unwrap_or(parameter);
        let (prefix, local) = match module.strip_prefix("layers.").and_then(|rest| rest.split_once('.')) {
            Some((layer, local)) => (format!("model.layers.{layer}."), local),
            None => (String::new(), module),
        };
        Some(format!("{prefix}{}.{parameter}", find(NAMES, local)?))
    };
    canonical().map_or(TensorName::Unknown, TensorName::Weight)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params(more: Json) -> Map<String, Json> {
        let params = json!({"dim": 2560, "n_layers": 2, "head_dim": 128, "hidden_dim": 64, "n_heads": 32, "n_kv_heads": 8,
            "norm_eps": 1e-5, "vocab_size": 131072, "rope_theta": 1e6});
        params
            .as_object()
            .unwrap()
            .iter()
            .chain(more.as_object().unwrap())
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect()
    }

    #[test]
    fn the_magnitude_of_yarn_follows_apply_scale() {
        let yarn = |apply: Json| {
            let yarn = json!({"factor": 64, "beta": 4, "alpha": 1, "original_max_position_embeddings": 4096,
                "apply_scale": apply});
            translate(&params(json!({"yarn": yarn})), "params.json").unwrap()["rope_parameters"].clone()
        };
        for (apply, magnitude) in [(json!(true), 1.415_888_3), (json!(null), 1.415_888_3), (json!(false), 1.0)] {
            let rope = yarn(apply);
            assert!((rope["attention_factor"].as_f64().unwrap() - magnitude).abs() < 1e-7, "{rope}");
            assert_eq!((&rope["beta_fast"], &rope["beta_slow"]), (&json!(4.0), &json!(1.0)));
            assert_eq!((&rope["factor"], &rope["rope_theta"]), (&json!(64.0), &json!(1e6)));
        }
    }

    #[test]
    fn mistakes_name_the_key() {
        let refused = |more: Json| translate(&params(more), "m/params.json").unwrap_err().to_string();
        assert_eq!(refused(json!({"dim": null})), "m/params.json: dim: is missing");
        assert!(refused(json!({"moe": {"num_experts": 8}})).starts_with("m/params.json: moe: is not supported"));
        assert_eq!(
            refused(json!({"yarn": {"factor": 2}})),
            "m/params.json: yarn.original_max_position_embeddings: is no number"
        );
        let yarn = json!({"factor": 2, "apply_scale": "no"});
        assert_eq!(refused(json!({ "yarn": yarn })), "m/params.json: yarn.apply_scale: is neither true nor false");
        let scaling = json!({"original_max_position_embeddings": 16});
        assert_eq!(refused(json!({ "llama_4_scaling": scaling })), "m/params.json: llama_4_scaling.beta: is no number");
        assert!(refused(json!({"quantization": {"qformat_weight": "int3"}})).contains("int3"));
    }

    #[test]
    fn names_translate_by_table() {
        for (found, expected) in [
            ("tok_embeddings.weight", "model.embed_tokens.weight"),
            ("output.weight", "lm_head.weight"),
            ("layers.11.attention.wq.weight", "model.layers.11.self_attn.q_proj.weight"),
            ("layers.0.feed_forward.w2.qscale_weight", "model.layers.0.mlp.down_proj.weight_scale_inv"),
            ("layers.0.feed_forward.w2.qscale_act", "model.layers.0.mlp.down_proj.activation_scale"),
        ] {
            assert_eq!(translated(found), TensorName::Weight(expected.into()), "{found}");
        }
        for found in ["vision_encoder.transformer.layers.0.attention.wq.weight", "pre_mm_projector_norm.weight"] {
            assert_eq!(translated(found), TensorName::PassedOver, "{found}");
        }
        for found in ["ouptut.weight", "layers.0.attention.wz.weight", "model.embed_tokens.weight", "output"] {
            assert_eq!(translated(found), TensorName::Unknown, "{found}");
        }
    }
}
