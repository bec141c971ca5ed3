//! Reads the part of each weight that a placement holds, and keeps the ledger.
//!
//! An architecture names each weight once, with its shape and partition, while it builds its layers. The loader checks the
//! shape against the headers before anything is read. The same code runs without reading ([`Loader::measuring`]), which is
//! how a planner knows to the byte what a rank will hold.

use std::ops::Range;
use std::slice::from_ref;

use consort_checkpoint::Checkpoint;
use consort_compute::{Backend, Format, Matrix};

use crate::{ModelError, Placement};

/// The granularity at which activations are rounded (`int8` activations share a scale per 32). Features are cut at its
/// multiples where the weights are quantized, so that a plan changes no rounding.
pub const ROUNDING_BLOCK: usize = 32;

/// The granularity at which features are cut where activations are not rounded: 16 bytes of f32 values.
pub const PLAIN_BLOCK: usize = 4;

/// One entry of the ledger: a weight, or the part of it that this rank holds.
#[derive(Clone, Debug, PartialEq)]
pub struct Held {
    /// The weight's name.
    pub name: String,
    /// How it is stored.
    pub format: Format,
    /// Rows (output features) held.
    pub rows: usize,
    /// Columns (input features) held.
    pub columns: usize,
    /// Bytes held, in the stored format.
    pub bytes: u64,
    /// Whether every shard of the stage holds the same.
    pub replicated: bool,
}

/// Loads weights for one rank.
pub struct Loader<'a, B: Backend> {
    /// Where weights go.
    pub backend: &'a B,
    /// Where they come from.
    pub checkpoint: &'a Checkpoint,
    /// Whose part is read.
    pub placement: &'a Placement,
    held: Vec<Held>,
    reads: bool,
    progress: &'a mut dyn FnMut(u64),
}

impl<'a, B: Backend> Loader<'a, B> {
    /// A loader that reads; `progress` is told the bytes of each weight as it arrives.
    pub fn new(
        backend: &'a B,
        checkpoint: &'a Checkpoint,
        placement: &'a Placement,
        progress: &'a mut dyn FnMut(u64),
    ) -> Self {
        Self { backend, checkpoint, placement, held: Vec::new(), reads: true, progress }
    }

    /// A loader that checks names and shapes and fills the ledger, but reads nothing: weights come out empty.
    pub fn measuring(mut self) -> Self {
        self.reads = false;
        self
    }

    /// What was loaded.
    pub fn into_held(self) -> Vec<Held> {
        self.held
    }

    /// Whether the checkpoint has a weight of this name.
    pub fn has(&self, name: &str) -> bool {
        self.checkpoint.tensor(name).is_some()
    }

    /// A weight `[rows, columns]` that every shard holds whole.
    pub fn whole(&mut self, name: &str, [rows, columns]: [usize; 2]) -> Result<B::Weight, ModelError> {
        self.matrix(&[name], [rows, columns], from_ref(&(0..rows)), None)
    }

    /// The output features `part` of a weight `[rows, columns]`.
    pub fn rows(&mut self, name: &str, shape: [usize; 2], part: &Range<usize>) -> Result<B::Weight, ModelError> {
        self.matrix(&[name], shape, from_ref(part), None)
    }

    /// The input features `part` of a weight `[rows, columns]`: the products of all shards add up to the whole.
    pub fn columns(&mut self, name: &str, shape: [usize; 2], part: &Range<usize>) -> Result<B::Weight, ModelError> {
        self.matrix(&[name], shape, from_ref(&(0..shape[0])), Some(from_ref(part)))
    }

    /// The general form: `names` are stacked along their rows into `[rows, columns]`, of which the row ranges `rows`, in
    /// order, and the column ranges `columns`, in order, are held.
    pub fn matrix(
        &mut self,
        names: &[&str],
        shape: [usize; 2],
        rows: &[Range<usize>],
        columns: Option<&[Range<usize>]>,
    ) -> Result<B::Weight, ModelError> {
        let matrix = self.read(names, shape, rows, columns)?;
        Ok(self.backend.weight(matrix))
    }

    /// Two weights whose rows take turns in one: the even and the odd rows of the ranges `rows`, which begin and end at even
    /// rows. Read in one piece and sorted in memory, because single rows are too small to be read one by one.
    pub fn interleaved(
        &mut self,
        name: &str,
        shape: [usize; 2],
        rows: &[Range<usize>],
    ) -> Result<[B::Weight; 2], ModelError> {
        let matrix = self.read(&[name], shape, rows, None)?;
        let every_second = |first: usize| {
            let picked = (first..matrix.rows).step_by(2);
            let data: Vec<u8> = picked.clone().flat_map(|row| matrix.row(row)).copied().collect();
            let half = Matrix::new(matrix.format, picked.len(), matrix.cols, data);
            match &matrix.row_scale {
                Some(scales) => half.with_row_scale(picked.map(|row| scales[row]).collect()),
                None => half,
            }
        };
        Ok([self.backend.weight(every_second(0)), self.backend.weight(every_second(1))])
    }

