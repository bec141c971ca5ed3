//! The bytes of one GGUF header.

use std::collections::{BTreeMap, HashSet};

use consort_compute::Format;

use super::Value;
use crate::CheckpointError;
use crate::source::Source;

/// Arrays of arrays are legal; nothing real nests them deeper than this.
const MAX_NESTING: usize = 4;
/// Metadata values of one file, array elements included. A vocabulary of 262,144 tokens with types, scores and merges
/// comes to about a million; the limit keeps a hostile file from turning each of its bytes into a value of 32.
const MAX_VALUES: u64 = 1 << 25;
/// ggml's own limit.
const MAX_DIMENSIONS: usize = 4;
/// The longest header that is read. That of a model with 262,144 tokens and their merges has about 20 MB.
const MAX_HEADER_BYTES: u64 = 512 << 20;
/// First guess at the size of a header that lies on another machine.
const FIRST_READ_BYTES: u64 = 1 << 20;

/// How a GGUF tensor is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorType {
    /// Rows that are already row blocks of the format.
    Rows(Format),
    /// MXFP4 with value `i` in the low and value `i + 16` in the high nibble of byte `i`.
    MxFp4,
    /// Four E4M3 scales, then 4 × 16 E2M1 values; per 16, value `i` in the low and `i + 8` in the high nibble of byte `i`.
    NvFp4,
}

impl TensorType {
    /// The types that are read, by their number in ggml's `enum ggml_type`.
    fn from_number(number: u32) -> Option<Self> {
        Some(Self::Rows(match number {
            0 => Format::F32,
            1 => Format::F16,
            2 => Format::Q4_0,
            3 => Format::Q4_1,
            6 => Format::Q5_0,
            7 => Format::Q5_1,
            8 => Format::Q8_0,
            10 => Format::Q2K,
            11 => Format::Q3K,
            12 => Format::Q4K,
            13 => Format::Q5K,
            14 => Format::Q6K,
            20 => Format::IQ4NL,
            23 => Format::IQ4XS,
            30 => Format::BF16,
            39 => return Some(Self::MxFp4),
            40 => return Some(Self::NvFp4),
            _ => return None,
        }))
    }

    /// The format that the tensor has once it is read.
    pub fn format(self) -> Format {
        match self {
            Self::Rows(format) => format,
            Self::MxFp4 => Format::MxFp4,
            Self::NvFp4 => Format::NvFp4,
        }
    }

    /// `(values, bytes)` of one block in the file.
    pub fn block(self) -> (u64, u64) {
        match self {
            Self::Rows(format) => (format.block_values() as u64, format.block_bytes() as u64),
            Self::MxFp4 => (32, 1 + 16),
            Self::NvFp4 => (64, 4 + 32),
        }
    }
}

/// A tensor of a GGUF file; its range has been checked against the file's size.
#[derive(Clone, Debug)]
pub struct GgufTensor {
    /// Name in the file.
    pub name: String,
    /// Storage.
    pub tensor_type: TensorType,
    /// Shape, outermost first (the file has it innermost first).
    pub shape: Vec<usize>,
    /// Index of the part that holds it.
    pub file: usize,
    /// First byte in that file.
    pub offset: u64,
    /// Size in the file.
    pub bytes: u64,
}

/// The header of one file.
pub struct Header {
    /// Key-value pairs.
    pub metadata: BTreeMap<String, Value>,
    /// Tensors in file order.
    pub tensors: Vec<GgufTensor>,
    /// Where tensor data begins: the header's size, rounded up to the alignment.
    pub data_start: u64,
}

/// Why a header could not be read from the bytes at hand.
enum Stop {
    /// It goes on after them.
    NeedsMore,
    /// It is wrong.
    Wrong(CheckpointError),
}

