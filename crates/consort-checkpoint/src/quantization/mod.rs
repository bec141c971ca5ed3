//! From stored tensors to weights: which tensors belong together, and how their values are decoded.
//!
//! Two things say how a module is stored: the configuration, and the tensors themselves. Neither is believed alone. The
//! tensors' names choose the spelling, the configuration must allow that spelling, and every shape and dtype must be the
//! one that the spelling asks for; anything else is an error that names the tensor and the scheme.

mod declared;
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

/// Scales of activations and of the KV cache: Consort quantizes neither by a stored scale.
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
    "inv_freq",
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

/// The block that speaks of number formats. MLX writes its own under two keys, and ModelOpt in a file too, `own_file`: where
/// there are several, all must say the same.
///
/// # Errors
/// [`CheckpointError::Config`] for blocks that contradict each other.
pub(crate) fn block(
    config: &Map<String, Json>,
    own_file: Option<QuantizationBlock>,
    path: &str,
) -> Result<Option<QuantizationBlock>, CheckpointError> {
    let given = |key: &'static str| {
        let json = config.get(key).filter(|block| !block.is_null())?.clone();
        Some(QuantizationBlock { json, path: path.into(), key })
    };
    let (short, long) = (given("quantization"), given("quantization_config"));
    if let (Some(short), Some(long)) = (&short, &long)
        && short.json != long.json
    {
        let reason = "differs from quantization_config; remove the one that does not describe the tensors";
        return Err(CheckpointError::config(path, short.key, reason));
    }
    let (Some(inside), Some(own_file)) = (short.or(long), &own_file) else {
        return Ok(given("quantization").or_else(|| given("quantization_config")).or(own_file));
    };
    let [ours, theirs] = [Declared::parse(Some(&inside))?.name, Declared::parse(Some(own_file))?.name];
    if ours != theirs {
        let reason = format!("declares {ours}, but {} declares {theirs}; remove the one that is wrong", own_file.path);
        return Err(CheckpointError::config(path, inside.key, reason));
    }
    Ok(Some(inside))
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
        return Err(CheckpointError::config(&block.path, block.key, reason));
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
