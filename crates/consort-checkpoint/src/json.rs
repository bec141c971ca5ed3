//! JSON of strangers. Every key is read once: of two values under one name no reader can say which is meant.

use std::borrow::Cow;
use std::cell::RefCell;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value as Json};

use crate::CheckpointError;
use crate::error::excerpt;

/// Parses a JSON file. A byte order mark before it is passed over. Numbers that JSON does not have come out as transformers
/// tags them, `{"__float__": "NaN"}`, whichever way they are written.
///
/// # Errors
/// [`CheckpointError::Malformed`] names the key: broken JSON, a key that occurs twice in one object.
pub(crate) fn parse(bytes: &[u8], path: &str) -> Result<Json, CheckpointError> {
    let text = std::str::from_utf8(bytes).map_err(|error| CheckpointError::malformed(path, error))?;
    let text = with_tagged_floats(text.trim_start_matches('\u{feff}'));
    let place = RefCell::new(Vec::new());
    let mut deserializer = serde_json::Deserializer::from_str(&text);
    let parsed = Once(&place).deserialize(&mut deserializer).and_then(|json| deserializer.end().map(|()| json));
    parsed.map_err(|error| match &place.borrow()[..] {
        [] => CheckpointError::malformed(path, error),
        steps => {
            let key: String = steps.iter().map(Step::to_string).collect();
            CheckpointError::malformed(path, format!("key {}: {error}", excerpt(key.trim_start_matches('.'))))
        }
    })
}

/// The members of a JSON file that must be an object.
///
/// # Errors
/// As [`parse`]; [`CheckpointError::Malformed`] for any other value.
pub(crate) fn parse_object(bytes: &[u8], path: &str) -> Result<Map<String, Json>, CheckpointError> {
    match parse(bytes, path)? {
        Json::Object(members) => Ok(members),
        other => {
            let reason = format!("is {}, not a JSON object; download it again", excerpt(&other.to_string()));
            Err(CheckpointError::malformed(path, reason))
        }
    }
}

/// Python writes `NaN` and `Infinity` as bare words.
fn with_tagged_floats(text: &str) -> Cow<'_, str> {
    if !WORDS.iter().any(|word| text.contains(word)) {
        return text.into();
    }
    let mut out = String::with_capacity(text.len());
    let (mut rest, mut in_string) = (text, false);
    while let Some(next) = rest.chars().next() {
        let word = WORDS.iter().find(|word| !in_string && rest.starts_with(**word));
        let taken = match (word, next) {
            (Some(word), _) => {
                out.push_str(&format!(r#"{{"__float__": "{word}"}}"#));
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
    out.into()
}

const WORDS: [&str; 3] = ["-Infinity", "Infinity", "NaN"];

/// A step from a value to one inside it.
enum Step {
    Key(String),
    Index(usize),
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Key(key) => write!(f, ".{key}"),
            Self::Index(index) => write!(f, "[{index}]"),
        }
    }
}

/// Reads a value, and keeps in mind where it is: after an error the place is that of the error.
#[derive(Clone, Copy)]
struct Once<'p>(&'p RefCell<Vec<Step>>);

impl Once<'_> {
    fn enter(self, step: Step) {
        self.0.borrow_mut().push(step);
    }

    fn leave(self) {
        self.0.borrow_mut().pop();
    }
}

impl<'de> DeserializeSeed<'de> for Once<'_> {
    type Value = Json;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Json, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Once<'_> {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Json, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Json, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Json, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Json, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Json, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Json, A::Error> {
        let mut values = Vec::new();
        self.enter(Step::Index(0));
        while let Some(value) = list.next_element_seed(self)? {
            values.push(value);
            if let Some(Step::Index(index)) = self.0.borrow_mut().last_mut() {
                *index += 1;
            }
        }
        self.leave();
        Ok(values.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Json, A::Error> {
        let mut members = Map::new();
        while let Some(key) = object.next_key::<String>()? {
            self.enter(Step::Key(key.clone()));
            if members.contains_key(&key) {
                return Err(A::Error::custom("occurs twice; remove the one that is not meant"));
            }
            members.insert(key, object.next_value_seed(self)?);
            self.leave();
        }
        Ok(members.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn floats_that_json_does_not_have_are_tagged() {
        let read =
            parse(br#"{"a": [0.5, Infinity], "b": NaN, "c": "NaN \" Infinity", "d": [-Infinity]}"#, "c").unwrap();
        let tagged = |word: &str| json!({ "__float__": word });
        let expected = json!({"a": [0.5, tagged("Infinity")], "b": tagged("NaN"), "c": "NaN \" Infinity", "d": [tagged("-Infinity")]});
        assert_eq!(read, expected);
        assert_eq!(parse(br#"{"a": {"__float__": "NaN"}}"#, "c").unwrap()["a"], tagged("NaN"));
        assert!(parse(br#"{"a": NaNs}"#, "c").is_err());
    }

    #[test]
    fn every_kind_of_value_is_read_as_the_library_reads_it() {
        let text =
            r#" {"a": [1, -2, 3.5, 18446744073709551615, true, null, "\u00e9\n", {}, []], "b": {"c": {"d": 1e300}}} "#;
        let expected: Json = serde_json::from_str(text).unwrap();
        assert_eq!(parse(text.as_bytes(), "c").unwrap(), expected);
        assert_eq!(parse(format!("\u{feff}{text}").as_bytes(), "c").unwrap(), expected);
    }

    #[test]
    fn mistakes_name_file_and_key() {
        let refused = |text: &[u8]| parse(text, "m/config.json").unwrap_err().to_string();
        let cases: [(&[u8], &str); 6] = [
            (br#"{"a": 1, "a": 1}"#, "m/config.json: key a: occurs twice"),
            (br#"{"a": [0, {"b": 1, "c": 2, "b": 3}]}"#, "m/config.json: key a[1].b: occurs twice"),
            (br#"{"a": NaN, "b": {"c": null, "c": 0}}"#, "m/config.json: key b.c: occurs twice"),
            (br#"{"a": {"b": 1e999}}"#, "m/config.json: key a.b: number out of range"),
            (br#"{"a": 1} {"#, "m/config.json: trailing characters"),
            (b"{\"a\": \"\xff\"}", "m/config.json: invalid utf-8"),
        ];
        for (text, expected) in cases {
            let message = refused(text);
            assert!(message.starts_with(expected), "{message}");
        }
        assert!(refused("[".repeat(1 << 20).as_bytes()).contains("recursion limit"));
        assert!(refused(format!(r#"{{"{0}": 1, "{0}": 2}}"#, "k".repeat(1 << 16)).as_bytes()).len() < 400);
        assert!(parse_object(b"[]", "c").unwrap_err().to_string().starts_with("c: is [], not a JSON object"));
    }
}
