//! The table of architectures.

use consort_checkpoint::Checkpoint;
use consort_compute::{Backend, Portable};

use crate::loader::Source;
use crate::read_ahead::{Read, ReadAhead};
use crate::repacked::RepackedWeights;
use crate::{
    CacheLayout, Config, ExpertDivision, Held, LoadHooks, Loader, ModelError, Pass, Placement, Plan, gemma3, gpt_oss,
    llama, muse_glimmer, muse_spark, qwen3_5, unused,
};

/// A loaded model on one rank.
pub trait Model<B: Backend>: Send {
    /// Runs one step. On the last stage, `logits` becomes `[logit rows, vocabulary]`, whole on every shard.
    fn forward(&mut self, pass: &Pass<'_, B>, logits: &mut B::Buffer) -> Result<(), ModelError>;
}

/// What building a model gives.
pub type Built<B> = Result<Box<dyn Model<B>>, ModelError>;

/// A model with the ledger of what this rank holds of it.
pub struct Loaded<B: Backend> {
    /// The model.
    pub model: Box<dyn Model<B>>,
    /// What was loaded.
    pub held: Vec<Held>,
}

/// How large a model's buffers and caches are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadOptions {
    /// Most tokens of one step.
    pub max_tokens: usize,
    /// Most rows of one step whose logits are wanted.
    pub max_logit_rows: usize,
    /// Caches.
    pub cache: CacheLayout,
}

/// What the rest of the system needs to know of a model before it is loaded.
#[derive(Clone, Debug, PartialEq)]
pub struct Outline {
    /// Layers in all.
    pub layers: usize,
    /// Features of the residual stream.
    pub hidden: usize,
    /// Entries of the vocabulary.
    pub vocabulary: usize,
    /// Most positions.
    pub context: usize,
    /// The width of sliding-window layers, if there are any.
    pub window: Option<usize>,
    /// Layers that keep keys and values of the whole context.
    pub full_layers: usize,
    /// Values that such a layer keeps of each token: those of all its KV heads, keys and values.
    pub kv_values: usize,
}

/// One architecture: how to outline it and how to build it.
pub(crate) struct Architecture<B: Backend> {
    pub names: &'static [&'static str],
    pub build: fn(&Config<'_>, &mut Loader<'_, B>, &LoadOptions) -> Built<B>,
}

/// One line per file of this crate.
const fn table<B: Backend>() -> [Architecture<B>; 6] {
    [
        Architecture { names: llama::NAMES, build: llama::build },
        Architecture { names: gemma3::NAMES, build: gemma3::build },
        Architecture { names: gpt_oss::NAMES, build: gpt_oss::build },
        Architecture { names: qwen3_5::NAMES, build: qwen3_5::build },
        Architecture { names: muse_glimmer::NAMES, build: muse_glimmer::build },
        Architecture { names: muse_spark::NAMES, build: muse_spark::build },
    ]
}

/// What no architecture here does otherwise.
const ONLY: &[(&str, bool)] = &[
    ("is_causal", true),
    ("use_bidirectional_attention", false),
    ("rope_interleave", false),
    ("rope_interleaved", false),
    ("parallel_attn", false),
];

/// The names of all supported architectures (`model_type` of a config).
pub fn architectures() -> Vec<&'static str> {
    table::<Portable>().iter().flat_map(|a| a.names.iter().copied()).collect()
}

fn find<B: Backend>(config: &Config<'_>) -> Result<Architecture<B>, ModelError> {
    let name = config.architecture()?;
    table().into_iter().find(|a| a.names.contains(&name)).ok_or_else(|| ModelError::UnknownArchitecture {
        name: name.to_string(),
        supported: architectures().join(", "),
    })
}

impl Outline {
    /// Reads the outline of a checkpoint. An unknown architecture is refused here, and so is a config that does not describe the
    /// checkpoint: every weight must be there in its shape, and none may be left over. Nothing but headers is looked at.
    pub fn new(checkpoint: &Checkpoint) -> Result<Self, ModelError> {
        let config = &Config::new(checkpoint.config());
        find::<Portable>(config)?;
        for (key, done) in ONLY {
            config.only(key, &[(*done).into()])?;
        }
        let is_gated = qwen3_5::NAMES.contains(&config.architecture()?);
        config.only("attn_output_gate", &[is_gated.into()])?;
        check_layers(config, checkpoint)?;
        let outline = Self::read(config)?;
        let (_, reads) = measure_reads(checkpoint, &outline.place(&Plan::single(), 0)?)?;
        unused::check(config, checkpoint, &reads)?;
        Ok(outline)
    }

