//! Reads the part of each weight that a placement holds, and keeps the ledger.
//!
//! An architecture names each weight once, with its shape and partition, while it builds its layers. The loader checks the
//! shape against the headers before anything is read. The same code runs without reading ([`Loader::measuring`]), which is
//! how a planner knows to the byte what a rank will hold.

use std::ops::Range;
use std::slice::from_ref;

use consort_checkpoint::{Checkpoint, excerpt};
use consort_compute::{Backend, Format, Matrix};

use crate::read_ahead::{Read, ReadAhead};
use crate::repacked::{RepackedCache, RepackedWeights, Restored};
use crate::{Config, ModelError, Placement};

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
    /// Whether there are several shards in the stage and all of them hold the same.
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
    work: Work<'a>,
}

/// What a loader does with the weights that are asked for.
enum Work<'a> {
    /// Notes them down.
    Measure(Vec<Read>),
    /// Takes them as they are read.
    Load(Source<'a>),
}

/// Where weights come from.
pub(crate) struct Source<'a> {
    pub ahead: &'a ReadAhead<'a>,
    pub repacked: Option<RepackedWeights<'a>>,
    pub hooks: LoadHooks<'a>,
}

/// How loading is watched, and what it may use.
pub struct LoadHooks<'a> {
    /// Is told the bytes of weights as they arrive, in their stored formats.
    pub progress: &'a mut dyn FnMut(u64),
    /// Is told of what went wrong without harm.
    pub warn: &'a mut dyn FnMut(String),
    /// Weights that earlier runs repacked.
    pub repacked: Option<&'a RepackedCache>,
}

impl<'a, B: Backend> Loader<'a, B> {
    /// A loader that takes weights from `source`.
    pub(crate) fn new(
        backend: &'a B,
        checkpoint: &'a Checkpoint,
        placement: &'a Placement,
        source: Source<'a>,
    ) -> Self {
        Self { backend, checkpoint, placement, held: Vec::new(), work: Work::Load(source) }
    }

    /// A loader that checks names and shapes, fills the ledger and notes what it would read: weights come out empty.
    pub(crate) fn measuring(backend: &'a B, checkpoint: &'a Checkpoint, placement: &'a Placement) -> Self {
        Self { backend, checkpoint, placement, held: Vec::new(), work: Work::Measure(Vec::new()) }
    }

    /// What was measured: the ledger, and what is read for it, in order.
    pub(crate) fn into_measure(self) -> (Vec<Held>, Vec<Read>) {
        match self.work {
            Work::Measure(reads) => (self.held, reads),
            Work::Load(_) => (self.held, Vec::new()),
        }
    }

    /// Says what was wrong with weights that earlier runs repacked.
    pub(crate) fn report(&mut self) {
        if let Work::Load(Source { repacked: Some(repacked), hooks, .. }) = &mut self.work {
            repacked.report(hooks.warn);
        }
    }

    /// What was loaded.
    pub fn into_held(self) -> Vec<Held> {
        self.held
    }

    /// Whether the checkpoint has a weight of this name.
    pub fn has(&self, name: &str) -> bool {
        self.checkpoint.tensor(name).is_some()
    }

    /// Checks that the linear layer `name` has no bias: quantizers to GPTQ wrote one of `length` zeros for every layer. One that is
    /// not zero belongs to another model than the config describes.
    pub(crate) fn check_no_bias(&mut self, name: &str, length: usize) -> Result<(), ModelError> {
        let bias = format!("{name}.bias");
        if !self.has(&bias) || !self.checkpoint.is_gptq(&format!("{name}.weight")) {
            return Ok(());
        }
        let values = self.values(&bias, length)?;
        // Nothing of it is held.
        self.held.pop();
        match values.iter().all(|value| *value == 0.0) {
            true => Ok(()),
            false => {
                let reason = "is not zero, and a model with these settings has no such bias".to_string();
                Err(ModelError::UnusedWeight { name: self.checkpoint.stored_name(&bias), reason })
            }
        }
    }

