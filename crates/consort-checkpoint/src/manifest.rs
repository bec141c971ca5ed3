//! What a model's files are, in a form small enough to compare between ranks before anything is loaded.

use std::fmt::Write;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::CheckpointError;
use crate::source::Source;

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
    /// SHA-256 (hex) of the header, which lists names, shapes and formats; of a file without one, of the whole file.
    pub header_hash: String,
}

impl Manifest {
    /// The manifest of a source whose file `i` has a header of `header_bytes(i)` bytes.
    pub(crate) fn of(source: &dyn Source, header_bytes: impl Fn(usize) -> u64) -> Result<Self, CheckpointError> {
        let describe = |(index, file): (usize, &crate::source::SourceFile)| {
            let range = 0..header_bytes(index).min(file.bytes);
            let header = source.read(index, std::slice::from_ref(&range))?;
            Ok(ManifestFile { name: file.name.clone(), bytes: file.bytes, header_hash: hex(&Sha256::digest(&header)) })
        };
        let mut files = source.files().iter().enumerate().map(describe).collect::<Result<Vec<_>, _>>()?;
        files.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Self { files })
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
        }
        hex(&hasher.finalize())
    }

    /// The first file that differs, with what differs: `None` for equal manifests.
    pub fn diff(&self, other: &Self) -> Option<String> {
        let find = |files: &[ManifestFile], name: &str| files.iter().find(|file| file.name == name).cloned();
        for file in &self.files {
            match find(&other.files, &file.name) {
                None => return Some(format!("{}: missing on one side", file.name)),
                Some(theirs) if theirs.bytes != file.bytes => {
                    return Some(format!("{}: {} bytes against {}", file.name, file.bytes, theirs.bytes));
                }
                Some(theirs) if theirs.header_hash != file.header_hash => {
                    return Some(format!("{}: same size, different content", file.name));
                }
                Some(_) => {}
            }
        }
        let extra = other.files.iter().find(|file| find(&self.files, &file.name).is_none());
        extra.map(|file| format!("{}: missing on one side", file.name))
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // INVARIANT: writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}
