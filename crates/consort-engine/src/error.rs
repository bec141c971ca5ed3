//! What can go wrong while a rank works.

use consort_checkpoint::CheckpointError;
use consort_fabric::FabricError;
use consort_models::ModelError;

use crate::SamplingError;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The prompt has no tokens.
    #[error("the prompt is empty: there is nothing to continue; pass some text or --tokens")]
    EmptyPrompt,
    /// Nothing may be generated.
    #[error("at most 0 tokens may be generated: ask for at least 1")]
    NoTokens,
    /// A token id that the model does not have.
    #[error("token {token} is outside the model's vocabulary of {vocabulary}")]
    UnknownToken {
        /// The id.
        token: u32,
        /// Entries of the vocabulary.
        vocabulary: usize,
    },
    /// The prompt fills the context.
    #[error(
        "the prompt has {context} tokens, the context holds {context}: no room for an answer; shorten it or raise --context (the model allows {most})"
    )]
    NoRoom {
        /// Tokens of the prompt, and of the context.
        context: usize,
        /// Tokens that the model allows.
        most: usize,
    },
    /// The prompt is longer than the context.
    #[error(
        "the prompt has {prompt} tokens, the context holds {context}; shorten it or raise --context (the model allows {most})"
    )]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens that the cache was made for.
        context: usize,
        /// Tokens that the model allows.
        most: usize,
    },
    /// A plan for another number of ranks.
    #[error("plan {plan} is for {needed} ranks, there are {ranks}")]
    PlanSize {
        /// The plan.
        plan: String,
        /// Ranks that it needs.
        needed: usize,
        /// Ranks of this run.
        ranks: usize,
    },
    /// A context beyond what the model was made for.
    #[error("a context of {context} tokens is more than the model's {most}")]
    ContextTooLong {
        /// What was asked for.
        context: usize,
        /// Tokens that the model allows.
        most: usize,
    },
    /// A context whose keys and values do not fit in memory.
    #[error(
        "keys and values of {context} tokens take {cache_gb:.1} GB, there are {memory_gb:.1} GB of memory; lower --context or use --kv-format q8"
    )]
    ContextTooLarge {
        /// What was asked for.
        context: usize,
        /// Memory that it takes.
        cache_gb: f64,
        /// Memory that there is.
        memory_gb: f64,
    },
    /// The logits were not numbers.
    #[error(
        "the model produced logits that are not numbers at position {position}; the checkpoint or a kernel is broken"
    )]
    NotANumber {
        /// The position whose logits they were.
        position: usize,
    },
    /// Steps did not arrive in order.
    #[error("step {found} arrived where step {expected} was due")]
    StepOrder {
        /// The number that was due.
        expected: u64,
        /// The number that came.
        found: u64,
    },
    /// A message of the step log could not be read.
    #[error("a message of the step log cannot be read: {0}")]
    Message(#[from] postcard::Error),
    /// A sampling parameter is out of range.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// The model's files.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The other ranks.
    #[error(transparent)]
    Fabric(#[from] FabricError),
}
