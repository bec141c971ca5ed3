//! Vocabularies in the form of tiktoken: `tekken.json` of Mistral, and `*.tiktoken` or `tokenizer.model` files of lines with a token in
//! base64 and its rank (Llama 3 as Meta publishes it, Kimi).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::Deserialize;
use serde_json::Value;
use tokenizers::AddedToken;
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::sequence::Sequence as PreTokenizers;

use super::added::AddedTokens;
use super::directory::{MAX_VOCABULARY, read_json};
use super::gguf::isolate;
use super::pieces::Pieces;
use super::pre_tokenizers::word_rule;
use super::ranked::RankedVocabulary;
use super::steps::Steps;
use super::{Tokenizer, TokenizerError};
use crate::error::excerpt;
use crate::files;

/// Mistral's file.
pub(super) const TEKKEN: &str = "tekken.json";
/// What files of ranks are called, or end with.
const RANK_FILES: [&str; 2] = [".tiktoken", "tiktoken.model"];
/// SentencePiece models have this name, too.
const TOKENIZER_MODEL: &str = "tokenizer.model";

/// How text is cut into words is in the code that belongs to such files. By `model_type`, the rule of the same name in GGUF files.
const WORD_RULES: &[(&str, &str)] =
    &[("llama", "llama3"), ("kimi_k2", "kimi-k2"), ("kimi_k25", "kimi-k2"), ("kimi_linear", "kimi-k2")];

/// Special tokens of Llama 3, which come after the vocabulary, and how many there are with the reserved ones.
const LLAMA3: [&str; 11] = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|step_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
];
const LLAMA3_SPECIAL: usize = 256;

/// Special tokens of a `tekken.json` that lists none (versions up to 7), in the order of their ids.
const TEKKEN_SPECIAL: [&str; 20] = [
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
];

#[derive(Deserialize)]
struct Tekken {
    config: TekkenConfig,
    vocab: Vec<TekkenToken>,
    #[serde(default)]
    special_tokens: Option<Vec<TekkenSpecial>>,
}

#[derive(Deserialize)]
struct TekkenConfig {
    pattern: String,
    default_vocab_size: usize,
    default_num_special_tokens: usize,
}

#[derive(Deserialize)]
struct TekkenToken {
    rank: usize,
    token_bytes: String,
}

#[derive(Deserialize)]
struct TekkenSpecial {
    rank: usize,
    token_str: String,
}

impl Tokenizer {
    /// Reads a vocabulary of tiktoken's kind; `None` if the directory has none.
    pub(super) fn from_ranks(directory: &Path) -> Result<Option<Self>, TokenizerError> {
        let tekken = directory.join(TEKKEN);
        if let Some(json) = files::read(&tekken)? {
            return Self::from_tekken(&json, &tekken.display().to_string()).map(Some);
        }
        let Some(path) = rank_file(directory) else { return Ok(None) };
        let place = path.display().to_string();
        let Some(bytes) = files::read(&path)? else { return Ok(None) };
        let Some(vocabulary) = lines(&bytes, &place)? else { return Ok(None) };
        let config = read_json(&directory.join("config.json"))?;
        let model_type = config["model_type"].as_str().or(config["text_config"]["model_type"].as_str());
        let rule =
            WORD_RULES.iter().find(|(known, _)| Some(*known) == model_type).and_then(|(_, name)| word_rule(name));
        let rule = rule.ok_or_else(|| TokenizerError::Unsupported {
            place: place.clone(),
            what: format!("a tiktoken vocabulary of model type {:?}", model_type.unwrap_or("(none)")),
        })?;
        let config_path = directory.join("tokenizer_config.json");
        let special = listed_special(&read_json(&config_path)?)
            .map_err(|reason| TokenizerError::invalid(config_path.display(), reason))?;
        let special = match (special.is_empty(), model_type) {
            (true, Some("llama")) => llama3_special(vocabulary.len()),
            _ => special,
        };
        let mut tokenizer = Self::ranked(vocabulary, special, rule.patterns, &place)?;
        if rule.adds_bos {
            tokenizer.name_and_prefix("bos_token", LLAMA3[0]);
        }
        Ok(Some(tokenizer))
    }

