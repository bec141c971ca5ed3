//! GGUF files: hostile headers, split files, and the translation of metadata.

mod common;

use common::{Meta, directory, f32_bytes, gguf, llama, refusal, text};
use consort_checkpoint::Checkpoint;
use consort_checkpoint::gguf::{Header, Value};
use serde_json::json;

fn refused(file: &[u8]) -> String {
    match Header::parse(file, "model.gguf") {
        Ok(_) => panic!("the header was read"),
        Err(error) => error.to_string(),
    }
}

fn valid() -> Vec<u8> {
    gguf(&llama(), &[("token_embd.weight", &[64, 3], 0, 0, &f32_bytes(&[0.5; 192]))])
}

#[test]
fn other_files_and_versions_are_refused() {
    assert!(refused(b"GGML\x03\0\0\0").contains("not a GGUF file"));
    assert!(refused(b"GGUF\x01\0\0\0").contains("version 1 is not supported"));
    assert!(refused(b"GGUF\0\0\0\x03").contains("big-endian"));
    assert!(refused(b"<html>").contains("a web page"));
    assert!(refused(b"version https://git-lfs.github.com/spec/v1\nsize 12\n").contains("Git LFS pointer"));
    let mut second = valid();
    second[4] = 2;
    assert!(Header::parse(&second, "model.gguf").is_ok(), "version 2 has the same layout");
}

#[test]
fn every_cut_of_a_file_is_an_error() {
    let whole = valid();
    for cut in 0..whole.len() {
        assert!(Header::parse(&whole[..cut], "model.gguf").is_err(), "cut at {cut}");
    }
    let cut = refused(&whole[..whole.len() - 1]);
    assert!(cut.contains(&format!("{} bytes expected, {} found", whole.len(), whole.len() - 1)), "{cut}");
}

#[test]
fn counts_and_lengths_are_checked_before_use() {
    let huge = u64::MAX.to_le_bytes();
    for (at, what) in [(8, "tensor count"), (16, "metadata count"), (24, "past the end")] {
        let mut file = valid();
        file[at..at + 8].copy_from_slice(&huge);
        let message = refused(&file);
        assert!(message.contains(what), "{message}");
    }
    let array = |item: u32, count: u64, rest: &[u8]| {
        let mut bytes = item.to_le_bytes().to_vec();
        bytes.extend(count.to_le_bytes());
        bytes.extend_from_slice(rest);
        gguf(&[("a", Meta::Raw(9, bytes))], &[])
    };
    assert!(refused(&array(4, 1 << 60, &[])).contains("does not fit"));
    assert!(refused(&array(77, 1, &[0])).contains("unknown type 77"));
    // Arrays of arrays of arrays: each level costs the file 12 bytes.
    let nested = [9u32.to_le_bytes().to_vec(), 1u64.to_le_bytes().to_vec()].concat().repeat(1000);
    assert!(refused(&array(9, 1, &nested)).contains("nested"));
    assert!(refused(&gguf(&[("a", Meta::Raw(7, vec![2]))], &[])).contains("neither true nor false"));
    assert!(refused(&gguf(&[("a", Meta::U32(1)), ("a", Meta::U32(1))], &[])).contains("\"a\" occurs twice"));
    assert!(refused(&gguf(&[("general.alignment", Meta::U32(0))], &[])).contains("not a power of two"));
}

