//! One function for each way to write a quantized module into tensors.

use consort_compute::{Format, ScaleFormat};

use super::Module;
use super::declared::{Declared, MlxMode, MlxSettings, Spelling};
use crate::packed::{PackedIntegers, Packing};
use crate::safetensors::{Dtype, StoredTensor};
use crate::weight::{BlockScale, Convert, Encoding, Part, RowFactor, RowScale, Weight};
use crate::{CheckpointError, TensorInfo};

/// The parameters that a module has, and what they spell.
const SIGNATURES: &[(&[&str], Spelling)] = &[
    (&["weight", "weight_scale"], Spelling::Fp8),
    (&["weight", "weight_scale_inv"], Spelling::Fp8),
    (&["weight", "weight_scale", "weight_scale_2"], Spelling::ModelOptNvFp4),
    (&["weight_global_scale", "weight_packed", "weight_scale"], Spelling::CompressedNvFp4),
    (&["weight_packed", "weight_scale"], Spelling::CompressedMxFp4),
    (&["weight_packed", "weight_scale", "weight_zero_point"], Spelling::CompressedIntegers),
    (&["weight_g_idx", "weight_packed", "weight_scale"], Spelling::CompressedIntegers),
    (&["weight_g_idx", "weight_packed", "weight_scale", "weight_zero_point"], Spelling::CompressedIntegers),
    (&["blocks", "scales"], Spelling::OssMxFp4),
    (&["scales", "weight"], Spelling::Mlx),
    (&["biases", "scales", "weight"], Spelling::Mlx),
    (&["global_scale", "scales", "weight"], Spelling::Mlx),
    (&["g_idx", "qweight", "qzeros", "scales"], Spelling::Gptq),
    (&["qweight", "qzeros", "scales"], Spelling::Awq),
];

/// The weight of a module; `None` for a buffer that holds no numbers of a model.
pub(super) fn resolve(
    module: &Module<'_>,
    declared: &Declared,
    gpt_oss: bool,
) -> Result<Option<Weight>, CheckpointError> {
    let parameters: Vec<&str> =
        module.tensors.keys().map(String::as_str).filter(|name| *name != "weight_shape").collect();
    if let [only] = parameters[..]
        && (only.is_empty() || only == "weight")
    {
        return plain(module, only, declared, gpt_oss);
    }
    let spelling = SIGNATURES.iter().find(|(signature, _)| *signature == parameters).map(|(_, spelling)| *spelling);
    let name = module.weight_name();
    let Some(mut spelling) = spelling else {
        let reason = format!("has {}, which no known scheme has together", parameters.join(", "));
        return Err(CheckpointError::scheme(&name, &declared.name, reason));
    };
    // GPTQ files may leave out the order of the input features, and formats of compressed-tensors have tensors of one name.
    for (alike, meant) in [(Spelling::Awq, Spelling::Gptq), (Spelling::CompressedMxFp4, Spelling::CompressedIntegers)] {
        if spelling == alike && !declared.spellings.contains(&alike) && declared.spellings.contains(&meant) {
            spelling = meant;
        }
    }
    declared.allow(spelling, &name)?;
    if let Some((parameter, _)) = module.tensors.iter().find(|(_, tensor)| tensor.shape.contains(&0)) {
        return Err(CheckpointError::scheme(&name, &declared.name, format!("{parameter} is empty")));
    }
    let build = Build { module, declared, name };
    let weight = match spelling {
        Spelling::Fp8 => build.fp8(),
        Spelling::ModelOptNvFp4 => build.nvfp4("weight", Some(("weight_scale_2", RowFactor::Times(1.0)))),
        Spelling::CompressedNvFp4 => build.nvfp4("weight_packed", Some(("weight_global_scale", RowFactor::Divides))),
        Spelling::CompressedMxFp4 => build.split_blocks("weight_packed", "weight_scale", Format::MxFp4, MX_SCALES),
        Spelling::CompressedIntegers => build.compressed_integers(),
        Spelling::OssMxFp4 => build.oss_mxfp4(),
        Spelling::Mlx => build.mlx(),
        Spelling::Gptq => build.packed(Packing::Gptq { zero_offset: declared.zero_offset }),
        Spelling::Awq => build.packed(Packing::Awq),
    }?;
    Ok(Some(weight))
}

