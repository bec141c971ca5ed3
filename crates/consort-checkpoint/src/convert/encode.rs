//! From the values of some rows to the bytes of the tensors that hold them.
//!
//! A [`Format`] keeps the scales of a block beside its codes; files keep each in a tensor of its own. This is the inverse
//! of what the reader does with the same spellings.

use consort_compute::{Format, Matrix, ScaleFormat};

use crate::safetensors::Dtype;

/// Rows and columns that share an FP8 scale.
pub(super) const TILE: usize = 128;

/// How a weight is stored in the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stored {
    /// Blocks along the rows, taken apart into codes, scales and biases.
    Blocks(Format),
    /// E4M3 values with an f32 scale for each tile of 128×128.
    Fp8Tiles,
}

/// A tensor of the output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TensorSpec {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// Bytes of its data.
    pub fn bytes(&self) -> u64 {
        self.shape.iter().map(|&size| size as u64).product::<u64>() * self.dtype.bytes() as u64
    }
}

impl Stored {
    /// The format's name, as [`Format`] displays it.
    pub fn name(self) -> String {
        match self {
            Self::Blocks(format) => format.to_string(),
            Self::Fp8Tiles => format!("{}_{TILE}x{TILE}", Format::F8E4M3),
        }
    }

    /// Why a matrix cannot be stored like this, if it cannot.
    pub fn refuses(self, rows: usize, cols: usize) -> Option<String> {
        match self {
            Self::Blocks(format) if !cols.is_multiple_of(format.block_values()) => {
                Some(format!("{cols} columns are no multiple of {}", format.block_values()))
            }
            // transformers takes the size of a tile from the number of tiles, which a ragged last one would falsify.
            Self::Fp8Tiles => [rows, cols]
                .into_iter()
                .find(|&size| size > TILE && !size.is_multiple_of(TILE))
                .map(|size| format!("a side of {size} is no multiple of {TILE}")),
            Self::Blocks(_) => None,
        }
    }

    /// The tensors of a weight called `name` of this shape.
    pub fn tensors(self, name: &str, shape: &[usize]) -> Vec<TensorSpec> {
        let (outer, cols) = match shape.split_last() {
            Some((&cols, outer)) => (outer, cols),
            None => (shape, 1),
        };
        let module = name.strip_suffix("weight").unwrap_or(name);
        let tensor = |part: &str, dtype, cols| {
            let shape = outer.iter().copied().chain([cols]).collect();
            TensorSpec { name: format!("{module}{part}"), dtype, shape }
        };
        match self {
            Self::Blocks(Format::BF16) => {
                vec![TensorSpec { name: name.into(), dtype: Dtype::BF16, shape: shape.to_vec() }]
            }
            Self::Blocks(format) => {
                let block = format.block_values();
                let words = cols / block * code_bytes(format) / Dtype::U32.bytes();
                let mut tensors = vec![tensor("weight", Dtype::U32, words)];
                let dtype = if scale_parts(format) == [1] { Dtype::U8 } else { Dtype::BF16 };
                let names = ["scales", "biases"].into_iter().take(scale_parts(format).len());
                tensors.extend(names.map(|name| tensor(name, dtype, cols / block)));
                tensors
            }
            Self::Fp8Tiles => {
                let rows = outer.iter().product::<usize>().div_ceil(TILE);
                let shape = vec![rows, cols.div_ceil(TILE)];
                vec![
                    tensor("weight", Dtype::F8E4M3, cols),
                    TensorSpec { name: format!("{module}weight_scale_inv"), dtype: Dtype::F32, shape },
                ]
            }
        }
    }

    /// The bytes of `matrix` for each of [`Stored::tensors`], in order.
    ///
    /// # Errors
    /// A value that the format would hide.
    pub fn encode(self, matrix: &Matrix<'_>) -> Result<Encoded, Hidden> {
        match self {
            Self::Blocks(format) => encode_blocks(format, matrix),
            Self::Fp8Tiles => encode_tiles(matrix),
        }
    }
}

/// Bytes of each scale or bias that stands before the codes of a block.
fn scale_parts(format: Format) -> &'static [usize] {
    match format {
        Format::MxFp8 | Format::MxFp4 | Format::NvFp4 => &[1],
        Format::Affine { scale: ScaleFormat::F32, .. } => &[4, 4],
        Format::Affine { .. } => &[2, 2],
        _ => &[],
    }
}

fn code_bytes(format: Format) -> usize {
    format.block_bytes() - scale_parts(format).iter().sum::<usize>()
}

/// Some rows, encoded.
pub(super) struct Encoded {
    /// Bytes of these rows in each tensor.
    pub parts: Vec<Vec<u8>>,
    pub error: SquaredError,
}

/// A value that is not finite, or would become so, where the format cannot say it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hidden {
    pub row: usize,
    pub col: usize,
    /// The value of the source.
    pub value: f32,
}

