//! How weights get into memory: without taking much more of it than they fill, and sooner where they have been laid out before.

mod support;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use support::{Finished, fixture, run};

/// The tokens of a run on the model in `directory`, and what it said.
fn generate(directory: &Path, flags: &[&str]) -> (Value, String) {
    let model = ["generate", "-m", directory.to_str().unwrap(), "--tokens", "5,6,7", "--max-tokens", "6"];
    let finished: Finished = run(&[&model[..], &["--ignore-eos", "--json"], flags].concat());
    assert_eq!(finished.code, Some(0), "{flags:?}: {finished:?}");
    (serde_json::from_str(&finished.stdout).unwrap(), finished.stderr)
}

/// A model of zeros that takes next to nothing on the disk: most of it is one large embedding.
#[cfg(target_os = "linux")]
fn sparse_model(directory: &Path, vocabulary: u64) {
    let config = fs::read_to_string(fixture("llama").join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    let (hidden, features, heads, head) = (1024u64, 2048u64, 8u64, 128u64);
    for (key, value) in [
        ("hidden_size", hidden),
        ("intermediate_size", features),
        ("num_attention_heads", heads),
        ("num_key_value_heads", heads),
        ("head_dim", head),
        ("num_hidden_layers", 1),
        ("vocab_size", vocabulary),
    ] {
        config[key] = value.into();
    }
    fs::write(directory.join("config.json"), config.to_string()).unwrap();
    let layer = |name: &str| format!("model.layers.0.{name}.weight");
    let tensors = [
        ("model.embed_tokens.weight".to_owned(), vec![vocabulary, hidden]),
        ("model.norm.weight".to_owned(), vec![hidden]),
        (layer("input_layernorm"), vec![hidden]),
        (layer("post_attention_layernorm"), vec![hidden]),
        (layer("self_attn.q_proj"), vec![heads * head, hidden]),
        (layer("self_attn.k_proj"), vec![heads * head, hidden]),
        (layer("self_attn.v_proj"), vec![heads * head, hidden]),
        (layer("self_attn.o_proj"), vec![hidden, heads * head]),
        (layer("mlp.gate_proj"), vec![features, hidden]),
        (layer("mlp.up_proj"), vec![features, hidden]),
        (layer("mlp.down_proj"), vec![hidden, features]),
    ];
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for (name, shape) in tensors {
        let start = end;
        end += 2 * shape.iter().product::<u64>();
        header.insert(name, json!({"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}));
    }
    let header = serde_json::to_vec(&header).unwrap();
    let mut file = fs::File::create(directory.join("model.safetensors")).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(&header).unwrap();
    file.set_len(8 + header.len() as u64 + end).unwrap();
}

#[test]
#[cfg(target_os = "linux")]
fn loading_takes_little_more_memory_than_the_weights() {
    let directory = tempfile::tempdir().unwrap();
    sparse_model(directory.path(), 262_144);
    // Other flags than these would reserve memory for other things.
    let (answer, _) = generate(directory.path(), &["--context", "64", "--chunk", "16"]);
    let rank = &answer["ranks"][0];
    let (weights, peak) = (rank["weight_bytes"].as_u64().unwrap(), rank["peak_memory_bytes"].as_u64().unwrap());
    assert!(weights > 512 << 20, "{weights}");
    // To read the embedding whole before it is laid out would take as much again.
    assert!(peak < weights + (384 << 20), "{peak} bytes at most for {weights} bytes of weights");
}

fn entries(cache: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = fs::read_dir(cache).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths
}

#[test]
fn repacked_weights_serve_the_next_start_and_no_other_model() {
    for name in ["llama", "llama-fp8-channel", "gpt_oss-mxfp4"] {
        let scratch = tempfile::tempdir().unwrap();
        let (model, cache) = (scratch.path().join("model"), scratch.path().join("cache"));
        fs::create_dir(&model).unwrap();
        for entry in fs::read_dir(fixture(name)).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, model.join(path.file_name().unwrap())).unwrap();
        }
        let flags = ["--plan", "tensor:2", "--cache-repacked", cache.to_str().unwrap()];
        let tokens = |flags: &[&str]| {
            let (answer, said) = generate(&model, flags);
            (answer["tokens"].clone(), said)
        };
        let expected = tokens(&flags[..2]).0;
        let quiet = |flags: &[&str], when: &str| {
            let (tokens, said) = tokens(flags);
            assert_eq!((&tokens, said.contains("warning: ")), (&expected, false), "{name}: {when}: {said}");
        };
        // Left by a process that was killed, and by one that lives.
        fs::create_dir(&cache).unwrap();
        fs::write(cache.join(".dead.packed-partial"), "x").unwrap();
        let living = fs::File::create(cache.join(".living.packed-partial")).unwrap();
        living.lock().unwrap();
        quiet(&flags, "cold");
        assert!(!cache.join(".dead.packed-partial").exists(), "{name}");
        fs::remove_file(cache.join(".living.packed-partial")).expect("what a living process writes stays");
        let written = entries(&cache);
        let times = |paths: &[PathBuf]| -> Vec<_> {
            paths.iter().map(|path| path.metadata().unwrap().modified().unwrap()).collect()
        };
        let before = times(&written);
        assert!(written.len() > 10, "{name}: {written:?}");
        quiet(&flags, "warm");
        assert_eq!((entries(&cache), times(&written)), (written.clone(), before), "{name}: nothing was written anew");

        // One entry damaged, one cut, one that is something else altogether.
        let mut content = fs::read(&written[0]).unwrap();
        content[3] ^= 4;
        fs::write(&written[0], &content).unwrap();
        let content = fs::read(&written[1]).unwrap();
        fs::write(&written[1], &content[..content.len() / 2]).unwrap();
        fs::copy(&written[3], &written[2]).unwrap();
        let (after, said) = tokens(&flags);
        assert_eq!(after, expected, "{name}: damaged");
        // Which rank held the first three is chance; lines of other ranks than the first bear its name.
        let warnings: Vec<&str> = said.lines().filter(|line| line.contains("warning: ")).collect();
        let named = |line: &&str| written[..3].iter().any(|path| line.contains(path.to_str().unwrap()));
        assert!((1..=2).contains(&warnings.len()) && warnings.iter().all(named), "{name}: {said}");
        quiet(&flags, "repaired");

        // All of them: one line for each rank. A link in an entry's place is replaced, and what it leads to is left alone.
        let victim = scratch.path().join("victim");
        fs::write(&victim, "mine").unwrap();
        written.iter().for_each(|path| fs::write(path, "").unwrap());
        fs::remove_file(&written[4]).unwrap();
        std::os::unix::fs::symlink(&victim, &written[4]).unwrap();
        let (after, said) = tokens(&flags);
        assert_eq!((&after, said.matches("warning: ").count()), (&expected, 2), "{name}: {said}");
        assert!(said.matches(" more repacked weights are written anew").count() == 2, "{name}: {said}");
        assert_eq!(fs::read_to_string(&victim).unwrap(), "mine", "{name}");
        assert!(written[4].symlink_metadata().unwrap().is_file(), "{name}");
        quiet(&flags, "repaired again");

        // Other weights under the same header, all of them still numbers: what was kept of the old ones must not be used.
        let weights = model.join("model.safetensors");
        let mut content = fs::read(&weights).unwrap();
        let header = 8 + u64::from_le_bytes(content[..8].try_into().unwrap()) as usize;
        content[header..].iter_mut().step_by(7).for_each(|byte| *byte &= !1);
        fs::write(&weights, content).unwrap();
        let logits = |more: &[&str]| {
            let model = ["logits", "-m", model.to_str().unwrap(), "--tokens", "5,6,7", "--json"];
            let finished = run(&[&model[..], more].concat());
            serde_json::from_str::<Value>(&finished.stdout).unwrap()["logits"].clone()
        };
        assert_eq!(logits(&flags).to_string(), logits(&flags[..2]).to_string(), "{name}: changed");
    }
}