#[test]
fn wrong_tensors_are_refused_by_name() {
    let bytes = f32_bytes(&[0.0; 8]);
    let one = |dimensions: &[u64], kind, offset| refused(&gguf(&[], &[("t", dimensions, kind, offset, &bytes)]));
    assert!(one(&[8], 17, 0).contains("tensor t: GGUF type 17"), "unsupported type");
    assert!(one(&[8], 2, 0).contains("blocks of 32"), "half a block");
    assert!(one(&[1 << 62, 1 << 62], 0, 0).contains("overflows"), "shape");
    assert!(one(&[0, 1 << 62, 1 << 62], 0, 0).contains("overflows"), "shape with a zero");
    assert!(one(&[8], 0, 4).contains("not aligned"), "offset");
    assert!(one(&[8], 0, u64::MAX - 31).contains("overflows"), "offset past 2^64");
    assert!(one(&[], 0, 0).contains("0 dimensions"), "no dimensions");
    assert!(one(&[1, 1, 1, 1, 8], 0, 0).contains("5 dimensions"), "too many");
    assert!(one(&[9], 0, 0).contains("truncated"), "larger than the file");
    let twice = gguf(&[], &[("t", &[8], 0, 0, &bytes), ("t", &[8], 0, 32, &bytes)]);
    assert!(refused(&twice).contains("\"t\" occurs twice"));
    let over = gguf(&[], &[("s", &[8], 0, 0, &bytes), ("t", &[8], 0, 0, &bytes)]);
    assert!(refused(&over).contains("overlaps s"));
    let hole = gguf(&[], &[("s", &[8], 0, 0, &[0; 64]), ("t", &[8], 0, 64, &bytes)]);
    assert!(refused(&hole).contains("32 bytes behind s belong to no tensor"));
}

fn part(number: u32, count: u32, tensors: u32) -> Vec<u8> {
    let name = ["token_embd.weight", "output_norm.weight", "output.weight"][number as usize];
    let mut metadata = if number == 0 { llama() } else { vec![] };
    metadata.extend([
        ("split.no", Meta::U32(number)),
        ("split.count", Meta::U32(count)),
        ("split.tensors.count", Meta::U32(tensors)),
    ]);
    gguf(&metadata, &[(name, &[64, 3], 0, 0, &f32_bytes(&[number as f32; 192]))])
}

#[test]
fn split_files_must_be_complete() {
    let parts: Vec<Vec<u8>> = (0..3).map(|number| part(number, 3, 3)).collect();
    let names: Vec<String> = (1..=3).map(|number| format!("m-{number:05}-of-00003.gguf")).collect();
    let files: Vec<(&str, &[u8])> = names.iter().map(String::as_str).zip(parts.iter().map(Vec::as_slice)).collect();
    let whole = directory(&files);
    // Any part stands for the model, and so does the directory.
    for start in [whole.path().join(&names[0]), whole.path().join(&names[1]), whole.path().to_path_buf()] {
        let checkpoint = Checkpoint::open(&start).unwrap();
        assert_eq!(checkpoint.read_f32("lm_head.weight").unwrap(), [2.0; 192]);
        assert_eq!(checkpoint.config()["hidden_size"], 64);
    }
    let missing = directory(&[files[0], files[2]]);
    let message = refusal(&missing.path().join(&names[0]));
    assert!(message.contains("m-00002-of-00003.gguf: missing"), "{message}");

    let alone = directory(&[("model.gguf", &parts[0])]);
    let message = refusal(&alone.path().join("model.gguf"));
    assert!(message.contains("part 1 of 3"), "{message}");

    let joined = parts.concat();
    let message = refusal(&directory(&[("model.gguf", &joined)]).path().join("model.gguf"));
    assert!(message.contains("must not be joined"), "{message}");

    let cut = directory(&[files[0], files[1], (&names[2], &parts[2][..parts[2].len() - 1])]);
    let message = refusal(&cut.path().join(&names[0]));
    assert!(message.contains("m-00003-of-00003.gguf: truncated"), "{message}");

    let counted = part(0, 3, 5);
    let wrong = directory(&[(&names[0], &counted), files[1], files[2]]);
    let message = refusal(&wrong.path().join(&names[0]));
    assert!(message.contains("split.tensors.count is 5, but the parts hold 3"), "{message}");
    let counted = part(2, 3, 5);
    let wrong = directory(&[files[0], files[1], (&names[2], &counted)]);
    let message = refusal(&wrong.path().join(&names[0]));
    assert!(message.contains("00003-of-00003.gguf: split.tensors.count is 5, but the parts hold 3"), "{message}");

    let swapped = directory(&[(&names[0], &parts[0]), (&names[1], &parts[2]), (&names[2], &parts[1])]);
    let message = refusal(&swapped.path().join(&names[0]));
    assert!(message.contains("says it is part 3 of 3"), "{message}");
}

