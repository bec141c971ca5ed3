//! Tokenizers of GGUF files, put together from the keys under `tokenizer.ggml`.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use tokenizers::models::bpe::{BPE, BpeBuilder, Vocab};
use tokenizers::normalizers::{Prepend, Replace, Sequence as Normalizers};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence as PreTokenizers;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::SplitDelimiterBehavior::Isolated;
use tokenizers::{AddedToken, NormalizerWrapper, PreTokenizerWrapper};

use super::added::{AddedTokens, steers};
use super::directory::MAX_VOCABULARY;
use super::pieces::{Pieces, Spelling};
use super::pre_tokenizers::word_rule;
use super::steps::Steps;
use super::{Tokenizer, TokenizerError};
use crate::gguf::Value;

/// Key-value pairs of a GGUF header.
pub type Metadata = BTreeMap<String, Value>;

/// `tokenizer.ggml.token_type`.
pub(super) mod kind {
    pub const NORMAL: u64 = 1;
    pub const UNKNOWN: u64 = 2;
    pub const CONTROL: u64 = 3;
    pub const USER_DEFINED: u64 = 4;
}

/// Keys of single tokens: the name that chat templates use, the key, and whether the token ends a generation.
const NAMED: [(&str, &str, bool); 7] = [
    ("bos_token", "bos_token_id", false),
    ("eos_token", "eos_token_id", true),
    ("eot_token", "eot_token_id", true),
    ("eom_token", "eom_token_id", true),
    ("unk_token", "unknown_token_id", false),
    ("pad_token", "padding_token_id", false),
    ("mask_token", "mask_token_id", false),
];

impl Tokenizer {
    /// Builds the tokenizer that a GGUF header describes; `place` names the file in errors.
    ///
    /// # Errors
    /// Keys that are missing or contradict each other, and kinds of tokenizer that are unknown here.
    pub fn from_gguf(metadata: &Metadata, place: &str) -> Result<Self, TokenizerError> {
        let keys = Keys { metadata, place };
        if keys.get("model").is_none() {
            return Err(TokenizerError::Missing { path: place.to_owned(), looked_for: "tokenizer.ggml.model" });
        }
        let vocabulary = Vocabulary::read(&keys)?;
        let recipe = recipe(&keys, &vocabulary)?;
        let steps = Steps::of(&recipe.pipeline, place)?;
        let added = AddedTokens::new(
            vocabulary.added(),
            |token| token.special || is_control_text(recipe.spelling, &token.content),
            &steps,
        )?;
        let literal = |id: usize| match recipe.spelling {
            Spelling::ByteLevel => matches!(vocabulary.kinds[id], kind::CONTROL | kind::USER_DEFINED),
            Spelling::SentencePiece => vocabulary.kinds[id] == kind::CONTROL,
        };
        let pieces = Pieces::new(
            vocabulary
                .texts
                .iter()
                .enumerate()
                .map(|(id, text)| if literal(id) { text.as_bytes().to_vec() } else { recipe.spelling.bytes(text) }),
            place,
        )?;
        let mut tokenizer = Self {
            pipeline: recipe.pipeline,
            steps,
            ranked: None,
            added,
            pieces,
            space_before_text: recipe.space_before_text,
            prefix: Vec::new(),
            named: BTreeMap::new(),
            end_tokens: BTreeSet::new(),
        };
        for (name, key, ends) in NAMED {
            let given = keys.get(key).and_then(Value::as_u64);
            let default = recipe.defaults.iter().find(|(default, _)| *default == name).map(|&(_, id)| id);
            let Some(id) = given.or(default).map(|id| id as usize) else { continue };
            let Some(text) = vocabulary.texts.get(id) else { continue };
            tokenizer.named.insert(name.to_owned(), (*text).to_owned());
            tokenizer.end_tokens.extend(ends.then_some(id as u32));
            let adds_bos = keys.get("add_bos_token").and_then(Value::as_bool).unwrap_or(recipe.adds_bos);
            tokenizer.prefix.extend((name == "bos_token" && adds_bos).then_some(id as u32));
        }
        Ok(tokenizer)
    }
}

/// Whether a user-defined token steers the model. SentencePiece vocabularies have HTML tags among theirs, which are text.
fn is_control_text(spelling: Spelling, text: &str) -> bool {
    match spelling {
        Spelling::ByteLevel => steers(text),
        Spelling::SentencePiece => {
            matches!(text, "<s>" | "</s>") || text.starts_with('<') && text.ends_with('>') && text.contains(['|', '｜'])
        }
    }
}

/// The keys under `tokenizer.ggml`.
pub(super) struct Keys<'a> {
    pub metadata: &'a Metadata,
    pub place: &'a str,
}

