//! Model directories: `config.json`, and safetensors in one file or in shards with an index; or the same under the names that
//! Mistral gives them.
//!
//! `auto_map`, `model_file` and pickled weights are never executed or opened.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Component, Path};

use serde::Deserialize;
use serde_json::{Map, Value as Json};

use crate::CheckpointError;
use crate::config;
use crate::files;
use crate::mistral;
use crate::safetensors::{Header, StoredTensor};
use crate::source::Source;

/// Which file holds which tensor, where there are several.
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// What the files of a directory are called.
struct Layout {
    config: &'static str,
    /// What a directory without the configuration is said to lack it for.
    kind: &'static str,
    single: &'static str,
    index: &'static str,
    /// How the names of shards begin.
    shards: &'static str,
    canonical: fn(&str) -> Option<String>,
}

const HUGGING_FACE: Layout = Layout {
    config: "config.json",
    kind: "a Hugging Face model directory",
    single: "model.safetensors",
    index: INDEX,
    shards: "model",
    canonical,
};

const MISTRAL: Layout = Layout {
    config: mistral::PARAMS,
    kind: "a model directory of Mistral",
    single: "consolidated.safetensors",
    index: "consolidated.safetensors.index.json",
    shards: "consolidated",
    canonical: mistral::canonical,
};

impl Layout {
    /// Some directories hold a model in both forms.
    fn of(source: &dyn Source) -> &'static Self {
        let has_shards = source.files().iter().any(|file| HUGGING_FACE.is_shard(&file.name));
        match source.find(MISTRAL.config) {
            Some(_) if !has_shards => &MISTRAL,
            _ => &HUGGING_FACE,
        }
    }

    fn is_shard(&self, name: &str) -> bool {
        name.starts_with(self.shards) && name.ends_with(".safetensors")
    }
}

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
    /// The file that the configuration is from.
    pub config_path: String,
}

impl Directory {
    /// Reads configuration and headers.
    ///
    /// # Errors
    /// As [`crate::Checkpoint::open`].
    pub fn read(source: &dyn Source) -> Result<Self, CheckpointError> {
        let directory = source.name();
        let json = |name: &str| -> Result<Option<Json>, CheckpointError> {
            source
                .find(name)
                .map(|file| config::parse(&files::read_from(source, file)?, &source.display(file)))
                .transpose()
        };
        let layout = Layout::of(source);
        let config_path = format!("{directory}/{}", layout.config);
        let raw = json(layout.config)?
            .ok_or_else(|| CheckpointError::MissingFile { path: config_path.clone(), wanted_by: layout.kind.into() })?;
        let raw = match layout.config == MISTRAL.config {
            true => Json::Object(mistral::translate(&raw, &config_path)?),
            false => raw,
        };
        let generation = json("generation_config.json")?;
        let config = config::normalise(raw, generation.as_ref(), &config_path)?;
        let quantization = match ["quantization", "quantization_config"].iter().find_map(|key| config.get(*key)) {
            Some(found) if !found.is_null() => Some(found.clone()),
            // ModelOpt keeps its settings in a file of its own.
            _ => json("hf_quant_config.json")?,
        };
        let mut tensors = Vec::new();
        let mut skipped = Vec::new();
        let mut header_bytes = HashMap::new();
        let mut origin: HashMap<String, String> = HashMap::new();
        let WeightFiles { files, listed } = weight_files(source, layout)?;
        for file in files {
            let header = Header::read(source, file)?;
            let present: BTreeSet<&str> = header.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
            let absent = listed.get(&file).into_iter().flatten().find(|name| !present.contains(name.as_str()));
            if let Some(absent) = absent {
                let reason = format!("is not here, though {} says so", layout.index);
                return Err(CheckpointError::tensor(source.display(file), absent, reason));
            }
            header_bytes.insert(file, header.data_start);
            for tensor in header.tensors {
                let Some(name) = (layout.canonical)(&tensor.name) else {
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
        Ok(Self { config, quantization, tensors, skipped, header_bytes, config_path })
    }
}

/// The files that hold the weights, in the order of their names, and the tensors that an index expects in each.
struct WeightFiles {
    files: Vec<usize>,
    listed: HashMap<usize, Vec<String>>,
}

fn weight_files(source: &dyn Source, layout: &Layout) -> Result<WeightFiles, CheckpointError> {
    if let Some(index) = source.find(layout.index) {
        return indexed_files(source, index);
    }
    let unlisted = |files| WeightFiles { files, listed: HashMap::new() };
    if let Some(single) = source.find(layout.single) {
        return Ok(unlisted(vec![single]));
    }
    let shards: Vec<usize> =
        (0..source.files().len()).filter(|&file| layout.is_shard(&source.files()[file].name)).collect();
    if shards.is_empty() {
        let is_pickled = |name: &str| [".bin", ".pt", ".pth"].iter().any(|ending| name.ends_with(ending));
        let pickled = source.files().iter().find(|file| is_pickled(&file.name));
        let wanted_by = match pickled {
            Some(file) => format!("{} is pickled and never opened, so a safetensors version", file.name),
            None => layout.config.into(),
        };
        let path = format!("{}/{}", source.name(), layout.single);
        return Err(CheckpointError::MissingFile { path, wanted_by });
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
    let bytes = files::read_from(source, index)?;
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
