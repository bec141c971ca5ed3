//! The header of a safetensors file.
//!
//! The format: <https://github.com/huggingface/safetensors#format>. Its rules are checked here and not by the library of
//! the same name, because a checkpoint of our size is read by ranges, often from another machine, and because every error
//! has to name the file and the tensor.

use std::collections::{HashMap, HashSet};
use std::fmt;

use serde::Deserialize;
use serde::de::{self, MapAccess, Visitor};

use crate::CheckpointError;
use crate::error::excerpt;
use crate::source::Source;

/// The format's own limit on a header.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Number types of safetensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the names say it all
pub enum Dtype {
    Bool,
    U8,
    I8,
    F8E5M2,
    F8E4M3,
    F8E8M0,
    U16,
    I16,
    F16,
    BF16,
    U32,
    I32,
    F32,
    U64,
    I64,
    F64,
    /// Any other; [`Header::unknown`] has its name.
    Unknown,
}

/// Name in the file, type, bytes of one value.
const DTYPES: &[(&str, Dtype, u64)] = &[
    ("BOOL", Dtype::Bool, 1),
    ("U8", Dtype::U8, 1),
    ("I8", Dtype::I8, 1),
    ("F8_E5M2", Dtype::F8E5M2, 1),
    ("F8_E4M3", Dtype::F8E4M3, 1),
    ("F8_E8M0", Dtype::F8E8M0, 1),
    ("U16", Dtype::U16, 2),
    ("I16", Dtype::I16, 2),
    ("F16", Dtype::F16, 2),
    ("BF16", Dtype::BF16, 2),
    ("U32", Dtype::U32, 4),
    ("I32", Dtype::I32, 4),
    ("F32", Dtype::F32, 4),
    ("U64", Dtype::U64, 8),
    ("I64", Dtype::I64, 8),
    ("F64", Dtype::F64, 8),
];

impl Dtype {
    /// Bytes of one value.
    pub fn bytes(self) -> usize {
        // INVARIANT: the table lists every variant but the unknown one, of which nothing is read.
        DTYPES.iter().find(|(_, dtype, _)| *dtype == self).map_or(1, |(_, _, bytes)| *bytes as usize)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(DTYPES.iter().find(|(_, dtype, _)| dtype == self).map_or("?", |(name, _, _)| name))
    }
}

/// A tensor of a safetensors file; its range has been checked against the file's size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTensor {
    /// Name in the file.
    pub name: String,
    /// Type of its values.
    pub dtype: Dtype,
    /// Shape, outermost first.
    pub shape: Vec<usize>,
    /// Index of the file.
    pub file: usize,
    /// First byte in the file.
    pub offset: u64,
    /// Size.
    pub bytes: u64,
}

/// The header of one file.
pub struct Header {
    /// Tensors, by offset.
    pub tensors: Vec<StoredTensor>,
    /// Bytes before the first tensor's data.
    pub data_start: u64,
    /// The types of tensors of types that are unknown here, by their names. Their sizes are not compared with their shapes.
    pub unknown: HashMap<String, String>,
}

impl Header {
    /// Reads the header of file `file`.
    ///
    /// # Errors
    /// Names the file and the tensor for: a header longer than the file or than the format allows, JSON that is none, a
    /// name twice, a shape that overflows or does not match its range, ranges that overlap or leave
    /// holes, a file that is too short or too long.
    pub fn read(source: &dyn Source, file: usize) -> Result<Self, CheckpointError> {
        let path = source.display(file);
        let size = source.files()[file].bytes;
        let start = source.read(file, std::slice::from_ref(&(0..size.min(512))))?;
        if let Some(error) = crate::foreign::recognise(&start, &path) {
            return Err(error);
        }
        let Some(length) = start.first_chunk().map(|bytes| u64::from_le_bytes(*bytes)) else {
            return Err(CheckpointError::Truncated { path, expected: 8, actual: size });
        };
        if length > MAX_HEADER_BYTES {
            let reason = format!("a header of {length} bytes; the format allows {MAX_HEADER_BYTES}");
            return Err(CheckpointError::malformed(path, reason));
        }
        let data_start = 8 + length;
        if data_start > size {
            return Err(CheckpointError::Truncated { path, expected: data_start, actual: size });
        }
        let json = source.read(file, std::slice::from_ref(&(8..data_start)))?;
        let Entries(entries) = serde_json::from_slice(&json)
            .map_err(|error| CheckpointError::malformed(&path, format!("safetensors header: {error}")))?;
        let is_unknown = |entry: &Entry| DTYPES.iter().all(|(known, ..)| *known != entry.dtype);
        let unknown = entries.iter().filter(|(_, entry)| is_unknown(entry));
        let unknown = unknown.map(|(name, entry)| (name.clone(), entry.dtype.clone())).collect();
        let tensors = place(entries, data_start, size, file, &path)?;
        Ok(Self { tensors, data_start, unknown })
    }
}

