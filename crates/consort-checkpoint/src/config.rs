//! `config.json` and its companions, made uniform.
//!
//! Wrappers of vision and audio models nest the language model's configuration; end tokens are listed in two files. Keys that
//! nobody asks for stay and do no harm.

use std::collections::BTreeSet;

use serde_json::{Map, Value as Json};

use crate::error::excerpt;
use crate::{CheckpointError, quantization};

/// Keys under which wrappers keep the language model's configuration.
const NESTED: &[&str] = &["text_config", "language_config", "llm_config"];

/// The keys that speak of the weights of all parts: those of a wrapper and of the model inside it must agree.
const OF_ALL_PARTS: &[&str] = quantization::BLOCKS;

/// Two keys for one number, of which a file may have both.
const SAME: &[(&str, &str)] = &[("experts_per_token", "num_experts_per_tok"), ("num_local_experts", "num_experts")];

/// What published configurations leave to their readers' defaults, by `model_type`: those of transformers 5.24 (`Gemma3TextConfig`).
const DEFAULTS: &[(&str, &[(&str, u64)])] = &[(
    "gemma3_text",
    &[
        ("vocab_size", 262_208),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 4),
        ("head_dim", 256),
        ("max_position_embeddings", 131_072),
    ],
)];

/// Keys that begin so are our own: what was done to the weights on the way here.
const OWN: &str = "consort_";

/// A `config.json` as its publishers mean it: our own keys mean nothing in it.
pub(crate) fn published(config: Map<String, Json>) -> Map<String, Json> {
    let mut config = config;
    config.retain(|key, _| !key.starts_with(OWN));
    for key in NESTED {
        if let Some(Json::Object(inner)) = config.get_mut(*key) {
            inner.retain(|key, _| !key.starts_with(OWN));
        }
    }
    config
}

const TIED: &str = "tie_word_embeddings";

