//! Tokenizers of model directories: `tokenizer.json` and the files around it that name special tokens.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::{Map, Value};
use tokenizers::{AddedToken, Encoding, Model, Token};

use super::added::{self, AddedTokens, steers};
use super::pieces::{Pieces, Spelling};
use super::steps::{Step, Steps, check_charsmaps, guarded};
use super::{Tokenizer, TokenizerError};
use crate::error::excerpt;
use crate::{config, files, json};

/// The parts of a `tokenizer.json` that are read by the `tokenizers` crate. Truncation and padding are left over from training in
/// many published files; a prompt is never cut or filled up. Added tokens have ids of their own.
const SECTIONS: [&str; 6] = ["version", "normalizer", "pre_tokenizer", "post_processor", "decoder", "model"];
/// Left over from training, too: it makes the tokens of a text differ from time to time.
const DROPOUT: &str = "dropout";

/// The special tokens that prompts and answers need. Others are names for templates.
const USED_TOKENS: [&str; 2] = ["bos_token", "eos_token"];

/// Far above any published vocabulary; ids beyond it are a damaged or hostile file.
pub(super) const MAX_VOCABULARY: usize = 1 << 24;

impl Tokenizer {
    /// Reads the tokenizer of a model directory: `tokenizer.json`, `tekken.json` or a vocabulary of tiktoken's, with the special tokens that `tokenizer_config.json`,
    /// `special_tokens_map.json`, `config.json` and `generation_config.json` name.
    ///
    /// # Errors
    /// No tokenizer in the directory, files that cannot be read, or a kind of tokenizer that is unknown here.
    pub fn from_directory(directory: &Path) -> Result<Self, TokenizerError> {
        let path = directory.join("tokenizer.json");
        let tokenizer = match files::read(&path)? {
            Some(json) => Some(Self::from_json(&json, &path.display().to_string())?),
            None => Self::from_ranks(directory)?,
        };
        let mut tokenizer = tokenizer.ok_or_else(|| TokenizerError::Missing {
            path: directory.display().to_string(),
            looked_for: "tokenizer.json, tekken.json, or a tiktoken vocabulary",
        })?;
        tokenizer.name_special_tokens(directory)?;
        Ok(tokenizer)
    }

    /// From the content of a `tokenizer.json`; `place` names it in errors. No token is known to end a generation yet.
    ///
    /// # Errors
    /// JSON that is no tokenizer, or one of a kind that is unknown here.
    pub fn from_json(json_bytes: &[u8], place: &str) -> Result<Self, TokenizerError> {
        let mut sections = json::parse_object(json_bytes, place)?;
        check_sections(&sections).map_err(|reason| TokenizerError::invalid(place, reason))?;
        let declared = sections.remove("added_tokens").unwrap_or_default();
        sections.retain(|key, _| SECTIONS.contains(&key.as_str()));
        if let Some(model) = sections.get_mut("model").and_then(Value::as_object_mut) {
            model.remove(DROPOUT);
        }
        let parsed = guarded(|| Ok(serde_json::from_value::<tokenizers::Tokenizer>(sections.into())?));
        let pipeline = parsed.map_err(|error| TokenizerError::invalid(place, error))?;
        let steps = Steps::of(&pipeline, place)?;
        steps.try_out()?;

        let (spelling, space_before_text) = spelling(&pipeline, place)?;
        let model = pipeline.get_model();
        let literal =
            added::declared(declared, model, spelling).map_err(|reason| TokenizerError::invalid(place, reason))?;
        let size = 1 + model.get_vocab().into_values().chain(literal.keys().copied()).max().unwrap_or(0) as usize;
        if size > MAX_VOCABULARY {
            return Err(TokenizerError::invalid(place, format!("token id {} is out of range", size - 1)));
        }
        let bytes = |id| match literal.get(&id) {
            Some(token) => token.content.clone().into_bytes(),
            None => model.id_to_token(id).map(|piece| spelling.bytes(&piece)).unwrap_or_default(),
        };
        let pieces = Pieces::new((0..size as u32).map(bytes), place)?;
        let is_control =
            |token: &AddedToken| token.special || model.token_to_id(&token.content).is_none() && steers(&token.content);
        let added = AddedTokens::new(literal, is_control, &steps)?;
        let prefix = steps.guard(&|| Step::only("post-processor"), || prompt_prefix(&pipeline))?;
        Ok(Self {
            pipeline,
            steps,
            ranked: None,
            added,
            pieces,
            space_before_text,
            prefix,
            named: BTreeMap::new(),
            end_tokens: BTreeSet::new(),
        })
    }

