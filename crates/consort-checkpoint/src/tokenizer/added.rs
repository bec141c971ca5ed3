//! Added tokens: the ones that a tokenizer finds in a text before its model sees the rest.
//!
//! The `tokenizers` crate matches them wherever they occur, also in text that a user typed. Here they are of two kinds.
//! **Control** tokens (`<|im_end|>`, `<think>`) steer the model and count only where the caller says so; **ordinary** ones (runs
//! of spaces, HTML tags in some vocabularies) are plain compressions of text and count everywhere.

use std::collections::HashSet;
use std::ops::Range;

use aho_corasick::{AhoCorasick, MatchKind};
use tokenizers::tokenizer::normalizer::Range as NormalizedRange;
use tokenizers::{AddedToken, NormalizedString, NormalizerWrapper, PreTokenizedString, Token};

use super::TokenizerError;

/// The added tokens of one tokenizer, ready for matching.
pub(super) struct AddedTokens {
    control: Matcher,
    control_ids: HashSet<u32>,
    ordinary: Matcher,
    /// Ordinary tokens that are looked for after normalization, in their normalized spelling.
    ordinary_normalized: Matcher,
}

impl AddedTokens {
    /// Sorts `tokens` into their kinds; `is_control` decides.
    pub(super) fn new(
        tokens: impl IntoIterator<Item = (u32, AddedToken)>,
        is_control: impl Fn(&AddedToken) -> bool,
        normalizer: Option<&NormalizerWrapper>,
    ) -> Result<Self, TokenizerError> {
        let mut control_ids = HashSet::new();
        let (mut control, mut ordinary, mut ordinary_normalized) = (Vec::new(), Vec::new(), Vec::new());
        for (id, token) in tokens {
            if token.content.is_empty() {
                continue;
            }
            if is_control(&token) {
                control_ids.insert(id);
                // A single character can't be told from text.
                if token.content.chars().nth(1).is_some() {
                    control.push((token.content.clone(), id, token));
                }
            } else if token.normalized {
                let mut pattern = NormalizedString::from(token.content.as_str());
                normalize(normalizer, &mut pattern).map_err(TokenizerError::library)?;
                ordinary_normalized.push((pattern.get().to_owned(), id, token));
            } else {
                ordinary.push((token.content.clone(), id, token));
            }
        }
        Ok(Self {
            control_ids,
            control: Matcher::new(control)?,
            ordinary: Matcher::new(ordinary)?,
            ordinary_normalized: Matcher::new(ordinary_normalized)?,
        })
    }

    /// Whether `id` is a control token.
    pub(super) fn is_control(&self, id: u32) -> bool {
        self.control_ids.contains(&id)
    }

    /// The literal texts of all control tokens.
    pub(super) fn control_texts(&self) -> impl Iterator<Item = &str> {
        self.control.tokens.iter().map(|entry| entry.token.content.as_str())
    }

    /// Where the first control token in `text` begins.
    pub(super) fn find_control(&self, text: &str) -> Option<usize> {
        self.control.automaton.as_ref()?.find(text).map(|hit| hit.start())
    }

    /// Cuts `text` at its added tokens and normalizes the rest. Control tokens are found only inside `control_ranges`
    /// (byte ranges, ascending, on character boundaries), and never across two of them.
    pub(super) fn split(
        &self,
        text: &str,
        control_ranges: &[Range<usize>],
        normalizer: Option<&NormalizerWrapper>,
    ) -> tokenizers::Result<PreTokenizedString> {
        let mut pieces = PreTokenizedString::from(text);
        pieces.split(|_, whole| Ok(cut(&whole, self.control.find(text, control_ranges))))?;
        let everywhere = |piece: &NormalizedString| [0..piece.get().len()];
        pieces.split(|_, piece| Ok(cut(&piece, self.ordinary.find(piece.get(), &everywhere(&piece)))))?;
        pieces.split(|_, mut piece| {
            normalize(normalizer, &mut piece)?;
            Ok(cut(&piece, self.ordinary_normalized.find(piece.get(), &everywhere(&piece))))
        })?;
        Ok(pieces)
    }
}

/// Whether a token that the model's own vocabulary lacks was added to steer it. Publishers mark only some of these as special
/// (not `<think>`, `<tool_call>`, `<｜User｜>`); the others that are added, white space and single characters, are text.
pub(super) fn steers(text: &str) -> bool {
    !text.trim().is_empty() && text.chars().nth(1).is_some()
}

fn normalize(normalizer: Option<&NormalizerWrapper>, text: &mut NormalizedString) -> tokenizers::Result<()> {
    match normalizer {
        Some(normalizer) => tokenizers::Normalizer::normalize(normalizer, text),
        None => Ok(()),
    }
}

/// Finds a set of literal texts, the longest first where several begin at one place.
struct Matcher {
    automaton: Option<AhoCorasick>,
    tokens: Vec<Entry>,
}

struct Entry {
    id: u32,
    token: AddedToken,
}

impl Matcher {
    fn new(patterns: Vec<(String, u32, AddedToken)>) -> Result<Self, TokenizerError> {
        let automaton = match patterns.as_slice() {
            [] => None,
            patterns => Some(
                AhoCorasick::builder()
                    .match_kind(MatchKind::LeftmostLongest)
                    .build(patterns.iter().map(|(text, ..)| text))
                    .map_err(TokenizerError::library)?,
            ),
        };
        let tokens = patterns.into_iter().map(|(_, id, token)| Entry { id, token }).collect();
        Ok(Self { automaton, tokens })
    }

    /// The tokens inside `ranges` of `text`, ascending and disjoint, widened by the white space that they swallow.
    fn find(&self, text: &str, ranges: &[Range<usize>]) -> Vec<(u32, Range<usize>)> {
        let Some(automaton) = &self.automaton else { return Vec::new() };
        let mut found: Vec<(u32, Range<usize>)> = Vec::new();
        for range in ranges {
            for hit in automaton.find_iter(&text[range.clone()]) {
                let Entry { id, token } = &self.tokens[hit.pattern().as_usize()];
                let (start, end) = (range.start + hit.start(), range.start + hit.end());
                let taken = found.last().map_or(0, |(_, last)| last.end);
                let (before, after) = (&text[..start], &text[end..]);
                if start < taken
                    || token.single_word
                        && (before.ends_with(is_word_character) || after.starts_with(is_word_character))
                {
                    continue;
                }
                let start = if token.lstrip { before.trim_end().len().max(taken) } else { start };
                let end = if token.rstrip { text.len() - after.trim_start().len() } else { end };
                found.push((*id, start..end));
            }
        }
        found
    }
}

/// What a token that must stand alone may not touch.
fn is_word_character(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

/// Cuts `text` into the given tokens and what lies between them.
fn cut(text: &NormalizedString, found: Vec<(u32, Range<usize>)>) -> Vec<(NormalizedString, Option<Vec<Token>>)> {
    let slice = |range: Range<usize>| {
        text.slice(NormalizedRange::Normalized(range)).expect("matches lie inside the text, on character boundaries")
    };
    let mut pieces = Vec::with_capacity(2 * found.len() + 1);
    let mut position = 0;
    for (id, range) in found {
        if position < range.start {
            pieces.push((slice(position..range.start), None));
        }
        position = range.end;
        let token = slice(range);
        let value = token.get().to_owned();
        let offsets = (0, value.len());
        pieces.push((token, Some(vec![Token::new(id, value, offsets)])));
    }
    let length_bytes = text.get().len();
    if position < length_bytes {
        pieces.push((slice(position..length_bytes), None));
    }
    pieces
}
