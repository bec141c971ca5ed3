//! What a configuration declares about number formats.

use serde_json::Value as Json;

use crate::CheckpointError;
use crate::huggingface::canonical;

/// A way to write one quantized module into tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Spelling {
    /// E4M3 `weight` with `weight_scale` or `weight_scale_inv`.
    Fp8,
    /// `weight`, `weight_scale`, `weight_scale_2`, which multiplies.
    ModelOptNvFp4,
    /// `weight_packed`, `weight_scale`, `weight_global_scale`, which divides.
    CompressedNvFp4,
    /// `weight_packed`, `weight_scale`.
    CompressedMxFp4,
    /// `weight_packed`, `weight_scale`, perhaps `weight_zero_point` and `weight_g_idx`.
    CompressedIntegers,
    /// `blocks`, `scales` (gpt-oss).
    OssMxFp4,
    /// `weight`, `scales`, perhaps `biases` or `global_scale`.
    Mlx,
    /// `qweight`, `qzeros`, `scales`, `g_idx`.
    Gptq,
    /// `qweight`, `qzeros`, `scales`.
    Awq,
}

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

/// What `quantization_config` (or `quantization`, or `hf_quant_config.json`) says.
#[derive(Clone, Debug, Default)]
pub(crate) struct Declared {
    /// For messages: `quant_method` and what specifies it.
    pub name: String,
    /// Spellings that may occur; modules in plain numbers always may.
    pub spellings: Vec<Spelling>,
    /// Rows and columns of an FP8 scale block.
    pub fp8_block: Option<[usize; 2]>,
    /// FP8 scales in bytes are exponents.
    pub ue8m0: bool,
    /// Input features of a GPTQ or AWQ group; `None` is one group for all.
    pub group: Option<usize>,
    /// GPTQ groups input features in any order.
    pub any_order: bool,
    /// Bits of the integers of compressed-tensors.
    pub bits: usize,
    /// GPTQ stores zero points less this.
    pub zero_offset: u32,
    mlx: Option<MlxSettings>,
    overrides: Vec<(String, Override)>,
}

/// Formats of compressed-tensors that are read.
const COMPRESSED_FORMATS: &[(&str, Spelling)] = &[
    ("float-quantized", Spelling::Fp8),
    ("naive-quantized", Spelling::Fp8),
    ("nvfp4-pack-quantized", Spelling::CompressedNvFp4),
    ("mxfp4-pack-quantized", Spelling::CompressedMxFp4),
    ("pack-quantized", Spelling::CompressedIntegers),
];

impl Declared {
    /// Understands a quantization block; no block declares plain numbers.
    ///
    /// # Errors
    /// [`CheckpointError::Config`] for an unknown method, format, mode or number of bits.
    pub fn parse(quantization: Option<&Json>, path: &str) -> Result<Self, CheckpointError> {
        let Some(block) = quantization.filter(|block| !block.is_null()) else {
            return Ok(Self { name: "no quantization_config".into(), ..Self::default() });
        };
        let wrong =
            |reason: String| CheckpointError::Config { path: path.into(), key: "quantization_config".into(), reason };
        // `hf_quant_config.json` nests its settings below its producer's name.
        let settings = block.get("quantization").unwrap_or(block);
        let text = |key: &str| settings.get(key).and_then(Json::as_str);
        let method = match text("quant_method") {
            Some(method) => method,
            None if text("quant_algo").is_some() => "modelopt",
            None if settings.get("bits").is_some() || settings.get("mode").is_some() => "mlx",
            None => return Err(wrong("has neither quant_method nor bits".into())),
        };
        let mut declared = Self { name: method.into(), ..Self::default() };
        match method {
            "fp8" => {
                declared.spellings = vec![Spelling::Fp8];
                declared.fp8_block = block_size(settings.get("weight_block_size")).map_err(wrong)?;
                declared.ue8m0 = text("scale_fmt") == Some("ue8m0");
            }
            "modelopt" => {
                let algorithm = text("quant_algo").unwrap_or("");
                declared.name = format!("modelopt {algorithm}");
                declared.spellings = match algorithm {
                    "FP8" | "FP8_PER_CHANNEL_PER_TOKEN" => vec![Spelling::Fp8],
                    "NVFP4" => vec![Spelling::ModelOptNvFp4],
                    "MIXED_PRECISION" => vec![Spelling::Fp8, Spelling::ModelOptNvFp4],
                    other => return Err(wrong(format!("modelopt quant_algo {other:?} is not supported"))),
                };
            }
            "compressed-tensors" => declared.compressed_tensors(settings).map_err(wrong)?,
            "mxfp4" => declared.spellings = vec![Spelling::OssMxFp4],
            "gptq" | "awq" => declared.packed_integers(method, settings).map_err(wrong)?,
            "mlx" => declared.mlx(settings).map_err(wrong)?,
            other => return Err(wrong(format!("quant_method {other:?} is not supported"))),
        }
        Ok(declared)
    }

