//! Tokenizers: what published vocabularies give, and what must hold for any of them.

mod vocabulary;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use consort_checkpoint::gguf::{Header, Value};
use consort_checkpoint::pull;
use consort_checkpoint::tokenizer::{Metadata, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value as Json, json};
use vocabulary::{CONTROL, byte_metadata, byte_tokenizer};

/// The vocabularies and expected ids that llama.cpp is tested with: `ggml-vocab-NAME.gguf`, `.inp` and `.out`.
///
/// They are too large for this repository: `CONSORT_VOCABULARIES=DIR cargo test -- --ignored published_vocabularies`.
#[test]
#[ignore = "needs the vocabularies of llama.cpp in CONSORT_VOCABULARIES"]
fn published_vocabularies() {
    let directory = PathBuf::from(std::env::var("CONSORT_VOCABULARIES").expect("CONSORT_VOCABULARIES is set"));
    let mut checked = 0;
    for entry in std::fs::read_dir(&directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let sibling = |extension: &str| path.with_file_name(format!("{name}.{extension}"));
        // Models that only embed text have other kinds of vocabularies.
        if !sibling("inp").exists() || name.contains("bert") {
            continue;
        }
        let header = Header::parse(&std::fs::read(&path).unwrap(), &name).unwrap();
        let tokenizer = Tokenizer::from_gguf(&header.metadata, &name).unwrap();
        let written = tempfile::tempdir().unwrap();
        for (file, content) in Tokenizer::export(&header.metadata, &name).unwrap() {
            std::fs::write(written.path().join(file), content).unwrap();
        }
        let copy = Tokenizer::from_directory(written.path()).unwrap();
        let library = tokenizers::Tokenizer::from_file(written.path().join("tokenizer.json")).unwrap();
        let texts = std::fs::read_to_string(sibling("inp")).unwrap();
        let expected = std::fs::read_to_string(sibling("out")).unwrap();
        for (text, ids) in texts.split("\n__ggml_vocab_test__\n").zip(expected.lines()) {
            let ids: Vec<u32> = ids.split_whitespace().map(|id| id.parse().unwrap()).collect();
            assert_eq!(tokenizer.encode(text, false).unwrap(), ids, "{name}: {text:?}");
            assert_eq!(tokenizer.decode(&ids), text, "{name}: {ids:?}");
            assert_eq!(copy.encode(text, false).unwrap(), ids, "exported {name}: {text:?}");
            assert_eq!(library.encode(text, false).unwrap().get_ids(), ids, "exported {name}: {text:?}");
            checked += 1;
        }
    }
    assert!(checked > 500, "only {checked} texts found in {}", directory.display());
}

/// Prompts and ids of SmolLM2, from an independent implementation. Runs where `consort pull smollm2` or `demo` ran before.
#[test]
fn the_default_model() {
    let options = pull::Options::from_environment().unwrap();
    let Some(model) = pull::find(pull::DEFAULT_MODEL, &options) else {
        eprintln!("skipped: {} is not here; consort pull {}", pull::DEFAULT_MODEL, pull::DEFAULT_MODEL);
        return;
    };
    let tokenizer = Tokenizer::open(&model).unwrap();
    let prompts: [(&str, &[u32]); 3] = [
        ("The capital of France is", &[504, 3575, 282, 4649, 314]),
        (
            "Once upon a time, in a small village by the sea,",
            &[6403, 1980, 253, 655, 28, 281, 253, 1165, 6560, 411, 260, 3426, 28],
        ),
        ("def fibonacci(n):", &[1604, 3987, 46477, 24, 94, 727]),
    ];
    for (text, ids) in prompts {
        assert_eq!(tokenizer.encode_prompt(text, true).unwrap(), ids);
        assert_eq!(tokenizer.decode(ids), text);
    }
    assert_eq!(tokenizer.end_tokens(), &BTreeSet::from([2]));
    assert_eq!(tokenizer.vocabulary_size(), 49152);
    assert_eq!(tokenizer.token_bytes(2), b"<|im_end|>");
}

/// The tokenizer of a model directory with these files.
fn tokenizer_of(files: &[(&str, Json)]) -> Tokenizer {
    let directory = tempfile::tempdir().unwrap();
    for (file, json) in files {
        std::fs::write(directory.path().join(file), json.to_string()).unwrap();
    }
    Tokenizer::from_directory(directory.path()).unwrap()
}

