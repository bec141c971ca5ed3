//! Model files: safetensors, GGUF, `config.json`, quantization schemes, tokenizer and chat template; byte-range reads.
//!
//! [`Checkpoint`] hides which container and which quantization scheme a model is published in. Everything above it sees
//! Hugging Face module names, a `config.json`-shaped [`Checkpoint::config`], and matrices whose blocks decode by themselves.

// Selections are lists of ranges, and often of one.
#![allow(clippy::single_range_in_vec_init)]

pub mod chat;
mod checkpoint;
mod config;
pub mod convert;
mod error;
mod files;
mod foreign;
pub mod gguf;
mod huggingface;
mod json;
mod manifest;
mod mistral;
mod packed;
pub mod pull;
mod quantization;
pub mod remote;
pub mod safetensors;
pub mod scratch;
pub mod source;
pub mod tokenizer;
mod weight;

pub use checkpoint::{Checkpoint, TensorInfo, TensorName, holds_weights};
pub use error::{CheckpointError, excerpt};
pub use manifest::{Difference, Manifest, ManifestFile};
