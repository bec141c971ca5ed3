//! The frame that all decoder-only models share: tokens in, residual stream from stage to stage, logits out.

use std::ops::Range;

use consort_compute::{Backend, NormGain};

use crate::gather::ColumnGather;
use crate::partition::split_features;
use crate::registry::LoadOptions;
use crate::{Config, Loader, ModelError, Pass};

/// Rows of the vocabulary are cut at multiples of this.
const VOCABULARY_UNIT: usize = 16;

/// Embedding, final norm and output head. The vocabulary is cut among the shards of a stage: each embeds the tokens that it
/// holds and the sum is the embedding; each makes its own part of the logits.
pub(crate) struct Frame<B: Backend> {
    hidden: usize,
    /// Each shard's part of the vocabulary, and which is this rank's.
    parts: Vec<Range<usize>>,
    shard: usize,
    /// `[vocabulary part, hidden]`, on the first stage, and on the last if the head is tied to it.
    embedding: Option<B::Weight>,
    /// On the last stage.
    output: Option<Output<B>>,
    /// Local token ids of the step.
    ids: Vec<u32>,
}

struct Output<B: Backend> {
    /// `[hidden]`.
    norm: B::Buffer,
    epsilon: f32,
    /// `[vocabulary part, hidden]`; none if tied to the embedding.
    head: Option<B::Weight>,
    /// The rows whose logits are wanted, `[rows, hidden]`, before and after the norm.
    picked: B::Buffer,
    normed: B::Buffer,
    /// This shard's part of the logits, `[rows, vocabulary part]`.
    part: B::Buffer,
    gather: ColumnGather,
}

/// What the frame needs to know of a config.
pub(crate) struct FrameSpec {
    pub vocabulary: usize,
    pub hidden: usize,
    pub tied: bool,
    pub epsilon: f32,
    /// Added to the stored gain of the final norm.
    pub norm_offset: f32,
}

impl FrameSpec {
    /// Reads the keys that all families share; the final norm's gain is taken as it is stored.
    pub(crate) fn read(config: &Config<'_>, epsilon: f32, tied_by_default: bool) -> Result<Self, ModelError> {
        Ok(Self {
            vocabulary: config.size("vocab_size")?,
            hidden: config.size("hidden_size")?,
            tied: config.flag_or("tie_word_embeddings", tied_by_default)?,
            epsilon,
            norm_offset: 0.0,
        })
    }
}

/// The residual stream and what a half layer reads from it and adds to it, each `[tokens, hidden]` of the largest step.
pub(crate) struct Residual<B: Backend> {
    pub x: B::Buffer,
    pub h: B::Buffer,
    pub branch: B::Buffer,
}

impl<B: Backend> Residual<B> {
    pub(crate) fn new(backend: &B, options: &LoadOptions, hidden: usize) -> Self {
        let buffer = || backend.buffer(options.max_tokens * hidden);
        Self { x: buffer(), h: buffer(), branch: buffer() }
    }
}

impl<B: Backend> Frame<B> {
    pub(crate) fn load(
        loader: &mut Loader<'_, B>,
        spec: &FrameSpec,
        options: &LoadOptions,
    ) -> Result<Self, ModelError> {
        let FrameSpec { vocabulary, hidden, tied, .. } = *spec;
        let (placement, backend) = (loader.placement, loader.backend);
        let parts = split_features("vocabulary", vocabulary, VOCABULARY_UNIT, &placement.shares)
            .map_err(|reason| loader.does_not_fit(reason))?;
        let part = parts[placement.shard].clone();

        let embeds = placement.is_first() || (placement.is_last() && tied);
        let embedding = match embeds {
            true => Some(loader.rows("model.embed_tokens.weight", [vocabulary, hidden], &part)?),
            false => None,
        };
        let sharded_rows = if placement.shards() > 1 { options.max_logit_rows } else { 0 };
        let output = match placement.is_last() {
            true => Some(Output {
                norm: loader.vector_map("model.norm.weight", hidden, &(0..hidden), |g| g + spec.norm_offset)?,
                epsilon: spec.epsilon,
                head: match tied {
                    true => None,
                    false => Some(loader.rows("lm_head.weight", [vocabulary, hidden], &part)?),
                },
                picked: backend.buffer(options.max_logit_rows * hidden),
                normed: backend.buffer(options.max_logit_rows * hidden),
                part: backend.buffer(sharded_rows * part.len()),
                gather: ColumnGather::new(parts.clone(), placement.shard, sharded_rows),
            }),
            false => None,
        };
        Ok(Self { hidden, parts, shard: placement.shard, embedding, output, ids: Vec::new() })
    }

