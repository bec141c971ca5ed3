//! A `tokenizer.json` that multiplies text, or that the `tokenizers` crate panics over, is refused in a line that names the part.

use consort_checkpoint::tokenizer::Tokenizer;
use serde_json::{Value as Json, json};

/// A tokenizer of single characters, with these sections in place of its own.
fn with(sections: Json) -> Json {
    let vocabulary: serde_json::Map<String, Json> =
        ('a'..='z').enumerate().map(|(id, letter)| (letter.to_string(), json!(id))).collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let mut json = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": null, "post_processor": null, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocabulary, "merges": []},
    });
    for (key, section) in sections.as_object().unwrap() {
        json[key] = section.clone();
    }
    json
}

fn load(sections: Json) -> Result<Tokenizer, String> {
    Tokenizer::from_json(with(sections).to_string().as_bytes(), "m/tokenizer.json").map_err(|error| error.to_string())
}

fn replace(pattern: &str, content: &str) -> Json {
    json!({"type": "Replace", "pattern": {"String": pattern}, "content": content})
}

fn normalizers(steps: Vec<Json>) -> Json {
    json!({"normalizer": {"type": "Sequence", "normalizers": steps}})
}

fn assert_names(message: &str, part: &str) {
    assert!(message.starts_with("m/tokenizer.json: ") && message.contains(part), "{message}");
    assert_eq!(message.lines().count(), 1, "{message}");
}

