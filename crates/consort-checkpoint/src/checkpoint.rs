//! An opened model: its configuration, its weights by canonical name, and reads of any part of them.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use consort_compute::{Format, Matrix};
use serde_json::Value as Json;

use crate::CheckpointError;
use crate::error::excerpt;
use crate::gguf::{self, Gguf, TensorType};
use crate::huggingface::Directory;
use crate::manifest::Manifest;
use crate::packed::Packing;
use crate::quantization;
use crate::source::{LocalFiles, Source};
use crate::weight::{self, Convert, Encoding, Part, RowFactor, RowScale, Weight};

/// The output projection, and the embedding that stands in for it where the two are tied.
const HEAD: &str = "lm_head.weight";
const EMBEDDING: &str = "model.embed_tokens.weight";

/// Endings of files that hold weights, also of kinds that are refused.
const WEIGHTS: [&str; 5] = [".safetensors", ".gguf", ".bin", ".pt", ".pth"];

/// Endings of files that are a model only together with others in their directory.
const PARTS: [&str; 2] = [".json", ".safetensors"];

/// Whether there are weights at `path`: a file, or a directory with at least one file of them. What else may lie in a directory
/// (a README, a configuration without weights) makes no model.
pub fn holds_weights(path: &Path) -> bool {
    let is_weights = |name: &str| WEIGHTS.iter().any(|ending| name.ends_with(ending));
    match path.read_dir() {
        Ok(mut entries) => {
            entries.any(|entry| entry.is_ok_and(|entry| is_weights(&entry.file_name().to_string_lossy())))
        }
        Err(_) => path.exists(),
    }
}

/// A model's weights and configuration on disk, opened but not read.
pub struct Checkpoint {
    source: Box<dyn Source>,
    config: Json,
    tensors: Vec<TensorInfo>,
    weights: HashMap<String, Weight>,
    skipped: Vec<String>,
    manifest: Manifest,
    gguf: Option<Gguf>,
}

/// What a tensor of a file is to a language model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TensorName {
    /// A weight of this canonical name.
    Weight(String),
    /// Nothing that is read as a weight: part of a tower, or what has become part of the configuration.
    PassedOver,
    /// Nothing that the writers of such files write.
    Unknown,
}

/// What the headers say about one weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Canonical name: Hugging Face's, without wrapper prefixes: `model.layers.0.self_attn.q_proj.weight`.
    pub name: String,
    /// What the files call it, or the largest of the tensors that it is stored in.
    pub stored_name: String,
    /// How its values are stored.
    pub format: Format,
    /// Shape, outermost first; the last dimension runs along a row. Leading dimensions are stacked rows.
    pub shape: Vec<usize>,
    /// Bytes on disk, scales included.
    pub bytes: u64,
}

