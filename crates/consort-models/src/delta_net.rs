//! The gated delta net (Yang et al. 2024, arXiv 2412.06464), a layer half that keeps a state of fixed size instead of keys
//! and values: each value head remembers in a matrix, which decays, forgets what it recalls for a key, and stores anew.
//!
//! Shards hold key heads with the value heads that they serve: of each fused projection, and of the convolution's channels,
//! the part inside every segment.

use std::ops::Range;
use std::slice::from_ref;

use consort_compute::{Activation, Backend, DeltaSpec, NormGain};

use crate::attention::Runs;
use crate::decoder::{check_head_cut, over_layers};
use crate::partition::{scaled, split};
use crate::projection::Projection;
use crate::registry::LoadOptions;
use crate::{Config, Loader, ModelError, Pass};

/// The heads of a model's delta layers, and this shard's part of them.
pub(crate) struct DeltaHeads {
    /// Key heads of the whole model; queries have as many.
    key_heads: usize,
    /// Value heads that one key head serves.
    group: usize,
    key_dim: usize,
    value_dim: usize,
    /// Taps of the convolution.
    kernel: usize,
    /// Whether value heads go round the key heads, as in GGUF files: see [`DeltaSpec::tiled`].
    tiled: bool,
    /// Whether the files hold `-exp(A_log)`, as those of GGUF do.
    rates_applied: bool,
    /// This shard's key heads.
    share: Range<usize>,
}

/// One layer's share. `keys` and `values` count this shard's features of keys and of values, `heads` its value heads.
pub(crate) struct DeltaNet<B: Backend> {
    /// `[2 · keys + values, hidden]`: queries, keys and values.
    qkv: B::Weight,
    /// `[values, hidden]`: what gates the output.
    gate: B::Weight,
    /// `[heads, hidden]`: how much is stored.
    beta: B::Weight,
    /// `[heads, hidden]`: how much decays.
    decay: B::Weight,
    /// `[2 · keys + values, kernel]`.
    convolution: B::Buffer,
    /// `[heads]`.
    decay_rate: B::Buffer,
    /// `[heads]`.
    decay_bias: B::Buffer,
    /// `[value_dim]`.
    norm: B::Buffer,
    /// `[hidden, values]`.
    pub output: Projection<B>,
    /// The convolution's last inputs, `[slots, (kernel - 1) · (2 · keys + values)]`.
    recent: B::Buffer,
    /// What the heads remember, `[slots, heads · key_dim · value_dim]`.
    memory: B::Buffer,
}

/// Buffers for the largest step.
pub(crate) struct DeltaWork<B: Backend> {
    /// `[tokens, 2 · keys + values]`, before and after the convolution.
    qkv: B::Buffer,
    mixed: B::Buffer,
    /// `[tokens, heads]`.
    beta: B::Buffer,
    /// `[tokens, heads]`.
    decay: B::Buffer,
    /// `[tokens, values]`.
    recalled: B::Buffer,
    /// `[tokens, values]`: the gate, then the gated output.
    pub gated: B::Buffer,
}

impl DeltaHeads {
    /// Divides the key heads among the shards of this stage. `delta_layers` are the layers of the model that are delta nets.
    pub(crate) fn read<B: Backend>(
        config: &Config<'_>,
        loader: &Loader<'_, B>,
        delta_layers: impl Iterator<Item = usize>,
    ) -> Result<Self, ModelError> {
        let key_heads = config.size("linear_num_key_heads")?;
        let value_heads = config.size("linear_num_value_heads")?;
        let value_dim = config.size("linear_value_head_dim")?;
        if !value_heads.is_multiple_of(key_heads) {
            return Err(config.bad("linear_num_value_heads", &format!("a multiple of the {key_heads} key heads")));
        }
        let rates = delta_layers.map(|i| format!("model.layers.{i}.linear_attn.A_log"));
        loader.confirm(config, "linear_num_value_heads", rates, &[value_heads])?;
        let (group, placement) = (value_heads / key_heads, loader.placement);
        if placement.shards() > key_heads {
            let shards = placement.shards();
            return Err(loader
                .does_not_fit(format!("{shards} shards for {key_heads} linear key heads; use at most {key_heads}")));
        }
        let shares = split(key_heads, &placement.shares);
        let heads = Self {
            key_heads,
            group,
            key_dim: config.size("linear_key_head_dim")?,
            value_dim,
            kernel: config.size("linear_conv_kernel_dim")?,
            tiled: config.flag_or("consort_delta_heads_tiled", false)?,
            rates_applied: config.flag_or("consort_delta_rates_applied", false)?,
            share: shares[placement.shard].clone(),
        };
        let mut cuts: Vec<Range<usize>> = shares.iter().flat_map(|share| heads.served_by(share)).collect();
        cuts.sort_by_key(|cut| cut.start);
        check_head_cut(loader, &cuts, value_dim, over_layers(config.layers()?, "linear_attn.out_proj.weight"))?;
        Ok(heads)
    }

