//! `consort generate`: continues a prompt.

use std::ops::ControlFlow;

use anyhow::Result;
use clap::Args;
use consort_cluster::Input;
use consort_engine::{FinishReason, RankReport, Request, Timings};
use serde::Serialize;
use serde_json::json;

use crate::flags::{JsonFlag, PromptFlags, RunFlags, SamplingFlags};
use crate::invocation::Invocation;
use crate::report::{self, Conditions};
use crate::resume::generate;
use crate::{output, run};

#[derive(Args)]
pub struct Generate {
    /// A path, a known name (smollm2) or a name on the Hugging Face Hub (ORG/NAME)
    #[arg(short, long)]
    model: String,
    #[command(flatten)]
    prompt: PromptFlags,
    /// Take the prompt as a user's message: wrap it in the model's chat template
    #[arg(long, conflicts_with = "tokens")]
    chat: bool,
    /// Most tokens to generate
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// Go on past tokens that end an answer
    #[arg(long)]
    ignore_eos: bool,
    #[command(flatten)]
    sampling: SamplingFlags,
    #[command(flatten)]
    run: RunFlags,
    #[command(flatten)]
    json: JsonFlag,
}

/// The JSON object.
#[derive(Serialize)]
struct Answer {
    prompt_tokens: Vec<u32>,
    tokens: Vec<u32>,
    /// How many of them an earlier start of a run that lost a rank had generated: part of the prompt that the timings speak of.
    replayed_tokens: usize,
    text: Option<String>,
    finish_reason: FinishReason,
    plan: String,
    ranks: Vec<RankReport>,
    timings: AllTimings,
    conditions: Conditions,
}

/// Loading and one generation.
#[derive(Serialize)]
pub struct AllTimings {
    /// Seconds to load the weights.
    pub load_s: f64,
    /// The phases of the generation.
    #[serde(flatten)]
    pub generation: Timings,
}

impl Generate {
    pub fn run(&self, invocation: &Invocation) -> Result<()> {
        let prepared = run::start(invocation, &self.model, &self.run, Input::Unused, |model, options| {
            output::check_writable(&self.json)?;
            let tokens = match (self.chat, &self.prompt.prompt) {
                (true, Some(text)) => model.encode_chat(&[json!({"role": "user", "content": text})])?,
                _ => self.prompt.token_ids(model)?,
            };
            options.check_prompt(&model.outline, &tokens)?;
            // A damaged tokenizer is told before anything is loaded, also where the prompt needs none.
            model.tokenizer_if_known()?;
            Ok((tokens, self.sampling.sampling()?))
        })?;
        let Some((mut session, (prompt_tokens, sampling))) = prepared else { return Ok(()) };

        let model = &session.model;
        let end_tokens = if self.ignore_eos { Vec::new() } else { model.end_tokens()? };
        let mut decoder = model.tokenizer_if_known()?.map(|tokenizer| tokenizer.continuation_decoder());
        let streams = !self.json.takes_stdout();
        let mut text = String::new();
        let mut show = |piece: String| {
            text.push_str(&piece);
            if streams { output::text(&piece) } else { Ok(()) }
        };
        let mut printed = Ok(());
        let max_tokens = Some(self.max_tokens as usize);
        let request = Request { prompt: prompt_tokens.clone(), max_tokens, end_tokens, sampling };
        let (generation, replayed_tokens) = generate(&mut session.driver, &mut session.replay, request, |token| {
            // Without a tokenizer, the ids are the answer.
            printed = show(decoder.as_mut().map_or_else(|| format!("{token} "), |decoder| decoder.push(token)));
            if printed.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        })?;
        let has_text = decoder.is_some();
        let rest = decoder.map(|mut decoder| decoder.finish()).unwrap_or_default();
        let last = show(rest + "\n");
        text.pop();

        // The other ranks end in order even if nobody reads the answer any more.
        let timings = AllTimings { load_s: session.load_s, generation: generation.timings };
        let conditions = session.conditions.clone();
        let ranks = session.finish()?;
        printed.and(last)?;
        eprintln!("{}", timings.line(prompt_tokens.len(), replayed_tokens, generation.tokens.len()));
        if conditions.ranks > 1 {
            eprint!("{}", report::rank_table(&ranks));
        }
        output::json(
            &self.json,
            &Answer {
                prompt_tokens,
                tokens: generation.tokens,
                replayed_tokens,
                text: has_text.then_some(text),
                finish_reason: generation.finish_reason,
                plan: conditions.plan.clone(),
                ranks,
                timings,
                conditions,
            },
        )
    }
}

impl AllTimings {
    /// One line for people.
    pub fn line(&self, prompt_tokens: usize, replayed_tokens: usize, tokens: usize) -> String {
        let Timings { ttft_s, prefill_tps, decode_tps } = self.generation;
        let decode = decode_tps.map_or_else(|| "-".to_owned(), |rate| format!("{rate:.1}"));
        let replayed = match replayed_tokens {
            0 => String::new(),
            tokens => format!(" and {tokens} that were replayed"),
        };
        format!(
            "loaded in {}; {}{replayed}: first token after {} (prefill {prefill_tps:.1} tok/s); {}: decode {decode} tok/s",
            report::seconds(self.load_s),
            report::count(prompt_tokens, "prompt token"),
            report::seconds(ttft_s),
            report::count(tokens - replayed_tokens, "token"),
        )
    }
}
