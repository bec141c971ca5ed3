//! The formats that a model can be converted to.

use std::fmt;
use std::str::FromStr;

use consort_compute::{Format, ScaleFormat};
use serde_json::{Value as Json, json};

use super::encode::Stored;

/// What the matrices of a converted model are stored as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// bfloat16, which every program reads.
    Bf16,
    /// FP8 E4M3 with one f32 scale for each 128×128 block, as transformers and vLLM read it. mlx_lm does not.
    Fp8,
    /// NVFP4 as MLX stores it.
    NvFp4,
    /// MXFP4 as MLX stores it.
    MxFp4,
    /// MXFP8 as MLX stores it.
    MxFp8,
    /// MLX affine, 4 bits in groups of 64.
    Affine4,
    /// MLX affine, 8 bits in groups of 64.
    Affine8,
}

/// Values of an affine group.
const GROUP: u16 = 64;

/// Target, its name, how its matrices are stored, and MLX's name of the mode.
const TARGETS: &[(Target, &str, Stored, Option<&str>)] = &[
    (Target::Bf16, "bf16", Stored::Blocks(Format::BF16), None),
    (Target::Fp8, "fp8", Stored::Fp8Tiles, None),
    (Target::NvFp4, "nvfp4", Stored::Blocks(Format::NvFp4), Some("nvfp4")),
    (Target::MxFp4, "mxfp4", Stored::Blocks(Format::MxFp4), Some("mxfp4")),
    (Target::MxFp8, "mxfp8", Stored::Blocks(Format::MxFp8), Some("mxfp8")),
    (Target::Affine4, "affine4", Stored::Blocks(affine(4)), Some("affine")),
    (Target::Affine8, "affine8", Stored::Blocks(affine(8)), Some("affine")),
];

const fn affine(bits: u8) -> Format {
    Format::Affine { bits, group: GROUP, scale: ScaleFormat::BF16 }
}

impl Target {
    /// All targets.
    pub fn all() -> impl Iterator<Item = Self> {
        TARGETS.iter().map(|(target, ..)| *target)
    }

    fn entry(self) -> &'static (Self, &'static str, Stored, Option<&'static str>) {
        // INVARIANT: the table lists every variant.
        TARGETS.iter().find(|(target, ..)| *target == self).unwrap_or(&TARGETS[0])
    }

    /// How matrices that are not kept are stored.
    pub(super) fn stored(self) -> Stored {
        self.entry().2
    }

    /// Whether the directory is spelled as MLX does, with experts stacked and a `quantization` block.
    pub(super) fn is_mlx(self) -> bool {
        self.entry().3.is_some()
    }

    /// The quantization block of `config.json` and its key, given the modules that stay in BF16.
    pub(super) fn quantization(self, plain: &[&str]) -> Option<(&'static str, Json)> {
        match (self.entry().3, self.stored()) {
            (Some(mode), Stored::Blocks(format)) => {
                let bits = match format {
                    Format::Affine { bits, .. } => bits,
                    Format::MxFp8 => 8,
                    _ => 4,
                };
                let mut block = json!({ "group_size": format.block_values(), "bits": bits, "mode": mode });
                plain.iter().for_each(|module| block[*module] = false.into());
                Some(("quantization", block))
            }
            (_, Stored::Fp8Tiles) => Some((
                "quantization_config",
                json!({
                    "quant_method": "fp8",
                    "fmt": "e4m3",
                    "activation_scheme": "dynamic",
                    "weight_block_size": [super::encode::TILE, super::encode::TILE],
                    "modules_to_not_convert": plain,
                }),
            )),
            (None, Stored::Blocks(_)) => None,
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.entry().1)
    }
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = TARGETS.iter().find(|(_, name, ..)| *name == text).map(|(target, ..)| *target);
        found.ok_or_else(|| {
            let names: Vec<_> = TARGETS.iter().map(|(_, name, ..)| *name).collect();
            format!("formats are {}", names.join(", "))
        })
    }
}