/// A `tokenizer.json` whose model has the words `a` and `b`, and some added tokens.
fn small() -> Json {
    let added = |id: u32, content: &str, special: bool| {
        json!({"id": id, "content": content, "special": special, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false})
    };
    json!({
        "version": "1.0",
        "truncation": {"max_length": 8, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        "padding": {"strategy": {"Fixed": 16}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0,
            "pad_token": "a"},
        "added_tokens": [added(2, "<s>", true), added(3, "</s>", true), added(4, "<end>", true), added(5, "<think>", false),
            added(6, "  ", false)],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "</s>", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [2], "tokens": ["<s>"]},
                "</s>": {"id": "</s>", "ids": [3], "tokens": ["</s>"]}}},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": {"a": 0, "b": 1}, "merges": []}
    })
}

#[test]
fn a_file_that_breaks_off_is_refused() {
    for mut json in kinds().map(|json| json.to_string()) {
        assert!(Tokenizer::from_json(json.as_bytes(), "x").is_ok());
        while !json.is_empty() {
            json.truncate(json.floor_char_boundary(json.len() - json.len().min(13)));
            assert!(Tokenizer::from_json(json.as_bytes(), "x").is_err(), "{json}");
        }
    }
}

#[test]
fn prompts_are_neither_cut_nor_filled_up() {
    let tokenizer = tokenizer_of(&[("tokenizer.json", small())]);
    assert_eq!(tokenizer.encode(&"ab".repeat(50), false).unwrap(), [0, 1].repeat(50));
}

#[test]
fn a_prompt_begins_with_one_beginning_and_no_end() {
    let tokenizer = tokenizer_of(&[("tokenizer.json", small())]);
    assert_eq!(tokenizer.encode("ab", true).unwrap(), [0, 1]);
    assert_eq!(tokenizer.encode_prompt("ab", true).unwrap(), [2, 0, 1]);
    assert_eq!(tokenizer.encode_prompt("<s>ab", true).unwrap(), [2, 0, 1]);
    let without = json!({"bos_token": "<s>", "add_bos_token": false});
    let tokenizer = tokenizer_of(&[("tokenizer.json", small()), ("tokenizer_config.json", without)]);
    assert_eq!(tokenizer.encode_prompt("ab", true).unwrap(), [0, 1]);
    let mut plain = small();
    plain["post_processor"] = Json::Null;
    let with = json!({"bos_token": {"content": "<s>"}, "add_bos_token": true});
    let tokenizer = tokenizer_of(&[("tokenizer.json", plain), ("tokenizer_config.json", with)]);
    assert_eq!(tokenizer.encode_prompt("ab", true).unwrap(), [2, 0, 1]);
}

#[test]
fn control_tokens_count_only_where_they_may() {
    let tokenizer = tokenizer_of(&[("tokenizer.json", small())]);
    assert_eq!(tokenizer.encode("a<end>b<think>a", true).unwrap(), [0, 4, 1, 5, 0]);
    // The vocabulary has no pieces for the literal text.
    assert_eq!(tokenizer.encode("a<end>b<think>a", false).unwrap(), [0, 1, 0]);
    assert_eq!(tokenizer.encode_parts("<end>a<end>", std::slice::from_ref(&(0..5))).unwrap(), [4, 0]);
    // Not even over two ranges that touch.
    assert_eq!(tokenizer.encode_parts("<end>a", &[0..2, 2..6]).unwrap(), [0]);
    assert_eq!(tokenizer.encode("a  b", false).unwrap(), [0, 6, 1], "spaces are text");
    assert!(tokenizer.is_control(5) && !tokenizer.is_control(6));
}