    /// The value heads that some key heads serve, in the order of the files.
    fn served_by(&self, keys: &Range<usize>) -> Vec<Range<usize>> {
        match self.tiled {
            true => {
                (0..self.group).map(|turn| turn * self.key_heads).map(|at| at + keys.start..at + keys.end).collect()
            }
            false => vec![scaled(keys, self.group)],
        }
    }

    /// This shard's value heads.
    fn value_heads(&self) -> Vec<Range<usize>> {
        self.served_by(&self.share)
    }

    /// How many there are.
    fn value_head_count(&self) -> usize {
        self.share.len() * self.group
    }

    /// This shard's features of values.
    fn value_features(&self) -> Vec<Range<usize>> {
        self.value_heads().iter().map(|heads| scaled(heads, self.value_dim)).collect()
    }

    /// Features of queries (and of keys) of the whole model.
    fn keys(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Features of values of the whole model.
    fn values(&self) -> usize {
        self.key_heads * self.group * self.value_dim
    }

    /// This shard's part of each segment of `q | k | v`.
    fn segments(&self) -> Vec<Range<usize>> {
        let keys = scaled(&self.share, self.key_dim);
        let after = |range: &Range<usize>, start: usize| start + range.start..start + range.end;
        let values = self.value_features().into_iter().map(|values| after(&values, 2 * self.keys()));
        [keys.clone(), after(&keys, self.keys())].into_iter().chain(values).collect()
    }

    /// This shard's features of `q | k | v`.
    fn channels(&self) -> usize {
        self.segments().iter().map(|segment| segment.len()).sum()
    }
}

impl<B: Backend> DeltaNet<B> {
    /// Loads this shard's part of the block `prefix` (`model.layers.0.linear_attn`), from projections in segments
    /// (Qwen 3.5) or grouped by key head (Qwen 3 Next).
    pub(crate) fn load(
        loader: &mut Loader<'_, B>,
        prefix: &str,
        hidden: usize,
        heads: &DeltaHeads,
        options: &LoadOptions,
    ) -> Result<Self, ModelError> {
        let at = |name: &str| format!("{prefix}.{name}");
        let (keys, values, value_heads) = (heads.keys(), heads.values(), heads.key_heads * heads.group);
        let (my_heads, segments) = (heads.value_heads(), heads.segments());
        let my_values = heads.value_features();
        let slots = options.cache.slots;
        let of_groups = |rows: usize, first: usize, count: usize| -> Vec<Range<usize>> {
            heads.share.clone().map(|head| head * rows + first..head * rows + first + count).collect()
        };

        let [qkv, gate] = if loader.has(&at("in_proj_qkvz.weight")) {
            // Per key head: its query, its key, the values that it serves, their gates; and likewise betas and decays.
            let (key_dim, served) = (heads.key_dim, heads.group * heads.value_dim);
            let group_rows = 2 * (key_dim + served);
            let q = of_groups(group_rows, 0, key_dim);
            let k = of_groups(group_rows, key_dim, key_dim);
            let v = of_groups(group_rows, 2 * key_dim, served);
            let z = of_groups(group_rows, 2 * key_dim + served, served);
            let (name, shape) = (at("in_proj_qkvz.weight"), [2 * (keys + values), hidden]);
            [loader.matrix(&[&name], &shape, &[q, k, v].concat(), None)?, loader.matrix(&[&name], &shape, &z, None)?]
        } else {
            [
                loader.matrix(&[&at("in_proj_qkv.weight")], &[2 * keys + values, hidden], &segments, None)?,
                loader.matrix(&[&at("in_proj_z.weight")], &[values, hidden], &my_values, None)?,
            ]
        };
        let [beta, decay] = if loader.has(&at("in_proj_ba.weight")) {
            let (name, shape) = (at("in_proj_ba.weight"), [2 * value_heads, hidden]);
            let rows = |first| of_groups(2 * heads.group, first, heads.group);
            [
                loader.matrix(&[&name], &shape, &rows(0), None)?,
                loader.matrix(&[&name], &shape, &rows(heads.group), None)?,
            ]
        } else {
            [
                loader.matrix(&[&at("in_proj_b.weight")], &[value_heads, hidden], &my_heads, None)?,
                loader.matrix(&[&at("in_proj_a.weight")], &[value_heads, hidden], &my_heads, None)?,
            ]
        };
        let taps: Vec<Range<usize>> = segments.iter().map(|segment| scaled(segment, heads.kernel)).collect();
        // As Hugging Face, MLX and GGUF files have them.
        let (channels, kernel) = (2 * keys + values, heads.kernel);
        let tap_layouts = [vec![channels, 1, kernel], vec![channels, kernel, 1], vec![channels, kernel]];
        let convolution = at("conv1d.weight");
        let convolution =
            loader.table(&convolution, loader.layout(&convolution, &tap_layouts), &taps, heads.channels())?;
        let state = |columns: usize| {
            let mut state = loader.backend.buffer(slots * columns);
            loader.backend.reshape(&mut state, slots, columns); // a run that begins a sequence clears its slot
            state
        };
        let recent = state((heads.kernel - 1) * heads.channels());
        let memory = state(heads.value_head_count() * heads.key_dim * heads.value_dim);
        Ok(Self {
            qkv,
            gate,
            beta,
            decay,
            convolution,
            decay_rate: loader.vector_of(&at("A_log"), value_heads, &my_heads, |rate| match heads.rates_applied {
                true => (-rate).ln(),
                false => rate,
            })?,
            decay_bias: loader.vector_of(&at("dt_bias"), value_heads, &my_heads, |bias| bias)?,
            norm: loader.vector(&at("norm.weight"), heads.value_dim)?,
            output: Projection {
                weight: loader.matrix(
                    &[&at("out_proj.weight")],
                    &[hidden, values],
                    from_ref(&(0..hidden)),
                    Some(&my_values),
                )?,
                bias: None,
            },
            recent,
            memory,
        })
    }