#[cfg(unix)]
#[test]
fn parts_are_not_looked_for_elsewhere() {
    use std::os::unix::fs::symlink;
    let parts: Vec<Vec<u8>> = (0..2).map(|number| part(number, 2, 2)).collect();
    let names = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"];
    let outside = directory(&[(names[1], &parts[1])]);
    let model = directory(&[(names[0], &parts[0])]);
    symlink(outside.path().join(names[1]), model.path().join(names[1])).unwrap();
    for path in [model.path().join(names[0]), model.path().to_path_buf()] {
        let message = refusal(&path);
        assert!(message.contains("\"m-00002-of-00002.gguf\" leaves the model's directory"), "{message}");
    }

    let repository = directory(&[]);
    let (snapshot, blobs) = (repository.path().join("snapshots/abc"), repository.path().join("blobs"));
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::create_dir_all(&blobs).unwrap();
    for (name, bytes) in names.iter().zip(&parts) {
        std::fs::write(blobs.join(name), bytes).unwrap();
        symlink(format!("../../blobs/{name}"), snapshot.join(name)).unwrap();
    }
    assert_eq!(Checkpoint::open(&snapshot.join(names[0])).unwrap().tensors().len(), 2);
    // One file is what the user names, wherever it lies.
    let linked = directory(&[]);
    let alone = directory(&[("m.gguf", &valid())]);
    symlink(alone.path().join("m.gguf"), linked.path().join("m.gguf")).unwrap();
    assert!(Checkpoint::open(&linked.path().join("m.gguf")).is_ok());
}

