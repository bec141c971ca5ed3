//! From logits to the next token.
//!
//! Random numbers are a function of seed and position alone, so that a sequence that is replayed after a loss, or sampled on
//! another rank, continues with the same tokens.

use serde::{Deserialize, Serialize};

/// How the next token is chosen. Cuts apply in this order: temperature, top-k, top-p, min-p.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// 0 takes the most likely token, the lowest id on ties.
    pub temperature: f32,
    /// Keep the k most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the most likely tokens that together reach this probability; 1 keeps all, 0 keeps one.
    pub top_p: f32,
    /// Drop tokens less likely than this fraction of the most likely one; 0 drops none.
    pub min_p: f32,
    /// Seed of the random numbers.
    pub seed: u64,
}

/// A sampling parameter is out of range.
#[derive(Debug, thiserror::Error, PartialEq)]
#[error("{name} = {value}: must be {range}")]
pub struct SamplingError {
    name: &'static str,
    value: f32,
    range: &'static str,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0 }
    }
}

impl Sampling {
    /// Refuses parameters that are out of range, naming the first.
    pub fn check(&self) -> Result<(), SamplingError> {
        let error = |name, value, range| Err(SamplingError { name, value, range });
        match *self {
            Self { temperature: t, .. } if !(t.is_finite() && t >= 0.0) => error("temperature", t, "0 or more"),
            Self { top_p: p, .. } if !(0.0..=1.0).contains(&p) => error("top_p", p, "between 0 and 1"),
            Self { min_p: p, .. } if !(0.0..=1.0).contains(&p) => error("min_p", p, "between 0 and 1"),
            _ => Ok(()),
        }
    }

    /// The next token after position `position`, or `None` if the logits are not numbers.
    pub fn sample(&self, logits: &[f32], position: u64) -> Option<u32> {
        let best = argmax(logits)?;
        if self.temperature == 0.0 || self.top_p == 0.0 || self.top_k == 1 {
            return Some(best);
        }
        // Candidates with their weights relative to the best token, most likely first, lower ids first on ties.
        let peak = f64::from(logits[best as usize]);
        let weight = |&logit: &f32| ((f64::from(logit) - peak) / f64::from(self.temperature)).exp();
        let mut candidates: Vec<(u32, f64)> = logits.iter().enumerate().map(|(id, l)| (id as u32, weight(l))).collect();
        let likelier = |a: &(u32, f64), b: &(u32, f64)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        let most = self.top_k as usize;
        if 0 < most && most < candidates.len() {
            candidates.select_nth_unstable_by(most - 1, likelier);
            candidates.truncate(most);
        }
        if self.top_p < 1.0 || most > 0 {
            candidates.sort_by(likelier);
        }
        let total: f64 = candidates.iter().map(|c| c.1).sum();
        let mut reached = 0.0;
        let enough = candidates.iter().position(|c| {
            reached += c.1;
            reached >= f64::from(self.top_p) * total
        });
        candidates.truncate(enough.map_or(candidates.len(), |last| last + 1));
        candidates.retain(|c| c.1 >= f64::from(self.min_p));

        let total: f64 = candidates.iter().map(|c| c.1).sum();
        let mut remaining = uniform(self.seed, position) * total;
        let chosen = candidates.iter().find(|c| {
            remaining -= c.1;
            remaining < 0.0
        });
        chosen.or(candidates.last()).map(|c| c.0)
    }
}

/// The lowest id of the largest logit; `None` if any is NaN, or none is finite or positive infinity.
fn argmax(logits: &[f32]) -> Option<u32> {
    let mut best = 0;
    for (id, &logit) in logits.iter().enumerate() {
        if logit.is_nan() {
            return None;
        }
        if logit > logits[best] {
            best = id;
        }
    }
    logits.get(best).filter(|l| l.is_finite()).map(|_| best as u32)
}

