//! What compressed-tensors declares.

use super::declared::{Declared, Group, Strategy, fixed_group};
use super::modules::Modules;
use super::settings::Settings;
use super::spelling::Spelling;
use crate::CheckpointError;
use crate::error::excerpt;

/// A format of compressed-tensors that is read.
struct CompressedFormat {
    name: &'static str,
    spelling: Spelling,
    /// `type` and possible `num_bits` of the values.
    kind: &'static str,
    bits: &'static [i64],
    /// The one group that there is.
    group: Option<i64>,
    strategies: &'static [Strategy],
}

const COMPRESSED_FORMATS: &[CompressedFormat] = &[
    CompressedFormat {
        name: "float-quantized",
        spelling: Spelling::Fp8,
        kind: "float",
        bits: &[8],
        group: None,
        strategies: FP8_STRATEGIES,
    },
    CompressedFormat {
        name: "naive-quantized",
        spelling: Spelling::Fp8,
        kind: "float",
        bits: &[8],
        group: None,
        strategies: FP8_STRATEGIES,
    },
    CompressedFormat {
        name: "nvfp4-pack-quantized",
        spelling: Spelling::CompressedNvFp4,
        kind: "float",
        bits: &[4],
        group: Some(16),
        strategies: &[Strategy::TensorGroup, Strategy::Group],
    },
    CompressedFormat {
        name: "mxfp4-pack-quantized",
        spelling: Spelling::CompressedMxFp4,
        kind: "float",
        bits: &[4],
        group: Some(32),
        strategies: &[Strategy::Group],
    },
    CompressedFormat {
        name: "pack-quantized",
        spelling: Spelling::CompressedIntegers,
        kind: "int",
        bits: &[4, 8],
        group: None,
        strategies: &[Strategy::Group, Strategy::Channel, Strategy::Tensor],
    },
];

const FP8_STRATEGIES: &[Strategy] = &[Strategy::Tensor, Strategy::Channel, Strategy::Block];

const STRATEGIES: &[(&str, Strategy)] = &[
    ("tensor", Strategy::Tensor),
    ("channel", Strategy::Channel),
    ("group", Strategy::Group),
    ("block", Strategy::Block),
    ("tensor_group", Strategy::TensorGroup),
];

/// Takes down what a block says.
///
/// # Errors
/// [`CheckpointError::Config`] for formats and values that are not read.
pub(super) fn declare(declared: &mut Declared, settings: &Settings<'_>) -> Result<(), CheckpointError> {
    no_transforms(settings)?;
    let sparsity = settings.inner("sparsity_config")?;
    if let Some(of) = &sparsity
        && let Some(format) = of.text("format")?.filter(|format| *format != "dense")
    {
        return Err(of.wrong("format", format!("{:?} is not supported; dense is", excerpt(format))));
    }
    let whole = settings.text("format")?;
    let mut names: Vec<&str> = Vec::new();
    if let Some(groups) = settings.inner("config_groups")? {
        for (key, _) in groups.members() {
            let Some(of) = groups.inner(key)? else { continue };
            // A group may speak of activations alone.
            let Some(weights) = of.inner("weights")? else { continue };
            let format = of.text("format")?.or(whole);
            let Some(format) = format else { return Err(of.wrong("format", "is missing")) };
            let mut group = compressed_group(&weights, known_format(&of, format)?)?;
            let targets = of.texts("targets")?;
            if !targets.is_empty() {
                group.targets = Some(Modules::new(&targets).map_err(|reason| of.wrong("targets", reason))?);
            }
            names.push(format);
            declared.groups.push(group);
        }
    }
    if declared.groups.is_empty() {
        let Some(format) = whole else { return Err(settings.wrong("", "compressed-tensors without a format")) };
        let known = known_format(settings, format)?;
        if known.spelling == Spelling::CompressedIntegers {
            return Err(settings.wrong("config_groups", "is missing; it says how many bits the integers have"));
        }
        declared.groups.push(Group::new(known.spelling));
        names.push(format);
    }
    names.dedup();
    declared.name = format!("compressed-tensors {}", names.join(", "));
    Ok(())
}