    fn name_special_tokens(&mut self, directory: &Path) -> Result<(), TokenizerError> {
        // Where the tokens that are used are named last.
        let mut places = BTreeMap::new();
        let mut adds_begin = None;
        for file in ["special_tokens_map.json", "tokenizer_config.json"] {
            let path = directory.join(file);
            for (name, value) in read_json(&path)?.as_object().into_iter().flatten().filter(|(_, it)| !it.is_null()) {
                let wrong = |what: &str| {
                    let found = value.to_string();
                    TokenizerError::invalid(path.display(), format!("{name}: is {}, {what}", excerpt(&found)))
                };
                let text = value.as_str().or_else(|| value.get("content")?.as_str());
                if name == "add_bos_token" {
                    adds_begin = Some(value.as_bool().ok_or_else(|| wrong("neither true nor false"))?);
                } else if USED_TOKENS.contains(&name.as_str()) {
                    text.ok_or_else(|| wrong("neither a text nor an object with a content"))?;
                    places.insert(name.clone(), path.clone());
                }
                // An empty text names none, as null does.
                if let Some(text) = text.filter(|text| name.ends_with("_token") && !text.is_empty()) {
                    self.named.insert(name.clone(), text.to_owned());
                }
            }
        }
        for (name, path) in places {
            if let Some(text) = self.named.get(&name).filter(|text| self.token_id(text).is_none()) {
                let reason = format!("{name}: {:?} is no token of the vocabulary", excerpt(text));
                return Err(TokenizerError::invalid(path.display(), reason));
            }
        }
        match (adds_begin, self.named.get("bos_token")) {
            (Some(false), _) => self.prefix.clear(),
            (Some(true), Some(begin)) if self.prefix.is_empty() => self.prefix.extend(self.token_id(begin)),
            _ => {}
        }

        self.end_tokens.extend(self.named.get("eos_token").and_then(|eos| self.token_id(eos)));
        for name in ["config.json", "generation_config.json"] {
            let path = directory.join(name);
            let holder = read_json(&path)?;
            for value in
                [holder.get("eos_token_id"), holder.get("text_config").and_then(|inner| inner.get("eos_token_id"))]
            {
                let wrong = |reason| TokenizerError::invalid(path.display(), format!("eos_token_id: {reason}"));
                self.end_tokens.extend(config::end_tokens(value).map_err(wrong)?.into_iter().map(|id| id as u32));
            }
        }
        Ok(())
    }
}