/// A uniform number in [0, 1) from seed and position (two rounds of SplitMix64, Steele et al. 2014).
fn uniform(seed: u64, position: u64) -> f64 {
    let mix = |x: u64| {
        let x = (x ^ (x >> 30)).wrapping_mul(0xbf58476d1ce4e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d049bb133111eb);
        x ^ (x >> 31)
    };
    let step = 0x9e3779b97f4a7c15u64;
    let bits = mix(mix(seed.wrapping_add(step)).wrapping_add(position.wrapping_add(1).wrapping_mul(step)));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 3] = [0.0, 100.0, 9.0];

    #[test]
    fn limits_of_each_parameter_take_the_most_likely() {
        for sampling in [
            Sampling::default(),
            Sampling { temperature: 1e-30, ..Sampling::default() },
            Sampling { temperature: 1.0, top_k: 1, ..Sampling::default() },
            Sampling { temperature: 5.0, top_p: 0.0, ..Sampling::default() },
            Sampling { temperature: 5.0, min_p: 1.0, ..Sampling::default() },
        ] {
            for seed in 0..50 {
                assert_eq!(Sampling { seed, ..sampling }.sample(&LOGITS, seed), Some(1));
            }
        }
        assert_eq!(Sampling::default().sample(&[2.0, 7.0, 7.0], 0), Some(1));
    }

    #[test]
    fn what_is_not_a_number_is_no_token() {
        for logits in [[f32::NAN; 3], [0.0, f32::NAN, 1.0], [f32::NEG_INFINITY; 3], [0.0, f32::INFINITY, 0.0]] {
            assert_eq!(Sampling { temperature: 1.0, ..Sampling::default() }.sample(&logits, 0), None);
            assert_eq!(Sampling::default().sample(&logits, 0), None);
        }
    }

    #[test]
    fn out_of_range_is_refused_by_name() {
        let base = Sampling::default();
        for (sampling, name) in [
            (Sampling { temperature: f32::NAN, ..base }, "temperature"),
            (Sampling { temperature: -1.0, ..base }, "temperature"),
            (Sampling { temperature: f32::INFINITY, ..base }, "temperature"),
            (Sampling { top_p: 1.5, ..base }, "top_p"),
            (Sampling { min_p: -0.1, ..base }, "min_p"),
        ] {
            assert!(sampling.check().unwrap_err().to_string().starts_with(name));
        }
        assert_eq!(Sampling { top_k: 1_000_000_000, ..base }.check(), Ok(()));
    }

    /// Draws match the softmax distribution (chi-squared, 3 degrees of freedom, far tail).
    #[test]
    fn frequencies_follow_the_softmax() {
        let logits = [2.0f32, 1.0, 0.0, -1.0];
        let sampling = Sampling { temperature: 1.0, seed: 7, ..Sampling::default() };
        let draws = 20_000;
        let mut counts = [0u32; 4];
        for position in 0..draws {
            counts[sampling.sample(&logits, position).unwrap() as usize] += 1;
        }
        let total: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
        let chi_squared: f64 = (0..4)
            .map(|i| {
                let expected = f64::from(logits[i]).exp() / total * draws as f64;
                (f64::from(counts[i]) - expected).powi(2) / expected
            })
            .sum();
        assert!(chi_squared < 16.3, "{counts:?} gives {chi_squared}");
    }

    #[test]
    fn cuts_keep_what_they_should() {
        let logits = [0.0f32, 0.5, 1.0, 3.0];
        let drawn = |sampling: Sampling| {
            let mut seen: Vec<u32> = (0..2000).map(|p| sampling.sample(&logits, p).unwrap()).collect();
            seen.sort_unstable();
            seen.dedup();
            seen
        };
        let hot = Sampling { temperature: 3.0, ..Sampling::default() };
        assert_eq!(drawn(hot), [0, 1, 2, 3]);
        assert_eq!(drawn(Sampling { top_k: 2, ..hot }), [2, 3]);
        assert_eq!(drawn(Sampling { top_k: 1_000_000_000, ..hot }), [0, 1, 2, 3]);
        // Probabilities at temperature 3 are 0.159, 0.188, 0.222, 0.432 by id; 0.432 + 0.222 reaches 0.6.
        assert_eq!(drawn(Sampling { top_p: 0.6, ..hot }), [2, 3]);
        // Relative to the best: 0.368, 0.435, 0.513, 1.
        assert_eq!(drawn(Sampling { min_p: 0.4, ..hot }), [1, 2, 3]);
    }
}
