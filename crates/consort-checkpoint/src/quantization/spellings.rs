//! One function for each way to write a quantized module into tensors.

use consort_compute::{Format, ScaleFormat};

use super::Module;
use super::declared::{Declared, Group, Strategy};
use super::mlx::{Mlx, MlxMode, MlxSettings};
use super::spelling::{Spelling, lacking};
use crate::packed::{PackedIntegers, Packing};
use crate::safetensors::{Dtype, StoredTensor};
use crate::source::Source;
use crate::weight::{BlockScale, Convert, Encoding, Part, RowFactor, RowScale, Weight};
use crate::{CheckpointError, TensorInfo};

/// The weight of a module; `None` for a buffer that holds no numbers of a model.
pub(super) fn resolve(
    module: &Module<'_>,
    declared: &Declared,
    gpt_oss: bool,
    source: &dyn Source,
) -> Result<Option<Weight>, CheckpointError> {
    let parameters: Vec<&str> =
        module.tensors.keys().map(String::as_str).filter(|name| *name != "weight_shape").collect();
    let name = if parameters == [""] { module.name.clone() } else { module.weight_name() };
    let wrong = |reason: String| {
        let path = module.tensors.values().next().map(|tensor| source.display(tensor.file)).unwrap_or_default();
        CheckpointError::scheme(path, &name, &declared.name, reason)
    };
    if let [only @ ("" | "weight")] = parameters[..] {
        return plain(module, only, &name, declared, gpt_oss).map_err(wrong);
    }
    let group = declared.settle(module, &parameters).map_err(wrong)?;
    if let Some((parameter, _)) = module.tensors.iter().find(|(_, tensor)| tensor.shape.contains(&0)) {
        return Err(wrong(format!("{parameter} is empty")));
    }
    let build = Build { module, group, mlx: declared.mlx.as_ref(), name: &name };
    let weight = match group.spelling {
        Spelling::Fp8 => build.fp8(),
        Spelling::ModelOptNvFp4 => build.nvfp4(BYTES, ("weight_scale", E4M3), "weight_scale_2", RowFactor::Times(1.0)),
        Spelling::CompressedNvFp4 => {
            build.nvfp4(BYTES, ("weight_scale", E4M3), "weight_global_scale", RowFactor::Divides)
        }
        Spelling::CompressedMxFp4 => build.split_blocks(BYTES, ("weight_scale", MX_SCALES), Format::MxFp4),
        Spelling::CompressedIntegers => build.compressed_integers(),
        Spelling::OssMxFp4 => build.oss_mxfp4(),
        Spelling::Mlx => build.mlx(),
        Spelling::Gptq => build.packed(Packing::Gptq { zero_offset: group.zero_offset }),
        Spelling::Awq => build.packed(Packing::Awq),
    };
    weight.map(Some).map_err(wrong)
}

/// Dtypes that hold a byte of an exponent.
const MX_SCALES: &[Dtype] = &[Dtype::U8, Dtype::F8E8M0];
/// Dtypes that hold codes of fewer than 8 bits: MLX packs words, all others bytes.
const BYTES: &[Dtype] = &[Dtype::U8];
const MLX_WORDS: &[Dtype] = &[Dtype::U32];
/// Dtypes of packed words, and of their scales.
const WORDS: &[Dtype] = &[Dtype::I32, Dtype::U32];
const FLOATS: &[Dtype] = &[Dtype::F16, Dtype::BF16, Dtype::F32];
/// Groups of affine blocks, the largest first.
const AFFINE_GROUPS: [usize; 3] = [128, 64, 32];
const E4M3: &[Dtype] = &[Dtype::F8E4M3];
/// MLX: an unsigned byte is the only 8-bit type; FP8 scales are written as such.
const MLX_NV_SCALES: &[Dtype] = &[Dtype::F8E4M3, Dtype::U8];
/// `global_scale` of MLX is the largest value that the codes reach: the largest E2M1 times the largest E4M3.
const MLX_NVFP4_LARGEST: f32 = 6.0 * 448.0;

/// Parameters that hold numbers of a model, whatever their type; other tensors of a type that is no format are buffers.
const NUMBERS: &[&str] = &["weight", "bias"];

