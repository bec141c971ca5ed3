//! Rank 0: drives the others and generates.

use std::ops::ControlFlow;
use std::time::Instant;

use consort_compute::Backend;
use consort_models::Outline;
use serde::Serialize;

use crate::scheduler::{Event, FinishReason, Request, Scheduler};
use crate::step::{Answer, Command, Step};
use crate::{EngineError, Rank, RankOptions, RankReport};

/// How long the phases of one generation took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Timings {
    /// Seconds from the request to the first token.
    pub ttft_s: f64,
    /// Prompt tokens per second until the first token.
    pub prefill_tps: f64,
    /// Generated tokens per second after the first token; none if there was only one.
    pub decode_tps: Option<f64>,
}

/// One answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    /// Generated token ids, without the end token.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// How long it took.
    pub timings: Timings,
}

/// Rank 0 of a run.
pub struct Driver<B: Backend> {
    rank: Rank<B>,
    scheduler: Scheduler,
}

impl<B: Backend> Driver<B> {
    /// Takes charge of a run. `rank` is rank 0.
    pub fn new(rank: Rank<B>) -> Self {
        let scheduler = Scheduler::new(*rank.options(), rank.outline().clone());
        Self { rank, scheduler }
    }

    /// What the model is like.
    pub fn outline(&self) -> &Outline {
        self.rank.outline()
    }

    /// How large caches and steps are.
    pub fn options(&self) -> &RankOptions {
        self.rank.options()
    }

    /// Continues a prompt. `on_token` sees each token as it comes and may end the answer.
    pub fn generate(
        &mut self,
        request: Request,
        mut on_token: impl FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Generation, EngineError> {
        let begin = Instant::now();
        let prompt_tokens = request.prompt.len();
        let id = self.scheduler.submit(request)?;
        let mut tokens = Vec::new();
        let mut first = None;
        let mut last = begin;
        let finish_reason = 'run: loop {
            let step = self.scheduler.next_step().expect("a sequence that is not finished has something to run");
            let answers = self.run(step.clone())?;
            for event in self.scheduler.apply(&step, answers) {
                match event {
                    Event::Token { sequence, token } if sequence == id => {
                        last = Instant::now();
                        first.get_or_insert(last);
                        tokens.push(token);
                        if on_token(token).is_break() {
                            self.scheduler.cancel(id);
                            break 'run FinishReason::Cancelled;
                        }
                    }
                    Event::Finished { sequence, reason } if sequence == id => break 'run reason,
                    Event::Failed { sequence, position } if sequence == id => {
                        return Err(EngineError::NotANumber { position });
                    }
                    // Left over from a request that ended early.
                    Event::Token { .. } | Event::Finished { .. } | Event::Failed { .. } => {}
                }
            }
        };
        let first = first.unwrap_or_else(Instant::now);
        let ttft_s = (first - begin).as_secs_f64();
        let decode_s = last.saturating_duration_since(first).as_secs_f64();
        let timings = Timings {
            ttft_s,
            prefill_tps: prompt_tokens as f64 / ttft_s,
            decode_tps: (tokens.len() > 1).then(|| (tokens.len() - 1) as f64 / decode_s),
        };
        Ok(Generation { tokens, finish_reason, timings })
    }

    /// Continues several prompts at once, as many in a step as there is room for; the answers' tokens, in the prompts' order.
    pub fn generate_together(&mut self, requests: Vec<Request>) -> Result<Vec<Vec<u32>>, EngineError> {
        let ids = requests.into_iter().map(|request| self.scheduler.submit(request)).collect::<Result<Vec<_>, _>>()?;
        let mut answers = vec![Vec::new(); ids.len()];
        while let Some(step) = self.scheduler.next_step() {
            let outcome = self.run(step.clone())?;
            for event in self.scheduler.apply(&step, outcome) {
                match event {
                    Event::Token { sequence, token } => {
                        if let Some(index) = ids.iter().position(|&id| id == sequence) {
                            answers[index].push(token);
                        }
                    }
                    Event::Failed { position, .. } => return Err(EngineError::NotANumber { position }),
                    Event::Finished { .. } => {}
                }
            }
        }
        Ok(answers)
    }

    /// The logits at every position of `tokens`: a list of `vocabulary` finite values each.
    pub fn logits(&mut self, tokens: &[u32]) -> Result<Vec<Vec<f32>>, EngineError> {
        self.options().check_tokens(self.outline(), tokens)?;
        let chunk = self.options().logit_rows.min(self.options().step_tokens);
        let vocabulary = self.outline().vocabulary;
        let mut logits = Vec::with_capacity(tokens.len());
        for (index, part) in tokens.chunks(chunk).enumerate() {
            let step = self.scheduler.logits_step(part, index * chunk);
            for answer in self.run(step)? {
                if let Answer::Logits(values) = answer {
                    logits.extend(values.chunks_exact(vocabulary).map(<[f32]>::to_vec));
                }
            }
        }
        match logits.iter().position(|row| row.iter().any(|logit| !logit.is_finite())) {
            Some(position) => Err(EngineError::NotANumber { position }),
            None => Ok(logits),
        }
    }

    /// Every rank's report, in rank order.
    pub fn reports(&mut self) -> Result<Vec<RankReport>, EngineError> {
        self.rank.announce(&Command::Report)?;
        self.rank.reports()
    }

    /// Ends the run on all ranks.
    pub fn end(mut self) -> Result<(), EngineError> {
        self.rank.announce(&Command::End)
    }

    fn run(&mut self, step: Step) -> Result<Vec<Answer>, EngineError> {
        let command = Command::Run(step);
        self.rank.announce(&command)?;
        let Command::Run(step) = &command else { unreachable!("it was just made") };
        self.rank.execute(step)
    }
}