/// How the vocabulary is spelled, and whether the text begins with a space that isn't its own: what the decoder undoes.
fn spelling(pipeline: &tokenizers::Tokenizer, place: &str) -> Result<(Spelling, bool), TokenizerError> {
    let decoder = serde_json::to_value(pipeline.get_decoder()).map_err(TokenizerError::library)?;
    let steps = match decoder.get("decoders") {
        Some(Value::Array(steps)) => steps.as_slice(),
        _ => std::slice::from_ref(&decoder),
    };
    let step = |kind: &str| steps.iter().find(|step| step["type"] == kind);
    if step("ByteLevel").is_some() {
        return Ok((Spelling::ByteLevel, false));
    }
    if let Some(metaspace) = step("Metaspace") {
        if metaspace["replacement"] != "▁" {
            let what = format!("decoder Metaspace with {}", metaspace["replacement"]);
            return Err(TokenizerError::Unsupported { place: place.to_owned(), what });
        }
        return Ok((Spelling::SentencePiece, metaspace["prepend_scheme"] != "never"));
    }
    if step("ByteFallback").is_some() || step("Replace").is_some() {
        let undoes_spaces = |step: &&Value| step["pattern"]["String"] == "▁" && step["content"] == " ";
        if let Some(other) = steps.iter().find(|step| step["type"] == "Replace" && !undoes_spaces(step)) {
            let what = format!("decoder Replace of {} by {}", other["pattern"], other["content"]);
            return Err(TokenizerError::Unsupported { place: place.to_owned(), what });
        }
        let strips = step("Strip").is_some_and(|strip| strip["content"] == " " && strip["start"] != 0);
        return Ok((Spelling::SentencePiece, strips));
    }
    Err(TokenizerError::Unsupported { place: place.to_owned(), what: format!("decoder {}", decoder["type"]) })
}

/// The most tokens that a post-processor may make of one. Published ones add two or three.
const MAX_POST_PROCESSED: usize = 256;
/// The most characters that a piece of a word is looked for in; usually 100.
const MAX_WORD_CHARACTERS: u64 = 10_000;

/// Looks for what the `tokenizers` crate would take without limit.
fn check_sections(sections: &Map<String, Value>) -> Result<(), String> {
    let section = |key| sections.get(key).unwrap_or(&Value::Null);
    check_charsmaps(section("normalizer"))?;
    let processor = section("post_processor");
    if post_processed(processor) > MAX_POST_PROCESSED {
        return Err(format!("post-processor: makes more than {MAX_POST_PROCESSED} tokens of one"));
    }
    let model = section("model");
    for key in ["continuing_subword_prefix", "end_of_word_suffix"] {
        if let Some(text) = model[key].as_str().filter(|text| text.len() > MAX_POST_PROCESSED) {
            return Err(format!("model: {key} has {} bytes", text.len()));
        }
    }
    match model["max_input_chars_per_word"].as_u64() {
        Some(characters) if characters > MAX_WORD_CHARACTERS => {
            Err(format!("model: max_input_chars_per_word is {characters}; {MAX_WORD_CHARACTERS} at most are taken"))
        }
        _ => Ok(()),
    }
}

/// How many tokens a post-processor makes of one, at most.
fn post_processed(processor: &Value) -> usize {
    if let Some(steps) = processor["processors"].as_array() {
        return steps.iter().map(post_processed).fold(1, usize::saturating_mul);
    }
    let Some(template) = processor["single"].as_array() else { return 3 };
    let tokens = template.iter().map(|piece| match piece["SpecialToken"]["id"].as_str() {
        Some(id) => processor["special_tokens"][id]["ids"].as_array().map_or(1, Vec::len),
        None => 1,
    });
    tokens.fold(1, usize::saturating_add)
}

/// What the post-processor puts before a text. What it puts after one ends the text, and a prompt goes on.
fn prompt_prefix(pipeline: &tokenizers::Tokenizer) -> tokenizers::Result<Vec<u32>> {
    let text = Encoding::from_tokens(vec![Token::new(0, "a".to_owned(), (0, 1))], 0);
    let whole = pipeline.post_process(text, None, true)?;
    let ids = whole.get_ids().iter().zip(whole.get_special_tokens_mask());
    Ok(ids.take_while(|&(_, &special)| special == 1).map(|(&id, _)| id).collect())
}

/// The members of a JSON file, of which there are none if the file is absent.
pub(super) fn read_json(path: &Path) -> Result<Value, TokenizerError> {
    let members =
        files::read(path)?.map(|bytes| json::parse_object(&bytes, &path.display().to_string())).transpose()?;
    Ok(members.unwrap_or_default().into())
}
