//! The feed-forward half of a Qwen layer: one dense block or, in the layers of a mixture, experts, where the config says so
//! beside a shared expert that every token passes and that a gate of one value weighs.

use std::collections::HashSet;
use std::ops::Range;
use std::slice::from_ref;

use consort_compute::{Activation, Backend, RouteScore};
use serde_json::Value;

use crate::decoder::over_layers;
use crate::experts::{ExpertPlaces, ExpertSet, ExpertWork, Experts, FusedOrder};
use crate::feed_forward::{FeedForward, FeedForwardWork, feed_forward_part};
use crate::projection::Projection;
use crate::registry::LoadOptions;
use crate::{Config, Loader, ModelError};

/// What the feed-forward halves of a model are like, and this shard's part of them.
pub(crate) struct MixturePlan {
    hidden: usize,
    /// For each layer of the model whether it has experts.
    sparse: Vec<bool>,
    /// The block of dense layers; none if there are none.
    dense: Option<Block>,
    /// The experts of the others; none if there are none.
    experts: Option<ExpertSet>,
    shared: Option<Block>,
    /// Whether the projections of dense blocks have biases.
    bias: bool,
}

const PLACES: ExpertPlaces =
    ExpertPlaces { experts: "num_experts", width: "moe_intermediate_size", router: "mlp.gate.weight" };

/// A dense block: its width and this shard's part of it.
struct Block {
    width: usize,
    part: Range<usize>,
}

/// One layer's share.
pub(crate) enum Mixture<B: Backend> {
    Dense(FeedForward<B>),
    Sparse(Box<Sparse<B>>),
}

pub(crate) struct Sparse<B: Backend> {
    experts: Experts<B>,
    shared: Option<Shared<B>>,
}

struct Shared<B: Backend> {
    block: FeedForward<B>,
    /// `[1, hidden]`.
    gate: B::Weight,
}

/// Buffers for the largest step.
pub(crate) struct MixtureWork<B: Backend> {
    dense: Option<FeedForwardWork<B>>,
    experts: Option<ExpertWork<B>>,
    shared: Option<SharedWork<B>>,
}

struct SharedWork<B: Backend> {
    block: FeedForwardWork<B>,
    /// `[tokens, hidden]`.
    output: B::Buffer,
    /// `[tokens, 1]`.
    gate: B::Buffer,
}

impl MixturePlan {
    /// Reads a config. Without `num_experts` every layer is dense. `normalize` holds where `norm_topk_prob` is absent.
    pub(crate) fn read<B: Backend>(
        config: &Config<'_>,
        loader: &Loader<'_, B>,
        normalize: bool,
    ) -> Result<Self, ModelError> {
        let hidden = config.size("hidden_size")?;
        let layers = config.layers()?;
        let sparse = sparse_layers(config, layers)?;
        let block = |width: usize, name: &str| {
            let part = feed_forward_part(loader, width, over_layers(layers, name))?;
            Ok::<_, ModelError>(Block { width, part })
        };
        let dense = match sparse.contains(&false) {
            true => Some(block(config.size("intermediate_size")?, "mlp.down_proj.weight")?),
            false => None,
        };
        let (mut experts, mut shared) = (None, None);
        if sparse.contains(&true) {
            let normalize = config.flag_or("norm_topk_prob", normalize)?;
            let sparse_layers = (0..layers).filter(|&i| sparse[i]);
            experts = Some(ExpertSet::read(config, loader, &PLACES, sparse_layers, RouteScore::Softmax, normalize)?);
            if config.count_or("shared_expert_intermediate_size", 0)? > 0 {
                let width = config.size("shared_expert_intermediate_size")?;
                shared = Some(block(width, "mlp.shared_expert.down_proj.weight")?);
            }
        }
        Ok(Self { hidden, sparse, dense, experts, shared, bias: config.flag_or("mlp_bias", false)? })
    }
}