#[test]
fn what_multiplies_text_is_refused_before_it_fills_the_memory() {
    let many = |step: Json, count| vec![step; count];
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": false});
    let pre_tokenizers =
        |step: Json, count| json!({"pre_tokenizer": {"type": "Sequence", "pretokenizers": many(step, count)}});
    let marker = |ids: usize, times: usize| {
        json!({"post_processor": {"type": "TemplateProcessing",
            "single": vec![json!({"SpecialToken": {"id": "x", "type_id": 0}}); times],
            "pair": [],
            "special_tokens": {"x": {"id": "x", "ids": vec![0; ids], "tokens": vec!["x"; ids]}}}})
    };
    let doubles = json!({"type": "TemplateProcessing", "pair": [], "special_tokens": {},
        "single": vec![json!({"Sequence": {"id": "A", "type_id": 0}}); 2]});
    let nested = |depth| {
        (0..depth).fold(replace("a", &"a".repeat(1000)), |step, _| normalizers(vec![step])["normalizer"].clone())
    };
    let cases = [
        (normalizers(many(replace("a", &"a".repeat(1000)), 4)), "normalizer 2 (Replace): makes more than"),
        (normalizers(vec![nested(9), nested(3), nested(0)]), "normalizer 2 (Replace): makes more than"),
        (
            normalizers(many(json!({"type": "Prepend", "prepend": "a".repeat(1025)}), 1)),
            "normalizer 1 (Prepend): a text of 1025 bytes",
        ),
        (
            normalizers(vec![replace("x", ""), replace("q", &"q".repeat(1 << 20))]),
            "normalizer 2 (Replace): a text of 1048576 bytes",
        ),
        (normalizers(many(json!({"type": "ByteLevel"}), 40)), "normalizer"),
        (normalizers(many(json!({"type": "NFC"}), 65)), "65 normalizers, and 64 at most are run"),
        (pre_tokenizers(byte_level.clone(), 40), "pre-tokenizer"),
        (pre_tokenizers(byte_level, 65), "65 pre-tokenizers"),
        (marker(1, 1 << 14), "post-processor: makes more than 256 tokens of one"),
        (marker(1 << 10, 1 << 10), "post-processor: makes more than 256 tokens of one"),
        (
            json!({"post_processor": {"type": "Sequence", "processors": vec![doubles; 40]}}),
            "post-processor: makes more than",
        ),
        (
            json!({"added_tokens": [{"id": 26, "content": "x".repeat(5000), "special": true, "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": false}]}),
            "token 26 has 5000 bytes",
        ),
    ];
    for (sections, part) in cases {
        assert_names(&load(sections).err().unwrap_or_else(|| panic!("{part}: loads")), part);
    }

    // What shows only in some texts is found when one comes, long or short.
    let tokenizer = load(normalizers(many(replace("q", &"q".repeat(1000)), 4))).unwrap();
    assert!(tokenizer.encode(&"abc".repeat(100_000), false).is_ok());
    for text in ["q".to_owned(), "abc".repeat(100_000) + "q", "q".repeat(100_000)] {
        assert_names(&tokenizer.encode(&text, false).unwrap_err().to_string(), "(Replace): makes more than");
    }
    // The budget is one for the whole text, however many pieces it is cut into.
    let added = json!([{"id": 26, "content": "|", "special": false, "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false}]);
    let mut sections = normalizers(vec![replace("q", &"q".repeat(1000))]);
    sections["added_tokens"] = added;
    let error = load(sections).unwrap().encode(&"q|".repeat(10_000), false).unwrap_err();
    assert_names(&error.to_string(), "normalizer 1 (Replace): makes more than");
}

/// Entries of `added_tokens`.
fn added(tokens: &[(u32, &str)]) -> Json {
    let entry = |&(id, content): &(u32, &str)| {
        json!({"id": id, "content": content, "special": true, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false})
    };
    json!({ "added_tokens": tokens.iter().map(entry).collect::<Vec<_>>() })
}

#[test]
fn added_tokens_have_the_ids_that_the_file_gives_them() {
    for tokens in [
        [(26, "<s>"), (27, "</s>"), (28, "<|end|>")],
        [(28, "<|end|>"), (26, "<s>"), (27, "</s>")],
        [(40, "<s>"), (300, "</s>"), (29, "<|end|>")],
    ] {
        let tokenizer = load(added(&tokens)).unwrap();
        for (id, text) in tokens {
            assert_eq!(tokenizer.token_id(text), Some(id), "{tokens:?}");
            assert_eq!(tokenizer.encode(&format!("a{text}b"), true).unwrap(), [0, id, 1], "{tokens:?}");
            assert_eq!(tokenizer.decode(&[0, id, 1]), format!("a{text}b"), "{tokens:?}");
            assert!(tokenizer.is_control(id), "{tokens:?}");
        }
        let highest = tokens.iter().map(|(id, _)| *id as usize).max().unwrap();
        assert_eq!(tokenizer.vocabulary_size(), highest + 1);
    }
    // One of the vocabulary, and the same twice.
    assert_eq!(load(added(&[(25, "z"), (26, "<s>"), (26, "<s>")])).unwrap().token_id("<s>"), Some(26));
    for (tokens, expected) in [
        (&[(26, "<s>"), (27, "<s>")][..], r#"added token "<s>" has id 27, but also id 26"#),
        (&[(30, "z")], r#"added token "z" has id 30, but also id 25"#),
        (&[(26, "<s>"), (26, "</s>")], r#"added token "</s>" has id 26, which is that of "<s>""#),
        (&[(3, "<s>")], r#"added token "<s>" has id 3, which is that of "d""#),
        (&[(u32::MAX, "<s>")], "token id 4294967295 is out of range"),
    ] {
        assert_names(&load(added(tokens)).err().expect(expected), expected);
    }
    for list in [json!({}), json!([{"id": 26}]), json!([{"id": -1, "content": "x"}]), json!([["x", 26]])] {
        assert_names(&load(json!({ "added_tokens": list })).err().unwrap(), "added_tokens: ");
    }
}

#[test]
fn what_training_leaves_behind_changes_no_prompt() {
    let mut model = with(json!({}))["model"].clone();
    model["vocab"]["ab"] = json!(26);
    model["merges"] = json!(["a b"]);
    model["dropout"] = json!(0.9);
    let tokenizer = load(json!({
        "model": model,
        "truncation": {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        "padding": {"strategy": {"Fixed": 512}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0,
            "pad_token": "a"},
        "never_heard_of": {"a": [1]},
    }))
    .unwrap();
    for _ in 0..100 {
        assert_eq!(tokenizer.encode("abcab", false).unwrap(), [26, 2, 26]);
    }
}

#[test]
fn what_lengthens_text_as_published_ones_do_is_taken() {
    let metaspace = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
    let sections = [
        normalizers(vec![json!({"type": "NFKC"}), replace(" ", "▁"), json!({"type": "Prepend", "prepend": "▁"})]),
        normalizers(vec![json!({"type": "NFKD"}), json!({"type": "Lowercase"}), json!({"type": "StripAccents"})]),
        json!({"pre_tokenizer": metaspace}),
        json!({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": true},
            {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}]}}),
    ];
    for sections in sections {
        let tokenizer = load(sections).unwrap();
        // The longest compatibility decomposition there is, spaces, and marks without end.
        for text in ["\u{FDFA}".repeat(5_000), " ".repeat(50_000), "e\u{301}\u{302}".repeat(5_000), "1 a".repeat(5_000)]
        {
            tokenizer.encode(&text, false).unwrap();
        }
    }
}

#[test]
fn panics_of_the_library_are_the_files_fault() {
    let charsmap = |bytes: &[u8]| {
        use base64::Engine;
        let text = base64::engine::general_purpose::STANDARD.encode(bytes);
        json!({"normalizer": {"type": "Precompiled", "precompiled_charsmap": text}})
    };
    let regex = |pattern: &str, content: &str| json!({"normalizer": {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}});
    let split = |pattern: Json, behavior: &str| json!({"pre_tokenizer": {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": false}});
    let template =
        |single: Json| json!({"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {}});
    let sequence = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
    let unigram = |unknown: u32, vocabulary: Json| json!({"model": {"type": "Unigram", "unk_id": unknown, "vocab": vocabulary, "byte_fallback": false}});
    let everywhere = "normalizer 1 (Replace): its pattern is found in an empty text, and so everywhere";
    let cut = "normalizer Precompiled: precompiled_charsmap is cut";
    let fails = "the tokenizers library fails on it (";
    let cases = [
        (normalizers(vec![replace("", "b")]), everywhere),
        (normalizers(vec![replace("", "")]), everywhere),
        (regex("x*", "b"), everywhere),
        (regex("$", ""), everywhere),
        (regex("(", ""), "Parsing error"),
        (
            json!({"normalizer": {"type": "Prepend", "prepend": ""}}),
            "normalizer 1 (Prepend): the text to put first is empty",
        ),
        (
            json!({"pre_tokenizer": {"type": "FixedLength", "length": 0}}),
            "pre-tokenizer 1 (FixedLength): the tokenizers library fails",
        ),
        (charsmap(b""), cut),
        (charsmap(&[4, 0, 0, 0]), cut),
        (charsmap(&[0, 0, 0, 0, b'a', 0]), cut),
        (charsmap(&[3, 0, 0, 0, 1, 1, 1, b'a']), cut),
        (charsmap(&[0xFF, 0xFF, 0xFF, 0xFF, b'a']), cut),
        (
            charsmap(&[4, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0x7F, b'a', 0]),
            "normalizer 1 (Precompiled): the tokenizers library fails",
        ),
        (
            charsmap(&[4, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFE]),
            "normalizer Precompiled: precompiled_charsmap holds no UTF-8",
        ),
        (
            json!({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "?"}}),
            "precompiled_charsmap is no base64",
        ),
        (json!({"normalizer": {"type": "Precompiled"}}), "Precompiled"),
        (
            json!({"model": {"type": "WordPiece", "unk_token": "?", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 1_u64 << 40, "vocab": {"a": 0}}}),
            "model: max_input_chars_per_word is 1099511627776",
        ),
        (unigram(7, json!([["a", 0.0]])), "UnkIdNotInVocabulary"),
        (unigram(0, json!([])), "EmptyVocabulary"),
        (
            json!({"post_processor": {"type": "Sequence", "processors": [template(json!(vec![sequence("A"); 3])),
            template(json!([sequence("A")]))]}}),
            "post-processor: the tokenizers library fails",
        ),
        (json!({"post_processor": template(json!([{"SpecialToken": {"id": "no", "type_id": 0}}]))}), fails),
        (json!({"post_processor": template(json!([sequence("B")]))}), fails),
    ];
    for (sections, part) in cases {
        assert_names(&load(sections).err().unwrap_or_else(|| panic!("{part}: loads")), part);
    }
    // Matches of no length inside a text are no reason to fail.
    for sections in
        [regex("(?=x)", "b"), split(json!({"String": ""}), "Isolated"), split(json!({"Regex": "x*"}), "Contiguous")]
    {
        load(sections).unwrap().encode("ab xx é", true).unwrap();
    }
}