impl<'a> Keys<'a> {
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.metadata.get(&format!("tokenizer.ggml.{key}"))
    }

    fn array<T>(&self, key: &str, element: impl Fn(&'a Value) -> Option<T>) -> Result<Vec<T>, TokenizerError> {
        let array = self.get(key).and_then(Value::as_array).ok_or_else(|| self.invalid(key, "missing, or no array"))?;
        let elements: Option<_> = array.iter().map(element).collect();
        elements.ok_or_else(|| self.invalid(key, "has elements of the wrong type"))
    }

    fn invalid(&self, key: &str, reason: impl std::fmt::Display) -> TokenizerError {
        TokenizerError::invalid(format_args!("{}: tokenizer.ggml.{key}", self.place), reason)
    }

    fn unsupported(&self, what: String) -> TokenizerError {
        TokenizerError::Unsupported { place: self.place.to_owned(), what }
    }
}

/// `tokens` and `token_type`, of one length.
pub(super) struct Vocabulary<'a> {
    pub texts: Vec<&'a str>,
    pub kinds: Vec<u64>,
}

impl<'a> Vocabulary<'a> {
    pub fn read(keys: &Keys<'a>) -> Result<Self, TokenizerError> {
        let texts = keys.array("tokens", Value::as_str)?;
        if texts.is_empty() || texts.len() > MAX_VOCABULARY {
            return Err(keys.invalid("tokens", format!("{} tokens", texts.len())));
        }
        let kinds = match keys.get("token_type") {
            Some(_) => keys.array("token_type", Value::as_u64)?,
            None => vec![kind::NORMAL; texts.len()],
        };
        if kinds.len() != texts.len() {
            let reason = format!("{} types for {} tokens", kinds.len(), texts.len());
            return Err(keys.invalid("token_type", reason));
        }
        Ok(Self { texts, kinds })
    }

    /// What the model may put text together from. Control tokens are left out, so that no text can become one.
    fn of_model(&self) -> impl Iterator<Item = (usize, &'a str)> {
        self.texts.iter().copied().enumerate().filter(|&(id, _)| self.kinds[id] != kind::CONTROL)
    }

    fn added(&self) -> impl Iterator<Item = (u32, AddedToken)> {
        self.texts.iter().zip(&self.kinds).enumerate().filter_map(|(id, (text, &kind))| {
            let special = kind == kind::CONTROL;
            let token = AddedToken::from(*text, special).normalized(false);
            (special || kind == kind::USER_DEFINED).then_some((id as u32, token))
        })
    }

    fn unknown_token(&self) -> Option<String> {
        let id = self.kinds.iter().position(|&kind| kind == kind::UNKNOWN)?;
        Some(self.texts[id].to_owned())
    }
}

/// What a kind of tokenizer is made of.
pub(super) struct Recipe {
    pub pipeline: tokenizers::Tokenizer,
    pub spelling: Spelling,
    pub space_before_text: bool,
    /// Where the file doesn't say.
    adds_bos: bool,
    defaults: &'static [(&'static str, u64)],
}

/// Puts the pipeline together that `tokenizer.ggml.model` names.
pub(super) fn recipe(keys: &Keys, vocabulary: &Vocabulary) -> Result<Recipe, TokenizerError> {
    match keys.get("model").and_then(Value::as_str).unwrap_or_default() {
        "gpt2" => byte_level(keys, vocabulary),
        "gemma4" => merged_sentence_piece(keys, vocabulary),
        "llama" => scored_sentence_piece(keys, vocabulary),
        other => Err(keys.unsupported(format!("tokenizer model {other:?}"))),
    }
}

/// GPT-2's way: words by regular expressions, then merges over bytes.
fn byte_level(keys: &Keys, vocabulary: &Vocabulary) -> Result<Recipe, TokenizerError> {
    let name = keys.get("pre").and_then(Value::as_str).unwrap_or_default();
    let rule = word_rule(name).ok_or_else(|| keys.unsupported(format!("pre-tokenizer {name:?}")))?;
    let bpe = BPE::builder().ignore_merges(rule.whole_words);
    let mut pipeline = pipeline(bpe, vocabulary, listed_merges(keys, vocabulary)?)?;
    let mut steps = isolate(rule.patterns)?;
    steps.push(PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, false, false)));
    pipeline.with_pre_tokenizer(Some(PreTokenizers::new(steps)));
    Ok(Recipe {
        pipeline,
        spelling: Spelling::ByteLevel,
        space_before_text: false,
        adds_bos: rule.adds_bos,
        defaults: &[],
    })
}

/// SentencePiece's spelling with a list of merges: Gemma since its fourth version.
fn merged_sentence_piece(keys: &Keys, vocabulary: &Vocabulary) -> Result<Recipe, TokenizerError> {
    // No word crosses a line; runs of newlines are tokens as they stand.
    let bpe = BPE::builder().byte_fallback(true).ignore_merges(true);
    let mut pipeline = pipeline(bpe, vocabulary, listed_merges(keys, vocabulary)?)?;
    pipeline.with_pre_tokenizer(Some(PreTokenizers::new(isolate(&[r"[^\n]+|\n+"])?)));
    pipeline.with_normalizer(Some(space_marks(false)?)).map_err(TokenizerError::library)?;
    Ok(Recipe { pipeline, spelling: Spelling::SentencePiece, space_before_text: false, adds_bos: true, defaults: &[] })
}

