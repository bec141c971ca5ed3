//! Added tokens: the ones that a tokenizer finds in a text before its model sees the rest.
//!
//! The `tokenizers` crate matches them wherever they occur, also in text that a user typed. Here they are of two kinds.
//! **Control** tokens (`<|im_end|>`, `<think>`) steer the model and count only where the caller says so; **ordinary** ones (runs
//! of spaces, HTML tags in some vocabularies) are plain compressions of text and count everywhere.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;

use aho_corasick::{AhoCorasick, MatchKind};
use serde::Deserialize;
use serde_json::Value as Json;
use tokenizers::tokenizer::normalizer::Range as NormalizedRange;
use tokenizers::{AddedToken, Model, NormalizedString, PreTokenizedString, Token};

use super::TokenizerError;
use super::pieces::Spelling;
use super::steps::{Budget, Steps};
use crate::error::excerpt;

/// The added tokens of one tokenizer, ready for matching.
pub(super) struct AddedTokens {
    control: Matcher,
    control_ids: HashSet<u32>,
    /// Of all of them, also those that are never looked for in a text.
    ids: HashMap<String, u32>,
    ordinary: Matcher,
    /// Ordinary tokens that are looked for after normalization, in their normalized spelling.
    ordinary_normalized: Matcher,
}

impl AddedTokens {
    /// Sorts `tokens` into their kinds; `is_control` decides.
    pub(super) fn new(
        tokens: impl IntoIterator<Item = (u32, AddedToken)>,
        is_control: impl Fn(&AddedToken) -> bool,
        steps: &Steps,
    ) -> Result<Self, TokenizerError> {
        let tokens = tokens.into_iter().filter(|(_, token)| !token.content.is_empty());
        let (steering, text): (Vec<_>, Vec<_>) = tokens.partition(|(_, token)| is_control(token));
        let mut ids = HashMap::new();
        for (id, token) in steering.iter().chain(&text) {
            ids.entry(token.content.clone()).or_insert(*id);
        }
        let control_ids = steering.iter().map(|(id, _)| *id).collect();
        // A single character can't be told from text.
        let longer = steering.into_iter().filter(|(_, token)| token.content.chars().nth(1).is_some());
        let control = longer.map(|(id, token)| (token.content.clone(), id, token)).collect();
        let (mut ordinary, mut ordinary_normalized) = (Vec::new(), Vec::new());
        for (id, token) in text {
            if token.normalized {
                let mut pattern = NormalizedString::from(token.content.as_str());
                steps.normalize(&mut pattern, &Budget::of(token.content.len()))?;
                ordinary_normalized.push((pattern.get().to_owned(), id, token));
            } else {
                ordinary.push((token.content.clone(), id, token));
            }
        }
        Ok(Self {
            control_ids,
            ids,
            control: Matcher::new(control)?,
            ordinary: Matcher::new(ordinary)?,
            ordinary_normalized: Matcher::new(ordinary_normalized)?,
        })
    }

    /// Whether `id` is a control token.
    pub(super) fn is_control(&self, id: u32) -> bool {
        self.control_ids.contains(&id)
    }

    /// The id of the added token with this text: a control token, or else an ordinary one.
    pub(super) fn id(&self, text: &str) -> Option<u32> {
        self.ids.get(text).copied()
    }

    /// The literal texts of all control tokens.
    pub(super) fn control_texts(&self) -> impl Iterator<Item = &str> {
        self.control.tokens.iter().map(|entry| entry.token.content.as_str())
    }

    /// Where the first control token in `text` begins.
    pub(super) fn find_control(&self, text: &str) -> Option<usize> {
        self.control.automaton.as_ref()?.find(text).map(|hit| hit.start())
    }

    /// Cuts `text` at its added tokens and normalizes the rest, at the cost of `budget`. Control tokens are found only inside `control_ranges`
    /// (byte ranges, ascending, on character boundaries), and never across two of them.
    pub(super) fn split(
        &self,
        text: &str,
        control_ranges: &[Range<usize>],
        steps: &Steps,
        budget: &Budget,
    ) -> tokenizers::Result<PreTokenizedString> {
        let mut pieces = PreTokenizedString::from(text);
        let everywhere = [0..text.len()];
        let literal = find(text, &[(&self.control, control_ranges), (&self.ordinary, &everywhere)]);
        pieces.split(|_, whole| cut(&whole, &literal))?;
        pieces.split(|_, mut piece| {
            steps.normalize(&mut piece, budget)?;
            let everywhere = [0..piece.get().len()];
            cut(&piece, &find(piece.get(), &[(&self.ordinary_normalized, &everywhere)]))
        })?;
        Ok(pieces)
    }
}

/// An added token as a `tokenizer.json` lists it.
#[derive(Deserialize)]
struct Declared {
    id: u32,
    #[serde(flatten)]
    token: AddedToken,
}

