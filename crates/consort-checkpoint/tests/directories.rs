//! Hugging Face directories: which files are opened, which are refused, and what a damaged or contradictory one says.

mod common;

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex};

use common::{directory, f32_bytes, refusal, safetensors_of};
use consort_checkpoint::chat::ChatTemplate;
use consort_checkpoint::source::{MemoryFiles, Source, SourceFile};
use consort_checkpoint::tokenizer::Tokenizer;
use consort_checkpoint::{Checkpoint, CheckpointError};

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
    for name in ["generation_config.json", "hf_quant_config.json", "tokenizer_config.json", "chat_template.jinja"] {
        let model = directory(&[CONFIG, ("model.safetensors", &weights)]);
        std::fs::create_dir(model.path().join(name)).unwrap();
        let message = refusal(model.path());
        assert!(message.contains(&format!("{name}: a directory in place of the file")), "{message}");
    }
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
    // `<s>` is a token.
    for file in ["tokenizer_config.json", "special_tokens_map.json"] {
        for name in ["eos_token", "bos_token"] {
            for value in ["5", "true", "[]", "{}", r#"["<s>"]"#, r#"{"content": 5}"#] {
                let message = refused(file, &format!(r#"{{"{name}": {value}}}"#));
                assert!(message.contains(&format!("{name}: is ")) && message.contains("neither a text"), "{message}");
            }
            for value in [r#""<nope>""#, r#"{"content": "<nope>"}"#] {
                let message = refused(file, &format!(r#"{{"{name}": {value}}}"#));
                assert!(message.ends_with(&format!(r#"{name}: "<nope>" is no token of the vocabulary"#)), "{message}");
            }
        }
    }
    for value in [r#""true""#, "1", "[]"] {
        let message = refused("tokenizer_config.json", &format!(r#"{{"add_bos_token": {value}}}"#));
        assert!(message.contains("add_bos_token: is ") && message.contains("neither true nor false"), "{message}");
    }
    let published = r#"{"bos_token": null, "eos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": false},
        "pad_token": "<nope>", "unk_token": "", "add_bos_token": null, "added_tokens_decoder": {}}"#;
    let model = directory(&[("tokenizer.json", &whole), ("tokenizer_config.json", published.as_bytes())]);
    let tokenizer = Tokenizer::from_directory(model.path()).unwrap();
    assert_eq!(tokenizer.named_tokens()["eos_token"], "<s>");
    assert!(!tokenizer.named_tokens().contains_key("unk_token") && tokenizer.end_tokens().len() == 1);

    let model = directory(&[("tokenizer_config.json", b"[]")]);
    let message = ChatTemplate::from_directory(model.path()).err().unwrap().to_string();
    assert!(message.contains("tokenizer_config.json: is [], not a JSON object"), "{message}");
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

/// A link to nothing ends the load where a file would be read, and only there.
#[cfg(unix)]
#[test]
fn links_to_nothing_matter_where_something_is_read() {
    use std::os::unix::fs::symlink;
    let model = directory(&[CONFIG, ("model.safetensors", &shard("a", 3.0))]);
    symlink("gone", model.path().join("trainer_state.json")).unwrap();
    std::fs::create_dir(model.path().join("notes.jinja")).unwrap();
    assert_eq!(Checkpoint::open(model.path()).unwrap().read_f32("a").unwrap(), [3.0; 4]);
    symlink("gone", model.path().join("tokenizer.json")).unwrap();
    let message = refusal(model.path());
    assert!(message.contains("tokenizer.json: is a link to nothing"), "{message}");
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

    for unknown in ["ouptut.weight", "layers.0.attention.wz.weight"] {
        let further: Vec<_> = entries.iter().copied().chain([(unknown, "F32", &[1usize][..], &[0u8; 4][..])]).collect();
        let model = directory(&[("params.json", params), ("consolidated.safetensors", &safetensors_of(&further))]);
        let message = refusal(model.path());
        assert!(message.contains(&format!("tensor {unknown}: is none that a params.json asks for")), "{message}");
    }

    // Beside the Hugging Face form it is not looked at; without weights it names what it lacks.
    std::fs::copy(fixture.join("config.json"), model.path().join("config.json")).unwrap();
    std::fs::copy(fixture.join("model.safetensors"), model.path().join("model.safetensors")).unwrap();
    assert_eq!(Checkpoint::open(model.path()).unwrap().config()["model_type"], "llama");
    let message = refusal(directory(&[("params.json", params)]).path());
    assert!(message.contains("consolidated.safetensors: missing; params.json asks for it"), "{message}");
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