    /// Refuses a number of the config, before anything is made in that number, unless the first of the weights `names` that the
    /// checkpoint has is as long as follows from it: its shape should be `shape`.
    pub(crate) fn confirm(
        &self,
        config: &Config<'_>,
        key: &str,
        names: impl IntoIterator<Item = String>,
        shape: &[usize],
    ) -> Result<(), ModelError> {
        let mut names = names.into_iter().peekable();
        let first = names.peek().cloned().unwrap_or_default();
        let Some(info) = names.find_map(|name| self.checkpoint.tensor(&name)) else { return Err(self.missing(&first)) };
        // The number stands in the first dimension; what else differs is not about it.
        if info.shape.first() == shape.first() {
            return Ok(());
        }
        let [found, expected] = [&info.shape, shape].map(|shape| self.checkpoint.stored_shape(&info.name, shape));
        let value = config.get(key).map_or_else(|| "(absent)".into(), |value| excerpt(&value.to_string()).into_owned());
        let name = self.checkpoint.stored_name(&info.name);
        Err(ModelError::Contradicts { key: config.place(key), value, name, found, expected })
    }

    /// Which of several published layouts a weight has: the first where it has none of them.
    pub(crate) fn layout<'l>(&self, name: &str, layouts: &'l [Vec<usize>]) -> &'l [usize] {
        let has = |layout: &&Vec<usize>| self.checkpoint.tensor(name).is_some_and(|info| info.shape == **layout);
        layouts.iter().find(has).unwrap_or(&layouts[0])
    }

    /// A weight `[rows, columns]` that every shard holds whole.
    pub fn whole(&mut self, name: &str, shape: [usize; 2]) -> Result<B::Weight, ModelError> {
        self.matrix(&[name], &shape, from_ref(&(0..shape[0])), None)
    }

    /// The output features `part` of a weight `[rows, columns]`.
    pub fn rows(&mut self, name: &str, shape: [usize; 2], part: &Range<usize>) -> Result<B::Weight, ModelError> {
        self.matrix(&[name], &shape, from_ref(part), None)
    }

    /// The input features `part` of a weight `[rows, columns]`: the products of all shards add up to the whole.
    pub fn columns(&mut self, name: &str, shape: [usize; 2], part: &Range<usize>) -> Result<B::Weight, ModelError> {
        self.matrix(&[name], &shape, from_ref(&(0..shape[0])), Some(from_ref(part)))
    }

    /// The general form: `names`, each of this shape, are stacked along their rows, all dimensions but the last. Of the stack the
    /// row ranges `rows`, in order, and the column ranges `columns`, in order, are held.
    pub fn matrix(
        &mut self,
        names: &[&str],
        shape: &[usize],
        rows: &[Range<usize>],
        columns: Option<&[Range<usize>]>,
    ) -> Result<B::Weight, ModelError> {
        let [weight] = self.weights(names, shape, rows, columns, |piece| [piece])?;
        Ok(weight)
    }

    /// Two weights whose rows take turns in one: the even and the odd rows of the ranges `rows`, which begin and end at even
    /// rows. Read in one piece and sorted in memory, because single rows are too small to be read one by one.
    pub fn interleaved(
        &mut self,
        name: &str,
        shape: &[usize],
        rows: &[Range<usize>],
    ) -> Result<[B::Weight; 2], ModelError> {
        self.weights(&[name], shape, rows, None, |piece| {
            [0, 1].map(|first| {
                let picked = (first..piece.rows).step_by(2);
                let data: Vec<u8> = picked.clone().flat_map(|row| piece.row(row)).copied().collect();
                let half = Matrix::new(piece.format, picked.len(), piece.cols, data);
                match &piece.row_scale {
                    Some(scales) => half.with_row_scale(picked.map(|row| scales[row]).collect()),
                    None => half,
                }
            })
        })
    }

    /// Checks the shape, enters the part in the ledger, and fills `COUNT` equally large weights with it, into which `divide`
    /// divides each piece; without reading, weights of no rows.
    fn weights<const COUNT: usize>(
        &mut self,
        names: &[&str],
        shape: &[usize],
        rows: &[Range<usize>],
        columns: Option<&[Range<usize>]>,
        divide: impl Fn(Matrix<'static>) -> [Matrix<'static>; COUNT],
    ) -> Result<[B::Weight; COUNT], ModelError> {
        let format = self.check(names, shape)?;
        let (&all_columns, outer) = shape.split_last().expect("a weight has columns");
        let all_rows = names.len() * outer.iter().product::<usize>();
        let held_rows: usize = rows.iter().map(|r| r.len()).sum();
        let held_columns = columns.map_or(all_columns, |ranges| ranges.iter().map(|c| c.len()).sum());
        let row_bytes = format.row_bytes(held_columns);
        self.held.push(Held {
            name: names[0].to_string(),
            format,
            rows: held_rows,
            columns: held_columns,
            bytes: held_rows as u64 * row_bytes as u64,
            replicated: self.placement.shards() > 1 && held_rows == all_rows && held_columns == all_columns,
        });
        let read = Read::Matrix {
            names: names.iter().map(|name| name.to_string()).collect(),
            rows: rows.to_vec(),
            columns: columns.map(<[_]>::to_vec),
            row_bytes,
            weights: COUNT,
        };
        let empty = |rows: usize| std::array::from_fn(|_| self.backend.empty_weight(format, rows, held_columns));
        let source = match &mut self.work {
            Work::Measure(reads) => {
                reads.push(read);
                return Ok(empty(0));
            }
            Work::Load(source) => source,
        };
        let mut weights: [B::Weight; COUNT] = empty(held_rows / COUNT);
        let Source { ahead, repacked, hooks } = source;
        let restored = match repacked {
            Some(repacked) => repacked.restore(self.backend, &mut weights),
            None => Restored::Absent,
        };
        if let Restored::Complete = restored {
            (hooks.progress)(held_rows as u64 * row_bytes as u64);
            return Ok(weights);
        }
        if let Restored::Damaged = restored {
            weights = empty(held_rows / COUNT);
        }
        let mut filled = 0;
        let mut fill = |piece: Matrix<'static>| {
            let rows = piece.rows;
            (hooks.progress)(piece.bytes() as u64);
            for (weight, part) in weights.iter_mut().zip(divide(piece)) {
                self.backend.fill_weight(weight, filled / COUNT, &part);
            }
            filled += rows;
            filled
        };
        match restored {
            // Nobody reads ahead what the cache was to give.
            Restored::Damaged => ahead.read_now(&read, |piece| _ = fill(piece))?,
            _ => while held_rows > 0 && fill(ahead.take_rows(&read)?) < held_rows {},
        }
        if let Some(repacked) = repacked {
            repacked.store(self.backend, &read, &mut weights, hooks.warn);
        }
        Ok(weights)
    }

    /// Checks that the named weights are of this shape and one format; gives the format.
    fn check(&self, names: &[&str], shape: &[usize]) -> Result<Format, ModelError> {
        names.iter().try_for_each(|name| self.check_shape(name, shape))?;
        Ok(self.checkpoint.common_format(names)?)
    }

    /// Checks that a weight is there and has this shape, dimension by dimension.
    fn check_shape(&self, name: &str, shape: &[usize]) -> Result<(), ModelError> {
        let info = self.checkpoint.tensor(name).ok_or_else(|| self.missing(name))?;
        if info.shape == shape {
            return Ok(());
        }
        let [found, expected] = [&info.shape, shape].map(|shape| self.checkpoint.stored_shape(name, shape));
        Err(ModelError::WeightShape { name: self.checkpoint.stored_name(name), found, expected })
    }

    fn missing(&self, name: &str) -> ModelError {
        ModelError::MissingWeight { name: self.checkpoint.stored_name(name) }
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
        let values: Vec<f32> = self.values_of(name, &[length], parts)?.into_iter().map(map).collect();
        Ok(self.backend.vector(&values))
    }

    /// The values `parts`, in order, of a vector or table of this shape, as a table of `rows` rows: the biases of several heads
    /// or experts.
    pub fn table(
        &mut self,
        name: &str,
        shape: &[usize],
        parts: &[Range<usize>],
        rows: usize,
    ) -> Result<B::Buffer, ModelError> {
        let values = self.values_of(name, shape, parts)?;
        let mut table = self.backend.buffer(values.len());
        self.backend.upload(&mut table, rows, values.len() / rows.max(1), &values);
        Ok(table)
    }

    /// The values of a vector themselves, for an architecture that makes something else of them.
    pub fn values(&mut self, name: &str, length: usize) -> Result<Vec<f32>, ModelError> {
        self.values_of(name, &[length], from_ref(&(0..length)))
    }

    fn values_of(&mut self, name: &str, shape: &[usize], parts: &[Range<usize>]) -> Result<Vec<f32>, ModelError> {
        self.check_shape(name, shape)?;
        let length = shape.iter().product();
        let held: usize = parts.iter().map(|part| part.len()).sum();
        self.held.push(Held {
            name: name.to_string(),
            format: Format::F32,
            rows: 1,
            columns: held,
            bytes: held as u64 * 4,
            replicated: self.placement.shards() > 1 && held == length,
        });
        let read = Read::Values { name: name.to_string(), count: length };
        let source = match &mut self.work {
            Work::Measure(reads) => {
                reads.push(read);
                return Ok(vec![0.0; held]);
            }
            Work::Load(source) => source,
        };
        let values = source.ahead.take_values(&read)?;
        (source.hooks.progress)(held as u64 * 4);
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

fn lcm(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
}
