//! A directory that stands in for the files of another machine: as long as they are, and filled only where something was
//! fetched. A log says which ranges hold what, so that a later run, perhaps with another plan, does not fetch them again.
//!
//! A line of the log is written after the bytes that it vouches for, and bears their SHA-256: what a crash or a bad disk left
//! behind is noticed when it is first read, and fetched again.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::runs::{Place, Run};
use crate::CheckpointError;
use crate::manifest::{Manifest, hex};
use crate::scratch::Scratch;
use crate::source::{SourceFile, TEMPLATES};

/// The log, beside the files. Several ranks of one machine append to it; a line is one write.
const LOG: &str = "consort-kept.jsonl";
/// How the names of directories end that go with their process.
const PASSING: &str = ".consort-files";

/// Files that are here in part.
pub(crate) struct Mirror {
    directory: PathBuf,
    files: Vec<SourceFile>,
    handles: Vec<OnceLock<File>>,
    /// What is known to be here, by file.
    kept: Vec<RwLock<Vec<Arc<Kept>>>>,
    /// Where more is written down; none in a directory that goes with the process.
    log: Option<Mutex<File>>,
    /// Bytes whose hash was not that of the log.
    damaged_bytes: AtomicU64,
    /// Removes the directory in the end, where nothing is to be kept.
    _temporary: Option<Scratch>,
}

/// Runs of a file that were fetched together.
#[derive(Debug)]
struct Kept {
    runs: Vec<Run>,
    /// First byte and one past the last.
    hull: Range<u64>,
    sha256: String,
    state: AtomicU8,
}

const UNREAD: u8 = 0;
const SOUND: u8 = 1;
const DAMAGED: u8 = 2;

/// A line of the log.
#[derive(Serialize, Deserialize)]
struct Line {
    file: String,
    runs: Vec<Run>,
    sha256: String,
}

impl Mirror {
    /// A mirror of the files of `manifest` in a directory that lasts as long as this value, or, to keep what is fetched, in
    /// one inside `keep`. The manifest's hash is part of its name, so that two versions of a model never mix.
    pub fn create(manifest: &Manifest, name: &str, keep: Option<&Path>) -> Result<Self, CheckpointError> {
        let (directory, temporary) = match keep {
            Some(parent) => {
                std::fs::create_dir_all(parent).map_err(CheckpointError::io(parent.display()))?;
                let name = format!("{}-{}", name.replace('/', "-"), &manifest.hash()[..16]);
                (create_directory(parent, &name)?, None)
            }
            None => {
                let parent = std::env::temp_dir();
                let directory = Scratch::directory(&parent, "consort-", PASSING, 0o700);
                let directory = directory.map_err(CheckpointError::io(parent.display()))?;
                Scratch::sweep(&parent, PASSING);
                (directory.path().to_owned(), Some(directory))
            }
        };
        if manifest.files.iter().any(|file| file.name.starts_with(TEMPLATES)) {
            create_directory(&directory, TEMPLATES)?;
        }
        let files: Vec<_> =
            manifest.files.iter().map(|file| SourceFile { name: file.name.clone(), bytes: file.bytes }).collect();
        let mut mirror = Self {
            handles: files.iter().map(|_| OnceLock::new()).collect(),
            kept: files.iter().map(|_| RwLock::default()).collect(),
            directory,
            files,
            log: None,
            damaged_bytes: AtomicU64::new(0),
            _temporary: temporary,
        };
        if keep.is_some() {
            let path = mirror.directory.join(LOG);
            let io = || CheckpointError::io(path.display());
            let mut log = open_own(&path, OpenOptions::new().read(true).append(true).create(true))?;
            let whole_lines = mirror.read_log(&log).map_err(io())?;
            if !whole_lines {
                log.write_all(b"\n").map_err(io())?;
            }
            mirror.log = Some(Mutex::new(log));
        }
        Ok(mirror)
    }

