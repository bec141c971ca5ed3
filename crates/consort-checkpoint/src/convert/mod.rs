//! Conversion into another number format: any model that [`Checkpoint`] opens becomes a Hugging Face directory that other
//! programs load, too.
//!
//! Tensor after tensor is read in pieces, encoded and written to its place, so that memory stays near one piece for each
//! thread whatever the size of the model. Norms, biases, routers and other vectors stay in BF16. The output appears under its
//! name when it is complete.
//!
//! The spellings are those of the program that each format comes from: MLX for affine, MXFP4, MXFP8 and NVFP4; transformers and
//! vLLM for FP8. Architectures whose spelling there has not been checked are refused.

mod encode;
mod error;
mod family;
mod output;
mod plan;
mod target;

use std::collections::BTreeMap;
use std::io;
use std::ops::{ControlFlow, Range};
use std::path::Path;

pub use error::ConvertError;
use serde::Serialize;
use serde_json::json;
pub use target::Target;

use crate::Checkpoint;
use crate::files;
use crate::huggingface::INDEX;
use crate::source::in_templates;
use crate::tokenizer::Tokenizer;
use encode::{Hidden, SquaredError, TensorSpec};
use family::Family;
use output::{Shard, ShardFile, Staging, shard_name, shards};
use plan::{Planned, Selection, plan};

/// What to convert to.
#[derive(Clone, Debug)]
pub struct Options {
    /// The format of matrices.
    pub target: Target,
    /// Weights that stay in BF16, by parts of their path: `lm_head`, `embed`, `layers.0.mlp`.
    pub keep: Vec<String>,
    /// A file is not begun a new weight in once it would become longer than this.
    pub shard_bytes: u64,
    /// Threads that encode.
    pub threads: usize,
}

/// A file of 5 GB, as models are usually published.
pub const SHARD_BYTES: u64 = 5_000_000_000;

/// What a conversion did.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Bytes of the source's weights.
    pub source_bytes: u64,
    /// Bytes of the output's weights.
    pub output_bytes: u64,
    /// Files of weights.
    pub files: usize,
    /// Every weight of the output.
    pub tensors: Vec<TensorReport>,
    /// What the user should know.
    pub notes: Vec<String>,
}

/// What became of one weight.
#[derive(Clone, Debug, Serialize)]
pub struct TensorReport {
    /// Its name in the output.
    pub name: String,
    /// The format that it was read in.
    pub from: String,
    /// The format that it was written in.
    pub to: String,
    /// Bytes in the output, scales included.
    pub bytes: u64,
    /// Root of the mean squared error, relative to that of the source.
    pub relative_rms_error: f64,
    /// Why it stays in BF16, where it could have been in the format asked for.
    pub kept: Option<String>,
}

/// Files beside the weights that belong to the tokenizer and to generation.
const COMPANIONS: &[&str] = &[
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
];
/// Files with this ending, too.
const TIKTOKEN: &str = ".tiktoken";

/// Values that a thread encodes at a time.
const PIECE_VALUES: usize = 4 << 20;

/// Hears the bytes written so far and their total, and says whether to go on.
pub type Progress<'a> = dyn FnMut(u64, u64) -> ControlFlow<()> + 'a;

