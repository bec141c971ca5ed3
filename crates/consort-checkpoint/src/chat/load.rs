//! Where templates are published: in a file of their own, in `tokenizer_config.json`, in GGUF metadata; one, or several by name.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value as Json;

use super::{ChatError, ChatTemplate, DEFAULT};
use crate::error::excerpt;
use crate::files::read_text;
use crate::gguf::{Gguf, Value, open_parts};
use crate::json::parse_object;
use crate::tokenizer::Metadata;

impl ChatTemplate {
    /// Reads the templates of a model: a directory, or a GGUF file. `None` if it has none, as base models do.
    ///
    /// # Errors
    /// Files that cannot be read, and templates that are no Jinja.
    pub fn open(model: &Path) -> Result<Option<Self>, ChatError> {
        if model.is_dir() {
            return Self::from_directory(model);
        }
        let gguf = open_parts(model).and_then(|parts| Gguf::read(&parts))?;
        Self::from_gguf(gguf.metadata(), &model.display().to_string())
    }

    /// Reads the templates of a model directory: `chat_template.jinja` and `additional_chat_templates/`, else
    /// `chat_template.json`, else `tokenizer_config.json`.
    ///
    /// # Errors
    /// Like [`ChatTemplate::open`].
    pub fn from_directory(directory: &Path) -> Result<Option<Self>, ChatError> {
        let mut sources = BTreeMap::new();
        let path = directory.join("chat_template.jinja");
        if let Some(source) = read_text(&path)? {
            sources.insert(DEFAULT.to_owned(), source);
            let more = directory.join("additional_chat_templates");
            for entry in std::fs::read_dir(&more).into_iter().flatten().flatten() {
                let path = entry.path();
                if let (Some("jinja"), Some(name)) = (extension(&path), path.file_stem().and_then(|name| name.to_str()))
                {
                    sources.extend(read_text(&path)?.map(|source| (name.to_owned(), source)));
                }
            }
            return Self::new(sources, &path.display().to_string());
        }
        for name in ["chat_template.json", "tokenizer_config.json"] {
            let path = directory.join(name);
            let place = path.display().to_string();
            let Some(text) = read_text(&path)? else { continue };
            let json = parse_object(text.as_bytes(), &place)?;
            let templates = json.get("chat_template").filter(|templates| !templates.is_null());
            let Some(templates) = templates else { continue };
            let sources = named(templates).map_err(|reason| ChatError::Template { place: place.clone(), reason })?;
            return Self::new(sources, &place);
        }
        Ok(None)
    }

    /// Takes the templates out of a GGUF header; `place` names the file in errors.
    ///
    /// # Errors
    /// Templates that are no Jinja.
    pub fn from_gguf(metadata: &Metadata, place: &str) -> Result<Option<Self>, ChatError> {
        const KEY: &str = "tokenizer.chat_template";
        let mut sources = BTreeMap::new();
        for (key, value) in metadata {
            // `tokenizer.chat_templates` lists the names of others.
            let name = match key.strip_prefix(KEY) {
                Some("") => DEFAULT,
                Some(rest) if rest.starts_with('.') => &rest[1..],
                _ => continue,
            };
            let source = Value::as_str(value).ok_or_else(|| ChatError::Template {
                place: format!("{place}: {key}"),
                reason: "is no text".to_owned(),
            })?;
            sources.insert(name.to_owned(), source.to_owned());
        }
        Self::new(sources, &format!("{place}: {KEY}"))
    }
}

const WRONG_TYPE: &str = "chat_template is neither a text nor a list of objects with a name and a template";

/// Templates by name.
///
/// # Errors
/// JSON that holds none, or two of one name.
fn named(templates: &Json) -> Result<BTreeMap<String, String>, String> {
    let entries = match templates {
        Json::String(source) => return Ok([(DEFAULT.to_owned(), source.clone())].into()),
        Json::Array(entries) => entries,
        _ => return Err(WRONG_TYPE.to_owned()),
    };
    let mut sources = BTreeMap::new();
    for entry in entries {
        let (Some(name), Some(source)) = (entry["name"].as_str(), entry["template"].as_str()) else {
            return Err(WRONG_TYPE.to_owned());
        };
        if sources.insert(name.to_owned(), source.to_owned()).is_some() {
            return Err(format!("chat_template has two of the name {:?}; remove one", excerpt(name)));
        }
    }
    Ok(sources)
}

fn extension(path: &Path) -> Option<&str> {
    path.extension()?.to_str()
}