    /// `work.gated = norm(delta_rule(silu(convolve(qkv(h))), decay(h), beta(h))) · silu(gate(h))`, `[tokens, values]`.
    pub(crate) fn recall(
        &mut self,
        pass: &Pass<'_, B>,
        runs: &Runs<'_>,
        heads: &DeltaHeads,
        work: &mut DeltaWork<B>,
        h: &B::Buffer,
        epsilon: f32,
    ) {
        let (b, runs) = (pass.backend, runs.of(None));
        let DeltaWork { qkv, mixed, beta, decay, recalled, gated } = work;
        b.matmul(qkv, h, &self.qkv);
        b.causal_conv(mixed, qkv, &self.convolution, &mut self.recent, runs);
        b.matmul(beta, h, &self.beta);
        b.matmul(decay, h, &self.decay);
        b.delta_gates(decay, beta, &self.decay_rate, &self.decay_bias);
        let spec = DeltaSpec {
            key_heads: heads.share.len(),
            value_heads: heads.value_head_count(),
            key_dim: heads.key_dim,
            value_dim: heads.value_dim,
            tiled: heads.tiled,
        };
        b.delta_rule(recalled, mixed, decay, beta, &mut self.memory, runs, spec);
        b.rms_norm_in_place(recalled, heads.value_dim, NormGain::After(&self.norm), epsilon);
        b.matmul(gated, h, &self.gate);
        b.gated(gated, recalled, Activation::Silu);
    }
}

impl<B: Backend> DeltaWork<B> {
    pub(crate) fn new(b: &B, options: &LoadOptions, heads: &DeltaHeads) -> Self {
        let buffer = |columns: usize| b.buffer(options.max_tokens * columns);
        let (channels, value_heads) = (heads.channels(), heads.value_head_count());
        let values = value_heads * heads.value_dim;
        Self {
            qkv: buffer(channels),
            mixed: buffer(channels),
            beta: buffer(value_heads),
            decay: buffer(value_heads),
            recalled: buffer(values),
            gated: buffer(values),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heads(share: Range<usize>, tiled: bool) -> DeltaHeads {
        DeltaHeads { key_heads: 4, group: 2, key_dim: 1, value_dim: 1, kernel: 4, tiled, rates_applied: false, share }
    }

    /// Rows of `q | k | v`, and channels of the convolution likewise, are cut inside each segment, never across.
    #[test]
    fn every_segment_is_cut_by_head() {
        let rows = |heads: &DeltaHeads| heads.segments().into_iter().flatten().collect::<Vec<_>>();
        let values = |heads: &DeltaHeads| heads.value_heads().into_iter().flatten().collect::<Vec<_>>();
        let [first, second] = [heads(0..2, false), heads(2..4, false)];
        assert_eq!(rows(&first), [0, 1, 4, 5, 8, 9, 10, 11]);
        assert_eq!(rows(&second), [2, 3, 6, 7, 12, 13, 14, 15]);
        assert_eq!((values(&first), values(&second)), (vec![0, 1, 2, 3], vec![4, 5, 6, 7]));
        // In GGUF files value heads go round the key heads.
        let [first, second] = [heads(0..2, true), heads(2..4, true)];
        assert_eq!(rows(&first), [0, 1, 4, 5, 8, 9, 12, 13]);
        assert_eq!(rows(&second), [2, 3, 6, 7, 10, 11, 14, 15]);
        for tiled in [false, true] {
            let mut all: Vec<usize> = (0..4).flat_map(|key| rows(&heads(key..key + 1, tiled))).collect();
            all.sort_unstable();
            assert_eq!(all, (0..16).collect::<Vec<_>>());
        }
    }
}