fn plain(
    module: &Module<'_>,
    parameter: &str,
    name: &str,
    declared: &Declared,
    gpt_oss: bool,
) -> Result<Option<Weight>, String> {
    let tensor = module.tensors[parameter];
    let dtype = tensor.dtype;
    let Some(format) = plain_format(dtype) else {
        let lacks = |group: &Group| Some((group.spelling, lacking(group.spelling, &["weight"])?));
        return match declared.groups.iter().find_map(lacks) {
            Some((spelling, lacks)) if parameter == "weight" => {
                let lacks = lacks.join(", ");
                Err(format!("is {dtype} and cannot be decoded: {spelling} needs {lacks} too, which is missing"))
            }
            // Those of an unknown type that are needed have been refused.
            _ if ![Dtype::Bool, Dtype::Unknown].contains(&dtype)
                && NUMBERS.iter().any(|number| name.ends_with(&format!(".{number}"))) =>
            {
                Err(format!("is {dtype}; F32, F16 and BF16 are read without scales"))
            }
            _ => Ok(None),
        };
    };
    if let (Some((spelling, key)), "weight") = (declared.demanded(module), parameter) {
        return Err(format!("is {dtype} without scales, but {key} declares {spelling}"));
    }
    if let Some(settings) = declared.mlx.as_ref().and_then(|mlx| mlx.own_entry(&module.name)) {
        return Err(format!("is {dtype} without scales, but its entry declares {settings}"));
    }
    let (mut shape, part) = (tensor.shape.clone(), table(tensor));
    // gpt-oss keeps unquantized experts as [experts, in, out].
    let encoding = match shape[..] {
        [stack, inputs, outputs] if gpt_oss && module.fused && parameter == "weight" && tensor.bytes > 0 => {
            shape = vec![stack, outputs, inputs];
            Encoding::Transposed { part, stack }
        }
        _ => Encoding::Rows(part),
    };
    let info = TensorInfo { name: name.into(), stored_name: tensor.name.clone(), format, shape, bytes: tensor.bytes };
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
    group: &'a Group,
    mlx: Option<&'a Mlx>,
    name: &'a str,
}