    /// Checks the shape, enters the part in the ledger and reads it; without reading, a matrix of no rows.
    fn read(
        &mut self,
        names: &[&str],
        shape: [usize; 2],
        rows: &[Range<usize>],
        columns: Option<&[Range<usize>]>,
    ) -> Result<Matrix<'a>, ModelError> {
        let checkpoint = self.checkpoint;
        let mut found_rows = 0;
        let mut format = None;
        for name in names {
            let info = checkpoint.tensor(name).ok_or_else(|| ModelError::MissingWeight { name: name.to_string() })?;
            let found_columns = info.shape.last().copied().unwrap_or(1);
            found_rows += info.shape.iter().rev().skip(1).product::<usize>();
            format = Some(info.format);
            if found_columns != shape[1] {
                return Err(wrong_shape(name, &info.shape, &shape));
            }
        }
        let name = names.first().copied().unwrap_or_default();
        if found_rows != shape[0] {
            return Err(wrong_shape(name, &[found_rows, shape[1]], &shape));
        }
        let format = format.ok_or_else(|| ModelError::MissingWeight { name: "(no name)".to_string() })?;

        let held_rows: usize = rows.iter().map(|r| r.len()).sum();
        let held_columns = columns.map_or(shape[1], |columns| columns.iter().map(Range::len).sum());
        self.held.push(Held {
            name: name.to_string(),
            format,
            rows: held_rows,
            columns: held_columns,
            bytes: held_rows as u64 * format.row_bytes(held_columns) as u64,
            replicated: held_rows == shape[0] && held_columns == shape[1],
        });
        if !self.reads {
            return Ok(Matrix::new(format, 0, held_columns, Vec::new()));
        }
        let matrix = checkpoint.read(names, rows, columns)?;
        (self.progress)(matrix.bytes() as u64);
        Ok(matrix)
    }

    /// A vector of `length` values that every shard holds whole: a norm's gain, say.
    pub fn vector(&mut self, name: &str, length: usize) -> Result<B::Buffer, ModelError> {
        self.vector_map(name, length, &(0..length), |v| v)
    }

    /// The values `part` of a vector of `length` values, each mapped: gains that are stored as an offset from one.
    pub fn vector_map(
        &mut self,
        name: &str,
        length: usize,
        part: &Range<usize>,
        map: impl Fn(f32) -> f32,
    ) -> Result<B::Buffer, ModelError> {
        self.vector_of(name, length, from_ref(part), map)
    }

    /// The same of several parts, in order.
    pub fn vector_of(
        &mut self,
        name: &str,
        length: usize,
        parts: &[Range<usize>],
        map: impl Fn(f32) -> f32,
    ) -> Result<B::Buffer, ModelError> {
        let values: Vec<f32> = self.values_of(name, length, parts)?.into_iter().map(map).collect();
        Ok(self.backend.vector(&values))
    }

    /// The values `parts`, in order, of a vector or table of `length` values, as a table of `rows` rows: the biases of
    /// several heads or experts.
    pub fn table(
        &mut self,
        name: &str,
        length: usize,
        parts: &[Range<usize>],
        rows: usize,
    ) -> Result<B::Buffer, ModelError> {
        let values = self.values_of(name, length, parts)?;
        let mut table = self.backend.buffer(values.len());
        self.backend.upload(&mut table, rows, values.len() / rows.max(1), &values);
        Ok(table)
    }

    /// The values of a vector themselves, for an architecture that makes something else of them.
    pub fn values(&mut self, name: &str, length: usize) -> Result<Vec<f32>, ModelError> {
        self.values_of(name, length, from_ref(&(0..length)))
    }

    fn values_of(&mut self, name: &str, length: usize, parts: &[Range<usize>]) -> Result<Vec<f32>, ModelError> {
        let info = self.checkpoint.tensor(name).ok_or_else(|| ModelError::MissingWeight { name: name.to_string() })?;
        if info.shape.iter().product::<usize>() != length {
            return Err(wrong_shape(name, &info.shape, &[length]));
        }
        let held: usize = parts.iter().map(|part| part.len()).sum();
        self.held.push(Held {
            name: name.to_string(),
            format: Format::F32,
            rows: 1,
            columns: held,
            bytes: held as u64 * 4,
            replicated: held == length,
        });
        if !self.reads {
            return Ok(vec![0.0; held]);
        }
        let values = self.checkpoint.read_f32(name)?;
        (self.progress)(held as u64 * 4);
        Ok(parts.iter().flat_map(|part| &values[part.clone()]).copied().collect())
    }

    /// The smallest run of columns that cuts neither a quantization block of the named weights nor a block of activation
    /// rounding: activations are rounded for quantized weights only.
    pub fn column_unit(&self, names: impl IntoIterator<Item = String>) -> usize {
        let formats = names.into_iter().filter_map(|name| Some(self.checkpoint.tensor(&name)?.format));
        formats.fold(PLAIN_BLOCK, |unit, format| match format {
            Format::F32 | Format::F16 | Format::BF16 => unit,
            quantized => lcm(unit, lcm(quantized.block_values(), ROUNDING_BLOCK)),
        })
    }

    /// The error of a plan that this model cannot be divided by.
    pub fn does_not_fit(&self, reason: String) -> ModelError {
        let Placement { stages, shares, .. } = self.placement;
        ModelError::PlanDoesNotFit { plan: format!("pipeline:{stages},tensor:{}", shares.len()), reason }
    }
}

fn wrong_shape(name: &str, found: &[usize], expected: &[usize]) -> ModelError {
    ModelError::WeightShape { name: name.to_string(), found: found.to_vec(), expected: expected.to_vec() }
}

fn lcm(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
}
