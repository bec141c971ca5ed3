//! JSON as Python's `json.dumps` writes it, which is what models were trained on.

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

use super::methods::pay_for_text;

/// The parameters of `json.dumps` that templates use.
pub(super) struct Style {
    /// Spaces per level; one line without.
    pub indent: Option<usize>,
    pub item_separator: String,
    pub key_separator: String,
    pub ensure_ascii: bool,
    pub sort_keys: bool,
}

impl Default for Style {
    fn default() -> Self {
        Self {
            indent: None,
            item_separator: ", ".to_owned(),
            key_separator: ": ".to_owned(),
            ensure_ascii: false,
            sort_keys: false,
        }
    }
}

impl Style {
    /// `value` as JSON. `pay` hears how many bytes are about to be written and may refuse them: a template can make a value
    /// of a few bytes whose JSON is endless, because its parts are shared.
    ///
    /// # Errors
    /// Values that JSON has no word for: undefined, functions; deeper nesting than anything real has; what `pay` says.
    pub(super) fn write(&self, value: &Value, pay: &dyn Fn(usize) -> Result<(), Error>) -> Result<String, Error> {
        let mut out = Writer { text: String::new(), pay };
        self.value(&mut out, value, 0)?;
        Ok(out.text)
    }

    fn value(&self, out: &mut Writer<'_>, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            let reason = format!("JSON is nested more than {MAX_DEPTH} deep");
            return Err(Error::new(ErrorKind::BadSerialization, reason));
        }
        match value.kind() {
            ValueKind::None => out.push("null")?,
            ValueKind::Bool => out.push(if value.is_true() { "true" } else { "false" })?,
            ValueKind::Number => out.push(&number(value))?,
            ValueKind::String => self.string(out, value.as_str().unwrap_or_default())?,
            ValueKind::Seq | ValueKind::Iterable => {
                // Not collected: a repeated list is lazy, and may be endless.
                let items = value.try_iter()?;
                self.container(out, depth, ["[", "]"], items, |style, out, item| style.value(out, &item, depth + 1))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                self.container(out, depth, ["{", "}"], keys, |style, out, key| {
                    pay_for_text(&key, out.pay, depth)?;
                    style.string(out, &key.to_string())?;
                    out.push(&style.key_separator)?;
                    style.value(out, &value.get_item(&key)?, depth + 1)
                })?;
            }
            kind => {
                let reason = format!("a value of type {kind} cannot be written as JSON");
                return Err(Error::new(ErrorKind::BadSerialization, reason));
            }
        }
        Ok(())
    }

    fn container(
        &self,
        out: &mut Writer<'_>,
        depth: usize,
        [open, close]: [&str; 2],
        items: impl IntoIterator<Item = Value>,
        write: impl Fn(&Self, &mut Writer<'_>, Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push(open)?;
        let mut empty = true;
        for item in items {
            if !std::mem::take(&mut empty) {
                out.push(if self.indent.is_some() { self.item_separator.trim_end() } else { &self.item_separator })?;
            }
            self.new_line(out, depth + 1)?;
            write(self, out, item)?;
        }
        if !empty {
            self.new_line(out, depth)?;
        }
        out.push(close)
    }

    fn new_line(&self, out: &mut Writer<'_>, depth: usize) -> Result<(), Error> {
        match self.indent {
            Some(indent) => {
                out.push("\n")?;
                (0..depth).try_for_each(|_| out.push(&" ".repeat(indent)))
            }
            None => Ok(()),
        }
    }

    fn string(&self, out: &mut Writer<'_>, text: &str) -> Result<(), Error> {
        // Room for the quotes and for as much again in escapes, which few texts need.
        (out.pay)(2 * text.len() + 2)?;
        let out = &mut out.text;
        out.push('"');
        for character in text.chars() {
            match character {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                '\0'..='\u{1f}' => escape(out, character),
                '\u{7f}'.. if self.ensure_ascii => escape(out, character),
                other => out.push(other),
            }
        }
        out.push('"');
        Ok(())
    }
}

/// Far deeper than any schema or conversation; each level takes some of the thread's stack.
const MAX_DEPTH: usize = 128;

/// A text that is paid for as it grows.
struct Writer<'a> {
    text: String,
    pay: &'a dyn Fn(usize) -> Result<(), Error>,
}

impl Writer<'_> {
    fn push(&mut self, text: &str) -> Result<(), Error> {
        (self.pay)(text.len())?;
        self.text.push_str(text);
        Ok(())
    }
}

fn escape(out: &mut String, character: char) {
    for unit in character.encode_utf16(&mut [0; 2]) {
        out.push_str(&format!("\\u{unit:04x}"));
    }
}

/// Python's `repr` of a number: `1.0`, `1e-05`, `1e+16`.
fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    let Ok(float) = f64::try_from(value.clone()) else { return value.to_string() };
    let scientific = format!("{float:e}");
    match scientific.split_once('e').map(|(digits, exponent)| (digits, exponent.parse::<i32>())) {
        Some((digits, Ok(exponent))) if !(-4..16).contains(&exponent) && float != 0.0 => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.abs())
        }
        _ if float.is_nan() => "NaN".to_owned(),
        _ if float.is_infinite() => if float > 0.0 { "Infinity" } else { "-Infinity" }.to_owned(),
        _ => format!("{float:?}"),
    }
}