impl<'a> Build<'a> {
    /// A tensor that the module's signature contains, of one of these dtypes.
    fn take(&self, parameter: &str, dtypes: &[Dtype]) -> Result<&'a StoredTensor, String> {
        let tensor = self.module.tensors[parameter];
        if dtypes.contains(&tensor.dtype) {
            return Ok(tensor);
        }
        let expected: Vec<String> = dtypes.iter().map(Dtype::to_string).collect();
        Err(format!("{parameter} is {}, not {}", tensor.dtype, expected.join(" or ")))
    }

    /// The tensor's shape must be `outer` and then `columns`.
    fn expect(&self, parameter: &str, tensor: &StoredTensor, outer: &[usize], columns: usize) -> Result<(), String> {
        let expected: Vec<usize> = outer.iter().copied().chain([columns]).collect();
        if tensor.shape == expected {
            return Ok(());
        }
        Err(format!("{parameter} has shape {:?}, not {expected:?}", tensor.shape))
    }

    /// All dimensions but the last, of which there must be one at least, and the last.
    fn dimensions(&self, parameter: &str, tensor: &'a StoredTensor) -> Result<(&'a [usize], usize), String> {
        match tensor.shape.split_last() {
            Some((&columns, outer)) if !outer.is_empty() => Ok((outer, columns)),
            _ => Err(format!("{parameter} has shape {:?}; a matrix is needed", tensor.shape)),
        }
    }

    fn weight(&self, format: Format, shape: Vec<usize>, encoding: Encoding, row_scale: Option<RowScale>) -> Weight {
        let tensors = || self.module.tensors.values();
        let bytes = tensors().map(|tensor| tensor.bytes).sum();
        let stored_name = tensors().max_by_key(|tensor| tensor.bytes).map(|it| it.name.clone()).unwrap_or_default();
        let info = TensorInfo { name: self.name.into(), stored_name, format, shape, bytes };
        Weight { info, encoding, row_scale }
    }

    /// Factors in a tensor of their own: one, or one for each of equally many rows.
    fn row_scale(&self, parameter: &str, role: RowFactor, outer: &[usize]) -> Result<RowScale, String> {
        let tensor = self.take(parameter, &[Dtype::F32, Dtype::BF16, Dtype::F16])?;
        // Trailing ones don't change which rows a factor belongs to.
        let mut shape = &tensor.shape[..];
        while let [rest @ .., 1] = shape {
            shape = rest;
        }
        // One; one for each expert, or for each row; or (Muse Spark) one for each half of an expert's rows.
        let halves = matches!((shape, outer), ([e, 2], [experts, rows]) if e == experts && rows % 2 == 0);
        if !(outer.starts_with(shape) || halves) {
            return Err(format!("{parameter} has shape {:?} beside rows {outer:?}", tensor.shape));
        }
        let convert = float_convert(tensor.dtype).ok_or_else(|| format!("{parameter} is no float"))?;
        Ok(RowScale { name: tensor.name.clone(), part: line(tensor), convert, role })
    }

    fn fp8(&self) -> Result<Weight, String> {
        let weight = self.take("weight", &[Dtype::F8E4M3])?;
        let parameter =
            if self.module.tensors.contains_key("weight_scale") { "weight_scale" } else { "weight_scale_inv" };
        let scale = self.module.tensors[parameter];
        let (outer, columns) = self.dimensions("weight", weight)?;
        let shape = weight.shape.clone();
        let (rows, values) = (outer.iter().product::<usize>(), scale.shape.iter().product::<usize>());
        let one_for = match self.group.strategy {
            Some(Strategy::Tensor) if values != 1 && outer.len() == 1 => Some("the tensor"),
            Some(Strategy::Channel) if values != rows => Some("each row"),
            Some(Strategy::Group | Strategy::TensorGroup) => Some("each group of a row"),
            _ => None,
        };
        if let Some(one_for) = one_for {
            return Err(format!("{parameter} has shape {:?}, but a scale for {one_for} is declared", scale.shape));
        }
        let Some([block_rows, block_columns]) = self.group.fp8_block else {
            let row_scale = self.row_scale(parameter, RowFactor::Times(1.0), outer)?;
            return Ok(self.weight(Format::F8E4M3, shape, Encoding::Rows(table(weight)), Some(row_scale)));
        };
        let (format, convert) = match (block_rows, block_columns, scale.dtype) {
            (32, 32, Dtype::F8E8M0) => (Format::MxFp8, Some(Convert::Copy)),
            (32, 32, Dtype::U8) if self.group.ue8m0 => (Format::MxFp8, Some(Convert::Copy)),
            (128, 128, Dtype::F8E8M0) => (Format::F8E4M3Block128, Some(Convert::FromE8M0)),
            (128, 128, Dtype::U8) if self.group.ue8m0 => (Format::F8E4M3Block128, Some(Convert::FromE8M0)),
            (128, 128, float) => (Format::F8E4M3Block128, float_convert(float)),
            _ => {
                let reason =
                    format!("scale blocks of {block_rows} x {block_columns} in {} are not supported", scale.dtype);
                return Err(reason);
            }
        };
        let convert = convert.ok_or_else(|| format!("{parameter} is {}", scale.dtype))?;
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

    /// Codes in `weight` or `weight_packed`, with a byte for each block in another tensor.
    fn split_blocks(&self, code_dtypes: &[Dtype], scales: (&str, &[Dtype]), format: Format) -> Result<Weight, String> {
        let codes = if self.module.tensors.contains_key("weight") { "weight" } else { "weight_packed" };
        let packed = self.take(codes, code_dtypes)?;
        let (outer, words) = self.dimensions(codes, packed)?;
        let columns = words * packed.dtype.bytes() * 8 / code_bits(format);
        self.blocks(packed, outer, columns, format, &[scales])
    }

    /// Codes whose blocks find their scales (and biases) in tensors with one column for each block.
    fn blocks(
        &self,
        codes: &StoredTensor,
        outer: &[usize],
        columns: usize,
        format: Format,
        scales: &[(&str, &[Dtype])],
    ) -> Result<Weight, String> {
        let block = format.block_values();
        if !columns.is_multiple_of(block) {
            return Err(format!("{columns} columns don't divide into {format} blocks of {block}"));
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

    /// NVFP4 with the scale of the tensor, or of each expert, in `factor`.
    fn nvfp4(
        &self,
        code_dtypes: &[Dtype],
        scales: (&str, &[Dtype]),
        factor: &str,
        role: RowFactor,
    ) -> Result<Weight, String> {
        let mut weight = self.split_blocks(code_dtypes, scales, Format::NvFp4)?;
        let (_, outer) = weight.info.shape.split_last().unwrap_or((&1, &[]));
        weight.row_scale = Some(self.row_scale(factor, role, outer)?);
        Ok(weight)
    }

    /// gpt-oss: `blocks` is `[experts, rows, blocks, 16]`.
    fn oss_mxfp4(&self) -> Result<Weight, String> {
        let blocks = self.take("blocks", &[Dtype::U8])?;
        let [experts, rows, count, 16] = blocks.shape[..] else {
            return Err(format!("blocks has shape {:?}, not [experts, rows, blocks, 16]", blocks.shape));
        };
        let mut weight = self.blocks(blocks, &[experts, rows], count * 32, Format::MxFp4, &[("scales", MX_SCALES)])?;
        if let Encoding::Blocks { codes, .. } = &mut weight.encoding {
            (codes.rows, codes.row_bytes) = (experts * rows, count * 16);
        }
        Ok(weight)
    }

    fn mlx(&self) -> Result<Weight, String> {
        let settings = self.mlx.and_then(|mlx| mlx.of(&self.module.name));
        let Some(settings) = settings else { return Err("has scales, but its entry is false".to_string()) };
        self.mlx_of(settings).map_err(|reason| format!("{settings}: {reason}"))
    }

    fn mlx_of(&self, settings: MlxSettings) -> Result<Weight, String> {
        let has = |parameter: &str| self.module.tensors.contains_key(parameter);
        let misplaced = match settings.mode {
            MlxMode::Affine if !has("biases") => Some("no biases beside affine codes"),
            MlxMode::MxFp4 | MlxMode::MxFp8 | MlxMode::NvFp4 if has("biases") => Some("biases belong to affine codes"),
            MlxMode::Affine | MlxMode::MxFp4 | MlxMode::MxFp8 if has("global_scale") => {
                Some("global_scale belongs to nvfp4")
            }
            _ => None,
        };
        if let Some(misplaced) = misplaced {
            return Err(misplaced.to_string());
        }
        match settings.mode {
            MlxMode::Affine => self.mlx_affine(settings),
            MlxMode::MxFp4 => self.split_blocks(MLX_WORDS, ("scales", MX_SCALES), Format::MxFp4),
            MlxMode::MxFp8 => self.split_blocks(MLX_WORDS, ("scales", MX_SCALES), Format::MxFp8),
            MlxMode::NvFp4 if has("global_scale") => {
                let role = RowFactor::Times(1.0 / MLX_NVFP4_LARGEST);
                self.nvfp4(MLX_WORDS, ("scales", MLX_NV_SCALES), "global_scale", role)
            }
            MlxMode::NvFp4 => self.split_blocks(MLX_WORDS, ("scales", MLX_NV_SCALES), Format::NvFp4),
        }
    }

    fn mlx_affine(&self, settings: MlxSettings) -> Result<Weight, String> {
        let packed = self.take("weight", &[Dtype::U32])?;
        let scale = match self.module.tensors["scales"].dtype {
            Dtype::F16 => ScaleFormat::F16,
            Dtype::BF16 => ScaleFormat::BF16,
            Dtype::F32 => ScaleFormat::F32,
            other => return Err(format!("scales is {other}")),
        };
        let (outer, words) = self.dimensions("weight", packed)?;
        let bits = usize::from(settings.bits);
        if words * 32 % bits != 0 {
            return Err(format!("{words} words don't hold a whole number of {bits}-bit values"));
        }
        let format = Format::Affine { bits: settings.bits, group: settings.group, scale };
        let same = &[self.module.tensors["scales"].dtype][..];
        self.blocks(packed, outer, words * 32 / bits, format, &[("scales", same), ("biases", same)])
    }

    fn packed(&self, packing: Packing) -> Result<Weight, String> {
        let codes = self.take("qweight", WORDS)?;
        let zeros = self.take("qzeros", WORDS)?;
        let scales = self.take("scales", FLOATS)?;
        let [first, second] = codes.shape[..] else {
            return Err(format!("qweight has shape {:?}; a matrix is needed", codes.shape));
        };
        let (inputs, outputs) = match packing {
            Packing::Awq => (first, second * 8),
            _ => (first * 8, second),
        };
        let group = self.group.size.unwrap_or(inputs);
        if inputs % group != 0 || outputs % 8 != 0 {
            return Err(format!("[{outputs}, {inputs}] in groups of {group} is not supported"));
        }
        let groups = inputs / group;
        let grouped = |reason| format!("{reason} (groups of {group} are declared)");
        self.expect("qzeros", zeros, &[groups], outputs / 8).map_err(grouped)?;
        self.expect("scales", scales, &[groups], outputs).map_err(grouped)?;
        if self.group.any_order && !self.module.tensors.contains_key("g_idx") {
            return Err("desc_act is true, but there is no g_idx that tells the order".to_string());
        }
        let tables = (table(codes), Some(table(zeros)), scales);
        self.integers(packing, tables, [outputs, inputs], groups, "g_idx")
    }

    /// `pack-quantized`: rows as they are, with a scale for each group of a row.
    fn compressed_integers(&self) -> Result<Weight, String> {
        let packing = Packing::Compressed { bits: self.group.bits };
        let codes = self.take("weight_packed", WORDS)?;
        let scales = self.take("weight_scale", FLOATS)?;
        let ([outputs, words], [_, groups]) = (&codes.shape[..], &scales.shape[..]) else {
            let (codes, scales) = (&codes.shape, &scales.shape);
            return Err(format!(
                "weight_packed and weight_scale have shapes {codes:?} and {scales:?}; matrices are needed"
            ));
        };
        let (outputs, inputs, groups) = (*outputs, words * packing.word_codes(), *groups);
        self.expect("weight_scale", scales, &[outputs], groups)?;
        if inputs % groups != 0 {
            return Err(format!("{inputs} columns don't divide into {groups} groups"));
        }
        let declared = match (self.group.strategy, self.group.size) {
            (_, Some(size)) => Some(size),
            (Some(Strategy::Channel | Strategy::Tensor), None) => Some(inputs),
            _ => None,
        };
        if let Some(size) = declared.filter(|&size| size != inputs / groups) {
            let found = inputs / groups;
            return Err(format!("weight_scale has a scale for every {found} columns, but one for {size} is declared"));
        }
        let has = |parameter: &str| self.module.tensors.contains_key(parameter);
        let zeros = match (self.group.symmetric, has("weight_zero_point")) {
            (false, true) => {
                let zeros = self.take("weight_zero_point", WORDS)?;
                self.expect("weight_zero_point", zeros, &[outputs.div_ceil(packing.word_codes())], groups)?;
                Some(table(zeros))
            }
            (true, false) => None,
            (false, false) => return Err("symmetric is false, but weight_zero_point is missing".to_string()),
            (true, true) => return Err("symmetric is true, but there is a weight_zero_point".to_string()),
        };
        match (self.group.any_order, has("weight_g_idx")) {
            (true, false) => {
                return Err("actorder declares groups in any order, but weight_g_idx is missing".to_string());
            }
            (false, true) => return Err("there is a weight_g_idx, but actorder does not declare it".to_string()),
            _ => {}
        }
        self.integers(packing, (table(codes), zeros, scales), [outputs, inputs], groups, "weight_g_idx")
    }

    /// Packed integers as affine blocks, or as plain values where neighbouring input features may be of different groups.
    fn integers(
        &self,
        packing: Packing,
        (codes, zeros, scales): (Part, Option<Part>, &StoredTensor),
        [outputs, inputs]: [usize; 2],
        groups: usize,
        index: &str,
    ) -> Result<Weight, String> {
        let group_index = match self.module.tensors.get(index) {
            Some(index) if index.shape[..] == [inputs] && WORDS.contains(&index.dtype) => Some(line(index)),
            Some(found) => return Err(format!("{index} is {} of shape {:?}", found.dtype, found.shape)),
            None => None,
        };
        let stored_shape = match self.module.tensors.get("weight_shape") {
            Some(shape) if shape.shape[..] == [2] && [Dtype::I64, Dtype::I32].contains(&shape.dtype) => {
                Some(line(shape))
            }
            Some(found) => return Err(format!("weight_shape is {} of shape {:?}", found.dtype, found.shape)),
            None => None,
        };
        let group = inputs / groups;
        let format = if self.group.any_order && group_index.is_some() {
            plain_format(scales.dtype)
        } else {
            // A group may span several blocks, which then have the same scale.
            AFFINE_GROUPS.iter().find(|&&block| group.is_multiple_of(block)).map(|&block| Format::Affine {
                bits: if let Packing::Compressed { bits } = packing { bits as u8 } else { 4 },
                group: block as u16,
                scale: ScaleFormat::F32,
            })
        };
        let smallest = AFFINE_GROUPS[2];
        let format =
            format.ok_or_else(|| format!("groups of {group} are not supported; multiples of {smallest} are"))?;
        let packed = PackedIntegers {
            packing,
            codes,
            zeros,
            scales: table(scales),
            scale_convert: float_convert(scales.dtype).ok_or_else(|| "the scales are no floats".to_string())?,
            outputs,
            group,
            groups,
            group_index,
            stored_shape,
            symmetric: self.group.symmetric,
        };
        Ok(self.weight(format, vec![outputs, inputs], Encoding::Packed(packed), None))
    }
}

/// Bits of one value, without its scale.
fn code_bits(format: Format) -> usize {
    if format == Format::MxFp8 { 8 } else { 4 }
}
