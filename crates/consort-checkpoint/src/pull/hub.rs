//! Repositories of the Hugging Face Hub.
//!
//! The `hf-hub` crate knows the hub's address, its API and the layout of its cache. Its downloads aren't used: they take what arrives
//! for whole without comparing size or hash, and append to a begun file even if the server starts from the beginning.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Component, Path, PathBuf};

use hf_hub::api::sync::{Api, ApiBuilder};
use hf_hub::{Cache, CacheRepo, Repo, RepoType};
use serde::Deserialize;

use super::cache::{Expected, Lock, io_error};
use super::transfer::{Client, status_error};
use super::{Options, Progress, PullError};
use crate::gguf::part_names;
use crate::huggingface::INDEX;

const REVISION: &str = "main";

/// What is taken along with the weights. Code and pickles never are.
const SMALL_FILES: [&str; 16] = [
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "params.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tekken.json",
    "tiktoken.model",
    "chat_template.jinja",
    "chat_template.json",
];

/// `ORG/NAME`, or one GGUF file in it: `ORG/NAME/FILE.gguf`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Name {
    repository: String,
    file: Option<String>,
}

impl Name {
    pub(super) fn parse(name: &str) -> Option<Self> {
        let is_word = |word: &str| {
            let allowed = |character: char| character.is_ascii_alphanumeric() || "-_.".contains(character);
            !word.is_empty() && !word.starts_with('.') && !word.contains("..") && word.chars().all(allowed)
        };
        let words: Vec<&str> = name.split('/').collect();
        if words.len() < 2 || !words.iter().all(|word| is_word(word)) {
            return None;
        }
        let file = (words.len() > 2).then(|| words[2..].join("/"));
        let is_model = file.as_ref().is_none_or(|file| file.ends_with(".gguf"));
        is_model.then(|| Self { repository: words[..2].join("/"), file })
    }

    fn repo(&self) -> Repo {
        Repo::with_revision(self.repository.clone(), RepoType::Model, REVISION.to_owned())
    }
}

/// The hub's description of a repository.
#[derive(Deserialize)]
struct Listing {
    /// Commit.
    sha: String,
    siblings: Vec<Entry>,
}

#[derive(Clone, Deserialize)]
struct Entry {
    #[serde(rename = "rfilename")]
    path: String,
    #[serde(default)]
    size: Option<u64>,
    /// Git's name for the content, of files that git itself holds.
    #[serde(default, rename = "blobId")]
    blob: Option<String>,
    /// Of large files.
    #[serde(default)]
    lfs: Option<LargeFile>,
}

#[derive(Clone, Deserialize)]
struct LargeFile {
    sha256: String,
    size: u64,
}

/// The model, if all of it is in the cache.
pub(super) fn find(name: &Name, options: &Options) -> Option<PathBuf> {
    let repo = Cache::new(options.hub_cache.clone()).repo(name.repo());
    let has = |file: &str| repo.get(file);
    if let Some(file) = &name.file {
        return parts(file).iter().all(|part| has(part).is_some()).then(|| has(file)).flatten();
    }
    let directory = has("config.json")?.parent()?.to_owned();
    let shards = match has(INDEX) {
        Some(index) => shards_of(&fs::read(index).ok()?)?,
        None => BTreeSet::from(["model.safetensors".to_owned()]),
    };
    shards.iter().all(|shard| has(shard).is_some()).then_some(directory)
}

/// The model; downloads what is missing.
pub(super) fn fetch(name: &Name, options: &Options, progress: &mut dyn Progress) -> Result<PathBuf, PullError> {
    if let Some(path) = find(name, options) {
        return Ok(path);
    }
    if options.offline {
        let reason = "not in the cache, and HF_HUB_OFFLINE is set".to_owned();
        return Err(PullError::Network { name: name.repository.clone(), reason });
    }
    let cache = Cache::new(options.hub_cache.clone());
    let mut builder = ApiBuilder::from_cache(cache.clone()).with_token(options.hub_token.clone()).with_progress(false);
    if let Some(endpoint) = &options.hub_endpoint {
        builder = builder.with_endpoint(endpoint.clone());
    }
    let api = builder.build().map_err(|error| answer(name, error))?;
    let listing = list(name, &api)?;

    let repo = cache.repo(name.repo());
    let snapshot = repo.pointer_path(&listing.sha);
    let folder = options.hub_cache.join(name.repo().folder_name());
    let _lock = Lock::take(&folder)?;
    let client = Client::new(options.hub_token.clone(), options.retry_pause);
    let at_commit = Repo::with_revision(name.repository.clone(), RepoType::Model, listing.sha.clone());
    let source = api.repo(at_commit);
    let mut get =
        |entry: &Entry| fetch_file(name, entry, &source.url(&entry.path), &repo, &snapshot, &client, progress);

    let path = match &name.file {
        Some(file) => {
            for part in parts(file) {
                get(listing
                    .entry(&part)
                    .ok_or_else(|| PullError::NotFound { name: format!("{}/{part}", name.repository) })?)?;
            }
            snapshot.join(file)
        }
        None => {
            // Weights come last: where they are, everything is.
            for entry in listing.siblings.iter().filter(|entry| goes_along(&entry.path)) {
                get(entry)?;
            }
            for entry in listing.weights(name, &snapshot, &mut get)? {
                get(&entry)?;
            }
            snapshot
        }
    };
    repo.create_ref(&listing.sha).map_err(io_error(&folder))?;
    Ok(path)
}

