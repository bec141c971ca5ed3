//! Text to token ids and back.
//!
//! The `tokenizers` crate supplies the algorithms (BPE, normalizers, pre-tokenizers). This module reads what models are published
//! with (`tokenizer.json`, GGUF metadata, tiktoken files) and holds what serving needs and that crate doesn't give:
//!
//! * Text that only looks like a control token stays text, also in the middle of a prompt that has real ones
//!   ([`Tokenizer::encode_parts`]).
//! * Decoding in a stream equals decoding the whole ([`Decoder`]), and every token's bytes are known.
//! * Nothing truncates or pads, and the beginning-of-text token comes once.

mod added;
mod decoder;
mod directory;
mod export;
mod gguf;
mod pieces;
mod pre_tokenizers;
mod ranked;
mod steps;
mod tiktoken;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;

use tokenizers::tokenizer::pre_tokenizer::OffsetType;
use tokenizers::{Model, Token};

use added::AddedTokens;
pub use decoder::Decoder;
pub use gguf::Metadata;
use pieces::Pieces;
use ranked::RankedVocabulary;
pub use steps::is_guarded;
use steps::{Budget, Step, Steps};

use crate::CheckpointError;
use crate::gguf::{Gguf, open_parts};

/// What went wrong with a tokenizer. Each variant names the file or the metadata key.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// A model without a tokenizer.
    #[error("{path}: no tokenizer (looked for {looked_for}); pass token ids with --tokens, or fetch the missing file")]
    Missing {
        /// The model.
        path: String,
        /// File names or metadata keys.
        looked_for: &'static str,
    },
    /// A file or a metadata value that is not what it should be.
    #[error("{place}: {reason}")]
    Invalid {
        /// The file or the metadata key.
        place: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A kind of tokenizer that Consort doesn't know.
    #[error("{place}: {what} is not supported; pass token ids with --tokens")]
    Unsupported {
        /// The file or the metadata key.
        place: String,
        /// The kind.
        what: String,
    },
    /// A file that cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The `tokenizers` crate failed.
    #[error("tokenizer: {0}")]
    Library(String),
}

impl TokenizerError {
    fn library(error: impl std::fmt::Display) -> Self {
        Self::Library(error.to_string())
    }

    fn invalid(place: impl std::fmt::Display, reason: impl std::fmt::Display) -> Self {
        Self::Invalid { place: place.to_string(), reason: reason.to_string() }
    }
}

/// A model's tokenizer.
pub struct Tokenizer {
    /// The model. The pipeline's own added tokens, truncation and padding are never used.
    pipeline: tokenizers::Tokenizer,
    /// The pipeline's normalizers and pre-tokenizers.
    steps: Steps,
    /// In place of the pipeline's model, where the vocabulary is one of tiktoken's.
    ranked: Option<RankedVocabulary>,
    added: AddedTokens,
    pieces: Pieces,
    /// Whether SentencePiece put a space before the text, which decoding takes away again.
    space_before_text: bool,
    /// Put before a prompt: beginning of text, for models that were trained with it.
    prefix: Vec<u32>,
    /// By the names that chat templates use: `bos_token`, `eos_token`, `pad_token`, ...
    named: BTreeMap<String, String>,
    end_tokens: BTreeSet<u32>,
}

impl Tokenizer {
    /// Reads the tokenizer of a model: a directory, or a GGUF file (any part of a split one).
    ///
    /// # Errors
    /// No tokenizer, files that cannot be read, or a kind of tokenizer that is unknown here.
    pub fn open(model: &Path) -> Result<Self, TokenizerError> {
        if model.is_dir() {
            return Self::from_directory(model);
        }
        let gguf = open_parts(model).and_then(|parts| Gguf::read(&parts))?;
        Self::from_gguf(gguf.metadata(), &model.display().to_string())
    }

    /// Token ids of `text`, without the beginning-of-text token.
    ///
    /// With `special`, control tokens in the text are taken as such (text of a template, or a raw prompt whose author may
    /// write them); without, they are encoded like any other text (text of a user).
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, TokenizerError> {
        let everywhere = 0..text.len();
        self.encode_parts(text, if special { std::slice::from_ref(&everywhere) } else { &[] })
    }

