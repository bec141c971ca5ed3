//! `config.json` and its companions, made uniform.
//!
//! Wrappers of vision and audio models nest the language model's configuration; floats that JSON does not have are tagged or
//! written bare; end tokens are listed in two files. Keys that nobody asks for stay and do no harm.

use serde_json::{Map, Value as Json};

use crate::CheckpointError;

/// Keys under which wrappers keep the language model's configuration.
const NESTED: &[&str] = &["text_config", "language_config", "llm_config"];

/// Parses a JSON file. Infinity becomes the largest f64, which is infinite again as f32; NaN becomes null.
///
/// # Errors
/// [`CheckpointError::Malformed`].
pub(crate) fn parse(bytes: &[u8], path: &str) -> Result<Json, CheckpointError> {
    let text = String::from_utf8_lossy(bytes);
    let mut json = serde_json::from_str(&text)
        .or_else(|error| serde_json::from_str(&without_bare_floats(&text)).map_err(|_| error))
        .map_err(|error| CheckpointError::malformed(path, error))?;
    untag_floats(&mut json);
    Ok(json)
}

/// Python writes `Infinity` and `NaN` as bare words.
fn without_bare_floats(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let (mut rest, mut in_string) = (text, false);
    while let Some(next) = rest.chars().next() {
        let word = BARE_FLOATS.iter().find(|(word, _)| !in_string && rest.starts_with(word));
        let taken = match (word, next) {
            (Some((word, number)), _) => {
                out.push_str(number);
                word.len()
            }
            (None, '\\') if in_string => {
                let escaped = rest.chars().nth(1).map_or(0, char::len_utf8);
                out.push_str(&rest[..1 + escaped]);
                1 + escaped
            }
            (None, _) => {
                in_string ^= next == '"';
                out.push(next);
                next.len_utf8()
            }
        };
        rest = &rest[taken..];
    }
    out
}

const BARE_FLOATS: &[(&str, &str)] =
    &[("-Infinity", "-1.7976931348623157e308"), ("Infinity", "1.7976931348623157e308"), ("NaN", "null")];

/// transformers writes `{"__float__": "Infinity"}`.
fn untag_floats(json: &mut Json) {
    match json {
        Json::Object(map) => {
            let tag = if map.len() == 1 { map.get("__float__").and_then(Json::as_str) } else { None };
            match tag {
                Some("Infinity") => *json = f64::MAX.into(),
                Some("-Infinity") => *json = f64::MIN.into(),
                Some("NaN") => *json = Json::Null,
                _ => map.values_mut().for_each(untag_floats),
            }
        }
        Json::Array(values) => values.iter_mut().for_each(untag_floats),
        _ => {}
    }
}

/// The language model's configuration: nested keys come up and win over the wrapper's; `eos_token_id` becomes the list of
/// all end tokens of `config.json` and `generation_config.json`.
///
/// # Errors
/// [`CheckpointError::Config`] if there is no `model_type`, [`CheckpointError::Malformed`] if there is no object.
pub(crate) fn normalise(
    config: Json,
    generation: Option<&Json>,
    path: &str,
) -> Result<Map<String, Json>, CheckpointError> {
    let Json::Object(mut outer) = config else {
        return Err(CheckpointError::malformed(path, "the configuration is not a JSON object"));
    };
    let mut ends = Vec::new();
    collect_ends(outer.get("eos_token_id"), &mut ends);
    let nested = NESTED.iter().find_map(|key| outer.remove(*key));
    if let Some(Json::Object(inner)) = nested {
        collect_ends(inner.get("eos_token_id"), &mut ends);
        if let Some(wrapper) = outer.get("model_type").cloned() {
            outer.insert("consort_wrapper_model_type".into(), wrapper);
        }
        outer.extend(inner.into_iter().filter(|(_, value)| !value.is_null()));
    }
    collect_ends(generation.and_then(|generation| generation.get("eos_token_id")), &mut ends);
    outer.insert("eos_token_id".into(), ends.into());
    if outer.get("model_type").and_then(Json::as_str).is_none() {
        let (key, reason) = ("model_type".to_string(), "is missing".to_string());
        return Err(CheckpointError::Config { path: path.into(), key, reason });
    }
    Ok(outer)
}

fn collect_ends(value: Option<&Json>, ends: &mut Vec<u64>) {
    let listed = match value {
        Some(Json::Array(values)) => values.as_slice(),
        Some(one) => std::slice::from_ref(one),
        None => &[],
    };
    for end in listed.iter().filter_map(Json::as_u64) {
        if !ends.contains(&end) {
            ends.push(end);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn nested_text_config_wins_and_end_tokens_unite() {
        let config = json!({
            "model_type": "outer", "eos_token_id": 5, "tie_word_embeddings": true, "auto_map": {"AutoModel": "x.Y"},
            "text_config": {"model_type": "inner", "hidden_size": 64, "eos_token_id": [6], "tie_word_embeddings": null},
        });
        let generation = json!({"eos_token_id": [5, 7]});
        let config = normalise(config, Some(&generation), "config.json").unwrap();
        assert_eq!(config["model_type"], "inner");
        assert_eq!(config["consort_wrapper_model_type"], "outer");
        assert_eq!(config["hidden_size"], 64);
        assert_eq!(config["tie_word_embeddings"], true);
        assert_eq!(config["eos_token_id"], json!([5, 6, 7]));
    }

    #[test]
    fn floats_that_json_does_not_have_are_read() {
        let tagged = parse(br#"{"a": {"__float__": "Infinity"}, "b": [{"__float__": "-Infinity"}]}"#, "c").unwrap();
        assert_eq!(tagged["a"].as_f64().map(|value| value as f32), Some(f32::INFINITY));
        assert_eq!(tagged["b"][0].as_f64().map(|value| value as f32), Some(f32::NEG_INFINITY));
        let bare = parse(br#"{"a": [0.0, Infinity], "b": NaN, "c": "NaN \" Infinity"}"#, "c").unwrap();
        assert_eq!(bare["a"][1].as_f64().map(|value| value as f32), Some(f32::INFINITY));
        assert!(bare["b"].is_null());
        assert_eq!(bare["c"], "NaN \" Infinity");
    }

    #[test]
    fn a_missing_model_type_is_named() {
        let error = normalise(json!({"hidden_size": 1}), None, "dir/config.json").unwrap_err();
        assert_eq!(error.to_string(), "dir/config.json: model_type: is missing");
        assert!(parse(b"{", "dir/config.json").is_err());
        assert!(normalise(json!([]), None, "dir/config.json").is_err());
    }
}
