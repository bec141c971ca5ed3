//! A mixture of experts (Shazeer et al. 2017, arXiv 1701.06538): a router picks a few feed-forward blocks for each token.
//!
//! A shard holds a slice of every expert's width or, under an `expert` plan, whole experts. Either way its output is a part
//! of a sum over the shards.

use std::ops::Range;
use std::slice::from_ref;

use consort_compute::{Activation, Backend, RouteScore, RouteSpec};

use crate::partition::{split, split_features};
use crate::projection::Projection;
use crate::registry::LoadOptions;
use crate::{Config, ExpertDivision, Loader, ModelError};

/// The experts of a model's layers, and this shard's part of them.
pub(crate) struct ExpertSet {
    /// Experts of a layer.
    pub experts: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Features inside one expert.
    pub width: usize,
    /// Features of the residual stream.
    pub hidden: usize,
    /// The experts that this shard holds.
    pub local: Range<usize>,
    /// The features of each that it holds.
    pub part: Range<usize>,
    /// How the router's logits become weights.
    pub score: RouteScore,
    /// Whether a token's weights are divided by their sum.
    pub normalize: bool,
}

/// In which order a fused gate and up projection keeps its rows, within each expert.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum FusedOrder {
    /// The gate's rows, then the up projection's.
    Halves,
    /// Row by row in turn, gate first (gpt-oss).
    Interleaved,
}

/// One layer's share: `local` counts this shard's experts, `width` its features of each.
pub(crate) struct Experts<B: Backend> {
    /// `[experts, hidden]`.
    router: Projection<B>,
    /// `[local · width, hidden]`.
    gate: B::Weight,
    /// `[local · width, hidden]`.
    up: B::Weight,
    /// `[local · hidden, width]`.
    down: B::Weight,
    biases: Option<Biases<B>>,
}

struct Biases<B: Backend> {
    /// `[local, width]`.
    gate: B::Buffer,
    /// `[local, width]`.
    up: B::Buffer,
    /// `[local, hidden]`; none where another shard adds it to the sum.
    down: Option<B::Buffer>,
}

/// Buffers for the largest step; `pairs` are the (token, expert) pairs, `tokens · top_k`.
pub(crate) struct ExpertWork<B: Backend> {
    /// `[tokens, experts]`.
    scores: B::Buffer,
    routing: B::Routing,
    /// `[pairs, width]`.
    gate: B::Buffer,
    /// `[pairs, width]`.
    up: B::Buffer,
    /// `[pairs, hidden]`.
    output: B::Buffer,
}

/// Where a config and a checkpoint keep what is said of experts.
pub(crate) struct ExpertPlaces {
    /// The key of how many a layer has.
    pub experts: &'static str,
    /// The key of the features inside one.
    pub width: &'static str,
    /// Inside a layer, the weight `[experts, hidden]` that routes to them.
    pub router: &'static str,
}

/// Experts of a layer, and those of a token. That there are so many the router of the first of `sparse_layers` must say, before
/// anything is made in their number.
pub(crate) fn expert_counts<B: Backend>(
    config: &Config<'_>,
    loader: &Loader<'_, B>,
    places: &ExpertPlaces,
    mut sparse_layers: impl Iterator<Item = usize>,
) -> Result<(usize, usize), ModelError> {
    let (experts, top_k) = (config.size(places.experts)?, config.size("num_experts_per_tok")?);
    if top_k > experts {
        return Err(config.bad("num_experts_per_tok", &format!("no more than the {experts} experts")));
    }
    let routers = sparse_layers.by_ref().map(|i| format!("model.layers.{i}.{}", places.router));
    loader.confirm(config, places.experts, routers, &[experts, config.size("hidden_size")?])?;
    Ok((experts, top_k))
}

