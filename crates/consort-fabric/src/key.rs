//! The cluster key: what a process must know before anything that it says is read.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

use crate::FabricError;

/// Bytes of a key.
const KEY_BYTES: usize = 32;

/// A secret that all ranks of a cluster share. Each connection proves it in both directions before any message is parsed.
#[derive(Clone, PartialEq, Eq)]
pub struct ClusterKey([u8; KEY_BYTES]);

impl ClusterKey {
    /// Makes a new key and writes it to a new file that only its owner can read.
    ///
    /// # Errors
    /// If the file exists already (an existing key is never overwritten) or cannot be written.
    pub fn generate(path: &Path) -> Result<Self, FabricError> {
        let write = || {
            let mut key = [0; KEY_BYTES];
            File::open("/dev/urandom")?.read_exact(&mut key)?;
            let key = Self(key);
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
            writeln!(file, "{}", key.to_hex())?;
            file.sync_all()?;
            Ok(key)
        };
        write().map_err(|error: io::Error| invalid(path, &format!("cannot be made: {error}")))
    }

    /// Reads a key file.
    ///
    /// # Errors
    /// If the file cannot be read, is no regular file, holds no key, or can be read by others than its owner.
    pub fn load(path: &Path) -> Result<Self, FabricError> {
        let unreadable = |error: io::Error| invalid(path, &format!("cannot be read: {error}"));
        // A pipe would otherwise be waited for without end.
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(unreadable)?;
        let metadata = file.metadata().map_err(unreadable)?;
        if !metadata.is_file() {
            let kind = if metadata.is_dir() { "is a directory" } else { "is not a regular file" };
            return Err(invalid(path, &format!("{kind}; name the file that `consort key new` wrote")));
        }
        let mode = metadata.permissions().mode();
        if mode & 0o077 != 0 {
            return Err(invalid(
                path,
                &format!("can be read by others (mode {:04o}); run chmod 600 on it", mode & 0o7777),
            ));
        }
        let mut text = String::new();
        file.take(4096).read_to_string(&mut text).map_err(unreadable)?;
        Self::from_hex(&text).ok_or_else(|| invalid(path, "does not hold 64 hexadecimal digits"))
    }

    /// A key from its 64 hexadecimal digits, as the file holds them; white space around them is allowed.
    pub fn from_hex(text: &str) -> Option<Self> {
        let digits = text.trim().as_bytes();
        let digit = |byte: u8| (byte as char).to_digit(16);
        let mut key = [0; KEY_BYTES];
        if digits.len() != 2 * KEY_BYTES {
            return None;
        }
        for (byte, pair) in key.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = (digit(pair[0])? << 4 | digit(pair[1])?) as u8;
        }
        Some(Self(key))
    }

    /// The 64 hexadecimal digits, to hand the key on to a rank's environment.
    pub fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    pub(crate) fn bytes(&self) -> &[u8; KEY_BYTES] {
        &self.0
    }
}

/// A key never shows up in a log.
impl fmt::Debug for ClusterKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("ClusterKey(secret)")
    }
}

fn invalid(path: &Path, what: &str) -> FabricError {
    FabricError::Invalid(format!("the key file {} {what}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_file_is_private_and_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        let key = ClusterKey::generate(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(ClusterKey::load(&path).unwrap(), key);
        assert!(ClusterKey::generate(&path).is_err(), "an existing key is not overwritten");
        assert!(!format!("{key:?}").contains(&key.to_hex()[..8]));

        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        assert!(ClusterKey::load(&path).unwrap_err().to_string().contains("chmod 600"));
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        for wrong in ["", "abc", &"g".repeat(64), &"é".repeat(32)] {
            std::fs::write(&path, wrong).unwrap();
            assert!(ClusterKey::load(&path).is_err(), "{wrong}");
        }

        let folder_error = ClusterKey::load(folder.path()).unwrap_err().to_string();
        assert!(folder_error.contains("is a directory"), "{folder_error}");
        let pipe = folder.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let pipe_error = ClusterKey::load(&pipe).unwrap_err().to_string();
        assert!(pipe_error.contains("pipe is not a regular file"), "{pipe_error}");
    }
}