#[test]
fn all_sources_of_end_tokens_are_united() {
    let files = [
        ("tokenizer.json", small()),
        ("tokenizer_config.json", json!({"eos_token": "<end>"})),
        ("config.json", json!({"text_config": {"eos_token_id": 0}, "eos_token_id": 5})),
        ("generation_config.json", json!({"eos_token_id": [5, 3]})),
    ];
    assert_eq!(tokenizer_of(&files).end_tokens(), &BTreeSet::from([0, 3, 4, 5]));
    let mut metadata = byte_metadata();
    metadata.insert("tokenizer.ggml.eot_token_id".to_owned(), Value::U32(256));
    metadata.insert("tokenizer.ggml.eom_token_id".to_owned(), Value::U32(9999));
    let tokenizer = Tokenizer::from_gguf(&metadata, "bytes").unwrap();
    assert_eq!(tokenizer.end_tokens(), &BTreeSet::from([256, 258]));
}

#[test]
fn errors_name_the_place() {
    let error = |metadata: &Metadata| Tokenizer::from_gguf(metadata, "m.gguf").err().unwrap().to_string();
    assert!(error(&Metadata::new()).starts_with("m.gguf: no tokenizer"));
    let with = |key: &str, value: Value| {
        let mut metadata = byte_metadata();
        metadata.insert(format!("tokenizer.ggml.{key}"), value);
        metadata
    };
    let strings = |texts: &[&str]| Value::Array(texts.iter().map(|text| Value::String((*text).to_owned())).collect());
    assert!(error(&with("pre", Value::String("zzz".to_owned()))).contains("pre-tokenizer \"zzz\" is not supported"));
    assert!(
        error(&with("model", Value::String("rwkv".to_owned()))).contains("tokenizer model \"rwkv\" is not supported")
    );
    assert!(error(&with("tokens", Value::U8(1))).contains("m.gguf: tokenizer.ggml.tokens: missing, or no array"));
    assert!(error(&with("token_type", Value::Array(vec![Value::I32(1)]))).contains("1 types for 265 tokens"));
    assert!(error(&with("merges", strings(&["ab"]))).contains("\"ab\" is no pair"));
    assert!(error(&with("model", Value::String("llama".to_owned()))).contains("tokenizer.ggml.scores"));
    assert!(Tokenizer::from_directory(Path::new("/no/such")).err().unwrap().to_string().contains("no tokenizer"));
}

/// A SentencePiece vocabulary: pieces, their scores, and all bytes.
fn sentence_piece_metadata() -> Metadata {
    let pieces = [("<unk>", 2, 0.0), ("<s>", 3, 0.0), ("</s>", 3, 0.0)]
        .map(|(text, kind, score)| (text.to_owned(), kind, score));
    let bytes = (0..=255_u32).map(|byte| (format!("<0x{byte:02X}>"), 6, 0.0));
    let words = ["▁a", "ab", "▁", "a", "b", "c"].into_iter().enumerate();
    let words = words.map(|(rank, text)| (text.to_owned(), 1, -(rank as f32)));
    let all: Vec<_> = pieces.into_iter().chain(bytes).chain(words).collect();
    let column = |value: fn(&(String, i32, f32)) -> Value| Value::Array(all.iter().map(value).collect());
    let entries = [
        ("model", Value::String("llama".to_owned())),
        ("tokens", column(|(text, ..)| Value::String(text.clone()))),
        ("token_type", column(|&(_, kind, _)| Value::I32(kind))),
        ("scores", column(|&(.., score)| Value::F32(score))),
    ];
    entries.into_iter().map(|(key, value)| (format!("tokenizer.ggml.{key}"), value)).collect()
}

fn sentence_piece() -> Tokenizer {
    Tokenizer::from_gguf(&sentence_piece_metadata(), "pieces").unwrap()
}

#[test]
fn sentence_piece_joins_by_score() {
    let tokenizer = sentence_piece();
    let [a_word, ab, space, a, b, c] = [259, 260, 261, 262, 263, 264];
    assert_eq!(tokenizer.encode("ab", false).unwrap(), [a_word, b], "the best pair first, though `ab` is longer");
    assert_eq!(tokenizer.encode("cab", false).unwrap(), [space, c, ab]);
    assert_eq!(tokenizer.encode("c  a", false).unwrap(), [space, c, space, a_word]);
    assert_eq!(tokenizer.encode("é", false).unwrap(), [space, 3 + 0xC3, 3 + 0xA9], "bytes where no piece fits");
    assert_eq!(tokenizer.encode_prompt("a", true).unwrap(), [1, a_word]);
    assert_eq!(tokenizer.encode("</s>", false).unwrap().first(), Some(&space), "typed text is no control token");
    assert_eq!(tokenizer.decode(&[a_word, b, a_word]), "ab a", "the space before the text goes");
    let mut continuation = tokenizer.continuation_decoder();
    assert_eq!(continuation.push(a_word), " a", "after a prompt it stays");
    let _ = a;
}