/// SentencePiece's own way: of all neighbours in the text, the pair that makes the piece with the highest score is joined first.
fn scored_sentence_piece(keys: &Keys, vocabulary: &Vocabulary) -> Result<Recipe, TokenizerError> {
    let scores = keys.array("scores", Value::as_f64)?;
    if scores.len() != vocabulary.texts.len() {
        let reason = format!("{} scores for {} tokens", scores.len(), vocabulary.texts.len());
        return Err(keys.invalid("scores", reason));
    }
    let mut bpe = BPE::builder().byte_fallback(true).fuse_unk(true);
    if let Some(unknown) = vocabulary.unknown_token() {
        bpe = bpe.unk_token(unknown);
    }
    let mut pipeline = pipeline(bpe, vocabulary, scored_merges(vocabulary, &scores))?;
    let space_before_text = keys.get("add_space_prefix").and_then(Value::as_bool).unwrap_or(true);
    pipeline.with_normalizer(Some(space_marks(space_before_text)?)).map_err(TokenizerError::library)?;
    Ok(Recipe {
        pipeline,
        spelling: Spelling::SentencePiece,
        space_before_text,
        adds_bos: true,
        defaults: &[("bos_token", 1), ("eos_token", 2), ("unk_token", 0)],
    })
}

type Merges = Vec<(String, String)>;

fn pipeline(bpe: BpeBuilder, vocabulary: &Vocabulary, merges: Merges) -> Result<tokenizers::Tokenizer, TokenizerError> {
    let ids: Vocab = vocabulary.of_model().map(|(id, text)| (text.to_owned(), id as u32)).collect();
    let bpe = bpe.vocab_and_merges(ids, merges).build().map_err(TokenizerError::library)?;
    Ok(tokenizers::Tokenizer::new(bpe))
}

/// `merges`, in order of rank, without those of control tokens.
fn listed_merges(keys: &Keys, vocabulary: &Vocabulary) -> Result<Merges, TokenizerError> {
    if keys.get("merges").is_none() {
        // The words of a vocabulary without merges cannot be known.
        return Err(TokenizerError::Missing { path: keys.place.to_owned(), looked_for: "tokenizer.ggml.merges" });
    }
    let known: HashSet<&str> = vocabulary.of_model().map(|(_, text)| text).collect();
    let mut merges = Vec::new();
    for merge in keys.array("merges", Value::as_str)? {
        // The first part may itself begin with a space.
        let space = merge.char_indices().skip(1).find(|&(_, character)| character == ' ').map(|(at, _)| at);
        let (left, right) = space
            .map(|at| (&merge[..at], &merge[at + 1..]))
            .ok_or_else(|| keys.invalid("merges", format!("{merge:?} is no pair")))?;
        if known.contains(format!("{left}{right}").as_str()) {
            merges.push((left.to_owned(), right.to_owned()));
        }
    }
    Ok(merges)
}

/// Every way to put a piece together from two others, the best pieces first.
fn scored_merges(vocabulary: &Vocabulary, scores: &[f64]) -> Merges {
    let known: HashSet<&str> = vocabulary.of_model().map(|(_, text)| text).collect();
    let mut pieces: Vec<_> = vocabulary.of_model().collect();
    pieces.sort_by(|&(left, _), &(right, _)| scores[right].total_cmp(&scores[left]).then(left.cmp(&right)));
    let splits = pieces
        .into_iter()
        .flat_map(|(_, piece)| piece.char_indices().skip(1).map(|(at, _)| piece.split_at(at)).collect::<Vec<_>>());
    splits
        .filter(|(left, right)| known.contains(left) && known.contains(right))
        .map(|(left, right)| (left.to_owned(), right.to_owned()))
        .collect()
}

/// `▁` for every space, and one before the text if asked for.
fn space_marks(before_text: bool) -> Result<Normalizers, TokenizerError> {
    let mut steps: Vec<NormalizerWrapper> = Vec::new();
    if before_text {
        steps.push(Prepend::new("▁".to_owned()).into());
    }
    steps.push(Replace::new(" ", "▁").map_err(TokenizerError::library)?.into());
    Ok(Normalizers::new(steps))
}

pub(super) fn isolate(patterns: &[&str]) -> Result<Vec<PreTokenizerWrapper>, TokenizerError> {
    let split = |pattern: &&str| Split::new(SplitPattern::Regex((*pattern).to_owned()), Isolated, false);
    patterns.iter().map(|pattern| split(pattern).map(Into::into).map_err(TokenizerError::library)).collect()
}