/// Dtypes that hold a byte of an exponent.
const MX_SCALES: &[Dtype] = &[Dtype::U8, Dtype::F8E8M0];
/// Dtypes that hold codes of fewer than 8 bits.
const CODES: &[Dtype] = &[Dtype::U8, Dtype::U32, Dtype::I32];
/// Dtypes of packed words, and of their scales.
const WORDS: &[Dtype] = &[Dtype::I32, Dtype::U32];
const FLOATS: &[Dtype] = &[Dtype::F16, Dtype::BF16, Dtype::F32];
/// Groups of affine blocks, the largest first.
const AFFINE_GROUPS: [usize; 3] = [128, 64, 32];
/// MLX: an unsigned byte is the only 8-bit type; FP8 scales are written as such.
const NV_SCALES: &[Dtype] = &[Dtype::F8E4M3, Dtype::U8];
/// `global_scale` of MLX is the largest value that the codes reach: the largest E2M1 times the largest E4M3.
const MLX_NVFP4_LARGEST: f32 = 6.0 * 448.0;

fn plain(
    module: &Module<'_>,
    parameter: &str,
    declared: &Declared,
    gpt_oss: bool,
) -> Result<Option<Weight>, CheckpointError> {
    let tensor = module.tensors[parameter];
    let name = if parameter.is_empty() { module.name.clone() } else { module.weight_name() };
    let format = match (plain_format(tensor.dtype), tensor.dtype) {
        (Some(format), _) => format,
        (_, Dtype::U8 | Dtype::U32 | Dtype::I32 | Dtype::F8E4M3 | Dtype::F8E5M2) if parameter == "weight" => {
            let reason = format!("holds {} without the scales to decode it", tensor.dtype);
            return Err(CheckpointError::scheme(&name, &declared.name, reason));
        }
        _ => return Ok(None),
    };
    let (mut shape, part) = (tensor.shape.clone(), table(tensor));
    // gpt-oss keeps unquantized experts as [experts, in, out].
    let encoding = match shape[..] {
        [stack, inputs, outputs] if gpt_oss && module.fused && parameter == "weight" && tensor.bytes > 0 => {
            shape = vec![stack, outputs, inputs];
            Encoding::Transposed { part, stack }
        }
        _ => Encoding::Rows(part),
    };
    let info = TensorInfo { name, format, shape, bytes: tensor.bytes };
    Ok(Some(Weight { info, encoding, row_scale: None }))
}

impl Module<'_> {
    fn weight_name(&self) -> String {
        format!("{}.weight", self.name)
    }
}

/// A tensor as a table of rows.
fn table(tensor: &StoredTensor) -> Part {
    let (columns, rows) = match tensor.shape.split_last() {
        Some((columns, outer)) => (*columns, outer.iter().product()),
        None => (1, 1),
    };
    Part { file: tensor.file, offset: tensor.offset, rows, row_bytes: columns * tensor.dtype.bytes() }
}

/// A tensor as one row.
fn line(tensor: &StoredTensor) -> Part {
    Part { file: tensor.file, offset: tensor.offset, rows: 1, row_bytes: tensor.bytes as usize }
}

/// The format of plain numbers.
fn plain_format(dtype: Dtype) -> Option<Format> {
    match dtype {
        Dtype::F32 => Some(Format::F32),
        Dtype::F16 => Some(Format::F16),
        Dtype::BF16 => Some(Format::BF16),
        _ => None,
    }
}

fn float_convert(dtype: Dtype) -> Option<Convert> {
    match dtype {
        Dtype::F32 => Some(Convert::Copy),
        Dtype::BF16 => Some(Convert::FromBF16),
        Dtype::F16 => Some(Convert::FromF16),
        _ => None,
    }
}

