//! Flags that several commands share.

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, ValueEnum};
use consort_checkpoint::pull;
use consort_compute::KvFormat;
use consort_engine::{EngineError, Sampling};
use consort_models::Plan;

use crate::model::ModelFiles;
use crate::network::NetworkFlags;

/// Where the ranks are and how they work together.
#[derive(Args, Clone, Debug)]
pub struct RunFlags {
    /// Number of ranks, started by this command [default: what the plan needs, or 1]
    #[arg(short = 'n', long, value_name = "N", overrides_with = "ranks", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub ranks: Option<u16>,
    /// How ranks divide the model: tensor:2, pipeline:2, pipeline:2,tensor:2 [default: chosen for the number of ranks]
    #[arg(long, overrides_with = "plan")]
    pub plan: Option<Plan>,
    /// Threads of each rank [default: the machine's cores, divided between its ranks]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Tokens of context to reserve memory for [default: 4096, or the model's own limit if that is less]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub context: Option<u32>,
    /// How activations enter matrix products: rounded ones are faster, exact is what references are compared with
    #[arg(long, value_enum, default_value_t)]
    pub activations: Activations,
    /// How keys and values are stored: q8 takes half of the memory of f16
    #[arg(long, value_enum, default_value_t)]
    pub kv_format: KvCache,
    /// Most tokens of a prompt that are run as a unit [default: 256]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub chunk: Option<u32>,
    /// How often the ranks are started again after one of them was lost; the answer goes on where it was [default: 0, or with
    /// --replan as often as ranks can be lost]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=1000))]
    pub restart: Option<u16>,
    /// After a loss, go on with the ranks that are left, if the model fits on them
    #[arg(long)]
    pub replan: bool,
    #[command(flatten)]
    pub files: FileFlags,
    #[command(flatten)]
    pub network: NetworkFlags,
}

/// How ranks come by the model's files.
#[derive(Args, Clone, Debug)]
pub struct FileFlags {
    /// Compare the whole content of the ranks' files, not only names, sizes and headers: reads all of them once more
    #[arg(long)]
    pub verify: bool,
    /// Keep weights as they are laid out in memory in DIR, so that the next start of the same part is quicker
    #[arg(long, value_name = "DIR")]
    pub cache_repacked: Option<PathBuf>,
    /// Keep what a rank without files fetches from another one, in DIR or in CONSORT_HOME, so that later runs find it
    #[arg(long, value_name = "DIR", num_args = 0..=1, default_missing_value = "")]
    pub keep: Option<PathBuf>,
}

impl FileFlags {
    /// The directory that fetched files are kept in, if they are to be kept.
    pub fn keep(&self) -> Result<Option<PathBuf>> {
        match &self.keep {
            Some(default) if default.as_os_str().is_empty() => Ok(Some(pull::Options::from_environment()?.kept)),
            other => Ok(other.clone()),
        }
    }
}

/// `--activations`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Activations {
    /// int8 for whole numbers of 2 to 8 bits, bf16 for BF16 and FP8 where the processor multiplies it faster, exact for the rest
    #[default]
    Auto,
    /// Unquantized activations, sums in f32
    Exact,
    /// Activations quantized per block of 32, with weights that are whole numbers times a scale
    Int8,
    /// Activations rounded to bfloat16, with weights in BF16 and FP8; sums in f32
    Bf16,
}

impl Activations {
    /// The word that the flag takes.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Exact => "exact",
            Self::Int8 => "int8",
            Self::Bf16 => "bf16",
        }
    }
}

impl From<Activations> for consort_cpu::Activations {
    fn from(choice: Activations) -> Self {
        match choice {
            Activations::Auto => Self::Auto,
            Activations::Exact => Self::Exact,
            Activations::Int8 => Self::Int8,
            Activations::Bf16 => Self::Bf16,
        }
    }
}

/// `--kv-format`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum KvCache {
    /// IEEE half precision
    #[default]
    F16,
    /// bfloat16
    Bf16,
    /// Single precision, for comparisons with a reference
    F32,
    /// 8-bit floating point (E4M3), without a scale
    Fp8,
    /// 8 bits with a scale for each block of 32
    Q8,
}

impl From<KvCache> for KvFormat {
    fn from(choice: KvCache) -> Self {
        match choice {
            KvCache::F16 => Self::F16,
            KvCache::Bf16 => Self::BF16,
            KvCache::F32 => Self::F32,
            KvCache::Fp8 => Self::FP8,
            KvCache::Q8 => Self::Q8,
        }
    }
}

/// What to continue.
#[derive(Args, Clone, Debug)]
#[group(required = true, multiple = false)]
pub struct PromptFlags {
    /// The text to continue
    #[arg(short, long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// Token ids to continue, in place of a text: 504,3575,282
    #[arg(long, value_name = "IDS", value_delimiter = ',')]
    pub tokens: Option<Vec<u32>>,
}

impl PromptFlags {
    /// The prompt's token ids; a text needs the model's tokenizer.
    pub fn token_ids(&self, model: &ModelFiles) -> Result<Vec<u32>> {
        match (&self.tokens, &self.prompt) {
            (Some(tokens), _) => Ok(tokens.clone()),
            // The author of a raw prompt may write control tokens.
            (None, Some(text)) if !text.is_empty() => Ok(model.tokenizer()?.encode_prompt(text, true)?),
            // A beginning-of-text token alone is no prompt either.
            (None, _) => Err(EngineError::EmptyPrompt.into()),
        }
    }
}

/// How tokens are chosen.
#[derive(Args, Clone, Debug)]
pub struct SamplingFlags {
    /// 0 takes the most likely token; higher is more varied
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    pub temperature: f32,
    /// Keep the K most likely tokens; 0 keeps all
    #[arg(long, value_name = "K", default_value_t = 0)]
    pub top_k: u32,
    /// Keep the most likely tokens that together reach this probability
    #[arg(long, value_name = "P", default_value_t = 1.0, allow_negative_numbers = true)]
    pub top_p: f32,
    /// Drop tokens less likely than this fraction of the most likely one
    #[arg(long, value_name = "P", default_value_t = 0.0, allow_negative_numbers = true)]
    pub min_p: f32,
    /// Seed of the random numbers: the same seed gives the same tokens
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

impl SamplingFlags {
    /// The engine's parameters, checked.
    pub fn sampling(&self) -> Result<Sampling> {
        let Self { temperature, top_k, top_p, min_p, seed } = *self;
        let sampling = Sampling { temperature, top_k, top_p, min_p, seed };
        sampling.check()?;
        Ok(sampling)
    }
}

/// Where a machine-readable result goes.
#[derive(Args, Clone, Debug)]
pub struct JsonFlag {
    /// Write one JSON object to PATH, or to standard output in place of text
    #[arg(long, value_name = "PATH", num_args = 0..=1, default_missing_value = "-")]
    pub json: Option<PathBuf>,
}

impl JsonFlag {
    /// Whether standard output holds the object and nothing else.
    pub fn takes_stdout(&self) -> bool {
        self.json.as_deref().is_some_and(|path| path.as_os_str() == "-")
    }
}
