//! Where the bytes of a checkpoint come from.
//!
//! Everything above asks for ranges of named files, so it makes no difference whether the files lie on this machine or on
//! another rank: a rank with an empty disk implements [`Source`] over the fabric and opens the same checkpoint.

use std::borrow::Cow;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use crate::CheckpointError;
use crate::files::Boundary;
use crate::manifest;

/// Two ranges closer than this are read in one go: a gap of this size costs less than another request.
pub const MERGE_GAP_BYTES: u64 = 64 << 10;
/// Merged reads stop growing here, which bounds the scratch memory of a reader.
pub const MERGE_SPAN_BYTES: u64 = 8 << 20;

/// The one directory inside a model's whose files belong to it: further chat templates.
pub(crate) const TEMPLATES: &str = "additional_chat_templates";

/// The name of a further chat template in its directory.
pub(crate) fn in_templates(name: &str) -> Option<&str> {
    name.strip_prefix(TEMPLATES)?.strip_prefix('/').filter(|name| name.ends_with(".jinja"))
}

/// One file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceFile {
    /// Name inside the model's directory.
    pub name: String,
    /// Size.
    pub bytes: u64,
}

/// Named files that can be read by the byte range.
pub trait Source: Send + Sync {
    /// What error messages call the place.
    fn name(&self) -> String;

    /// What error messages call file `file`.
    fn display(&self, file: usize) -> String;

    /// The files, in a fixed order; an index into them names a file everywhere else.
    fn files(&self) -> &[SourceFile];

    /// The bytes of `ranges`, one after another. What lies in memory may be borrowed.
    ///
    /// # Errors
    /// [`CheckpointError::Truncated`] for a range past the end of the file, [`CheckpointError::Io`].
    fn read(&self, file: usize, ranges: &[Range<u64>]) -> Result<Cow<'_, [u8]>, CheckpointError>;

    /// When a file was last written, in nanoseconds since 1970; 0 if unknown.
    fn modified_ns(&self, _file: usize) -> u64 {
        0
    }

    /// The SHA-256 (hex) that a file was published with, where that is known.
    fn published_sha256(&self, _file: usize) -> Option<String> {
        None
    }

    /// The index of the file with this name.
    fn find(&self, name: &str) -> Option<usize> {
        self.files().iter().position(|file| file.name == name)
    }

    /// A whole file.
    ///
    /// # Errors
    /// As [`Source::read`].
    fn read_all(&self, file: usize) -> Result<Cow<'_, [u8]>, CheckpointError> {
        let whole = 0..self.files()[file].bytes;
        self.read(file, std::slice::from_ref(&whole))
    }
}

impl<S: Source + ?Sized> Source for Arc<S> {
    fn name(&self) -> String {
        (**self).name()
    }

    fn display(&self, file: usize) -> String {
        (**self).display(file)
    }

    fn files(&self) -> &[SourceFile] {
        (**self).files()
    }

    fn read(&self, file: usize, ranges: &[Range<u64>]) -> Result<Cow<'_, [u8]>, CheckpointError> {
        (**self).read(file, ranges)
    }

    fn modified_ns(&self, file: usize) -> u64 {
        (**self).modified_ns(file)
    }

    fn published_sha256(&self, file: usize) -> Option<String> {
        (**self).published_sha256(file)
    }
}

/// Files on this machine, read at the positions that are asked for, with as few reads as pay. They are not mapped: a file that
/// shrinks under a map ends the process, and a shorter read is an error that names the file.
pub struct LocalFiles {
    name: String,
    files: Vec<SourceFile>,
    local: Vec<LocalFile>,
}

struct LocalFile {
    path: PathBuf,
    opened: OnceLock<File>,
}

impl LocalFiles {
    /// The files of a directory, and the further chat templates in one inside it.
    ///
    /// # Errors
    /// A symbolic link that leads out of the directory, other than into the Hugging Face cache's `blobs`, is
    /// [`CheckpointError::Escapes`].
    pub fn directory(path: &Path) -> Result<Self, CheckpointError> {
        let io = || CheckpointError::io(path.display());
        let boundary = Boundary::of(path)?;
        let mut paths = Vec::new();
        let templates = path.join(TEMPLATES);
        let holds_weights = |file: &Path| file.extension().is_some_and(|it| it == "safetensors" || it == "gguf");
        let is_template = |file: &Path| file.extension().is_some_and(|extension| extension == "jinja");
        for directory in [path, &templates] {
            let entries = match std::fs::read_dir(directory) {
                Err(_) if directory == templates => continue,
                entries => entries.map_err(io())?,
            };
            for entry in entries {
                let file = directory.join(entry.map_err(io())?.file_name());
                // What nobody reads may lead nowhere.
                let is_read = manifest::is_read(file.strip_prefix(path).unwrap_or(&file));
                if !is_read && !holds_weights(&file) && !file.exists() {
                    continue;
                }
                boundary.check(&file)?;
                if file.is_file() {
                    paths.extend((directory == path || is_template(&file)).then_some(file));
                } else if is_read {
                    return Err(CheckpointError::missing(file.display().to_string(), path.display()));
                }
            }
        }
        paths.sort();
        Self::list(path, paths)
    }

    /// These files of the directory or model `name`.
    ///
    /// # Errors
    /// [`CheckpointError::Io`] for a file that cannot be looked at.
    pub fn list(name: &Path, paths: Vec<PathBuf>) -> Result<Self, CheckpointError> {
        let mut files = Vec::with_capacity(paths.len());
        for path in &paths {
            let bytes = path.metadata().map_err(CheckpointError::io(path.display()))?.len();
            let inside = path.strip_prefix(name).ok().filter(|inside| inside.components().count() > 1);
            let name = inside.map_or(path.file_name().unwrap_or_default(), Path::as_os_str);
            files.push(SourceFile { name: name.to_string_lossy().into_owned(), bytes });
        }
        let local = paths.into_iter().map(|path| LocalFile { path, opened: OnceLock::new() }).collect();
        Ok(Self { name: name.display().to_string(), files, local })
    }

