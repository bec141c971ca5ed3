//! Messages as the template in hand wants them.
//!
//! Clients send what the API allows; templates expect what their authors thought of. A template may refuse a system message that
//! isn't the first, or pass over it in silence; want a tool call's arguments as a mapping, or as text; know the role `developer`,
//! or not. The forms that a conversation can take are listed here, in the order in which they are tried.

use serde_json::{Map, Value as Json, json};

use super::ChatError;

/// Where system messages stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SystemLayout {
    /// As the client sent them. Moving a message would change the beginning of the prompt, and defeat its reuse.
    AsGiven,
    /// All in one, in front.
    Merged,
    /// In front of the first user message, for templates without the role.
    InFirstUserMessage,
}

/// How the arguments of tool calls are given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arguments {
    Mapping,
    Text,
}

/// What is known of a template before it sees a conversation.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Traits {
    /// Has a branch for the role `developer`; elsewhere such a message is a system message.
    pub developer: bool,
    /// Takes content only as a list of parts.
    pub parts: bool,
}

const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];
const TEXT_PARTS: [&str; 3] = ["text", "input_text", "output_text"];

/// Checks `messages` and brings roles and content into the template's form. Keys that aren't known here are kept.
pub(super) fn normalize(
    messages: &[Json],
    traits: Traits,
    template: &str,
) -> Result<Vec<Map<String, Json>>, ChatError> {
    let normalize = |(index, message): (usize, &Json)| {
        let mut message = message
            .as_object()
            .cloned()
            .ok_or_else(|| ChatError::Message { index, reason: "is no object".to_owned() })?;
        let role = message.get("role").and_then(Json::as_str).unwrap_or_default().to_owned();
        // A template may have roles of its own (`ipython`, `observation`).
        let known = |role: &str| {
            ROLES.contains(&role) || ['"', '\''].iter().any(|quote| template.contains(&format!("{quote}{role}{quote}")))
        };
        if role.is_empty() || !known(&role) {
            return Err(ChatError::Message { index, reason: format!("unknown role {role:?}") });
        }
        if role == "developer" && !traits.developer {
            message.insert("role".to_owned(), json!("system"));
        }
        if let Some(content) = message.get("content") {
            let content = content_for(content, traits, index)?;
            message.insert("content".to_owned(), content);
        }
        Ok(message)
    };
    messages.iter().enumerate().map(normalize).collect()
}

fn content_for(content: &Json, traits: Traits, index: usize) -> Result<Json, ChatError> {
    let text = match content {
        Json::Null => return Ok(Json::Null),
        Json::String(text) => text.clone(),
        Json::Array(parts) => parts.iter().map(|part| text_of_part(part, index)).collect::<Result<String, _>>()?,
        _ => {
            return Err(ChatError::Message { index, reason: "content is neither text nor a list of parts".to_owned() });
        }
    };
    Ok(if traits.parts { json!([{"type": "text", "text": text}]) } else { Json::String(text) })
}

fn text_of_part(part: &Json, index: usize) -> Result<&str, ChatError> {
    let kind = part.get("type").and_then(Json::as_str).unwrap_or("without a type");
    match part.get("text").and_then(Json::as_str) {
        Some(text) if TEXT_PARTS.contains(&kind) => Ok(text),
        _ => Err(ChatError::Message { index, reason: format!("content part {kind:?} is not supported by this model") }),
    }
}

/// Moves the system messages.
pub(super) fn lay_out(
    messages: &[Map<String, Json>],
    layout: SystemLayout,
    traits: Traits,
) -> Option<Vec<Map<String, Json>>> {
    if layout == SystemLayout::AsGiven {
        return Some(messages.to_vec());
    }
    let (system, mut rest): (Vec<_>, Vec<_>) = messages.iter().cloned().partition(is_system);
    let text = system.iter().map(text_of).collect::<Vec<_>>().join("\n\n");
    let content = |text: String| content_for(&Json::String(text), traits, 0).ok();
    if layout == SystemLayout::Merged {
        let mut first = Map::new();
        first.insert("role".to_owned(), json!("system"));
        first.insert("content".to_owned(), content(text)?);
        rest.insert(0, first);
    } else {
        let user = rest.iter_mut().find(|message| message["role"] == "user")?;
        let text = format!("{text}\n\n{}", text_of(user));
        user.insert("content".to_owned(), content(text)?);
    }
    Some(rest)
}

/// Whether a message instructs the model.
pub(super) fn is_system(message: &Map<String, Json>) -> bool {
    message.get("role").is_some_and(|role| role == "system" || role == "developer")
}

/// A message's content as text.
pub(super) fn text_of(message: &Map<String, Json>) -> String {
    match message.get("content") {
        Some(Json::String(text)) => text.clone(),
        Some(Json::Array(parts)) => parts.iter().filter_map(|part| part["text"].as_str()).collect(),
        _ => String::new(),
    }
}

/// Brings the arguments of a message's tool calls into a form. Arguments that are no JSON object stay the text that they are.
pub(super) fn with_arguments(message: &Map<String, Json>, form: Arguments) -> Map<String, Json> {
    let mut message = message.clone();
    for call in message.get_mut("tool_calls").and_then(Json::as_array_mut).into_iter().flatten() {
        let holder = if call.get("function").is_some() { &mut call["function"] } else { call };
        let Some(arguments) = holder.get_mut("arguments") else { continue };
        let converted = match (&*arguments, form) {
            (Json::String(text), Arguments::Mapping) if text.trim().is_empty() => Some(json!({})),
            (Json::String(text), Arguments::Mapping) => serde_json::from_str(text).ok().filter(Json::is_object),
            (Json::Object(_), Arguments::Text) => Some(json!(arguments.to_string())),
            _ => None,
        };
        if let Some(converted) = converted {
            *arguments = converted;
        }
    }
    message
}
