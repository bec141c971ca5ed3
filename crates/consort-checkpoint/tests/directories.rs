//! Hugging Face directories: which files are opened, which are refused, and what a damaged or contradictory one says.
#![allow(clippy::single_range_in_vec_init)] // selections are lists of ranges, and often of one

mod common;

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex};

use common::{directory, f32_bytes, model, refusal, safetensors_of};
use consort_checkpoint::chat::ChatTemplate;
use consort_checkpoint::source::{MemoryFiles, Source, SourceFile};
use consort_checkpoint::tokenizer::Tokenizer;
use consort_checkpoint::{Checkpoint, CheckpointError};

const Q: &str = "model.layers.0.self_attn.q_proj";

fn shard(name: &str, value: f32) -> Vec<u8> {
    safetensors_of(&[(name, "F32", &[2, 2], &f32_bytes(&[value; 4]))])
}

fn index(entries: &str) -> String {
    format!(r#"{{"metadata": {{"total_size": 32}}, "weight_map": {{{entries}}}}}"#)
}

const CONFIG: (&str, &[u8]) =
    ("config.json", br#"{"model_type": "llama", "auto_map": {"AutoModel": "x.Y"}, "model_file": "x.py"}"#);

#[test]
fn shards_with_an_index_load() {
    let (a, b) = (shard("a", 1.0), shard("b", 2.0));
    let both = index(r#""a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors""#);
    let whole = directory(&[
        CONFIG,
        ("model.safetensors.index.json", both.as_bytes()),
        ("model-00001-of-00002.safetensors", &a),
        ("model-00002-of-00002.safetensors", &b),
        ("model-00002-of-00002.safetensors.incomplete", b"half"),
        ("x.py", b"raise SystemExit"),
    ]);
    let checkpoint = Checkpoint::open(whole.path()).unwrap();
    assert_eq!(checkpoint.read_f32("b").unwrap(), [2.0; 4]);
    std::fs::remove_file(whole.path().join("model-00002-of-00002.safetensors")).unwrap();
    let message = refusal(whole.path());
    assert!(message.contains("model-00002-of-00002.safetensors: missing"), "{message}");
    // The numbers in the names tell as much when there is no index.
    std::fs::remove_file(whole.path().join("model.safetensors.index.json")).unwrap();
    let message = refusal(whole.path());
    assert!(message.contains("only 1 of the shards"), "{message}");
}

#[test]
fn an_index_cannot_lead_elsewhere() {
    let outside = directory(&[("secret.safetensors", &shard("a", 1.0))]);
    let absolute = outside.path().join("secret.safetensors").display().to_string();
    for name in ["../secret.safetensors", &absolute, "./../x", "a/../../x", "..\\\\x"] {
        let entries = index(&format!(r#""a": "{name}""#));
        let model = directory(&[CONFIG, ("model.safetensors.index.json", entries.as_bytes())]);
        let message = refusal(model.path());
        assert!(message.contains("leaves the model's directory"), "{name}: {message}");
    }
    for (name, expected) in [
        ("sub/x.safetensors", "\"sub/x.safetensors\" lies in a directory of its own; put the shard beside the index"),
        ("", "\"\" is not the name of a file"),
    ] {
        let entries = index(&format!(r#""a": "{name}""#));
        let model = directory(&[CONFIG, ("model.safetensors.index.json", entries.as_bytes())]);
        let message = refusal(model.path());
        assert!(message.contains(expected), "{message}");
    }
    let lying = index(r#""a": "model.safetensors", "absent": "model.safetensors""#);
    let weights = shard("a", 1.0);
    let model =
        directory(&[CONFIG, ("model.safetensors.index.json", lying.as_bytes()), ("model.safetensors", &weights)]);
    let message = refusal(model.path());
    assert!(message.contains("tensor absent: is not here"), "{message}");
}

#[test]
fn an_index_and_its_shards_list_the_same_tensors() {
    let weights =
        safetensors_of(&[("a", "F32", &[2, 2], &f32_bytes(&[1.0; 4])), ("b", "F32", &[2, 2], &f32_bytes(&[2.0; 4]))]);
    let open = |index: &str| {
        let files = [CONFIG, ("model.safetensors.index.json", index.as_bytes()), ("model.safetensors", &weights)];
        let model = directory(&files);
        Checkpoint::open(model.path()).map(|checkpoint| checkpoint.tensors().len()).map_err(|error| error.to_string())
    };
    let both = r#""a": "./model.safetensors", "b": "model.safetensors""#;
    assert_eq!(open(&index(both)).unwrap(), 2);
    // Published files are often wrong about their size, and nothing is read by it.
    assert_eq!(open(&format!(r#"{{"metadata": {{"total_size": 1}}, "weight_map": {{{both}}}}}"#)).unwrap(), 2);
    let long = "x".repeat(1 << 20);
    for (index, expected) in [
        (index(r#""a": "model.safetensors""#), "tensor b: is here, but model.safetensors.index.json does not list it"),
        (index(r#""a": "model.safetensors", "a": "model.safetensors""#), "key weight_map.a: occurs twice"),
        (index(r#""a": 1"#), "index.json: weight_map.a: is 1, not the name of a file"),
        ("[]".to_string(), "index.json: is [], not a JSON object"),
        ("{}".to_string(), "index.json: weight_map: is missing"),
        (r#"{"weight_map": []}"#.to_string(), "index.json: weight_map: is [], not an object"),
        (index(&format!(r#""a": "{long}""#)), "… (1048"),
        (index(&format!(r#""a": "../{long}""#)), "… (1048579 bytes)\" leaves the model's directory"),
        (
            index(&format!(r#""a": "model.safetensors", "b": "model.safetensors", "{long}": "model.safetensors""#)),
            "… (1048576 bytes): is not here",
        ),
    ] {
        let message = open(&index).unwrap_err();
        assert!(message.contains(expected) && message.len() < 1000, "{message}");
    }
}

#[test]
fn what_lies_in_place_of_a_file_is_named() {
    let weights = shard("a", 1.0);
    let model = directory(&[("model.safetensors", &weights)]);
    std::fs::create_dir(model.path().join("config.json")).unwrap();
    let message = refusal(model.path());
    assert!(message.ends_with("config.json: a directory in place of the file; put the file itself there"), "{message}");
    let model = directory(&[CONFIG]);
    std::fs::create_dir(model.path().join("model.safetensors")).unwrap();
    let message = refusal(model.path());
    assert!(message.contains("model.safetensors: a directory in place of the file"), "{message}");
    #[cfg(unix)]
    {
        let model = directory(&[CONFIG]);
        let pipe = model.path().join("model.safetensors");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let message = refusal(model.path());
        assert!(message.contains("model.safetensors: a pipe or a device in place of the file"), "{message}");
    }
    // A byte order mark says nothing, and does no harm.
    let model =
        directory(&[("config.json", b"\xef\xbb\xbf{\"model_type\": \"llama\"}"), ("model.safetensors", &weights)]);
    assert!(Checkpoint::open(model.path()).is_ok());
    for (name, content, expected) in [
        ("config.json", "[]", "config.json: is [], not a JSON object"),
        ("generation_config.json", "[]", "generation_config.json: is [], not a JSON object"),
        (
            "config.json",
            r#"{"model_type": "llama", "model_type": "llama"}"#,
            "config.json: key model_type: occurs twice",
        ),
        ("generation_config.json", r#"{"eos_token_id": 1, "eos_token_id": 2}"#, "key eos_token_id: occurs twice"),
        (
            "config.json",
            r#"{"model_type": "llama", "tie_word_embeddings": "false"}"#,
            "tie_word_embeddings: is \"false\", neither",
        ),
    ] {
        let model = directory(&[CONFIG, ("model.safetensors", &weights)]);
        std::fs::write(model.path().join(name), content).unwrap();
        let message = refusal(model.path());
        assert!(message.contains(expected), "{message}");
    }
}

/// A tokenizer's vocabulary that names a token twice, companions that are no objects, end tokens that are none.
#[test]
fn companions_of_a_tokenizer_are_read_as_strictly() {
    let whole = std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/tokenizer/bytes")).unwrap();
    let refused = |name: &str, content: &str| {
        let model = directory(&[("tokenizer.json", &whole)]);
        std::fs::write(model.path().join(name), content).unwrap();
        let message = Tokenizer::from_directory(model.path()).err().expect(content).to_string();
        assert!(message.contains(&format!("{name}: ")), "{message}");
        message
    };
    assert!(Tokenizer::from_directory(directory(&[("tokenizer.json", &whole)]).path()).is_ok());
    let twice = r#"{"model": {"type": "BPE", "vocab": {"a": 0, "a": 1}, "merges": []}}"#;
    assert!(refused("tokenizer.json", twice).contains("key model.vocab.a: occurs twice"));
    for name in ["tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json"] {
        assert!(refused(name, "[]").contains("is [], not a JSON object"));
        assert!(refused(name, r#"{"a": {"b": 1, "b": 2}}"#).contains("key a.b: occurs twice"));
    }
    for end in [r#""68""#, r#"["68"]"#, "68.5", "[[68]]", r#"{"a": 1}"#, "-1"] {
        for name in ["config.json", "generation_config.json"] {
            let message = refused(name, &format!(r#"{{"eos_token_id": {end}}}"#));
            assert!(message.contains("eos_token_id: ") && message.contains("is no token id"), "{message}");
        }
    }
    let model = directory(&[("tokenizer_config.json", b"[]")]);
    let message = ChatTemplate::from_directory(model.path()).err().unwrap().to_string();
    assert!(message.contains("tokenizer_config.json: is [], not a JSON object"), "{message}");
}

#[test]
fn tensors_of_types_that_are_no_format_are_refused() {
    for dtype in ["I16", "F64", "I64", "U8", "F8_E5M2"] {
        let bytes = [0; 64];
        let size = if dtype == "I16" {
            2
        } else if dtype.ends_with("64") {
            8
        } else {
            1
        };
        for parameter in ["weight", "bias"] {
            let name = format!("{Q}.{parameter}");
            let model = model("", &safetensors_of(&[(&name, dtype, &[2, 2], &bytes[..4 * size])]));
            let message = refusal(model.path());
            assert!(message.contains(&format!("model.safetensors: tensor {name}: ")), "{message}");
            assert!(message.contains(&format!("is {dtype}; F32, F16 and BF16 are read without scales")), "{message}");
        }
    }
    // Buffers may have any type.
    let position = safetensors_of(&[("model.position_ids", "I64", &[1], &[0; 8]), ("a", "F32", &[1], &[0; 4])]);
    assert_eq!(Checkpoint::open(model("", &position).path()).unwrap().skipped(), ["model.position_ids"]);
}

#[cfg(unix)]
#[test]
fn symbolic_links_stay_inside_or_inside_the_cache() {
    use std::os::unix::fs::symlink;
    let outside = directory(&[("secret.safetensors", &shard("a", 1.0))]);
    let model = directory(&[CONFIG]);
    symlink(outside.path().join("secret.safetensors"), model.path().join("model.safetensors")).unwrap();
    let message = refusal(model.path());
    assert!(message.contains("\"model.safetensors\" leaves the model's directory"), "{message}");

    let repository = tempfile::tempdir().unwrap();
    let (snapshot, blobs) = (repository.path().join("snapshots/abc"), repository.path().join("blobs"));
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::create_dir_all(&blobs).unwrap();
    std::fs::write(blobs.join("1"), CONFIG.1).unwrap();
    std::fs::write(blobs.join("2"), shard("a", 3.0)).unwrap();
    symlink("../../blobs/1", snapshot.join("config.json")).unwrap();
    symlink("../../blobs/2", snapshot.join("model.safetensors")).unwrap();
    assert_eq!(Checkpoint::open(&snapshot).unwrap().read_f32("a").unwrap(), [3.0; 4]);
}

#[test]
fn what_is_missing_is_named() {
    let message = refusal(directory(&[("model.safetensors", &shard("a", 1.0))]).path());
    assert!(message.contains("config.json: missing"), "{message}");
    let message = refusal(directory(&[CONFIG]).path());
    assert!(message.contains("model.safetensors: missing"), "{message}");
    let message = refusal(directory(&[CONFIG, ("pytorch_model.bin", b"\x80\x02")]).path());
    assert!(
        message.contains("pytorch_model.bin: pickled weights, which are never opened because they run code"),
        "{message}"
    );
    assert!(message.contains("take a safetensors version of the model, or make one"), "{message}");
    let message = refusal(directory(&[CONFIG, ("model.safetensors.index.json", b"<html></html>")]).path());
    assert!(message.contains("a web page"), "{message}");
    assert!(refusal(Path::new("/nonexistent/model")).contains("/nonexistent/model"));
}

/// A file of three gigabytes that takes no room on the disk.
fn huge(path: &Path) {
    std::fs::File::create(path).unwrap().set_len(3 << 30).unwrap();
}

#[test]
fn small_files_have_limits() {
    let weights = shard("a", 1.0);
    let files: [(&str, &[u8]); 2] = [CONFIG, ("model.safetensors", &weights)];
    for name in ["config.json", "generation_config.json", "hf_quant_config.json", "model.safetensors.index.json"] {
        let model = directory(&files);
        huge(&model.path().join(name));
        let message = refusal(model.path());
        assert!(message.contains(&format!("{name}: 3221225472 bytes, but such a file has")), "{message}");
        assert!(message.ends_with("download it again"), "{message}");
    }
    let model = directory(&files);
    huge(&model.path().join("tokenizer.json"));
    let message = Tokenizer::from_directory(model.path()).err().unwrap().to_string();
    assert!(message.contains("tokenizer.json: 3221225472 bytes"), "{message}");
    for name in ["tokenizer_config.json", "chat_template.json", "chat_template.jinja"] {
        huge(&model.path().join(name));
        let message = ChatTemplate::from_directory(model.path()).err().unwrap().to_string();
        assert!(message.contains(&format!("{name}: 3221225472 bytes")), "{message}");
    }
}

#[test]
fn what_download_tools_leave_behind_is_named() {
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 33384568\n";
    let weights = shard("a", 1.0);
    for name in ["config.json", "model.safetensors"] {
        for (content, expected) in [
            (&pointer[..], "a Git LFS pointer to a file of 33384568 bytes in place of the file; run `git lfs pull`"),
            (b"\n<!DOCTYPE html><html>Sign in</html>", "a web page in place of the file; download the file again"),
        ] {
            let model = directory(&[CONFIG, ("model.safetensors", &weights)]);
            std::fs::write(model.path().join(name), content).unwrap();
            let message = refusal(model.path());
            assert!(message.contains(&format!("{name}: {expected}")), "{message}");
        }
    }
    let model = directory(&[("tokenizer.json", pointer)]);
    let message = Tokenizer::from_directory(model.path()).err().unwrap().to_string();
    assert!(message.contains("tokenizer.json: a Git LFS pointer"), "{message}");
}

#[test]
fn nothing_is_said_twice() {
    let error = Checkpoint::open(Path::new("/nowhere/model.gguf")).err().unwrap();
    assert_eq!(error.to_string().matches("os error").count(), 1);
    assert!(std::error::Error::source(&error).is_none(), "a reader of the chain would see the cause again");
}

/// Files that write down which of them were read.
struct Watched {
    files: MemoryFiles,
    read: Arc<Mutex<BTreeSet<String>>>,
}

impl Source for Watched {
    fn name(&self) -> String {
        self.files.name()
    }

    fn display(&self, file: usize) -> String {
        self.files.display(file)
    }

    fn files(&self) -> &[SourceFile] {
        self.files.files()
    }

    fn read(&self, file: usize, ranges: &[Range<u64>]) -> Result<Cow<'_, [u8]>, CheckpointError> {
        self.read.lock().unwrap().insert(self.files.files()[file].name.clone());
        self.files.read(file, ranges)
    }
}

#[test]
fn code_and_pickles_are_never_touched() {
    let config = br#"{"model_type": "llama", "model_file": "model.py", "auto_map": {"AutoModel": "modeling.M"}}"#;
    let files = [
        ("config.json", config.to_vec()),
        ("model.safetensors", shard("a", 1.0)),
        ("model.py", b"import os".to_vec()),
        ("modeling.py", b"import os".to_vec()),
        ("pytorch_model.bin", b"\x80\x02}q\x00.".to_vec()),
        ("consolidated.00.pth", b"\x80\x02}q\x00.".to_vec()),
        ("training_args.pt", b"\x80\x02}q\x00.".to_vec()),
    ];
    let files = MemoryFiles::new(files.map(|(name, bytes)| (name.to_string(), bytes)));
    let read = Arc::default();
    let checkpoint = Checkpoint::open_directory(Box::new(Watched { files, read: Arc::clone(&read) })).unwrap();
    assert_eq!(checkpoint.read_f32("a").unwrap(), [1.0; 4]);
    checkpoint.verified_manifest(&mut |_, _| {}).unwrap();
    let read: Vec<String> = read.lock().unwrap().iter().cloned().collect();
    assert_eq!(read, ["config.json", "model.safetensors"]);
}

#[test]
fn towers_are_skipped_and_wrappers_opened() {
    let values = f32_bytes(&[1.0; 4]);
    let weights = safetensors_of(&[
        ("model.language_model.layers.0.mlp.up_proj.weight", "F32", &[2, 2], &values),
        ("model.visual.blocks.0.attn.qkv.weight", "F32", &[2, 2], &values),
    ]);
    let config = br#"{"model_type": "outer", "text_config": {"model_type": "llama", "hidden_size": 2}}"#;
    let model = directory(&[("config.json", config), ("model.safetensors", &weights)]);
    let checkpoint = Checkpoint::open(model.path()).unwrap();
    assert!(checkpoint.tensor("model.layers.0.mlp.up_proj.weight").is_some());
    assert_eq!(checkpoint.skipped(), ["model.visual.blocks.0.attn.qkv.weight"]);
    assert_eq!(checkpoint.config()["hidden_size"], 2);
}

/// What Mistral calls the tensors of a llama.
fn in_mistral_words(name: &str) -> String {
    let words = [
        ("model.embed_tokens", "tok_embeddings"),
        ("model.norm", "norm"),
        ("model.layers", "layers"),
        ("input_layernorm", "attention_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("mlp.gate_proj", "feed_forward.w1"),
        ("mlp.down_proj", "feed_forward.w2"),
        ("mlp.up_proj", "feed_forward.w3"),
        ("self_attn.o_proj", "attention.wo"),
        ("self_attn.q_proj", "attention.wq"),
        ("self_attn.k_proj", "attention.wk"),
        ("self_attn.v_proj", "attention.wv"),
        ("lm_head", "output"),
    ];
    words.iter().fold(name.to_owned(), |name, (ours, theirs)| name.replacen(ours, theirs, 1))
}

#[test]
fn the_form_of_mistral_is_a_model_too() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../oracle/fixtures/llama-yarn");
    let original = Checkpoint::open(&fixture).unwrap();
    let tensors: Vec<_> = original.tensors().to_vec();
    let names: Vec<String> = tensors.iter().map(|info| in_mistral_words(&info.name)).collect();
    let values: Vec<Vec<u8>> = tensors.iter().map(|info| f32_bytes(&original.read_f32(&info.name).unwrap())).collect();
    let entries: Vec<_> = (0..tensors.len())
        .map(|at| (names[at].as_str(), "F32", tensors[at].shape.as_slice(), values[at].as_slice()))
        .chain([("vision_encoder.ln_pre.weight", "F32", &[1usize][..], &[0u8; 4][..])])
        .collect();
    let params = br#"{"dim": 48, "n_layers": 3, "head_dim": 8, "hidden_dim": 96, "n_heads": 6, "n_kv_heads": 3, "norm_eps": 1e-6,
        "vocab_size": 256, "rope_theta": 100.0, "tied_embeddings": true, "max_position_embeddings": 512,
        "yarn": {"factor": 4, "original_max_position_embeddings": 16, "beta": 32, "alpha": 1, "apply_scale": true}}"#;
    let weights = safetensors_of(&entries);
    let model = directory(&[("params.json", params), ("consolidated.safetensors", &weights)]);
    let checkpoint = Checkpoint::open(model.path()).unwrap();
    for info in &tensors {
        assert_eq!(checkpoint.tensor(&info.name).unwrap().shape, info.shape, "{}", info.name);
        assert_eq!(checkpoint.read_f32(&info.name).unwrap(), original.read_f32(&info.name).unwrap(), "{}", info.name);
    }
    assert_eq!(checkpoint.skipped(), ["vision_encoder.ln_pre.weight"]);
    for key in [
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
        "tie_word_embeddings",
        "rms_norm_eps",
    ] {
        assert_eq!(checkpoint.config()[key], original.config()[key], "{key}");
    }
    assert_eq!(checkpoint.config()["consort_rope_pairs"], "interleaved");

    // Beside the Hugging Face form it is not looked at; without weights it names what it lacks.
    std::fs::copy(fixture.join("config.json"), model.path().join("config.json")).unwrap();
    std::fs::copy(fixture.join("model.safetensors"), model.path().join("model.safetensors")).unwrap();
    assert_eq!(Checkpoint::open(model.path()).unwrap().config()["model_type"], "llama");
    let message = refusal(directory(&[("params.json", params)]).path());
    assert!(message.contains("consolidated.safetensors: missing; params.json asks for it"), "{message}");
}

#[test]
fn tied_embeddings_follow_the_configuration_and_the_files() {
    let values = f32_bytes(&[1.0; 4]);
    let embedding = ("model.embed_tokens.weight", "F32", &[2usize, 2][..], &values[..]);
    let head = ("lm_head.weight", "F32", &[2usize, 2][..], &values[..]);
    let open = |config: &str, tensors: &[_]| {
        let model = model(config, &safetensors_of(tensors));
        Checkpoint::open(model.path()).map(|checkpoint| {
            (
                checkpoint.tensor("lm_head.weight").is_some(),
                checkpoint.config()["tie_word_embeddings"].as_bool().unwrap(),
            )
        })
    };
    let (tied, untied) = (r#""tie_word_embeddings": true"#, r#""tie_word_embeddings": false"#);
    assert_eq!(open(tied, &[embedding, head]).unwrap(), (false, true));
    assert_eq!(open(tied, &[embedding]).unwrap(), (false, true));
    assert_eq!(open(untied, &[embedding, head]).unwrap(), (true, false));
    assert_eq!(open("", &[embedding]).unwrap(), (false, true));
    assert_eq!(open("", &[embedding, head]).unwrap(), (true, false));
    let error = open(untied, &[embedding]).unwrap_err().to_string();
    assert!(error.contains("tie_word_embeddings: is false, but there is no lm_head.weight"), "{error}");
}

/// Opens a module of these tensors under this quantization block.
fn scheme(quantization: &str, tensors: &[(&str, &str, &[usize], &[u8])]) -> Result<Vec<f32>, String> {
    let named: Vec<(String, &str, &[usize], &[u8])> =
        tensors.iter().map(|&(name, dtype, shape, data)| (format!("{Q}.{name}"), dtype, shape, data)).collect();
    let named: Vec<_> = named.iter().map(|(name, dtype, shape, data)| (name.as_str(), *dtype, *shape, *data)).collect();
    let config =
        if quantization.is_empty() { String::new() } else { format!(r#""quantization_config": {quantization}"#) };
    let model = model(&config, &safetensors_of(&named));
    let read = |checkpoint: Checkpoint| checkpoint.read_f32(&format!("{Q}.weight"));
    Checkpoint::open(model.path()).and_then(read).map_err(|error| error.to_string())
}

const FP8: &str = r#"{"quant_method": "fp8"}"#;
const FP8_BLOCK: &str = r#"{"quant_method": "fp8", "weight_block_size": [128, 128]}"#;

#[test]
fn fp8_scales_of_blocks_and_tensors() {
    // Ones, each in the block of its scale; the last blocks are ragged.
    let ones = vec![0x38; 192 * 130];
    let half = |value: f32| ((value.to_bits() >> 16) as u16).to_le_bytes();
    let scales: [(&str, Vec<u8>); 2] =
        [("F32", f32_bytes(&[1.0, 2.0, 3.0, 4.0])), ("BF16", [1.0, 2.0, 3.0, 4.0].map(half).concat())];
    for (dtype, scale) in scales {
        let tensors: [(&str, &str, &[usize], &[u8]); 2] =
            [("weight", "F8_E4M3", &[192, 130], &ones), ("weight_scale_inv", dtype, &[2, 2], &scale)];
        let values = scheme(FP8_BLOCK, &tensors).unwrap();
        for (at, expected) in [((0, 0), 1.0), ((0, 129), 2.0), ((130, 0), 3.0), ((130, 129), 4.0)] {
            assert_eq!(values[at.0 * 130 + at.1], expected, "{dtype} {at:?}");
        }
    }
    let twos = [0x40; 16];
    for shape in [&[][..], &[1]] {
        let tensors: [(&str, &str, &[usize], &[u8]); 3] = [
            ("weight", "F8_E4M3", &[4, 4], &twos),
            ("weight_scale_inv", "F32", shape, &f32_bytes(&[0.25])),
            ("activation_scale", "F32", &[], &f32_bytes(&[0.5])),
        ];
        assert_eq!(scheme(FP8, &tensors).unwrap(), [0.5; 16]);
    }
}

#[test]
fn nvfp4_global_scales_multiply_or_divide() {
    let (codes, block) = ([0x07; 8], [0x40]);
    let expected: Vec<f32> = [6.0, 0.0].repeat(8);
    let modelopt = r#"{"quant_method": "modelopt", "quant_algo": "NVFP4"}"#;
    let values = scheme(
        modelopt,
        &[
            ("weight", "U8", &[1, 8], &codes),
            ("weight_scale", "F8_E4M3", &[1, 1], &block),
            ("weight_scale_2", "F32", &[], &f32_bytes(&[0.5])),
        ],
    );
    assert_eq!(values.unwrap(), expected);
    let compressed = r#"{"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}"#;
    let values = scheme(
        compressed,
        &[
            ("weight_packed", "U8", &[1, 8], &codes),
            ("weight_scale", "F8_E4M3", &[1, 1], &block),
            ("weight_global_scale", "F32", &[1], &f32_bytes(&[2.0])),
        ],
    );
    assert_eq!(values.unwrap(), expected);
}

/// 5120 columns of 4, 6 and 8 bits, declared as a converter of a wrapped model declares them.
#[test]
fn settings_of_one_layer_are_found_under_renamed_prefixes() {
    let quantization = r#""quantization": {"group_size": 64, "bits": 4,
        "model.language_model.layers.0.mlp.up_proj": {"group_size": 64, "bits": 6},
        "lm_head": {"group_size": 64, "bits": 8}, "x": false}"#;
    let group_bytes = vec![0; 80 * 2];
    let open = |module_words: [(&str, usize); 3], x: bool| {
        let words: Vec<Vec<u8>> = module_words.iter().map(|(_, words)| vec![0; words * 4]).collect();
        let names: Vec<[String; 3]> = module_words
            .iter()
            .map(|(module, _)| ["weight", "scales", "biases"].map(|parameter| format!("{module}.{parameter}")))
            .collect();
        let shapes: Vec<[usize; 2]> = module_words.iter().map(|(_, words)| [1, *words]).collect();
        let mut tensors: Vec<(&str, &str, &[usize], &[u8])> = Vec::new();
        for ((names, shape), words) in names.iter().zip(&shapes).zip(&words) {
            tensors.push((&names[0], "U32", shape, words));
            tensors.extend(names[1..].iter().map(|name| (name.as_str(), "F16", &[1usize, 80][..], &group_bytes[..])));
        }
        if x {
            tensors.push(("x.weight", "BF16", &[1, 80], &group_bytes));
        }
        let model = model(quantization, &safetensors_of(&tensors));
        Checkpoint::open(model.path()).map(|checkpoint| {
            let info = |name: &str| checkpoint.tensor(name).map(|info| (info.shape[1], info.format.to_string()));
            ["model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight", "x.weight"]
                .map(info)
        })
    };
    let (down, up) = ("model.language_model.layers.0.mlp.down_proj", "model.language_model.layers.0.mlp.up_proj");
    let found = open([(down, 640), (up, 960), ("lm_head", 1280)], true).unwrap();
    let formats = found.map(|found| found.unwrap());
    assert_eq!(formats.each_ref().map(|(columns, _)| *columns), [5120, 5120, 5120, 80]);
    for (format, bits) in formats.iter().zip(["4", "6", "8", "BF16"]) {
        assert!(format.1.contains(bits), "{format:?}");
    }
    // Words of another width are no matrix of these settings, whatever they hold.
    for words in [[(down, 960), (up, 960), ("lm_head", 1280)], [(down, 640), (up, 640), ("lm_head", 1280)]] {
        let error = open(words, false).unwrap_err().to_string();
        assert!(error.contains("tensor model.layers.0.mlp.") && error.contains("bits in groups of 64"), "{error}");
    }
}

#[test]
fn contradictions_name_the_tensor_and_the_scheme() {
    let (codes, one) = (vec![0x38; 32 * 64], f32_bytes(&[1.0]));
    let weight: (&str, &str, &[usize], &[u8]) = ("weight", "F8_E4M3", &[32, 64], &codes);
    let scalar: (&str, &str, &[usize], &[u8]) = ("weight_scale", "F32", &[], &one);
    let four = f32_bytes(&[1.0; 4]);
    let mlx = r#"{"bits": 4, "group_size": 64}"#;
    let compressed = |format: &str| format!(r#"{{"quant_method": "compressed-tensors", "format": "{format}"}}"#);
    let (words, halves) = (vec![0; 4 * 8 * 4], vec![0; 4 * 2]);
    let affine = |scales: &'static [usize]| -> Vec<(&str, &str, &[usize], &[u8])> {
        vec![("weight", "U32", &[4, 8], &words), ("scales", "F16", scales, &halves), ("biases", "F16", scales, &halves)]
    };
    let cases: Vec<(String, Vec<(&str, &str, &[usize], &[u8])>, &str)> = vec![
        (
            FP8.into(),
            vec![weight],
            "is F8_E4M3 and cannot be decoded: FP8 with scales needs weight_scale too, which is missing",
        ),
        (
            String::new(),
            vec![weight, scalar],
            "has weight, weight_scale (FP8 with scales), which no quantization_config declares",
        ),
        (
            mlx.into(),
            vec![weight, scalar],
            "mlx affine of 4 bits in groups of 64: is stored as FP8 with scales (weight, weight_scale)",
        ),
        (FP8.into(), vec![weight, ("weight_scale", "F32", &[2, 2], &four)], "weight_scale has shape [2, 2]"),
        (FP8_BLOCK.into(), vec![weight, ("weight_scale", "F32", &[2, 2], &four)], "not [1, 1]"),
        (FP8.into(), vec![weight, ("weight_scale", "I32", &[], &one)], "weight_scale is I32"),
        (
            r#"{"quant_method": "fp8", "weight_block_size": [64, 64]}"#.into(),
            vec![weight, scalar],
            "blocks of 64 x 64 in F32 are not supported",
        ),
        (compressed("int-quantized"), vec![weight, scalar], "\"int-quantized\" of compressed-tensors is not supported"),
        (compressed("nonsense"), vec![weight, scalar], "\"nonsense\" of compressed-tensors is not supported"),
        (r#"{"quant_method": "bitnet"}"#.into(), vec![], "quant_method: \"bitnet\" is not supported"),
        (r#"{"quant_method": "gptq", "bits": 3}"#.into(), vec![], "GPTQ of 3 bits is not supported"),
        (r#"{"bits": 7, "group_size": 64}"#.into(), vec![], "affine of 7 bits"),
        (r#"{"mode": "mxfp4", "bits": 4, "group_size": 64}"#.into(), vec![], "mxfp4 of 4 bits in groups of 64"),
        (mlx.into(), affine(&[4, 2]), "scales has shape [4, 2], not [4, 1]"),
        (
            r#"{"mode": "mxfp4"}"#.into(),
            affine(&[4, 1]),
            "mxfp4 of 4 bits in groups of 32: biases belong to affine codes",
        ),
        (mlx.into(), affine(&[4, 1])[..2].to_vec(), "no biases beside affine codes"),
        (format!(r#"{{"bits": 4, "group_size": 64, "{Q}": false}}"#), affine(&[4, 1]), "its entry is false"),
        (mlx.into(), vec![("qweight", "I32", &[4, 8], &words)], "has qweight, which no known scheme has"),
    ];
    for (quantization, tensors, expected) in cases {
        // Sizes in the cases above are those of their first shape; data is cut or padded to what each header says.
        let tensors: Vec<_> = tensors.iter().map(|&(name, dtype, shape, data)| (name, dtype, shape, data)).collect();
        let sized: Vec<(&str, &str, &[usize], Vec<u8>)> = tensors
            .iter()
            .map(|&(name, dtype, shape, data)| {
                let bytes = match dtype {
                    "F32" | "U32" | "I32" => 4,
                    "F16" | "BF16" => 2,
                    _ => 1,
                };
                let mut data = data.to_vec();
                data.resize(shape.iter().product::<usize>() * bytes, 0);
                (name, dtype, shape, data)
            })
            .collect();
        let tensors: Vec<_> =
            sized.iter().map(|(name, dtype, shape, data)| (*name, *dtype, *shape, &data[..])).collect();
        let error = scheme(&quantization, &tensors).expect_err(expected);
        assert!(error.contains(expected), "{quantization}: {error}");
        let named = error.contains(Q) || error.contains("quantization_config");
        assert!(named, "names neither tensor nor block: {error}");
    }
}

/// The models that the reference implementation made, in every family and format.
#[test]
fn every_fixture_opens_and_reads() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../oracle/fixtures");
    let mut seen = 0;
    for directory in std::fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path()) {
        if !directory.join("config.json").exists() {
            continue;
        }
        let checkpoint = Checkpoint::open(&directory).unwrap();
        assert!(checkpoint.tensor("model.embed_tokens.weight").is_some(), "{}", directory.display());
        for tensor in checkpoint.tensors() {
            let values = checkpoint.read_f32(&tensor.name).unwrap();
            let finite = values.iter().all(|value| value.is_finite());
            assert!(finite, "{}: {} is not finite", directory.display(), tensor.name);
        }
        seen += 1;
    }
    assert!(seen >= 20, "only {seen} fixtures");
}

#[test]
fn selections_are_checked() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/schemes/mlx-affine4");
    let checkpoint = Checkpoint::open(&fixture).unwrap();
    let name = format!("{Q}.weight");
    let read = |rows: std::ops::Range<usize>, columns: std::ops::Range<usize>| {
        checkpoint.read(&[&name], &[rows], Some(&[columns])).map(|_| ())
    };
    assert!(read(0..24, 64..128).is_ok());
    assert!(matches!(read(0..25, 0..64), Err(CheckpointError::OutOfRange { end: 25, limit: 24, .. })));
    assert!(matches!(read(0..1, 0..320), Err(CheckpointError::OutOfRange { end: 320, limit: 256, .. })));
    assert!(matches!(read(0..1, 32..128), Err(CheckpointError::CutBlock { column: 32, block: 64, .. })));
    assert!(matches!(read(0..1, 0..96), Err(CheckpointError::CutBlock { column: 96, block: 64, .. })));
    assert!(matches!(checkpoint.read(&["x"], &[], None), Err(CheckpointError::NoTensor { .. })));
    assert!(matches!(checkpoint.read(&[], &[], None), Err(CheckpointError::NoTensor { .. })));
}

#[test]
fn manifests_name_the_first_file_that_differs() {
    let weights = shard("a", 1.0);
    let files: [(&str, &[u8]); 4] =
        [CONFIG, ("model.safetensors", &weights), ("tokenizer.json", b"{}"), ("README.md", b"one")];
    let open = |change: &str, bytes: &[u8]| {
        let mut files = files.to_vec();
        files.retain(|(name, _)| *name != change || !bytes.is_empty());
        files.iter_mut().filter(|(name, _)| *name == change).for_each(|file| file.1 = bytes);
        let model = directory(&files);
        let checkpoint = Checkpoint::open(model.path()).unwrap();
        let verified = checkpoint.verified_manifest(&mut |_, _| {}).unwrap();
        (checkpoint.manifest().clone(), verified)
    };
    let (ours, ours_verified) = open("", b"");
    let same = open("README.md", b"two").0;
    assert_eq!((ours.diff(&same), ours.hash()), (None, same.hash()));
    let tokenizer = open("tokenizer.json", b"[]").0;
    let difference = ours.diff(&tokenizer).unwrap();
    assert_eq!((difference.file.as_str(), &difference.ours[..7]), ("tokenizer.json", "2 bytes"));
    assert_ne!(difference.ours, difference.theirs);
    assert_ne!(ours.hash(), tokenizer.hash());
    let config = open("config.json", br#"{"model_type": "llama"}"#).0;
    assert_eq!(ours.diff(&config).unwrap().file, "config.json");
    let absent = open("tokenizer.json", b"").0;
    assert_eq!(ours.diff(&absent).unwrap().theirs, "no such file");
    assert_eq!(absent.diff(&ours).unwrap().ours, "no such file");
    // One flipped bit of a weight shows only when contents are compared.
    let mut flipped = weights.clone();
    *flipped.last_mut().unwrap() ^= 1;
    let (quick, verified) = open("model.safetensors", &flipped);
    assert_eq!(ours.diff(&quick), None);
    assert_eq!(ours_verified.diff(&verified).unwrap().file, "model.safetensors");
    assert_ne!(ours_verified.hash(), verified.hash());
}
