//! Which tokens run next: rank 0's queue of sequences and the steps that it builds from them.
//!
//! A step holds the next token of every sequence that is generating and, in what room is left, a chunk of the oldest prompt.
//! A sequence is admitted when the cache has room for the most that it may ever need, so that nothing that runs has to stop.

use std::collections::VecDeque;

use consort_models::Outline;

use crate::blocks::Pool;
use crate::step::{Answer, Step, StepRun, Want};
use crate::{EngineError, RankOptions, Sampling};

/// What to continue, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Token ids of the prompt.
    pub prompt: Vec<u32>,
    /// Most tokens to generate; `None`: as many as the context holds.
    pub max_tokens: Option<usize>,
    /// Tokens that end the answer; they are not part of it.
    pub end_tokens: Vec<u32>,
    /// How tokens are chosen.
    pub sampling: Sampling,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model ended it.
    Stop,
    /// It reached the token limit or the end of the context.
    Length,
    /// The caller wanted no more.
    Cancelled,
}

/// What a step led to.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Event {
    Token {
        sequence: u64,
        token: u32,
    },
    Finished {
        sequence: u64,
        reason: FinishReason,
    },
    /// The logits were not numbers.
    Failed {
        sequence: u64,
        position: usize,
    },
}

struct Sequence {
    id: u64,
    slot: u32,
    request: Request,
    /// Prompt and answer so far.
    tokens: Vec<u32>,
    /// Tokens of which the cache holds keys and values.
    cached: usize,
    /// Tokens at which the sequence ends at the latest.
    limit: usize,
    blocks: Vec<u32>,
    window_blocks: Vec<u32>,
}

pub(crate) struct Scheduler {
    options: RankOptions,
    outline: Outline,
    waiting: VecDeque<(u64, Request)>,
    running: Vec<Sequence>,
    released: Vec<u64>,
    blocks: Pool,
    window_blocks: Pool,
    slots: Pool,
    next_sequence: u64,
    next_step: u64,
}

impl Scheduler {
    pub(crate) fn new(options: RankOptions, outline: Outline) -> Self {
        Self {
            waiting: VecDeque::new(),
            running: Vec::new(),
            released: Vec::new(),
            blocks: Pool::new(options.sequences * options.blocks_per_sequence()),
            window_blocks: Pool::new(options.sequences * options.ring_blocks(&outline)),
            slots: Pool::new(options.sequences),
            next_sequence: 0,
            next_step: 0,
            options,
            outline,
        }
    }

    /// Checks a request and queues it.
    pub(crate) fn submit(&mut self, request: Request) -> Result<u64, EngineError> {
        request.sampling.check()?;
        self.options.check_prompt(&self.outline, &request.prompt)?;
        if request.max_tokens == Some(0) {
            return Err(EngineError::NoTokens);
        }
        let id = self.next_sequence;
        self.next_sequence += 1;
        self.waiting.push_back((id, request));
        Ok(id)
    }

    /// Ends a sequence early.
    pub(crate) fn cancel(&mut self, id: u64) {
        self.waiting.retain(|(waiting, _)| *waiting != id);
        if let Some(index) = self.running.iter().position(|s| s.id == id) {
            self.release(index);
        }
    }

    /// The next step, if there is anything to run.
    pub(crate) fn next_step(&mut self) -> Option<Step> {
        self.admit();
        let mut room = self.options.step_tokens;
        let mut runs = Vec::new();
        let block_tokens = self.options.block_tokens;
        let ring = self.options.ring_blocks(&self.outline);
        // Sequences that generate come first: each needs one token. Prompts share what room is left, oldest first.
        let (generating, prompts): (Vec<usize>, Vec<usize>) =
            (0..self.running.len()).partition(|&i| self.running[i].tokens.len() - self.running[i].cached == 1);
        for index in generating.into_iter().chain(prompts) {
            let sequence = &mut self.running[index];
            let count = (sequence.tokens.len() - sequence.cached).min(room);
            if count == 0 {
                break;
            }
            room -= count;
            let (start, end) = (sequence.cached, sequence.cached + count);
            let grow = |table: &mut Vec<u32>, pool: &mut Pool, most: usize| {
                let missing = end.div_ceil(block_tokens).min(most).saturating_sub(table.len());
                let new = pool.take(missing).expect("admission reserved the blocks");
                table.extend(&new);
                new
            };
            runs.push(StepRun {
                sequence: sequence.id,
                slot: sequence.slot,
                start: start as u32,
                tokens: sequence.tokens[start..end].to_vec(),
                new_blocks: grow(&mut sequence.blocks, &mut self.blocks, usize::MAX),
                new_window_blocks: grow(&mut sequence.window_blocks, &mut self.window_blocks, ring),
                want: match end == sequence.tokens.len() {
                    true => Want::Token(sequence.request.sampling),
                    false => Want::Nothing,
                },
            });
            sequence.cached = end;
        }
        if runs.is_empty() {
            return None;
        }
        let step = Step { number: self.next_step, released: std::mem::take(&mut self.released), runs };
        self.next_step += 1;
        Some(step)
    }

