//! The files of a model on disk: which of them make a model, which matter when ranks compare theirs, and what editors, downloads and
//! damage do to them.

mod common;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use common::{directory, f32_bytes, refusal, safetensors_of};
use consort_checkpoint::chat::ChatTemplate;
use consort_checkpoint::tokenizer::Tokenizer;
use consort_checkpoint::{Checkpoint, holds_weights};
use sha2::{Digest, Sha256};

const CONFIG: (&str, &[u8]) = ("config.json", br#"{"model_type": "llama"}"#);

fn weights() -> Vec<u8> {
    safetensors_of(&[("a", "F32", &[2, 2], &f32_bytes(&[1.0, 2.0, 3.0, 4.0]))])
}

#[test]
fn only_weights_make_a_model() {
    let nothing: [&[(&str, &[u8])]; 4] = [
        &[],
        &[(".DS_Store", b"x"), ("README.md", b"# model")],
        &[CONFIG, ("tokenizer.json", b"{}"), ("model.safetensors.index.json", b"{}")],
        &[("model.safetensors.incomplete", b"half")],
    ];
    for files in nothing {
        assert!(!holds_weights(directory(files).path()), "{files:?}");
    }
    for name in ["model.safetensors", "model-00001-of-00002.safetensors", "x.gguf", "pytorch_model.bin"] {
        assert!(holds_weights(directory(&[(name, b"x")]).path()), "{name}");
        assert!(holds_weights(&directory(&[(name, b"x")]).path().join(name)), "{name}");
    }
    assert!(!holds_weights(Path::new("/no/such")));
}

#[test]
fn only_what_is_read_is_compared() {
    let weights = weights();
    let plain: Vec<(&str, &[u8])> = vec![CONFIG, ("model.safetensors", &weights), ("tokenizer.json", b"{}")];
    let manifest = |more: &[(&str, &[u8])]| {
        let files: Vec<_> = plain.iter().chain(more).copied().collect();
        Checkpoint::open(directory(&files).path()).unwrap().manifest().clone()
    };
    let ours = manifest(&[]);
    let unread = [
        "preprocessor_config.json",
        "README.md",
        "LICENSE.txt",
        "merges.txt",
        "vocab.json",
        "tokenizer.model",
        "tekken.json",
        "x.tiktoken",
        "trainer_state.json",
        ".DS_Store",
        "training_args.bin",
    ];
    for name in unread {
        assert_eq!(ours.diff(&manifest(&[(name, b"{}")])), None, "{name}");
        assert_eq!(ours.hash(), manifest(&[(name, b"{}")]).hash(), "{name}");
    }
    let read = [
        "generation_config.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "chat_template.json",
        "params.json",
    ];
    for name in read {
        assert_eq!(ours.diff(&manifest(&[(name, b"{}")])).unwrap().file, name);
    }
    // Without a tokenizer.json, the other vocabularies are.
    for name in ["tokenizer.model", "tekken.json", "x.tiktoken", "tiktoken.model"] {
        let with = |content: &[u8]| {
            let files = [CONFIG, ("model.safetensors", &weights), (name, content)];
            Checkpoint::open(directory(&files).path()).unwrap().manifest().clone()
        };
        assert_eq!(with(b"{}").diff(&with(b"[]")).unwrap().file, name);
    }
}

#[test]
fn no_file_is_hashed_that_is_far_too_long() {
    for name in
        ["tokenizer.json", "chat_template.jinja", "special_tokens_map.json", "additional_chat_templates/x.jinja"]
    {
        let model = directory(&[CONFIG, ("model.safetensors", &weights())]);
        fs::create_dir_all(model.path().join(name).parent().unwrap()).unwrap();
        // It takes no room on the disk.
        fs::File::create(model.path().join(name)).unwrap().set_len(1 << 40).unwrap();
        let message = refusal(model.path());
        assert!(message.contains(&format!("{name}: 1099511627776 bytes, but such a file has")), "{message}");
    }
}

#[test]
fn a_mark_before_a_text_is_no_part_of_it() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vocabularies");
    let tekken = fs::read(fixture.join("tekken.json")).unwrap();
    let ranks = fs::read(fixture.join("ranks.tiktoken")).unwrap();
    let marked = |text: &[u8]| [b"\xEF\xBB\xBF", text].concat();
    let llama = br#"{"model_type": "llama", "eos_token_id": 7}"#;
    for (name, content) in [("tekken.json", &tekken), ("ranks.tiktoken", &ranks)] {
        let read = |mark: bool| {
            let text = |text: &[u8]| if mark { marked(text) } else { text.to_vec() };
            let model =
                directory(&[(name, &text(content)), ("config.json", &text(llama)), ("model.safetensors", &weights())]);
            Checkpoint::open(model.path()).unwrap();
            let tokenizer = Tokenizer::from_directory(model.path()).unwrap();
            (tokenizer.encode("a b", false).unwrap(), tokenizer.end_tokens().clone(), tokenizer.vocabulary_size())
        };
        assert_eq!(read(true), read(false), "{name}");
    }
    let template = directory(&[("chat_template.jinja", &marked(b"{{ messages }}"))]);
    assert_eq!(ChatTemplate::from_directory(template.path()).unwrap().unwrap().source(false), "{{ messages }}");
    let template = directory(&[("tokenizer_config.json", &marked(br#"{"chat_template": "x"}"#))]);
    assert_eq!(ChatTemplate::from_directory(template.path()).unwrap().unwrap().source(false), "x");
    let utf16: Vec<u8> = "\u{FEFF}{}".encode_utf16().flat_map(u16::to_le_bytes).collect();
    let message = Tokenizer::from_directory(directory(&[("tokenizer.json", &utf16)]).path()).err().unwrap().to_string();
    assert!(message.contains("tokenizer.json: is UTF-16; save it as UTF-8"), "{message}");
}

#[test]
fn files_of_a_few_bytes_are_called_cut() {
    for bytes in 0..9 {
        let content = &b"GGUF\x03\0\0\0\x01"[..bytes];
        let file = directory(&[("model.gguf", content)]);
        for path in [file.path().join("model.gguf"), file.path().to_owned()] {
            let message = refusal(&path);
            assert!(message.contains("model.gguf: ") && message.contains("download it again"), "{bytes}: {message}");
        }
        let model = directory(&[CONFIG, ("model.safetensors", &b"\x10\0\0\0\0\0\0\0{"[..bytes])]);
        let message = refusal(model.path());
        assert!(message.contains("model.safetensors: ") && message.contains("download it again"), "{bytes}: {message}");
    }
}

/// The cache of the hub names large files by their SHA-256, so that damage shows without another copy.
#[test]
fn contents_are_compared_with_what_was_published() {
    let repository = tempfile::tempdir().unwrap();
    let (snapshot, blobs) = (repository.path().join("snapshots/abc"), repository.path().join("blobs"));
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(&blobs).unwrap();
    let mut content = weights();
    let published = Sha256::digest(&content).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    fs::write(blobs.join(&published), &content).unwrap();
    fs::write(snapshot.join(CONFIG.0), CONFIG.1).unwrap();
    symlink(format!("../../blobs/{published}"), snapshot.join("model.safetensors")).unwrap();
    let verified = |path: &Path| Checkpoint::open(path).unwrap().verified_manifest(&mut |_, _| {});
    let manifest = verified(&snapshot).unwrap();
    let entry = manifest.files.iter().find(|file| file.name == "model.safetensors").unwrap();
    assert_eq!(entry.content_hash.as_deref(), Some(published.as_str()));
    let last = content.len() - 1;
    content[last] ^= 1;
    fs::write(blobs.join(&published), &content).unwrap();
    let message = verified(&snapshot).unwrap_err().to_string();
    let expected = format!(" and was {published:.12} when it was published; delete it and pull the model again");
    assert!(message.contains("model.safetensors: its SHA-256 is ") && message.ends_with(&expected), "{message}");
    // Through another source, too.
    let source = std::sync::Arc::new(consort_checkpoint::source::LocalFiles::directory(&snapshot).unwrap());
    let checkpoint = Checkpoint::open_source(Box::new(source)).unwrap();
    assert_eq!(checkpoint.verified_manifest(&mut |_, _| {}).unwrap_err().to_string(), message);
    // Elsewhere a name that looks like a hash says nothing.
    let copy = directory(&[CONFIG, ("model.safetensors", &content)]);
    verified(copy.path()).unwrap();
}
