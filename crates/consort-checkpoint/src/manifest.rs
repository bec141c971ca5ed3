//! What a model's files are, in a form small enough to compare between ranks before anything is loaded.

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::CheckpointError;
use crate::files;
use crate::source::{Source, in_templates};

/// The files of a model: a rank whose manifest differs holds another model, or a damaged copy of this one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// The files, by name.
    pub files: Vec<ManifestFile>,
}

/// One file of a [`Manifest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManifestFile {
    /// Name inside the model's directory.
    pub name: String,
    /// Size.
    pub bytes: u64,
    /// Bytes of the header; of a file without one, of the whole file.
    pub header_bytes: u64,
    /// SHA-256 (hex) of the header, which lists names, shapes and formats; of a file without one, of the whole file.
    pub header_hash: String,
    /// SHA-256 (hex) of the whole file, where it was asked for.
    pub content_hash: Option<String>,
    /// When the file was last written, in nanoseconds since 1970; 0 if unknown. Machines may differ in this.
    pub modified_ns: u64,
}

/// Files beside the weights that change what a model does here: what is read of configuration, tokenizer and chat template. Others,
/// such as those of image processors, may differ.
const COMPANIONS: &[&str] = &[
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "params.json",
    "model.safetensors.index.json",
    "consolidated.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tekken.json",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
];
/// Endings of vocabularies.
const RANKS: &[&str] = &[".tiktoken", "tiktoken.model"];

/// Whether a file of this name is read whole where there is one: something else in its place is no reason to go without it.
pub(crate) fn is_read(name: &Path) -> bool {
    let name = name.to_string_lossy();
    COMPANIONS.contains(&&*name) || in_templates(&name).is_some()
}

/// Whether a file beside the weights changes what a model does.
fn is_companion(source: &dyn Source, name: &str) -> bool {
    let is_ranks = RANKS.iter().any(|ending| name.ends_with(ending));
    match name {
        // Not read where there is a better one.
        _ if is_ranks || ["tekken.json", "tokenizer.model"].contains(&name) => source.find("tokenizer.json").is_none(),
        _ => COMPANIONS.contains(&name) || in_templates(name).is_some(),
    }
}

/// A file is hashed in pieces of this size.
const PIECE_BYTES: u64 = 8 << 20;
/// Files that are hashed at a time.
const THREADS: usize = 4;