impl ExpertSet {
    /// Reads a config and divides experts among the shards of this stage. `sparse_layers` are the layers of the model that have
    /// experts: a cut respects the quantization blocks of all.
    pub(crate) fn read<B: Backend>(
        config: &Config<'_>,
        loader: &Loader<'_, B>,
        places: &ExpertPlaces,
        sparse_layers: impl Iterator<Item = usize> + Clone,
        score: RouteScore,
        normalize: bool,
    ) -> Result<Self, ModelError> {
        let (experts, top_k) = expert_counts(config, loader, places, sparse_layers.clone())?;
        let (width, hidden) = (config.size(places.width)?, config.size("hidden_size")?);
        let placement = loader.placement;
        let (local, part) = if placement.experts == ExpertDivision::Whole {
            if experts < placement.shards() {
                return Err(loader.does_not_fit(format!("{experts} experts for {} shards", placement.shards())));
            }
            (split(experts, &placement.shares)[placement.shard].clone(), 0..width)
        } else {
            let downs = sparse_layers.flat_map(|i| {
                ["", ".0"].map(|expert| format!("model.layers.{i}.mlp.experts{expert}.down_proj.weight"))
            });
            let parts = split_features("expert width", width, loader.column_unit(downs), &placement.shares)
                .map_err(|reason| loader.does_not_fit(reason))?;
            (0..experts, parts[placement.shard].clone())
        };
        Ok(Self { experts, top_k, width, hidden, local, part, score, normalize })
    }

    /// Whether this shard adds the biases of the down projections: each belongs once to the sum.
    fn adds_down_bias<B: Backend>(&self, loader: &Loader<'_, B>) -> bool {
        loader.placement.experts == ExpertDivision::Whole || loader.placement.shard == 0
    }
}

impl<B: Backend> Experts<B> {
    /// Loads this shard's part of the experts `prefix` (`model.layers.0.mlp.experts`), from whichever of the published
    /// layouts the checkpoint has: one tensor per expert; one for all experts; gate and up projection fused into one.
    pub(crate) fn load(
        loader: &mut Loader<'_, B>,
        prefix: &str,
        router: Projection<B>,
        set: &ExpertSet,
        order: FusedOrder,
        bias: bool,
    ) -> Result<Self, ModelError> {
        let ExpertSet { experts, width, hidden, ref local, ref part, .. } = *set;
        let fused = format!("{prefix}.gate_up_proj");
        let fused_weight = format!("{fused}.weight");
        let is_fused = loader.has(&fused_weight);
        // Of `count` rows of each expert in a stack, the rows `rows` of the experts `of`.
        let each = |of: Range<usize>, count: usize, rows: Range<usize>| -> Vec<Range<usize>> {
            of.map(|e| e * count + rows.start..e * count + rows.end).collect()
        };
        let half = |first: usize| each(local.clone(), 2 * width, first + part.start..first + part.end);
        let stacked = |loader: &mut Loader<'_, B>, name: &str, [rows, columns]: [usize; 2], cut_rows: bool| {
            let of_one = |e: usize| format!("{prefix}.{e}.{name}.weight");
            let (names, of, shape) = match local.clone().any(|e| loader.has(&of_one(e))) {
                true if !bias => {
                    for e in local.clone() {
                        loader.check_no_bias(&format!("{prefix}.{e}.{name}"), rows)?;
                    }
                    (local.clone().map(of_one).collect(), 0..local.len(), vec![rows, columns])
                }
                true => (local.clone().map(of_one).collect(), 0..local.len(), vec![rows, columns]),
                false => (vec![format!("{prefix}.{name}.weight")], local.clone(), vec![experts, rows, columns]),
            };
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            match cut_rows {
                true => loader.matrix(&names, &shape, &each(of, rows, part.clone()), None),
                false => loader.matrix(&names, &shape, &each(of, rows, 0..rows), Some(from_ref(part))),
            }
        };
        let fused_shape = [experts, 2 * width, hidden];