/// Rotations that are folded into weights need nothing more; those of activations would have to be done while the model runs.
fn no_transforms(settings: &Settings<'_>) -> Result<(), CheckpointError> {
    let transforms = settings.inner("transform_config")?;
    let Some(groups) = transforms.map(|of| of.inner("config_groups")).transpose()?.flatten() else { return Ok(()) };
    let applied = groups.members().flat_map(|(_, scheme)| scheme["apply"].as_array().into_iter().flatten());
    let mut places = applied.map(|entry| entry["location"].as_str().unwrap_or("?"));
    match places.find(|place| !place.starts_with("weight_")) {
        Some(place) => {
            let reason = format!("transforms {:?} while the model runs, which is not supported", excerpt(place));
            Err(settings.wrong("transform_config", reason))
        }
        None => Ok(()),
    }
}

fn known_format(settings: &Settings<'_>, format: &str) -> Result<&'static CompressedFormat, CheckpointError> {
    COMPRESSED_FORMATS.iter().find(|known| known.name == format).ok_or_else(|| {
        settings.wrong("format", format!("{:?} of compressed-tensors is not supported", excerpt(format)))
    })
}

/// The `weights` of an entry of `config_groups`.
fn compressed_group(weights: &Settings<'_>, format: &CompressedFormat) -> Result<Group, CheckpointError> {
    let name = format.name;
    let kind = weights.text("type")?.unwrap_or(format.kind);
    let bits = match (weights.integer("num_bits")?, format.bits) {
        (Some(bits), _) => bits,
        (None, [only]) => *only,
        (None, _) => return Err(weights.wrong("num_bits", "is missing")),
    };
    if kind != format.kind || !format.bits.contains(&bits) {
        return Err(weights.wrong("num_bits", format!("{name} of {}{bits} is not supported", excerpt(kind))));
    }
    fixed_group(weights, name, format.group)?;
    let size = weights.integer("group_size")?.filter(|&size| size != -1);
    let strategy = match weights.text("strategy")? {
        Some(text) => {
            let known = STRATEGIES.iter().find(|(known, _)| *known == text).map(|(_, strategy)| *strategy);
            let unknown = || weights.wrong("strategy", format!("{:?} is not supported", excerpt(text)));
            Some(known.ok_or_else(unknown)?)
        }
        // What the library makes of a group alone.
        None => size.map(|_| Strategy::Group),
    };
    let grouped = matches!(strategy, Some(Strategy::Group | Strategy::TensorGroup));
    match size {
        Some(size) if size <= 0 => return Err(weights.wrong("group_size", format!("is {size}"))),
        Some(size) if !grouped && strategy.is_some() && format.group.is_none() => {
            return Err(weights.wrong("group_size", format!("is {size}, but the strategy has no groups")));
        }
        None if strategy == Some(Strategy::Group) && format.group.is_none() => {
            return Err(weights.wrong("group_size", "is missing, but the strategy is group"));
        }
        _ => {}
    }
    if let (Some(strategy), Some(text)) = (strategy, weights.text("strategy")?)
        && !format.strategies.contains(&strategy)
    {
        return Err(weights.wrong("strategy", format!("is {text:?}, which {name} does not have")));
    }
    let fp8_block = weights.block("block_structure")?;
    if (strategy == Some(Strategy::Block)) != fp8_block.is_some() && strategy.is_some() {
        return Err(weights.wrong("block_structure", "belongs to the strategy block, and to no other"));
    }
    let symmetric = weights.flag("symmetric")?.unwrap_or(true);
    if !symmetric && format.kind == "float" {
        return Err(weights.wrong("symmetric", format!("is false, but {name} has no zero points")));
    }
    // Older writers put a flag where newer ones put a text.
    let any_order = match weights.flag("actorder") {
        Ok(flag) => flag.unwrap_or(false),
        Err(_) => match weights.text("actorder")? {
            Some("group" | "dynamic") => true,
            None | Some("weight" | "static") => false,
            Some(other) => return Err(weights.wrong("actorder", format!("{:?} is not supported", excerpt(other)))),
        },
    };
    Ok(Group {
        strategy,
        size: size.map(|size| size as usize),
        fp8_block,
        bits: bits as usize,
        symmetric,
        any_order,
        ..Group::new(format.spelling)
    })
}
