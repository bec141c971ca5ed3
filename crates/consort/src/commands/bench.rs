//! `consort bench`: time to first token, prefill and decode, each on its own, with all conditions.
//!
//! Prompts are random token ids, so that no cache of text can help and the content cannot end an answer early. One generation
//! warms caches and threads up and is not counted; the figures are medians of the rest.

use std::ops::ControlFlow;

use anyhow::Result;
use clap::Args;
use consort_cluster::Input;
use consort_engine::{RankReport, Request, Sampling, Timings};
use serde::Serialize;

use crate::commands::generate::AllTimings;
use crate::flags::{JsonFlag, RunFlags};
use crate::invocation::Invocation;
use crate::report::{self, Conditions};
use crate::roofline::RooflineReport;
use crate::{output, run};

#[derive(Args)]
pub struct Bench {
    /// A path, a known name (smollm2) or a name on the Hugging Face Hub (ORG/NAME)
    #[arg(short, long)]
    model: String,
    /// Tokens of the prompt
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    prompt_tokens: u32,
    /// Tokens to generate
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    generation_tokens: u32,
    /// Counted generations
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    repetitions: u32,
    /// Measure the limits of rank 0's machine too, and what fraction of them was reached
    #[arg(long)]
    roofline: bool,
    #[command(flatten)]
    run: RunFlags,
    #[command(flatten)]
    json: JsonFlag,
}

/// The JSON object.
#[derive(Serialize)]
struct Answer {
    prompt_tokens: u32,
    generation_tokens: u32,
    repetitions: u32,
    /// Medians.
    timings: AllTimings,
    /// Every counted generation.
    runs: Vec<Timings>,
    plan: String,
    ranks: Vec<RankReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    roofline: Option<RooflineReport>,
    conditions: Conditions,
}

impl Bench {
    pub fn run(&self, invocation: &Invocation) -> Result<()> {
        let mut flags = self.run.clone();
        flags.context.get_or_insert(self.prompt_tokens.saturating_add(self.generation_tokens));
        let prepared = run::start(invocation, &self.model, &flags, Input::Unused, |model, options| {
            output::check_writable(&self.json)?;
            options.check_context(&model.outline)?;
            options.check_prompt(&model.outline, &random_tokens(0, self.prompt_tokens, model.outline.vocabulary))?;
            Ok(())
        })?;
        let Some((mut session, ())) = prepared else { return Ok(()) };

        let mut runs = Vec::new();
        for seed in 0..=self.repetitions {
            let request = Request {
                prompt: random_tokens(seed, self.prompt_tokens, session.model.outline.vocabulary),
                max_tokens: Some(self.generation_tokens as usize),
                end_tokens: Vec::new(),
                sampling: Sampling::default(),
            };
            let timings = session.driver.generate(request, |_| ControlFlow::Continue(()))?.timings;
            let warms_up = seed == 0;
            if !warms_up {
                runs.push(timings);
            }
        }
        let generation = Timings {
            ttft_s: median(runs.iter().map(|run| run.ttft_s)).unwrap_or_default(),
            prefill_tps: median(runs.iter().map(|run| run.prefill_tps)).unwrap_or_default(),
            decode_tps: median(runs.iter().filter_map(|run| run.decode_tps)),
        };
        let timings = AllTimings { load_s: session.load_s, generation };
        let conditions = session.conditions.clone();
        let held = match self.roofline {
            true => Some(session.held()?),
            false => None,
        };
        let ranks = session.finish()?;
        let roofline = match held {
            Some(held) => {
                let cpu = run::cpu(&flags, invocation.identity.as_ref())?;
                Some(RooflineReport::measure(&cpu, &held, &timings.generation))
            }
            None => None,
        };
        if !self.json.takes_stdout() {
            let medians = format!("median of {} after warming up", report::count(runs.len(), "generation"));
            let figures = timings.line(self.prompt_tokens as usize, 0, self.generation_tokens as usize);
            let roofline = roofline.as_ref().map_or_else(String::new, |report| format!("{}\n", report.lines()));
            let table = report::rank_table(&ranks);
            output::text(&format!("{}\n{medians}: {figures}\n{table}{roofline}", conditions.line()))?;
        }
        output::json(
            &self.json,
            &Answer {
                prompt_tokens: self.prompt_tokens,
                generation_tokens: self.generation_tokens,
                repetitions: self.repetitions,
                timings,
                runs,
                plan: conditions.plan.clone(),
                ranks,
                roofline,
                conditions,
            },
        )
    }
}

/// Token ids from a linear congruential generator (the constants are Knuth's MMIX), the same for the same seed.
fn random_tokens(seed: u32, count: u32, vocabulary: usize) -> Vec<u32> {
    let mut state = u64::from(seed);
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % vocabulary as u64) as u32
    };
    (0..count).map(|_| next()).collect()
}

/// The middle value, or the mean of the two in the middle; none of nothing.
fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        odd if odd % 2 == 1 => Some(values[middle]),
        _ => Some((values[middle - 1] + values[middle]) / 2.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median([].into_iter()), None);
        assert_eq!(median([3.0, 1.0, 2.0].into_iter()), Some(2.0));
        assert_eq!(median([4.0, 1.0, 2.0, 3.0].into_iter()), Some(2.5));
    }

    #[test]
    fn random_tokens_are_in_the_vocabulary_and_differ() {
        let tokens = random_tokens(1, 1000, 7);
        assert!(tokens.iter().all(|&token| token < 7));
        assert!((0..7).all(|id| tokens.contains(&id)));
        assert_eq!(tokens, random_tokens(1, 1000, 7));
        assert_ne!(tokens, random_tokens(2, 1000, 7));
    }
}
