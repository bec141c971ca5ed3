//! What can be wrong with a model's files.

use std::borrow::Cow;
use std::path::Path;

/// What went wrong with a model's files. Every variant names the file or the tensor, and what to do where that is known.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file could not be read.
    #[error("{path}: {error}")]
    Io {
        /// The file.
        path: String,
        /// What the system said. Not a `source`, because the message says it already.
        error: std::io::Error,
    },
    /// A file that is read whole is far larger than such files are.
    #[error("{path}: {bytes} bytes, but such a file has {limit} at most; download it again")]
    TooLarge {
        /// The file.
        path: String,
        /// Its size.
        bytes: u64,
        /// The most that is read.
        limit: u64,
    },
    /// A rank that has the files cannot be asked any more.
    #[error("{path}: the rank that has this file cannot be asked any more")]
    Peer {
        /// The file.
        path: String,
    },
    /// What another rank sent is not what it read.
    #[error("{path}: what {from} sent is damaged: {reason}")]
    Damaged {
        /// The file.
        path: String,
        /// The rank and its host.
        from: String,
        /// What is wrong.
        reason: String,
    },
    /// A file is shorter than its own header says.
    #[error("{path}: truncated: {expected} bytes expected, {actual} found; download it again")]
    Truncated {
        /// The file.
        path: String,
        /// Bytes that the header asks for.
        expected: u64,
        /// Bytes that are there.
        actual: u64,
    },
    /// Something else was saved under the file's name.
    #[error("{path}: {found} in place of the file; {remedy}")]
    NotTheFile {
        /// The file.
        path: String,
        /// What it is.
        found: String,
        /// What to do.
        remedy: String,
    },
    /// A file breaks the rules of its format.
    #[error("{path}: {reason}")]
    Malformed {
        /// The file.
        path: String,
        /// The rule and the place.
        reason: String,
    },
    /// A file that another file asks for is not there.
    #[error("{path}: missing; {wanted_by} asks for it")]
    MissingFile {
        /// The file.
        path: String,
        /// Who asks.
        wanted_by: String,
    },
    /// A name in an index, or a symbolic link, points out of the model's directory.
    #[error("{path}: {name:?} leaves the model's directory; refused")]
    Escapes {
        /// The directory or file that holds the name.
        path: String,
        /// The name.
        name: String,
    },
    /// No table says how to read this architecture.
    #[error("{path}: architecture {architecture:?} is not supported; known: {known}")]
    UnknownArchitecture {
        /// The file.
        path: String,
        /// What it calls itself.
        architecture: String,
        /// What would be read.
        known: String,
    },
    /// A required key of the configuration is missing or has the wrong type.
    #[error("{path}: {key}: {reason}")]
    Config {
        /// The file.
        path: String,
        /// The key.
        key: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A tensor breaks the rules of its file.
    #[error("{path}: tensor {tensor}: {reason}")]
    Tensor {
        /// The file.
        path: String,
        /// The tensor.
        tensor: String,
        /// The rule.
        reason: String,
    },
    /// A tensor is not stored as the quantization scheme says, or the scheme is unknown.
    #[error("{path}: tensor {tensor}: {scheme}: {reason}")]
    Scheme {
        /// The file.
        path: String,
        /// The tensor.
        tensor: String,
        /// The scheme as the checkpoint calls it.
        scheme: String,
        /// The contradiction.
        reason: String,
    },
    /// No tensor has this name.
    #[error("tensor {name} is not in the checkpoint")]
    NoTensor {
        /// The canonical name.
        name: String,
    },
    /// A selection does not fit the tensor.
    #[error("tensor {tensor}: {what} {start}..{end} is outside 0..{limit}")]
    OutOfRange {
        /// The tensor.
        tensor: String,
        /// Rows or columns.
        what: &'static str,
        /// First index.
        start: usize,
        /// One past the last index.
        end: usize,
        /// Rows or columns that there are.
        limit: usize,
    },
    /// A column selection would cut a quantization block.
    #[error(
        "tensor {tensor}: a cut at column {column} would split a {format} block of {block} values; cut at a multiple"
    )]
    CutBlock {
        /// The tensor.
        tensor: String,
        /// Where the cut was asked for.
        column: usize,
        /// The format.
        format: String,
        /// Values of a block.
        block: usize,
    },
}

/// The longest piece of a file that a message quotes.
const EXCERPT_CHARACTERS: usize = 160;

/// What a message quotes of a stranger's file: a name or a value may be as long as the file.
pub fn excerpt(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(EXCERPT_CHARACTERS) {
        Some((end, _)) => format!("{}… ({} bytes)", &text[..end], text.len()).into(),
        None => text.into(),
    }
}

impl CheckpointError {
    /// Wraps what the system said about a file.
    pub(crate) fn io(path: impl std::fmt::Display) -> impl FnOnce(std::io::Error) -> Self {
        move |error| Self::Io { path: path.to_string(), error }
    }

    pub(crate) fn malformed(path: impl std::fmt::Display, reason: impl std::fmt::Display) -> Self {
        Self::Malformed { path: path.to_string(), reason: reason.to_string() }
    }

    pub(crate) fn tensor(path: impl std::fmt::Display, tensor: &str, reason: impl std::fmt::Display) -> Self {
        Self::Tensor { path: path.to_string(), tensor: excerpt(tensor).into(), reason: reason.to_string() }
    }

    pub(crate) fn scheme(
        path: impl std::fmt::Display,
        tensor: &str,
        scheme: &str,
        reason: impl std::fmt::Display,
    ) -> Self {
        let (tensor, scheme) = (excerpt(tensor).into(), excerpt(scheme).into());
        Self::Scheme { path: path.to_string(), tensor, scheme, reason: reason.to_string() }
    }

    pub(crate) fn config(path: &str, key: &str, reason: impl std::fmt::Display) -> Self {
        Self::Config { path: path.into(), key: excerpt(key).into(), reason: reason.to_string() }
    }

    /// A file that `wanted_by` asks for: it is not there, or something else is.
    pub(crate) fn missing(path: String, wanted_by: impl std::fmt::Display) -> Self {
        let found = match Path::new(&path).metadata() {
            Ok(metadata) if metadata.is_dir() => "a directory",
            Ok(metadata) if !metadata.is_file() => "a pipe or a device",
            _ => return Self::MissingFile { path: excerpt(&path).into(), wanted_by: wanted_by.to_string() },
        };
        Self::NotTheFile { path, found: found.into(), remedy: "put the file itself there".into() }
    }
}