impl Header {
    /// Reads the header of file `file`.
    ///
    /// # Errors
    /// As [`Header::parse`].
    pub fn read(source: &dyn Source, file: usize) -> Result<Self, CheckpointError> {
        let size = source.files()[file].bytes;
        let path = source.display(file);
        let mut window = FIRST_READ_BYTES.min(size);
        loop {
            let bytes = source.read(file, std::slice::from_ref(&(0..window)))?;
            match parse(&bytes, size, file, &path) {
                Ok(header) => return Ok(header),
                Err(Stop::Wrong(error)) => return Err(error),
                Err(Stop::NeedsMore) if window < size.min(MAX_HEADER_BYTES) => {
                    window = window.saturating_mul(4).min(size).min(MAX_HEADER_BYTES);
                }
                Err(Stop::NeedsMore) if window < size => {
                    let reason = format!("the header takes more than {MAX_HEADER_BYTES} bytes");
                    return Err(CheckpointError::malformed(path, reason));
                }
                Err(Stop::NeedsMore) => return Err(CheckpointError::malformed(path, "the header is cut short")),
            }
        }
    }

    /// Reads a header from a file in memory.
    ///
    /// # Errors
    /// Names the file and the key or tensor for: not GGUF, another version or byte order, a length past the end, a type
    /// that is not read, a name that occurs twice, overlapping tensors, a file that is too short or goes on too long.
    pub fn parse(file: &[u8], path: &str) -> Result<Self, CheckpointError> {
        parse(file, file.len() as u64, 0, path).map_err(|stop| match stop {
            Stop::Wrong(error) => error,
            Stop::NeedsMore => CheckpointError::malformed(path, "the header is cut short"),
        })
    }
}

fn parse(bytes: &[u8], file_bytes: u64, file: usize, path: &str) -> Result<Header, Stop> {
    let wrong = |reason: String| Stop::Wrong(CheckpointError::malformed(path, reason));
    if let Some(error) = crate::foreign::recognise(bytes, path) {
        return Err(Stop::Wrong(error));
    }
    let mut cursor = Cursor { bytes, at: 0, file_bytes, values_left: MAX_VALUES, path };
    if cursor.take(4)? != b"GGUF" {
        return Err(wrong("not a GGUF file".into()));
    }
    match cursor.u32()? {
        2 | 3 => {}
        version if version.swap_bytes() <= 3 => return Err(wrong("big-endian GGUF is not supported".into())),
        version => return Err(wrong(format!("GGUF version {version} is not supported; versions 2 and 3 are"))),
    }
    // The smallest tensor entry has an empty name, no dimensions, a type and an offset; the smallest pair an empty key, a
    // type and one byte.
    let tensor_count = cursor.count(8 + 4 + 4 + 8, "tensor count")?;
    let pair_count = cursor.count(8 + 4 + 1, "metadata count")?;
    let mut metadata = BTreeMap::new();
    for _ in 0..pair_count {
        let key = cursor.string()?;
        let value_type = cursor.u32()?;
        let value = cursor.value(value_type, &key, 0)?;
        if metadata.insert(key.clone(), value).is_some() {
            return Err(wrong(format!("metadata key {key:?} occurs twice")));
        }
    }
    let alignment = match metadata.get("general.alignment") {
        None => 32,
        Some(value) => value
            .as_u64()
            .filter(|alignment| alignment.is_power_of_two() && *alignment <= 1 << 20)
            .ok_or_else(|| wrong(format!("general.alignment {value} is not a power of two")))?,
    };
    let mut entries = Vec::new();
    let mut names = HashSet::new();
    for _ in 0..tensor_count {
        let entry = cursor.tensor()?;
        if !names.insert(entry.name.clone()) {
            return Err(wrong(format!("tensor {:?} occurs twice", entry.name)));
        }
        entries.push(entry);
    }
    let data_start = (cursor.at as u64).next_multiple_of(alignment);
    let tensors = place(entries, data_start, alignment, file_bytes, file, path).map_err(Stop::Wrong)?;
    Ok(Header { metadata, tensors, data_start })
}

