//! The files of a model that lie on another machine: headers and small files are fetched once, ranges of weights as they are
//! asked for, and nothing else.

mod mirror;
mod runs;

use std::borrow::Cow;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use sha2::{Digest, Sha256};

pub use runs::Run;

use crate::CheckpointError;
use crate::manifest::{Manifest, hex};
use crate::source::{Source, SourceFile, in_templates};
use mirror::Mirror;

/// Most bytes of one request: both sides hold a request's bytes in memory at once.
pub const REQUEST_BYTES: u64 = 4 << 20;

/// Bytes of one file, for each run one range after another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Index of the file in the manifest.
    pub file: usize,
    /// At most [`REQUEST_BYTES`] bytes.
    pub runs: Vec<Run>,
}

/// What comes back for a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delivery {
    /// The bytes, as they arrived.
    pub bytes: Vec<u8>,
    /// Their SHA-256, as it was where they were read.
    pub sha256: [u8; 32],
    /// Who sent them, for messages: `rank 0 (m1)`.
    pub from: String,
}

/// The way to a machine that has the files.
pub trait Fetch: Send + Sync {
    /// Returns when the bytes are here. Several threads may ask at once.
    ///
    /// # Errors
    /// [`CheckpointError::Peer`] when nobody can answer any more.
    fn fetch(&self, request: Request) -> Result<Delivery, CheckpointError>;
}

/// Reads what a request from another machine asks for, into `out`.
///
/// # Errors
/// [`CheckpointError::Malformed`] for a request that makes no sense; failed reads.
pub fn answer(
    source: &dyn Source,
    name: &str,
    request: &Request,
    out: &mut Vec<u8>,
) -> Result<[u8; 32], CheckpointError> {
    let senseless = |what: &str| CheckpointError::malformed(name, format!("another rank asks for {what}"));
    let file = source.find(name).ok_or_else(|| senseless("a file that is not here"))?;
    let mut bytes = 0u64;
    for run in &request.runs {
        let (run_bytes, end) = run.extent().ok_or_else(|| senseless("ranges that make no sense"))?;
        bytes = bytes.saturating_add(run_bytes);
        if end > source.files()[file].bytes || bytes > REQUEST_BYTES {
            return Err(senseless("more than there is, or more than goes into one request"));
        }
    }
    let ranges: Vec<_> = request.runs.iter().flat_map(Run::ranges).collect();
    out.clear();
    out.extend_from_slice(&source.read(file, &ranges)?);
    Ok(Sha256::digest(&*out).into())
}

/// What a rank without files has read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes that came from other ranks.
    pub fetched_bytes: u64,
    /// Bytes that earlier runs had kept.
    pub kept_bytes: u64,
    /// Bytes that earlier runs had kept and that are damaged now: they were fetched again where they were needed.
    pub damaged_bytes: u64,
}

/// A [`Source`] of files that another machine has.
pub struct RemoteFiles {
    mirror: Mirror,
    modified_ns: Vec<u64>,
    /// Of each file, what was fetched and counted in the beginning.
    header_bytes: Vec<u64>,
    fetch: Box<dyn Fetch>,
    fetched_bytes: AtomicU64,
    kept_bytes: AtomicU64,
}

impl RemoteFiles {
    /// Fetches the headers and the small files of `manifest`, and checks them against its hashes. `name` is what the model is
    /// called; with `keep`, what is fetched stays in a directory inside it, and what earlier runs kept is used.
    ///
    /// # Errors
    /// A failed transfer, a file that does not fit the manifest, a disk that cannot be written to.
    pub fn open(
        manifest: &Manifest,
        name: &str,
        keep: Option<&Path>,
        fetch: Box<dyn Fetch>,
    ) -> Result<Self, CheckpointError> {
        let is_plain = |name: &str| Path::new(name).file_name().is_some_and(|file| file == name);
        let plain = |name: &str| is_plain(in_templates(name).unwrap_or(name));
        if let Some(file) = manifest.files.iter().find(|file| !plain(&file.name) || file.header_bytes > file.bytes) {
            return Err(CheckpointError::Escapes { path: "another rank's files".into(), name: file.name.clone() });
        }
        let mirror = Mirror::create(manifest, name, keep)?;
        let (fetched_bytes, kept_bytes) = (AtomicU64::new(0), AtomicU64::new(0));
        let header_bytes = manifest.files.iter().map(|file| file.header_bytes).collect();
        let modified_ns = manifest.files.iter().map(|file| file.modified_ns).collect();
        let files = Self { mirror, header_bytes, modified_ns, fetch, fetched_bytes, kept_bytes };
        for (index, file) in manifest.files.iter().enumerate() {
            let header = 0..file.header_bytes;
            let hash = |bytes: &[u8]| hex(&Sha256::digest(bytes));
            match files.mirror.read_if_there(index, header.end) {
                Some(bytes) if hash(&bytes) == file.header_hash => {
                    files.kept_bytes.fetch_add(header.end, Ordering::Relaxed);
                }
                _ => {
                    let bytes = files.read(index, std::slice::from_ref(&header))?;
                    if hash(&bytes) != file.header_hash {
                        let reason = "changed while it was being sent, or since the start; start again".to_owned();
                        return Err(CheckpointError::malformed(files.display(index), reason));
                    }
                    files.mirror.write(index, 0, &bytes)?;
                }
            }
            files.mirror.note(index, &header);
        }
        Ok(files)
    }