impl Hidden {
    /// Looks for a value that is not finite: beside others under one scale it would spoil them, or pass for a number.
    fn check_source(row: usize, values: &[f32]) -> Result<(), Self> {
        match values.iter().position(|value| !value.is_finite()) {
            Some(col) => Err(Self { row, col, value: values[col] }),
            None => Ok(()),
        }
    }

    /// Looks for a value that was finite and is not, or the other way round.
    fn check_stored(row: usize, source: &[f32], stored: &[f32]) -> Result<(), Self> {
        let is_kept = |source: f32, stored: f32| match source.is_finite() {
            true => stored.is_finite(),
            false => source == stored || source.is_nan() && stored.is_nan(),
        };
        match source.iter().zip(stored).position(|(&source, &stored)| !is_kept(source, stored)) {
            Some(col) => Err(Self { row, col, value: source[col] }),
            None => Ok(()),
        }
    }
}

/// How far encoded values are from the values that they stand for.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SquaredError {
    difference: f64,
    source: f64,
}

impl SquaredError {
    fn add_row(&mut self, source: &[f32], stored: &[f32]) {
        for (&source, &stored) in source.iter().zip(stored) {
            self.difference += (f64::from(source) - f64::from(stored)).powi(2);
            self.source += f64::from(source).powi(2);
        }
    }

    pub fn add(&mut self, other: Self) {
        self.difference += other.difference;
        self.source += other.source;
    }

    /// Root of the mean square of the differences, relative to that of the source; 0 where both are 0.
    pub fn relative_rms(self) -> f64 {
        if self.difference == 0.0 { 0.0 } else { (self.difference / self.source).sqrt() }
    }
}

fn encode_blocks(format: Format, matrix: &Matrix<'_>) -> Result<Encoded, Hidden> {
    let scales = scale_parts(format);
    let mut parts = vec![Vec::new(); 1 + scales.len()];
    let mut error = SquaredError::default();
    let (mut source, mut decoded) = (vec![0.0; matrix.cols], vec![0.0; matrix.cols]);
    let mut row_bytes = vec![0; format.row_bytes(matrix.cols)];
    for row in 0..matrix.rows {
        matrix.decode_row(row, &mut source);
        if format.block_values() > 1 {
            Hidden::check_source(row, &source)?;
        }
        format.encode_row(&source, &mut row_bytes);
        format.decode_row(&row_bytes, &mut decoded);
        Hidden::check_stored(row, &source, &decoded)?;
        error.add_row(&source, &decoded);
        if scales.is_empty() {
            parts[0].extend_from_slice(&row_bytes);
            continue;
        }
        for mut block in row_bytes.chunks_exact(format.block_bytes()) {
            for (part, &bytes) in parts[1..].iter_mut().zip(scales) {
                let (scale, rest) = block.split_at(bytes);
                part.extend_from_slice(scale);
                block = rest;
            }
            parts[0].extend_from_slice(block);
        }
    }
    Ok(Encoded { parts, error })
}

/// The largest magnitude of a tile becomes the largest E4M3 number.
fn encode_tiles(matrix: &Matrix<'_>) -> Result<Encoded, Hidden> {
    const LARGEST: f32 = 448.0;
    let cols = matrix.cols;
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    let mut error = SquaredError::default();
    for first in (0..matrix.rows).step_by(TILE) {
        let rows = first..matrix.rows.min(first + TILE);
        let mut values = vec![0.0; rows.len() * cols];
        let mut tile_scales = vec![0.0f32; cols.div_ceil(TILE)];
        for (row, values) in rows.zip(values.chunks_exact_mut(cols)) {
            matrix.decode_row(row, values);
            Hidden::check_source(row, values)?;
            for (scale, run) in tile_scales.iter_mut().zip(values.chunks(TILE)) {
                *scale = run.iter().fold(*scale, |largest, x| largest.max(x.abs()));
            }
        }
        // Anything divides values that are all zero.
        tile_scales.iter_mut().for_each(|scale| *scale = if *scale == 0.0 { 1.0 } else { *scale / LARGEST });
        let (mut row_codes, mut decoded) = (vec![0; cols], vec![0.0; cols]);
        for (row, source) in (first..).zip(values.chunks_exact(cols)) {
            let scaled = |values: &mut [f32], factor: fn(f32, f32) -> f32| {
                for (run, &scale) in values.chunks_mut(TILE).zip(&tile_scales) {
                    run.iter_mut().for_each(|x| *x = factor(*x, scale));
                }
            };
            decoded.copy_from_slice(source);
            scaled(&mut decoded, |x, scale| x / scale);
            Format::F8E4M3.encode_row(&decoded, &mut row_codes);
            Format::F8E4M3.decode_row(&row_codes, &mut decoded);
            scaled(&mut decoded, |x, scale| x * scale);
            Hidden::check_stored(row, source, &decoded)?;
            error.add_row(source, &decoded);
            codes.extend_from_slice(&row_codes);
        }
        scales.extend(tile_scales.into_iter().flat_map(f32::to_le_bytes));
    }
    Ok(Encoded { parts: vec![codes, scales], error })
}
