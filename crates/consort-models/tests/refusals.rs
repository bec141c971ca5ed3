//! A config that asks for something that is not implemented is refused by name, before anything is read.

use std::fs;
use std::path::{Path, PathBuf};

use consort_checkpoint::Checkpoint;
use consort_models::{Outline, Plan, measure};
use serde_json::{Value, json};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../oracle/fixtures").join(name)
}

/// What the model of `fixture` says to `key` (with dots for nesting) set to `value`.
fn verdict(name: &str, key: &str, value: Value) -> Result<(), String> {
    let temporary = tempfile::tempdir().unwrap();
    let directory = temporary.path();
    fs::copy(fixture(name).join("model.safetensors"), directory.join("model.safetensors")).unwrap();
    let mut config: Value = serde_json::from_slice(&fs::read(fixture(name).join("config.json")).unwrap()).unwrap();
    let inner = if config.get("text_config").is_some() { &mut config["text_config"] } else { &mut config };
    let place = key.split('.').fold(inner, |place, part| &mut place[part]);
    *place = value;
    fs::write(directory.join("config.json"), config.to_string()).unwrap();

    let checkpoint = Checkpoint::open(directory).unwrap();
    let outcome = Outline::new(&checkpoint)
        .and_then(|outline| outline.place(&Plan::single(), 0))
        .and_then(|placement| measure(&checkpoint, &placement));
    outcome.map(|_| ()).map_err(|error| error.to_string())
}

