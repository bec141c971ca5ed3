//! A rank at work: cache blocks, scheduler, step log, sampler, generation.
//!
//! Rank 0 holds a [`Driver`]. It queues sequences, builds numbered [`step::Step`]s and sends each to all ranks before it runs
//! its own part; every other rank [`Rank::follow`]s the log. All ranks run the same steps in the same order and nobody else
//! decides anything, which is what keeps collectives from ever meeting a rank that does something else.

mod blocks;
mod driver;
mod error;
mod rank;
mod sampler;
mod scheduler;
pub mod step;
mod supply;

pub use driver::{Driver, Generation, Timings};
pub use error::EngineError;
pub use rank::{Communication, Rank, RankOptions, RankReport, agreement};
pub use sampler::{Sampling, SamplingError};
pub use scheduler::{FinishReason, Request};
pub use supply::{Desk, Files, LoadProgress, compare_files, load_together};