    fn compressed_tensors(&mut self, settings: &Json) -> Result<(), String> {
        let groups: Vec<&Json> = settings
            .get("config_groups")
            .and_then(Json::as_object)
            .into_iter()
            .flat_map(|groups| groups.values())
            .collect();
        let format = |of: &'_ Json| of.get("format").and_then(Json::as_str).map(str::to_string);
        let whole = format(settings);
        let formats: Vec<String> = groups.iter().filter_map(|group| format(group)).collect();
        let mixed = whole.as_deref() == Some("mixed-precision") && !formats.is_empty();
        let all: Vec<String> = formats.into_iter().chain(whole.clone().filter(|_| !mixed)).collect();
        self.name = format!("compressed-tensors {}", all.join(", "));
        if all.is_empty() {
            return Err("compressed-tensors without a format".into());
        }
        for format in &all {
            self.spellings.push(compressed_spelling(format)?);
        }
        for group in groups {
            let Some(weights) = group.get("weights") else { continue };
            let float = weights.get("type").and_then(Json::as_str).is_none_or(|kind| kind == "float");
            let format = format(group).or_else(|| whole.clone()).unwrap_or_default();
            let bits = weights.get("num_bits").and_then(Json::as_u64).unwrap_or(0);
            match (compressed_spelling(&format)?, float, bits) {
                (Spelling::CompressedIntegers, false, 4 | 8) if self.bits == 0 || self.bits == bits as usize => {
                    self.bits = bits as usize;
                }
                (Spelling::CompressedIntegers, false, 4 | 8) => {
                    return Err("compressed-tensors groups of different integers are not supported".into());
                }
                (Spelling::CompressedIntegers, ..) | (Spelling::Fp8, false, _) => {
                    let kind = if float { "float" } else { "int" };
                    return Err(format!("compressed-tensors {format} of {kind}{bits} is not supported"));
                }
                _ => {}
            }
            if let Some(block) = block_size(weights.get("block_structure"))? {
                self.fp8_block = Some(block);
            }
        }
        Ok(())
    }

    fn packed_integers(&mut self, method: &str, settings: &Json) -> Result<(), String> {
        let bits = settings.get("bits").or(settings.get("w_bit")).and_then(Json::as_u64);
        if bits != Some(4) {
            return Err(format!("{method} with {bits:?} bits is not supported; 4 bits are"));
        }
        let version = settings.get("version").and_then(Json::as_str).unwrap_or("gemm").to_ascii_lowercase();
        if method == "awq" && version != "gemm" {
            return Err(format!("awq version {version:?} is not supported; gemm is"));
        }
        let v2 = settings.get("checkpoint_format").and_then(Json::as_str) == Some("gptq_v2");
        self.zero_offset = u32::from(!v2);
        let group = settings.get("group_size").or(settings.get("q_group_size")).and_then(Json::as_i64).unwrap_or(128);
        self.group = usize::try_from(group).ok().filter(|&group| group > 0);
        if self.group.is_none() && group != -1 {
            return Err(format!("{method} groups of {group} are not supported"));
        }
        self.any_order = settings.get("desc_act").and_then(Json::as_bool) == Some(true);
        self.spellings = vec![if method == "awq" { Spelling::Awq } else { Spelling::Gptq }];
        Ok(())
    }

