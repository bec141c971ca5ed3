//! GGUF files: the header of versions 2 and 3, little-endian, in one file or split over several.
//!
//! The format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>. A header is hostile until proven otherwise:
//! every count is compared with the bytes that are left before anything is allocated for it, and every tensor with the size
//! of the file before anyone may read it.

pub mod config;
mod header;
mod names;
mod value;

pub use header::{GgufTensor, Header, TensorType};
pub use value::Value;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::CheckpointError;
use crate::files::Boundary;
use crate::source::{LocalFiles, Source};

/// A GGUF model: the metadata of its first part and the tensors of all its parts.
pub struct Gguf {
    metadata: BTreeMap<String, Value>,
    tensors: Vec<GgufTensor>,
    header_bytes: Vec<u64>,
}

impl Gguf {
    /// Reads the headers of all parts in `source`, which holds the parts in order and nothing else.
    ///
    /// # Errors
    /// What [`Header::parse`] finds; parts that contradict each other or their number; a tensor in two parts.
    pub fn read(source: &dyn Source) -> Result<Self, CheckpointError> {
        let parts = source.files().len();
        let mut first: Option<Header> = None;
        let mut tensors = Vec::new();
        let mut counts: Vec<Option<u64>> = Vec::with_capacity(parts);
        let mut header_bytes = Vec::with_capacity(parts);
        for part in 0..parts {
            let path = source.display(part);
            let mut header = Header::read(source, part)?;
            let split = |key| header.metadata.get(key).and_then(Value::as_u64);
            let (number, count) = (split("split.no").unwrap_or(0), split("split.count").unwrap_or(1).max(1));
            if (number, count) != (part as u64, parts as u64) {
                let reason = format!(
                    "says it is part {} of {count}, but stands where part {} of {parts} belongs; \
                     keep the names NAME-00001-of-{count:05}.gguf and all parts in one directory",
                    number + 1,
                    part + 1
                );
                return Err(CheckpointError::malformed(path, reason));
            }
            counts.push(split("split.tensors.count"));
            header_bytes.push(header.data_start);
            tensors.append(&mut header.tensors);
            first.get_or_insert(header);
        }
        let metadata = first.map(|header| header.metadata).unwrap_or_default();
        let mut names = std::collections::HashSet::new();
        if let Some(twice) = tensors.iter().find(|tensor| !names.insert(tensor.name.as_str())) {
            return Err(CheckpointError::tensor(source.display(twice.file), &twice.name, "is in two parts"));
        }
        if let Some(part) = counts.iter().position(|count| count.is_some_and(|count| count != tensors.len() as u64)) {
            let count = counts[part].unwrap_or_default();
            let reason = format!("split.tensors.count is {count}, but the parts hold {} tensors", tensors.len());
            return Err(CheckpointError::malformed(source.display(part), reason));
        }
        Ok(Self { metadata, tensors, header_bytes })
    }

    /// The key-value pairs of the (first) header.
    pub fn metadata(&self) -> &BTreeMap<String, Value> {
        &self.metadata
    }

    /// All tensors, in file order.
    pub fn tensors(&self) -> &[GgufTensor] {
        &self.tensors
    }

    /// Bytes before the tensor data, for each part.
    pub fn header_bytes(&self) -> &[u64] {
        &self.header_bytes
    }
}

/// The file, or all parts of the split model that it belongs to, in order.
///
/// # Errors
/// A part that is not there is [`CheckpointError::MissingFile`], a link out of their directory [`CheckpointError::Escapes`].
pub fn open_parts(path: &Path) -> Result<LocalFiles, CheckpointError> {
    let names = path.file_name().and_then(|name| part_names(name.to_str()?));
    let Some(names) = names.filter(|names| names.len() > 1) else {
        return LocalFiles::list(path, vec![path.to_path_buf()]);
    };
    let paths: Vec<PathBuf> = names.iter().map(|name| path.with_file_name(name)).collect();
    if let Some(missing) = paths.iter().find(|part| !part.is_file()) {
        return Err(CheckpointError::missing(missing.display().to_string(), path.display()));
    }
    // One file may lie wherever its user says; parts are found by their names, as shards are.
    let boundary = Boundary::of(path.parent().unwrap_or(path))?;
    paths.iter().try_for_each(|part| boundary.check(part))?;
    LocalFiles::list(path, paths)
}

/// `NAME-00002-of-00003.gguf` is one part of a split model: the names of all of them, in order.
pub(crate) fn part_names(file: &str) -> Option<Vec<String>> {
    let (rest, count) = file.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    let five_digits = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let parse = |text: &str| five_digits(text).then(|| text.parse::<u32>().ok())?;
    let (number, count) = (parse(number)?, parse(count)?);
    let names = || (1..=count).map(|part| format!("{stem}-{part:05}-of-{count:05}.gguf")).collect();
    (1..=count).contains(&number).then(names)
}
