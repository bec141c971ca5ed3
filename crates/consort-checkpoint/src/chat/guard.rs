//! Keeps text that only looks like a control token apart from the template's own.
//!
//! A template is free to trim, split and compare what it is given, so that content can't be replaced by placeholders, and
//! afterwards nobody can tell a typed `<|im_end|>` from a real one. Therefore a mark, a character that occurs nowhere else, is put
//! inside each such text before rendering (`<` mark `|im_end|>`), and wherever a text could complete a control token together
//! with what the template puts around it. After rendering the marks are taken out again, and a control token is recognized only
//! where no mark was.

use std::ops::Range;

use serde_json::{Map, Value as Json};

use crate::tokenizer::Tokenizer;

/// Puts marks into content.
pub(super) struct Guard<'a> {
    tokenizer: &'a Tokenizer,
    mark: char,
}

const THINK: &str = "<think>";
const END_OF_THINK: &str = "</think>";

/// Keys whose values templates compare with words of their own; only whole control tokens are marked there.
const COMPARED: [&str; 3] = ["role", "type", "content_type"];

impl<'a> Guard<'a> {
    /// Chooses a mark that occurs neither in the template nor in the content.
    pub(super) fn new(tokenizer: &'a Tokenizer, occurs: impl Fn(char) -> bool) -> Option<Self> {
        // Noncharacters first: they are reserved for such use and meaningless in text.
        let candidates = ('\u{FDD0}'..='\u{FDEF}').chain('\u{F0000}'..='\u{FFFFD}');
        candidates.into_iter().find(|&mark| !occurs(mark)).map(|mark| Self { tokenizer, mark })
    }

    /// Marks the texts of a message. An assistant's message that brings its reasoning along keeps the tokens around it, so that
    /// the template can find and drop it.
    pub(super) fn message(&self, message: &Map<String, Json>) -> Json {
        let mut marked = self.value(&Json::Object(message.clone()));
        let reasoning = || message.get("content")?.as_str()?.strip_prefix(THINK)?.split_once(END_OF_THINK);
        if let Some((reasoning, answer)) = reasoning().filter(|_| message["role"] == "assistant") {
            let content = [THINK, &self.text(reasoning), END_OF_THINK, &self.text(answer)].concat();
            marked["content"] = Json::String(content);
        }
        marked
    }

    /// Marks every text in `value`.
    pub(super) fn value(&self, value: &Json) -> Json {
        match value {
            Json::String(text) => Json::String(self.text(text)),
            Json::Array(items) => items.iter().map(|item| self.value(item)).collect(),
            Json::Object(entries) => {
                let guard = |(key, value): (&String, &Json)| match value {
                    Json::String(_) if COMPARED.contains(&key.as_str()) => (self.inside(key), self.whole_tokens(value)),
                    _ => (self.inside(key), self.value(value)),
                };
                Json::Object(entries.iter().map(guard).collect())
            }
            other => other.clone(),
        }
    }

    /// Marks only the control tokens that are whole: for variables, which templates compare with words of their own.
    pub(super) fn whole_tokens(&self, value: &Json) -> Json {
        match value {
            Json::String(text) => Json::String(self.inside(text)),
            Json::Array(items) => items.iter().map(|item| self.whole_tokens(item)).collect(),
            Json::Object(entries) => {
                Json::Object(entries.iter().map(|(key, value)| (self.inside(key), self.whole_tokens(value))).collect())
            }
            other => other.clone(),
        }
    }

    /// Marks one text.
    pub(super) fn text(&self, text: &str) -> String {
        if text.is_empty() {
            return String::new();
        }
        let mut out = self.inside(text);
        let controls = || self.tokenizer.control_texts();
        if controls().any(|control| ends_with_begun(text, control)) {
            out.push(self.mark);
        }
        if controls()
            .any(|control| starts_with_rest(text, control) || control.len() > text.len() && control.contains(text))
        {
            out.insert(0, self.mark);
        }
        out
    }

    /// Breaks the control tokens that are whole.
    fn inside(&self, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(start) = self.tokenizer.find_control(rest) {
            let broken = start + rest[start..].chars().next().map_or(0, char::len_utf8);
            out.push_str(&rest[..broken]);
            out.push(self.mark);
            rest = &rest[broken..];
        }
        out.push_str(rest);
        out
    }

    /// Takes the marks out. The ranges between them, in the text without marks, are where control tokens count.
    pub(super) fn remove(&self, rendered: &str) -> (String, Vec<Range<usize>>) {
        let mut text = String::with_capacity(rendered.len());
        let mut ranges = Vec::new();
        for piece in rendered.split(self.mark) {
            ranges.push(text.len()..text.len() + piece.len());
            text.push_str(piece);
        }
        (text, ranges)
    }
}

/// Whether `text` ends with the beginning of `control`, but not with all of it.
fn ends_with_begun(text: &str, control: &str) -> bool {
    control.char_indices().skip(1).any(|(length, _)| text.ends_with(&control[..length]))
}

/// Whether `text` starts with the rest of a begun `control`.
fn starts_with_rest(text: &str, control: &str) -> bool {
    control.char_indices().skip(1).any(|(start, _)| text.starts_with(&control[start..]))
}