fn goes_along(path: &str) -> bool {
    SMALL_FILES.contains(&path) || path.starts_with("additional_chat_templates/") && path.ends_with(".jinja")
}

fn list(name: &Name, api: &Api) -> Result<Listing, PullError> {
    let request = api.repo(name.repo()).info_request().query("blobs", "true");
    let mut response = request.call().map_err(|error| match error {
        ureq::Error::StatusCode(status) => status_error(&name.repository, status),
        other => PullError::Network { name: name.repository.clone(), reason: other.to_string() },
    })?;
    const LIMIT_BYTES: u64 = 64 << 20;
    let listing: Listing =
        response.body_mut().with_config().limit(LIMIT_BYTES).read_json().map_err(|error| answer(name, error))?;
    if !is_hex(&listing.sha, 40) {
        return Err(answer(name, format!("commit {:?}", listing.sha)));
    }
    Ok(listing)
}

impl Listing {
    fn entry(&self, path: &str) -> Option<&Entry> {
        self.siblings.iter().find(|entry| entry.path == path)
    }

    /// The weight files to take.
    fn weights(
        &self,
        name: &Name,
        snapshot: &Path,
        get: &mut dyn FnMut(&Entry) -> Result<(), PullError>,
    ) -> Result<Vec<Entry>, PullError> {
        if let Some(index) = self.entry(INDEX) {
            get(index)?;
            let path = snapshot.join(INDEX);
            let shards = shards_of(&fs::read(&path).map_err(io_error(&path))?)
                .ok_or_else(|| answer(name, format!("{INDEX} has no weight_map")))?;
            let entry = |shard: &String| {
                self.entry(shard)
                    .cloned()
                    .ok_or_else(|| PullError::NotFound { name: format!("{}/{shard}", name.repository) })
            };
            return shards.iter().map(entry).collect();
        }
        if let Some(single) = self.entry("model.safetensors") {
            return Ok(vec![single.clone()]);
        }
        let files: Vec<&str> =
            self.siblings.iter().map(|entry| entry.path.as_str()).filter(|path| path.ends_with(".gguf")).collect();
        let reason = match files.as_slice() {
            [] => "neither safetensors nor GGUF files in it".to_owned(),
            [file, ..] => {
                format!("name one of its GGUF files, as in {}/{file}; there are: {}", name.repository, files.join(", "))
            }
        };
        Err(PullError::Choice { name: name.repository.clone(), reason })
    }
}

fn fetch_file(
    name: &Name,
    entry: &Entry,
    url: &str,
    repo: &CacheRepo,
    snapshot: &Path,
    client: &Client,
    progress: &mut dyn Progress,
) -> Result<(), PullError> {
    let strange = |what: &str| answer(name, format!("{:?} has {what}", entry.path));
    let relative = Path::new(&entry.path);
    if entry.path.contains('\\') || !relative.components().all(|component| matches!(component, Component::Normal(_))) {
        return Err(strange("a path that leads out of the cache"));
    }
    let sha256 = entry.lfs.as_ref().map(|large| large.sha256.as_str());
    let bytes = entry.lfs.as_ref().map(|large| large.size).or(entry.size).ok_or_else(|| strange("no size"))?;
    let blob = match (sha256, entry.blob.as_deref()) {
        (Some(sha256), _) if is_hex(sha256, 64) => sha256,
        (None, Some(blob)) if is_hex(blob, 40) => blob,
        _ => return Err(strange("no usable hash")),
    };
    let link = snapshot.join(relative);
    if link.exists() {
        return Ok(());
    }
    let path = repo.blob_path(blob);
    for file in [&path, &link] {
        if let Some(directory) = file.parent() {
            fs::create_dir_all(directory).map_err(io_error(directory))?;
        }
    }
    if !path.exists() {
        let expected = Expected { file: &entry.path, bytes, sha256 };
        client.download(url, path.with_extension("incomplete"), &path, &expected, progress)?;
    }
    place(&path, &link, relative.components().count())
}

/// Makes `link` lead to `blob`: relative, so that the cache can be moved, and by a rename, so that it is never half there.
fn place(blob: &Path, link: &Path, depth: usize) -> Result<(), PullError> {
    let hash = blob.file_name().expect("a blob is named by its hash");
    let target: PathBuf = std::iter::repeat_n("..", depth + 1).collect::<PathBuf>().join("blobs").join(hash);
    let temporary = link.with_extension("consort-link");
    let _ = fs::remove_file(&temporary);
    #[cfg(unix)]
    std::os::unix::fs::symlink(&target, &temporary).map_err(io_error(&temporary))?;
    #[cfg(not(unix))]
    fs::copy(blob, &temporary).map(|_| drop(target)).map_err(io_error(&temporary))?;
    fs::rename(&temporary, link).map_err(io_error(link))
}

/// All parts of a split GGUF file (`NAME-00001-of-00003.gguf`), or the file itself.
fn parts(file: &str) -> Vec<String> {
    part_names(file).unwrap_or_else(|| vec![file.to_owned()])
}

/// The files that an index names.
fn shards_of(index: &[u8]) -> Option<BTreeSet<String>> {
    let index: serde_json::Value = serde_json::from_slice(index).ok()?;
    index.get("weight_map")?.as_object()?.values().map(|shard| shard.as_str().map(str::to_owned)).collect()
}

fn is_hex(text: &str, length: usize) -> bool {
    text.len() == length && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn answer(name: &Name, reason: impl std::fmt::Display) -> PullError {
    PullError::Answer { name: name.repository.clone(), reason: reason.to_string() }
}
