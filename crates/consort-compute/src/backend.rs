//! The operations that a forward pass is made of, and the types that describe them.

use std::ops::Range;

use crate::{Format, Matrix};

/// What can go wrong on a device while a pass runs.
#[derive(Debug, thiserror::Error)]
pub enum ComputeError {
    /// The device can no longer be used.
    #[error("the compute device was lost: {0}")]
    DeviceLost(String),
}

/// The part of one sequence that a step runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run<'a> {
    /// The rows of the batch that hold this run's tokens.
    pub rows: Range<usize>,
    /// Position of the run's first token in its sequence.
    pub start: usize,
    /// The sequence's cache blocks: position `p` lives in block `blocks[(p / block_tokens) % blocks.len()]`.
    /// Layers that see everything have a table long enough for the whole sequence; a window's table is a ring.
    pub blocks: &'a [u32],
    /// The sequence's slot in recurrent states. A run with `start == 0` begins from a zero state.
    pub slot: usize,
}

/// When the gain of an RMS norm is applied.
#[derive(Debug)]
pub enum NormGain<'a, Buffer> {
    /// No gain: `x / rms(x)`.
    None,
    /// `x / rms(x) · g`, `g` of shape `[width]`.
    After(&'a Buffer),
    /// `(x · g) / rms(x · g)`: the order of Muse Spark's expert and feed-forward norms.
    Before(&'a Buffer),
}

/// Which two features of a head a rotary embedding turns together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PairLayout {
    /// `(i, i + rotary_dims / 2)`: Hugging Face Llama.
    Halves,
    /// `(2i, 2i + 1)`: the original RoPE; GGUF's `llama` architecture.
    Interleaved,
}

/// A rotary position embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeSpec {
    /// Features of one head.
    pub head_dim: usize,
    /// Radians per position, `[rotary_dims / 2]`; features past `rotary_dims` are left alone.
    pub inverse_frequencies: Vec<f32>,
    /// Factor on cosine and sine (YaRN's attention factor); 1 elsewhere.
    pub magnitude: f32,
    /// Which features pair up.
    pub pairs: PairLayout,
}

/// How keys and values are stored in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum KvFormat {
    /// IEEE half precision, the default: three more bits of mantissa than bfloat16 in the same two bytes. Keys and values
    /// stay far inside its range in published models; one that does not shows as logits that are not numbers.
    #[default]
    F16,
    /// bfloat16: the range of f32.
    BF16,
    /// f32, for comparisons with a reference.
    F32,
    /// FP8 E4M3 without a scale: three bits of mantissa; magnitudes above 448 become 448.
    FP8,
    /// 32 signed bytes behind an f16 scale.
    Q8,
}

/// The key and value cache of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvSpec {
    /// Blocks in the pool.
    pub blocks: usize,
    /// Tokens of one block.
    pub block_tokens: usize,
    /// KV heads that this rank holds.
    pub heads: usize,
    /// Features of a key head.
    pub key_dim: usize,
    /// Features of a value head.
    pub value_dim: usize,
    /// Storage.
    pub format: KvFormat,
}

/// One attention over the cache.
#[derive(Debug)]
pub struct AttentionSpec<'a, Buffer> {
    /// Query heads; each consecutive `heads / kv_heads` of them share a KV head.
    pub heads: usize,
    /// For an uneven share: the local KV head that each local query head reads. `None`: the regular grouping.
    pub kv_head_of: Option<&'a [u32]>,
    /// Factor on `q · k` before the softmax.
    pub scale: f32,
    /// A query at position `p` sees positions `max(0, p + 1 - window)..=p`.
    pub window: Option<usize>,
    /// A learned logit per query head, `[heads]`, that takes part in the softmax and carries no value (gpt-oss).
    pub sinks: Option<&'a Buffer>,
    /// `cap · tanh(logit / cap)` before the softmax (Gemma 2).
    pub softcap: Option<f32>,
}

/// What gates a feed-forward block: `gate ← activation(gate) · up`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `x · sigmoid(x)`.
    Silu,
    /// Gaussian error linear unit, tanh approximation.
    GeluTanh,
    /// Gaussian error linear unit, exact.
    Gelu,
    /// gpt-oss: `g = min(g, limit)`, `u = clamp(u, ±limit)`, `g · sigmoid(alpha · g) · (u + 1)`.
    ClampedSwiglu {
        /// Steepness of the sigmoid.
        alpha: f32,
        /// Clamp.
        limit: f32,
    },
}

