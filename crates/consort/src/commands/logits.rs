//! `consort logits`: the tool for comparing, with a reference or between plans.

use anyhow::Result;
use clap::Args;
use consort_cluster::Input;
use consort_engine::RankReport;
use serde::Serialize;

use crate::flags::{JsonFlag, PromptFlags, RunFlags};
use crate::invocation::Invocation;
use crate::report::Conditions;
use crate::{output, run};

/// Values per position that text shows when the user asks for no number.
const SHOWN: usize = 5;

#[derive(Args)]
pub struct Logits {
    /// A path, a known name (smollm2) or a name on the Hugging Face Hub (ORG/NAME)
    #[arg(short, long)]
    model: String,
    #[command(flatten)]
    prompt: PromptFlags,
    /// Only the K largest of each position, as pairs of token id and value
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(1..))]
    top: Option<u32>,
    #[command(flatten)]
    run: RunFlags,
    #[command(flatten)]
    json: JsonFlag,
}

/// The JSON object.
#[derive(Serialize)]
struct Answer {
    prompt_tokens: Vec<u32>,
    logits: Values,
    plan: String,
    ranks: Vec<RankReport>,
    conditions: Conditions,
}

/// Per position.
#[derive(Serialize)]
#[serde(untagged)]
enum Values {
    All(Vec<Vec<f32>>),
    Top(Vec<Vec<(u32, f32)>>),
}

impl Logits {
    pub fn run(&self, invocation: &Invocation) -> Result<()> {
        let prepared = run::start(invocation, &self.model, &self.run, Input::Unused, |model, options| {
            output::check_writable(&self.json)?;
            let tokens = self.prompt.token_ids(model)?;
            options.check_tokens(&model.outline, &tokens)?;
            Ok(tokens)
        })?;
        let Some((mut session, prompt_tokens)) = prepared else { return Ok(()) };
        let logits = session.driver.logits(&prompt_tokens)?;
        let conditions = session.conditions.clone();
        let ranks = session.finish()?;

        if !self.json.takes_stdout() {
            for (position, (token, row)) in prompt_tokens.iter().zip(&logits).enumerate() {
                let largest: Vec<String> = largest(row, self.top.map_or(SHOWN, |top| top as usize))
                    .iter()
                    .map(|(id, value)| format!("{id}:{value}"))
                    .collect();
                output::text(&format!("{position} {token} -> {}\n", largest.join(" ")))?;
            }
        }
        let logits = match self.top {
            Some(top) => Values::Top(logits.iter().map(|row| largest(row, top as usize)).collect()),
            None => Values::All(logits),
        };
        output::json(&self.json, &Answer { prompt_tokens, logits, plan: conditions.plan.clone(), ranks, conditions })
    }
}

/// The largest values with their places, largest first, lower ids first among equals.
fn largest(row: &[f32], most: usize) -> Vec<(u32, f32)> {
    let mut pairs: Vec<(u32, f32)> = (0..).zip(row.iter().copied()).collect();
    pairs.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    pairs.truncate(most);
    pairs
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_largest_come_first_and_ties_go_by_id() {
        assert_eq!(super::largest(&[0.5, 2.0, -1.0, 2.0], 3), [(1, 2.0), (3, 2.0), (0, 0.5)]);
        assert_eq!(super::largest(&[0.5], 9), [(0, 0.5)]);
    }
}