    fn mlx(&mut self, settings: &Json) -> Result<(), String> {
        let defaults = mlx_settings(settings, None)?;
        self.name = format!("mlx {defaults}");
        self.spellings = vec![Spelling::Mlx];
        self.mlx = Some(defaults);
        for (key, value) in settings.as_object().into_iter().flatten() {
            let setting = match value {
                Json::Bool(true) => Override::Quantized(defaults),
                Json::Bool(false) => Override::Plain,
                Json::Object(_) => Override::Quantized(
                    mlx_settings(value, Some(defaults)).map_err(|reason| format!("{key}: {reason}"))?,
                ),
                _ => continue,
            };
            if let Some(module) = canonical(&format!("{key}.")) {
                self.overrides.push((module.trim_end_matches('.').to_string(), setting));
            }
        }
        Ok(())
    }

    /// The MLX settings of a module; `None` if it must be plain.
    pub fn mlx_of(&self, module: &str) -> Option<MlxSettings> {
        match self.overrides.iter().find(|(name, _)| name == module) {
            Some((_, Override::Plain)) => None,
            Some((_, Override::Quantized(settings))) => Some(*settings),
            None => self.mlx,
        }
    }

    /// An error if this spelling is not one that the configuration declares.
    pub fn allow(&self, spelling: Spelling, tensor: &str) -> Result<(), CheckpointError> {
        if self.spellings.contains(&spelling) {
            return Ok(());
        }
        Err(CheckpointError::scheme(tensor, &self.name, format!("is stored as {spelling:?}, which is not declared")))
    }
}

fn compressed_spelling(format: &str) -> Result<Spelling, String> {
    let known = COMPRESSED_FORMATS.iter().find(|(known, _)| *known == format).map(|(_, spelling)| *spelling);
    known.ok_or_else(|| format!("compressed-tensors format {format:?} is not supported"))
}

impl std::fmt::Display for MlxSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = MLX_MODES.iter().find(|(mode, ..)| *mode == self.mode).map_or("", |(_, name, ..)| name);
        write!(f, "{name} of {} bits in groups of {}", self.bits, self.group)
    }
}

fn mlx_settings(settings: &Json, defaults: Option<MlxSettings>) -> Result<MlxSettings, String> {
    let mode = match settings.get("mode").and_then(Json::as_str) {
        Some(name) => {
            MLX_MODES.iter().find(|(_, known, ..)| *known == name).ok_or(format!("mode {name:?} is not supported"))?
        }
        None => {
            let default = defaults.map_or(MlxMode::Affine, |defaults| defaults.mode);
            MLX_MODES.iter().find(|(mode, ..)| *mode == default).unwrap_or(&MLX_MODES[0])
        }
    };
    let &(mode, name, mode_bits, mode_group) = mode;
    let number = |key: &str, default: u64| match settings.get(key) {
        None | Some(Json::Null) => Ok(default),
        Some(value) => value.as_u64().ok_or_else(|| format!("{key} is no number")),
    };
    let inherited = defaults.filter(|defaults| defaults.mode == mode);
    let bits = number("bits", inherited.map_or(mode_bits, |inherited| inherited.bits).into())?;
    let group = number("group_size", inherited.map_or(mode_group, |inherited| inherited.group).into())?;
    let possible = match mode {
        MlxMode::Affine => [2, 3, 4, 5, 6, 8].contains(&bits) && [32, 64, 128].contains(&group),
        _ => (bits, group) == (mode_bits.into(), mode_group.into()),
    };
    if !possible {
        return Err(format!("{name} of {bits} bits in groups of {group} is not supported"));
    }
    Ok(MlxSettings { mode, bits: bits as u8, group: group as u16 })
}

/// `[rows, columns]`.
fn block_size(value: Option<&Json>) -> Result<Option<[usize; 2]>, String> {
    let Some(value) = value.filter(|value| !value.is_null()) else { return Ok(None) };
    let sizes: Vec<usize> =
        value.as_array().into_iter().flatten().filter_map(Json::as_u64).map(|size| size as usize).collect();
    match sizes[..] {
        [rows, columns] if rows > 0 && columns > 0 => Ok(Some([rows, columns])),
        _ => Err(format!("block size {value} is not supported; [rows, columns] is")),
    }
}