/// What turns router logits into scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouteScore {
    /// Softmax over all experts, then the top k.
    Softmax,
    /// The top k logits, then a softmax over them.
    SoftmaxOfTop,
    /// Sigmoid of each logit, then the top k.
    Sigmoid,
}

/// How a token chooses its experts. Ties go to the lower expert.
#[derive(Debug)]
pub struct RouteSpec<'a, Buffer> {
    /// Experts per token.
    pub top_k: usize,
    /// Logits to scores.
    pub score: RouteScore,
    /// Added to scores for the choice only, `[experts]`.
    pub correction: Option<&'a Buffer>,
    /// Divide the chosen scores by their sum plus this.
    pub normalize_epsilon: Option<f32>,
    /// Factor on the final weights.
    pub scale: f32,
    /// The experts that this rank holds; pairs with any other give zero rows and no work.
    pub local: Range<usize>,
}

/// Shape of a gated delta rule layer's share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaSpec {
    /// Query and key heads; each serves `value_heads / key_heads` value heads.
    pub key_heads: usize,
    /// Value heads.
    pub value_heads: usize,
    /// Features of a query or key head.
    pub key_dim: usize,
    /// Features of a value head.
    pub value_dim: usize,
    /// Whether value heads go round the key heads, as GGUF files have them, so that head `h` reads key head `h % key_heads`.
    /// Otherwise those of one key head stand together.
    pub tiled: bool,
}

impl DeltaSpec {
    /// The key head that a value head reads.
    pub fn key_head(&self, value_head: usize) -> usize {
        match self.tiled {
            true => value_head % self.key_heads,
            false => value_head / (self.value_heads / self.key_heads),
        }
    }
}

/// A weight that is filled piece by piece is filled from rows on that are multiples of this.
pub const FILL_ROWS: usize = 32;

