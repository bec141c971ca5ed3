//! Rotary position embeddings: from a config to radians per position.
//!
//! The variants follow the definitions that checkpoints are published against (`modeling_rope_utils` of Hugging Face
//! transformers); YaRN is Peng et al. 2023, arXiv 2309.00071.

use std::f64::consts::PI;

use consort_compute::{PairLayout, RopeSpec};

use crate::{Config, ModelError};

/// What holds where a config says nothing.
#[derive(Clone, Copy, Debug)]
pub struct RopeDefaults {
    /// Base of the frequencies.
    pub theta: f64,
    /// The part of a head's features that turns.
    pub partial: f64,
}

impl Default for RopeDefaults {
    fn default() -> Self {
        Self { theta: 10_000.0, partial: 1.0 }
    }
}

/// The rotary embedding that `config` describes for heads of `head_dim` features.
///
/// # Errors
/// An unknown `rope_type` is refused by name; it is never run as plain RoPE.
pub fn rope(config: &Config<'_>, head_dim: usize) -> Result<RopeSpec, ModelError> {
    rope_in(config, section(config), head_dim, RopeDefaults::default())
}

/// Where a config describes its rotary embedding.
pub fn section(config: &Config<'_>) -> &'static str {
    if config.get("rope_parameters").is_some() { "rope_parameters" } else { "rope_scaling" }
}

/// The rotary embedding that one section of a config describes.
pub fn rope_in(
    config: &Config<'_>,
    section: &str,
    head_dim: usize,
    defaults: RopeDefaults,
) -> Result<RopeSpec, ModelError> {
    let key = |name: &str| format!("{section}.{name}");
    let number = |name: &str, default: f64| match config.get(&key(name)) {
        Some(_) => config.number(&key(name)),
        None => config.number_or(name, default),
    };
    let theta = number("rope_theta", defaults.theta)?;
    if theta.is_nan() || theta <= 0.0 || theta > 1e18 {
        return Err(config.unsupported("rope_theta"));
    }
    let partial = number("partial_rotary_factor", defaults.partial)?;
    if partial.is_nan() || partial <= 0.0 || partial > 1.0 {
        return Err(config.unsupported("partial_rotary_factor"));
    }
    let factor = if config.get(&key("factor")).is_some() { config.number(&key("factor"))? } else { 1.0 };
    if factor.is_nan() || factor <= 0.0 {
        return Err(config.unsupported(&key("factor")));
    }
    let rotary_dims = (head_dim as f64 * partial) as usize & !1;
    let plain = plain_frequencies(theta, rotary_dims);

    let type_key = if config.get(&key("rope_type")).is_some() { key("rope_type") } else { key("type") };
    let (frequencies, magnitude) = match config.get(&type_key).map(|v| v.as_str().unwrap_or_default()) {
        None | Some("default") => (plain, 1.0),
        // Stretches positions once a sequence has outgrown `max_position_embeddings`, which is where a context ends here.
        // (Beyond, keys of one sequence would turn by different frequencies, depending on how it was cut into chunks.)
        Some("dynamic") => (plain, 1.0),
        Some("linear") => {
            let factor = config.number(&key("factor"))?;
            (plain.iter().map(|f| f / factor).collect(), 1.0)
        }
        Some("llama3") => (llama3(config, &key, &plain)?, 1.0),
        Some("yarn") => yarn(config, &key, &plain, theta, rotary_dims)?,
        // What GGUF files carry: the outcome of a scaling rule, one divisor for each frequency.
        Some("factors") => {
            let factors = config.list(&key("factors"), "a list of numbers", |v| v.as_f64())?;
            if factors.len() != plain.len() {
                return Err(config.unsupported(&key("factors")));
            }
            (plain.iter().zip(factors).map(|(f, factor)| f / factor).collect(), 1.0)
        }
        Some(_) => return Err(config.unsupported(&type_key)),
    };
    Ok(spec(config, head_dim, &frequencies, magnitude))
}

/// The unscaled rotary embedding with base `theta`.
pub fn plain_rope(config: &Config<'_>, head_dim: usize, theta: f64) -> RopeSpec {
    spec(config, head_dim, &plain_frequencies(theta, head_dim), 1.0)
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
    let factor = config.number(&key("factor"))?;
    let low = config.number(&key("low_freq_factor"))?;
    let high = config.number(&key("high_freq_factor"))?;
    let context = config.number(&key("original_max_position_embeddings"))?;
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
    let factor = config.number(&key("factor"))?;
    let fast = config.number_or(&key("beta_fast"), 32.0)?;
    let slow = config.number_or(&key("beta_slow"), 1.0)?;
    let context = match config.get(&key("original_max_position_embeddings")) {
        Some(_) => config.number(&key("original_max_position_embeddings"))?,
        None => config.number("max_position_embeddings")?,
    };

    let magnitude = |mscale: f64| if factor > 1.0 { 0.1 * mscale * factor.ln() + 1.0 } else { 1.0 };
    let (mscale, all) = (config.number_or(&key("mscale"), 0.0)?, config.number_or(&key("mscale_all_dim"), 0.0)?);
    let attention_factor = match config.get(&key("attention_factor")) {
        Some(_) => config.number(&key("attention_factor"))?,
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
                let spec = rope(&Config::new(&root), 64).unwrap();
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
        let spec = rope(&Config::new(&root), 128).unwrap();
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
            rope(&Config::new(&root), 128).unwrap().magnitude
        };
        close(with(("mscale", 1.0), ("mscale_all_dim", 1.0)), 1.0);
        close(with(("mscale", 1.0), ("mscale_all_dim", 0.0)), 1.4158883);
        close(with(("mscale", 1.0), ("attention_factor", 1.25)), 1.25);
    }

    #[test]
    fn dynamic_scaling_changes_nothing_up_to_the_context() {
        let with = |scaling| rope(&Config::new(&json!({"model_type": "llama", "rope_scaling": scaling})), 64).unwrap();
        assert_eq!(with(json!({"rope_type": "dynamic", "factor": 4.0})), with(json!(null)));
    }

    #[test]
    fn divisors_of_a_gguf_file_apply_one_for_each_frequency() {
        let root = json!({"model_type": "llama", "rope_parameters": {"rope_type": "factors", "factors": [1.0, 4.0]}});
        let spec = rope(&Config::new(&root), 4).unwrap();
        close(spec.inverse_frequencies[0], 1.0);
        close(spec.inverse_frequencies[1], 0.01 / 4.0);
        assert!(rope(&Config::new(&root), 8).unwrap_err().to_string().contains("factors"));
    }

    #[test]
    fn an_unknown_type_is_refused() {
        let root = json!({"model_type": "llama", "rope_scaling": {"rope_type": "spiral", "factor": 2.0}});
        assert!(rope(&Config::new(&root), 64).unwrap_err().to_string().contains("spiral"));
    }
}