/// The language model's configuration: nested keys come up and win over the wrapper's; `eos_token_id` becomes the list of
/// all end tokens of `config.json` and `generation_config.json`, which is given with its path.
///
/// # Errors
/// [`CheckpointError::Config`] for a `model_type` that is missing or no text, a nested configuration that is no object, two
/// different quantization blocks, end tokens that are none.
pub(crate) fn normalise(
    mut outer: Map<String, Json>,
    generation: Option<(&Map<String, Json>, &str)>,
    path: &str,
) -> Result<Map<String, Json>, CheckpointError> {
    let wrong = |key: &str, reason: String| CheckpointError::config(path, key, reason);
    let mut ends = Vec::new();
    let mut given = vec![(path, "eos_token_id".to_owned(), outer.get("eos_token_id").cloned())];
    let mut present = NESTED.iter().filter(|key| outer.get(**key).is_some_and(|inner| !inner.is_null()));
    if let (Some(one), Some(other)) = (present.next(), present.next()) {
        return Err(wrong(other, format!("is there beside {one}; remove the one that is not meant")));
    }
    let nested = NESTED.iter().find_map(|key| Some((*key, outer.remove(*key).filter(|inner| !inner.is_null())?)));
    match nested {
        Some((key, Json::Object(inner))) => {
            given.push((path, format!("{key}.eos_token_id"), inner.get("eos_token_id").cloned()));
            let differs = |block: &&&str| {
                let values =
                    [outer.get(**block), inner.get(**block)].map(|value| value.filter(|value| !value.is_null()));
                matches!(values, [Some(one), Some(other)] if one != other)
            };
            if let Some(block) = OF_ALL_PARTS.iter().find(differs) {
                return Err(wrong(block, format!("differs from {key}.{block}; remove the one that is not meant")));
            }
            // It loses against the inner one, but a word that nobody understands is no choice.
            if let Some(tied) = outer.get(TIED).filter(|tied| !tied.is_null() && !tied.is_boolean()) {
                return Err(wrong(TIED, format!("is {}, neither true nor false", excerpt(&tied.to_string()))));
            }
            if let Some(wrapper) = outer.get("model_type").cloned() {
                outer.insert("consort_wrapper_model_type".into(), wrapper);
            }
            outer.extend(inner.into_iter().filter(|(_, value)| !value.is_null()));
        }
        Some((key, other)) => return Err(wrong(key, format!("is {}, not an object", excerpt(&other.to_string())))),
        None => {}
    }
    if let Some((generation, path)) = generation {
        given.push((path, "eos_token_id".to_owned(), generation.get("eos_token_id").cloned()));
    }
    let value = |key: &str| outer.get(key).filter(|value| !value.is_null());
    for (one, other) in SAME {
        if let (Some(value), Some(expected)) = (value(one), value(other))
            && value != expected
        {
            let [value, expected] = [value, expected].map(Json::to_string);
            return Err(wrong(one, format!("is {}, but {other} is {}", excerpt(&value), excerpt(&expected))));
        }
    }
    let model_type = outer.get("model_type").and_then(Json::as_str).unwrap_or_default();
    if let Some((_, defaults)) = DEFAULTS.iter().find(|(of, _)| *of == model_type) {
        for (key, value) in *defaults {
            outer.entry(*key).or_insert((*value).into());
        }
    }
    let vocabulary = outer.get("vocab_size").and_then(Json::as_u64);
    for (path, key, value) in given {
        let found = end_tokens(value.as_ref()).map_err(|reason| CheckpointError::config(path, &key, reason))?;
        if let (Some(end), Some(size)) = (found.iter().find(|end| Some(**end) >= vocabulary), vocabulary) {
            let reason = format!("{end} is outside the vocabulary of {size} (vocab_size)");
            return Err(CheckpointError::config(path, &key, reason));
        }
        ends.extend(found);
    }
    let mut seen = BTreeSet::new();
    ends.retain(|end| seen.insert(*end));
    outer.insert("eos_token_id".into(), ends.into());
    match outer.get("model_type").filter(|kind| !kind.is_null()) {
        Some(Json::String(_)) => Ok(outer),
        Some(other) => Err(wrong("model_type", format!("is {}, not a text", excerpt(&other.to_string())))),
        None => Err(wrong("model_type", "is missing".into())),
    }
}

