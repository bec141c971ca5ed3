//! From stored tensors to weights: which tensors belong together, and how their values are decoded.
//!
//! Two things say how a module is stored: the configuration, and the tensors themselves. Neither is believed alone. The
//! tensors' names choose the spelling, the configuration must allow that spelling, and every shape and dtype must be the
//! one that the spelling asks for; anything else is an error that names the tensor and the scheme.

mod compressed;
mod declared;
mod integers;
mod mlx;
mod modules;
mod settings;
mod spelling;
mod spellings;

use std::collections::BTreeMap;

use serde_json::{Map, Value as Json};

use self::declared::Declared;
use crate::CheckpointError;
use crate::huggingface::QuantizationBlock;
use crate::safetensors::StoredTensor;
use crate::source::Source;
use crate::weight::Weight;

/// What became of a checkpoint's tensors.
pub(crate) struct Resolved {
    /// In file order of their first tensors.
    pub weights: Vec<Weight>,
    /// Tensors that a language model does not need.
    pub ignored: Vec<String>,
}

/// Parameters that say how another tensor of the same module is decoded.
const SCHEME_PARAMETERS: &[&str] = &[
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "weight_global_scale",
    "weight_zero_point",
    "weight_g_idx",
    "weight_shape",
    "blocks",
    "scales",
    "biases",
    "global_scale",
    "qweight",
    "qzeros",
    "g_idx",
];

/// Scales of activations and of the KV cache, for Consort quantizes neither by a stored scale, and buffers that are computed.
const IGNORED_PARAMETERS: &[&str] = &[
    "input_scale",
    "input_scale_inv",
    "activation_scale",
    "input_global_scale",
    "output_scale",
    "k_scale",
    "v_scale",
    "q_scale",
    "kv_scale",
    "prob_scale",
    "input_zero_point",
    "output_zero_point",
    "inv_freq",
    "masked_bias",
];

/// Parameters of fused experts, which carry no `.weight`: `experts.gate_up_proj`, `experts.gate_up_proj_weight_scale`.
const FUSED_EXPERTS: &[&str] = &["gate_up_proj", "gate_proj", "up_proj", "down_proj"];

/// The tensors of one module, by parameter.
pub(crate) struct Module<'a> {
    /// Canonical name, without the parameter.
    pub name: String,
    pub tensors: BTreeMap<String, &'a StoredTensor>,
    /// One tensor for all experts, named without `.weight`.
    pub fused: bool,
}

impl Module<'_> {
    /// The module's name in the file.
    fn stored_name(&self) -> String {
        self.tensors.values().next().map_or_else(|| self.name.clone(), |tensor| split(&tensor.name).0)
    }
}

/// The keys of a configuration under which quantizers have put their blocks.
pub(crate) const BLOCKS: &[&str] = &["quantization", "quantization_config", "compression_config"];

/// Files beside the configuration that hold a block, and the method that they are about where they do not say it. That of ModelOpt
/// comes beside a block in the configuration; those of AutoGPTQ and AutoAWQ are read where there is none.
pub(crate) const OWN_FILES: &[(&str, Option<&str>)] =
    &[("hf_quant_config.json", None), ("quantize_config.json", Some("gptq")), ("quant_config.json", Some("awq"))];

/// The block that speaks of number formats. MLX writes its own under two keys, and ModelOpt in a file too: where there are
/// several, all must say the same.
///
/// # Errors
/// [`CheckpointError::Config`] for blocks that contradict each other.
pub(crate) fn block(
    config: &Map<String, Json>,
    own_files: Vec<QuantizationBlock>,
    path: &str,
) -> Result<Option<QuantizationBlock>, CheckpointError> {
    let given = |key: &&'static str| {
        let empty = |block: &Json| block.as_object().is_some_and(Map::is_empty);
        let json = config.get(*key).filter(|block| !block.is_null() && !empty(block))?.clone();
        Some(QuantizationBlock { json, path: path.into(), key })
    };
    let mut inside = BLOCKS.iter().filter_map(given);
    let Some(first) = inside.next() else {
        if let [one, other, ..] = &own_files[..] {
            return Err(one.wrong(format!("is there beside {}; remove the one that is wrong", other.path)));
        }
        return Ok(own_files.into_iter().next());
    };
    if let Some(other) = inside.find(|other| other.json != first.json) {
        let reason = format!("differs from {}; remove the one that does not describe the tensors", other.key);
        return Err(CheckpointError::config(path, first.key, reason));
    }
    let Some(own_file) = own_files.iter().find(|own_file| own_file.path.ends_with(OWN_FILES[0].0)) else {
        return Ok(Some(first));
    };
    let [ours, theirs] = [Declared::parse(Some(&first))?.name, Declared::parse(Some(own_file))?.name];
    if ours != theirs {
        let reason = format!("declares {ours}, but {} declares {theirs}; remove the one that is wrong", own_file.path);
        return Err(CheckpointError::config(path, first.key, reason));
    }
    Ok(Some(first))
}

/// Weights that predict further tokens.
const PREDICTS_FURTHER: &[&str] = &["mtp.", "model.mtp."];

/// Whether a tensor of this canonical name holds numbers that a language model may need: its type must be known.
pub(crate) fn is_needed(name: &str) -> bool {
    let (_, parameter, _) = split(name);
    let holds_numbers = parameter == "bias" || SCHEME_PARAMETERS.contains(&parameter.as_str());
    holds_numbers && !PREDICTS_FURTHER.iter().any(|start| name.starts_with(start))
}

