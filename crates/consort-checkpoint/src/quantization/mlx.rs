//! What MLX writes into its `quantization` block.

use std::collections::HashMap;

use serde_json::Value as Json;

use super::settings::Settings;
use crate::CheckpointError;
use crate::huggingface::canonical;

/// How MLX stores a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MlxSettings {
    pub mode: MlxMode,
    pub bits: u8,
    pub group: u16,
}

/// Modes of `mx.quantize`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MlxMode {
    Affine,
    MxFp4,
    MxFp8,
    NvFp4,
}

/// Mode, its name, its default bits and group; all but affine have no others.
const MLX_MODES: &[(MlxMode, &str, u8, u16)] = &[
    (MlxMode::Affine, "affine", 4, 64),
    (MlxMode::MxFp4, "mxfp4", 4, 32),
    (MlxMode::MxFp8, "mxfp8", 8, 32),
    (MlxMode::NvFp4, "nvfp4", 4, 16),
];

/// An override of the MLX settings for one module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Override {
    Plain,
    Quantized(MlxSettings),
}

/// The settings of a model and of single modules.
#[derive(Clone, Debug)]
pub(crate) struct Mlx {
    pub defaults: MlxSettings,
    overrides: HashMap<String, Override>,
}

impl Mlx {
    /// Understands a block.
    ///
    /// # Errors
    /// [`CheckpointError::Config`] for a mode, a width or a group that `mx.quantize` does not have.
    pub fn parse(block: &Settings<'_>) -> Result<Self, CheckpointError> {
        let defaults = settings(block, None)?;
        let mut overrides = HashMap::new();
        for (key, value) in block.members() {
            let setting = match value {
                Json::Bool(true) => Override::Quantized(defaults),
                Json::Bool(false) => Override::Plain,
                Json::Object(_) => match block.inner(key)? {
                    Some(inner) => Override::Quantized(settings(&inner, Some(defaults))?),
                    None => continue,
                },
                _ => continue,
            };
            if let Some(module) = canonical(&format!("{key}.")) {
                overrides.insert(module.trim_end_matches('.').to_string(), setting);
            }
        }
        Ok(Self { defaults, overrides })
    }

    /// The settings of a module; `None` if it must be plain.
    pub fn of(&self, module: &str) -> Option<MlxSettings> {
        match self.overrides.get(module) {
            Some(Override::Plain) => None,
            Some(Override::Quantized(settings)) => Some(*settings),
            None => Some(self.defaults),
        }
    }

    /// The settings that an entry of its own gives a module.
    pub fn own_entry(&self, module: &str) -> Option<MlxSettings> {
        match self.overrides.get(module)? {
            Override::Plain => None,
            Override::Quantized(settings) => Some(*settings),
        }
    }
}

impl std::fmt::Display for MlxSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = MLX_MODES.iter().find(|(mode, ..)| *mode == self.mode).map_or("", |(_, name, ..)| name);
        write!(f, "{name} of {} bits in groups of {}", self.bits, self.group)
    }
}

fn settings(block: &Settings<'_>, defaults: Option<MlxSettings>) -> Result<MlxSettings, CheckpointError> {
    let row = match block.text("mode")? {
        Some(name) => MLX_MODES.iter().find(|(_, known, ..)| *known == name),
        None => MLX_MODES.iter().find(|(mode, ..)| *mode == defaults.map_or(MlxMode::Affine, |defaults| defaults.mode)),
    };
    let unknown = || block.wrong("mode", "is not supported; affine, mxfp4, mxfp8 and nvfp4 are");
    let &(mode, name, mode_bits, mode_group) = row.ok_or_else(unknown)?;
    let inherited = defaults.filter(|defaults| defaults.mode == mode);
    let number = |key: &str, default: i64| Ok::<_, CheckpointError>(block.integer(key)?.unwrap_or(default));
    let bits = number("bits", inherited.map_or(mode_bits, |inherited| inherited.bits).into())?;
    let group = number("group_size", inherited.map_or(mode_group, |inherited| inherited.group).into())?;
    let possible = match mode {
        MlxMode::Affine => [2, 3, 4, 5, 6, 8].contains(&bits) && [32, 64, 128].contains(&group),
        _ => (bits, group) == (mode_bits.into(), mode_group.into()),
    };
    match possible {
        true => Ok(MlxSettings { mode, bits: bits as u8, group: group as u16 }),
        false => Err(block.wrong("", format!("{name} of {bits} bits in groups of {group} is not supported"))),
    }
}