    /// From the content of a `tekken.json`: special tokens come first, then the vocabulary by rank.
    fn from_tekken(json: &[u8], place: &str) -> Result<Self, TokenizerError> {
        let invalid = |reason: String| TokenizerError::invalid(place, reason);
        let Tekken { config, vocab, special_tokens } = serde_json::from_value(crate::json::parse(json, place)?)
            .map_err(|error| TokenizerError::invalid(place, error))?;
        let TekkenConfig { pattern, default_vocab_size: size, default_num_special_tokens: reserved } = config;
        if size > MAX_VOCABULARY || reserved > size || vocab.len() < size - reserved {
            return Err(invalid(format!(
                "{} tokens and {reserved} special ones for a vocabulary of {size}",
                vocab.len()
            )));
        }
        let mut special: BTreeMap<u32, String> =
            (0..reserved as u32).map(|id| (id, format!("<SPECIAL_{id}>"))).collect();
        let listed = match special_tokens {
            Some(listed) => listed.into_iter().map(|token| (token.rank, token.token_str)).collect(),
            None => TEKKEN_SPECIAL.iter().map(|text| text.to_string()).enumerate().collect::<Vec<_>>(),
        };
        for (rank, text) in listed {
            if rank >= reserved {
                return Err(invalid(format!("special token {text:?} has rank {rank} of {reserved}")));
            }
            let reserved_text = format!("<SPECIAL_{rank}>");
            if special.insert(rank as u32, text).is_some_and(|before| before != reserved_text) {
                return Err(invalid(format!("two special tokens have rank {rank}")));
            }
        }
        let mut vocabulary = BTreeMap::new();
        for token in vocab.into_iter().filter(|token| token.rank < size - reserved) {
            let bytes = BASE64
                .decode(&token.token_bytes)
                .map_err(|error| invalid(format!("token of rank {}: {error}", token.rank)))?;
            if vocabulary.insert((reserved + token.rank) as u32, bytes).is_some() {
                return Err(invalid(format!("two tokens have rank {}", token.rank)));
            }
        }
        if vocabulary.len() != size - reserved {
            let (found, expected) = (vocabulary.len(), size - reserved);
            return Err(invalid(format!("{found} tokens have ranks below {expected}, which should be as many")));
        }
        let mut tokenizer = Self::ranked(vocabulary, special, &[&pattern], place)?;
        tokenizer.name_and_prefix("bos_token", "<s>");
        for (name, text) in [("eos_token", "</s>"), ("unk_token", "<unk>"), ("pad_token", "<pad>")] {
            if tokenizer.added.id(text).is_some() {
                tokenizer.named.insert(name.to_owned(), text.to_owned());
            }
        }
        Ok(tokenizer)
    }

    /// From tokens by id, special ones apart, and the expressions that cut text into words.
    fn ranked(
        vocabulary: BTreeMap<u32, Vec<u8>>,
        special: BTreeMap<u32, String>,
        patterns: &[&str],
        place: &str,
    ) -> Result<Self, TokenizerError> {
        check_unique(&vocabulary, &special).map_err(|reason| TokenizerError::invalid(place, reason))?;
        let mut pipeline = tokenizers::Tokenizer::new(BPE::default());
        pipeline.with_pre_tokenizer(Some(PreTokenizers::new(isolate(patterns)?)));
        let ids = vocabulary.keys().chain(special.keys());
        let size = ids.max().map_or(0, |&highest| highest as usize + 1);
        if size > MAX_VOCABULARY {
            return Err(TokenizerError::invalid(place, format!("token id {} is out of range", size - 1)));
        }
        let bytes = |id| match special.get(&id) {
            Some(text) => text.clone().into_bytes(),
            None => vocabulary.get(&id).cloned().unwrap_or_default(),
        };
        let pieces = Pieces::new((0..size as u32).map(bytes), place)?;
        let tokens = special.into_iter().map(|(id, text)| (id, AddedToken::from(text, true).normalized(false)));
        let steps = Steps::of(&pipeline, place)?;
        Ok(Self {
            added: AddedTokens::new(tokens, |_| true, &steps)?,
            pipeline,
            steps,
            ranked: Some(RankedVocabulary::new(vocabulary.into_iter().map(|(id, bytes)| (bytes, id)))),
            pieces,
            space_before_text: false,
            prefix: Vec::new(),
            named: BTreeMap::new(),
            end_tokens: BTreeSet::new(),
        })
    }