/// The ids in an `eos_token_id`: one, a list of them, or none.
///
/// # Errors
/// What else is there.
pub(crate) fn end_tokens(value: Option<&Json>) -> Result<Vec<u64>, String> {
    let listed = match value {
        None | Some(Json::Null) => &[],
        Some(Json::Array(values)) => values.as_slice(),
        Some(one) => std::slice::from_ref(one),
    };
    let wrong =
        |value: &Json| format!("{} is no token id; a whole number or a list of them is", excerpt(&value.to_string()));
    // Some writers of JSON have no other numbers.
    let whole = |id: f64| (id >= 0.0 && id.fract() == 0.0).then_some(id as u64);
    let id = |id: &Json| id.as_u64().or_else(|| whole(id.as_f64()?)).filter(|&id| id < 1 << 32);
    listed.iter().map(|value| id(value).ok_or_else(|| wrong(value))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn normalised(config: Json, generation: Option<Json>) -> Result<Map<String, Json>, String> {
        let object = |json: Json| json.as_object().unwrap().clone();
        let generation = generation.map(object);
        let generation = generation.as_ref().map(|members| (members, "m/generation_config.json"));
        normalise(object(config), generation, "m/config.json").map_err(|error| error.to_string())
    }

    #[test]
    fn what_published_files_leave_out_is_what_their_readers_know() {
        let normalised =
            |config: Json| normalise(published(config.as_object().unwrap().clone()), None, "m/config.json");
        let given = json!({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "head_dim": 128}});
        let config = normalised(given).unwrap();
        assert_eq!((&config["vocab_size"], &config["num_attention_heads"]), (&json!(262_208), &json!(8)));
        assert_eq!(config["head_dim"], 128);
        let config = normalised(json!({"model_type": "llama", "consort_rope_pairs": "interleaved"})).unwrap();
        assert!(!config.contains_key("consort_rope_pairs") && !config.contains_key("vocab_size"));
        let inner = json!({"model_type": "llama"});
        let both = json!({"model_type": "m", "text_config": inner.clone(), "llm_config": inner});
        let message = normalised(both).unwrap_err().to_string();
        assert_eq!(message, "m/config.json: llm_config: is there beside text_config; remove the one that is not meant");
    }

    #[test]
    fn nested_text_config_wins_and_end_tokens_unite() {
        let config = json!({
            "model_type": "outer", "eos_token_id": 5, "tie_word_embeddings": true, "auto_map": {"AutoModel": "x.Y"},
            "text_config": {"model_type": "inner", "hidden_size": 64, "eos_token_id": [6.0], "tie_word_embeddings": null},
        });
        let config = normalised(config, Some(json!({"eos_token_id": [5, 7]}))).unwrap();
        assert_eq!(config["model_type"], "inner");
        assert_eq!(config["consort_wrapper_model_type"], "outer");
        assert_eq!(config["hidden_size"], 64);
        assert_eq!(config["tie_word_embeddings"], true);
        assert_eq!(config["eos_token_id"], json!([5, 6, 7]));
        let none = json!({"model_type": "m", "eos_token_id": null, "text_config": null, "vocab_size": 3});
        assert_eq!(normalised(none, Some(json!({}))).unwrap()["eos_token_id"], json!([]));
    }

    #[test]
    fn end_tokens_of_a_wrong_kind_are_refused_wherever_they_are() {
        let wrong = [
            json!("68"),
            json!(["68"]),
            json!(68.5),
            json!(-1.0),
            json!(1e30),
            json!([[68]]),
            json!({"a": 1}),
            json!(-1),
            json!([2, -1]),
            json!(true),
            json!([null]),
            json!({"__float__": "NaN"}),
            json!(99_999),
            json!([2, 300]),
            json!(1u64 << 40),
        ];
        for value in wrong {
            for (config, generation, place) in [
                (json!({"eos_token_id": value}), None, "m/config.json: eos_token_id: "),
                (json!({"text_config": {"eos_token_id": value}}), None, "m/config.json: text_config.eos_token_id: "),
                (json!({}), Some(json!({"eos_token_id": value})), "m/generation_config.json: eos_token_id: "),
            ] {
                let mut config = config;
                config["model_type"] = "m".into();
                config["vocab_size"] = 300.into();
                let message = normalised(config, generation).unwrap_err();
                assert!(message.starts_with(place), "{value}: {message}");
                assert!(
                    message.contains("is no token id") || message.contains("outside the vocabulary of 300"),
                    "{message}"
                );
            }
        }
    }

    #[test]
    fn what_is_no_configuration_is_refused_by_key() {
        for (config, expected) in [
            (json!({"hidden_size": 1}), "m/config.json: model_type: is missing"),
            (
                json!({"model_type": "m", "num_experts": 6, "num_local_experts": 99}),
                "m/config.json: num_local_experts: is 99, but num_experts is 6",
            ),
            (json!({"model_type": 7}), "m/config.json: model_type: is 7, not a text"),
            (
                json!({"model_type": "m", "tie_word_embeddings": "no", "text_config": {"tie_word_embeddings": true}}),
                "m/config.json: tie_word_embeddings: is \"no\", neither true nor false",
            ),
            (json!({"model_type": "m", "text_config": []}), "m/config.json: text_config: is [], not an object"),
            (json!({"model_type": "m", "llm_config": "x"}), "m/config.json: llm_config: is \"x\", not an object"),
            (
                json!({"model_type": "m", "quantization": {"bits": 4}, "text_config": {"quantization": {"bits": 8}}}),
                "m/config.json: quantization: differs from text_config.quantization",
            ),
        ] {
            let message = normalised(config, None).unwrap_err();
            assert!(message.starts_with(expected), "{message}");
        }
    }
}