    /// Fills the residual stream `x [tokens, hidden]`: from the embedding on the first stage, from the stage before elsewhere.
    pub(crate) fn enter(&mut self, pass: &Pass<'_, B>, x: &mut B::Buffer) -> Result<(), ModelError> {
        let tokens = pass.batch.tokens;
        match &pass.ranks.previous {
            Some(pair) => {
                pass.backend.reshape(x, tokens.len(), self.hidden);
                pass.backend.with_host(x, |values| pair.recv(0, values))??;
            }
            None => {
                let part = &self.parts[self.shard];
                // A token of another shard's part wraps around to an id past this part, which embeds as zeros.
                self.ids.clear();
                self.ids.extend(tokens.iter().map(|&token| token.wrapping_sub(part.start as u32)));
                let embedding = self.embedding.as_ref().expect("the first stage holds the embedding");
                pass.backend.embed(x, embedding, &self.ids);
                pass.all_reduce(x)?;
            }
        }
        Ok(())
    }

    /// Hands the residual stream on to the next stage; the last stage turns the wanted rows into `logits [rows, vocabulary]`.
    /// True if there are logits now.
    pub(crate) fn leave(
        &mut self,
        pass: &Pass<'_, B>,
        x: &mut B::Buffer,
        logits: &mut B::Buffer,
    ) -> Result<bool, ModelError> {
        if let Some(pair) = &pass.ranks.next {
            pass.backend.with_host(x, |values| pair.send(1, values))??;
            return Ok(false);
        }
        let (b, rows) = (pass.backend, pass.batch.logit_rows);
        if rows.is_empty() {
            return Ok(false);
        }
        let output = self.output.as_mut().expect("the last stage holds the output head");
        let head = output.head.as_ref().or(self.embedding.as_ref()).expect("a tied head is the embedding");
        b.select_rows(&mut output.picked, x, rows);
        b.rms_norm(&mut output.normed, &output.picked, self.hidden, NormGain::After(&output.norm), output.epsilon);
        if self.parts.len() == 1 {
            b.matmul(logits, &output.normed, head);
            return Ok(true);
        }

        b.matmul(&mut output.part, &output.normed, head);
        output.gather.gather(pass, logits, &mut output.part)?;
        Ok(true)
    }
}

/// The names of one weight over all layers of a model: what a cut along the features of all layers must respect.
pub(crate) fn over_layers(layers: usize, suffix: &str) -> impl Iterator<Item = String> + use<'_> {
    (0..layers).map(move |i| format!("model.layers.{i}.{suffix}"))
}

/// Checks that a share of attention heads does not cut a quantization block of the output projections.
pub(crate) fn check_head_cut<B: Backend>(
    loader: &Loader<'_, B>,
    heads: &[Range<usize>],
    head_dim: usize,
    projections: impl IntoIterator<Item = String>,
) -> Result<(), ModelError> {
    let blocks =
        projections.into_iter().filter_map(|name| Some(loader.checkpoint.tensor(&name)?.format.block_values()));
    let block = blocks.max().unwrap_or(1);
    let last = heads.last().map_or(0, |r| r.end);
    for cut in heads.iter().map(|r| r.end).filter(|&end| end != last) {
        if !(cut * head_dim).is_multiple_of(block) {
            return Err(loader.does_not_fit(format!(
                "a cut after head {cut} lies at column {} of the attention output projection, inside a quantization block of {block}; \
                 choose another number of shards, or shares such as tensor:2/1",
                cut * head_dim
            )));
        }
    }
    Ok(())
}
