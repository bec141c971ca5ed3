//! Whether a model uses what its checkpoint holds.
//!
//! A config with fewer layers or experts than the files, without their biases or the norms of their heads, describes another
//! model. It would load, and answer nonsense. So every weight of the decoder itself must be one that the architecture asks for;
//! what stands beside the decoder (other towers, prediction of further tokens) is nobody's business here.

use std::collections::HashSet;

use consort_checkpoint::Checkpoint;

use crate::read_ahead::Read;
use crate::{Config, ModelError};

/// How the names of a decoder's weights begin; `blk.` are those of GGUF that no table translates.
const DECODER: &[&str] = &["model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.", "blk."];

/// Modules by which layers behind the last one are known that predict further tokens (DeepSeek, GLM, and GGUF's name for them).
const PREDICTS_FURTHER: &[&str] = &[".eh_proj.", ".enorm.", ".nextn."];

/// Refuses a checkpoint with weights of the decoder that `reads`, those of the whole model, leave out.
pub(crate) fn check(config: &Config<'_>, checkpoint: &Checkpoint, reads: &[Read]) -> Result<(), ModelError> {
    let used: HashSet<&str> = reads.iter().flat_map(Read::names).collect();
    let layers = config.layers()?;
    let names = || checkpoint.tensors().iter().map(|info| info.name.as_str());
    let further: HashSet<usize> =
        names().filter(|name| PREDICTS_FURTHER.iter().any(|part| name.contains(part))).filter_map(layer_of).collect();
    let is_extra = |name: &str| layer_of(name).is_some_and(|layer| layer >= layers && further.contains(&layer));
    let of_decoder = |name: &str| DECODER.iter().any(|start| name.starts_with(start));
    let Some(name) = names().find(|name| of_decoder(name) && !used.contains(name) && !is_extra(name)) else {
        return Ok(());
    };
    Err(ModelError::UnusedWeight { name: checkpoint.stored_name(name), reason: reason(config, name, layers) })
}

/// What in the config leaves a weight out.
fn reason(config: &Config<'_>, name: &str, layers: usize) -> String {
    if layer_of(name).is_some_and(|layer| layer >= layers) {
        return format!("{} = {layers}", config.place("num_hidden_layers"));
    }
    let counts = ["num_experts", "num_local_experts"];
    match counts.into_iter().find_map(|key| Some((key, config.count(key).ok()?))) {
        Some((key, experts)) if expert_of(name).is_some_and(|expert| expert >= experts) => {
            format!("{} = {experts}", config.place(key))
        }
        _ => format!("a {} with these settings does not use it", config.architecture().unwrap_or("model")),
    }
}

/// The layer that a weight belongs to.
pub(crate) fn layer_of(name: &str) -> Option<usize> {
    name.strip_prefix("model.layers.").or(name.strip_prefix("blk."))?.split('.').next()?.parse().ok()
}

/// The expert that a weight belongs to, where each has weights of its own.
fn expert_of(name: &str) -> Option<usize> {
    name.split_once(".experts.")?.1.split('.').next()?.parse().ok()
}