fn translated(more: &[(&'static str, Meta)], tensors: &[common::Tensor<'_>]) -> Result<serde_json::Value, String> {
    let mut metadata = llama();
    metadata.retain(|(key, _)| more.iter().all(|(other, _)| other != key));
    metadata.extend(more.iter().cloned());
    let file = gguf(&metadata, tensors);
    let directory = directory(&[("model.gguf", &file)]);
    let path = directory.path().join("model.gguf");
    Checkpoint::open(&path).map(|checkpoint| checkpoint.config().clone()).map_err(|error| error.to_string())
}

#[test]
fn metadata_becomes_a_configuration() {
    let config = translated(
        &[
            ("llama.rope.freq_base", Meta::F32(100000.0)),
            ("llama.attention.head_count_kv", Meta::U32(2)),
            ("llama.rope.dimension_count", Meta::U32(16)),
            ("tokenizer.ggml.bos_token_id", Meta::U32(1)),
            ("tokenizer.ggml.eos_token_id", Meta::U32(2)),
            ("tokenizer.ggml.eot_token_id", Meta::U32(0)),
        ],
        &[],
    )
    .unwrap();
    let expected = json!({
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
        "vocab_size": 3, "tie_word_embeddings": true, "bos_token_id": 1, "eos_token_id": [2, 0],
        "rope_theta": 100000.0, "consort_rope_pairs": "interleaved",
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    });
    for (key, value) in expected.as_object().unwrap() {
        assert_eq!(&config[key], value, "{key}");
    }
}

fn opened(metadata: &[(&str, Meta)], names: &[&str]) -> Result<Vec<String>, String> {
    let values = f32_bytes(&[0.5; 64]);
    let tensors: Vec<common::Tensor<'_>> =
        (0..).zip(names).map(|(at, &name)| (name, &[64][..], 0, 256 * at, &values[..])).collect();
    let model = directory(&[("model.gguf", &gguf(metadata, &tensors))]);
    let checkpoint = Checkpoint::open(&model.path().join("model.gguf")).map_err(|error| error.to_string())?;
    Ok(checkpoint.skipped().to_vec())
}

#[test]
fn tensors_that_no_converter_writes_are_refused_by_name() {
    // Without its output projection a model would pass for one whose embedding is tied.
    for name in ["ouptut.weight", "output.weights.weight", "token_embed.weight", "rope_factors_long.weight", "x"] {
        let message = opened(&llama(), &["token_embd.weight", name]).unwrap_err();
        let expected = format!("model.gguf: tensor {name}: has a name that no converter gives");
        assert!(message.contains(&expected), "{message}");
    }
    let beside = ["v.blk.0.attn_q.weight", "mm.0.weight", "a.conv1d.0.weight", "blk.0.ffn_up.input_scale"];
    assert_eq!(opened(&llama(), &beside).unwrap(), beside);
    let used = ["token_embd.weight", "output.weight", "output_norm.weight", "rope_freqs.weight", "blk.0.attn_q.weight"];
    assert_eq!(opened(&llama(), &used).unwrap(), [""; 0]);
}

#[test]
fn two_tensors_for_one_weight_are_refused() {
    let metadata: Vec<(&str, Meta)> = vec![
        ("general.architecture", Meta::Text("gpt-oss")),
        ("gpt-oss.block_count", Meta::U32(1)),
        ("gpt-oss.embedding_length", Meta::U32(64)),
        ("gpt-oss.context_length", Meta::U32(128)),
        ("gpt-oss.attention.head_count", Meta::U32(4)),
        ("gpt-oss.attention.sliding_window", Meta::U32(8)),
        ("gpt-oss.attention.layer_norm_rms_epsilon", Meta::F32(1e-5)),
        ("gpt-oss.expert_count", Meta::U32(4)),
        ("gpt-oss.expert_feed_forward_length", Meta::U32(64)),
        ("gpt-oss.vocab_size", Meta::U32(3)),
    ];
    let [older, newer] = ["blk.0.ffn_norm.weight", "blk.0.post_attention_norm.weight"];
    assert!(opened(&metadata, &[older]).is_ok() && opened(&metadata, &[newer]).is_ok());
    let message = opened(&metadata, &[older, newer]).unwrap_err();
    assert!(message.contains(&format!("tensor {newer}: is here twice: {older} stands for")), "{message}");
}

#[test]
fn rope_factors_and_yarn_are_translated() {
    let factors = f32_bytes(&[1.0, 1.0, 2.5, 32.0]);
    let config = translated(&[], &[("rope_freqs.weight", &[4], 0, 0, &factors)]).unwrap();
    assert_eq!(config["rope_parameters"]["rope_type"], "factors");
    assert_eq!(config["rope_parameters"]["factors"], json!([1.0, 1.0, 2.5, 32.0]));

    let yarn = |multiplier: Option<f32>| {
        let mut more = vec![
            ("llama.rope.scaling.type", Meta::Text("yarn")),
            ("llama.rope.scaling.factor", Meta::F32(64.0)),
            ("llama.rope.scaling.original_context_length", Meta::U32(4096)),
            ("llama.rope.scaling.yarn_beta_fast", Meta::F32(4.0)),
        ];
        more.extend(multiplier.map(|value| ("llama.rope.scaling.yarn_log_multiplier", Meta::F32(value))));
        translated(&more, &[]).unwrap()["rope_parameters"].clone()
    };
    for multiplier in [None, Some(0.0)] {
        let rope = yarn(multiplier);
        assert!((rope["attention_factor"].as_f64().unwrap() - 1.415_888_3).abs() < 1e-7, "{rope}");
        assert_eq!((&rope["beta_fast"], &rope["factor"]), (&json!(4.0), &json!(64.0)));
    }
    assert_eq!(yarn(Some(1.0))["attention_factor"], 1.0);
    // A factor alone is linear, by its new or its old name.
    for key in ["llama.rope.scaling.factor", "llama.rope.scale_linear"] {
        let rope = translated(&[(key, Meta::F32(8.0))], &[]).unwrap()["rope_parameters"].clone();
        assert_eq!((&rope["rope_type"], &rope["factor"]), (&json!("linear"), &json!(8.0)), "{key}");
        let rope = translated(&[(key, Meta::F32(1.0))], &[]).unwrap()["rope_parameters"].clone();
        assert_eq!(rope["rope_type"], "default", "{key}");
        let off = [(key, Meta::F32(8.0)), ("llama.rope.scaling.type", Meta::Text("none"))];
        assert_eq!(translated(&off, &[]).unwrap()["rope_parameters"]["rope_type"], "default");
    }
    for kind in ["linear", "yarn", "spiral"] {
        let both = [("llama.rope.scaling.type", Meta::Text(kind)), ("llama.rope.scaling.factor", Meta::F32(8.0))];
        let refused = translated(&both, &[("rope_freqs.weight", &[4], 0, 0, &factors)]).unwrap_err();
        assert!(refused.contains(&format!("\"{kind}\" beside rope_freqs.weight is not supported")), "{refused}");
    }
    let unknown = translated(&[("llama.rope.scaling.type", Meta::Text("spiral"))], &[]).unwrap_err();
    assert!(unknown.contains("llama.rope.scaling.type: \"spiral\" is not supported"), "{unknown}");
}

/// Converters write such lists as truth values or as numbers.
#[test]
fn a_flag_for_each_layer_is_read() {
    const PATTERN: &str = "gemma3.attention.sliding_window_pattern";
    let gemma = |layers: u32, flags: Meta| {
        let mut metadata: Vec<(&str, Meta)> = llama();
        for (key, value) in &mut metadata {
            *key = match *key {
                "general.architecture" => {
                    *value = Meta::Text("gemma3");
                    continue;
                }
                "llama.block_count" => {
                    *value = Meta::U32(layers);
                    "gemma3.block_count"
                }
                other => other.replace("llama.", "gemma3.").leak(),
            };
        }
        metadata.extend([("gemma3.attention.sliding_window", Meta::U32(8)), (PATTERN, flags)]);
        let directory = directory(&[("model.gguf", &gguf(&metadata, &[]))]);
        let opened = Checkpoint::open(&directory.path().join("model.gguf"));
        opened.map(|checkpoint| checkpoint.config()["layer_types"].clone()).map_err(|error| error.to_string())
    };
    let list = |kind: u32, items: &[u8], count: u64| {
        Meta::Raw(9, [&kind.to_le_bytes()[..], &count.to_le_bytes(), items].concat())
    };
    let expected = json!(["sliding_attention", "full_attention", "sliding_attention"]);
    assert_eq!(gemma(3, list(7, &[1, 0, 1], 3)).unwrap(), expected);
    assert_eq!(gemma(3, list(0, &[1, 0, 1], 3)).unwrap(), expected);
    let refused = gemma(3, list(0, &[1, 0, 2], 3)).unwrap_err();
    assert!(
        refused.contains(&format!("{PATTERN}: ")) && refused.ends_with("is not a list of truth values"),
        "{refused}"
    );
    assert!(gemma(2, list(7, &[1, 0, 1], 3)).unwrap_err().contains("3 flags for 2 layers"));
}

#[test]
fn unknown_architectures_and_missing_keys_are_named() {
    let unknown = translated(&[("general.architecture", Meta::Text("parrot"))], &[]).unwrap_err();
    assert!(unknown.contains("\"parrot\" is not supported") && unknown.contains("qwen3moe"), "{unknown}");
    let file = gguf(&llama()[..3], &[]);
    let directory = directory(&[("model.gguf", &file)]);
    let message = refusal(&directory.path().join("model.gguf"));
    assert!(message.contains("llama.attention.head_count: is missing"), "{message}");
}

#[test]
fn values_that_cannot_be_meant_are_refused_by_key() {
    let list = |values: &[u32]| {
        let count = (values.len() as u64).to_le_bytes();
        let items: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Meta::Raw(9, [&4u32.to_le_bytes()[..], &count, &items].concat())
    };
    let cases = [
        ("llama.rope.freq_base", Meta::F32(f32::NAN), "llama.rope.freq_base: NaN is not a finite number"),
        ("llama.rope.freq_base", Meta::F32(f32::INFINITY), "llama.rope.freq_base: inf is not a finite number"),
        ("llama.rope.freq_base", Meta::Text("10000"), "llama.rope.freq_base: \"10000\" is not a finite number"),
        ("llama.rope.scaling.type", Meta::U32(1), "llama.rope.scaling.type: 1 is not a text"),
        ("llama.rope.scaling.factor", Meta::F32(f32::NAN), "llama.rope.scaling.factor: NaN is not a finite number"),
        ("llama.attention.head_count_kv", Meta::F32(2.0), "llama.attention.head_count_kv: 2 is not a whole number"),
        (
            "llama.attention.head_count_kv",
            list(&[1, 1]),
            "llama.attention.head_count_kv: is a list of 2, not one for each of 1 layers",
        ),
        ("llama.block_count", list(&[1]), "llama.block_count: is a list of 1, not one number"),
        ("llama.attention.causal", Meta::Raw(7, vec![0]), "llama.attention.causal: false is not supported"),
        ("llama.expert_gating_func", Meta::U32(2), "llama.expert_gating_func: 2 is not supported"),
        ("llama.expert_weights_scale", Meta::F32(2.5), "llama.expert_weights_scale: 2.5 is not supported"),
        ("llama.expert_group_count", Meta::U32(2), "llama.expert_group_count: 2 is not supported"),
        ("general.type", Meta::Text("adapter"), "general.type: is \"adapter\"; a model is needed"),
        ("general.quantization_version", Meta::U32(3), "general.quantization_version: is 3; versions up to 2 are read"),
        ("llama.attention.value_length", Meta::U32(8), "llama.attention.value_length: 8 features of a value beside 16"),
        ("llama.rope.dimension_count", Meta::U32(5), "llama.rope.dimension_count: 5 is no even number from 2 to 16"),
        ("llama.rope.dimension_count", Meta::U32(0), "llama.rope.dimension_count: 0 is no even number from 2 to 16"),
        ("llama.rope.dimension_count", Meta::U32(18), "llama.rope.dimension_count: 18 is no even number from 2 to 16"),
        ("llama.attention.key_length", Meta::Text("16"), "llama.attention.key_length: \"16\" is not a whole number"),
        (
            "tokenizer.ggml.eos_token_id",
            Meta::U32(3),
            "tokenizer.ggml.eos_token_id: 3 is no token of the vocabulary of 3",
        ),
        ("tokenizer.ggml.eot_token_id", Meta::Text("2"), "tokenizer.ggml.eot_token_id: \"2\" is no token"),
        ("tokenizer.ggml.bos_token_id", Meta::F32(1.0), "tokenizer.ggml.bos_token_id: 1 is no token"),
        (
            "llama.rope.scaling.yarn_ext_factor",
            Meta::F32(0.5),
            "llama.rope.scaling.yarn_ext_factor: 0.5 is not supported",
        ),
    ];
    for (key, value, expected) in cases {
        let message = translated(&[(key, value)], &[]).expect_err(expected);
        assert!(message.contains(expected), "{message}");
    }
    let epsilon = "llama.attention.layer_norm_rms_epsilon";
    let metadata: Vec<_> = llama()
        .into_iter()
        .map(|(key, value)| (key, if key == epsilon { Meta::F32(f32::NAN) } else { value }))
        .collect();
    let file = directory(&[("model.gguf", &gguf(&metadata, &[]))]);
    let message = refusal(&file.path().join("model.gguf"));
    assert!(
        message.contains("model.gguf: llama.attention.layer_norm_rms_epsilon: NaN is not a finite number"),
        "{message}"
    );
    let nameless = directory(&[("model.gguf", &gguf(&llama()[1..], &[]))]);
    assert!(refusal(&nameless.path().join("model.gguf")).contains("general.architecture: is missing"));
}

#[test]
fn arrays_and_texts_are_kept() {
    let mut strings = 8u32.to_le_bytes().to_vec();
    strings.extend(2u64.to_le_bytes());
    strings.extend([text("a"), text("é")].concat());
    let header = Header::parse(&gguf(&[("tokens", Meta::Raw(9, strings))], &[]), "model.gguf").unwrap();
    let tokens = header.metadata["tokens"].as_array().unwrap();
    assert_eq!(tokens.iter().filter_map(Value::as_str).collect::<Vec<_>>(), ["a", "é"]);
}
