//! Rotary position embeddings: from a config to radians per position.
//!
//! The variants follow the definitions that checkpoints are published against (`modeling_rope_utils` of Hugging Face
//! transformers); YaRN is Peng et al. 2023, arXiv 2309.00071.

use std::f64::consts::PI;
use std::ops::RangeInclusive;

use consort_compute::{PairLayout, RopeSpec};
use serde_json::Value;

use crate::{Config, ModelError};

/// What can be meant by a base of the frequencies; published ones lie between ten thousand and a thousand million.
const THETAS: RangeInclusive<f64> = 2.0..=1e18;
/// By how much a context is stretched.
const FACTORS: RangeInclusive<f64> = 1e-3..=1e6;
/// Positions that a model was trained with before it was stretched.
const CONTEXTS: RangeInclusive<f64> = 1.0..=2_147_483_648.0;
/// Turns within that context.
const TURNS: RangeInclusive<f64> = 1e-6..=1e6;
/// The part of a head's features that turns.
const PARTS: RangeInclusive<f64> = 0.01..=1.0;
/// Factors on cosine and sine, and on their logarithmic growth, where 0 is none.
const MAGNITUDES: RangeInclusive<f64> = 1e-3..=1e3;
const GROWTHS: RangeInclusive<f64> = 0.0..=1e3;

/// Where configs describe their rotary embedding: newer ones, older ones.
const SECTIONS: [&str; 2] = ["rope_parameters", "rope_scaling"];

/// Members that scale a rotary embedding in a way that only its type tells.
const SCALING: &[&str] = &[
    "factor",
    "factors",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "short_factor",
    "long_factor",
];

/// What holds where a config says nothing.
#[derive(Clone, Copy, Debug)]
pub struct RopeDefaults {
    /// Base of the frequencies.
    pub theta: f64,
    /// The key outside a section that holds the base.
    pub theta_key: &'static str,
    /// The part of a head's features that turns.
    pub partial: f64,
}

impl Default for RopeDefaults {
    fn default() -> Self {
        Self { theta: 10_000.0, theta_key: "rope_theta", partial: 1.0 }
    }
}

/// The rotary embedding that `config` describes for heads of `head_dim` features.
///
/// # Errors
/// An unknown `rope_type` is refused by name; it is never run as plain RoPE. So are numbers that cannot be meant, and sections
/// or keys that contradict each other.
pub fn rope(config: &Config<'_>, head_dim: usize, defaults: RopeDefaults) -> Result<RopeSpec, ModelError> {
    let [newer, older] = SECTIONS;
    if config.get(newer).is_none() {
        return rope_in(config, older, head_dim, defaults);
    }
    let described = rope_in(config, newer, head_dim, defaults)?;
    if config.get(older).is_some() && rope_in(config, older, head_dim, defaults)? != described {
        return Err(config.bad(older, "the same as rope_parameters; remove the section that is not meant"));
    }
    Ok(described)
}