    /// Takes over what earlier runs kept; lines that make no sense vouch for nothing. False if the last line is cut.
    fn read_log(&mut self, log: &File) -> std::io::Result<bool> {
        let mut lines = BufReader::new(log);
        let (mut text, mut whole) = (Vec::new(), true);
        while lines.read_until(b'\n', &mut text)? > 0 {
            whole = text.ends_with(b"\n");
            if let Ok(Line { file, runs, sha256 }) = serde_json::from_slice(&text)
                && let Some(index) = self.files.iter().position(|known| known.name == file)
                && let Some(kept) = Kept::new(runs, sha256, UNREAD, self.files[index].bytes)
            {
                self.kept[index].get_mut().unwrap_or_else(PoisonError::into_inner).push(Arc::new(kept));
            }
            text.clear();
        }
        Ok(whole)
    }

    pub fn directory(&self) -> &Path {
        &self.directory
    }

    pub fn files(&self) -> &[SourceFile] {
        &self.files
    }

    pub fn path(&self, file: usize) -> PathBuf {
        self.directory.join(&self.files[file].name)
    }

    /// Bytes that were kept once and are not what they were.
    pub fn damaged_bytes(&self) -> u64 {
        self.damaged_bytes.load(Ordering::Relaxed)
    }

    /// The file, as long as the one that it mirrors.
    fn handle(&self, file: usize) -> Result<&File, CheckpointError> {
        if let Some(handle) = self.handles[file].get() {
            return Ok(handle);
        }
        let path = self.path(file);
        let io = || CheckpointError::io(path.display());
        let handle = open_own(&path, OpenOptions::new().read(true).write(true).create(true).truncate(false))?;
        // The same length for all ranks of a machine that do this at once; nothing that is there is lost.
        if handle.metadata().map_err(io())?.len() != self.files[file].bytes {
            handle.set_len(self.files[file].bytes).map_err(io())?;
        }
        Ok(self.handles[file].get_or_init(|| handle))
    }

    /// Reads `start..` whatever is known about it; holes are zeros.
    pub fn read(&self, file: usize, start: u64, out: &mut [u8]) -> Result<(), CheckpointError> {
        self.handle(file)?.read_exact_at(out, start).map_err(CheckpointError::io(self.path(file).display()))
    }

    /// Writes bytes that belong to `start..`, of which nothing is noted down.
    pub fn write(&self, file: usize, start: u64, bytes: &[u8]) -> Result<(), CheckpointError> {
        self.handle(file)?.write_all_at(bytes, start).map_err(CheckpointError::io(self.path(file).display()))
    }

    /// Notes in memory that `range` is here.
    pub fn note(&self, file: usize, range: &Range<u64>) {
        if let Some(kept) = Kept::new(vec![Run::of(range)], String::new(), SOUND, self.files[file].bytes) {
            self.kept[file].write().unwrap_or_else(PoisonError::into_inner).push(Arc::new(kept));
        }
    }

    /// Keeps the bytes of `runs`, if this mirror keeps any: writes them, then the line that vouches for them.
    pub fn keep(&self, file: usize, runs: &[Run], bytes: &[u8], sha256: &str) -> Result<(), CheckpointError> {
        let Some(log) = &self.log else { return Ok(()) };
        let mut rest = bytes;
        for range in runs.iter().flat_map(Run::ranges) {
            let (these, others) = rest.split_at((range.end - range.start) as usize);
            self.write(file, range.start, these)?;
            rest = others;
        }
        let line = Line { file: self.files[file].name.clone(), runs: runs.to_vec(), sha256: sha256.to_owned() };
        let text = serde_json::to_string(&line).expect("a line has a plain data model") + "\n";
        let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
        log.write_all(text.as_bytes()).map_err(CheckpointError::io(self.directory.join(LOG).display()))
    }

    /// Cuts ranges where what is here begins or ends: pieces in order, with whether they are here.
    pub fn divide(&self, file: usize, ranges: &[Range<u64>]) -> Result<Vec<(Range<u64>, bool)>, CheckpointError> {
        let first = ranges.iter().map(|range| range.start).min().unwrap_or(0);
        let end = ranges.iter().map(|range| range.end).max().unwrap_or(0);
        let near: Vec<Arc<Kept>> = {
            let kept = self.kept[file].read().unwrap_or_else(PoisonError::into_inner);
            let near = |kept: &&Arc<Kept>| kept.hull.start < end && kept.hull.end > first;
            kept.iter().filter(near).cloned().collect()
        };
        let mut sound = Vec::with_capacity(near.len());
        for kept in near {
            if self.is_sound(file, &kept)? {
                sound.push(kept);
            }
        }
        let runs: Vec<Run> = sound.iter().flat_map(|kept| &kept.runs).copied().collect();
        let mut pieces: Vec<(Range<u64>, bool)> = Vec::new();
        for range in ranges {
            let mut at = range.start;
            while at < range.end {
                let (mut here, mut until) = (None, range.end);
                for run in &runs {
                    match run.place(at) {
                        Place::Inside(end) => here = here.max(Some(end)),
                        Place::Before(start) => until = until.min(start),
                        Place::Behind => {}
                    }
                }
                let end = here.map_or(until, |end| end.min(range.end));
                pieces.push((at..end, here.is_some()));
                at = end;
            }
        }
        Ok(pieces)
    }

