//! Typed access to a `config.json`.

use std::ops::RangeInclusive;

use consort_checkpoint::{excerpt, gguf};
use serde_json::Value;

use crate::ModelError;

/// A model's configuration in Hugging Face's shape. Keys may be nested: `rope_parameters.factor`.
#[derive(Clone, Copy, Debug)]
pub struct Config<'a> {
    root: &'a Value,
}

impl<'a> Config<'a> {
    /// Wraps a parsed `config.json`.
    pub fn new(root: &'a Value) -> Self {
        Self { root }
    }

    /// The value at `key`, if it is there and not null.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        key.split('.').try_fold(self.root, |value, part| value.get(part)).filter(|value| !value.is_null())
    }

    /// `model_type`.
    pub fn architecture(&self) -> Result<&'a str, ModelError> {
        self.text("model_type")
    }

    /// A text.
    pub fn text(&self, key: &str) -> Result<&'a str, ModelError> {
        self.required(key, "a text", Value::as_str)
    }

    /// A count: a whole number that is not negative.
    pub fn count(&self, key: &str) -> Result<usize, ModelError> {
        self.required(key, &format!("a whole number from 0 to {MOST}"), as_count)
    }

    /// A count above zero: what something may be divided by.
    pub fn size(&self, key: &str) -> Result<usize, ModelError> {
        self.required(key, &format!("a whole number from 1 to {MOST}"), |v| as_count(v).filter(|&n| n > 0))
    }

    /// A number that f32 can hold: neither NaN nor infinite.
    pub fn number(&self, key: &str) -> Result<f64, ModelError> {
        self.required(key, "a finite number", as_finite)
    }

    /// A factor on activations or logits, or what one is computed from: published ones lie between a hundredth and a thousand.
    pub fn multiplier(&self, key: &str) -> Result<f64, ModelError> {
        self.number_in(key, 1e-6..=1e6)
    }

    /// A bound: a number above zero, or infinity where there is none.
    pub fn limit(&self, key: &str) -> Result<f64, ModelError> {
        self.required(key, "a number above zero, or infinity", |v| as_number(v).filter(|&n| n as f32 > 0.0))
    }

    /// A number within a range.
    pub fn number_in(&self, key: &str, range: RangeInclusive<f64>) -> Result<f64, ModelError> {
        let expected = format!("a number from {} to {}", range.start(), range.end());
        self.required(key, &expected, |v| as_number(v).filter(|n| range.contains(n)))
    }

    /// A count, or `default` where the key is absent.
    pub fn count_or(&self, key: &str, default: usize) -> Result<usize, ModelError> {
        if self.get(key).is_some() { self.count(key) } else { Ok(default) }
    }

    /// A size, or `default` where the key is absent.
    pub fn size_or(&self, key: &str, default: usize) -> Result<usize, ModelError> {
        if self.get(key).is_some() { self.size(key) } else { Ok(default) }
    }

    /// A number, or `default` where the key is absent.
    pub fn number_or(&self, key: &str, default: f64) -> Result<f64, ModelError> {
        if self.get(key).is_some() { self.number(key) } else { Ok(default) }
    }

    /// A multiplier, or `default` where the key is absent.
    pub fn multiplier_or(&self, key: &str, default: f64) -> Result<f64, ModelError> {
        if self.get(key).is_some() { self.multiplier(key) } else { Ok(default) }
    }

    /// A bound, or `default` where the key is absent.
    pub fn limit_or(&self, key: &str, default: f64) -> Result<f64, ModelError> {
        if self.get(key).is_some() { self.limit(key) } else { Ok(default) }
    }

    /// A number within a range, or `default` where the key is absent.
    pub fn number_in_or(&self, key: &str, range: RangeInclusive<f64>, default: f64) -> Result<f64, ModelError> {
        if self.get(key).is_some() { self.number_in(key, range) } else { Ok(default) }
    }

    /// The small number under a norm's root: 0 or more, below 1.
    pub fn epsilon(&self, key: &str, default: f64) -> Result<f32, ModelError> {
        let number = |v| as_number(v).filter(|e| (0.0..1.0).contains(e));
        match self.get(key) {
            Some(_) => Ok(self.required(key, "a small number, 0 or more", number)? as f32),
            None => Ok(default as f32),
        }
    }

    /// A flag, or `default` where the key is absent.
    pub fn flag_or(&self, key: &str, default: bool) -> Result<bool, ModelError> {
        if self.get(key).is_some() { self.required(key, "true or false", Value::as_bool) } else { Ok(default) }
    }

    /// A list whose entries all pass `entry`.
    pub fn list<T>(&self, key: &str, what: &str, entry: impl Fn(&'a Value) -> Option<T>) -> Result<Vec<T>, ModelError> {
        self.required(key, what, |v| v.as_array()?.iter().map(&entry).collect())
    }

    /// `num_hidden_layers`, within reason: tables of one entry per layer are made before any file is read.
    pub fn layers(&self) -> Result<usize, ModelError> {
        const MOST_LAYERS: usize = 1 << 16;
        self.required("num_hidden_layers", "a whole number from 1 to 65536", |v| {
            as_count(v).filter(|n| (1..=MOST_LAYERS).contains(n))
        })
    }

    /// For each layer how far back it sees (`None`: all the way), from `layer_types`, or from `sliding_window` alone.
    pub fn windows(&self) -> Result<Vec<Option<usize>>, ModelError> {
        self.windows_unless(|_| false)
    }

    /// The same for an architecture that, without `layer_types`, lets the layers `full` see everything.
    pub fn windows_unless(&self, full: impl Fn(usize) -> bool) -> Result<Vec<Option<usize>>, ModelError> {
        const WINDOW: &str = "sliding_window";
        let (layers, architecture, kinds) = (self.layers()?, self.architecture()?, self.layer_types()?);
        let uses = self.flag_or("use_sliding_window", !architecture.starts_with("qwen"))?;
        if !uses || WITHOUT_WINDOWS.contains(&architecture) {
            return Ok(vec![None; layers]);
        }
        if self.get(WINDOW).is_none() {
            return match kinds.is_some_and(|kinds| kinds.contains(&"sliding_attention")) {
                true => Err(ModelError::MissingKey { key: self.place(WINDOW) }),
                false => Ok(vec![None; layers]),
            };
        }
        let window = self.size(WINDOW)?;
        let slides: Vec<bool> = match kinds {
            Some(kinds) => kinds.iter().map(|&kind| kind == "sliding_attention").collect(),
            None => (0..layers).map(|i| !full(i)).collect(),
        };
        Ok(slides.into_iter().map(|slides| slides.then_some(window)).collect())
    }

    /// `layer_types`, one name for each layer, if the config has them.
    pub fn layer_types(&self) -> Result<Option<Vec<&'a str>>, ModelError> {
        const KEY: &str = "layer_types";
        if self.get(KEY).is_none() {
            return Ok(None);
        }
        let kinds = self.list(KEY, "a list of layer kinds", Value::as_str)?;
        let known = |kind: &&str| ["full_attention", "sliding_attention", "linear_attention"].contains(kind);
        let recurs = self.get("linear_num_value_heads").is_some();
        let fits = |kind: &&str| recurs || *kind != "linear_attention";
        match kinds.len() == self.layers()? && kinds.iter().all(|kind| known(kind) && fits(kind)) {
            true => Ok(Some(kinds)),
            false => Err(self.unsupported(KEY)),
        }
    }

    /// For each layer whether its feed-forward block is a mixture of experts, from `mlp_layer_types`; all are by default.
    pub fn sparse_layers(&self) -> Result<Vec<bool>, ModelError> {
        const KEY: &str = "mlp_layer_types";
        let layers = self.layers()?;
        if self.get(KEY).is_none() {
            return Ok(vec![true; layers]);
        }
        let sparse = self.list(KEY, "a list of \"dense\" and \"sparse\"", |kind| match kind.as_str()? {
            "sparse" => Some(true),
            "dense" => Some(false),
            _ => None,
        })?;
        if sparse.len() == layers { Ok(sparse) } else { Err(self.unsupported(KEY)) }
    }

    /// Which layers of a Muse model turn by position: those whose `layer_rope_theta` is not zero; without that key all but
    /// every fourth, counted from the last. The rotary embedding itself is one for all.
    pub fn turning_layers(&self) -> Result<Vec<bool>, ModelError> {
        const KEY: &str = "layer_rope_theta";
        let layers = self.layers()?;
        if self.get(KEY).is_none() {
            return Ok((0..layers).map(|i| !(layers - 1 - i).is_multiple_of(4)).collect());
        }
        let thetas = self.list(KEY, "a list of numbers", Value::as_f64)?;
        let turning: Vec<f64> = thetas.iter().copied().filter(|&theta| theta != 0.0).collect();
        if thetas.len() != layers || turning.iter().any(|&theta| theta != turning[0]) {
            return Err(self.unsupported(KEY));
        }
        Ok(thetas.iter().map(|&theta| theta != 0.0).collect())
    }

    /// Refuses the config unless the key is absent or holds one of `values`.
    pub fn only(&self, key: &str, values: &[Value]) -> Result<(), ModelError> {
        match self.get(key) {
            Some(found) if !values.contains(found) => Err(self.unsupported(key)),
            _ => Ok(()),
        }
    }

    /// The error of a feature that the architecture's file does not do.
    pub fn unsupported(&self, key: &str) -> ModelError {
        let value = self.get(key).unwrap_or(&Value::Null);
        ModelError::Unsupported {
            architecture: self.architecture().unwrap_or("?").to_string(),
            feature: format!("{} = {}", self.named(key).unwrap_or(key.into()), excerpt(&value.to_string())),
        }
    }

    /// A key as the user finds it: in `config.json`, or under GGUF's name for it in the metadata of a GGUF file.
    pub fn place(&self, key: &str) -> String {
        self.named(key).unwrap_or_else(|| format!("config.json: key {key:?}"))
    }

    /// GGUF's name for a key, in a configuration from there.
    fn named(&self, key: &str) -> Option<String> {
        gguf::config::metadata_key(self.root, key)
    }

    fn required<T>(&self, key: &str, expected: &str, read: impl Fn(&'a Value) -> Option<T>) -> Result<T, ModelError> {
        let value = self.get(key).ok_or_else(|| ModelError::MissingKey { key: self.place(key) })?;
        read(value).ok_or_else(|| self.bad(key, expected))
    }

    /// The error of a key whose value cannot be meant.
    pub fn bad(&self, key: &str, expected: &str) -> ModelError {
        let value = self.get(key).unwrap_or(&Value::Null).to_string();
        ModelError::BadKey { key: self.place(key), value: excerpt(&value).into(), expected: expected.to_string() }
    }
}