    /// A step that asks for the logits of `tokens`, which follow `start` tokens of sequence `sequence`; for comparisons, with
    /// the queue empty.
    pub(crate) fn logits_step(&mut self, tokens: &[u32], start: usize) -> Step {
        let block_tokens = self.options.block_tokens;
        let ring = self.options.ring_blocks(&self.outline);
        let blocks = |most: usize| {
            let held = start.div_ceil(block_tokens).min(most) as u32;
            let wanted = (start + tokens.len()).div_ceil(block_tokens).min(most) as u32;
            (held..wanted).collect()
        };
        let run = StepRun {
            sequence: u64::MAX,
            slot: 0,
            start: start as u32,
            tokens: tokens.to_vec(),
            new_blocks: blocks(usize::MAX),
            new_window_blocks: blocks(ring),
            want: Want::Logits,
        };
        let released = if start == 0 { vec![u64::MAX] } else { Vec::new() };
        let step = Step { number: self.next_step, released, runs: vec![run] };
        self.next_step += 1;
        step
    }

    /// Takes in the answers to a step.
    pub(crate) fn apply(&mut self, step: &Step, answers: Vec<Answer>) -> Vec<Event> {
        let mut events = Vec::new();
        let wanting = step.runs.iter().filter(|run| run.want != Want::Nothing);
        for (run, answer) in wanting.zip(answers) {
            let id = run.sequence;
            let Some(index) = self.running.iter().position(|s| s.id == id) else { continue };
            let sequence = &mut self.running[index];
            let finished = match answer {
                Answer::Token(token) if sequence.request.end_tokens.contains(&token) => Some(FinishReason::Stop),
                Answer::Token(token) => {
                    sequence.tokens.push(token);
                    events.push(Event::Token { sequence: id, token });
                    (sequence.tokens.len() >= sequence.limit).then_some(FinishReason::Length)
                }
                Answer::NotANumber | Answer::Logits(_) => {
                    let position = sequence.tokens.len() - 1;
                    events.push(Event::Failed { sequence: id, position });
                    self.release(index);
                    continue;
                }
            };
            if let Some(reason) = finished {
                events.push(Event::Finished { sequence: id, reason });
                self.release(index);
            }
        }
        events
    }

    /// Admits waiting requests, in order, while the cache holds all that they may need.
    fn admit(&mut self) {
        while let Some((_, request)) = self.waiting.front() {
            let most = request.max_tokens.map_or(self.options.context, |n| request.prompt.len().saturating_add(n));
            let limit = most.min(self.options.context);
            let reserved: usize = self.running.iter().map(|s| self.blocks_for(s.limit) - s.blocks.len()).sum();
            if self.slots.free() == 0 || self.blocks_for(limit) + reserved > self.blocks.free() {
                return;
            }
            let (id, request) = self.waiting.pop_front().expect("the front was just looked at");
            let slot = self.slots.take(1).expect("a slot is free")[0];
            let tokens = request.prompt.clone();
            let (blocks, window_blocks) = (Vec::new(), Vec::new());
            self.running.push(Sequence { id, slot, request, tokens, cached: 0, limit, blocks, window_blocks });
        }
    }

    fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.options.block_tokens)
    }

    fn release(&mut self, index: usize) {
        let sequence = self.running.remove(index);
        self.blocks.give_back(sequence.blocks);
        self.window_blocks.give_back(sequence.window_blocks);
        self.slots.give_back([sequence.slot]);
        self.released.push(sequence.id);
    }
}