#[test]
fn what_is_not_implemented_is_refused_by_name() {
    let cases = [
        ("llama", "model_type", json!("llamantine"), "llamantine"),
        ("llama", "hidden_act", json!("relu2"), "relu2"),
        (
            "llama",
            "num_key_value_heads",
            json!(2),
            "key \"num_key_value_heads\" = 2: expected a divisor of the 9 query heads",
        ),
        ("ministral3", "rope_parameters.rope_type", json!("longrope"), "longrope"),
        ("gemma3_text", "hidden_activation", json!("silu"), "silu"),
        ("gemma3_text", "final_logit_softcapping", json!(30.0), "final_logit_softcapping = 30.0"),
        ("gemma3_text", "attn_logit_softcapping", json!(50.0), "attn_logit_softcapping = 50.0"),
        ("gemma3_text", "use_bidirectional_attention", json!(true), "use_bidirectional_attention = true"),
        (
            "qwen3_moe",
            "num_experts_per_tok",
            json!(9),
            "key \"num_experts_per_tok\" = 9: expected no more than the 6 experts",
        ),
        ("qwen3_5", "layer_types", json!(["mamba", "mamba", "mamba", "full_attention"]), "mamba"),
        ("qwen3_5", "layer_types", json!(["full_attention"]), "layer_types"),
        (
            "llama",
            "layer_types",
            json!(["linear_attention", "full_attention", "full_attention"]),
            "layer_types = [\"linear_attention\"",
        ),
        ("qwen3_5", "attn_output_gate", json!(false), "attn_output_gate = false"),
        ("llama", "is_causal", json!(false), "is_causal = false"),
        ("llama", "attn_output_gate", json!(true), "attn_output_gate = true"),
        ("qwen3_5", "attn_output_gate", json!(false), "attn_output_gate = false"),
        ("llama", "rope_interleaved", json!(true), "rope_interleaved = true"),
        ("gpt_oss", "sliding_window", json!(null), "key \"sliding_window\" is missing"),
        (
            "qwen3_5",
            "linear_num_value_heads",
            json!(3),
            "key \"linear_num_value_heads\" = 3: expected a multiple of the 4 key heads",
        ),
        ("qwen3_5", "linear_conv_kernel_dim", json!(3), "conv1d.weight of shape [128, 1, 4]"),
        ("gpt_oss", "hidden_act", json!("gelu"), "gelu"),
        ("muse_glimmer", "layer_rope_theta", json!([1e4, 1e4, 2e4, 0]), "layer_rope_theta"),
        // Numbers that cannot be meant.
        ("llama", "rms_norm_eps", json!({"__float__": "NaN"}), "key \"rms_norm_eps\" = {\"__float__\":\"NaN\"}"),
        ("llama", "rms_norm_eps", json!({"__float__": "Infinity"}), "key \"rms_norm_eps\""),
        ("llama", "rope_theta", json!({"__float__": "NaN"}), "key \"rope_theta\""),
        ("llama", "max_position_embeddings", json!("512"), "key \"max_position_embeddings\" = \"512\""),
        (
            "gemma3_text",
            "query_pre_attn_scalar",
            json!(-5),
            "key \"query_pre_attn_scalar\" = -5: expected a number from 0.000001 to 1000000",
        ),
        ("gemma3_text", "query_pre_attn_scalar", json!(0), "key \"query_pre_attn_scalar\" = 0"),
        ("gemma3_text", "rope_local_base_freq", json!({"__float__": "NaN"}), "key \"rope_local_base_freq\""),
        (
            "gemma3_text",
            "rope_parameters",
            json!({"full_attention": {"rope_theta": 1e4}}),
            "\"rope_parameters.sliding_attention\" is missing",
        ),
        ("gpt_oss", "swiglu_limit", json!({"__float__": "NaN"}), "key \"swiglu_limit\""),
        ("gpt_oss", "swiglu_alpha", json!(0), "key \"swiglu_alpha\""),
        ("muse_glimmer", "qk_scale_factor", json!({"__float__": "NaN"}), "key \"qk_scale_factor\""),
        ("muse_glimmer", "final_logit_softcapping", json!(0), "key \"final_logit_softcapping\""),
        ("muse_spark", "residual_gate_temperature", json!(0), "key \"residual_gate_temperature\""),
        ("muse_spark", "output_multiplier", json!({"__float__": "Infinity"}), "key \"output_multiplier\""),
        ("muse_spark", "routed_scaling_factor", json!("1"), "key \"routed_scaling_factor\""),
        (
            "muse_spark",
            "routed_scaling_factor",
            json!(-1),
            "key \"routed_scaling_factor\" = -1: expected a number from",
        ),
        ("muse_spark", "output_multiplier", json!(1e30), "key \"output_multiplier\" = 1e+30"),
        ("muse_glimmer", "output_multiplier", json!(-2), "key \"output_multiplier\" = -2"),
        ("gemma3_text", "query_pre_attn_scalar", json!(1e-9), "key \"query_pre_attn_scalar\" = 1e-9"),
        ("muse_spark", "mlp_layer_types", json!(["dense", "dense", "dense", "dense"]), "mlp_layer_types"),
        // Features that turn come in pairs.
        ("llama", "partial_rotary_factor", json!(0.01), "\"partial_rotary_factor\" = 0.01: expected an even number"),
        ("llama", "partial_rotary_factor", json!(0.375), "\"partial_rotary_factor\" = 0.375: expected an even number"),
        (
            "llama",
            "num_attention_heads",
            json!(90),
            "expected a head_dim beside it, or no more than hidden_size, which is 72",
        ),
        // Less than the files hold.
        (
            "llama",
            "num_hidden_layers",
            json!(2),
            "model.layers.2.input_layernorm.weight\" is in the checkpoint, but config.json: key \"num_hidden_layers\" = 2",
        ),
        ("qwen3_5", "num_hidden_layers", json!(3), "layer_types"),
        ("qwen3_moe", "num_experts", json!(5), "has shape [6, 64]"),
        ("qwen3_moe", "num_experts", json!(0), "weight \"model.layers.0.mlp.gate_proj.weight\" is missing"),
        ("gpt_oss", "num_local_experts", json!(4), "has shape"),
        ("muse_spark", "num_local_experts", json!(7), "has shape"),
        ("llama", "vocab_size", json!(255), "\"model.embed_tokens.weight\" has shape"),
        ("llama", "vocab_size", json!(257), "\"model.embed_tokens.weight\" has shape"),
        ("llama", "num_attention_heads", json!(3), "has shape"),
        ("llama", "head_dim", json!(4), "has shape"),
        ("llama", "intermediate_size", json!(64), "has shape"),
        ("qwen3", "model_type", json!("llama"), "a llama with these settings does not use it"),
        (
            "llama-llama3-bias",
            "attention_bias",
            json!(false),
            "_proj.bias\" is in the checkpoint, but a llama with these settings",
        ),
        ("llama-llama3-bias", "mlp_bias", json!(false), "mlp."),
        ("qwen3_5_moe", "shared_expert_intermediate_size", json!(0), "shared_expert"),
    ];
    let mut failures = Vec::new();
    for (name, key, value, expected) in cases {
        let message = verdict(name, key, value.clone()).err().unwrap_or("accepted".into());
        if !message.contains(expected) {
            failures.push(format!("{name}: {key} = {value}: {message:?}, not {expected:?}"));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn what_changes_nothing_is_accepted() {
    let cases = [
        ("llama", "rope_scaling", json!(null)),
        ("llama", "rms_norm_eps", json!(null)),
        ("gpt_oss", "swiglu_limit", json!({"__float__": "Infinity"})),
        ("llama", "never_heard_of", json!({"__float__": "NaN"})),
        ("gemma3_text", "final_logit_softcapping", json!(null)),
        ("gemma3_text", "use_bidirectional_attention", json!(false)),
        ("qwen3_5", "mtp_num_hidden_layers", json!(1)),
        // Speaks of queries, keys and values here, as where a GGUF file's tensors say so.
        ("qwen2", "attention_bias", json!(true)),
    ];
    for (name, key, value) in cases {
        verdict(name, key, value).unwrap();
    }
}

/// What a rank would hold of a fixture that has further tensors of zeros, in BF16.
fn measured_with(name: &str, tensors: &[(&str, usize)]) -> Result<Vec<String>, String> {
    measured_of(name, |header, data| {
        for &(name, values) in tensors {
            let start = data.len();
            data.resize(start + 2 * values, 0);
            header[name] = json!({"dtype": "BF16", "shape": [values], "data_offsets": [start, data.len()]});
        }
    })
}

/// What a rank would hold of a fixture whose header and data `change` has changed.
fn measured_of(name: &str, change: impl FnOnce(&mut Value, &mut Vec<u8>)) -> Result<Vec<String>, String> {
    let directory = tempfile::tempdir().unwrap();
    fs::copy(fixture(name).join("config.json"), directory.path().join("config.json")).unwrap();
    let file = fs::read(fixture(name).join("model.safetensors")).unwrap();
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&file[8..8 + length]).unwrap();
    let mut data = file[8 + length..].to_vec();
    change(&mut header, &mut data);
    let text = header.to_string();
    let whole = [&(text.len() as u64).to_le_bytes(), text.as_bytes(), &data].concat();
    fs::write(directory.path().join("model.safetensors"), whole).unwrap();
    let checkpoint = Checkpoint::open(directory.path()).unwrap();
    let placement = Outline::new(&checkpoint).and_then(|outline| outline.place(&Plan::single(), 0));
    let held = placement.and_then(|placement| measure(&checkpoint, &placement));
    held.map(|held| held.into_iter().map(|held| held.name).collect()).map_err(|error| error.to_string())
}

/// A layer behind the last one that predicts further tokens, as DeepSeek's and GLM's checkpoints have, is left alone; any other
/// is not.
#[test]
fn layers_that_predict_further_tokens_are_left_alone() {
    let [norm, further] = ["input_layernorm", "eh_proj"].map(|part| format!("model.layers.3.{part}.weight"));
    measured_with("llama", &[(&norm, 1), (&further, 1), ("mtp.layers.0.norm.weight", 1), ("score.weight", 1)]).unwrap();
    let unused = ["model.layers.0.self_attn.q_proj.pre_quant_scale", "model.layers.2.eh_proj.weight", "lm_head.bias"];
    for name in unused.into_iter().chain([norm.as_str(), "model.layers.0.self_attn.q_proj.bias"]) {
        let message = measured_with("llama", &[(name, 1)]).unwrap_err();
        assert!(message.contains(&format!("weight {name:?} is in the checkpoint, but ")), "{message}");
    }
}

/// Quantizers to GPTQ gave every projection a bias; where the model has none it must be zero, which shows when it is loaded.
#[test]
fn biases_of_gptq_that_the_model_does_not_have_are_not_held() {
    let names = ["self_attn.q_proj.bias", "mlp.down_proj.bias"].map(|name| format!("model.layers.0.{name}"));
    let held = measured_with("llama-gptq", &[(&names[0], 128), (&names[1], 128)]).unwrap();
    assert!(!held.iter().any(|name| names.contains(name)), "{held:?}");
}

/// Every tensor of the language model, given with the same number of values in any other shape, is refused.
#[test]
fn shapes_are_compared_dimension_by_dimension() {
    let names =
        ["llama", "gpt_oss", "qwen3_5_moe", "qwen3_next", "muse_spark", "muse_glimmer", "gemma3_text", "qwen3_moe"];
    let mut failures = Vec::new();
    for name in names {
        let mut tensors = Vec::new();
        measured_of(name, |header, _| tensors = header.as_object().unwrap().clone().into_iter().collect()).unwrap();
        let of_text = |(tensor, _): &&(String, Value)| {
            ["vision", "visual", "audio", "__metadata__"].iter().all(|part| !tensor.contains(part))
        };
        for (tensor, entry) in tensors.iter().filter(of_text) {
            let shape: Vec<u64> = entry["shape"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect();
            let mut others = vec![[&[1], &shape[..]].concat(), [&shape[..], &[1]].concat()];
            if shape.len() == 1 && shape[0].is_multiple_of(2) {
                others.push(vec![shape[0] / 2, 2]);
            }
            if let [first, rest @ ..] = &shape[..]
                && !rest.is_empty()
            {
                others.push([rest, &[*first]].concat());
                others.push([&[first * rest[0]], &rest[1..]].concat());
            }
            if let [one, two, three] = shape[..] {
                others.extend([vec![one, three, two], vec![two, one, three], vec![three, two, one]]);
                others.push(vec![one * 2, two / 2, three]);
            }
            // The convolution is published in several layouts, a shared expert's gate as a vector, too.
            let is_published = |other: &Vec<u64>| {
                *other == shape
                    || tensor.contains("conv1d")
                    || (tensor.ends_with("shared_expert_gate.weight") && other.len() == 1)
            };
            for other in others.into_iter().filter(|other| !is_published(other)) {
                let outcome = measured_of(name, |header, _| header[tensor]["shape"] = json!(other));
                let message = outcome.err().unwrap_or("accepted".into());
                if !message.contains(&format!("{tensor:?} has shape {other:?}")) {
                    failures.push(format!("{name}: {tensor} {shape:?} as {other:?}: {message}"));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Nothing is made in a number that the files contradict: with these, what it would take is more than any machine has.
#[test]
fn counts_are_compared_with_the_files_before_anything_is_made_in_their_number() {
    const HUGE: u64 = (1 << 31) - 1;
    let mut failures = Vec::new();
    for (name, key, weight) in [
        ("qwen3_moe", "num_attention_heads", "self_attn.q_proj.weight"),
        ("gemma3_text", "num_attention_heads", "self_attn.q_proj.weight"),
        ("gpt_oss", "num_attention_heads", "self_attn.q_proj.weight"),
        ("qwen3_5", "num_attention_heads", "self_attn.q_proj.weight"),
        ("muse_spark", "num_attention_heads", "self_attn.q_proj.weight"),
        ("qwen3_5", "linear_num_value_heads", "linear_attn.A_log"),
        ("qwen3_moe", "num_experts", "mlp.gate.weight"),
        ("qwen3_5_moe", "num_experts", "mlp.gate.weight"),
        ("qwen3_next", "num_experts", "mlp.gate.weight"),
        ("gpt_oss", "num_local_experts", "mlp.router.weight"),
        ("muse_spark", "num_local_experts", "mlp.gate.weight"),
    ] {
        // A multiple of all that such a number is divided by.
        let value = HUGE / 5040 * 5040;
        let message = verdict(name, key, json!(value)).err().unwrap_or("accepted".into());
        if !message.starts_with(&format!("config.json: key {key:?} = {value}: weight "))
            || !message.contains(&format!(".{weight}\" has shape ["))
        {
            failures.push(format!("{name}: {key}: {message}"));
        }
    }
    for value in [65_536, HUGE, 1 << 40] {
        let message = verdict("llama", "num_hidden_layers", json!(value)).unwrap_err();
        let expected = match value {
            65_536 => "no more than 3: the checkpoint's last layer is that of \"model.layers.2.",
            _ => "a whole number from 1 to 65536",
        };
        let expected = format!("config.json: key \"num_hidden_layers\" = {value}: expected {expected}");
        if !message.starts_with(&expected) {
            failures.push(message);
        }
    }
    let keys = ["vocab_size", "hidden_size", "intermediate_size", "head_dim", "num_key_value_heads", "sliding_window"];
    // A window means nothing to a llama.
    let models = [("llama", &keys[..5]), ("gemma3_text", &keys)];
    for (name, key) in models.into_iter().flat_map(|(name, keys)| keys.iter().map(move |&key| (name, key))) {
        let message = verdict(name, key, json!(1u64 << 40)).unwrap_err();
        let expected = format!("config.json: key {key:?} = {}: expected a whole number from 1 to {HUGE}", 1u64 << 40);
        if message != expected {
            failures.push(format!("{name}: {message}"));
        }
        _ = verdict(name, key, json!(HUGE));
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// The names that messages give are those of the files.
#[test]
fn messages_name_tensors_as_the_files_do() {
    let message = measured_of("gpt_oss", |header, _| {
        header["model.layers.1.mlp.experts.down_proj"]["shape"] = json!([5, 64, 32]);
    });
    let expected = "weight \"model.layers.1.mlp.experts.down_proj\" has shape [5, 64, 32]; the config says [5, 32, 64]";
    assert_eq!(message.unwrap_err(), expected);
    let renamed = |from: &'static str, to: &'static str| {
        move |header: &mut Value, _: &mut Vec<u8>| {
            let entry = header.as_object_mut().unwrap().remove(from).unwrap();
            header[to] = entry;
        }
    };
    let [norm, other] = ["input_layernorm.weight", "input_norm.weight"];
    let [norm, other] = [norm, other].map(|part| format!("model.language_model.layers.1.{part}"));
    let message = measured_of("qwen3_5_moe", renamed(norm.clone().leak(), other.leak())).unwrap_err();
    assert_eq!(message, format!("weight {norm:?} is missing from the checkpoint"));
}