impl Checkpoint {
    /// Opens a GGUF file (any part of a split one), or a directory with `config.json` and safetensors. Reads headers only.
    ///
    /// # Errors
    /// See [`CheckpointError`]: every header is checked against its file before this returns.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        // A pipe or a device would be waited for without end.
        if path.exists() && !path.is_dir() && !path.is_file() {
            let remedy = "name a GGUF file or a directory".to_string();
            let found = "a pipe or a device".to_string();
            return Err(CheckpointError::NotTheFile { path: path.display().to_string(), found, remedy });
        }
        if path.is_file() && PARTS.iter().any(|ending| path.to_string_lossy().ends_with(ending)) {
            let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
            let reason = format!("is one file of a model; name the directory, {}", directory.display());
            return Err(CheckpointError::malformed(path.display(), reason));
        }
        if !path.is_dir() {
            return Self::open_gguf(Box::new(gguf::open_parts(path)?));
        }
        let directory = LocalFiles::directory(path)?;
        let gguf = directory.files().iter().find(|file| file.name.ends_with(".gguf"));
        match gguf {
            Some(first) if directory.find("config.json").is_none() => {
                let parts = gguf::open_parts(&path.join(&first.name))?;
                let others = directory.files().iter().filter(|file| file.name.ends_with(".gguf")).count();
                if others != parts.files().len() {
                    let reason = format!("holds {others} GGUF files of several models; name one of them");
                    return Err(CheckpointError::malformed(path.display(), reason));
                }
                Self::open_gguf(Box::new(parts))
            }
            _ => Self::open_directory(Box::new(directory)),
        }
    }

    /// Opens files that lie anywhere: GGUF files where there is no `config.json`.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub fn open_source(source: Box<dyn Source>) -> Result<Self, CheckpointError> {
        let is_gguf = source.files().iter().any(|file| file.name.ends_with(".gguf"));
        match source.find("config.json") {
            None if is_gguf => Self::open_gguf(source),
            _ => Self::open_directory(source),
        }
    }

    /// Opens the files of a Hugging Face directory.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub fn open_directory(source: Box<dyn Source>) -> Result<Self, CheckpointError> {
        let Directory { mut config, quantization, tensors, mut skipped, header_bytes, config_path: path } =
            Directory::read(source.as_ref())?;
        let weights = quantization::resolve(&config, quantization.as_ref(), tensors, source.as_ref())?;
        skipped.extend(weights.ignored);
        let mut weights = weights.weights;
        let has = |name: &str| weights.iter().any(|weight| weight.info.name == name);
        let (head, embedding) = (has(HEAD), has(EMBEDDING));
        // Families have different defaults for a missing key; what is in the files decides.
        let tied = match config.get("tie_word_embeddings").filter(|tied| !tied.is_null()) {
            Some(Json::Bool(tied)) => *tied,
            Some(other) => {
                let reason = format!("is {}, neither true nor false", excerpt(&other.to_string()));
                return Err(CheckpointError::config(&path, "tie_word_embeddings", reason));
            }
            None => !head,
        };
        let said = config.get("tie_word_embeddings").is_some_and(|tied| !tied.is_null());
        if let (false, false, Some(other)) = (said, head, head_by_another_name(&weights)) {
            let reason = format!("is missing, and so is {HEAD}, but {other} has its shape; say what is meant");
            return Err(CheckpointError::config(&path, "tie_word_embeddings", reason));
        }
        config.insert("tie_word_embeddings".into(), tied.into());
        if embedding && !head && !tied {
            let reason = format!("is false, but there is no {HEAD}");
            return Err(CheckpointError::config(&path, "tie_word_embeddings", reason));
        }
        if tied && embedding && head {
            weights.retain(|weight| weight.info.name != HEAD);
            skipped.push(HEAD.into());
        }
        let manifest = Manifest::of(source.as_ref(), |file| header_bytes.get(&file).copied())?;
        Ok(Self::new(source, Json::Object(config), weights, skipped, manifest, None))
    }

    /// Opens the parts of a GGUF model, in order.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub fn open_gguf(source: Box<dyn Source>) -> Result<Self, CheckpointError> {
        let gguf = Gguf::read(source.as_ref())?;
        let path = source.display(0);
        let factors = match gguf.tensors().iter().find(|tensor| tensor.name == gguf::config::ROPE_FACTORS) {
            Some(tensor) => {
                let range = tensor.offset..tensor.offset + tensor.bytes;
                let bytes = source.read(tensor.file, &[range])?;
                let values = weight::plain_to_f32(tensor.tensor_type.format(), &bytes);
                Some(values.ok_or_else(|| CheckpointError::tensor(&path, &tensor.name, "is not plain numbers"))?)
            }
            None => None,
        };
        let translated = gguf::config::translate(&gguf, factors.as_deref(), &path)?;
        let mut weights: Vec<Weight> = Vec::new();
        let mut scales = HashMap::new();
        let mut skipped = Vec::new();
        let mut origin: HashMap<String, &str> = HashMap::new();
        for (tensor, name) in gguf.tensors().iter().zip(translated.names) {
            let wrong = |reason: String| CheckpointError::tensor(source.display(tensor.file), &tensor.name, reason);
            let name = match name {
                TensorName::Weight(name) => name,
                TensorName::PassedOver => {
                    skipped.extend((tensor.name != gguf::config::ROPE_FACTORS).then(|| tensor.name.clone()));
                    continue;
                }
                TensorName::Unknown => {
                    return Err(wrong("has a name that no converter gives; convert the model again".into()));
                }
            };
            if let Some(other) = origin.insert(name.clone(), &tensor.name) {
                return Err(wrong(format!("is here twice: {} stands for {name} too", excerpt(other))));
            }
            let format = tensor.tensor_type.format();
            let cols = tensor.shape.last().copied().unwrap_or(1);
            let rows = tensor.shape.split_last().map_or(1, |(_, outer)| outer.iter().product());
            let (values, bytes) = tensor.tensor_type.block();
            let row_bytes = cols / values as usize * bytes as usize;
            let part = Part { file: tensor.file, offset: tensor.offset, rows, row_bytes };
            if let Some(module) = name.strip_suffix(".scale") {
                scales.insert(module.to_string(), (tensor, part));
                continue;
            }
            let encoding = match tensor.tensor_type {
                TensorType::Rows(_) => Encoding::Rows(part),
                TensorType::MxFp4 => Encoding::Recoded { part, values: 32, recode: weight::recode_gguf_mxfp4 },
                TensorType::NvFp4 => Encoding::Recoded { part, values: 64, recode: weight::recode_gguf_nvfp4 },
            };
            let (stored_name, shape) = (tensor.name.clone(), tensor.shape.clone());
            let info = TensorInfo { name, stored_name, format, shape, bytes: tensor.bytes };
            weights.push(Weight { info, encoding, row_scale: None });
        }
        for weight in &mut weights {
            let module = weight.info.name.strip_suffix(".weight");
            let Some((tensor, part)) = module.and_then(|module| scales.remove(module)) else { continue };
            let values = part.rows * tensor.shape.last().copied().unwrap_or(1);
            let fits = tensor.tensor_type == TensorType::Rows(Format::F32)
                && weight.info.bytes > 0
                && weight.rows().is_multiple_of(values);
            if weight.info.format != Format::NvFp4 || !fits {
                let reason = format!("a scale of shape {:?} does not belong to {}", tensor.shape, weight.info.format);
                return Err(CheckpointError::scheme(&path, &weight.info.name, "GGUF NVFP4", reason));
            }
            weight.info.bytes += tensor.bytes;
            let name = tensor.name.clone();
            weight.row_scale = Some(RowScale { name, part, convert: Convert::Copy, role: RowFactor::Times(1.0) });
        }
        if let Some((module, _)) = scales.into_iter().next() {
            return Err(CheckpointError::scheme(&path, &module, "GGUF NVFP4", "a scale without a weight"));
        }
        let manifest = Manifest::of(source.as_ref(), |file| gguf.header_bytes().get(file).copied())?;
        Ok(Self::new(source, translated.config, weights, skipped, manifest, Some(gguf)))
    }

    fn new(
        source: Box<dyn Source>,
        config: Json,
        weights: Vec<Weight>,
        skipped: Vec<String>,
        manifest: Manifest,
        gguf: Option<Gguf>,
    ) -> Self {
        let tensors = weights.iter().map(|weight| weight.info.clone()).collect();
        let weights = weights.into_iter().map(|weight| (weight.info.name.clone(), weight)).collect();
        Self { source, config, tensors, weights, skipped, manifest, gguf }
    }

    /// The model's configuration in the shape of Hugging Face's `config.json` (GGUF metadata is translated, see
    /// [`gguf::config`]).
    pub fn config(&self) -> &Json {
        &self.config
    }

    /// The GGUF header, where the model is a GGUF file: its metadata holds the tokenizer.
    pub fn gguf(&self) -> Option<&Gguf> {
        self.gguf.as_ref()
    }

    /// The files that the model is read from.
    pub fn source(&self) -> &dyn Source {
        self.source.as_ref()
    }

    /// All weights, in file order.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// Names of tensors that a language model does not use: vision and audio towers, activation scales, buffers that are
    /// computed, an output projection where the embedding is tied.
    pub fn skipped(&self) -> &[String] {
        &self.skipped
    }

    /// One weight.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.weights.get(name).map(|weight| &weight.info)
    }

    /// What the files call a weight; of one that is not there, what they would call it.
    pub fn stored_name(&self, name: &str) -> String {
        if let Some(info) = self.tensor(name) {
            return info.stored_name.clone();
        }
        if let Some(stored) = gguf::config::tensor_name(&self.config, name) {
            return stored;
        }
        // Wrappers put a prefix before the names of layers.
        let in_layers = |info: &&TensorInfo| info.name.starts_with("model.layers.");
        let prefix = self.tensors.iter().find(in_layers).and_then(|info| info.stored_name.split_once("layers."));
        match (prefix, name.strip_prefix("model.layers.")) {
            (Some((prefix, _)), Some(rest)) => format!("{prefix}layers.{rest}"),
            _ => name.into(),
        }
    }

    /// A shape of a weight, with its dimensions in the order that they have in the files.
    pub fn stored_shape(&self, name: &str, shape: &[usize]) -> Vec<usize> {
        let mut shape = shape.to_vec();
        if let (Some(Weight { encoding: Encoding::Transposed { .. }, .. }), [.., outputs, inputs]) =
            (self.weights.get(name), &mut shape[..])
        {
            std::mem::swap(outputs, inputs);
        }
        shape
    }

    /// The format of weights that are stacked along their rows.
    ///
    /// # Errors
    /// [`CheckpointError::NoTensor`]; [`CheckpointError::Scheme`] for weights of different formats or widths.
    pub fn common_format(&self, names: &[&str]) -> Result<Format, CheckpointError> {
        let Some((first, others)) = names.split_first() else {
            return Err(CheckpointError::NoTensor { name: "(an empty list of names)".into() });
        };
        let first = self.weight(first)?;
        let (format, cols) = (first.info.format, first.cols());
        for name in others {
            let other = self.weight(name)?;
            if (other.info.format, other.cols()) != (format, cols) {
                let reason = format!(
                    "{} of {} columns cannot be stacked on {} of {format} and {cols} columns",
                    other.info.format,
                    other.cols(),
                    first.info.stored_name
                );
                let scheme = other.info.format.to_string();
                return Err(CheckpointError::scheme(self.source.name(), &other.info.stored_name, &scheme, reason));
            }
        }
        Ok(format)
    }

    /// Whether a weight is stored as GPTQ stores it.
    pub fn is_gptq(&self, name: &str) -> bool {
        let encoding = self.weights.get(name).map(|weight| &weight.encoding);
        matches!(encoding, Some(Encoding::Packed(packed)) if matches!(packed.packing, Packing::Gptq { .. }))
    }

    fn weight(&self, name: &str) -> Result<&Weight, CheckpointError> {
        self.weights.get(name).ok_or_else(|| CheckpointError::NoTensor { name: name.into() })
    }

    /// Reads a part of the named weights, stacked along their rows: the rows in `rows`, in order, and of each the columns in
    /// `columns` (`None`: all). Only the bytes of that part are touched. Column ranges must fall on block boundaries.
    ///
    /// A vector of shape `[n]` is a matrix of one row. The data is borrowed where it lies in one piece in the form that
    /// the format asks for.
    ///
    /// # Errors
    /// [`CheckpointError::NoTensor`]; [`CheckpointError::OutOfRange`]; [`CheckpointError::CutBlock`] for a column range
    /// that ends inside a block; [`CheckpointError::Scheme`] for weights of different formats or widths; failed reads.
    pub fn read(
        &self,
        names: &[&str],
        rows: &[Range<usize>],
        columns: Option<&[Range<usize>]>,
    ) -> Result<Matrix<'_>, CheckpointError> {
        let format = self.common_format(names)?;
        let weights = names.iter().map(|name| self.weight(name)).collect::<Result<Vec<_>, _>>()?;
        let first = weights[0]; // of no names there is no common format
        let whole = 0..first.cols();
        let columns = columns.unwrap_or(std::slice::from_ref(&whole));
        let selected_cols = check_columns(&first.info, columns)?;
        let mut data = Cow::Borrowed(&[][..]);
        let mut row_scale: Option<Vec<f32>> = None;
        let mut row_count = 0;
        for (weight, local) in place_rows(&weights, rows)? {
            let piece = weight.read(self.source.as_ref(), &local, columns)?;
            let scales = weight.row_scales(self.source.as_ref(), &local)?;
            if data.is_empty() {
                data = piece;
            } else {
                data.to_mut().extend_from_slice(&piece);
            }
            let piece_rows: usize = local.iter().map(Range::len).sum();
            if scales.is_some() || row_scale.is_some() {
                let all = row_scale.get_or_insert_with(|| vec![1.0; row_count]);
                all.extend(scales.unwrap_or_else(|| vec![1.0; piece_rows]));
            }
            row_count += piece_rows;
        }
        let matrix = Matrix::new(format, row_count, selected_cols, data);
        Ok(match row_scale {
            Some(scales) => matrix.with_row_scale(scales),
            None => matrix,
        })
    }

    /// Reads a whole weight as f32 values: for vectors and small tables that a forward pass keeps in f32.
    ///
    /// # Errors
    /// As [`Checkpoint::read`].
    pub fn read_f32(&self, name: &str) -> Result<Vec<f32>, CheckpointError> {
        let rows = 0..self.weight(name)?.rows();
        let matrix = self.read(&[name], std::slice::from_ref(&rows), None)?;
        let mut values = vec![0.0; matrix.rows * matrix.cols];
        if matrix.cols > 0 {
            values.chunks_exact_mut(matrix.cols).enumerate().for_each(|(row, out)| matrix.decode_row(row, out));
        }
        Ok(values)
    }

    /// What the files are, for comparison between ranks.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The manifest with a hash of every file's whole content, which takes as long as reading the model once. `progress`
    /// hears the bytes read so far and their total.
    ///
    /// # Errors
    /// Failed reads.
    pub fn verified_manifest(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<Manifest, CheckpointError> {
        self.manifest.with_content(self.source.as_ref(), progress)
    }

    /// A hash over names, shapes, formats, sizes and headers (hex): equal on ranks with equal files.
    pub fn manifest_hash(&self) -> String {
        self.manifest.hash()
    }
}