/// A tensor as the header lists it.
struct Entry {
    name: String,
    type_number: u32,
    /// Innermost first.
    dimensions: Vec<u64>,
    /// From the start of the data.
    offset: u64,
}

/// Gives each tensor its range of the file, and checks that the ranges are whole, apart, and all there is.
fn place(
    entries: Vec<Entry>,
    data_start: u64,
    alignment: u64,
    file_bytes: u64,
    file: usize,
    path: &str,
) -> Result<Vec<GgufTensor>, CheckpointError> {
    let mut tensors = Vec::with_capacity(entries.len());
    for entry in entries {
        let wrong = |reason: String| CheckpointError::tensor(path, &entry.name, reason);
        let tensor_type = TensorType::from_number(entry.type_number)
            .ok_or_else(|| wrong(format!("GGUF type {} is not supported", entry.type_number)))?;
        let (block_values, block_bytes) = tensor_type.block();
        let row_values = entry.dimensions[0];
        if row_values % block_values != 0 {
            return Err(wrong(format!("rows of {row_values} values don't divide into blocks of {block_values}")));
        }
        let overflow = || wrong(format!("shape {:?} overflows", entry.dimensions));
        // Counted without zeros as well, so that no product of some dimensions overflows later.
        let product =
            |least: u64| entry.dimensions.iter().try_fold(1u64, |all, &size| all.checked_mul(size.max(least)));
        product(1).ok_or_else(overflow)?;
        let values = product(0).ok_or_else(overflow)?;
        let bytes = (values / block_values).checked_mul(block_bytes).ok_or_else(overflow)?;
        if entry.offset % alignment != 0 {
            return Err(wrong(format!("offset {} is not aligned to {alignment}", entry.offset)));
        }
        let end =
            data_start.checked_add(entry.offset).and_then(|start| start.checked_add(bytes)).ok_or_else(overflow)?;
        if end > file_bytes {
            return Err(CheckpointError::Truncated { path: path.into(), expected: end, actual: file_bytes });
        }
        let shape = entry.dimensions.iter().rev().map(|&dimension| dimension as usize).collect();
        tensors.push(GgufTensor { name: entry.name, tensor_type, shape, file, offset: end - bytes, bytes });
    }
    let mut order: Vec<&GgufTensor> = tensors.iter().filter(|tensor| tensor.bytes > 0).collect();
    order.sort_by_key(|tensor| tensor.offset);
    // Where each tensor must begin: behind the one before, so that a type or shape that is not the tensor's own is seen.
    let mut begin = data_start;
    let mut before = "the header";
    for tensor in order.iter() {
        if tensor.offset < begin {
            return Err(CheckpointError::tensor(path, &tensor.name, format!("overlaps {before}")));
        }
        if tensor.offset > begin {
            let reason = format!("{} bytes behind {before} belong to no tensor", tensor.offset - begin);
            return Err(CheckpointError::tensor(path, &tensor.name, reason));
        }
        begin = (tensor.offset + tensor.bytes).next_multiple_of(alignment);
        before = &tensor.name;
    }
    let end = order.last().map_or(data_start, |last| last.offset + last.bytes);
    if file_bytes > end.next_multiple_of(alignment) {
        let reason = format!(
            "goes on {} bytes after its last tensor; parts of a split model must not be joined",
            file_bytes - end
        );
        return Err(CheckpointError::malformed(path, reason));
    }
    Ok(tensors)
}

/// Reads little-endian values and never past the end.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
    file_bytes: u64,
    values_left: u64,
    path: &'a str,
}

impl<'a> Cursor<'a> {
    fn wrong(&self, reason: impl std::fmt::Display) -> Stop {
        Stop::Wrong(CheckpointError::malformed(self.path, reason))
    }

