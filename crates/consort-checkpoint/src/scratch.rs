//! Files and directories that exist only while something is being made, whatever ends their owner.
//!
//! The owner holds a lock, which the system takes away when the process ends. So whoever makes the next one can tell what a killed
//! process left behind from what a living one works on, here or on another machine that shares the disk.

use std::ffi::OsStr;
use std::fs::{self, File, Metadata, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Something under a passing name. It is removed with this value, unless it got its final name before.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
    /// The file, or the directory, locked.
    file: File,
    is_directory: bool,
    is_finished: bool,
}

/// How often another process may sweep a new name away between its making and its locking.
const ATTEMPTS: usize = 16;

impl Scratch {
    /// A new directory in `parent`, with the rights that the user's mask leaves; its name begins and ends like this.
    ///
    /// # Errors
    /// What the system says.
    pub fn directory(parent: &Path, start: &str, ending: &str, mode: u32) -> io::Result<Self> {
        parent.metadata()?;
        Self::make(|| {
            let mut builder = tempfile::Builder::new();
            builder.prefix(start).suffix(ending).permissions(Permissions::from_mode(mode));
            let path = builder.tempdir_in(parent).map_err(without_path)?.keep();
            Ok((File::open(&path)?, path))
        })
    }

    /// A new empty file in `parent`, whose name ends like this.
    ///
    /// # Errors
    /// What the system says.
    pub fn file(parent: &Path, ending: &str) -> io::Result<Self> {
        parent.metadata()?;
        Self::make(|| {
            let file = tempfile::Builder::new().prefix(".").suffix(ending).tempfile_in(parent).map_err(without_path)?;
            Ok(file.keep()?)
        })
    }

    fn make(make: impl Fn() -> io::Result<(File, PathBuf)>) -> io::Result<Self> {
        for _ in 0..ATTEMPTS {
            let (file, path) = make()?;
            // Where the file system knows no locks, nobody else gets one either, and nothing is ever swept away.
            let _ = file.lock();
            let is_directory = file.metadata()?.is_dir();
            let scratch = Self { path, file, is_directory, is_finished: false };
            if scratch.path.symlink_metadata().is_ok_and(|found| is_same(&found, &scratch.file)) {
                return Ok(scratch);
            }
        }
        Err(io::Error::other("another process removes every new file here"))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The open file or directory.
    pub fn handle(&self) -> &File {
        &self.file
    }

    /// Gives it its final name.
    ///
    /// # Errors
    /// What the system says; it is removed then.
    pub fn finish(mut self, path: &Path) -> io::Result<()> {
        fs::rename(&self.path, path)?;
        self.is_finished = true;
        Ok(())
    }

    /// Removes what processes of this user left in `parent` under names with this ending, when they were killed. What cannot be looked
    /// at or removed stays.
    pub fn sweep(parent: &Path, ending: &str) {
        let Ok(own) = Self::file(parent, ending) else { return };
        let Ok(user) = own.file.metadata().map(|metadata| metadata.uid()) else { return };
        for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
            let path = entry.path();
            let ends = |name: &OsStr| name.as_encoded_bytes().ends_with(ending.as_bytes());
            if path == own.path || !ends(&entry.file_name()) {
                continue;
            }
            let Ok(found) = path.symlink_metadata() else { continue };
            if found.uid() != user || !found.is_dir() && !found.is_file() {
                continue;
            }
            let Ok(file) = File::open(&path) else { continue };
            // The owner lives, or the file was renamed in the meantime.
            if file.try_lock().is_err() || !is_same(&found, &file) {
                continue;
            }
            let _ = remove(&path, found.is_dir());
        }
    }
}

/// What went wrong, without the passing name that `tempfile` adds: whoever reports it names the place.
fn without_path(error: io::Error) -> io::Error {
    error.kind().into()
}

fn is_same(found: &Metadata, file: &File) -> bool {
    file.metadata().is_ok_and(|open| (open.dev(), open.ino()) == (found.dev(), found.ino()))
}

fn remove(path: &Path, is_directory: bool) -> io::Result<()> {
    if is_directory { fs::remove_dir_all(path) } else { fs::remove_file(path) }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if !self.is_finished {
            // There is nobody to tell, and the next sweep finds it.
            let _ = remove(&self.path, self.is_directory);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_nobody_holds_is_swept_away() {
        let parent = tempfile::tempdir().unwrap();
        let names = || {
            let entries = fs::read_dir(parent.path()).unwrap();
            let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        };
        let held = Scratch::file(parent.path(), ".x-partial").unwrap();
        let held_directory = Scratch::directory(parent.path(), ".m.", ".x-partial", 0o700).unwrap();
        fs::write(held_directory.path().join("file"), "").unwrap();
        fs::create_dir_all(parent.path().join(".dead.x-partial/inside")).unwrap();
        fs::write(parent.path().join("dead.x-partial"), "").unwrap();
        for other in ["partial", "x-partial.txt", "model"] {
            fs::write(parent.path().join(other), "").unwrap();
        }
        let elsewhere = tempfile::tempdir().unwrap();
        fs::write(elsewhere.path().join("file"), "").unwrap();
        std::os::unix::fs::symlink(elsewhere.path(), parent.path().join("link.x-partial")).unwrap();
        Scratch::sweep(parent.path(), ".x-partial");
        let left = names();
        assert_eq!(left.len(), 6, "{left:?}");
        assert!(left.iter().all(|name| !name.contains("dead")), "{left:?}");
        assert!(held.path().exists() && held_directory.path().join("file").exists());
        assert!(elsewhere.path().join("file").exists());

        held.finish(&parent.path().join("done")).unwrap();
        drop(held_directory);
        assert_eq!(names(), ["done", "link.x-partial", "model", "partial", "x-partial.txt"]);
    }
}