struct Build<'a> {
    module: &'a Module<'a>,
    declared: &'a Declared,
    name: String,
}

impl<'a> Build<'a> {
    fn wrong(&self, reason: impl Into<String>) -> CheckpointError {
        CheckpointError::scheme(&self.name, &self.declared.name, reason.into())
    }

    /// A tensor that the module's signature contains, of one of these dtypes.
    fn take(&self, parameter: &str, dtypes: &[Dtype]) -> Result<&'a StoredTensor, CheckpointError> {
        let tensor = self.module.tensors[parameter];
        if dtypes.contains(&tensor.dtype) {
            return Ok(tensor);
        }
        let expected: Vec<String> = dtypes.iter().map(Dtype::to_string).collect();
        Err(self.wrong(format!("{parameter} is {}, not {}", tensor.dtype, expected.join(" or "))))
    }

    /// The tensor's shape must be `outer` and then `columns`.
    fn expect(
        &self,
        parameter: &str,
        tensor: &StoredTensor,
        outer: &[usize],
        columns: usize,
    ) -> Result<(), CheckpointError> {
        let expected: Vec<usize> = outer.iter().copied().chain([columns]).collect();
        if tensor.shape == expected {
            return Ok(());
        }
        Err(self.wrong(format!("{parameter} has shape {:?}, not {expected:?}", tensor.shape)))
    }

    /// All dimensions but the last, of which there must be one at least, and the last.
    fn dimensions(&self, parameter: &str, tensor: &'a StoredTensor) -> Result<(&'a [usize], usize), CheckpointError> {
        match tensor.shape.split_last() {
            Some((&columns, outer)) if !outer.is_empty() => Ok((outer, columns)),
            _ => Err(self.wrong(format!("{parameter} has shape {:?}; a matrix is needed", tensor.shape))),
        }
    }

    fn weight(&self, format: Format, shape: Vec<usize>, encoding: Encoding, row_scale: Option<RowScale>) -> Weight {
        let bytes = self.module.tensors.values().map(|tensor| tensor.bytes).sum();
        Weight { info: TensorInfo { name: self.name.clone(), format, shape, bytes }, encoding, row_scale }
    }

    /// Factors in a tensor of their own: one, or one for each of equally many rows.
    fn row_scale(&self, parameter: &str, role: RowFactor, outer: &[usize]) -> Result<RowScale, CheckpointError> {
        let tensor = self.take(parameter, &[Dtype::F32, Dtype::BF16, Dtype::F16])?;
        // Trailing ones don't change which rows a factor belongs to.
        let mut shape = &tensor.shape[..];
        while let [rest @ .., 1] = shape {
            shape = rest;
        }
        // One; one for each expert, or for each row; or (Muse Spark) one for each half of an expert's rows.
        let halves = matches!((shape, outer), ([e, 2], [experts, rows]) if e == experts && rows % 2 == 0);
        if !(outer.starts_with(shape) || halves) {
            return Err(self.wrong(format!("{parameter} has shape {:?} beside rows {outer:?}", tensor.shape)));
        }
        let convert = float_convert(tensor.dtype).ok_or_else(|| self.wrong(format!("{parameter} is no float")))?;
        Ok(RowScale { part: line(tensor), convert, role })
    }

    fn fp8(&self) -> Result<Weight, CheckpointError> {
        let weight = self.take("weight", &[Dtype::F8E4M3])?;
        let parameter =
            if self.module.tensors.contains_key("weight_scale") { "weight_scale" } else { "weight_scale_inv" };
        let scale = self.module.tensors[parameter];
        let (outer, columns) = self.dimensions("weight", weight)?;
        let shape = weight.shape.clone();
        let Some([block_rows, block_columns]) = self.declared.fp8_block else {
            let row_scale = self.row_scale(parameter, RowFactor::Times(1.0), outer)?;
            return Ok(self.weight(Format::F8E4M3, shape, Encoding::Rows(table(weight)), Some(row_scale)));
        };
        let (format, convert) = match (block_rows, block_columns, scale.dtype) {
            (32, 32, Dtype::F8E8M0) => (Format::MxFp8, Some(Convert::Copy)),
            (32, 32, Dtype::U8) if self.declared.ue8m0 => (Format::MxFp8, Some(Convert::Copy)),
            (128, 128, Dtype::F8E8M0) => (Format::F8E4M3Block128, Some(Convert::FromE8M0)),
            (128, 128, Dtype::U8) if self.declared.ue8m0 => (Format::F8E4M3Block128, Some(Convert::FromE8M0)),
            (128, 128, float) => (Format::F8E4M3Block128, float_convert(float)),
            _ => {
                let reason =
                    format!("scale blocks of {block_rows} x {block_columns} in {} are not supported", scale.dtype);
                return Err(self.wrong(reason));
            }
        };
        let convert = convert.ok_or_else(|| self.wrong(format!("{parameter} is {}", scale.dtype)))?;
        let (&rows, stacks) = outer.split_last().unwrap_or((&1, &[]));
        let scale_outer: Vec<usize> = stacks.iter().copied().chain([rows.div_ceil(block_rows)]).collect();
        self.expect(parameter, scale, &scale_outer, columns.div_ceil(block_columns))?;
        let scale = BlockScale {
            part: table(scale),
            rows_per_scale: block_rows,
            stack_rows: rows.max(1),
            bytes: scale.dtype.bytes(),
            convert,
        };
        Ok(self.weight(format, shape, Encoding::Blocks { codes: table(weight), scales: vec![scale] }, None))
    }

    /// 4-bit codes in one tensor, a byte for each block in another.
    fn split_blocks(
        &self,
        codes: &str,
        scales: &str,
        format: Format,
        scale_dtypes: &[Dtype],
    ) -> Result<Weight, CheckpointError> {
        let packed = self.take(codes, CODES)?;
        let (outer, words) = self.dimensions(codes, packed)?;
        let columns = words * packed.dtype.bytes() * 8 / code_bits(format);
        self.blocks(packed, outer, columns, format, &[(scales, scale_dtypes)])
    }

    /// Codes whose blocks find their scales (and biases) in tensors with one column for each block.
    fn blocks(
        &self,
        codes: &StoredTensor,
        outer: &[usize],
        columns: usize,
        format: Format,
        scales: &[(&str, &[Dtype])],
    ) -> Result<Weight, CheckpointError> {
        let block = format.block_values();
        if !columns.is_multiple_of(block) {
            return Err(self.wrong(format!("{columns} columns don't divide into {format} blocks of {block}")));
        }
        let rows: usize = outer.iter().product();
        let mut block_scales = Vec::with_capacity(scales.len());
        for (parameter, dtypes) in scales {
            let tensor = self.take(parameter, dtypes)?;
            self.expect(parameter, tensor, outer, columns / block)?;
            block_scales.push(BlockScale {
                part: table(tensor),
                rows_per_scale: 1,
                stack_rows: rows.max(1),
                bytes: tensor.dtype.bytes(),
                convert: Convert::Copy,
            });
        }
        let shape = outer.iter().copied().chain([columns]).collect();
        Ok(self.weight(format, shape, Encoding::Blocks { codes: table(codes), scales: block_scales }, None))
    }

    fn nvfp4(&self, codes: &str, factor: Option<(&str, RowFactor)>) -> Result<Weight, CheckpointError> {
        let scales =
            if codes == "weight" && self.module.tensors.contains_key("scales") { "scales" } else { "weight_scale" };
        let mut weight = self.split_blocks(codes, scales, Format::NvFp4, NV_SCALES)?;
        if let Some((parameter, role)) = factor {
            let (outer, _) = self.dimensions(codes, self.module.tensors[codes])?;
            weight.row_scale = Some(self.row_scale(parameter, role, outer)?);
        }
        Ok(weight)
    }

    /// gpt-oss: `blocks` is `[experts, rows, blocks, 16]`.
    fn oss_mxfp4(&self) -> Result<Weight, CheckpointError> {
        let blocks = self.take("blocks", &[Dtype::U8])?;
        let [experts, rows, count, 16] = blocks.shape[..] else {
            return Err(self.wrong(format!("blocks has shape {:?}, not [experts, rows, blocks, 16]", blocks.shape)));
        };
        let mut weight = self.blocks(blocks, &[experts, rows], count * 32, Format::MxFp4, &[("scales", MX_SCALES)])?;
        if let Encoding::Blocks { codes, .. } = &mut weight.encoding {
            (codes.rows, codes.row_bytes) = (experts * rows, count * 16);
        }
        Ok(weight)
    }

    fn mlx(&self) -> Result<Weight, CheckpointError> {
        let Some(settings) = self.declared.mlx_of(&self.module.name) else {
            return Err(self.wrong("has scales, but its entry is false"));
        };
        let biased = self.module.tensors.contains_key("biases");
        let scaled = self.module.tensors.contains_key("global_scale");
        let (expects_biases, may_scale) = (settings.mode == MlxMode::Affine, settings.mode == MlxMode::NvFp4);
        if biased != expects_biases || (scaled && !may_scale) {
            let found = if biased {
                "biases"
            } else if scaled {
                "global_scale"
            } else {
                "no biases"
            };
            return Err(self.wrong(format!("{found} beside {settings}")));
        }
        let checked = |weight: Result<Weight, CheckpointError>| {
            weight.map_err(|error| match error {
                CheckpointError::Scheme { tensor, reason, .. } => {
                    CheckpointError::Scheme { tensor, scheme: format!("mlx {settings}"), reason }
                }
                other => other,
            })
        };
        checked(match settings.mode {
            MlxMode::Affine => self.mlx_affine(settings),
            MlxMode::MxFp4 => self.split_blocks("weight", "scales", Format::MxFp4, MX_SCALES),
            MlxMode::MxFp8 => self.split_blocks("weight", "scales", Format::MxFp8, MX_SCALES),
            MlxMode::NvFp4 => {
                let factor = ("global_scale", RowFactor::Times(1.0 / MLX_NVFP4_LARGEST));
                self.nvfp4("weight", scaled.then_some(factor))
            }
        })
    }

    fn mlx_affine(&self, settings: MlxSettings) -> Result<Weight, CheckpointError> {
        let packed = self.take("weight", &[Dtype::U32])?;
        let scale = match self.module.tensors["scales"].dtype {
            Dtype::F16 => ScaleFormat::F16,
            Dtype::BF16 => ScaleFormat::BF16,
            Dtype::F32 => ScaleFormat::F32,
            other => return Err(self.wrong(format!("scales is {other}"))),
        };
        let (outer, words) = self.dimensions("weight", packed)?;
        let bits = usize::from(settings.bits);
        if words * 32 % bits != 0 {
            return Err(self.wrong(format!("{words} words don't hold a whole number of {bits}-bit values")));
        }
        let format = Format::Affine { bits: settings.bits, group: settings.group, scale };
        let same = &[self.module.tensors["scales"].dtype][..];
        self.blocks(packed, outer, words * 32 / bits, format, &[("scales", same), ("biases", same)])
    }

    fn packed(&self, packing: Packing) -> Result<Weight, CheckpointError> {
        let codes = self.take("qweight", WORDS)?;
        let zeros = self.take("qzeros", WORDS)?;
        let scales = self.take("scales", FLOATS)?;
        let [first, second] = codes.shape[..] else {
            return Err(self.wrong(format!("qweight has shape {:?}; a matrix is needed", codes.shape)));
        };
        let (inputs, outputs) = match packing {
            Packing::Awq => (first, second * 8),
            _ => (first * 8, second),
        };
        let group = self.declared.group.unwrap_or(inputs);
        if inputs % group != 0 || outputs % 8 != 0 {
            return Err(self.wrong(format!("[{outputs}, {inputs}] in groups of {group} is not supported")));
        }
        let groups = inputs / group;
        self.expect("qzeros", zeros, &[groups], outputs / 8)?;
        self.expect("scales", scales, &[groups], outputs)?;
        let tables = (table(codes), Some(table(zeros)), scales);
        self.integers(packing, tables, [outputs, inputs], groups, ("g_idx", self.declared.any_order))
    }

    /// `pack-quantized`: rows as they are, with a scale for each group of a row.
    fn compressed_integers(&self) -> Result<Weight, CheckpointError> {
        let bits = self.declared.bits;
        if bits == 0 {
            return Err(self.wrong("num_bits of its config_groups is missing"));
        }
        let packing = Packing::Compressed { bits };
        let codes = self.take("weight_packed", WORDS)?;
        let scales = self.take("weight_scale", FLOATS)?;
        let ([outputs, words], [_, groups]) = (&codes.shape[..], &scales.shape[..]) else {
            let reason = format!("shapes {:?} and {:?}; two matrices are needed", codes.shape, scales.shape);
            return Err(self.wrong(reason));
        };
        let (outputs, inputs, groups) = (*outputs, words * packing.word_codes(), *groups);
        if inputs % groups != 0 {
            return Err(self.wrong(format!("{inputs} columns don't divide into {groups} groups")));
        }
        self.expect("weight_scale", scales, &[outputs], groups)?;
        let zeros = match self.module.tensors.get("weight_zero_point") {
            Some(_) => {
                let zeros = self.take("weight_zero_point", WORDS)?;
                self.expect("weight_zero_point", zeros, &[outputs.div_ceil(packing.word_codes())], groups)?;
                Some(table(zeros))
            }
            None => None,
        };
        self.integers(packing, (table(codes), zeros, scales), [outputs, inputs], groups, ("weight_g_idx", true))
    }

    /// Packed integers as affine blocks, or as plain values where neighbouring input features may be of different groups.
    fn integers(
        &self,
        packing: Packing,
        (codes, zeros, scales): (Part, Option<Part>, &StoredTensor),
        [outputs, inputs]: [usize; 2],
        groups: usize,
        (index, any_order): (&str, bool),
    ) -> Result<Weight, CheckpointError> {
        let group_index = match self.module.tensors.get(index) {
            Some(index) if index.shape[..] == [inputs] && WORDS.contains(&index.dtype) => Some(line(index)),
            Some(found) => return Err(self.wrong(format!("{index} is {} of shape {:?}", found.dtype, found.shape))),
            None => None,
        };
        let group = inputs / groups;
        let format = if any_order && group_index.is_some() {
            plain_format(scales.dtype)
        } else {
            // A group may span several blocks, which then have the same scale.
            AFFINE_GROUPS.iter().find(|&&block| group.is_multiple_of(block)).map(|&block| Format::Affine {
                bits: if let Packing::Compressed { bits } = packing { bits as u8 } else { 4 },
                group: block as u16,
                scale: ScaleFormat::F32,
            })
        };
        let format = format.ok_or_else(|| {
            self.wrong(format!("groups of {group} are not supported; multiples of {} are", AFFINE_GROUPS[2]))
        })?;
        let packed = PackedIntegers {
            packing,
            codes,
            zeros,
            scales: table(scales),
            scale_convert: float_convert(scales.dtype).ok_or_else(|| self.wrong("the scales are no floats"))?,
            outputs,
            group,
            groups,
            group_index,
        };
        Ok(self.weight(format, vec![outputs, inputs], Encoding::Packed(packed), None))
    }
}

/// Bits of one value, without its scale.
fn code_bits(format: Format) -> usize {
    if format == Format::MxFp8 { 8 } else { 4 }
}