/// The operations of a forward pass.
///
/// A forward pass is written once against this trait. It holds buffers, never slices: a buffer may live on a device, and its
/// values can be looked at only through [`with_host`](Self::with_host), which waits for the device.
/// An operation gives its output buffer the shape that follows from its inputs, so shapes flow through a pass by themselves.
///
/// Activations are f32, row-major, one token per row. Outputs come first. Shapes that don't match are mistakes in the caller
/// and panic; only what a running device can do wrong is an error.
pub trait Backend: Send + Sync + 'static {
    /// Activations or a vector of parameters: f32, `[rows, cols]`.
    type Buffer: Send + Sync;
    /// A weight in the layout that this backend's kernels stream.
    type Weight: Send + Sync;
    /// Keys and values of one layer.
    type Cache: Send;
    /// For each token of a batch, its experts and their weights.
    type Routing: Send;

    // Memory.

    /// A buffer with room for `capacity` values, shaped `[0, 0]`. Operations never grow a buffer.
    fn buffer(&self, capacity: usize) -> Self::Buffer;
    /// Copies values in and shapes the buffer `[rows, cols]`.
    fn upload(&self, out: &mut Self::Buffer, rows: usize, cols: usize, values: &[f32]);
    /// `(rows, cols)`.
    fn shape(&self, x: &Self::Buffer) -> (usize, usize);
    /// Gives the buffer another shape within its capacity; what it holds is then unspecified.
    fn reshape(&self, x: &mut Self::Buffer, rows: usize, cols: usize);
    /// Waits for the device and lends the values to `f`, which may change them: how collectives reach a buffer. In place
    /// where memory is shared, a copy there and back elsewhere.
    fn with_host<R>(&self, x: &mut Self::Buffer, f: impl FnOnce(&mut [f32]) -> R) -> Result<R, ComputeError>;
    /// A buffer `[1, n]` that holds `values`: norm gains, biases, gates.
    fn vector(&self, values: &[f32]) -> Self::Buffer {
        let mut buffer = self.buffer(values.len());
        self.upload(&mut buffer, 1, values.len(), values);
        buffer
    }
    /// Lays a weight out for this backend's kernels.
    fn weight(&self, matrix: Matrix<'_>) -> Self::Weight {
        let mut weight = self.empty_weight(matrix.format, matrix.rows, matrix.cols);
        self.fill_weight(&mut weight, 0, &matrix);
        weight
    }
    /// Room for a weight `[rows, cols]`, to be filled with [`Backend::fill_weight`]: a large one need never be in memory twice.
    fn empty_weight(&self, format: Format, rows: usize, cols: usize) -> Self::Weight;
    /// Takes over `piece`, which are the rows from `first_row`, a multiple of [`FILL_ROWS`], on.
    fn fill_weight(&self, w: &mut Self::Weight, first_row: usize, piece: &Matrix<'_>);
    /// Names the layout of weights in memory, with its version and all else that it depends on, such as the instruction set.
    /// `None` if weights cannot be stored.
    fn layout_name(&self) -> Option<String> {
        None
    }
    /// The memory of a weight, to be stored or restored: its values, and the factors of its rows, for which room is made first if
    /// `row_scale`. `None` if weights cannot be stored.
    fn weight_memory<'w>(&self, _w: &'w mut Self::Weight, _row_scale: bool) -> Option<[&'w mut [u8]; 2]> {
        None
    }
    /// Bytes that a weight takes in this backend's memory.
    fn weight_bytes(&self, w: &Self::Weight) -> usize;

    // Products.

    /// Rows of the embedding table: `out[i] = w[tokens[i]]`, `[tokens, cols]`. A token past the table's end gives zeros: a
    /// shard that holds a part of the vocabulary leaves the rest to the others.
    fn embed(&self, out: &mut Self::Buffer, w: &Self::Weight, tokens: &[u32]);
    /// `out = x · wᵀ`: `[n, cols] · [rows, cols]ᵀ → [n, rows]`.
    fn matmul(&self, out: &mut Self::Buffer, x: &Self::Buffer, w: &Self::Weight);

    // Rows.

    /// RMS norm over each run of `width` columns. `gain` has `width` values.
    fn rms_norm(
        &self,
        out: &mut Self::Buffer,
        x: &Self::Buffer,
        width: usize,
        gain: NormGain<'_, Self::Buffer>,
        epsilon: f32,
    );
    /// The same in place.
    fn rms_norm_in_place(&self, x: &mut Self::Buffer, width: usize, gain: NormGain<'_, Self::Buffer>, epsilon: f32);
    /// `x[i] *= gain` for every row, `gain` of shape `[cols]`.
    fn scale_columns(&self, x: &mut Self::Buffer, gain: &Self::Buffer);
    /// `out[i] = Σ x[i]²`, `[n, 1]`: the first half of an RMS norm whose rows lie on several ranks.
    fn sum_squares(&self, out: &mut Self::Buffer, x: &Self::Buffer);
    /// `x[i] /= sqrt(squares[i] / width + epsilon)`: the second half, with the squares summed over the ranks.
    fn scale_by_squares(&self, x: &mut Self::Buffer, squares: &Self::Buffer, width: usize, epsilon: f32);
    /// `x += y`.
    fn add(&self, x: &mut Self::Buffer, y: &Self::Buffer);
    /// `x[i] += row` for every row.
    fn add_row(&self, x: &mut Self::Buffer, row: &Self::Buffer);
    /// `x = alpha · x + beta · y`, with `alpha` and `beta` of shape `[cols]`.
    fn blend(&self, x: &mut Self::Buffer, alpha: &Self::Buffer, y: &Self::Buffer, beta: &Self::Buffer);
    /// `x *= factor`.
    fn scale(&self, x: &mut Self::Buffer, factor: f32);
    /// `x[i] *= factors[i]` for every row.
    fn scale_rows(&self, x: &mut Self::Buffer, factors: &[f32]);
    /// `x = cap · tanh(x / cap)`.
    fn softcap(&self, x: &mut Self::Buffer, cap: f32);
    /// `x *= sigmoid(gate)`; each gate column serves `x.cols / gate.cols` consecutive columns.
    fn sigmoid_gate(&self, x: &mut Self::Buffer, gate: &Self::Buffer);
    /// `gate = activation(gate) · up`.
    fn gated(&self, gate: &mut Self::Buffer, up: &Self::Buffer, activation: Activation);
    /// `out[i] = x[rows[i]]`.
    fn select_rows(&self, out: &mut Self::Buffer, x: &Self::Buffer, rows: &[u32]);

    // Attention.

    /// A cache for one layer.
    fn cache(&self, spec: KvSpec) -> Self::Cache;
    /// Turns each head of `x` (`[n, heads · head_dim]`) by its row's position.
    fn rope(&self, x: &mut Self::Buffer, positions: &[u32], spec: &RopeSpec);
    /// Stores keys `[n, heads · key_dim]` and values `[n, heads · value_dim]` at their runs' positions.
    fn cache_write(&self, cache: &mut Self::Cache, k: &Self::Buffer, v: &Self::Buffer, runs: &[Run<'_>]);
    /// Causal attention of queries `[n, heads · key_dim]` over the cache, which already holds this step's keys:
    /// `out [n, heads · value_dim]`.
    fn attention(
        &self,
        out: &mut Self::Buffer,
        q: &Self::Buffer,
        cache: &Self::Cache,
        runs: &[Run<'_>],
        spec: &AttentionSpec<'_, Self::Buffer>,
    );

    // Experts.

    /// An empty routing with room for `tokens` tokens of `top_k` experts.
    fn routing(&self, tokens: usize, top_k: usize) -> Self::Routing;
    /// Chooses experts from router logits `[n, experts]`.
    fn route(&self, out: &mut Self::Routing, logits: &Self::Buffer, spec: &RouteSpec<'_, Self::Buffer>);
    /// The product of each (token, expert) pair with its expert's part of `w`, which stacks the local experts along its
    /// rows: `out [n · top_k, rows / local experts]`, pairs in token order. `x` has a row per token or a row per pair.
    fn expert_matmul(&self, out: &mut Self::Buffer, x: &Self::Buffer, w: &Self::Weight, routing: &Self::Routing);
    /// Adds each pair's row of `bias` `[local experts, cols]`.
    fn expert_add(&self, x: &mut Self::Buffer, bias: &Self::Buffer, routing: &Self::Routing);
    /// `out[t] = Σ weight · x[pair]` over token `t`'s pairs: `[n · top_k, cols] → [n, cols]`.
    fn expert_combine(&self, out: &mut Self::Buffer, x: &Self::Buffer, routing: &Self::Routing);

    // Recurrent layers. A state is a buffer with one row per slot.

    /// Depthwise causal convolution and SiLU: `out[t, c] = silu(Σ_j weight[c, j] · x[t - kernel + 1 + j, c])`.
    /// `weight` is `[channels, kernel]`; `state`, `[slots, (kernel - 1) · channels]`, holds the inputs before the run,
    /// oldest first, and is updated.
    fn causal_conv(
        &self,
        out: &mut Self::Buffer,
        x: &Self::Buffer,
        weight: &Self::Buffer,
        state: &mut Self::Buffer,
        runs: &[Run<'_>],
    );
    /// The gated delta rule (Yang et al. 2024, "Gated Delta Networks"). Queries and keys are L2-normalized per head
    /// (epsilon 1e-6) and queries scaled by `key_dim^-0.5`. Per value head with state `S [key_dim, value_dim]`:
    /// `S ← S · exp(decay)`, `S ← S + kᵀ · (beta · (v - k · S))`, `out = q · S`.
    ///
    /// `qkv` is `[n, 2 · key_heads · key_dim + value_heads · value_dim]` in segments q, k, v; `decay` and `beta` are
    /// `[n, value_heads]`, final values; `state` is `[slots, value_heads · key_dim · value_dim]`.
    #[allow(clippy::too_many_arguments)]
    fn delta_rule(
        &self,
        out: &mut Self::Buffer,
        qkv: &Self::Buffer,
        decay: &Self::Buffer,
        beta: &Self::Buffer,
        state: &mut Self::Buffer,
        runs: &[Run<'_>],
        spec: DeltaSpec,
    );
    /// The gates of a delta layer, in place: `a ← -exp(a_log) · softplus(a + dt_bias)`, `b ← sigmoid(b)`.
    fn delta_gates(&self, a: &mut Self::Buffer, b: &mut Self::Buffer, a_log: &Self::Buffer, dt_bias: &Self::Buffer);
}
