//! Small files that are read whole: how large they may be, and where links may lead.
//!
//! A model's directory is a stranger's. A configuration of gigabytes, a pipe that never ends or a link to another user's file is
//! refused before anything of it is read.

use std::borrow::Cow;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::CheckpointError;
use crate::source::Source;

/// The largest size of files with these endings, the first that fits. Far above anything published: Gemma's `tokenizer.json` has
/// 34 MB, the index of a checkpoint of two terabytes 30 MB, the longest chat template 100 kB.
const LIMITS: &[(&str, u64)] = &[
    ("tokenizer.json", 256 << 20),
    ("tekken.json", 256 << 20),
    (".index.json", 256 << 20),
    (".tiktoken", 256 << 20),
    (".model", 256 << 20),
    (".txt", 256 << 20),
    (".jinja", 4 << 20),
    (".json", 16 << 20),
];

/// The largest size of a file with this name.
fn limit_bytes(name: &str) -> u64 {
    LIMITS.iter().find(|(ending, _)| name.ends_with(ending)).map_or(16 << 20, |(_, limit)| *limit)
}

fn check(path: &str, name: &str, bytes: u64) -> Result<u64, CheckpointError> {
    let limit = limit_bytes(name);
    match bytes <= limit {
        true => Ok(limit),
        false => Err(CheckpointError::TooLarge { path: path.into(), bytes, limit }),
    }
}

/// Refuses what is something else altogether, and a text in 16 bits; gives the length of the mark that some editors put before a text.
fn recognised(bytes: &[u8], path: &str) -> Result<usize, CheckpointError> {
    if let Some(error) = crate::foreign::recognise(bytes, path) {
        return Err(error);
    }
    if bytes.starts_with(&[0xFF, 0xFE]) || bytes.starts_with(&[0xFE, 0xFF]) {
        return Err(CheckpointError::malformed(path, "is UTF-16; save it as UTF-8"));
    }
    Ok(if bytes.starts_with(MARK) { MARK.len() } else { 0 })
}

/// U+FEFF in UTF-8.
const MARK: &[u8] = b"\xEF\xBB\xBF";

/// Checks that a file of a source is not far larger than such files are.
///
/// # Errors
/// [`CheckpointError::TooLarge`].
pub(crate) fn check_size(source: &dyn Source, file: usize) -> Result<(), CheckpointError> {
    let entry = &source.files()[file];
    check(&source.display(file), &entry.name, entry.bytes).map(|_| ())
}

/// A whole file of a source, without the mark that may stand before a text.
///
/// # Errors
/// [`CheckpointError::TooLarge`]; [`CheckpointError::NotTheFile`] for a web page or a pointer in its place; failed reads.
pub(crate) fn read_from(source: &dyn Source, file: usize) -> Result<Cow<'_, [u8]>, CheckpointError> {
    check_size(source, file)?;
    let bytes = source.read_all(file)?;
    let start = recognised(&bytes, &source.display(file))?;
    Ok(match bytes {
        Cow::Borrowed(bytes) => Cow::Borrowed(&bytes[start..]),
        Cow::Owned(mut bytes) => {
            bytes.drain(..start);
            Cow::Owned(bytes)
        }
    })
}

/// A whole file, without the mark that may stand before a text; `None` if there is none.
///
/// # Errors
/// As [`read_from`].
pub(crate) fn read(path: &Path) -> Result<Option<Vec<u8>>, CheckpointError> {
    let name = path.display().to_string();
    let metadata = match path.metadata() {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(CheckpointError::io(&name)(error)),
    };
    if !metadata.is_file() {
        return Err(CheckpointError::malformed(&name, "is no file; remove it"));
    }
    let limit = check(&name, &name, metadata.len())?;
    let mut bytes = Vec::new();
    // The file may grow while it is read.
    File::open(path).and_then(|file| file.take(limit).read_to_end(&mut bytes)).map_err(CheckpointError::io(&name))?;
    let start = recognised(&bytes, &name)?;
    bytes.drain(..start);
    Ok(Some(bytes))
}

/// The text of a whole file; `None` if there is none.
///
/// # Errors
/// As [`read`]; [`CheckpointError::Malformed`] for a file that is no UTF-8.
pub(crate) fn read_text(path: &Path) -> Result<Option<String>, CheckpointError> {
    let text = |bytes| String::from_utf8(bytes).map_err(|error| CheckpointError::malformed(path.display(), error));
    read(path)?.map(text).transpose()
}

/// Where the files of a model's directory may lie.
pub(crate) struct Boundary {
    directory: PathBuf,
    /// Links may lead to places below this one.
    root: PathBuf,
}

impl Boundary {
    /// Links stay in the directory. The one exception is the layout of the Hugging Face cache, where the files of
    /// `snapshots/REVISION` are links into the `blobs` of the same repository.
    ///
    /// # Errors
    /// [`CheckpointError::Io`] for a directory that is not there.
    pub fn of(directory: &Path) -> Result<Self, CheckpointError> {
        let directory = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
        let real = directory.canonicalize().map_err(CheckpointError::io(directory.display()))?;
        let in_cache = real.parent().is_some_and(|parent| parent.file_name().is_some_and(|name| name == "snapshots"));
        let root = if in_cache { real.ancestors().nth(2).unwrap_or(&real).to_path_buf() } else { real };
        Ok(Self { directory: directory.to_path_buf(), root })
    }

    /// Checks a file of the directory.
    ///
    /// # Errors
    /// [`CheckpointError::Escapes`] for a link that leads elsewhere, [`CheckpointError::Malformed`] for one that leads nowhere.
    pub fn check(&self, file: &Path) -> Result<(), CheckpointError> {
        let io = || CheckpointError::io(file.display());
        if !file.symlink_metadata().map_err(io())?.is_symlink() {
            return Ok(());
        }
        if !file.exists() {
            return Err(CheckpointError::malformed(file.display(), "is a link to nothing"));
        }
        match file.canonicalize().map_err(io())?.starts_with(&self.root) {
            true => Ok(()),
            false => Err(CheckpointError::Escapes {
                path: self.directory.display().to_string(),
                name: file.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            }),
        }
    }
}
