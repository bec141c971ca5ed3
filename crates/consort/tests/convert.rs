//! `consort convert`, as a user meets it.

mod support;

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use support::{consort, eventually, refused, run_json};

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A model of one large matrix of zeros, which takes no room on the disk: to convert it takes long enough to be interrupted.
fn long_model(directory: &Path) {
    let rows = 1 << 19;
    let bytes: u64 = rows * 2048 * 2;
    let config = r#"{"model_type": "llama", "vocab_size": 524288, "hidden_size": 2048, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 16, "max_position_embeddings": 64, "tie_word_embeddings": true}"#;
    std::fs::write(directory.join("config.json"), config).unwrap();
    let mut header = format!(
        r#"{{"model.embed_tokens.weight":{{"dtype":"BF16","shape":[{rows},2048],"data_offsets":[0,{bytes}]}}}}"#
    );
    header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
    let start = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
    let weights = directory.join("model.safetensors");
    std::fs::write(&weights, &start).unwrap();
    std::fs::File::options().append(true).open(weights).unwrap().set_len(start.len() as u64 + bytes).unwrap();
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