/// The added tokens that a `tokenizer.json` declares, by the ids that it gives them.
///
/// The `tokenizers` crate numbers those that are not in the vocabulary of the model anew, in the order of the list; where the list
/// is out of order or has gaps, these are not the ids that the model was trained with.
///
/// # Errors
/// An id that the vocabulary or the list contradicts; an entry that is no token.
pub(super) fn declared(
    list: Json,
    model: &impl Model,
    spelling: Spelling,
) -> Result<BTreeMap<u32, AddedToken>, String> {
    let list: Option<Vec<Declared>> = serde_json::from_value(list).map_err(|error| format!("added_tokens: {error}"))?;
    let mut tokens: BTreeMap<u32, AddedToken> = BTreeMap::new();
    let mut ids: HashMap<String, u32> = HashMap::new();
    for Declared { id, token } in list.into_iter().flatten().filter(|entry| !entry.token.content.is_empty()) {
        let text = token.content.as_str();
        let wrong = |reason: String| format!("added token {:?} has id {id}, {reason}", excerpt(text));
        if let Some(other) = model.token_to_id(text).or_else(|| ids.get(text).copied()).filter(|&other| other != id) {
            return Err(wrong(format!("but also id {other}")));
        }
        let of_model = model.id_to_token(id).filter(|piece| piece != text && spelling.bytes(piece) != text.as_bytes());
        let other = of_model.or_else(|| Some(tokens.get(&id)?.content.clone()).filter(|other| other != text));
        if let Some(other) = other {
            return Err(wrong(format!("which is that of {:?}", excerpt(&other))));
        }
        ids.insert(token.content.clone(), id);
        tokens.entry(id).or_insert(token);
    }
    Ok(tokens)
}

/// Whether a token that the model's own vocabulary lacks was added to steer it. Publishers mark only some of these as special
/// (not `<think>`, `<tool_call>`, `<｜User｜>`); the others that are added, white space and single characters, are text.
pub(super) fn steers(text: &str) -> bool {
    !text.trim().is_empty() && text.chars().nth(1).is_some()
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

/// A literal text that was found, and where.
#[derive(Clone)]
struct Hit<'m> {
    entry: &'m Entry,
    range: Range<usize>,
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

    /// The first hit that begins at `from` or later and lies in one of `ranges` (ascending and disjoint).
    fn next<'m>(&'m self, text: &str, ranges: &[Range<usize>], from: usize) -> Option<Hit<'m>> {
        let automaton = self.automaton.as_ref()?;
        let first = ranges.partition_point(|range| range.end <= from);
        ranges[first..].iter().find_map(|range| {
            let start = range.start.max(from);
            let hit = automaton.find(&text[start..range.end])?;
            Some(Hit { entry: &self.tokens[hit.pattern().as_usize()], range: start + hit.start()..start + hit.end() })
        })
    }
}

/// The tokens that matchers find, each in its ranges, as if one matcher looked for all of them: at each place the longest, and
/// the next after its end; widened by the white space that they swallow.
///
/// A token of white space is found in what the token before it swallowed, too. So it is in the `tokenizers` crate, and models
/// have been trained on what comes out.
fn find(text: &str, searched: &[(&Matcher, &[Range<usize>])]) -> Vec<(u32, Range<usize>)> {
    let mut found = Vec::new();
    let mut taken = 0;
    let mut ahead: Vec<Option<Hit<'_>>> =
        searched.iter().map(|(matcher, ranges)| matcher.next(text, ranges, 0)).collect();
    while let Some(Hit { entry: Entry { id, token }, range }) =
        ahead.iter().flatten().min_by_key(|hit| (hit.range.start, Reverse(hit.range.end))).cloned()
    {
        for ((matcher, ranges), ahead) in searched.iter().zip(&mut ahead) {
            if ahead.as_ref().is_some_and(|hit| hit.range.start < range.end) {
                *ahead = matcher.next(text, ranges, range.end);
            }
        }
        let (before, after) = (&text[..range.start], &text[range.end..]);
        let touches_word =
            before.ends_with(regex_syntax::is_word_character) || after.starts_with(regex_syntax::is_word_character);
        if token.single_word && touches_word {
            continue;
        }
        let start = if token.lstrip { before.trim_end().len().max(taken) } else { range.start };
        taken = if token.rstrip { text.len() - after.trim_start().len() } else { range.end };
        found.push((*id, start..taken));
    }
    found
}

/// A piece of text, and the token that it is.
type Cut = (NormalizedString, Option<Vec<Token>>);

/// Cuts `text` into the given tokens and what lies between them.
fn cut(text: &NormalizedString, found: &[(u32, Range<usize>)]) -> tokenizers::Result<Vec<Cut>> {
    // Matches lie inside the text, on character boundaries, but normalizers may have lost what a part of it was made of.
    let slice = |range: Range<usize>| {
        text.slice(NormalizedRange::Normalized(range)).ok_or("its normalizers lose track of the text")
    };
    let mut pieces = Vec::with_capacity(2 * found.len() + 1);
    let mut position = 0;
    for (id, range) in found {
        if position < range.start {
            pieces.push((slice(position..range.start)?, None));
        }
        position = range.end;
        let token = slice(range.clone())?;
        let value = token.get().to_owned();
        let offsets = (0, value.len());
        pieces.push((token, Some(vec![Token::new(*id, value, offsets)])));
    }
    let length_bytes = text.get().len();
    if position < length_bytes {
        pieces.push((slice(position..length_bytes)?, None));
    }
    Ok(pieces)
}
