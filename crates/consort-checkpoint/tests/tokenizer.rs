//! Tokenizers: what published vocabularies give, and what must hold for any of them.

use std::path::PathBuf;

use consort_checkpoint::gguf::Header;
use consort_checkpoint::tokenizer::{Metadata, Tokenizer};

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
        let texts = std::fs::read_to_string(sibling("inp")).unwrap();
        let expected = std::fs::read_to_string(sibling("out")).unwrap();
        for (text, ids) in texts.split("\n__ggml_vocab_test__\n").zip(expected.lines()) {
            let ids: Vec<u32> = ids.split_whitespace().map(|id| id.parse().unwrap()).collect();
            assert_eq!(tokenizer.encode(text, false).unwrap(), ids, "{name}: {text:?}");
            assert_eq!(tokenizer.decode(&ids), text, "{name}: {ids:?}");
            checked += 1;
        }
    }
    assert!(checked > 500, "only {checked} texts found in {}", directory.display());
}