    /// Where headers and small files lie: the path by which programs that want a path find the tokenizer.
    pub fn path(&self) -> PathBuf {
        let names: Vec<&str> = self.files().iter().map(|file| file.name.as_str()).collect();
        match names.iter().find(|name| name.ends_with(".gguf")) {
            Some(gguf) if !names.contains(&"config.json") => self.mirror.directory().join(gguf),
            _ => self.mirror.directory().to_owned(),
        }
    }

    /// What was read so far.
    pub fn traffic(&self) -> Traffic {
        Traffic {
            fetched_bytes: self.fetched_bytes.load(Ordering::Relaxed),
            kept_bytes: self.kept_bytes.load(Ordering::Relaxed),
            damaged_bytes: self.mirror.damaged_bytes(),
        }
    }

    /// Fetches one request's bytes, checks them, and keeps them.
    fn fetch(&self, file: usize, runs: Vec<Run>) -> Result<Vec<u8>, CheckpointError> {
        let expected: u64 = runs.iter().map(|run| run.length * run.count).sum();
        let Delivery { bytes, sha256, from } = self.fetch.fetch(Request { file, runs: runs.clone() })?;
        let damaged = |reason: String| CheckpointError::Damaged { path: self.display(file), from, reason };
        if bytes.len() as u64 != expected {
            return Err(damaged(format!("{expected} bytes were asked for, {} came", bytes.len())));
        }
        let digest: [u8; 32] = Sha256::digest(&bytes).into();
        if digest != sha256 {
            let start = runs.first().map_or(0, |run| run.start);
            return Err(damaged(format!("{expected} bytes at {start} changed on their way (SHA-256 differs)")));
        }
        self.mirror.keep(file, &runs, &bytes, &hex(&sha256))?;
        self.fetched_bytes.fetch_add(expected, Ordering::Relaxed);
        Ok(bytes)
    }
}

impl Source for RemoteFiles {
    fn name(&self) -> String {
        self.mirror.directory().display().to_string()
    }

    fn display(&self, file: usize) -> String {
        self.mirror.path(file).display().to_string()
    }

    fn files(&self) -> &[SourceFile] {
        self.mirror.files()
    }

    fn modified_ns(&self, file: usize) -> u64 {
        self.modified_ns[file]
    }

    fn read(&self, file: usize, ranges: &[Range<u64>]) -> Result<Cow<'_, [u8]>, CheckpointError> {
        let size = self.files()[file].bytes;
        if let Some(beyond) = ranges.iter().find(|range| range.end > size || range.start > range.end) {
            return Err(CheckpointError::Truncated { path: self.display(file), expected: beyond.end, actual: size });
        }
        let total: u64 = ranges.iter().map(|range| range.end - range.start).sum();
        let mut out = vec![0; total as usize];
        let (mut absent, mut places, mut filled) = (Vec::new(), Vec::new(), 0);
        for (piece, here) in self.mirror.divide(file, ranges)? {
            let place = filled..filled + (piece.end - piece.start) as usize;
            filled = place.end;
            if here {
                self.mirror.read(file, piece.start, &mut out[place])?;
                if piece.start >= self.header_bytes[file] {
                    self.kept_bytes.fetch_add(piece.end - piece.start, Ordering::Relaxed);
                }
            } else {
                absent.push(piece);
                places.push(place);
            }
        }
        let mut places = places.into_iter();
        let mut place = 0..0;
        for runs in runs::pack(&absent, REQUEST_BYTES) {
            let bytes = self.fetch(file, runs)?;
            let mut rest = bytes.as_slice();
            // Requests are cut at other bytes than pieces are.
            while !rest.is_empty() {
                if place.is_empty() {
                    place = places.next().expect("requests hold the bytes of the absent pieces");
                }
                let (these, others) = rest.split_at(place.len().min(rest.len()));
                out[place.start..place.start + these.len()].copy_from_slice(these);
                place.start += these.len();
                rest = others;
            }
        }
        Ok(Cow::Owned(out))
    }
}
