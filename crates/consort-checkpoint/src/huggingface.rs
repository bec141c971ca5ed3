//! Model directories: `config.json`, and safetensors in one file or in shards with an index; or the same under the names that
//! Mistral gives them.
//!
//! `auto_map`, `model_file` and pickled weights are never executed or opened.

use std::collections::{BTreeSet, HashMap};
use std::path::{Component, Path};

use serde_json::{Map, Value as Json};

use crate::error::excerpt;
use crate::safetensors::{Header, StoredTensor};
use crate::source::Source;
use crate::{CheckpointError, TensorName, config, files, json, mistral, quantization};

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
    translate: fn(&str) -> TensorName,
}

const HUGGING_FACE: Layout = Layout {
    config: "config.json",
    kind: "a Hugging Face model directory",
    single: "model.safetensors",
    index: INDEX,
    shards: "model",
    translate: |name| canonical(name).map_or(TensorName::PassedOver, TensorName::Weight),
};

const MISTRAL: Layout = Layout {
    config: mistral::PARAMS,
    kind: "a model directory of Mistral",
    single: "consolidated.safetensors",
    index: "consolidated.safetensors.index.json",
    shards: "consolidated",
    translate: mistral::translated,
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
    pub quantization: Option<QuantizationBlock>,
    /// Tensors of the language model by canonical name, in file order.
    pub tensors: Vec<(String, StoredTensor)>,
    /// Tensors of vision and audio towers.
    pub skipped: Vec<String>,
    /// Header bytes of the files that hold weights.
    pub header_bytes: HashMap<usize, u64>,
    /// The file that the configuration is from.
    pub config_path: String,
}

/// A configuration's words about number formats, and where they are.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct QuantizationBlock {
    pub json: Json,
    pub path: String,
    /// The key that holds it; empty where the whole file is about this.
    pub key: &'static str,
}

impl QuantizationBlock {
    /// The error of the whole block.
    pub fn wrong(&self, reason: String) -> CheckpointError {
        match self.key {
            "" => CheckpointError::malformed(&self.path, reason),
            key => CheckpointError::config(&self.path, key, reason),
        }
    }
}

impl Directory {
    /// Reads configuration and headers.
    ///
    /// # Errors
    /// As [`crate::Checkpoint::open`].
    pub fn read(source: &dyn Source) -> Result<Self, CheckpointError> {
        let directory = source.name();
        let object = |name: &str| -> Result<Option<(Map<String, Json>, String)>, CheckpointError> {
            let Some(file) = source.find(name) else { return Ok(None) };
            let path = source.display(file);
            let members = json::parse_object(&files::read_from(source, file)?, &path)?;
            Ok(Some((members, path)))
        };
        let layout = Layout::of(source);
        let missing = || CheckpointError::missing(format!("{directory}/{}", layout.config), layout.kind);
        let (raw, config_path) = object(layout.config)?.ok_or_else(missing)?;
        let raw = match layout.config == MISTRAL.config {
            true => mistral::translate(&raw, &config_path)?,
            false => config::published(raw),
        };
        let generation = object("generation_config.json")?;
        let generation = generation.as_ref().map(|(members, path)| (members, path.as_str()));
        let config = config::normalise(raw, generation, &config_path)?;
        // Some quantizers keep their settings in a file of their own.
        let mut own_files = Vec::new();
        for (name, method) in quantization::OWN_FILES {
            let Some((mut members, path)) = object(name)? else { continue };
            if let Some(method) = method {
                members.entry("quant_method").or_insert((*method).into());
            }
            own_files.push(QuantizationBlock { json: members.into(), path, key: "" });
        }
        let quantization = quantization::block(&config, own_files, &config_path)?;
        let mut tensors = Vec::new();
        let mut skipped = Vec::new();
        let mut header_bytes = HashMap::new();
        let mut origin: HashMap<String, String> = HashMap::new();
        let WeightFiles { files, listed } = weight_files(source, layout)?;
        for file in files {
            let header = Header::read(source, file)?;
            if let Some(listed) = listed.get(&file) {
                check_listed(listed, &header, &source.display(file), layout)?;
            }
            header_bytes.insert(file, header.data_start);
            for tensor in header.tensors {
                let name = match (layout.translate)(&tensor.name) {
                    TensorName::Weight(name) => name,
                    TensorName::PassedOver => {
                        skipped.push(tensor.name);
                        continue;
                    }
                    TensorName::Unknown => {
                        let reason = format!("is none that a {} asks for", layout.config);
                        return Err(CheckpointError::tensor(source.display(file), &tensor.name, reason));
                    }
                };
                if let Some(other) = origin.insert(name.clone(), tensor.name.clone()) {
                    let reason = format!("is here twice, as {other} and {}", tensor.name);
                    return Err(CheckpointError::tensor(source.display(file), &name, reason));
                }
                if let Some(dtype) = header.unknown.get(&tensor.name).filter(|_| quantization::is_needed(&name)) {
                    let reason = format!("unknown dtype {:?}", excerpt(dtype));
                    return Err(CheckpointError::tensor(source.display(file), &tensor.name, reason));
                }
                tensors.push((name, tensor));
            }
        }
        Ok(Self { config, quantization, tensors, skipped, header_bytes, config_path })
    }
}