    /// Names a special token that prompts begin with, where there is one of this text.
    fn name_and_prefix(&mut self, name: &str, text: &str) {
        if let Some(id) = self.added.id(text) {
            self.named.insert(name.to_owned(), text.to_owned());
            self.prefix = vec![id];
        }
    }
}

/// The file of ranks in a directory.
fn rank_file(directory: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(directory).ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut names: Vec<String> = entries.collect();
    names.sort();
    let ranks = names.iter().find(|name| RANK_FILES.iter().any(|ending| name.ends_with(ending)));
    let name = ranks.or_else(|| names.iter().find(|name| *name == TOKENIZER_MODEL))?;
    Some(directory.join(name))
}

/// Tokens by rank; `None` for a file of another kind, such as SentencePiece's.
fn lines(bytes: &[u8], place: &str) -> Result<Option<BTreeMap<u32, Vec<u8>>>, TokenizerError> {
    let Ok(text) = std::str::from_utf8(bytes) else { return Ok(None) };
    let mut vocabulary = BTreeMap::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.is_empty()) {
        let parsed = line.split_once(' ').and_then(|(token, rank)| {
            let rank: u32 = rank.trim().parse().ok()?;
            Some((rank, BASE64.decode(token).ok()?))
        });
        if parsed.is_none() && vocabulary.is_empty() {
            return Ok(None);
        }
        if parsed.is_none_or(|(rank, token)| vocabulary.insert(rank, token).is_some()) {
            let reason = format!("line {}: no token in base64 with a rank of its own", number + 1);
            return Err(TokenizerError::invalid(place, reason));
        }
    }
    Ok((!vocabulary.is_empty()).then_some(vocabulary))
}

/// Checks that no token has two ids, and no id two tokens.
///
/// # Errors
/// The token.
fn check_unique(vocabulary: &BTreeMap<u32, Vec<u8>>, special: &BTreeMap<u32, String>) -> Result<(), String> {
    let mut ids: HashMap<&[u8], u32> = HashMap::new();
    for (&id, bytes) in vocabulary {
        let text = String::from_utf8_lossy(bytes);
        if bytes.is_empty() {
            return Err(format!("token {id} is empty"));
        }
        if let Some(other) = ids.insert(bytes, id) {
            return Err(format!("tokens {other} and {id} are both {:?}", excerpt(&text)));
        }
    }
    let mut ids: HashMap<&str, u32> = HashMap::new();
    for (&id, text) in special {
        if vocabulary.contains_key(&id) {
            return Err(format!("special token {:?} has id {id}, which is that of another", excerpt(text)));
        }
        if let Some(other) = ids.insert(text, id) {
            return Err(format!("special tokens {other} and {id} are both {:?}", excerpt(text)));
        }
    }
    Ok(())
}

/// `added_tokens_decoder` of a `tokenizer_config.json`: texts by id.
///
/// # Errors
/// What is no such entry.
fn listed_special(config: &Value) -> Result<BTreeMap<u32, String>, String> {
    const KEY: &str = "added_tokens_decoder";
    let entries = match &config[KEY] {
        Value::Null => return Ok(BTreeMap::new()),
        Value::Object(entries) => entries,
        other => return Err(format!("{KEY}: is {}, not an object", excerpt(&other.to_string()))),
    };
    let entry = |(id, token): (&String, &Value)| Some((id.parse().ok()?, token["content"].as_str()?.to_owned()));
    let wrong = |id: &str| format!("{KEY}: {:?} is no id with a content", excerpt(id));
    entries.iter().map(|found| entry(found).ok_or_else(|| wrong(found.0))).collect()
}

fn llama3_special(first: usize) -> BTreeMap<u32, String> {
    let reserved = (2..).map(|number| format!("<|reserved_special_token_{number}|>"));
    let texts = LLAMA3.iter().map(|text| text.to_string()).chain(reserved).take(LLAMA3_SPECIAL);
    (first as u32..).zip(texts).collect()
}