#[test]
fn no_half_characters_in_a_stream() {
    let tokenizer = byte_tokenizer();
    let mut decoder = tokenizer.decoder();
    let mut push = |bytes: &[u8]| bytes.iter().map(|&byte| decoder.push(byte.into())).collect::<Vec<_>>();
    assert_eq!(push(b"ok \xF0\x9F\x98\x8A"), ["o", "k", " ", "", "", "", "😊"]);
    assert_eq!(push(b"\xE4\xBDx"), ["", "", "\u{FFFD}x"], "a character that breaks off is replaced once");
    assert_eq!(push(b"\xFF\xE4\xBD"), ["\u{FFFD}", "", ""]);
    assert_eq!(decoder.finish(), "\u{FFFD}");
    assert_eq!(tokenizer.token_bytes(0xF0), [0xF0]);
    assert_eq!(tokenizer.token_bytes(100_000), [0; 0], "beyond the vocabulary");
}

proptest! {
    /// Any tokens: the stream equals the whole, which is what the bytes say, and nothing shown is taken back.
    #[test]
    fn streaming_equals_the_whole(ids in prop::collection::vec(prop_oneof![0..256_u32, 0x80..0x100_u32, 0xE0..0xF5_u32, 0..300_u32], 0..40)) {
        for tokenizer in [byte_tokenizer(), sentence_piece()] {
            let mut decoder = tokenizer.continuation_decoder();
            let mut text: String = ids.iter().map(|&id| decoder.push(id)).collect();
            text.push_str(&decoder.finish());
            let bytes: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.token_bytes(id).to_vec()).collect();
            prop_assert_eq!(&text, &String::from_utf8_lossy(&bytes));
            prop_assert_eq!(tokenizer.decode(&ids), text.strip_prefix(' ').filter(|_| tokenizer.decode(&[261]).is_empty()).unwrap_or(&text));
        }
    }

    /// Any text comes back, and is made of text tokens only.
    #[test]
    fn text_comes_back(pieces in prop::collection::vec(prop_oneof![any::<String>(), prop::sample::select(CONTROL.as_slice()).prop_map(str::to_owned)], 0..6)) {
        let text = pieces.concat();
        for tokenizer in [byte_tokenizer(), sentence_piece()] {
            let ids = tokenizer.encode(&text, false).unwrap();
            prop_assert!(ids.iter().all(|&id| !tokenizer.is_control(id)));
            prop_assert_eq!(tokenizer.decode(&ids), text.replace('▁', if tokenizer.decode(&[261]).is_empty() { " " } else { "▁" }));
        }
    }
}

