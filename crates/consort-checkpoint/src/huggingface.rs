//! Hugging Face directories: `config.json`, and safetensors in one file or in shards with an index.
//!
//! `auto_map`, `model_file` and pickled weights are never executed or opened.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Component, Path};

use serde::Deserialize;
use serde_json::{Map, Value as Json};

use crate::CheckpointError;
use crate::config;
use crate::safetensors::{Header, StoredTensor};
use crate::source::Source;

const SINGLE: &str = "model.safetensors";
/// Which file holds which tensor, where there are several.
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// A directory's configuration and tensors, before quantization schemes are looked at.
pub(crate) struct Directory {
    /// Uniform, see [`config::normalise`].
    pub config: Map<String, Json>,
    /// What `quantization_config` or `quantization` says, wherever it was.
    pub quantization: Option<Json>,
    /// Tensors of the language model by canonical name, in file order.
    pub tensors: Vec<(String, StoredTensor)>,
    /// Tensors of vision and audio towers.
    pub skipped: Vec<String>,
    /// Header bytes of the files that hold weights.
    pub header_bytes: HashMap<usize, u64>,
}

impl Directory {
    /// Reads configuration and headers.
    ///
    /// # Errors
    /// As [`crate::Checkpoint::open`].
    pub fn read(source: &dyn Source) -> Result<Self, CheckpointError> {
        let directory = source.name();
        let json = |name: &str| -> Result<Option<Json>, CheckpointError> {
            source.find(name).map(|file| config::parse(&source.read_all(file)?, &source.display(file))).transpose()
        };
        let missing = |name: &str| CheckpointError::MissingFile {
            path: format!("{directory}/{name}"),
            wanted_by: "a Hugging Face model directory".into(),
        };
        let raw = json("config.json")?.ok_or_else(|| missing("config.json"))?;
        let generation = json("generation_config.json")?;
        let config = config::normalise(raw, generation.as_ref(), &format!("{directory}/config.json"))?;
        let quantization = match ["quantization", "quantization_config"].iter().find_map(|key| config.get(*key)) {
            Some(found) if !found.is_null() => Some(found.clone()),
            // ModelOpt keeps its settings in a file of its own.
            _ => json("hf_quant_config.json")?,
        };
        let mut tensors = Vec::new();
        let mut skipped = Vec::new();
        let mut header_bytes = HashMap::new();
        let mut origin: HashMap<String, String> = HashMap::new();
        let WeightFiles { files, listed } = weight_files(source)?;
        for file in files {
            let header = Header::read(source, file)?;
            let present: BTreeSet<&str> = header.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
            let absent = listed.get(&file).into_iter().flatten().find(|name| !present.contains(name.as_str()));
            if let Some(absent) = absent {
                let reason = format!("is not here, though {INDEX} says so");
                return Err(CheckpointError::tensor(source.display(file), absent, reason));
            }
            header_bytes.insert(file, header.data_start);
            for tensor in header.tensors {
                let Some(name) = canonical(&tensor.name) else {
                    skipped.push(tensor.name);
                    continue;
                };
                if let Some(other) = origin.insert(name.clone(), tensor.name.clone()) {
                    let reason = format!("is here twice, as {other} and {}", tensor.name);
                    return Err(CheckpointError::tensor(source.display(file), &name, reason));
                }
                tensors.push((name, tensor));
            }
        }
        Ok(Self { config, quantization, tensors, skipped, header_bytes })
    }
}

/// The files that hold the weights, in the order of their names, and the tensors that an index expects in each.
struct WeightFiles {
    files: Vec<usize>,
    listed: HashMap<usize, Vec<String>>,
}

fn weight_files(source: &dyn Source) -> Result<WeightFiles, CheckpointError> {
    if let Some(index) = source.find(INDEX) {
        return indexed_files(source, index);
    }
    let unlisted = |files| WeightFiles { files, listed: HashMap::new() };
    if let Some(single) = source.find(SINGLE) {
        return Ok(unlisted(vec![single]));
    }
    let ends = |name: &str, endings: &[&str]| endings.iter().any(|ending| name.ends_with(ending));
    let shards: Vec<usize> = (0..source.files().len())
        .filter(|&file| {
            source.files()[file].name.starts_with("model") && ends(&source.files()[file].name, &[".safetensors"])
        })
        .collect();
    if shards.is_empty() {
        let pickled = source.files().iter().find(|file| ends(&file.name, &[".bin", ".pt", ".pth"]));
        let wanted_by = match pickled {
            Some(file) => format!("{} is pickled and never opened, so a safetensors version", file.name),
            None => "config.json".into(),
        };
        return Err(CheckpointError::MissingFile { path: format!("{}/{SINGLE}", source.name()), wanted_by });
    }
    check_numbering(source, &shards)?;
    Ok(unlisted(shards))
}