        let [gate, up] = match (is_fused, order) {
            (false, _) => [
                stacked(loader, "gate_proj", [width, hidden], true)?,
                stacked(loader, "up_proj", [width, hidden], true)?,
            ],
            (true, FusedOrder::Halves) => [
                loader.matrix(&[&fused_weight], &fused_shape, &half(0), None)?,
                loader.matrix(&[&fused_weight], &fused_shape, &half(width), None)?,
            ],
            (true, FusedOrder::Interleaved) => {
                let rows = each(local.clone(), 2 * width, 2 * part.start..2 * part.end);
                loader.interleaved(&fused_weight, &fused_shape, &rows)?
            }
        };
        let down = stacked(loader, "down_proj", [hidden, width], false)?;

        let biases = match bias {
            false => None,
            true => {
                let every_second = |first: usize| -> Vec<Range<usize>> {
                    let row = |e: usize, i: usize| 2 * (e * width + i) + first;
                    local.clone().flat_map(|e| part.clone().map(move |i| row(e, i)..row(e, i) + 1)).collect()
                };
                let fused_bias = format!("{fused}.bias");
                let mut table = |name: &str, count: usize, parts: &[Range<usize>]| {
                    loader.table(name, &[experts, count], parts, local.len())
                };
                let [gate, up] = match (is_fused, order) {
                    (false, _) => ["gate_proj", "up_proj"].map(|name| {
                        table(&format!("{prefix}.{name}.bias"), width, &each(local.clone(), width, part.clone()))
                    }),
                    (true, FusedOrder::Halves) => [0, width].map(|first| table(&fused_bias, 2 * width, &half(first))),
                    (true, FusedOrder::Interleaved) => {
                        [0, 1].map(|first| table(&fused_bias, 2 * width, &every_second(first)))
                    }
                };
                let name = format!("{prefix}.down_proj.bias");
                let whole = each(local.clone(), hidden, 0..hidden);
                let down = match set.adds_down_bias(loader) {
                    true => Some(loader.table(&name, &[experts, hidden], &whole, local.len())?),
                    false => None,
                };
                Some(Biases { gate: gate?, up: up?, down })
            }
        };
        Ok(Self { router, gate, up, down, biases })
    }

    /// `out = Σ weight · down(activation(gate(x)) · up(x))` over each token's experts: this shard's part of the sum,
    /// `[tokens, hidden]`.
    pub(crate) fn apply(
        &self,
        b: &B,
        set: &ExpertSet,
        work: &mut ExpertWork<B>,
        out: &mut B::Buffer,
        x: &B::Buffer,
        activation: Activation,
    ) {
        let ExpertWork { scores, routing, gate, up, output } = work;
        self.router.apply(b, scores, x);
        let route = RouteSpec {
            top_k: set.top_k,
            score: set.score,
            correction: None,
            normalize_epsilon: set.normalize.then_some(0.0),
            scale: 1.0,
            local: set.local.clone(),
        };
        b.route(routing, scores, &route);

        b.expert_matmul(gate, x, &self.gate, routing);
        b.expert_matmul(up, x, &self.up, routing);
        if let Some(biases) = &self.biases {
            b.expert_add(gate, &biases.gate, routing);
            b.expert_add(up, &biases.up, routing);
        }
        b.gated(gate, up, activation);
        b.expert_matmul(output, gate, &self.down, routing);
        if let Some(down) = self.biases.as_ref().and_then(|biases| biases.down.as_ref()) {
            b.expert_add(output, down, routing);
        }
        b.expert_combine(out, output, routing);
    }
}

impl<B: Backend> ExpertWork<B> {
    pub(crate) fn new(b: &B, options: &LoadOptions, set: &ExpertSet) -> Self {
        let tokens = options.max_tokens;
        let pairs = tokens * set.top_k;
        Self {
            scores: b.buffer(tokens * set.experts),
            routing: b.routing(tokens, set.top_k),
            gate: b.buffer(pairs * set.part.len()),
            up: b.buffer(pairs * set.part.len()),
            output: b.buffer(pairs * set.hidden),
        }
    }
}