/// The rotary embedding that one section of a config describes.
pub fn rope_in(
    config: &Config<'_>,
    section: &str,
    head_dim: usize,
    defaults: RopeDefaults,
) -> Result<RopeSpec, ModelError> {
    let key = |name: &str| format!("{section}.{name}");
    let kind = kind(config, section)?;
    // A number of the section, or beside it.
    let number = |name: &str, beside: &str, range: RangeInclusive<f64>, default: f64| {
        let outside = config.number_in_or(beside, range.clone(), default)?;
        let inside = config.number_in_or(&key(name), range, outside)?;
        match inside == outside || config.get(beside).is_none() {
            true => Ok(inside),
            false => Err(config.bad(beside, &format!("{inside}, as {} says", key(name)))),
        }
    };
    let theta = number("rope_theta", defaults.theta_key, THETAS, defaults.theta)?;
    let partial = number("partial_rotary_factor", "partial_rotary_factor", PARTS, defaults.partial)?;
    config.number_in_or(&key("factor"), FACTORS, 1.0)?;
    let rotary_dims = rotary_dims(config, section, head_dim, partial)?;
    let plain = plain_frequencies(theta, rotary_dims);

    let (frequencies, magnitude) = match kind {
        // `dynamic` stretches positions once a sequence has outgrown `max_position_embeddings`, which is where a context ends
        // here. (Beyond, keys of one sequence would turn by different frequencies, depending on how it was cut into chunks.)
        // `mrope` (Qwen 2 with images) turns sections of a head by other coordinates, which are the position where all is text.
        None | Some("default" | "dynamic" | "mrope") => (plain, 1.0),
        Some("linear") => {
            let factor = config.number_in(&key("factor"), FACTORS)?;
            (plain.iter().map(|f| f / factor).collect(), 1.0)
        }
        Some("llama3") => (llama3(config, &key, &plain)?, 1.0),
        Some("yarn") => yarn(config, &key, &plain, theta, rotary_dims)?,
        // What GGUF files carry: the outcome of a scaling rule, one divisor for each frequency.
        Some("factors") => {
            let divisor = |v: &Value| v.as_f64().filter(|factor| FACTORS.contains(factor));
            let factors = config.list(&key("factors"), "a list of numbers above zero", divisor)?;
            if factors.len() != plain.len() {
                return Err(config.bad(&key("factors"), &format!("{} numbers", plain.len())));
            }
            (plain.iter().zip(factors).map(|(f, factor)| f / factor).collect(), 1.0)
        }
        Some(_) => {
            let named = if config.get(&key("rope_type")).is_some() { "rope_type" } else { "type" };
            return Err(config.unsupported(&key(named)));
        }
    };
    Ok(spec(config, head_dim, &frequencies, magnitude))
}

/// How many features of a head turn: pairs of them, so an even number.
fn rotary_dims(config: &Config<'_>, section: &str, head_dim: usize, partial: f64) -> Result<usize, ModelError> {
    let dims = head_dim as f64 * partial;
    // A part that was divided by the head's features may miss the whole number by its rounding.
    let dims = if (dims - dims.round()).abs() < 1e-6 { dims.round() } else { dims.floor() } as usize;
    if dims > 0 && dims.is_multiple_of(2) {
        return Ok(dims);
    }
    let part = "partial_rotary_factor";
    let keys = [format!("{section}.{part}"), part.into(), "head_dim".into(), "num_attention_heads".into()];
    let key = keys.iter().find(|key| config.get(key).is_some()).unwrap_or(&keys[3]);
    Err(config
        .bad(key, &format!("an even number of rotary features, 2 or more; {dims} of each head's {head_dim} are meant")))
}

/// The type that a section names, in newer or in older words.
fn kind<'a>(config: &Config<'a>, section: &str) -> Result<Option<&'a str>, ModelError> {
    let Some(found) = config.get(section) else { return Ok(None) };
    let Some(members) = found.as_object() else { return Err(config.bad(section, "an object, or null")) };
    let is_section = |value: &Value| value.is_object() && value.get("__float__").is_none();
    if let Some((name, _)) = members.iter().find(|(_, value)| is_section(value)) {
        return Err(config.bad(&format!("{section}.{name}"), "a number, a text or a list"));
    }
    let named = |name: &str| {
        let key = format!("{section}.{name}");
        config.get(&key).map(|_| config.text(&key)).transpose()
    };
    match (named("rope_type")?, named("type")?) {
        (Some(newer), Some(older)) if newer != older => {
            Err(config.bad(&format!("{section}.type"), &format!("{newer:?}, as {section}.rope_type says")))
        }
        (None, None) => match SCALING.iter().find(|name| config.get(&format!("{section}.{name}")).is_some()) {
            Some(name) => Err(config.bad(section, &format!("a rope_type beside {name}"))),
            None => Ok(None),
        },
        (newer, older) => Ok(newer.or(older)),
    }
}

/// The unscaled rotary embedding whose base lies under `theta_key`.
pub fn plain_rope(config: &Config<'_>, head_dim: usize, defaults: RopeDefaults) -> Result<RopeSpec, ModelError> {
    let theta = config.number_in_or(defaults.theta_key, THETAS, defaults.theta)?;
    Ok(spec(config, head_dim, &plain_frequencies(theta, head_dim), 1.0))
}

fn plain_frequencies(theta: f64, rotary_dims: usize) -> Vec<f64> {
    (0..rotary_dims / 2).map(|i| theta.powf(-2.0 * i as f64 / rotary_dims as f64)).collect()
}