    /// Whether kept bytes are still what the log says; read once.
    fn is_sound(&self, file: usize, kept: &Kept) -> Result<bool, CheckpointError> {
        let state = kept.state.load(Ordering::Relaxed);
        if state != UNREAD {
            return Ok(state == SOUND);
        }
        let mut hasher = Sha256::new();
        let (mut buffer, mut bytes) = (Vec::new(), 0);
        for range in kept.runs.iter().flat_map(Run::ranges) {
            buffer.resize((range.end - range.start) as usize, 0);
            self.read(file, range.start, &mut buffer)?;
            hasher.update(&buffer);
            bytes += range.end - range.start;
        }
        let sound = hex(&hasher.finalize()) == kept.sha256;
        let (new, seen) = (if sound { SOUND } else { DAMAGED }, Ordering::Relaxed);
        if kept.state.compare_exchange(UNREAD, new, seen, seen).is_ok() && !sound {
            self.damaged_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
        Ok(sound)
    }

    /// Reads a small file that may not be here at all.
    pub fn read_if_there(&self, file: usize, bytes: u64) -> Option<Vec<u8>> {
        let mut content = Vec::new();
        let file = open_own(&self.path(file), OpenOptions::new().read(true)).ok()?;
        file.take(bytes).read_to_end(&mut content).ok()?;
        (content.len() as u64 == bytes).then_some(content)
    }
}

/// Makes a directory unless it is there. A link that stands in its place leads where somebody else wants.
fn create_directory(parent: &Path, name: &str) -> Result<PathBuf, CheckpointError> {
    let path = parent.join(name);
    let io = || CheckpointError::io(path.display());
    match std::fs::create_dir(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            match path.symlink_metadata().map_err(io())?.is_dir() {
                true => Ok(path),
                false => Err(CheckpointError::Escapes { path: parent.display().to_string(), name: name.to_owned() }),
            }
        }
        made => made.map(|()| path.clone()).map_err(io()),
    }
}

/// Opens a file that this program has made or makes now. Neither a link of either kind is followed nor a pipe waited for: what is
/// written would end up elsewhere.
fn open_own(path: &Path, options: &mut OpenOptions) -> Result<File, CheckpointError> {
    let io = || CheckpointError::io(path.display());
    let is_link = |error: &std::io::Error| error.raw_os_error() == Some(libc::ELOOP);
    let refused = |what: &str| {
        let reason = format!("is {what}, and nothing is written through it; remove it");
        Err(CheckpointError::malformed(path.display(), reason))
    };
    let file = match options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path) {
        Err(error) if is_link(&error) => return refused("a symbolic link"),
        opened => opened.map_err(io())?,
    };
    let metadata = file.metadata().map_err(io())?;
    match (metadata.is_file(), metadata.nlink()) {
        (false, _) => refused("no file"),
        (true, 0 | 1) => Ok(file),
        (true, _) => refused("a hard link to another file"),
    }
}

impl Kept {
    /// `None` for runs that make no sense in a file of this size.
    fn new(runs: Vec<Run>, sha256: String, state: u8, file_bytes: u64) -> Option<Self> {
        let ends: Vec<u64> = runs.iter().map(|run| Some(run.extent()?.1)).collect::<Option<_>>()?;
        let hull = runs.iter().map(|run| run.start).min()?..ends.into_iter().max()?;
        (hull.end <= file_bytes).then(|| Self { runs, hull, sha256, state: AtomicU8::new(state) })
    }
}
