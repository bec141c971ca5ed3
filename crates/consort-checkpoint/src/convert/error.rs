//! What can go wrong while a model is converted.

use std::io;
use std::path::Path;

use crate::CheckpointError;

/// Why a model was not converted. Nothing is left behind in any of these cases.
#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    /// The source could not be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The output is there already.
    #[error("{path}: exists already; name a directory that doesn't")]
    Exists {
        /// The output.
        path: String,
    },
    /// The output has no name of its own: `.`, `..`, `/`.
    #[error("{path}: not the name of a new directory")]
    NoName {
        /// The output.
        path: String,
    },
    /// Whoever watched the progress said stop.
    #[error("interrupted; what was written is removed again")]
    Interrupted,
    /// The output could not be written.
    #[error("{path}: {error}")]
    Write {
        /// The file.
        path: String,
        /// What the system said.
        error: io::Error,
    },
    /// The output does not fit on the disk.
    #[error("{path}: the disk is full; the converted model takes {bytes} bytes, and what was written is removed again")]
    DiskFull {
        /// The output.
        path: String,
        /// Bytes of its weights.
        bytes: u64,
    },
    /// Nobody has checked how other programs name the tensors of this architecture.
    #[error("architecture {architecture:?} cannot be converted to {target} yet; {known} can")]
    Architecture {
        /// `model_type` of the source.
        architecture: String,
        /// What was asked for.
        target: String,
        /// What can be converted.
        known: String,
    },
    /// The configuration of the source has no equivalent.
    #[error("{key}: {reason}")]
    Config {
        /// The key.
        key: &'static str,
        /// Why not.
        reason: String,
    },
    /// A tensor does not fit its family.
    #[error("tensor {tensor}: {reason}")]
    Tensor {
        /// The tensor.
        tensor: String,
        /// What is wrong with it.
        reason: String,
    },
}

impl ConvertError {
    /// Wraps what the system said about a file of the output.
    pub(super) fn write(path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |error| Self::Write { path: path.display().to_string(), error }
    }

    pub(super) fn tensor(tensor: &str, reason: impl Into<String>) -> Self {
        Self::Tensor { tensor: tensor.into(), reason: reason.into() }
    }
}
