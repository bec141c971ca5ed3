//! What each token stands for, in bytes.
//!
//! A vocabulary spells its tokens in one of two ways: **byte-level** (GPT-2 and its heirs), where each byte is one printable
//! character, or as **SentencePiece** does, where `▁` is a space and `<0x0A>` a byte. Once the spelling is undone, decoding is
//! nothing but joining bytes, and a stream and a whole cannot differ.

use std::sync::LazyLock;

use super::TokenizerError;

/// Published tokens have a few hundred bytes at most, and a model may write one as often as it likes.
const MAX_TOKEN_BYTES: usize = 4096;

/// How a vocabulary spells the bytes of its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spelling {
    /// One printable character for each byte.
    ByteLevel,
    /// `▁` for a space, `<0xNN>` for a byte that no piece has.
    SentencePiece,
}

/// The bytes of every token, by id.
pub(super) struct Pieces {
    bytes: Vec<u8>,
    /// `ends[id]` is where the bytes of `id` end; they begin where the ones before it end.
    ends: Vec<usize>,
}

impl Pieces {
    /// From one entry per id, ascending, each already in bytes; `place` names their file in errors.
    ///
    /// # Errors
    /// A token far longer than any that is published.
    pub(super) fn new(entries: impl IntoIterator<Item = Vec<u8>>, place: &str) -> Result<Self, TokenizerError> {
        let (mut bytes, mut ends) = (Vec::new(), Vec::new());
        for entry in entries {
            if entry.len() > MAX_TOKEN_BYTES {
                let (id, bytes) = (ends.len(), entry.len());
                let reason = format!("token {id} has {bytes} bytes; {MAX_TOKEN_BYTES} at most are taken");
                return Err(TokenizerError::invalid(place, reason));
            }
            bytes.extend_from_slice(&entry);
            ends.push(bytes.len());
        }
        Ok(Self { bytes, ends })
    }

    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    /// The bytes of `id`; none for an id beyond the vocabulary (logits are often padded to a round size).
    pub(super) fn get(&self, id: u32) -> &[u8] {
        let id = id as usize;
        let Some(&end) = self.ends.get(id) else { return &[] };
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        &self.bytes[start..end]
    }
}

impl Spelling {
    /// Undoes the spelling of one token of the model's own vocabulary.
    pub(super) fn bytes(self, piece: &str) -> Vec<u8> {
        match self {
            // A character outside the alphabet marks a token that was added as it reads.
            Spelling::ByteLevel => {
                piece.chars().map(byte_of).collect::<Option<_>>().unwrap_or_else(|| piece.as_bytes().to_vec())
            }
            Spelling::SentencePiece => match byte_piece(piece) {
                Some(byte) => vec![byte],
                None => piece.replace('▁', " ").into_bytes(),
            },
        }
    }
}

/// `<0x0A>` -> 10.
fn byte_piece(piece: &str) -> Option<u8> {
    let digits = piece.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok()).flatten()
}

fn byte_of(character: char) -> Option<u8> {
    /// GPT-2's alphabet: printable Latin-1 stands for itself; the other 68 bytes, in order, take U+0100 to U+0143.
    static SHIFTED: LazyLock<Vec<u8>> = LazyLock::new(|| (0..=255).filter(|&byte| !is_printable(byte)).collect());
    match u32::from(character) {
        code @ 0..=0xFF => Some(code as u8).filter(|&byte| is_printable(byte)),
        code => SHIFTED.get(code as usize - 0x100).copied(),
    }
}

fn is_printable(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF)
}
