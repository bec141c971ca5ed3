//! A config that asks for something that is not implemented is refused by name, before anything is read.

use std::fs;
use std::path::{Path, PathBuf};

use consort_checkpoint::Checkpoint;
use consort_models::{Config, Outline, Plan, measure};
use serde_json::{Value, json};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../oracle/fixtures").join(name)
}

/// What the model of `fixture` says to `key` (with dots for nesting) set to `value`.
fn verdict(name: &str, key: &str, value: Value) -> Result<(), String> {
    let directory = std::env::temp_dir().join(format!("consort-refusal-{}-{name}-{key}", std::process::id()));
    fs::create_dir_all(&directory).unwrap();
    fs::copy(fixture(name).join("model.safetensors"), directory.join("model.safetensors")).unwrap();
    let mut config: Value = serde_json::from_slice(&fs::read(fixture(name).join("config.json")).unwrap()).unwrap();
    let inner = if config.get("text_config").is_some() { &mut config["text_config"] } else { &mut config };
    let place = key.split('.').fold(inner, |place, part| &mut place[part]);
    *place = value;
    fs::write(directory.join("config.json"), config.to_string()).unwrap();

    let checkpoint = Checkpoint::open(&directory).unwrap();
    let outcome = Outline::new(&Config::new(checkpoint.config()))
        .and_then(|outline| outline.place(&Plan::single(), 0))
        .and_then(|placement| measure(&checkpoint, &placement));
    fs::remove_dir_all(&directory).unwrap();
    outcome.map(|_| ()).map_err(|error| error.to_string())
}

#[test]
fn what_is_not_implemented_is_refused_by_name() {
    let cases = [
        ("llama", "model_type", json!("llamantine"), "llamantine"),
        ("llama", "hidden_act", json!("relu2"), "relu2"),
        ("llama", "num_key_value_heads", json!(2), "num_key_value_heads = 2"),
        ("ministral3", "rope_parameters.rope_type", json!("longrope"), "longrope"),
        ("gemma3_text", "hidden_activation", json!("silu"), "silu"),
        ("gemma3_text", "final_logit_softcapping", json!(30.0), "final_logit_softcapping = 30.0"),
        ("gemma3_text", "attn_logit_softcapping", json!(50.0), "attn_logit_softcapping = 50.0"),
        ("gemma3_text", "use_bidirectional_attention", json!(true), "use_bidirectional_attention = true"),
        ("qwen3_moe", "num_experts_per_tok", json!(9), "num_experts_per_tok = 9"),
        ("qwen3_5", "layer_types", json!(["mamba", "mamba", "mamba", "full_attention"]), "mamba"),
        ("qwen3_5", "layer_types", json!(["full_attention"]), "layer_types"),
        ("qwen3_5", "linear_num_value_heads", json!(3), "linear_num_value_heads = 3"),
        ("qwen3_5", "linear_conv_kernel_dim", json!(3), "conv1d.weight of shape [128, 1, 4]"),
        ("gpt_oss", "hidden_act", json!("gelu"), "gelu"),
        ("muse_glimmer", "layer_rope_theta", json!([1e4, 1e4, 2e4, 0]), "layer_rope_theta"),
    ];
    for (name, key, value, expected) in cases {
        let message = verdict(name, key, value.clone()).expect_err(&format!("{name}: {key} = {value} was accepted"));
        assert!(message.contains(expected), "{name}: {key} = {value}: {message:?} does not say {expected:?}");
    }
}

#[test]
fn what_changes_nothing_is_accepted() {
    let cases = [
        ("llama", "rope_scaling", json!(null)),
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
