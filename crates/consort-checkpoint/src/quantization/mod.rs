//! From stored tensors to weights: which tensors belong together, and how their values are decoded.
//!
//! Two things say how a module is stored: the configuration, and the tensors themselves. Neither is believed alone. The
//! tensors' names choose the spelling, the configuration must allow that spelling, and every shape and dtype must be the
//! one that the spelling asks for; anything else is an error that names the tensor and the scheme.

mod declared;
mod spellings;

use std::collections::BTreeMap;

use serde_json::{Map, Value as Json};

use self::declared::Declared;
use crate::CheckpointError;
use crate::safetensors::StoredTensor;
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
/// that cannot be understood.
pub(crate) fn resolve(
    config: &Map<String, Json>,
    quantization: Option<&Json>,
    tensors: Vec<(String, StoredTensor)>,
    path: &str,
) -> Result<Resolved, CheckpointError> {
    let declared = Declared::parse(quantization, path)?;
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
    for module in modules {
        match spellings::resolve(&module, &declared, gpt_oss)? {
            Some(weight) => weights.push(weight),
            None => ignored.extend(module.tensors.values().map(|tensor| tensor.name.clone())),
        }
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