    fn read(config: &Config<'_>) -> Result<Self, ModelError> {
        let windows = config.windows()?;
        let recurs: Vec<bool> = match config.layer_types()? {
            Some(kinds) => kinds.iter().map(|&kind| kind == "linear_attention").collect(),
            None => vec![false; windows.len()],
        };
        let heads = config.size("num_attention_heads")?;
        let kv_heads = config.size_or("num_key_value_heads", heads)?;
        let head_dim = config.size_or("head_dim", config.size("hidden_size")? / heads)?;
        Ok(Self {
            layers: config.layers()?,
            hidden: config.size("hidden_size")?,
            vocabulary: config.size("vocab_size")?,
            context: config.size("max_position_embeddings")?,
            window: windows.iter().flatten().copied().next(),
            full_layers: windows.iter().zip(recurs).filter(|(window, recurs)| window.is_none() && !recurs).count(),
            kv_values: 2 * kv_heads * head_dim,
        })
    }

    /// The placement of `rank` under `plan`.
    pub fn place(&self, plan: &Plan, rank: usize) -> Result<Placement, ModelError> {
        plan.place(rank, self.layers).map_err(|reason| ModelError::PlanDoesNotFit { plan: plan.to_string(), reason })
    }
}

/// Builds the model that `checkpoint` holds, this placement's part of it. [`Outline::new`] has checked the whole.
pub fn load<B: Backend>(
    backend: &B,
    checkpoint: &Checkpoint,
    placement: &Placement,
    options: &LoadOptions,
    hooks: LoadHooks<'_>,
) -> Result<Loaded<B>, ModelError> {
    let (_, reads) = measure_reads(checkpoint, placement)?;
    let repacked = hooks.repacked.and_then(|cache| RepackedWeights::find(cache, backend, &reads));
    let absent = repacked.as_ref().map_or_else(|| reads.iter().collect(), |repacked| repacked.absent(&reads));
    let ahead = ReadAhead::new(checkpoint, absent);
    let config = Config::new(checkpoint.config());
    ahead.run(|| {
        let hooks = LoadHooks { progress: &mut *hooks.progress, warn: &mut *hooks.warn, repacked: hooks.repacked };
        let mut loader = Loader::new(backend, checkpoint, placement, Source { ahead: &ahead, repacked, hooks });
        let model = (find(&config)?.build)(&config, &mut loader, options)?;
        loader.report();
        Ok(Loaded { model, held: loader.into_held() })
    })
}

/// The ledger of what `placement` would hold, from the headers of a checkpoint that [`Outline::new`] has checked.
pub fn measure(checkpoint: &Checkpoint, placement: &Placement) -> Result<Vec<Held>, ModelError> {
    Ok(measure_reads(checkpoint, placement)?.0)
}

/// Refuses a config of more layers than the checkpoint has, before anything is made for each of them.
fn check_layers(config: &Config<'_>, checkpoint: &Checkpoint) -> Result<(), ModelError> {
    let last = checkpoint
        .tensors()
        .iter()
        .filter_map(|info| Some((unused::layer_of(&info.name)?, info)))
        .max_by_key(|it| it.0);
    match last {
        Some((last, info)) if config.layers()? > last.saturating_add(1) => {
            let expected =
                format!("no more than {}: the checkpoint's last layer is that of {:?}", last + 1, info.stored_name);
            Err(config.bad("num_hidden_layers", &expected))
        }
        _ => Ok(()),
    }
}

/// The ledger, and what is read for it.
fn measure_reads(checkpoint: &Checkpoint, placement: &Placement) -> Result<(Vec<Held>, Vec<Read>), ModelError> {
    let config = &Config::new(checkpoint.config());
    let cache = CacheLayout { block_tokens: 1, blocks: 0, window_blocks: 0, slots: 0, format: Default::default() };
    let options = LoadOptions { max_tokens: 0, max_logit_rows: 0, cache };
    check_experts(config, placement)?;
    let mut loader = Loader::measuring(&Portable, checkpoint, placement);
    (find(config)?.build)(config, &mut loader, &options)?;
    Ok(loader.into_measure())
}

/// Refuses a division of experts that the architecture has no use for.
fn check_experts(config: &Config<'_>, placement: &Placement) -> Result<(), ModelError> {
    let name = config.architecture()?;
    let refuse = |plan: &str, reason: String| Err(ModelError::PlanDoesNotFit { plan: plan.to_string(), reason });
    let has_experts = ["num_experts", "num_local_experts"].iter().any(|key| config.get(key).is_some());
    match placement.experts {
        ExpertDivision::Whole if !has_experts => refuse("expert", format!("{name} has no experts here")),
        ExpertDivision::Gather if !muse_spark::NAMES.contains(&name) => {
            refuse("gather", format!("{name} has no norm on each expert's output, so there is nothing to gather for"))
        }
        _ => Ok(()),
    }
}