fn spec(config: &Config<'_>, head_dim: usize, frequencies: &[f64], magnitude: f64) -> RopeSpec {
    let pairs = match config.get("consort_rope_pairs").and_then(|v| v.as_str()) {
        Some("interleaved") => PairLayout::Interleaved,
        _ => PairLayout::Halves,
    };
    RopeSpec {
        head_dim,
        inverse_frequencies: frequencies.iter().map(|&f| f as f32).collect(),
        magnitude: magnitude as f32,
        pairs,
    }
}

/// Llama 3.1: wavelengths beyond the original context are stretched by `factor`, short ones kept, those between blended.
fn llama3(config: &Config<'_>, key: &dyn Fn(&str) -> String, plain: &[f64]) -> Result<Vec<f64>, ModelError> {
    let factor = config.number_in(&key("factor"), FACTORS)?;
    let low = config.number_in(&key("low_freq_factor"), TURNS)?;
    let high = config.number_in(&key("high_freq_factor"), TURNS)?;
    let context = config.number_in(&key("original_max_position_embeddings"), CONTEXTS)?;
    if low >= high {
        return Err(config.bad(&key("low_freq_factor"), &format!("less than high_freq_factor, which is {high}")));
    }
    let stretched = |&frequency: &f64| {
        let turns = context * frequency / (2.0 * PI);
        let keep = ((turns - low) / (high - low)).clamp(0.0, 1.0);
        keep * frequency + (1.0 - keep) * frequency / factor
    };
    Ok(plain.iter().map(stretched).collect())
}