/// Converts a model into the new directory `output`.
///
/// # Errors
/// [`ConvertError`]; whatever was written is removed again.
pub fn convert(
    checkpoint: &Checkpoint,
    options: &Options,
    output: &Path,
    progress: &mut Progress<'_>,
) -> Result<Report, ConvertError> {
    let family = Family::of(checkpoint.config(), options.target)?;
    let weights = plan(checkpoint, options.target, &options.keep)?;
    let plain: Vec<&str> = weights.iter().filter(|weight| weight.kept.is_some()).map(Planned::module).collect();
    let config = family.config(checkpoint.config(), options.target, &plain)?;
    let specs: Vec<_> = weights.iter().map(|weight| weight.stored.tensors(&weight.name, &weight.shape)).collect();
    let output_bytes = specs.iter().flatten().map(TensorSpec::bytes).sum();
    let format = if options.target.is_mlx() { "mlx" } else { "pt" };
    let shards = shards(&specs, options.shard_bytes, format);

    let full = |error| match error {
        ConvertError::Write { error, .. } if is_full(&error) => {
            ConvertError::DiskFull { path: output.display().to_string(), bytes: output_bytes }
        }
        other => other,
    };
    let staging = Staging::begin(output)?;
    let mut write = || {
        let errors = write_shards(checkpoint, options.threads, &weights, &specs, &shards, &staging, progress)?;
        staging.write("config.json", format!("{config:#}\n").as_bytes())?;
        let no_tokenizer = write_companions(checkpoint, &staging)?;
        Ok((errors, no_tokenizer))
    };
    let (errors, no_tokenizer) = write().map_err(full)?;
    staging.finish().map_err(full)?;

    let tensors = weights.iter().zip(&specs).zip(errors);
    let tensors: Vec<TensorReport> = tensors
        .map(|((weight, specs), error)| TensorReport {
            name: weight.name.clone(),
            from: checkpoint.tensor(&weight.source.names[0]).map_or_else(String::new, |info| info.format.to_string()),
            to: weight.stored.name(),
            bytes: specs.iter().map(TensorSpec::bytes).sum(),
            relative_rms_error: error.relative_rms(),
            kept: weight.kept.clone(),
        })
        .collect();
    Ok(Report {
        source_bytes: checkpoint.tensors().iter().map(|tensor| tensor.bytes).sum(),
        output_bytes,
        files: shards.len(),
        notes: notes(&weights, options, no_tokenizer.as_deref()),
        tensors,
    })
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// Encodes all weights into their files, and the index if there are several; gives the error of each weight.
fn write_shards(
    checkpoint: &Checkpoint,
    threads: usize,
    weights: &[Planned],
    specs: &[Vec<TensorSpec>],
    shards: &[Shard],
    staging: &Staging,
    progress: &mut Progress<'_>,
) -> Result<Vec<SquaredError>, ConvertError> {
    let total = specs.iter().flatten().map(TensorSpec::bytes).sum();
    let mut done = 0;
    let mut errors = Vec::with_capacity(weights.len());
    let mut weight_map = BTreeMap::new();
    for (index, shard) in shards.iter().enumerate() {
        let name = shard_name(index, shards.len());
        let file = ShardFile::create(staging.path(&name), shard)?;
        for weight in shard.weights.clone() {
            let error = encode_weight(checkpoint, threads, &weights[weight], &mut |part, start, bytes| {
                done += bytes.len() as u64;
                if progress(done, total).is_break() {
                    return Err(ConvertError::Interrupted);
                }
                file.write(weight, part, start, bytes)
            })?;
            errors.push(error);
            weight_map.extend(specs[weight].iter().map(|tensor| (tensor.name.as_str(), name.clone())));
        }
        file.finish()?;
    }
    if shards.len() > 1 {
        let index = json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
        staging.write(INDEX, format!("{index:#}\n").as_bytes())?;
    }
    Ok(errors)
}

/// Takes bytes of one of a weight's tensors, and where in it they begin.
type WriteTensor<'a> = dyn FnMut(usize, u64, &[u8]) -> Result<(), ConvertError> + 'a;

/// Encodes one weight in pieces of whole rows, several at a time, and hands them to `write`.
fn encode_weight(
    checkpoint: &Checkpoint,
    threads: usize,
    weight: &Planned,
    write: &mut WriteTensor<'_>,
) -> Result<SquaredError, ConvertError> {
    let cols = weight.shape.last().copied().unwrap_or(1).max(1);
    // Whole tiles, so that a scale is computed from all of its values.
    let piece_rows = (PIECE_VALUES / cols).max(1).next_multiple_of(encode::TILE);
    let pieces: Vec<Range<usize>> =
        (0..weight.rows()).step_by(piece_rows).map(|start| start..weight.rows().min(start + piece_rows)).collect();
    let encode = |rows: &Range<usize>| {
        let part = within(&weight.source, rows);
        let names: Vec<&str> = part.names.iter().map(String::as_str).collect();
        let matrix = checkpoint.read(&names, &part.rows, part.columns.as_deref())?;
        weight.stored.encode(&matrix).map_err(|Hidden { row, col, value }| {
            let place = position(&weight.shape, (rows.start + row) * cols + col);
            let reason = format!(
                "the value at {place:?} is {value}, which {} cannot keep; leave this weight in BF16 with --keep, or mend the source",
                weight.stored.name()
            );
            ConvertError::tensor(&weight.name, reason)
        })
    };
    let mut written: Vec<u64> = Vec::new();
    let mut error = SquaredError::default();
    for round in pieces.chunks(threads.max(1)) {
        let encoded: Vec<_> = match round {
            [only] => vec![encode(only)],
            several => std::thread::scope(|scope| {
                let running: Vec<_> = several.iter().map(|rows| scope.spawn(|| encode(rows))).collect();
                // A panic in a thread is one here.
                running
                    .into_iter()
                    .map(|it| it.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                    .collect()
            }),
        };
        for encoded in encoded {
            let encoded = encoded?;
            written.resize(encoded.parts.len(), 0);
            for (part, bytes) in encoded.parts.iter().enumerate() {
                write(part, written[part], bytes)?;
                written[part] += bytes.len() as u64;
            }
            error.add(encoded.error);
        }
    }
    Ok(error)
}

/// The indices of an element, outermost first, by its place in a row-major tensor.
fn position(shape: &[usize], place: usize) -> Vec<usize> {
    let mut rest = place;
    let mut indices: Vec<usize> = shape.iter().rev().map(|&size| (rest % size.max(1), rest /= size.max(1)).0).collect();
    indices.reverse();
    indices
}

/// Rows `rows` of what a selection gives.
fn within(selection: &Selection, rows: &Range<usize>) -> Selection {
    let mut start = 0;
    let mut inside = Vec::new();
    for run in &selection.rows {
        let (first, last) = (rows.start.max(start), rows.end.min(start + run.len()));
        if first < last {
            inside.push(run.start + first - start..run.start + last - start);
        }
        start += run.len();
    }
    Selection { rows: inside, ..selection.clone() }
}

/// Writes the files that belong to the tokenizer, copied or made from GGUF metadata; if there are none, says why.
fn write_companions(checkpoint: &Checkpoint, staging: &Staging) -> Result<Option<String>, ConvertError> {
    let source = checkpoint.source();
    if let Some(gguf) = checkpoint.gguf() {
        return match Tokenizer::export(gguf.metadata(), &source.display(0)) {
            Ok(files) => {
                files.iter().try_for_each(|(name, content)| staging.write(name, content.as_bytes()))?;
                Ok(None)
            }
            Err(error) => Ok(Some(error.to_string())),
        };
    }
    let mut has_tokenizer = false;
    for (index, file) in source.files().iter().enumerate() {
        let is_template = in_templates(&file.name).is_some();
        if COMPANIONS.contains(&file.name.as_str()) || file.name.ends_with(TIKTOKEN) || is_template {
            staging.write(&file.name, &files::read_from(source, index)?)?;
            has_tokenizer |= ["tokenizer.", "tekken."].iter().any(|start| file.name.starts_with(start))
                || file.name.ends_with(TIKTOKEN);
        }
    }
    Ok((!has_tokenizer).then(|| "the source has none as a file".into()))
}

fn notes(weights: &[Planned], options: &Options, no_tokenizer: Option<&str>) -> Vec<String> {
    let mut notes = Vec::new();
    let mut kept: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for weight in weights {
        if let Some(reason) = &weight.kept {
            kept.entry(reason).or_default().push(weight.module());
        }
    }
    if options.target != Target::Bf16 && weights.iter().all(|weight| weight.stored == Target::Bf16.stored()) {
        notes.push(format!("nothing is {}: no weight can be, or all are kept; the result is BF16", options.target));
    }
    for (reason, modules) in kept {
        let others = match modules.len() {
            1 => String::new(),
            count => format!(" and {} more", count - 1),
        };
        notes.push(format!("kept in BF16 ({reason}): {}{others}", modules[0]));
    }
    for pattern in &options.keep {
        if !weights.iter().any(|weight| plan::matches(pattern, weight.module())) {
            notes.push(format!("--keep {pattern}: no weight has this in its name"));
        }
    }
    if options.target == Target::Fp8 {
        notes.push("transformers and vLLM read this FP8 spelling; mlx_lm reads no FP8 for most architectures".into());
    }
    if let Some(reason) = no_tokenizer {
        notes.push(format!("no tokenizer was written ({reason}); copy the original model's"));
    }
    notes
}
