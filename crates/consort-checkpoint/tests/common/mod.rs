//! Model files made by hand, right and wrong.
#![allow(dead_code)] // each test binary uses its own part

use std::path::Path;

use tempfile::TempDir;

/// A safetensors file with this header and these bytes of data.
pub fn safetensors(header: &str, data: &[u8]) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(data);
    file
}

/// A safetensors file of tensors `(name, dtype, shape, data)`, one after another.
pub fn safetensors_of(tensors: &[(&str, &str, &[usize], &[u8])]) -> Vec<u8> {
    let (mut entries, mut data) = (Vec::new(), Vec::new());
    for (name, dtype, shape, bytes) in tensors {
        let start = data.len();
        data.extend_from_slice(bytes);
        entries.push(format!(
            r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{start},{}]}}"#,
            data.len()
        ));
    }
    safetensors(&format!("{{{}}}", entries.join(",")), &data)
}

/// A directory of these files.
pub fn directory(files: &[(&str, &[u8])]) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        std::fs::write(directory.path().join(name), bytes).unwrap();
    }
    directory
}

/// A directory with a llama configuration that has these further members, and one weight file.
pub fn model(config: &str, weights: &[u8]) -> TempDir {
    let comma = if config.is_empty() { "" } else { ", " };
    let config = format!(r#"{{"model_type": "llama"{comma}{config}}}"#);
    directory(&[("config.json", config.as_bytes()), ("model.safetensors", weights)])
}

pub fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// A metadata value of a GGUF file.
#[derive(Clone)]
pub enum Meta {
    U32(u32),
    F32(f32),
    Text(&'static str),
    Raw(u32, Vec<u8>),
}

/// A tensor of a GGUF file: name, dimensions innermost first, type, offset, bytes.
pub type Tensor<'a> = (&'a str, &'a [u64], u32, u64, &'a [u8]);

pub fn text(value: &str) -> Vec<u8> {
    let mut bytes = (value.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(value.as_bytes());
    bytes
}

/// A GGUF file of version 3, whose tensor data is laid out in order and padded to 32 bytes.
pub fn gguf(metadata: &[(&str, Meta)], tensors: &[Tensor<'_>]) -> Vec<u8> {
    let mut file = b"GGUF\x03\0\0\0".to_vec();
    file.extend((tensors.len() as u64).to_le_bytes());
    file.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        file.extend(text(key));
        let (kind, bytes) = match value {
            Meta::U32(value) => (4, value.to_le_bytes().to_vec()),
            Meta::F32(value) => (6, value.to_le_bytes().to_vec()),
            Meta::Text(value) => (8, text(value)),
            Meta::Raw(kind, bytes) => (*kind, bytes.clone()),
        };
        file.extend(kind.to_le_bytes());
        file.extend(bytes);
    }
    for (name, dimensions, kind, offset, _) in tensors {
        file.extend(text(name));
        file.extend((dimensions.len() as u32).to_le_bytes());
        file.extend(dimensions.iter().flat_map(|size| size.to_le_bytes()));
        file.extend(kind.to_le_bytes());
        file.extend(offset.to_le_bytes());
    }
    for (.., bytes) in tensors {
        file.resize(file.len().next_multiple_of(32), 0);
        file.extend_from_slice(bytes);
    }
    file
}

/// The metadata that a llama needs.
pub fn llama() -> Vec<(&'static str, Meta)> {
    vec![
        ("general.architecture", Meta::Text("llama")),
        ("llama.block_count", Meta::U32(1)),
        ("llama.embedding_length", Meta::U32(64)),
        ("llama.context_length", Meta::U32(128)),
        ("llama.attention.head_count", Meta::U32(4)),
        ("llama.attention.layer_norm_rms_epsilon", Meta::F32(1e-5)),
        ("llama.vocab_size", Meta::U32(3)),
    ]
}

/// Opens a model that must be refused, and gives the message.
pub fn refusal(path: &Path) -> String {
    match consort_checkpoint::Checkpoint::open(path) {
        Ok(_) => panic!("{} was opened", path.display()),
        Err(error) => error.to_string(),
    }
}

/// A tensor of a safetensors file.
#[derive(Clone)]
pub struct Stored {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<usize>,
    pub data: Vec<u8>,
}

/// The tensors of a safetensors file, in its order.
pub fn tensors_of(file: &[u8]) -> Vec<Stored> {
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&file[8..8 + length]).unwrap();
    let entries = header.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__");
    let tensors = entries.map(|(name, entry)| {
        let at = |index: usize| 8 + length + entry["data_offsets"][index].as_u64().unwrap() as usize;
        let sizes = entry["shape"].as_array().unwrap().iter();
        Stored {
            name: name.clone(),
            dtype: entry["dtype"].as_str().unwrap().to_owned(),
            shape: sizes.map(|size| size.as_u64().unwrap() as usize).collect(),
            data: file[at(0)..at(1)].to_vec(),
        }
    });
    tensors.collect()
}

/// A copy of a model's directory with another configuration and other tensors.
pub fn altered(
    model: &Path,
    config: impl FnOnce(&mut serde_json::Value),
    tensors: impl FnOnce(&mut Vec<Stored>),
) -> TempDir {
    let copy = tempfile::tempdir().unwrap();
    let read = |name: &str| std::fs::read(model.join(name)).unwrap();
    let mut json = serde_json::from_slice(&read("config.json")).unwrap();
    config(&mut json);
    std::fs::write(copy.path().join("config.json"), json.to_string()).unwrap();
    let mut stored = tensors_of(&read("model.safetensors"));
    tensors(&mut stored);
    let entries: Vec<_> =
        stored.iter().map(|it| (it.name.as_str(), it.dtype.as_str(), &it.shape[..], &it.data[..])).collect();
    std::fs::write(copy.path().join("model.safetensors"), safetensors_of(&entries)).unwrap();
    copy
}