    /// Opens a file when it is first read: a rank never opens the shards that hold nothing of its part.
    fn opened(&self, file: usize) -> Result<&File, CheckpointError> {
        let local = &self.local[file];
        if let Some(opened) = local.opened.get() {
            return Ok(opened);
        }
        let handle = File::open(&local.path).map_err(CheckpointError::io(local.path.display()))?;
        Ok(local.opened.get_or_init(|| handle))
    }
}

impl Source for LocalFiles {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn display(&self, file: usize) -> String {
        self.local[file].path.display().to_string()
    }

    fn files(&self) -> &[SourceFile] {
        &self.files
    }

    /// The Hugging Face cache names large files by their SHA-256.
    fn published_sha256(&self, file: usize) -> Option<String> {
        let path = self.local[file].path.canonicalize().ok()?;
        let is_blob = path.parent()?.file_name()? == "blobs";
        let name = path.file_name()?.to_str()?.to_owned();
        (is_blob && name.len() == 64 && name.bytes().all(|byte| byte.is_ascii_hexdigit())).then_some(name)
    }

    fn modified_ns(&self, file: usize) -> u64 {
        let modified = self.local[file].path.metadata().and_then(|metadata| metadata.modified());
        let since = modified.ok().and_then(|time| time.duration_since(std::time::UNIX_EPOCH).ok());
        since.map_or(0, |since| since.as_nanos() as u64)
    }

    fn read(&self, file: usize, ranges: &[Range<u64>]) -> Result<Cow<'_, [u8]>, CheckpointError> {
        let size = self.files[file].bytes;
        if let Some(beyond) = ranges.iter().find(|range| range.end > size || range.start > range.end) {
            return Err(CheckpointError::Truncated { path: self.display(file), expected: beyond.end, actual: size });
        }
        let handle = self.opened(file)?;
        read_merged(handle, ranges).map(Cow::Owned).map_err(|error| match error.kind() {
            std::io::ErrorKind::UnexpectedEof => CheckpointError::Truncated {
                path: self.display(file),
                expected: size,
                actual: handle.metadata().map_or(0, |metadata| metadata.len()),
            },
            _ => CheckpointError::io(self.display(file))(error),
        })
    }
}

/// Files in memory: what a test or a fuzzer makes up, and small files that came from another machine.
pub struct MemoryFiles {
    files: Vec<SourceFile>,
    contents: Vec<Vec<u8>>,
}

impl MemoryFiles {
    /// Files by name and content.
    pub fn new(files: impl IntoIterator<Item = (String, Vec<u8>)>) -> Self {
        let (names, contents): (Vec<_>, Vec<_>) = files.into_iter().unzip();
        let sized = names.into_iter().zip(&contents);
        let files = sized.map(|(name, content)| SourceFile { name, bytes: content.len() as u64 }).collect();
        Self { files, contents }
    }
}

impl Source for MemoryFiles {
    fn name(&self) -> String {
        "memory".into()
    }

    fn display(&self, file: usize) -> String {
        format!("memory/{}", self.files[file].name)
    }

    fn files(&self) -> &[SourceFile] {
        &self.files
    }

    fn read(&self, file: usize, ranges: &[Range<u64>]) -> Result<Cow<'_, [u8]>, CheckpointError> {
        let content = &self.contents[file];
        let slice = |range: &Range<u64>| {
            content.get(range.start as usize..range.end as usize).ok_or_else(|| CheckpointError::Truncated {
                path: self.display(file),
                expected: range.end,
                actual: content.len() as u64,
            })
        };
        match ranges {
            [one] => slice(one).map(Cow::Borrowed),
            many => many.iter().map(slice).collect::<Result<Vec<_>, _>>().map(|pieces| Cow::Owned(pieces.concat())),
        }
    }
}

/// Reads many ranges with positioned reads; near ones, in file order, share one.
fn read_merged(file: &File, ranges: &[Range<u64>]) -> std::io::Result<Vec<u8>> {
    let total: u64 = ranges.iter().map(|range| range.end - range.start).sum();
    let mut out = vec![0; total as usize];
    let mut filled = 0;
    let mut scratch = Vec::new();
    for (span, group) in merged(ranges) {
        if let [range] = group {
            let bytes = (range.end - range.start) as usize;
            file.read_exact_at(&mut out[filled..filled + bytes], range.start)?;
            filled += bytes;
            continue;
        }
        scratch.resize((span.end - span.start) as usize, 0);
        file.read_exact_at(&mut scratch, span.start)?;
        for range in group {
            let piece = &scratch[(range.start - span.start) as usize..(range.end - span.start) as usize];
            out[filled..filled + piece.len()].copy_from_slice(piece);
            filled += piece.len();
        }
    }
    Ok(out)
}

/// Groups neighbouring ranges that are worth one read: ascending, with small gaps, and not too long altogether.
pub fn merged(ranges: &[Range<u64>]) -> impl Iterator<Item = (Range<u64>, &[Range<u64>])> {
    let mut rest = ranges;
    std::iter::from_fn(move || {
        let first = rest.first()?;
        let mut span = first.clone();
        let mut count = 1;
        for next in &rest[1..] {
            let near = next.start >= span.end && next.start - span.end <= MERGE_GAP_BYTES;
            if !near || next.end - span.start > MERGE_SPAN_BYTES {
                break;
            }
            span.end = next.end;
            count += 1;
        }
        let (group, others) = rest.split_at(count);
        rest = others;
        Some((span, group))
    })
}
