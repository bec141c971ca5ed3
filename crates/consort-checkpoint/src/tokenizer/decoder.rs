//! From tokens back to text, one token at a time.

use super::Tokenizer;

/// Turns a stream of tokens into text as soon as it is certain.
///
/// Bytes of a character whose rest has not come yet are held back; bytes that can no longer become a character are replaced by
/// U+FFFD, as [`String::from_utf8_lossy`] does. The pieces put together are always [`Tokenizer::decode`] of the whole.
pub struct Decoder<'a> {
    tokenizer: &'a Tokenizer,
    /// The begun character: at most three bytes.
    pending: Vec<u8>,
    /// Whether the next token's first space is the one that SentencePiece put before the text.
    at_start: bool,
}

impl<'a> Decoder<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer, at_start: bool) -> Self {
        Self { tokenizer, pending: Vec::new(), at_start }
    }

    /// Takes the next token and returns the text that it completes, which may be empty.
    pub fn push(&mut self, token: u32) -> String {
        let mut bytes = self.tokenizer.token_bytes(token);
        // A token without text, such as an id beyond the vocabulary, does not begin it.
        if !bytes.is_empty() && std::mem::take(&mut self.at_start) && self.tokenizer.space_before_text {
            bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
        }
        self.pending.extend_from_slice(bytes);
        let mut text = String::new();
        let mut rest = 0;
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            rest += chunk.valid().len();
            if is_begun_character(chunk.invalid()) && rest + chunk.invalid().len() == self.pending.len() {
                break;
            }
            if !chunk.invalid().is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
            }
            rest += chunk.invalid().len();
        }
        self.pending.drain(..rest);
        text
    }

    /// Ends the stream: a character that never got its last bytes becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        text
    }
}

/// Whether more bytes could still turn `bytes` into one character.
fn is_begun_character(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}
