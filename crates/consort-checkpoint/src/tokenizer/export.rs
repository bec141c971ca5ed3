//! The tokenizer of a GGUF file as the files that other programs read: `tokenizer.json`, `tokenizer_config.json` and the chat template.

use serde_json::{Map, Value as Json, json};

use super::gguf::{Keys, Metadata, Recipe, Vocabulary, kind, recipe};
use super::pieces::Spelling;
use super::{Tokenizer, TokenizerError};
use crate::gguf::Value;

impl Tokenizer {
    /// Names and contents of the files that describe the tokenizer of a GGUF header; `place` names the file in errors.
    ///
    /// # Errors
    /// Like [`Tokenizer::from_gguf`].
    pub fn export(metadata: &Metadata, place: &str) -> Result<Vec<(&'static str, String)>, TokenizerError> {
        let tokenizer = Self::from_gguf(metadata, place)?;
        let keys = Keys { metadata, place };
        let vocabulary = Vocabulary::read(&keys)?;
        let recipe = recipe(&keys, &vocabulary)?;
        let mut json = serde_json::to_value(&recipe.pipeline).map_err(TokenizerError::library)?;
        let added = added_tokens(&vocabulary, &mut json["model"]["vocab"]);
        json["added_tokens"] = added.into();
        json["decoder"] = decoder(&recipe);
        json["post_processor"] = post_processor(&tokenizer);
        let mut files = vec![("tokenizer.json", json.to_string())];

        let mut config = Map::new();
        config.insert("tokenizer_class".into(), "PreTrainedTokenizerFast".into());
        config.insert("add_bos_token".into(), (!tokenizer.prefix.is_empty()).into());
        config.insert("clean_up_tokenization_spaces".into(), false.into());
        for name in ["bos_token", "eos_token", "unk_token", "pad_token", "mask_token"] {
            config.extend(tokenizer.named.get(name).map(|text| (name.to_owned(), json!(text))));
        }
        files.push(("tokenizer_config.json", format!("{:#}\n", Json::Object(config))));
        if let Some(template) = metadata.get("tokenizer.chat_template").and_then(Value::as_str) {
            files.push(("chat_template.jinja", template.to_owned()));
        }
        if !tokenizer.end_tokens.is_empty() {
            let generation = json!({ "eos_token_id": tokenizer.end_tokens });
            files.push(("generation_config.json", format!("{generation:#}\n")));
        }
        Ok(files)
    }
}

/// The added tokens, with their ids.
///
/// A reader gives an added token the id that it has in the vocabulary, or else the next one after it. Those at the end of the
/// vocabulary, where published files have what was added to steer a model, are left to the second way: what is not in the
/// vocabulary is no text. Others are put into it.
fn added_tokens(vocabulary: &Vocabulary<'_>, known: &mut Json) -> Vec<Json> {
    const UNUSED: u64 = 5;
    let is_added = |id: usize| matches!(vocabulary.kinds[id], kind::CONTROL | kind::USER_DEFINED);
    let size = vocabulary.texts.len();
    let end = (0..size).rev().find(|&id| vocabulary.kinds[id] != UNUSED).map_or(0, |last| last + 1);
    let mut first = (0..end).rev().find(|&id| !is_added(id)).map_or(0, |last| last + 1);
    let Some(ids) = known.as_object_mut() else { return Vec::new() };
    ids.retain(|_, id| id.as_u64() < Some(end as u64));
    let in_vocabulary = |id: usize| is_added(id) || vocabulary.kinds[id] == UNUSED;
    // Texts that occur twice would leave fewer entries than ids, and what follows would be counted from there.
    let entries = (0..first).map(|id| vocabulary.texts[id]).collect::<std::collections::HashSet<_>>().len();
    if entries != first {
        first = end;
    }
    ids.retain(|_, id| id.as_u64() < Some(first as u64));
    for id in (0..first).filter(|&id| in_vocabulary(id)) {
        ids.entry(vocabulary.texts[id]).or_insert(id.into());
    }
    let entry = |id: usize| {
        json!({
            "id": id,
            "content": vocabulary.texts[id],
            "single_word": false,
            "lstrip": false,
            "rstrip": false,
            "normalized": false,
            "special": vocabulary.kinds[id] == kind::CONTROL,
        })
    };
    (0..end).filter(|&id| is_added(id)).map(entry).collect()
}

/// What undoes the spelling of the vocabulary.
fn decoder(recipe: &Recipe) -> Json {
    match recipe.spelling {
        Spelling::ByteLevel => {
            json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true })
        }
        Spelling::SentencePiece => {
            let mut steps = vec![
                json!({ "type": "Replace", "pattern": { "String": "▁" }, "content": " " }),
                json!({ "type": "ByteFallback" }),
                json!({ "type": "Fuse" }),
            ];
            if recipe.space_before_text {
                steps.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
            }
            json!({ "type": "Sequence", "decoders": steps })
        }
    }
}

/// What puts the beginning-of-text token before a text.
fn post_processor(tokenizer: &Tokenizer) -> Json {
    let (Some(&id), Some(text)) = (tokenizer.prefix.first(), tokenizer.named.get("bos_token")) else {
        return Json::Null;
    };
    let begin = json!({ "SpecialToken": { "id": text, "type_id": 0 } });
    let sequence = |name: &str, kind: u8| json!({ "Sequence": { "id": name, "type_id": kind } });
    json!({
        "type": "TemplateProcessing",
        "single": [begin, sequence("A", 0)],
        "pair": [begin, sequence("A", 0), sequence("B", 1)],
        "special_tokens": { text: { "id": text, "ids": [id], "tokens": [text] } },
    })
}