/// Splits a canonical name into module and parameter.
fn split(name: &str) -> (String, String, bool) {
    let Some((module, parameter)) = name.rsplit_once('.') else { return (String::new(), name.to_string(), false) };
    if module.ends_with(".experts") {
        for fused in FUSED_EXPERTS {
            let Some(rest) = parameter.strip_prefix(fused) else { continue };
            let parameter = match rest.strip_prefix('_') {
                None if rest.is_empty() => "weight",
                None => continue,
                Some("scale_inv") => "weight_scale_inv",
                Some(parameter) => parameter,
            };
            return (format!("{module}.{fused}"), parameter.to_string(), true);
        }
    }
    (module.to_string(), parameter.to_string(), false)
}

/// Resolves all tensors of a directory.
///
/// # Errors
/// [`CheckpointError::Scheme`] for an unknown or contradictory scheme, [`CheckpointError::Config`] for a quantization block
/// that cannot be understood, or that no tensor follows.
pub(crate) fn resolve(
    config: &Map<String, Json>,
    block: Option<&QuantizationBlock>,
    tensors: Vec<(String, StoredTensor)>,
    source: &dyn Source,
) -> Result<Resolved, CheckpointError> {
    let declared = Declared::parse(block)?;
    let gpt_oss = config.get("model_type").and_then(Json::as_str) == Some("gpt_oss");
    let mut modules: Vec<Module<'_>> = Vec::new();
    let mut index: BTreeMap<String, usize> = BTreeMap::new();
    let mut ignored = Vec::new();
    for (name, tensor) in &tensors {
        let (module, parameter, fused) = split(name);
        if IGNORED_PARAMETERS.contains(&parameter.as_str()) || parameter.ends_with("_input_scale") {
            ignored.push(tensor.name.clone());
            continue;
        }
        // Any other parameter (a bias, a norm's gain) is a module of its own as far as number formats go.
        let own = !SCHEME_PARAMETERS.contains(&parameter.as_str());
        let module = if own { format!("{module}.{parameter}") } else { module };
        let module = if own { module.trim_start_matches('.').to_string() } else { module };
        let parameter = if own { String::new() } else { parameter };
        let place = *index.entry(module.clone()).or_insert_with(|| {
            modules.push(Module { name: module, tensors: BTreeMap::new(), fused });
            modules.len() - 1
        });
        modules[place].tensors.insert(parameter, tensor);
    }
    for module in modules.iter().filter(|module| module.tensors.contains_key("")) {
        let Some((parent, parameter)) = module.name.rsplit_once('.') else { continue };
        let quantized = index.get(parent).map(|&place| &modules[place]).filter(|parent| parent.tensors.len() > 1);
        if let (Some(parent), true) = (quantized, parameter != "bias") {
            let has = parent.tensors.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            let path = module.tensors.values().next().map(|tensor| source.display(tensor.file)).unwrap_or_default();
            let reason = format!("is no part of what is known to be beside {has}");
            return Err(CheckpointError::scheme(path, &module.name, &declared.name, reason));
        }
    }
    let mut weights = Vec::with_capacity(modules.len());
    let (mut any_quantized, mut plain) = (false, None);
    for module in modules {
        any_quantized |= module.tensors.len() > 1;
        match spellings::resolve(&module, &declared, gpt_oss, source)? {
            Some(weight) => {
                let in_layer = weight.info.shape.len() > 1 && weight.info.name.contains("layers.");
                if !any_quantized && plain.is_none() && in_layer && !declared.leaves_out(&module) {
                    plain = Some(weight.info.clone());
                }
                weights.push(weight);
            }
            None => ignored.extend(module.tensors.values().map(|tensor| tensor.name.clone())),
        }
    }
    if let (Some(block), Some(plain), false) = (block, plain, any_quantized) {
        let (name, format) = (plain.name, plain.format);
        let reason = format!("declares {}, but no tensor is quantized ({name} is {format}); remove it", declared.name);
        return Err(block.wrong(reason));
    }
    Ok(Resolved { weights, ignored })
}

#[cfg(test)]
mod tests {
    use super::split;

    #[test]
    fn fused_expert_parameters_are_modules() {
        let cases = [
            ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.gate_up_proj", "weight"),
            ("model.layers.0.mlp.experts.gate_up_proj_blocks", "model.layers.0.mlp.experts.gate_up_proj", "blocks"),
            (
                "model.layers.0.mlp.experts.down_proj_weight_scale_2",
                "model.layers.0.mlp.experts.down_proj",
                "weight_scale_2",
            ),
            (
                "model.layers.0.mlp.experts.down_proj_scale_inv",
                "model.layers.0.mlp.experts.down_proj",
                "weight_scale_inv",
            ),
            ("model.layers.0.mlp.experts.gate_up_proj_bias", "model.layers.0.mlp.experts.gate_up_proj", "bias"),
            ("model.layers.0.mlp.experts.down_proj.weight", "model.layers.0.mlp.experts.down_proj", "weight"),
            ("model.layers.0.self_attn.sinks", "model.layers.0.self_attn", "sinks"),
        ];
        for (name, module, parameter) in cases {
            let (found_module, found_parameter, _) = split(name);
            assert_eq!((found_module.as_str(), found_parameter.as_str()), (module, parameter), "{name}");
        }
    }
}