/// Every `decoder_sparse_step`-th layer that is not listed in `mlp_only_layers` has experts.
fn sparse_layers(config: &Config<'_>, layers: usize) -> Result<Vec<bool>, ModelError> {
    if config.count_or("num_experts", 0)? == 0 {
        return Ok(vec![false; layers]);
    }
    let step = config.size_or("decoder_sparse_step", 1)?;
    let dense: HashSet<u64> = match config.get("mlp_only_layers") {
        Some(_) => config.list("mlp_only_layers", "a list of layers", Value::as_u64)?.into_iter().collect(),
        None => HashSet::new(),
    };
    Ok((0..layers).map(|i| (i + 1).is_multiple_of(step) && !dense.contains(&(i as u64))).collect())
}

/// The gate of a shared expert, one row; GGUF files have it as a vector.
fn shared_gate<B: Backend>(loader: &mut Loader<'_, B>, name: &str, hidden: usize) -> Result<B::Weight, ModelError> {
    let layouts = [vec![1, hidden], vec![hidden]];
    loader.matrix(&[name], loader.layout(name, &layouts), from_ref(&(0..1)), None)
}

impl<B: Backend> Mixture<B> {
    /// Loads this shard's part of layer `i`.
    pub(crate) fn load(loader: &mut Loader<'_, B>, plan: &MixturePlan, i: usize) -> Result<Self, ModelError> {
        let at = |name: &str| format!("model.layers.{i}.mlp{name}");
        let hidden = plan.hidden;
        let block = |loader: &mut Loader<'_, B>, name: &str, block: &Block| {
            FeedForward::load(loader, &at(name), [block.width, hidden], &block.part, plan.bias)
        };
        if let (false, Some(dense)) = (plan.sparse[i], &plan.dense) {
            return Ok(Self::Dense(block(loader, "", dense)?));
        }
        let set = plan.experts.as_ref().expect("a layer is dense or has experts");
        let router = Projection { weight: loader.whole(&at(".gate.weight"), [set.experts, hidden])?, bias: None };
        let shared = match &plan.shared {
            Some(shared) => Some(Shared {
                block: block(loader, ".shared_expert", shared)?,
                gate: shared_gate(loader, &at(".shared_expert_gate.weight"), hidden)?,
            }),
            None => None,
        };
        let experts = Experts::load(loader, &at(".experts"), router, set, FusedOrder::Halves, false)?;
        Ok(Self::Sparse(Box::new(Sparse { experts, shared })))
    }

    /// The half layer's output for `x`: this shard's part of the sum, `[tokens, hidden]`.
    pub(crate) fn apply(
        &self,
        b: &B,
        plan: &MixturePlan,
        work: &mut MixtureWork<B>,
        out: &mut B::Buffer,
        x: &B::Buffer,
    ) {
        match (self, &plan.experts, work) {
            (Self::Dense(block), _, MixtureWork { dense: Some(work), .. }) => {
                block.apply(b, work, out, x, Activation::Silu);
            }
            (Self::Sparse(layer), Some(set), MixtureWork { experts: Some(work), shared: shared_work, .. }) => {
                layer.experts.apply(b, set, work, out, x, Activation::Silu);
                if let (Some(shared), Some(work)) = (&layer.shared, shared_work) {
                    shared.block.apply(b, &mut work.block, &mut work.output, x, Activation::Silu);
                    b.matmul(&mut work.gate, x, &shared.gate);
                    b.sigmoid_gate(&mut work.output, &work.gate);
                    b.add(out, &work.output);
                }
            }
            _ => unreachable!("the plan that a layer was loaded by has its parts"),
        }
    }
}

impl<B: Backend> MixtureWork<B> {
    pub(crate) fn new(b: &B, options: &LoadOptions, plan: &MixturePlan) -> Self {
        let block = |block: &Block| FeedForwardWork::new(b, options, block.part.len());
        Self {
            dense: plan.dense.as_ref().map(block),
            experts: plan.experts.as_ref().map(|set| ExpertWork::new(b, options, set)),
            shared: plan.shared.as_ref().map(|shared| SharedWork {
                block: block(shared),
                output: b.buffer(options.max_tokens * plan.hidden),
                gate: b.buffer(options.max_tokens),
            }),
        }
    }
}
