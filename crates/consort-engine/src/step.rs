//! The step log: what rank 0 tells the others to do.

use serde::{Deserialize, Serialize};

use crate::Sampling;

/// One message of the log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Command {
    /// Run a step.
    Run(Step),
    /// Each rank reports on itself.
    Report,
    /// The run is over.
    End,
}

/// One forward pass over a batch of token runs. A few hundred bytes: block tables travel as what is new in them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Counts from 0.
    pub number: u64,
    /// Sequences whose tables are dropped before the step.
    pub released: Vec<u64>,
    /// What is run.
    pub runs: Vec<StepRun>,
}

/// One sequence's part of a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepRun {
    /// The sequence.
    pub sequence: u64,
    /// Its slot in recurrent states.
    pub slot: u32,
    /// Position of the first token.
    pub start: u32,
    /// Token ids.
    pub tokens: Vec<u32>,
    /// Blocks appended to the sequence's table of layers that see everything.
    pub new_blocks: Vec<u32>,
    /// Blocks appended to the ring of its sliding-window layers.
    pub new_window_blocks: Vec<u32>,
    /// What rank 0 wants to know afterwards.
    pub want: Want,
}

/// What a run is for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Want {
    /// Only the cache: a chunk of a prompt that goes on.
    Nothing,
    /// The next token after the run.
    Token(Sampling),
    /// The logits of every token of the run.
    Logits,
}

/// What the sampling rank answers for a run that wants something.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Answer {
    /// The next token.
    Token(u32),
    /// `[tokens, vocabulary]`.
    Logits(Vec<f32>),
    /// The logits were not numbers.
    NotANumber,
}
