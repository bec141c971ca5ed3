//! Model files: safetensors, GGUF, `config.json`, quantization schemes, tokenizer and chat template; byte-range reads.
//!
//! [`Checkpoint`] hides which container and which quantization scheme a model is published in. Everything above it sees
//! Hugging Face module names, a `config.json`-shaped [`Checkpoint::config`], and [`Matrix`]es whose blocks decode by themselves.

use std::ops::Range;
use std::path::Path;

use consort_compute::{Format, Matrix};

/// What went wrong with a model's files. Every variant names the file or the tensor.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file could not be read.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: String,
        /// What the system said.
        source: std::io::Error,
    },
}

/// A model's weights and configuration on disk, opened but not read.
pub struct Checkpoint;

/// What the headers say about one weight.
#[derive(Clone, Debug)]
pub struct TensorInfo {
    /// Canonical name: Hugging Face's, without wrapper prefixes: `model.layers.0.self_attn.q_proj.weight`.
    pub name: String,
    /// How its values are stored.
    pub format: Format,
    /// Shape, outermost first; the last dimension runs along a row. Leading dimensions are stacked rows.
    pub shape: Vec<usize>,
    /// Bytes on disk, scales included.
    pub bytes: u64,
}

impl Checkpoint {
    /// Opens a GGUF file, or a directory with `config.json` and safetensors. Reads headers only.
    pub fn open(_path: &Path) -> Result<Self, CheckpointError> {
        todo!()
    }
    /// The model's configuration in the shape of Hugging Face's `config.json` (GGUF metadata is translated).
    pub fn config(&self) -> &serde_json::Value {
        todo!()
    }
    /// All weights, in file order.
    pub fn tensors(&self) -> &[TensorInfo] {
        todo!()
    }
    /// One weight.
    pub fn tensor(&self, _name: &str) -> Option<&TensorInfo> {
        todo!()
    }
    /// Reads a part of the named weights, stacked along their rows: the rows in `rows`, in order, and of each the columns in
    /// `columns` (`None`: all). Only the bytes of that part are touched. Column ranges must fall on block boundaries.
    pub fn read(
        &self,
        _names: &[&str],
        _rows: &[Range<usize>],
        _columns: Option<&[Range<usize>]>,
    ) -> Result<Matrix<'_>, CheckpointError> {
        todo!()
    }
    /// Reads a weight of any plain format as f32 values, whole.
    pub fn read_f32(&self, _name: &str) -> Result<Vec<f32>, CheckpointError> {
        todo!()
    }
    /// A hash over names, shapes, formats, sizes and headers (hex): equal on ranks with equal files.
    pub fn manifest_hash(&self) -> String {
        todo!()
    }
}