/// Kinds of `tokenizer.json`, small: byte-level, and SentencePiece in its three spellings, with added tokens of every sort.
fn kinds() -> [Json; 4] {
    let added = |id: u32, content: &str, flags: [bool; 5]| {
        let [special, single_word, lstrip, rstrip, normalized] = flags;
        json!({"id": id, "content": content, "special": special, "single_word": single_word, "lstrip": lstrip, "rstrip": rstrip,
            "normalized": normalized})
    };
    let bytes: Vec<String> = (0..=255).map(|byte| format!("<0x{byte:02X}>")).collect();
    let pieces = ["a", "b", "c", "▁", "▁a", "ab", "▁▁", "Ġ", "Ġa", "Ċ", "Ã", "©", "c▁", "<", ">", "x"];
    let vocabulary: serde_json::Map<String, Json> = bytes
        .iter()
        .map(String::as_str)
        .chain(pieces)
        .enumerate()
        .map(|(id, piece)| (piece.to_owned(), json!(id)))
        .collect();
    let first = vocabulary.len() as u32;
    let added_tokens = [
        added(first, "<x>", [true, false, false, false, false]),
        added(first + 1, "<r>", [true, false, false, true, false]),
        added(first + 2, "<l>", [true, false, true, false, false]),
        added(first + 3, "solo", [true, true, false, false, false]),
        added(first + 4, "<n>", [false, false, false, false, false]),
        added(first + 5, "   ", [false, false, false, false, false]),
        added(first + 6, "\t\t", [false, false, false, false, true]),
        added(first + 7, "<x><x>", [true, false, false, false, false]),
    ];
    let model = json!({"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false, "vocab": vocabulary,
        "merges": [["▁", "a"], ["a", "b"], ["▁", "▁"], ["Ġ", "a"], ["c", "▁"]]});
    let kind = |normalizer: Json, pre_tokenizer: Json, decoder: Json| {
        json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": added_tokens, "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer, "post_processor": null, "decoder": decoder, "model": model})
    };
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let prepend = json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]});
    let undo = json!({"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]});
    let metaspace = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false});
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    [
        kind(json!({"type": "NFC"}), byte_level.clone(), byte_level),
        kind(prepend, Json::Null, undo.clone()),
        kind(
            replace,
            json!({"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false}),
            undo,
        ),
        kind(Json::Null, metaspace.clone(), metaspace),
    ]
}

/// Where all control tokens count, the ids are those of the `tokenizers` crate, which transformers uses.
#[test]
fn the_same_ids_as_the_tokenizers_crate() {
    let ours_and_reference = |json: Json| {
        let reference = tokenizers::Tokenizer::from_bytes(json.to_string()).unwrap();
        (tokenizer_of(&[("tokenizer.json", json)]), reference)
    };
    let tokenizers: Vec<_> = kinds().into_iter().map(ours_and_reference).collect();
    let piece = prop_oneof![
        prop::sample::select(vec![
            "a", "b", "c", " ", "  ", "   ", "\n", "\t", "<x>", "<r>", "<l>", "<n>", "solo", "é", "e\u{301}", "▁",
            "😀", "²", "\u{200D}", "‿",
        ])
        .prop_map(str::to_owned),
        any::<char>().prop_map(String::from),
    ];
    let differs = |text: &str| {
        tokenizers.iter().position(|(ours, reference)| {
            ours.encode(text, true).unwrap() != reference.encode(text, false).unwrap().get_ids()
        })
    };
    for text in ["solo", "a solo.", "asolo", "soloa", "solo_", "solo solo", "<x>solo<x>"] {
        assert_eq!(differs(text), None, "{text:?}");
    }
    proptest!(|(pieces in prop::collection::vec(piece, 0..20))| {
        prop_assert_eq!(differs(&pieces.concat()), None);
    });
}

/// Vocabularies of tiktoken's kind give the ids of tiktoken and of mistral-common (`oracle/vocabularies.py`).
#[test]
fn ranked_vocabularies() {
    let files = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vocabularies");
    let copy = |name: &str, source: &str, config: &Json| {
        let directory = tempfile::tempdir().unwrap();
        std::fs::copy(files.join(source), directory.path().join(name)).unwrap();
        std::fs::write(directory.path().join("config.json"), config.to_string()).unwrap();
        let tokenizer = Tokenizer::from_directory(directory.path()).unwrap();
        (tokenizer, directory)
    };
    let (mistral, _kept) = copy("tekken.json", "tekken.json", &json!({"model_type": "ministral3", "eos_token_id": 2}));
    let (llama, _kept) = copy("tokenizer.model", "ranks.tiktoken", &json!({"model_type": "llama"}));
    let expected: Vec<(String, Vec<u32>, Vec<u32>)> =
        serde_json::from_slice(&std::fs::read(files.join("expected.json")).unwrap()).unwrap();
    assert_eq!(expected.len(), 84);
    for (text, by_mistral, by_tiktoken) in &expected {
        assert_eq!(&mistral.encode(text, false).unwrap(), by_mistral, "{text:?}");
        assert_eq!(&llama.encode(text, false).unwrap(), by_tiktoken, "{text:?}");
        assert_eq!((&mistral.decode(by_mistral), &llama.decode(by_tiktoken)), (text, text));
    }

    assert_eq!((mistral.prefix(), mistral.end_tokens()), (&[1][..], &BTreeSet::from([2])));
    assert_eq!(mistral.encode("<s>[INST]</s>", true).unwrap(), [1, 3, 2]);
    assert_eq!((mistral.vocabulary_size(), mistral.token_id("[/INST]")), (510, Some(4)));
    assert_eq!(mistral.token_bytes(9), b"<SPECIAL_9>");
    assert!(mistral.is_control(9) && !mistral.is_control(10));
    // 560 ranks, then 256 special tokens.
    assert_eq!((llama.prefix(), llama.token_id("<|eot_id|>")), (&[560][..], Some(569)));
    assert_eq!((llama.vocabulary_size(), llama.token_id("<|reserved_special_token_246|>")), (816, Some(815)));
    assert_eq!(llama.encode_prompt("<|begin_of_text|>a", true).unwrap(), llama.encode_prompt("a", true).unwrap());
}

#[test]
fn damaged_ranked_vocabularies_are_named() {
    let refused = |name: &str, content: &str, config: &str| {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join(name), content).unwrap();
        std::fs::write(directory.path().join("config.json"), config).unwrap();
        Tokenizer::from_directory(directory.path()).err().unwrap().to_string()
    };
    let llama = r#"{"model_type": "llama"}"#;
    let message = refused("tokenizer.model", "YQ== 0\nYg== 0\n", llama);
    assert!(message.contains("tokenizer.model: line 2: no token in base64 with a rank of its own"), "{message}");
    let message = refused("x.tiktoken", "YQ== 0\n", r#"{"model_type": "zzz"}"#);
    assert!(message.contains("a tiktoken vocabulary of model type \"zzz\" is not supported"), "{message}");
    // SentencePiece's own format is another one.
    let message = refused("tokenizer.model", "\n\u{e}\n\u{5}<unk>", llama);
    assert!(message.contains("no tokenizer (looked for tokenizer.json, tekken.json"), "{message}");
    let message = refused("x.tiktoken", "YQ== 4294967295\n", llama);
    assert!(message.contains("out of range"), "{message}");
    let tekken = |size: u64, reserved: u64, special: &str| {
        format!(
            r#"{{"config": {{"pattern": ".", "default_vocab_size": {size}, "default_num_special_tokens": {reserved}}},
            "vocab": [{{"rank": 0, "token_bytes": "YQ=="}}], "special_tokens": [{special}]}}"#
        )
    };
    let message = refused("tekken.json", &tekken(1 << 40, 1, ""), llama);
    assert!(
        message.contains("tekken.json: 1 tokens and 1 special ones for a vocabulary of 1099511627776"),
        "{message}"
    );
    let message = refused("tekken.json", &tekken(2, 1, r#"{"rank": 1, "token_str": "x"}"#), llama);
    assert!(message.contains("special token \"x\" has rank 1 of 1"), "{message}");
    let special = |rank: u64, text: &str| format!(r#"{{"rank": {rank}, "token_str": "{text}"}}"#);
    let message = refused("tekken.json", &tekken(3, 2, &[special(1, "x"), special(1, "y")].join(",")), llama);
    assert!(message.contains("two special tokens have rank 1"), "{message}");
    let message = refused("tekken.json", &tekken(3, 2, &[special(0, "x"), special(1, "x")].join(",")), llama);
    assert!(message.contains("special tokens 0 and 1 are both \"x\""), "{message}");
    let two = |second: &str| {
        tekken(3, 1, "")
            .replace(r#"{"rank": 0, "token_bytes": "YQ=="}"#, r#"{"rank": 0, "token_bytes": "YQ=="}, "#)
            .replace(", ]", &format!(", {second}]"))
    };
    for (second, expected) in [
        (r#"{"rank": 0, "token_bytes": "Yg=="}"#, "two tokens have rank 0"),
        (r#"{"rank": 2, "token_bytes": "Yg=="}"#, "1 tokens have ranks below 2, which should be as many"),
        (r#"{"rank": 1, "token_bytes": "YQ=="}"#, "tokens 1 and 2 are both \"a\""),
        (r#"{"rank": 1, "token_bytes": ""}"#, "token 2 is empty"),
    ] {
        let message = refused("tekken.json", &two(second), llama);
        assert!(message.contains(expected), "{message}");
    }
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("x.tiktoken"), "YQ== 0\nYg== 1\n").unwrap();
    std::fs::write(directory.path().join("config.json"), r#"{"model_type": "kimi_k2"}"#).unwrap();
    let with = |decoder: &str| {
        let config = format!(r#"{{"added_tokens_decoder": {decoder}}}"#);
        std::fs::write(directory.path().join("tokenizer_config.json"), config).unwrap();
        Tokenizer::from_directory(directory.path()).map(|tokenizer| tokenizer.token_id("x"))
    };
    assert_eq!(with(r#"{"7": {"content": "x"}}"#).unwrap(), Some(7));
    for (decoder, expected) in [
        ("[1]", "tokenizer_config.json: added_tokens_decoder: is [1], not an object"),
        (r#"{"x": {"content": "x"}}"#, "added_tokens_decoder: \"x\" is no id with a content"),
        (r#"{"7": {"content": 5}}"#, "added_tokens_decoder: \"7\" is no id with a content"),
        (r#"{"1": {"content": "x"}}"#, "special token \"x\" has id 1, which is that of another"),
        (r#"{"7": {"content": "x"}, "8": {"content": "x"}}"#, "special tokens 7 and 8 are both \"x\""),
    ] {
        let message = with(decoder).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
}

/// A GGUF file's tokenizer, written as files and read again, gives the same ids, here and in the `tokenizers` crate.
#[test]
fn exported_tokenizers_give_the_same_ids() {
    let mut steered = byte_metadata();
    // What was added at the end to steer the model, though publishers do not call it special; and tokens that fill up.
    let kinds = (0..256 + CONTROL.len() + 2).map(|id| match id {
        0..256 => 1,
        259 | 260 => 4,
        265.. => 5,
        _ => 3,
    });
    steered.insert("tokenizer.ggml.token_type".to_owned(), Value::Array(kinds.map(Value::I32).collect()));
    let Some(Value::Array(tokens)) = steered.get_mut("tokenizer.ggml.tokens") else { panic!("no tokens") };
    tokens.extend(["[PAD265]", "[PAD266]"].map(|text| Value::String(text.to_owned())));
    steered.insert("tokenizer.chat_template".to_owned(), Value::String("{{ messages }}".to_owned()));
    let mut with_bos = byte_metadata();
    with_bos.insert("tokenizer.ggml.add_bos_token".to_owned(), Value::Bool(true));
    for (metadata, name) in
        [(byte_metadata(), "bytes"), (steered, "steered"), (with_bos, "bos"), (sentence_piece_metadata(), "pieces")]
    {
        let original = Tokenizer::from_gguf(&metadata, name).unwrap();
        let written = tempfile::tempdir().unwrap();
        for (file, content) in Tokenizer::export(&metadata, name).unwrap() {
            std::fs::write(written.path().join(file), content).unwrap();
        }
        let copy = Tokenizer::from_directory(written.path()).unwrap();
        assert_eq!((copy.prefix(), copy.end_tokens()), (original.prefix(), original.end_tokens()), "{name}");
        assert_eq!(written.path().join("chat_template.jinja").exists(), name == "steered");
        let library = tokenizers::Tokenizer::from_file(written.path().join("tokenizer.json")).unwrap();
        for text in CONTROL {
            assert_eq!(
                copy.token_id(text).map(|id| copy.is_control(id)),
                original.token_id(text).map(|_| true),
                "{name}: {text}"
            );
        }
        let texts =
            ["ab c  a", "é 😀\n\n", "<|im_start|>a<think>b</think> c<|im_end|>", "</s>a <s>", "", "[PAD265]", "▁a b"];
        for text in texts {
            for special in [true, false] {
                let ids = original.encode(text, special).unwrap();
                assert_eq!(copy.encode(text, special).unwrap(), ids, "{name}: {text:?} {special}");
                assert_eq!(copy.decode(&ids), original.decode(&ids), "{name}: {text:?}");
            }
            let everywhere = original.encode(text, true).unwrap();
            assert_eq!(library.encode(text, false).unwrap().get_ids(), everywhere, "{name}: {text:?}");
            let prompt = [original.prefix(), &everywhere].concat();
            assert_eq!(library.encode(text, true).unwrap().get_ids(), prompt, "{name}: {text:?}");
        }
    }
}