/// YaRN: frequencies that turn more than `beta_fast` times in the original context are kept, those that turn less than
/// `beta_slow` times are stretched, a linear ramp lies between; cosine and sine are scaled by the attention factor.
fn yarn(
    config: &Config<'_>,
    key: &dyn Fn(&str) -> String,
    plain: &[f64],
    theta: f64,
    dims: usize,
) -> Result<(Vec<f64>, f64), ModelError> {
    let factor = config.number_in(&key("factor"), FACTORS)?;
    let fast = config.number_in_or(&key("beta_fast"), TURNS, 32.0)?;
    let slow = config.number_in_or(&key("beta_slow"), TURNS, 1.0)?;
    if fast < slow {
        return Err(config.bad(&key("beta_fast"), &format!("no less than beta_slow, which is {slow}")));
    }
    let original = key("original_max_position_embeddings");
    let original = if config.get(&original).is_some() { original } else { "max_position_embeddings".into() };
    let context = config.number_in(&original, CONTEXTS)?;

    let magnitude = |mscale: f64| if factor > 1.0 { 0.1 * mscale * factor.ln() + 1.0 } else { 1.0 };
    let growth = |name: &str| config.number_in_or(&key(name), GROWTHS, 0.0);
    let (mscale, all) = (growth("mscale")?, growth("mscale_all_dim")?);
    let attention_factor = match config.get(&key("attention_factor")) {
        Some(_) => config.number_in(&key("attention_factor"), MAGNITUDES)?,
        None if mscale != 0.0 && all != 0.0 => magnitude(mscale) / magnitude(all),
        None => magnitude(1.0),
    };

    let dim_of = |turns: f64| dims as f64 * (context / (turns * 2.0 * PI)).ln() / (2.0 * theta.ln());
    let truncate = config.flag_or(&key("truncate"), true)?;
    let (mut low, mut high) = (dim_of(fast), dim_of(slow));
    if truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    (low, high) = (low.max(0.0), high.min(dims as f64 - 1.0));
    if low == high {
        high += 0.001; // as the reference does: a ramp of no width would divide by zero
    }
    let frequencies = plain
        .iter()
        .enumerate()
        .map(|(i, frequency)| {
            let stretch = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            frequency / factor * stretch + frequency * (1.0 - stretch)
        })
        .collect();
    Ok((frequencies, attention_factor))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn rope_of(root: &Value, head_dim: usize) -> Result<RopeSpec, ModelError> {
        rope(&Config::new(root), head_dim, RopeDefaults::default())
    }

    fn close(found: f32, expected: f64) {
        assert!((f64::from(found) - expected).abs() < 2e-6 * expected.abs(), "{found} is not {expected}");
    }

    #[test]
    fn llama3_keeps_blends_and_stretches() {
        // Values of Llama 3.2 1B, computed with the reference implementation.
        for name in ["rope_type", "type"] {
            for place in ["rope_scaling", "rope_parameters"] {
                let root = json!({"model_type": "llama", "rope_theta": 500000.0, place: {name: "llama3", "factor": 32.0,
                    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}});
                let spec = rope_of(&root, 64).unwrap();
                let expected = [(14, 3.21144599e-3), (15, 1.29054793e-3), (16, 4.29556797e-4), (17, 9.7082878e-5)];
                for (i, value) in expected.into_iter().chain([(18, 1.94616382e-5), (31, 9.41830673e-8)]) {
                    close(spec.inverse_frequencies[i], value);
                }
            }
        }
    }

    #[test]
    fn yarn_scales_magnitude_and_ramps_between_its_betas() {
        let root = json!({"model_type": "ministral3", "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6,
            "factor": 64.0, "beta_fast": 4.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096}});
        let spec = rope_of(&root, 128).unwrap();
        close(spec.magnitude, 1.4158883);
        let plain = |i: usize| 1e6f64.powf(-2.0 * i as f64 / 128.0);
        close(spec.inverse_frequencies[23], plain(23));
        close(spec.inverse_frequencies[31], plain(31) / 64.0);
        let ramp = 1.0 / 8.0;
        close(spec.inverse_frequencies[24], plain(24) * (1.0 - ramp + ramp / 64.0));
    }

    #[test]
    fn equal_mscales_cancel_and_an_attention_factor_decides() {
        // As the reference computes them; a published pair of ones means a magnitude of one.
        let with = |extra: (&str, f64), more: (&str, f64)| {
            let root = json!({"model_type": "ministral3", "max_position_embeddings": 4096, "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e6, "factor": 64.0, extra.0: extra.1, more.0: more.1}});
            rope_of(&root, 128).unwrap().magnitude
        };
        close(with(("mscale", 1.0), ("mscale_all_dim", 1.0)), 1.0);
        close(with(("mscale", 1.0), ("mscale_all_dim", 0.0)), 1.4158883);
        close(with(("mscale", 1.0), ("attention_factor", 1.25)), 1.25);
    }

    #[test]
    fn dynamic_scaling_changes_nothing_up_to_the_context() {
        let with = |scaling| rope_of(&json!({"model_type": "llama", "rope_scaling": scaling}), 64).unwrap();
        assert_eq!(with(json!({"rope_type": "dynamic", "factor": 4.0})), with(json!(null)));
    }

    #[test]
    fn divisors_of_a_gguf_file_apply_one_for_each_frequency() {
        let root = json!({"model_type": "llama", "rope_parameters": {"rope_type": "factors", "factors": [1.0, 4.0]}});
        let spec = rope_of(&root, 4).unwrap();
        close(spec.inverse_frequencies[0], 1.0);
        close(spec.inverse_frequencies[1], 0.01 / 4.0);
        assert!(rope_of(&root, 8).unwrap_err().to_string().contains("factors"));
    }

    #[test]
    fn an_unknown_type_is_refused() {
        let root = json!({"model_type": "llama", "rope_scaling": {"rope_type": "spiral", "factor": 2.0}});
        assert!(rope_of(&root, 64).unwrap_err().to_string().contains("spiral"));
    }

    /// What is wrong in a config of these members, beside what every config has.
    fn refused(members: Value) -> String {
        let mut root = json!({"model_type": "llama", "max_position_embeddings": 4096});
        root.as_object_mut().unwrap().extend(members.as_object().unwrap().clone());
        rope_of(&root, 64).expect_err(&members.to_string()).to_string()
    }

    #[test]
    fn numbers_that_cannot_be_meant_are_refused_by_key() {
        let tagged = |word: &str| json!({ "__float__": word });
        let out_of_range =
            [tagged("NaN"), tagged("Infinity"), json!(1e300), json!(0), json!(-4), json!("4"), json!([4])];
        let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192});
        let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
            "beta_slow": 1.0, "attention_factor": 1.0});
        let linear = json!({"rope_type": "linear", "factor": 4.0});
        for section in [llama3, yarn, linear] {
            rope_of(&json!({"model_type": "llama", "rope_scaling": section}), 64).unwrap();
            for name in section.as_object().unwrap().keys().filter(|name| *name != "rope_type") {
                for value in &out_of_range {
                    let mut section = section.clone();
                    section[name] = value.clone();
                    let message = refused(json!({ "rope_scaling": section }));
                    assert!(message.starts_with(&format!("config.json: key \"rope_scaling.{name}\" = ")), "{message}");
                    assert!(message.contains("expected a number from"), "{message}");
                }
            }
        }
        for value in out_of_range.iter().chain(&[json!(1)]) {
            assert!(refused(json!({"rope_theta": value})).contains("key \"rope_theta\" = "), "{value}");
            let inside = refused(json!({"rope_parameters": {"rope_theta": value}}));
            assert!(inside.contains("key \"rope_parameters.rope_theta\" = "), "{inside}");
        }
        for value in [tagged("NaN"), json!(0), json!(1.5), json!("0.5")] {
            assert!(refused(json!({"partial_rotary_factor": value})).contains("partial_rotary_factor"), "{value}");
        }
        let divisors = json!({"rope_parameters": {"rope_type": "factors", "factors": [1.0, null]}});
        assert!(refused(divisors).contains("a list of numbers above zero"));
    }

    #[test]
    fn contradictions_are_refused_by_key() {
        let linear = |factor: f64| json!({"rope_type": "linear", "factor": factor});
        let mut failures = Vec::new();
        for (members, expected) in [
            (json!({"rope_scaling": "linear"}), "\"rope_scaling\" = \"linear\": expected an object"),
            (json!({"rope_scaling": [4]}), "\"rope_scaling\" = [4]: expected an object"),
            (json!({"rope_scaling": true}), "\"rope_scaling\" = true: expected an object"),
            (json!({"rope_parameters": 4}), "\"rope_parameters\" = 4: expected an object"),
            (json!({"rope_scaling": {"factor": 4}}), "expected a rope_type beside factor"),
            (
                json!({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 4}}),
                "expected \"yarn\", as rope_scaling.rope_type says",
            ),
            (json!({"rope_scaling": {"rope_type": 4}}), "\"rope_scaling.rope_type\" = 4: expected a text"),
            (
                json!({"rope_scaling": linear(4.0), "rope_parameters": linear(8.0)}),
                "expected the same as rope_parameters",
            ),
            (
                json!({"rope_scaling": linear(4.0), "rope_parameters": {"rope_type": "default"}}),
                "expected the same as rope_parameters",
            ),
            (
                json!({"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4}}),
                "\"rope_theta\" = 1000000.0: expected 10000, as rope_parameters",
            ),
            (
                json!({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}),
                "\"rope_parameters.full_attention\" = ",
            ),
            (
                json!({"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4,
                    "original_max_position_embeddings": 8192}}),
                "\"rope_scaling.low_freq_factor\" = 4: expected less than high_freq_factor",
            ),
            (
                json!({"rope_scaling": {"rope_type": "yarn", "factor": 4, "beta_fast": 1, "beta_slow": 32}}),
                "\"rope_scaling.beta_fast\" = 1: expected no less than beta_slow",
            ),
        ] {
            let message = refused(members);
            if !message.contains(expected) {
                failures.push(message);
            }
        }
        assert!(failures.is_empty(), "{}", failures.join("\n"));
        let agreeing = json!({"model_type": "llama", "rope_theta": 1e6, "rope_scaling": linear(4.0),
            "rope_parameters": {"type": "linear", "rope_type": "linear", "factor": 4, "rope_theta": 1e6}});
        let alone = json!({"model_type": "llama", "rope_theta": 1e6, "rope_scaling": linear(4.0)});
        assert_eq!(rope_of(&agreeing, 64).unwrap(), rope_of(&alone, 64).unwrap());
        let bare = json!({"model_type": "llama", "rope_parameters": {"rope_theta": 1e4, "mrope_section": [2, 1, 1]}});
        assert_eq!(rope_of(&bare, 64).unwrap(), rope_of(&json!({"model_type": "llama"}), 64).unwrap());
        let sections = json!({"model_type": "qwen2", "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}});
        assert_eq!(rope_of(&sections, 64).unwrap(), rope_of(&json!({"model_type": "qwen2"}), 64).unwrap());
    }
}
