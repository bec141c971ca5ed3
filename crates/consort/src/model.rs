//! A model that the user named: found, opened, not yet loaded.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use consort_checkpoint::chat::{ChatTemplate, Conversation};
use consort_checkpoint::pull;
use consort_checkpoint::remote::{Fetch, RemoteFiles};
use consort_checkpoint::tokenizer::{Tokenizer, TokenizerError};
use consort_checkpoint::{Checkpoint, Manifest, holds_weights};
use consort_models::{Config, Held, ModelError, Outline, Plan};
use serde_json::{Map, Value};

use crate::progress::Progress;

/// A model's files, with their headers read.
pub struct ModelFiles {
    /// As the user named it.
    pub name: String,
    /// The GGUF file or the directory.
    pub path: PathBuf,
    /// Headers and configuration.
    pub checkpoint: Checkpoint,
    /// What the engine needs to know of it.
    pub outline: Outline,
    /// The files, where they are on another machine.
    pub remote: Option<Arc<RemoteFiles>>,
    tokenizer: OnceCell<Tokenizer>,
    template: OnceCell<ChatTemplate>,
}

impl ModelFiles {
    /// Finds the model: in `weights` (a host's own directory of models) if it is there, otherwise as a path, a known name or a
    /// name on the Hub, which is fetched if it is missing. Reads headers only.
    pub fn open(name: &str, weights: Option<&Path>) -> Result<Self> {
        if let Some(found) = Self::find(name, weights)? {
            return Ok(found);
        }
        let path = pull::resolve(name, &pull::Options::from_environment()?, &mut Progress::new())?;
        Self::read(name, path)
    }

    /// The same, but fetches nothing: `None` where the model's weights are not on this machine.
    pub fn find(name: &str, weights: Option<&Path>) -> Result<Option<Self>> {
        let on_host = weights.map(|directory| directory.join(name)).filter(|path| path.exists());
        let found = match on_host {
            Some(path) => Some(path),
            None => pull::find(name, &pull::Options::from_environment()?),
        };
        found.filter(|path| holds_weights(path)).map(|path| Self::read(name, path)).transpose()
    }

    fn read(name: &str, path: PathBuf) -> Result<Self> {
        let checkpoint = Checkpoint::open(&path)?;
        Self::new(name, path, checkpoint, None)
    }

    /// The files of another rank, which `fetch` reaches: headers, configuration and tokenizer are here when this returns.
    pub fn fetch(name: &str, manifest: &Manifest, keep: Option<&Path>, fetch: Box<dyn Fetch>) -> Result<Self> {
        let short_name = Path::new(name).file_name().map_or(name.into(), |file| file.to_string_lossy());
        let files = Arc::new(RemoteFiles::open(manifest, &short_name, keep, fetch)?);
        let checkpoint = Checkpoint::open_source(Box::new(files.clone()))?;
        Self::new(name, files.path(), checkpoint, Some(files))
    }

    fn new(name: &str, path: PathBuf, checkpoint: Checkpoint, remote: Option<Arc<RemoteFiles>>) -> Result<Self> {
        let outline = Outline::new(&checkpoint).with_context(|| path.display().to_string())?;
        let (tokenizer, template) = (OnceCell::new(), OnceCell::new());
        Ok(Self { name: name.to_owned(), path, checkpoint, outline, remote, tokenizer, template })
    }

    /// The tokenizer, read on first use: with token ids in place of text a model needs none.
    pub fn tokenizer(&self) -> Result<&Tokenizer, TokenizerError> {
        if let Some(tokenizer) = self.tokenizer.get() {
            return Ok(tokenizer);
        }
        let tokenizer = Tokenizer::open(&self.path)?;
        Ok(self.tokenizer.get_or_init(|| tokenizer))
    }

    /// The tokenizer of a model that has one of a known kind. One that is damaged is an error all the same.
    pub fn tokenizer_if_known(&self) -> Result<Option<&Tokenizer>, TokenizerError> {
        match self.tokenizer() {
            Ok(tokenizer) => Ok(Some(tokenizer)),
            Err(TokenizerError::Missing { .. } | TokenizerError::Unsupported { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The chat template, read on first use.
    fn template(&self) -> Result<&ChatTemplate> {
        if let Some(template) = self.template.get() {
            return Ok(template);
        }
        let template = ChatTemplate::open(&self.path)?
            .with_context(|| format!("{} has no chat template; continue plain text with generate -p", self.name))?;
        Ok(self.template.get_or_init(|| template))
    }

    /// The token ids of a conversation (messages as in OpenAI's chat API), up to where the model's answer begins.
    pub fn encode_chat(&self, messages: &[Value]) -> Result<Vec<u32>> {
        let variables = Map::new();
        let conversation = Conversation { messages, tools: &[], add_generation_prompt: true, variables: &variables };
        Ok(self.template()?.encode(self.tokenizer()?, &conversation)?)
    }

    /// The tokens that end an answer: the tokenizer's, or, for a model without one, those of its configuration.
    pub fn end_tokens(&self) -> Result<Vec<u32>, TokenizerError> {
        if let Some(tokenizer) = self.tokenizer_if_known()? {
            return Ok(tokenizer.end_tokens().iter().copied().collect());
        }
        let ids = Config::new(self.checkpoint.config()).get("eos_token_id");
        let ids = ids.map(|ids| ids.as_array().map_or(std::slice::from_ref(ids), Vec::as_slice));
        Ok(ids.unwrap_or_default().iter().filter_map(|id| u32::try_from(id.as_u64()?).ok()).collect())
    }

    /// The model's architecture, as its configuration names it.
    pub fn architecture(&self) -> &str {
        Config::new(self.checkpoint.config()).architecture().unwrap_or("unknown")
    }

    /// Bytes on disk of the weights, by number format, largest first.
    pub fn formats(&self) -> Vec<(String, u64)> {
        let mut bytes = BTreeMap::<String, u64>::new();
        for tensor in self.checkpoint.tensors() {
            *bytes.entry(tensor.format.to_string()).or_default() += tensor.bytes;
        }
        let mut formats: Vec<_> = bytes.into_iter().collect();
        formats.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        formats
    }

    /// What each rank of a plan would hold, from the headers alone.
    ///
    /// # Errors
    /// The plan does not fit the model, or the configuration does not fit the weights.
    pub fn measure(&self, plan: &Plan) -> Result<Vec<Vec<Held>>> {
        (0..plan.ranks()).map(|rank| self.measure_rank(plan, rank)).collect()
    }

    /// What one rank of a plan would hold.
    ///
    /// # Errors
    /// As [`ModelFiles::measure`].
    pub fn measure_rank(&self, plan: &Plan, rank: usize) -> Result<Vec<Held>> {
        let placement = self.outline.place(plan, rank)?;
        consort_models::measure(&self.checkpoint, &placement).map_err(|error| match error {
            // About the plan and not about the files.
            ModelError::PlanDoesNotFit { .. } => error.into(),
            _ => anyhow::Error::new(error).context(self.path.display().to_string()),
        })
    }
}
