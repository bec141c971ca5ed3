//! Files that are either whole or not there.

use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::{Progress, PullError};
use crate::manifest::hex;

/// What is known of a file before it arrives.
pub(super) struct Expected<'a> {
    /// Name in messages.
    pub file: &'a str,
    /// Size.
    pub bytes: u64,
    /// SHA-256 as lower-case hex, if published.
    pub sha256: Option<&'a str>,
}

/// Holds a directory for one process at a time. The system lets go of it when the process ends, however it ends.
pub(super) struct Lock {
    _file: File,
}

impl Lock {
    /// Waits until no other process holds `directory`, which is created.
    pub(super) fn take(directory: &Path) -> Result<Self, PullError> {
        let path = directory.join(".consort.lock");
        let take = || {
            fs::create_dir_all(directory)?;
            let file = File::options().create(true).truncate(false).write(true).open(&path)?;
            file.lock()?;
            Ok(file)
        };
        take().map(|file| Self { _file: file }).map_err(io_error(&path))
    }
}

/// A file that is being written under another name.
pub(super) struct Partial<'a> {
    path: PathBuf,
    file: File,
    hash: Sha256,
    expected: &'a Expected<'a>,
    /// Bytes that are there.
    pub bytes: u64,
}

impl<'a> Partial<'a> {
    /// Opens `path`, and takes over what an earlier download left there.
    pub(super) fn open(path: PathBuf, expected: &'a Expected<'a>) -> Result<Self, PullError> {
        let file = File::options().create(true).truncate(false).read(true).write(true).open(&path);
        let file = file.map_err(io_error(&path))?;
        let mut partial = Self { path, file, hash: Sha256::new(), expected, bytes: 0 };
        let left = partial.file.metadata().map_err(io_error(&partial.path))?.len();
        // Without a hash nobody would notice that the beginning is another version's.
        if left > expected.bytes || expected.sha256.is_none() {
            partial.restart()?;
            return Ok(partial);
        }
        let mut reader = (&partial.file).take(left);
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            match reader.read(&mut buffer).map_err(io_error(&partial.path))? {
                0 => break,
                count => partial.hash.update(&buffer[..count]),
            }
        }
        partial.bytes = left;
        Ok(partial)
    }

    /// Throws away what is there.
    pub(super) fn restart(&mut self) -> Result<(), PullError> {
        self.hash = Sha256::new();
        self.bytes = 0;
        self.file.set_len(0).and_then(|()| self.file.rewind()).map_err(io_error(&self.path))
    }

    /// Appends.
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), PullError> {
        if self.bytes + bytes.len() as u64 > self.expected.bytes {
            return Err(self.damaged(format!("longer than the {} bytes expected", self.expected.bytes)));
        }
        self.file.write_all(bytes).map_err(|error| self.write_error(error))?;
        self.hash.update(bytes);
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    /// Appends all that `reader` has.
    pub(super) fn write_all_of(&mut self, reader: &mut dyn Read, progress: &mut dyn Progress) -> Result<(), PullError> {
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            match reader.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(count) => {
                    self.write(&buffer[..count])?;
                    progress.advance(count as u64);
                }
                Err(error) => return Err(self.damaged(error.to_string())),
            }
        }
    }

    /// Checks size and hash, flushes, and gives the file its final name.
    pub(super) fn complete(self, path: &Path) -> Result<(), PullError> {
        if self.bytes != self.expected.bytes {
            return Err(self.damaged(format!("{} bytes instead of {}", self.bytes, self.expected.bytes)));
        }
        let found = hex(&self.hash.clone().finalize());
        if let Some(expected) = self.expected.sha256.filter(|expected| *expected != found) {
            return Err(self.damaged(format!("SHA-256 is {found} instead of {expected}")));
        }
        self.file.sync_all().map_err(|error| self.write_error(error))?;
        fs::rename(&self.path, path).map_err(io_error(path))?;
        sync_directory_of(path);
        Ok(())
    }

    /// Deletes the file, which is of no use.
    pub(super) fn damaged(&self, reason: String) -> PullError {
        // The error to report is the one that led here.
        let _ = fs::remove_file(&self.path);
        PullError::Damaged { file: self.expected.file.to_owned(), reason }
    }

    fn write_error(&self, error: io::Error) -> PullError {
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                PullError::DiskFull { path: self.path.clone(), needed_bytes: self.expected.bytes - self.bytes }
            }
            _ => PullError::Io { path: self.path.clone(), error },
        }
    }
}

pub(super) const BUFFER_BYTES: usize = 1 << 18;

/// Makes a rename last over a power failure, where the system can do that.
fn sync_directory_of(path: &Path) {
    if let Some(directory) = path.parent() {
        let _ = File::open(directory).and_then(|directory| directory.sync_all());
    }
}

/// Puts the path into an error.
pub(super) fn io_error(path: &Path) -> impl Fn(io::Error) -> PullError {
    let path = path.to_owned();
    move |error| PullError::Io { path: path.clone(), error }
}
