//! `consort convert`, as a user meets it.

mod support;

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use support::{consort, eventually, refused, run_json};

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A model of zeros with one large matrix, which takes no room on the disk: to convert it takes long enough to be interrupted.
fn long_model(directory: &Path) {
    let config = r#"{"model_type": "llama", "vocab_size": 524288, "hidden_size": 2048, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 64,
        "tie_word_embeddings": true}"#;
    std::fs::write(directory.join("config.json"), config).unwrap();
    let tensors: [(&str, &[u64]); 11] = [
        ("embed_tokens", &[524_288, 2048]),
        ("norm", &[2048]),
        ("layers.0.input_layernorm", &[2048]),
        ("layers.0.post_attention_layernorm", &[2048]),
        ("layers.0.self_attn.q_proj", &[64, 2048]),
        ("layers.0.self_attn.k_proj", &[32, 2048]),
        ("layers.0.self_attn.v_proj", &[32, 2048]),
        ("layers.0.self_attn.o_proj", &[2048, 64]),
        ("layers.0.mlp.gate_proj", &[64, 2048]),
        ("layers.0.mlp.up_proj", &[64, 2048]),
        ("layers.0.mlp.down_proj", &[2048, 64]),
    ];
    let mut end = 0;
    let entries = tensors.map(|(name, shape)| {
        let start = end;
        end += 2 * shape.iter().product::<u64>();
        format!(r#""model.{name}.weight":{{"dtype":"BF16","shape":{shape:?},"data_offsets":[{start},{end}]}}"#)
    });
    let header = format!("{{{}}}", entries.join(","));
    let start = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
    let weights = directory.join("model.safetensors");
    std::fs::write(&weights, &start).unwrap();
    std::fs::File::options().append(true).open(weights).unwrap().set_len(start.len() as u64 + end).unwrap();
}

#[test]
fn an_interrupted_conversion_leaves_nothing_behind() {
    for signal in ["INT", "TERM", "HUP"] {
        let (source, place) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        long_model(source.path());
        let output = place.path().join("converted");
        let arguments = ["convert", "-m", path(source.path()), "--to", "affine4", "--output", path(&output)];
        let child = consort(&arguments).spawn().unwrap();
        let entries = || std::fs::read_dir(place.path()).unwrap().count();
        eventually("the partial directory", Duration::from_secs(60), || entries() == 1);
        let killed = Command::new("kill").args([&format!("-{signal}"), &child.id().to_string()]).status().unwrap();
        assert!(killed.success());
        let finished = child.wait_with_output().unwrap();
        let said = String::from_utf8(finished.stderr).unwrap();
        assert_eq!(finished.status.code(), Some(1), "{signal}: {said}");
        assert!(said.ends_with("error: interrupted; what was written is removed again\n"), "{signal}: {said}");
        assert_eq!(entries(), 0, "{signal}");
    }
}

#[test]
fn what_was_converted_is_reported_and_runs() {
    let place = tempfile::tempdir().unwrap();
    let output = place.path().join("converted");
    let llama = support::fixture("llama-gguf").join("model.gguf");
    let arguments = ["convert", "-m", path(&llama), "--to", "bf16", "--output", path(&output)];
    let report = run_json(&arguments);
    let tensors = report["tensors"].as_array().unwrap();
    assert!(tensors.iter().all(|tensor| tensor["bytes"].as_u64() > Some(0) && tensor["relative_rms_error"].is_f64()));
    for file in ["config.json", "model.safetensors"] {
        assert!(output.join(file).is_file(), "{file}");
    }
    run_json(&["logits", "-m", path(&output), "--tokens", "1,2,3"]);
    refused(&arguments, "exists already");
}

#[test]
fn what_a_killed_conversion_left_is_removed_by_the_next() {
    let (source, place) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    long_model(source.path());
    let partial = || {
        let names = std::fs::read_dir(place.path()).unwrap().map(|it| it.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.ends_with(".consort-partial")).collect::<Vec<_>>()
    };
    let begin = |name: &str| {
        let output = place.path().join(name);
        consort(&["convert", "-m", path(source.path()), "--to", "affine4", "--output", path(&output)]).spawn().unwrap()
    };
    let has = |name: &str| partial().iter().any(|partial| partial.starts_with(&format!(".{name}.")));
    let mut killed = begin("killed");
    eventually("a partial directory", Duration::from_secs(60), || has("killed"));
    // Another conversion beside a living one leaves it alone.
    let mut living = begin("living");
    eventually("another", Duration::from_secs(60), || has("living"));
    killed.kill().unwrap();
    killed.wait().unwrap();
    assert!(has("killed") && has("living"), "{:?}", partial());
    let llama = support::fixture("llama-gguf").join("model.gguf");
    run_json(&["convert", "-m", path(&llama), "--to", "bf16", "--output", path(&place.path().join("next"))]);
    assert!(!has("killed") && has("living"), "{:?}", partial());
    living.kill().unwrap();
    living.wait().unwrap();
}

#[test]
fn a_conversion_that_quantizes_nothing_says_so() {
    let place = tempfile::tempdir().unwrap();
    let output = place.path().join("converted");
    // Rows of 72 and 96 columns don't divide into groups of 64.
    let llama = support::fixture("llama");
    let finished = support::run(&["convert", "-m", path(&llama), "--to", "affine4", "--output", path(&output)]);
    assert_eq!(finished.code, Some(0), "{finished:?}");
    assert!(finished.stderr.contains("note: nothing is affine4: "), "{finished:?}");
}
