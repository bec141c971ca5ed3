//! Typed access to a quantization block. What is there must be of the right kind: a value that is passed over because it is
//! written as a text would be one that the tensors are not compared with.

use serde_json::Value as Json;

use crate::CheckpointError;
use crate::error::excerpt;
use crate::huggingface::QuantizationBlock;

/// An object of the block.
#[derive(Clone)]
pub(super) struct Settings<'a> {
    json: &'a Json,
    path: &'a str,
    /// The key that leads here, for messages.
    key: String,
}

impl<'a> Settings<'a> {
    /// The outermost object.
    ///
    /// # Errors
    /// [`CheckpointError::Config`] for another value, here and below.
    pub fn new(block: &'a QuantizationBlock) -> Result<Self, CheckpointError> {
        Self { json: &block.json, path: &block.path, key: block.key.into() }.checked()
    }

    fn checked(self) -> Result<Self, CheckpointError> {
        match self.json.is_object() {
            true => Ok(self),
            false => Err(CheckpointError::config(self.path, &self.key, expected(self.json, "an object"))),
        }
    }

    fn place(&self, key: &str) -> String {
        if self.key.is_empty() { key.into() } else { format!("{}.{key}", self.key) }
    }

    /// The error of a key.
    pub fn wrong(&self, key: &str, reason: impl std::fmt::Display) -> CheckpointError {
        let place = if key.is_empty() { self.key.clone() } else { self.place(key) };
        let place = if place.is_empty() { "quantization".into() } else { place };
        CheckpointError::config(self.path, &place, reason)
    }

    fn get(&self, key: &str) -> Option<&'a Json> {
        self.json.get(key).filter(|value| !value.is_null())
    }

    fn typed<T>(
        &self,
        key: &str,
        what: &str,
        read: impl Fn(&'a Json) -> Option<T>,
    ) -> Result<Option<T>, CheckpointError> {
        let value = self.get(key);
        value.map(|value| read(value).ok_or_else(|| self.wrong(key, expected(value, what)))).transpose()
    }

    pub fn text(&self, key: &str) -> Result<Option<&'a str>, CheckpointError> {
        self.typed(key, "a text", Json::as_str)
    }

    pub fn integer(&self, key: &str) -> Result<Option<i64>, CheckpointError> {
        self.typed(key, "a whole number", Json::as_i64)
    }

    pub fn flag(&self, key: &str) -> Result<Option<bool>, CheckpointError> {
        self.typed(key, "true or false", Json::as_bool)
    }

    pub fn texts(&self, key: &str) -> Result<Vec<&'a str>, CheckpointError> {
        let texts = |value: &'a Json| value.as_array()?.iter().map(Json::as_str).collect::<Option<Vec<_>>>();
        Ok(self.typed(key, "a list of texts", texts)?.unwrap_or_default())
    }

    /// `[rows, columns]`, both above zero.
    pub fn block(&self, key: &str) -> Result<Option<[usize; 2]>, CheckpointError> {
        self.typed(key, "[rows, columns]", |value| {
            let size = |at: usize| usize::try_from(value.get(at)?.as_u64()?).ok().filter(|&size| size > 0);
            (value.as_array()?.len() == 2).then_some([size(0)?, size(1)?])
        })
    }

    /// The object under a key.
    pub fn inner(&self, key: &str) -> Result<Option<Self>, CheckpointError> {
        let inner = |json| Self { json, path: self.path, key: self.place(key) }.checked();
        self.get(key).map(inner).transpose()
    }

    /// All keys and values of this object.
    pub fn members(&self) -> impl Iterator<Item = (&'a str, &'a Json)> {
        self.json.as_object().into_iter().flatten().map(|(key, value)| (key.as_str(), value))
    }

    /// Whether a key that is here has another value than in `other`.
    pub fn differs(&self, other: &Self, key: &str) -> bool {
        self.get(key).is_some_and(|value| other.get(key) != Some(value))
    }

    /// A key that two generations of writers call differently; both may be there if they agree.
    pub fn integer_of(&self, keys: [&str; 2]) -> Result<Option<i64>, CheckpointError> {
        match (self.integer(keys[0])?, self.integer(keys[1])?) {
            (Some(one), Some(other)) if one != other => {
                Err(self.wrong(keys[0], format!("is {one}, but {} is {other}", keys[1])))
            }
            (one, other) => Ok(one.or(other)),
        }
    }
}

/// What is wrong with a value.
fn expected(found: &Json, what: &str) -> String {
    format!("is {}, not {what}", excerpt(&found.to_string()))
}