impl Manifest {
    /// The manifest of a source; `header_bytes` is known for files that hold weights.
    pub(crate) fn of(
        source: &dyn Source,
        header_bytes: impl Fn(usize) -> Option<u64>,
    ) -> Result<Self, CheckpointError> {
        let mut listed = Vec::new();
        for (index, file) in source.files().iter().enumerate() {
            let is_companion = is_companion(source, &file.name);
            let Some(end) = header_bytes(index).or(is_companion.then_some(file.bytes)) else { continue };
            if is_companion {
                files::check_size(source, index)?;
            }
            let header_bytes = end.min(file.bytes);
            let header = source.read(index, std::slice::from_ref(&(0..header_bytes)))?;
            let modified_ns = source.modified_ns(index);
            let (name, header_hash) = (file.name.clone(), hex(&Sha256::digest(&header)));
            listed.push(ManifestFile {
                name,
                bytes: file.bytes,
                header_bytes,
                header_hash,
                content_hash: None,
                modified_ns,
            });
        }
        listed.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Self { files: listed })
    }

    /// The same with the content of every file hashed, several files at a time. `progress` hears the bytes read so far and
    /// their total.
    pub(crate) fn with_content(
        &self,
        source: &dyn Source,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, CheckpointError> {
        let total = self.files.iter().map(|file| file.bytes).sum();
        let mut verified = self.clone();
        let files: Vec<_> = verified.files.iter_mut().map(Some).map(Mutex::new).collect();
        let next = AtomicUsize::new(0);
        let (sender, news) = channel();
        let hash_files = |sender: Sender<u64>| -> Result<(), CheckpointError> {
            while let Some(file) = files.get(next.fetch_add(1, Ordering::Relaxed)) {
                let Some(file) = file.lock().unwrap_or_else(PoisonError::into_inner).take() else { continue };
                let Some(index) = source.find(&file.name) else { continue };
                let mut hasher = Sha256::new();
                for start in (0..file.bytes).step_by(PIECE_BYTES as usize) {
                    let piece = start..(start + PIECE_BYTES).min(file.bytes);
                    hasher.update(source.read(index, std::slice::from_ref(&piece))?);
                    // Whoever listens may have gone.
                    let _ = sender.send(piece.end - piece.start);
                }
                let hash = hex(&hasher.finalize());
                if let Some(published) = source.published_sha256(index).filter(|published| *published != hash) {
                    let reason = format!(
                        "its SHA-256 is {hash:.12} and was {published:.12} when it was published; delete it and pull the model again"
                    );
                    return Err(CheckpointError::malformed(source.display(index), reason));
                }
                file.content_hash = Some(hash);
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let hash_files = &hash_files;
            let threads: Vec<_> = (0..THREADS)
                .map(|_| {
                    let sender = sender.clone();
                    scope.spawn(move || hash_files(sender))
                })
                .collect();
            drop(sender);
            let mut done = 0;
            for bytes in news {
                done += bytes;
                progress(done, total);
            }
            threads
                .into_iter()
                .try_for_each(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })?;
        drop(files);
        Ok(verified)
    }

    /// One hash over everything in the manifest (hex).
    pub fn hash(&self) -> String {
        let mut hasher = Sha256::new();
        for file in &self.files {
            // Lengths first, so that no two lists of files give the same bytes.
            hasher.update((file.name.len() as u64).to_le_bytes());
            hasher.update(&file.name);
            hasher.update(file.bytes.to_le_bytes());
            hasher.update(&file.header_hash);
            hasher.update(file.content_hash.as_deref().unwrap_or(""));
        }
        hex(&hasher.finalize())
    }

    /// Names the weights for whoever keeps something made of them: their files' headers, and their contents where they are
    /// known, else the times at which they were written.
    pub fn weights_identity(&self) -> String {
        let weights = self.files.iter().filter(|file| file.header_bytes < file.bytes);
        let mut hasher = Sha256::new();
        for file in weights {
            let content = file.content_hash.clone().unwrap_or_else(|| file.modified_ns.to_string());
            hasher.update(format!("{:?} {} {} {content}\n", file.name, file.bytes, file.header_hash));
        }
        hex(&hasher.finalize())
    }

    /// The first file that differs, and what each side says of it; `None` for equal manifests.
    pub fn diff(&self, other: &Self) -> Option<Difference> {
        let names = self.files.iter().chain(&other.files).map(|file| file.name.as_str());
        let names: BTreeSet<&str> = names.collect();
        let find = |manifest: &Self, name| manifest.files.iter().find(|file| file.name == name).cloned();
        names.into_iter().find_map(|name| {
            let (ours, theirs) = (find(self, name), find(other, name));
            let differs = match (&ours, &theirs) {
                (Some(ours), Some(theirs)) => differs(ours, theirs),
                _ => true,
            };
            let describe = |file: Option<ManifestFile>| file.map_or("no such file".to_owned(), |file| file.to_string());
            differs.then(|| Difference { file: name.to_owned(), ours: describe(ours), theirs: describe(theirs) })
        })
    }
}

/// A file that is not the same in two manifests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Name inside the model's directory.
    pub file: String,
    /// What the one manifest says of it: size and the beginnings of its hashes.
    pub ours: String,
    /// What the other says.
    pub theirs: String,
}

impl fmt::Display for ManifestFile {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bytes, header_bytes, header_hash, content_hash, .. } = self;
        let part = if header_bytes < bytes { "header SHA-256" } else { "SHA-256" };
        write!(formatter, "{bytes} bytes, {part} {:.12}", header_hash)?;
        match content_hash {
            Some(hash) if header_bytes < bytes => write!(formatter, ", content SHA-256 {hash:.12}"),
            _ => Ok(()),
        }
    }
}

/// Contents are compared where both sides know them.
fn differs(ours: &ManifestFile, theirs: &ManifestFile) -> bool {
    let contents = ours.content_hash.as_ref().zip(theirs.content_hash.as_ref());
    (ours.bytes, &ours.header_hash) != (theirs.bytes, &theirs.header_hash)
        || contents.is_some_and(|(ours, theirs)| ours != theirs)
}

/// Bytes as lower-case hex.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