/// Architectures in whose configurations a window means nothing.
const WITHOUT_WINDOWS: &[&str] = &["llama"];

/// The largest count, so that products of two of them cannot overflow.
const MOST: u64 = (1 << 31) - 1;

fn as_count(value: &Value) -> Option<usize> {
    value.as_u64().filter(|&n| n <= MOST).map(|n| n as usize)
}

fn as_finite(value: &Value) -> Option<f64> {
    as_number(value).filter(|&number| (number as f32).is_finite())
}

/// Numbers may be written as tagged floats, `{"__float__": "Infinity"}`.
fn as_number(value: &Value) -> Option<f64> {
    match value.get("__float__") {
        Some(tagged) => tagged.as_str()?.parse().ok(),
        None => value.as_f64(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn mistakes_name_the_key_and_the_value() {
        let root = json!({"model_type": "llama", "a": {"b": -1}, "f": {"__float__": "Infinity"}, "n": null});
        let config = Config::new(&root);
        assert_eq!(config.limit("f").unwrap(), f64::INFINITY);
        assert_eq!(config.size_or("n", 7).unwrap(), 7);
        assert!(config.count("a.b").unwrap_err().to_string().contains("config.json: key \"a.b\" = -1"));
        assert!(config.count("c").unwrap_err().to_string().contains("\"c\" is missing"));
        assert!(config.only("a", &[json!(1)]).unwrap_err().to_string().contains("llama: a = "));

        let root = json!({"consort_gguf_architecture": "llama", "rope_parameters": {"factor": "x"}});
        let config = Config::new(&root);
        let missing = config.count("hidden_size").unwrap_err().to_string();
        assert_eq!(missing, "GGUF metadata: key \"llama.embedding_length\" is missing");
        let bad = config.number("rope_parameters.factor").unwrap_err().to_string();
        assert_eq!(bad, "GGUF metadata: key \"llama.rope.scaling.factor\" = \"x\": expected a finite number");
    }

    #[test]
    fn what_is_there_is_never_replaced_by_a_default() {
        let tagged = |word: &str| json!({ "__float__": word });
        let wrong =
            [tagged("NaN"), tagged("x"), json!("1"), json!([1]), json!({}), json!(true), json!({"__float__": 1})];
        for value in wrong.iter().chain(&[tagged("Infinity"), tagged("-Infinity"), json!(1e300), json!(-1e300)]) {
            let root = json!({ "k": value });
            let config = Config::new(&root);
            for outcome in [
                config.number_or("k", 1.0),
                config.multiplier_or("k", 1.0),
                config.number_in_or("k", 0.0..=1.0, 1.0),
                config.epsilon("k", 1e-6).map(f64::from),
            ] {
                let message = outcome.expect_err(&format!("{value} was read")).to_string();
                assert!(message.starts_with("config.json: key \"k\" = "), "{message}");
            }
        }
        for value in &wrong {
            assert!(Config::new(&json!({ "k": value })).limit_or("k", 1.0).is_err(), "{value}");
        }
        for value in [json!("true"), json!(1), json!([]), tagged("NaN")] {
            assert!(Config::new(&json!({ "k": value })).flag_or("k", true).is_err(), "{value}");
        }
        for value in [json!(-1), json!(1.0), json!("1"), json!([1]), json!(1u64 << 31), tagged("NaN"), json!(false)] {
            let root = json!({ "k": value });
            let config = Config::new(&root);
            assert!(config.count_or("k", 1).is_err() && config.size_or("k", 1).is_err(), "{value}");
            assert!(config.text("k").is_err() || value.is_string(), "{value}");
        }
        let root = json!({"k": null, "long": "x".repeat(1 << 20)});
        let config = Config::new(&root);
        assert_eq!((config.number_or("k", 0.5).unwrap(), config.flag_or("gone", true).unwrap()), (0.5, true));
        assert!(config.count("long").unwrap_err().to_string().len() < 400);
    }
}