/// A shard holds the tensors that the index lists, and no others.
fn check_listed(
    listed: &BTreeSet<String>,
    header: &Header,
    path: &str,
    layout: &Layout,
) -> Result<(), CheckpointError> {
    let present: BTreeSet<&str> = header.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    let index = layout.index;
    if let Some(absent) = listed.iter().find(|name| !present.contains(name.as_str())) {
        let reason = format!("is not here, though {index} says so; download both files again");
        return Err(CheckpointError::tensor(path, absent, reason));
    }
    if let Some(extra) = present.iter().find(|name| !listed.contains(**name)) {
        let reason = format!("is here, but {index} does not list it; download both files again");
        return Err(CheckpointError::tensor(path, extra, reason));
    }
    Ok(())
}

/// The files that hold the weights, in the order of their names, and the tensors that an index expects in each.
struct WeightFiles {
    files: Vec<usize>,
    listed: HashMap<usize, BTreeSet<String>>,
}

/// What to do about a model that is published as a pickle only.
const PICKLED_REMEDY: &str = "take a safetensors version of the model, or make one where you trust it: \
     AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR) of transformers";

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
        let is_pickled = |name: &str| [".bin", ".pt", ".pth", ".ckpt"].iter().any(|ending| name.ends_with(ending));
        if let Some(file) = source.files().iter().position(|file| is_pickled(&file.name)) {
            let (path, found) =
                (source.display(file), "pickled weights, which are never opened because they run code,".into());
            return Err(CheckpointError::NotTheFile { path, found, remedy: PICKLED_REMEDY.into() });
        }
        return Err(CheckpointError::missing(format!("{}/{}", source.name(), layout.single), layout.config));
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

/// The shards that an index names. Each name must be that of a file in the directory, whatever the index says. The
/// `total_size` beside them is wrong in many published files, and nothing is read by it.
fn indexed_files(source: &dyn Source, index: usize) -> Result<WeightFiles, CheckpointError> {
    let path = source.display(index);
    let parsed = json::parse_object(&files::read_from(source, index)?, &path)?;
    let wrong = |key: &str, reason: String| CheckpointError::config(&path, key, reason);
    let shards = match parsed.get("weight_map") {
        Some(Json::Object(shards)) if !shards.is_empty() => shards,
        Some(other) => return Err(wrong("weight_map", format!("is {}, not an object", excerpt(&other.to_string())))),
        None => return Err(wrong("weight_map", "is missing".into())),
    };
    let mut listed: HashMap<usize, BTreeSet<String>> = HashMap::new();
    for (tensor, shard) in shards {
        let Json::String(shard) = shard else {
            let key = format!("weight_map.{tensor}");
            return Err(wrong(&key, format!("is {}, not the name of a file", excerpt(&shard.to_string()))));
        };
        let name = shard_name(shard, &path)?;
        let missing = || CheckpointError::missing(format!("{}/{name}", source.name()), &path);
        let file = source.find(name).ok_or_else(missing)?;
        listed.entry(file).or_default().insert(tensor.clone());
    }
    let files = listed.keys().copied().collect::<BTreeSet<_>>().into_iter().collect();
    Ok(WeightFiles { files, listed })
}

/// The file of the directory that an index means.
fn shard_name<'a>(name: &'a str, path: &str) -> Result<&'a str, CheckpointError> {
    let components: Vec<_> = Path::new(name).components().filter(|part| *part != Component::CurDir).collect();
    let inside = |part: &Component<'_>| matches!(part, Component::Normal(_));
    match components[..] {
        [Component::Normal(only)] if !name.contains('\\') => Ok(only.to_str().unwrap_or(name)),
        [] => Err(CheckpointError::malformed(path, format!("{:?} is not the name of a file", excerpt(name)))),
        _ if components.iter().all(inside) && !name.contains('\\') => {
            let reason = format!("{:?} lies in a directory of its own; put the shard beside the index", excerpt(name));
            Err(CheckpointError::malformed(path, reason))
        }
        _ => Err(CheckpointError::Escapes { path: path.into(), name: excerpt(name).into() }),
    }
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
