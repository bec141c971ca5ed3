//! The output directory: safetensors shards whose layout is known before the first byte is computed, so that every tensor is
//! written to its place as it comes and memory never holds more than a piece of one.

use std::cmp::Reverse;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value as Json, json};

use super::ConvertError;
use super::encode::TensorSpec;
use crate::scratch::Scratch;

/// How the names of unfinished directories end.
const PARTIAL: &str = ".consort-partial";

/// One safetensors file.
pub(super) struct Shard {
    /// The weights that it holds; a weight's tensors are never in two files.
    pub weights: Range<usize>,
    /// First byte of each weight's tensors.
    offsets: Vec<Vec<u64>>,
    header: Vec<u8>,
}

/// Divides weights (each a list of tensors) into files of about `limit` bytes. `format` names the program whose spelling the
/// tensors follow.
pub(super) fn shards(weights: &[Vec<TensorSpec>], limit: u64, format: &str) -> Vec<Shard> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    let mut filled = 0;
    for (index, tensors) in weights.iter().enumerate() {
        let bytes: u64 = tensors.iter().map(TensorSpec::bytes).sum();
        match ranges.last_mut() {
            Some(range) if filled + bytes <= limit => range.end = index + 1,
            _ => {
                ranges.push(index..index + 1);
                filled = 0;
            }
        }
        filled += bytes;
    }
    ranges.into_iter().map(|range| Shard::new(weights, range, format)).collect()
}

impl Shard {
    fn new(weights: &[Vec<TensorSpec>], range: Range<usize>, format: &str) -> Self {
        let own = &weights[range.clone()];
        let mut order: Vec<(usize, usize)> = Vec::new();
        for (weight, tensors) in own.iter().enumerate() {
            order.extend((0..tensors.len()).map(|part| (weight, part)));
        }
        // Wide numbers first: readers that view the file as arrays want each at a multiple of its width.
        order.sort_by_key(|&(weight, part)| Reverse(own[weight][part].dtype.bytes()));
        let mut offsets: Vec<Vec<u64>> = own.iter().map(|tensors| vec![0; tensors.len()]).collect();
        let mut entries = Map::new();
        entries.insert("__metadata__".into(), json!({ "format": format }));
        let mut end = 0;
        for (weight, part) in order {
            let tensor = &own[weight][part];
            let start = end;
            end += tensor.bytes();
            offsets[weight][part] = start;
            let entry =
                json!({ "dtype": tensor.dtype.to_string(), "shape": tensor.shape, "data_offsets": [start, end] });
            entries.insert(tensor.name.clone(), entry);
        }
        let mut json = Json::Object(entries).to_string();
        // The data begins at a multiple of 8.
        json.extend(std::iter::repeat_n(' ', json.len().next_multiple_of(8) - json.len()));
        let mut header = (json.len() as u64).to_le_bytes().to_vec();
        header.extend_from_slice(json.as_bytes());
        offsets.iter_mut().flatten().for_each(|offset| *offset += header.len() as u64);
        Self { weights: range, offsets, header }
    }
}

/// The file name of shard `index` of `count`.
pub(super) fn shard_name(index: usize, count: usize) -> String {
    match count {
        1 => "model.safetensors".into(),
        _ => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
    }
}

/// A shard that is being written.
pub(super) struct ShardFile<'s> {
    shard: &'s Shard,
    path: PathBuf,
    file: File,
}

impl<'s> ShardFile<'s> {
    pub fn create(path: PathBuf, shard: &'s Shard) -> Result<Self, ConvertError> {
        let file = File::create_new(&path).map_err(ConvertError::write(&path))?;
        file.write_all_at(&shard.header, 0).map_err(ConvertError::write(&path))?;
        Ok(Self { shard, path, file })
    }

    /// Writes bytes of tensor `part` of weight `weight`, which begin at its byte `start`.
    pub fn write(&self, weight: usize, part: usize, start: u64, bytes: &[u8]) -> Result<(), ConvertError> {
        let offset = self.shard.offsets[weight - self.shard.weights.start][part] + start;
        self.file.write_all_at(bytes, offset).map_err(ConvertError::write(&self.path))
    }

    pub fn finish(self) -> Result<(), ConvertError> {
        self.file.sync_all().map_err(ConvertError::write(&self.path))
    }
}

/// A directory that appears under its name when it is complete, and leaves nothing behind if it never is.
pub(super) struct Staging {
    directory: Scratch,
    output: PathBuf,
}

impl Staging {
    /// Begins beside `output`, where what earlier conversions left when they were killed is removed.
    ///
    /// # Errors
    /// [`ConvertError::Exists`]; [`ConvertError::Write`] if its parent cannot be written.
    pub fn begin(output: &Path) -> Result<Self, ConvertError> {
        let name = output.file_name().ok_or_else(|| ConvertError::NoName { path: output.display().to_string() })?;
        let parent = parent(output);
        // Without a slash at the end, which would look through a link.
        let output = parent.join(name);
        if output.symlink_metadata().is_ok() {
            return Err(ConvertError::Exists { path: output.display().to_string() });
        }
        // What the user's mask leaves of these rights, as for any new directory.
        let directory = Scratch::directory(parent, &format!(".{}.", name.display()), PARTIAL, 0o777)
            .map_err(ConvertError::write(parent))?;
        Scratch::sweep(parent, PARTIAL);
        Ok(Self { directory, output })
    }

    /// The path of a file in the unfinished directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Writes a small file, which may lie in a directory of its own.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<(), ConvertError> {
        let path = self.path(name);
        let write = || {
            std::fs::create_dir_all(parent(&path))?;
            let file = File::create_new(&path)?;
            file.write_all_at(bytes, 0)?;
            file.sync_all()
        };
        write().map_err(ConvertError::write(&path))
    }

    /// Gives the directory its name.
    pub fn finish(self) -> Result<(), ConvertError> {
        let Self { directory, output } = self;
        directory.handle().sync_all().map_err(ConvertError::write(directory.path()))?;
        directory.finish(&output).map_err(ConvertError::write(&output))?;
        let sync = File::open(parent(&output)).and_then(|parent| parent.sync_all());
        sync.map_err(ConvertError::write(&output))
    }
}

fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn an_unfinished_directory_is_removed() {
        let parent = tempfile::tempdir().unwrap();
        let count = || fs::read_dir(parent.path()).unwrap().count();
        let staging = Staging::begin(&parent.path().join("model")).unwrap();
        staging.write("config.json", b"{}").unwrap();
        assert_eq!(count(), 1);
        drop(staging);
        assert_eq!(count(), 0);

        let staging = Staging::begin(&parent.path().join("model")).unwrap();
        staging.write("config.json", b"{}").unwrap();
        staging.finish().unwrap();
        assert_eq!(fs::read(parent.path().join("model/config.json")).unwrap(), b"{}");
        assert_eq!(count(), 1);
    }
}
