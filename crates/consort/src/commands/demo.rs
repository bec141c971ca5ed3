//! `consort demo`: one prompt, answered by one rank, by a pipeline of two and by two shards, and what each of them cost.

use anyhow::{Context, Result};
use clap::Args;
use consort_cluster::{Input, Recovery};
use consort_models::Plan;
use serde_json::Value;

use crate::invocation::Invocation;
use crate::model::ModelFiles;
use crate::output;
use crate::report::seconds;

/// Plans, in the order in which they answer.
const PLANS: [(&str, usize, usize); 3] = [
    ("one rank", 1, 1),
    ("two ranks, each with half of the layers", 2, 1),
    ("two ranks, each with a part of every layer", 1, 2),
];

#[derive(Args)]
pub struct Demo {
    /// What the model is asked
    #[arg(short, long, default_value = "In two sentences: why is the sky blue?")]
    prompt: String,
    /// Most tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// The model: a path, a known name or a name on the Hugging Face Hub
    #[arg(short, long, default_value = consort_checkpoint::pull::DEFAULT_MODEL)]
    model: String,
}

impl Demo {
    pub fn run(&self, invocation: &Invocation) -> Result<()> {
        // Fetched here and once, where its progress can be seen.
        ModelFiles::open(&self.model, None)?;
        let mut rows = Vec::new();
        for (meaning, pipeline, tensor) in PLANS {
            let plan = Plan::new(pipeline, tensor);
            eprintln!("\n{plan}: {meaning}");
            rows.push(self.answer(invocation, &plan)?);
        }
        let heading = [
            "plan",
            "transport",
            "weights per rank",
            "peak memory per rank",
            "first token",
            "prefill tok/s",
            "decode tok/s",
        ];
        output::text(&format!("\n{}", output::table(&heading, &rows)))?;
        Ok(())
    }

    /// Lets `generate` answer under a plan and returns its row of the table.
    fn answer(&self, invocation: &Invocation, plan: &Plan) -> Result<Vec<String>> {
        let file = tempfile::NamedTempFile::new().context("making a file for the figures")?;
        let (plan_text, max_tokens) = (plan.to_string(), self.max_tokens.to_string());
        let words = ["generate", "--model", &self.model, "--chat", "--max-tokens", &max_tokens, "--plan", &plan_text];
        let mut arguments: Vec<_> = words.iter().map(Into::into).collect();
        // Joined with its flag, so that a prompt may begin with a dash.
        arguments.push(format!("--prompt={}", self.prompt).into());
        arguments.extend(["--json".into(), file.path().into()]);
        invocation.launch(arguments, plan.ranks(), None, Input::Unused, Recovery::default())?;

        let answer: Value = serde_json::from_slice(&std::fs::read(file.path()).context("reading the figures")?)
            .context("reading the figures")?;
        let per_rank = |name: &str| {
            let ranks = answer["ranks"].as_array().map_or(&[][..], Vec::as_slice);
            let sizes = ranks.iter().map(|rank| rank[name].as_u64().map_or("unknown".to_owned(), output::size));
            sizes.collect::<Vec<_>>().join(" + ")
        };
        let timing = |name: &str| answer["timings"][name].as_f64();
        let rate = |name: &str| timing(name).map_or_else(|| "-".to_owned(), |rate| format!("{rate:.1}"));
        Ok(vec![
            plan_text,
            answer["conditions"]["transport"].as_str().unwrap_or_default().to_owned(),
            per_rank("weight_bytes"),
            per_rank("peak_memory_bytes"),
            seconds(timing("ttft_s").unwrap_or_default()),
            rate("prefill_tps"),
            rate("decode_tps"),
        ])
    }
}