/// A tensor outside the decoder that may be its output projection, misspelled: without one a model would pass for tied.
fn head_by_another_name(weights: &[Weight]) -> Option<&str> {
    const ELSEWHERE: [&str; 2] = ["model.", "mtp."];
    let embedding = weights.iter().find(|weight| weight.info.name == EMBEDDING)?;
    let outside = |name: &str| !ELSEWHERE.iter().any(|start| name.starts_with(start));
    let mut alike = weights.iter().filter(|weight| weight.info.shape == embedding.info.shape);
    alike.find(|weight| outside(&weight.info.name)).map(|weight| weight.info.name.as_str())
}

/// Rows of one weight.
type PlacedRows<'w> = (&'w Weight, Vec<Range<usize>>);

/// Splits rows of the stack into rows of the weights that it is made of, in order.
fn place_rows<'w>(weights: &[&'w Weight], rows: &[Range<usize>]) -> Result<Vec<PlacedRows<'w>>, CheckpointError> {
    let mut bounds = vec![0];
    bounds.extend(weights.iter().scan(0, |end, weight| {
        *end += weight.rows();
        Some(*end)
    }));
    let limit = bounds[weights.len()];
    let mut placed: Vec<(usize, Vec<Range<usize>>)> = Vec::new();
    for range in rows {
        if range.start > range.end || range.end > limit {
            let (tensor, what) = (weights[0].info.name.clone(), "rows");
            return Err(CheckpointError::OutOfRange { tensor, what, start: range.start, end: range.end, limit });
        }
        let mut start = range.start;
        while start < range.end {
            // The last weight that begins at or before this row; empty weights before it hold no row.
            let index = bounds.partition_point(|&bound| bound <= start) - 1;
            let end = range.end.min(bounds[index + 1]);
            let local = start - bounds[index]..end - bounds[index];
            match placed.last_mut() {
                Some((last, ranges)) if *last == index => ranges.push(local),
                _ => placed.push((index, vec![local])),
            }
            start = end;
        }
    }
    Ok(placed.into_iter().map(|(index, ranges)| (weights[index], ranges)).collect())
}

/// Checks that column ranges lie inside the tensor and cut no block; gives the number of columns.
fn check_columns(info: &TensorInfo, columns: &[Range<usize>]) -> Result<usize, CheckpointError> {
    let limit = info.shape.last().copied().unwrap_or(1);
    let block = info.format.block_values();
    for (index, range) in columns.iter().enumerate() {
        if range.start > range.end || range.end > limit {
            let (tensor, what) = (info.name.clone(), "columns");
            return Err(CheckpointError::OutOfRange { tensor, what, start: range.start, end: range.end, limit });
        }
        let whole_end = range.end % block == 0 || (range.end == limit && index + 1 == columns.len());
        if range.start % block != 0 || !whole_end {
            let column = if range.start % block != 0 { range.start } else { range.end };
            let (tensor, format) = (info.name.clone(), info.format.to_string());
            return Err(CheckpointError::CutBlock { tensor, column, format, block });
        }
    }
    Ok(columns.iter().map(Range::len).sum())
}
