//! Model files: safetensors, GGUF, `config.json`, quantization schemes, tokenizer and chat template; byte-range reads.
//!
//! [`Checkpoint`] hides which container and which quantization scheme a model is published in. Everything above it sees
//! Hugging Face module names, a `config.json`-shaped [`Checkpoint::config`], and matrices whose blocks decode by themselves.

pub mod chat;
mod checkpoint;
mod error;
mod foreign;
pub mod gguf;
mod manifest;
pub mod pull;
pub mod source;
pub mod tokenizer;
mod weight;

pub use checkpoint::{Checkpoint, TensorInfo};
pub use error::CheckpointError;
pub use manifest::Manifest;
