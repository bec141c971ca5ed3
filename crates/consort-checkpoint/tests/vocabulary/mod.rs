//! A vocabulary that is small enough to write down.
#![allow(dead_code)] // each test binary uses its own part

use consort_checkpoint::gguf::Value;
use consort_checkpoint::tokenizer::{Metadata, Tokenizer};

/// Control tokens of [`byte_tokenizer`], from id 256 on.
pub const CONTROL: [&str; 9] = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<s>",
    "[TOOL_CALLS]",
];

/// GPT-2's printable stand-in for a byte.
fn stand_in(byte: u8) -> char {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    match printable(byte) {
        true => char::from(byte),
        false => char::from_u32(256 + (0..byte).filter(|&other| !printable(other)).count() as u32).unwrap(),
    }
}

/// GGUF metadata of a byte-level vocabulary: id = byte, then [`CONTROL`], without merges.
pub fn byte_metadata() -> Metadata {
    let tokens = (0..=255).map(|byte| stand_in(byte).to_string()).chain(CONTROL.map(str::to_owned));
    let kinds = (0..256 + CONTROL.len()).map(|id| Value::I32(if id < 256 { 1 } else { 3 }));
    let entries = [
        ("model", Value::String("gpt2".to_owned())),
        ("pre", Value::String("gpt-2".to_owned())),
        ("tokens", Value::Array(tokens.map(Value::String).collect())),
        ("token_type", Value::Array(kinds.collect())),
        ("merges", Value::Array(Vec::new())),
        ("bos_token_id", Value::U32(256 + 7)),
        ("eos_token_id", Value::U32(256 + 2)),
    ];
    entries.into_iter().map(|(key, value)| (format!("tokenizer.ggml.{key}"), value)).collect()
}

/// The tokenizer of [`byte_metadata`].
pub fn byte_tokenizer() -> Tokenizer {
    Tokenizer::from_gguf(&byte_metadata(), "bytes").unwrap()
}