    /// Token ids of a raw prompt: [`Tokenizer::encode`] after the beginning-of-text token, if the model wants one and the text
    /// doesn't begin with it already.
    pub fn encode_prompt(&self, text: &str, special: bool) -> Result<Vec<u32>, TokenizerError> {
        let ids = self.encode(text, special)?;
        Ok(if ids.starts_with(&self.prefix) { ids } else { [self.prefix.as_slice(), &ids].concat() })
    }

    /// Token ids of `text` as a whole, where control tokens count only inside `scaffold`: byte ranges in ascending order, on
    /// character boundaries. A control token is never found across two ranges, even if they touch.
    ///
    /// Encoding the whole at once keeps the tokens that reach over the seams (`\n` of a template and ` a` of a user).
    pub fn encode_parts(&self, text: &str, scaffold: &[Range<usize>]) -> Result<Vec<u32>, TokenizerError> {
        let budget = Budget::of(text.len());
        let split = || self.added.split(text, scaffold, &self.steps, &budget);
        let mut pieces = self.steps.guard(&|| Step::only("normalizer"), split)?;
        self.steps.pre_tokenize(&mut pieces, &budget)?;
        let model = self.pipeline.get_model();
        self.steps.guard(&|| Step::only("model"), || {
            pieces.tokenize(|piece| match &self.ranked {
                None => model.tokenize(piece.get()),
                Some(ranked) => {
                    let ids = ranked.encode(piece.get().as_bytes());
                    let ids = ids.map_err(|byte| format!("the vocabulary has no token for byte {byte:#04x}"))?;
                    Ok(ids.into_iter().map(|id| Token::new(id, String::new(), (0, 0))).collect())
                }
            })?;
            Ok(pieces.into_encoding(None, 0, OffsetType::None)?.get_ids().to_vec())
        })
    }

    /// The text of `tokens`, control tokens included. Bytes that are no UTF-8 become U+FFFD.
    pub fn decode(&self, tokens: &[u32]) -> String {
        let mut decoder = self.decoder();
        let mut text: String = tokens.iter().map(|&token| decoder.push(token)).collect();
        text.push_str(&decoder.finish());
        text
    }

    /// A decoder for a text that begins with the next token.
    pub fn decoder(&self) -> Decoder<'_> {
        Decoder::new(self, true)
    }

    /// A decoder for what a model writes after a prompt: a space before the first word belongs to the text.
    pub fn continuation_decoder(&self) -> Decoder<'_> {
        Decoder::new(self, false)
    }

    /// The bytes that a token stands for, possibly a part of a character; empty for an id beyond the vocabulary.
    pub fn token_bytes(&self, token: u32) -> &[u8] {
        self.pieces.get(token)
    }

    /// The id of a token whose text is exactly `text`: an added token first, then any other.
    pub fn token_id(&self, text: &str) -> Option<u32> {
        self.added.id(text).or_else(|| match &self.ranked {
            None => self.pipeline.get_model().token_to_id(text),
            Some(ranked) => ranked.id(text.as_bytes()),
        })
    }

    /// One more than the highest token id. A model's logits can be longer.
    pub fn vocabulary_size(&self) -> usize {
        self.pieces.len()
    }

    /// Whether `token` steers the model rather than standing for text.
    pub fn is_control(&self, token: u32) -> bool {
        self.added.is_control(token)
    }

    /// The literal texts of the control tokens.
    pub fn control_texts(&self) -> impl Iterator<Item = &str> {
        self.added.control_texts()
    }

    /// Where the first text that reads like a control token begins in `text`.
    pub fn find_control(&self, text: &str) -> Option<usize> {
        self.added.find_control(text)
    }

    /// The tokens that end a generation: the union of every source that the model is published with.
    pub fn end_tokens(&self) -> &BTreeSet<u32> {
        &self.end_tokens
    }

    /// The beginning-of-text token, where prompts start with one.
    pub fn prefix(&self) -> &[u32] {
        &self.prefix
    }

    /// Special tokens by the names that chat templates use: `bos_token`, `eos_token`, ...
    pub fn named_tokens(&self) -> &BTreeMap<String, String> {
        &self.named
    }
}