/// Without an index, the names must say that the shards are complete: `model-00001-of-00003.safetensors`.
fn check_numbering(source: &dyn Source, shards: &[usize]) -> Result<(), CheckpointError> {
    let first = &source.files()[shards[0]].name;
    let Some((_, rest)) = first.rsplit_once("-of-") else { return Ok(()) };
    let count = rest.strip_suffix(".safetensors").and_then(|digits| digits.parse().ok());
    if count == Some(shards.len()) {
        return Ok(());
    }
    let reason = format!("only {} of the shards are here and there is no {INDEX}; download the rest", shards.len());
    Err(CheckpointError::malformed(source.display(shards[0]), reason))
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// The shards that an index names. Each name must be that of a file in the directory, whatever the index says.
fn indexed_files(source: &dyn Source, index: usize) -> Result<WeightFiles, CheckpointError> {
    let path = source.display(index);
    let bytes = source.read_all(index)?;
    if let Some(error) = crate::foreign::recognise(&bytes, &path) {
        return Err(error);
    }
    let parsed: Index = serde_json::from_slice(&bytes).map_err(|error| CheckpointError::malformed(&path, error))?;
    let mut listed: HashMap<usize, Vec<String>> = HashMap::new();
    for (tensor, name) in parsed.weight_map {
        let components: Vec<_> = Path::new(&name).components().collect();
        if !matches!(components[..], [Component::Normal(_)]) || name.contains('\\') {
            return Err(CheckpointError::Escapes { path, name });
        }
        let file = source.find(&name).ok_or_else(|| CheckpointError::MissingFile {
            path: format!("{}/{name}", source.name()),
            wanted_by: path.clone(),
        })?;
        listed.entry(file).or_default().push(tensor);
    }
    let files = listed.keys().copied().collect::<BTreeSet<_>>().into_iter().collect();
    Ok(WeightFiles { files, listed })
}

/// What wrappers put before the language model's names, longest first, and what stands there without them.
const PREFIXES: &[(&str, &str)] = &[
    ("model.language_model.model.", "model."),
    ("model.language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.text_model.", "model."),
    ("text_model.", "model."),
];

/// Names that begin like this belong to vision, audio, or their projections into the language model.
const OTHER_TOWERS: &[&str] = &[
    "visual.",
    "vision_tower.",
    "vision_model.",
    "vision_encoder.",
    "vision_adapter.",
    "vision_projection.",
    "vision_language_adapter.",
    "multi_modal_projector.",
    "mm_projector.",
    "patch_merger.",
    "audio_tower.",
    "embed_vision.",
    "embed_audio.",
];

/// Names inside a layer that checkpoints spell differently, as `(found, canonical)`.
const LAYER_SPELLINGS: &[(&str, &str)] = &[
    (".mlp.switch_mlp.", ".mlp.experts."),
    (".block_sparse_moe.gate.", ".mlp.gate."),
    (".block_sparse_moe.experts.", ".mlp.experts."),
];

/// Mixtral's names for the three matrices of an expert.
const EXPERT_SPELLINGS: &[(&str, &str)] = &[("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")];

/// The canonical name of a tensor or module; `None` if it is not part of the language model.
pub(crate) fn canonical(name: &str) -> Option<String> {
    let inside = name.strip_prefix("model.").unwrap_or(name);
    if OTHER_TOWERS.iter().any(|tower| name.starts_with(tower) || inside.starts_with(tower)) {
        return None;
    }
    let prefix = PREFIXES.iter().find(|(found, _)| name.starts_with(found));
    let mut name = prefix.map_or_else(|| name.to_string(), |(found, canonical)| name.replacen(found, canonical, 1));
    for (found, canonical) in LAYER_SPELLINGS {
        name = name.replacen(found, canonical, 1);
    }
    if let Some((module, rest)) = name.split_once(".mlp.experts.") {
        let mut words: Vec<&str> = rest.split('.').collect();
        if let Some(word) = words.get_mut(1)
            && let Some((_, canonical)) = EXPERT_SPELLINGS.iter().find(|(found, _)| found == word)
        {
            *word = canonical;
        }
        name = format!("{module}.mlp.experts.{}", words.join("."));
    }
    Some(name)
}

#[cfg(test)]
mod tests {
    use super::canonical;

    #[test]
    fn wrapper_prefixes_are_stripped_and_towers_skipped() {
        let cases = [
            ("model.layers.0.mlp.up_proj.weight", Some("model.layers.0.mlp.up_proj.weight")),
            ("model.language_model.layers.0.mlp.up_proj", Some("model.layers.0.mlp.up_proj")),
            ("language_model.model.layers.0.mlp.up_proj.weight", Some("model.layers.0.mlp.up_proj.weight")),
            ("language_model.lm_head.weight", Some("lm_head.weight")),
            ("model.language_model.embed_tokens.weight", Some("model.embed_tokens.weight")),
            ("model.layers.1.mlp.switch_mlp.up_proj.scales", Some("model.layers.1.mlp.experts.up_proj.scales")),
            ("model.layers.1.block_sparse_moe.gate.weight", Some("model.layers.1.mlp.gate.weight")),
            (
                "model.layers.1.block_sparse_moe.experts.3.w2.weight",
                Some("model.layers.1.mlp.experts.3.down_proj.weight"),
            ),
            ("visual.blocks.0.attn.qkv.weight", None),
            ("model.visual.blocks.0.attn.qkv.weight", None),
            ("vision_tower.encoder.weight", None),
            ("model.multi_modal_projector.linear_1.weight", None),
            ("mtp.layers.0.mlp.up_proj.weight", Some("mtp.layers.0.mlp.up_proj.weight")),
        ];
        for (found, expected) in cases {
            assert_eq!(canonical(found).as_deref(), expected, "{found}");
        }
    }
}
