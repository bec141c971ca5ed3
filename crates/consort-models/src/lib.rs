//! Architectures: for each family one file that turns a config into a table of weights with their partitions and a narrated
//! forward pass.
//!
//! * [`Plan`] says how ranks divide a model; [`Placement`] is one rank's place in it.
//! * [`partition`] divides heads, features, vocabulary and experts; the planner and the loader use the same functions.
//! * [`Loader`] reads just the part of each weight that a placement holds, and keeps the ledger of what it read.
//! * [`load`] looks an architecture up in the table of families and builds its [`Model`].

mod attention;
mod batch;
pub mod config;
mod decoder;
mod delta_net;
mod error;
mod experts;
mod feed_forward;
mod gather;
mod gemma3;
mod gpt_oss;
mod llama;
mod loader;
mod mixture;
mod muse_glimmer;
mod muse_spark;
pub mod partition;
mod pass;
mod plan;
mod projection;
mod qwen3_5;
mod read_ahead;
mod registry;
mod repacked;
mod rope;
mod unused;

pub use batch::{Batch, BatchRun};
pub use config::Config;
pub use error::ModelError;
pub use loader::{Held, LoadHooks, Loader};
pub use pass::{CacheLayout, Pass, Ranks};
pub use plan::{ExpertDivision, Placement, Plan, PlanError};
pub use registry::{Built, LoadOptions, Loaded, Model, Outline, architectures, load, measure};
pub use repacked::RepackedCache;