/// One tensor as the header lists it.
#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// The header's object as a list: a map would hide a name that occurs twice.
struct Entries(Vec<(String, Entry)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct InOrder;
        impl<'de> Visitor<'de> for InOrder {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut entries = Vec::new();
                let mut names = HashSet::new();
                while let Some(name) = map.next_key::<String>()? {
                    if !names.insert(name.clone()) {
                        return Err(de::Error::custom(format!("tensor {:?} occurs twice", excerpt(&name))));
                    }
                    if name == "__metadata__" {
                        map.next_value::<de::IgnoredAny>()?;
                        continue;
                    }
                    let entry = map
                        .next_value()
                        .map_err(|error| de::Error::custom(format!("tensor {:?}: {error}", excerpt(&name))))?;
                    entries.push((name, entry));
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(InOrder)
    }
}

/// Gives each tensor its range of the file, and checks that the ranges follow one another without overlap or hole.
fn place(
    entries: Vec<(String, Entry)>,
    data_start: u64,
    file_bytes: u64,
    file: usize,
    path: &str,
) -> Result<Vec<StoredTensor>, CheckpointError> {
    let data_bytes = file_bytes - data_start;
    let mut tensors = Vec::with_capacity(entries.len());
    for (name, entry) in entries {
        let wrong = |reason: String| CheckpointError::tensor(path, &name, reason);
        let known = DTYPES.iter().find(|(known, _, _)| *known == entry.dtype);
        let (dtype, value_bytes) = known.map_or((Dtype::Unknown, 1), |&(_, dtype, bytes)| (dtype, bytes));
        let [start, end] = entry.data_offsets;
        if start > end {
            return Err(wrong(format!("data_offsets [{start}, {end}] run backwards")));
        }
        // Counted without zeros as well, so that no product of some dimensions overflows later.
        let product =
            |least: u64| entry.shape.iter().try_fold(value_bytes, |all, &size| all.checked_mul(size.max(least)));
        let bytes = product(1).and(product(0)).ok_or_else(|| wrong(format!("shape {:?} overflows", entry.shape)))?;
        let bytes = if dtype == Dtype::Unknown { end - start } else { bytes };
        if end - start != bytes {
            let reason = format!(
                "{} of shape {:?} takes {bytes} bytes, but data_offsets [{start}, {end}] hold {}",
                entry.dtype,
                entry.shape,
                end - start
            );
            return Err(wrong(reason));
        }
        if end > data_bytes {
            let expected = data_start.saturating_add(end);
            return Err(CheckpointError::Truncated { path: path.into(), expected, actual: file_bytes });
        }
        let shape = entry.shape.iter().map(|&size| size as usize).collect();
        tensors.push(StoredTensor { name, dtype, shape, file, offset: data_start + start, bytes });
    }
    // Empty tensors first: they may share their offset with a neighbour.
    tensors.sort_by_key(|tensor| (tensor.offset, tensor.bytes));
    let mut end = data_start;
    for tensor in &tensors {
        if tensor.offset != end {
            let what = if tensor.offset < end { "overlaps the tensor before it" } else { "leaves a hole before it" };
            return Err(CheckpointError::tensor(path, &tensor.name, format!("{what}, at byte {}", tensor.offset)));
        }
        end += tensor.bytes;
    }
    if end != file_bytes {
        let reason = format!("{file_bytes} bytes, but the header accounts for {end}");
        return Err(CheckpointError::malformed(path, reason));
    }
    Ok(tensors)
}