    fn take(&mut self, count: u64) -> Result<&'a [u8], Stop> {
        let end = (self.at as u64).checked_add(count).filter(|&end| end <= self.file_bytes);
        let end = end.ok_or_else(|| {
            self.wrong(format!("is cut: {count} bytes at {} run past the end of the file; download it again", self.at))
        })?;
        let taken = self.bytes.get(self.at..end as usize).ok_or(Stop::NeedsMore)?;
        self.at = end as usize;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Stop> {
        // INVARIANT: `take` returns exactly N bytes.
        Ok(self.take(N as u64)?.try_into().expect("N bytes were taken"))
    }

    fn u32(&mut self) -> Result<u32, Stop> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, Stop> {
        self.array().map(u64::from_le_bytes)
    }

    /// A number of things of at least `item_bytes` each, which the rest of the file must have room for.
    fn count(&mut self, item_bytes: u64, what: &str) -> Result<u64, Stop> {
        let count = self.u64()?;
        let left = self.file_bytes - self.at as u64;
        if count > left / item_bytes {
            return Err(self.wrong(format!("{what} {count} does not fit in the {left} bytes that follow")));
        }
        Ok(count)
    }

    fn string(&mut self) -> Result<String, Stop> {
        let length = self.u64()?;
        let text = self.take(length)?;
        // Vocabularies hold pieces that are not UTF-8 by themselves only by mistake; the replacement character keeps the
        // rest of the file usable, as llama.cpp does.
        Ok(String::from_utf8_lossy(text).into_owned())
    }

    fn value(&mut self, value_type: u32, key: &str, nesting: usize) -> Result<Value, Stop> {
        self.values_left = self.values_left.checked_sub(1).ok_or_else(|| self.wrong("too many metadata values"))?;
        Ok(match value_type {
            0 => Value::U8(self.array::<1>()?[0]),
            1 => Value::I8(self.array::<1>()?[0] as i8),
            2 => Value::U16(u16::from_le_bytes(self.array()?)),
            3 => Value::I16(i16::from_le_bytes(self.array()?)),
            4 => Value::U32(self.u32()?),
            5 => Value::I32(i32::from_le_bytes(self.array()?)),
            6 => Value::F32(f32::from_le_bytes(self.array()?)),
            7 => match self.array::<1>()?[0] {
                byte @ (0 | 1) => Value::Bool(byte == 1),
                byte => return Err(self.wrong(format!("metadata {key:?}: {byte} is neither true nor false"))),
            },
            8 => Value::String(self.string()?),
            9 => {
                let item_type = self.u32()?;
                let count = self.count(item_bytes(item_type), key)?;
                if nesting == MAX_NESTING {
                    return Err(self.wrong(format!("metadata {key:?}: arrays nested more than {MAX_NESTING} deep")));
                }
                if count > self.values_left {
                    return Err(self.wrong(format!("metadata {key:?}: too many values")));
                }
                Value::Array((0..count).map(|_| self.value(item_type, key, nesting + 1)).collect::<Result<_, _>>()?)
            }
            10 => Value::U64(self.u64()?),
            11 => Value::I64(i64::from_le_bytes(self.array()?)),
            12 => Value::F64(f64::from_le_bytes(self.array()?)),
            other => return Err(self.wrong(format!("metadata {key:?} has unknown type {other}"))),
        })
    }

    fn tensor(&mut self) -> Result<Entry, Stop> {
        let name = self.string()?;
        let rank = self.u32()? as usize;
        if !(1..=MAX_DIMENSIONS).contains(&rank) {
            return Err(self.wrong(format!("tensor {name}: {rank} dimensions; 1 to {MAX_DIMENSIONS} are possible")));
        }
        let dimensions = (0..rank).map(|_| self.u64()).collect::<Result<_, _>>()?;
        Ok(Entry { name, dimensions, type_number: self.u32()?, offset: self.u64()? })
    }
}

/// The least that one array element takes in the file.
fn item_bytes(value_type: u32) -> u64 {
    match value_type {
        2 | 3 => 2,
        4..=6 => 4,
        8 | 10..=12 => 8,
        9 => 12,
        _ => 1,
    }
}
