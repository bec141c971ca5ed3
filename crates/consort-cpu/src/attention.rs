//! Attention over the cache, in tiles (Dao et al. 2022, "FlashAttention").
//!
//! A task takes the query heads that share a key head, for a few consecutive tokens, and walks the positions that they see in
//! tiles of 256: it unpacks keys and values once for all its queries and multiplies with the microkernels of the other
//! products. Keys are transposed to tokens side by side, so that their products need no sum across lanes.
//!
//! The sums of a query are cut into segments of fixed length, which are added up in order. With few queries, segments are
//! tasks of their own, so that a long context occupies all threads. What is added to what depends on positions alone: a
//! query's result has the same bits in any batch, chunk or number of threads.

use std::cell::RefCell;
use std::ops::Range;

use consort_compute::portable::rows::softcap_value;
use consort_compute::portable::{HostBuffer, HostCache};
use consort_compute::{AttentionSpec, KvFormat, Run};

use crate::activations::FloatRow;
use crate::isa::{Kernel, LANES, Simd};
use crate::math::exp;
use crate::memory::Disjoint;
use crate::product::{Machine, multiply_float_rows};
use crate::weight::{CHUNK, FloatChunk};

/// Positions of a tile.
const TILE: usize = CHUNK;
/// Positions of a segment: a multiple of a tile's.
const SEGMENT: usize = 4 * TILE;
/// Queries of a task, if one token has no more heads than that.
const QUERIES: usize = 48;
/// Up to this many queries wait for memory, not for products.
const FEW_QUERIES: usize = 8;
/// How many positions ahead of their use keys and values are asked for.
const AHEAD: usize = LANES;
/// Below any logit, and such that the difference of two is a number.
const LOWEST: f32 = -1e30;

thread_local! {
    /// Memory of each thread that computes.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
    /// Memory of each thread that calls: the groups of heads, and the sums of segments that were tasks.
    static CALLER: RefCell<(Vec<Range<usize>>, Vec<f32>)> = RefCell::default();
}

/// Attention of queries `[n, heads · key_dim]` over the cache, which already holds this step's keys:
/// `out [n, heads · value_dim]`.
pub fn attention(
    machine: Machine<'_>,
    out: &mut HostBuffer,
    q: &HostBuffer,
    cache: &HostCache,
    runs: &[Run<'_>],
    spec: &AttentionSpec<'_, HostBuffer>,
) {
    let (key_dim, value_dim) = (cache.spec().key_dim, cache.spec().value_dim);
    assert_eq!(q.cols(), spec.heads * key_dim, "queries of this cache");
    out.reshape(q.rows(), spec.heads * value_dim);
    let out = Disjoint::new(out.values_mut());
    CALLER.with_borrow_mut(|(groups, sums)| {
        group_heads(groups, spec, cache.spec().heads);
        for run in runs {
            attend_run(machine, out, q, cache, run, spec, groups, sums);
        }
    });
}

/// Runs of consecutive query heads that read one KV head.
fn group_heads(groups: &mut Vec<Range<usize>>, spec: &AttentionSpec<'_, HostBuffer>, kv_heads: usize) {
    groups.clear();
    for head in 0..spec.heads {
        match groups.last_mut() {
            Some(group) if spec.kv_head(group.start, kv_heads) == spec.kv_head(head, kv_heads) => group.end = head + 1,
            _ => groups.push(head..head + 1),
        }
    }
}

#[allow(clippy::too_many_arguments)]
fn attend_run(
    machine: Machine<'_>,
    out: Disjoint<'_, f32>,
    q: &HostBuffer,
    cache: &HostCache,
    run: &Run<'_>,
    spec: &AttentionSpec<'_, HostBuffer>,
    groups: &[Range<usize>],
    memory: &mut Vec<f32>,
) {
    let (pool, isa) = (machine.pool, machine.isa);
    let tokens = run.rows.len();
    let most_heads = groups.iter().map(Range::len).max().unwrap_or(0);
    if tokens == 0 || most_heads == 0 {
        return;
    }
    let tokens_of_tile = (QUERIES / most_heads).clamp(1, tokens);
    let tiles = tokens.div_ceil(tokens_of_tile);
    let query = |group: &Range<usize>, tile: usize| Queries {
        q,
        cache,
        run,
        spec,
        heads: group.clone(),
        tokens: tile * tokens_of_tile..tokens.min((tile + 1) * tokens_of_tile),
    };
    let first_segment = spec.first_position(run.start) / SEGMENT;
    let segments = (run.start + tokens).div_ceil(SEGMENT) - first_segment;
    let state = State::len(most_heads * tokens_of_tile, cache.spec().value_dim);

    if groups.len() * tiles >= 4 * pool.threads() || segments == 1 {
        // The longest tasks, at the end of the run, first.
        pool.run(groups.len() * tiles, |task| {
            let queries = query(&groups[task % groups.len()], tiles - 1 - task / groups.len());
            SCRATCH.with_borrow_mut(|scratch| {
                isa.run(Attend { queries: &queries, out, scratch });
            });
        });
        return;
    }

    if memory.len() < groups.len() * tiles * segments * state {
        memory.resize(groups.len() * tiles * segments * state, 0.0);
    }
    let sums = Disjoint::new(memory);
    pool.run(groups.len() * tiles * segments, |task| {
        let (place, segment) = (task / segments, first_segment + task % segments);
        let queries = query(&groups[place / tiles], place % tiles);
        // SAFETY: each task has sums of its own.
        let sums = unsafe { sums.slice(task * state, state) };
        SCRATCH.with_borrow_mut(|scratch| isa.run(AttendSegment { queries: &queries, segment, sums, scratch }));
    });
    pool.run(groups.len() * tiles, |place| {
        let queries = query(&groups[place / tiles], place % tiles);
        // SAFETY: as above; the loop that wrote them is over.
        let sums = unsafe { sums.slice(place * segments * state, segments * state) };
        SCRATCH.with_borrow_mut(|scratch| isa.run(Merge { queries: &queries, sums, state, out, scratch }));
    });
}

/// The query heads that share a KV head, for some tokens of a run.
struct Queries<'a> {
    q: &'a HostBuffer,
    cache: &'a HostCache,
    run: &'a Run<'a>,
    spec: &'a AttentionSpec<'a, HostBuffer>,
    heads: Range<usize>,
    tokens: Range<usize>,
}

impl Queries<'_> {
    fn len(&self) -> usize {
        self.heads.len() * self.tokens.len()
    }

    /// Token and head of query `i`. Queries of one token follow each other.
    fn place(&self, i: usize) -> (usize, usize) {
        (self.tokens.start + i / self.heads.len(), self.heads.start + i % self.heads.len())
    }

    /// Positions that query `i` sees.
    fn visible(&self, i: usize) -> Range<usize> {
        let position = self.run.start + self.place(i).0;
        self.spec.first_position(position)..position + 1
    }

    /// Positions that any of the queries sees.
    fn visible_to_any(&self) -> Range<usize> {
        self.visible(0).start..self.visible(self.len() - 1).end
    }
}

/// Sums in progress of some queries: the largest logit, the sum of weights, and the weighted values, `value_dim` padded to
/// whole vectors. All f32, so that it can lie in plain memory.
struct State<'a> {
    largest: &'a mut [f32],
    weight: &'a mut [f32],
    /// `[panel of 16 features][query][16]`.
    values: &'a mut [[f32; LANES]],
}

impl<'a> State<'a> {
    fn len(queries: usize, value_dim: usize) -> usize {
        queries * (2 + value_dim.next_multiple_of(LANES))
    }

    fn new(memory: &'a mut [f32], queries: usize) -> Self {
        let (largest, rest) = memory.split_at_mut(queries);
        let (weight, rest) = rest.split_at_mut(queries);
        Self { largest, weight, values: rest.as_chunks_mut().0 }
    }

    fn clear(&mut self) {
        self.largest.fill(LOWEST);
        self.weight.fill(0.0);
        self.values.fill([0.0; LANES]);
    }

    /// Adds the sums of a later segment.
    #[inline(always)]
    fn merge<S: Simd>(&mut self, simd: S, later: &State<'_>) {
        let queries = self.largest.len();
        for i in 0..queries {
            let largest = if later.largest[i] > self.largest[i] { later.largest[i] } else { self.largest[i] };
            let (mine, its) = ((self.largest[i] - largest).exp(), (later.largest[i] - largest).exp());
            self.largest[i] = largest;
            self.weight[i] = self.weight[i] * mine + later.weight[i] * its;
            let (mine, its) = (simd.splat(mine), simd.splat(its));
            for panel in (i..self.values.len()).step_by(queries) {
                let scaled = simd.mul(simd.load(&self.values[panel]), mine);
                simd.store(simd.fma(simd.load(&later.values[panel]), its, scaled), &mut self.values[panel]);
            }
        }
    }

    /// Divides by the weights and writes the results.
    #[inline(always)]
    fn finish<S: Simd>(&self, simd: S, queries: &Queries<'_>, out: Disjoint<'_, f32>) {
        let value_dim = queries.cache.spec().value_dim;
        for i in 0..queries.len() {
            let (token, head) = queries.place(i);
            let (mut weight, mut factor) = (self.weight[i], 1.0);
            if let Some(sinks) = queries.spec.sinks {
                let sink = sinks.values()[head];
                let largest = if sink > self.largest[i] { sink } else { self.largest[i] };
                factor = (self.largest[i] - largest).exp();
                weight = weight * factor + (sink - largest).exp();
            }
            let factor = simd.splat(factor / weight);
            let row = queries.run.rows.start + token;
            // SAFETY: each query has its own place, and belongs to one task.
            let out = unsafe { out.slice((row * queries.spec.heads + head) * value_dim, value_dim) };
            for (panel, out) in out.chunks_mut(LANES).enumerate() {
                let mut values = [0.0; LANES];
                simd.store(simd.mul(simd.load(&self.values[panel * queries.len() + i]), factor), &mut values);
                out.copy_from_slice(&values[..out.len()]);
            }
        }
    }
}

/// Working memory of a task, taken once.
#[derive(Default)]
struct Scratch {
    /// `[chunk of key features][query]`.
    queries: Vec<FloatRow>,
    /// `[chunk of key features]`: a feature of 16 tokens side by side.
    keys: Vec<FloatChunk>,
    /// `[16 value features][token]`: 16 features of a token side by side.
    values: Vec<[f32; LANES]>,
    /// `[panel of 16 tokens][query][16]`.
    logits: Vec<[f32; LANES]>,
    /// `[query]`: the weights of a tile's tokens.
    weights: Vec<FloatRow>,
    /// Sums of all segments so far, and of the one in progress.
    total: Vec<f32>,
    segment: Vec<f32>,
}

impl Scratch {
    fn grow(&mut self, queries: usize, key_dim: usize, value_dim: usize) {
        fn at_least<T: Clone>(memory: &mut Vec<T>, len: usize, zero: T) {
            if memory.len() < len {
                memory.resize(len, zero);
            }
        }
        let key_chunks = key_dim.div_ceil(CHUNK);
        at_least(&mut self.queries, key_chunks * queries, FloatRow([0.0; CHUNK]));
        at_least(&mut self.keys, key_chunks, FloatChunk::ZERO);
        at_least(&mut self.values, TILE * value_dim.div_ceil(LANES), [0.0; LANES]);
        at_least(&mut self.logits, TILE / LANES * queries, [0.0; LANES]);
        at_least(&mut self.weights, queries, FloatRow([0.0; CHUNK]));
        at_least(&mut self.total, State::len(queries, value_dim), 0.0);
        at_least(&mut self.segment, State::len(queries, value_dim), 0.0);
    }
}

/// All segments of some queries, one after the other.
struct Attend<'a> {
    queries: &'a Queries<'a>,
    out: Disjoint<'a, f32>,
    scratch: &'a mut Scratch,
}

impl Kernel for Attend<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { queries, out, scratch } = self;
        let (n, cache) = (queries.len(), queries.cache.spec());
        scratch.grow(n, cache.key_dim, cache.value_dim);
        let len = State::len(n, cache.value_dim);
        let (mut total, mut part) = (std::mem::take(&mut scratch.total), std::mem::take(&mut scratch.segment));
        let mut sums = State::new(&mut total[..len], n);
        let mut segment_sums = State::new(&mut part[..len], n);
        sums.clear();
        let visible = queries.visible_to_any();
        for segment in visible.start / SEGMENT..visible.end.div_ceil(SEGMENT) {
            attend_segment(simd, queries, segment, &mut segment_sums, scratch);
            sums.merge(simd, &segment_sums);
        }
        sums.finish(simd, queries, out);
        (scratch.total, scratch.segment) = (total, part);
    }
}

/// One segment of some queries.
struct AttendSegment<'a> {
    queries: &'a Queries<'a>,
    segment: usize,
    sums: &'a mut [f32],
    scratch: &'a mut Scratch,
}

impl Kernel for AttendSegment<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { queries, segment, sums, scratch } = self;
        let (n, cache) = (queries.len(), queries.cache.spec());
        scratch.grow(n, cache.key_dim, cache.value_dim);
        let mut sums = State::new(&mut sums[..State::len(n, cache.value_dim)], n);
        attend_segment(simd, queries, segment, &mut sums, scratch);
    }
}

/// Adds up the segments of some queries.
struct Merge<'a> {
    queries: &'a Queries<'a>,
    sums: &'a mut [f32],
    /// Values of one segment's sums.
    state: usize,
    out: Disjoint<'a, f32>,
    scratch: &'a mut Scratch,
}

impl Kernel for Merge<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { queries, sums, state, out, scratch } = self;
        let (n, cache) = (queries.len(), queries.cache.spec());
        scratch.grow(n, cache.key_dim, cache.value_dim);
        let len = State::len(n, cache.value_dim);
        let mut total = State::new(&mut scratch.total[..len], n);
        total.clear();
        for segment in sums.chunks_exact_mut(state) {
            total.merge(simd, &State::new(&mut segment[..len], n));
        }
        total.finish(simd, queries, out);
    }
}

/// The sums of one segment.
#[inline(always)]
fn attend_segment<S: Simd>(
    simd: S,
    queries: &Queries<'_>,
    segment: usize,
    sums: &mut State<'_>,
    scratch: &mut Scratch,
) {
    sums.clear();
    let (n, cache) = (queries.len(), queries.cache.spec());
    let visible = queries.visible_to_any();
    let end = visible.end.min((segment + 1) * SEGMENT);
    // Tiles begin at multiples of their length, whatever a window cuts off.
    let first = visible.start.max(segment * SEGMENT) / TILE * TILE;
    load_queries(queries, &mut scratch.queries);
    for tile in (first..end).step_by(TILE) {
        let positions = tile.max(visible.start / LANES * LANES)..end.min(tile + TILE);
        let panels = (positions.start - tile) / LANES..(positions.end - tile).div_ceil(LANES);
        let format = cache.format;

        // Logits, 16 keys at a time.
        for panel in panels.clone() {
            load_keys(simd, format, queries, tile + panel * LANES, &positions, &mut scratch.keys);
            let logits = &mut scratch.logits[panel * n..(panel + 1) * n];
            logits.fill([0.0; LANES]);
            for (chunk, keys) in scratch.keys.iter().enumerate().take(cache.key_dim.div_ceil(CHUNK)) {
                let columns = (cache.key_dim - chunk * CHUNK).min(CHUNK);
                let x = &scratch.queries[chunk * n..(chunk + 1) * n];
                multiply_float_rows(simd, 0..columns, &keys.0, |i| &x[i].0, logits);
            }
        }

        // Weights.
        for i in 0..n {
            let row = Row { i, n, tile, panels: panels.clone(), visible: queries.visible(i) };
            weigh(simd, queries.spec, &row, &mut scratch.logits, &mut scratch.weights[i].0, sums);
        }

        // Values: few queries take them from the first-level cache, many read as many as they can at a time.
        let tokens_at_once = if n <= FEW_QUERIES { LANES } else { TILE };
        for first in (panels.start * LANES..panels.end * LANES).step_by(tokens_at_once) {
            let tokens = first..panels.end.saturating_mul(LANES).min(first + tokens_at_once);
            for token in tokens.clone().step_by(LANES) {
                let out = &mut scratch.values[token - first..];
                load_values(simd, format, queries, tile + token, &positions, out, tokens_at_once);
            }
            for (vector, sums) in sums.values.chunks_exact_mut(n).enumerate() {
                let (weights, values) = (&scratch.weights, &scratch.values[vector * tokens_at_once..]);
                multiply_float_rows(simd, tokens.clone(), values, |i| &weights[i].0, sums);
            }
        }
    }
}

/// Copies queries to where products read them.
#[inline(always)]
fn load_queries(queries: &Queries<'_>, out: &mut [FloatRow]) {
    let (n, key_dim) = (queries.len(), queries.cache.spec().key_dim);
    for i in 0..n {
        let (token, head) = queries.place(i);
        let query = &queries.q.row(queries.run.rows.start + token)[head * key_dim..][..key_dim];
        for (chunk, values) in query.chunks(CHUNK).enumerate() {
            out[chunk * n + i].0[..values.len()].copy_from_slice(values);
        }
    }
}

/// One query in one tile.
struct Row {
    i: usize,
    /// Queries of the task.
    n: usize,
    /// Position where the tile begins.
    tile: usize,
    /// Panels of 16 tokens that are in use.
    panels: Range<usize>,
    visible: Range<usize>,
}

/// Turns a query's logits into weights, and scales what was summed before them.
#[inline(always)]
fn weigh<S: Simd>(
    simd: S,
    spec: &AttentionSpec<'_, HostBuffer>,
    row: &Row,
    logits: &mut [[f32; LANES]],
    weights: &mut [f32; TILE],
    sums: &mut State<'_>,
) {
    let (scale, lowest) = (simd.splat(spec.scale), simd.splat(LOWEST));
    let (weights, _) = weights.as_chunks_mut::<LANES>();
    let mut largest = lowest;
    for panel in row.panels.clone() {
        let first = row.tile + panel * LANES;
        let logits = &mut logits[panel * row.n + row.i];
        simd.store(simd.mul(simd.load(logits), scale), logits);
        if let Some(cap) = spec.softcap {
            for logit in logits.iter_mut() {
                *logit = softcap_value(*logit, cap);
            }
        }
        if first < row.visible.start || first + LANES > row.visible.end {
            for (lane, logit) in logits.iter_mut().enumerate() {
                if !row.visible.contains(&(first + lane)) {
                    *logit = LOWEST;
                }
            }
        }
        largest = simd.max(largest, simd.load(logits));
    }
    let before = sums.largest[row.i];
    let here = simd.largest(largest);
    let largest = if here > before { here } else { before };
    let minus = simd.splat(-largest);
    let mut total = simd.splat(0.0);
    for panel in row.panels.clone() {
        let first = row.tile + panel * LANES;
        let weights = &mut weights[panel];
        simd.store(exp(simd, simd.add(simd.load(&logits[panel * row.n + row.i]), minus)), weights);
        if first < row.visible.start || first + LANES > row.visible.end {
            for (lane, weight) in weights.iter_mut().enumerate() {
                if !row.visible.contains(&(first + lane)) {
                    *weight = 0.0;
                }
            }
        }
        total = simd.add(total, simd.load(weights));
    }
    let factor = if largest == before { 1.0 } else { (before - largest).exp() };
    sums.largest[row.i] = largest;
    sums.weight[row.i] = sums.weight[row.i] * factor + simd.sum(total);
    if factor != 1.0 {
        let factor = simd.splat(factor);
        for values in sums.values[row.i..].iter_mut().step_by(row.n) {
            simd.store(simd.mul(simd.load(values), factor), values);
        }
    }
}

/// Unpacks the keys of 16 positions from `first` on: a feature of 16 tokens side by side. Those outside `positions` become
/// zero.
#[inline(always)]
fn load_keys<S: Simd>(
    simd: S,
    format: KvFormat,
    queries: &Queries<'_>,
    first: usize,
    positions: &Range<usize>,
    out: &mut [FloatChunk],
) {
    let dim = queries.cache.spec().key_dim;
    let keys = tokens(queries, Part::Keys, first, positions);
    let next = tokens(queries, Part::Keys, first + AHEAD, positions);
    let vectors = dim.div_ceil(LANES);
    for vector in 0..vectors {
        for next in &next[vector * LANES / vectors..(vector + 1) * LANES / vectors] {
            simd.prefetch(next);
        }
        let mut rows = [[0.0; LANES]; LANES];
        match format {
            KvFormat::F16 => load_features::<S, F16>(simd, format, &keys, vector, dim, &mut rows),
            KvFormat::BF16 => load_features::<S, BF16>(simd, format, &keys, vector, dim, &mut rows),
            KvFormat::F32 => load_features::<S, F32>(simd, format, &keys, vector, dim, &mut rows),
            KvFormat::Q8 => load_features::<S, Q8>(simd, format, &keys, vector, dim, &mut rows),
        }
        let chunk = &mut out[vector / (CHUNK / LANES)].0;
        simd.transpose(&rows, &mut chunk.as_chunks_mut().0[vector % (CHUNK / LANES)]);
    }
}

/// Unpacks the values of 16 positions from `first` on: 16 features of a token side by side, the next 16 features `stride`
/// tokens later.
#[inline(always)]
fn load_values<S: Simd>(
    simd: S,
    format: KvFormat,
    queries: &Queries<'_>,
    first: usize,
    positions: &Range<usize>,
    out: &mut [[f32; LANES]],
    stride: usize,
) {
    let dim = queries.cache.spec().value_dim;
    let values = tokens(queries, Part::Values, first, positions);
    let next = tokens(queries, Part::Values, first + AHEAD, positions);
    let vectors = dim.div_ceil(LANES);
    for vector in 0..vectors {
        for next in &next[vector * LANES / vectors..(vector + 1) * LANES / vectors] {
            simd.prefetch(next);
        }
        let out = &mut out[vector * stride..].as_chunks_mut().0[0];
        match format {
            KvFormat::F16 => load_features::<S, F16>(simd, format, &values, vector, dim, out),
            KvFormat::BF16 => load_features::<S, BF16>(simd, format, &values, vector, dim, out),
            KvFormat::F32 => load_features::<S, F32>(simd, format, &values, vector, dim, out),
            KvFormat::Q8 => load_features::<S, Q8>(simd, format, &values, vector, dim, out),
        }
    }
}

/// Keys or values.
#[derive(Clone, Copy)]
enum Part {
    Keys,
    Values,
}

/// Bytes of 16 tokens.
type Tokens<'a> = [&'a [u8]; LANES];

/// The keys or values of 16 positions from `first` on; nothing for those outside `positions`.
#[inline(always)]
fn tokens<'a>(queries: &Queries<'a>, part: Part, first: usize, positions: &Range<usize>) -> Tokens<'a> {
    let (cache, run) = (queries.cache, queries.run);
    let kv_head = queries.spec.kv_head(queries.heads.start, cache.spec().heads);
    let mut tokens: Tokens<'a> = [&[]; LANES];
    let lanes = positions.start.max(first) - first..positions.end.clamp(first, first + LANES) - first;
    let mut lane = lanes.start;
    while lane < lanes.end {
        // As many as lie in one block.
        let (block, token) = cache.place(run, first + lane);
        let end = lanes.end.min(lane + cache.spec().block_tokens - token);
        let (bytes, block) = match part {
            Part::Keys => (cache.key_bytes(), cache.keys(block, kv_head)),
            Part::Values => (cache.value_bytes(), cache.values(block, kv_head)),
        };
        for (lane, token) in (lane..end).zip(block[token * bytes..].chunks_exact(bytes)) {
            tokens[lane] = token;
        }
        lane = end;
    }
    tokens
}

/// Vector `vector` of 16 features of each token, zero past the last feature; all zero where there is no token.
#[inline(always)]
fn load_features<S: Simd, F: Features>(
    simd: S,
    format: KvFormat,
    tokens: &Tokens<'_>,
    vector: usize,
    dim: usize,
    out: &mut [[f32; LANES]; LANES],
) {
    let first = vector * LANES;
    for (token, out) in tokens.iter().zip(out) {
        if token.is_empty() {
            *out = [0.0; LANES];
        } else if first + LANES <= dim {
            simd.store(F::load(simd, token, vector), out);
        } else {
            // The last features, with those of their block before them.
            const BLOCK: usize = 32;
            let (format, before) = (format.format(), first % BLOCK);
            let mut values = [0.0; BLOCK];
            let count = dim - first + before;
            format.decode_row(&token[format.row_bytes(first - before)..], &mut values[..count]);
            *out = [0.0; LANES];
            out[..dim - first].copy_from_slice(&values[before..count]);
        }
    }
}

/// How 16 features of a token are read.
trait Features {
    fn load<S: Simd>(simd: S, token: &[u8], vector: usize) -> S::Floats;
}

struct F16;
struct BF16;
struct F32;
struct Q8;

impl Features for F16 {
    #[inline(always)]
    fn load<S: Simd>(simd: S, token: &[u8], vector: usize) -> S::Floats {
        simd.load_f16(&token.as_chunks().0[vector])
    }
}

impl Features for BF16 {
    #[inline(always)]
    fn load<S: Simd>(simd: S, token: &[u8], vector: usize) -> S::Floats {
        simd.load_bf16(&token.as_chunks().0[vector])
    }
}

impl Features for F32 {
    #[inline(always)]
    fn load<S: Simd>(simd: S, token: &[u8], vector: usize) -> S::Floats {
        let (values, _) = token.as_chunks::<4>();
        let mut floats = [0.0; LANES];
        for (float, bytes) in floats.iter_mut().zip(&values[vector * LANES..]) {
            *float = f32::from_le_bytes(*bytes);
        }
        simd.load(&floats)
    }
}

impl Features for Q8 {
    #[inline(always)]
    fn load<S: Simd>(simd: S, token: &[u8], vector: usize) -> S::Floats {
        // An f16 scale, then 32 signed bytes.
        let block: &[u8; 2 + 32] = &token.as_chunks().0[vector / 2];
        let scale = half::f16::from_le_bytes([block[0], block[1]]).to_f32();
        let codes = &block[2..].as_chunks().0[vector % 2];
        simd.mul(simd.load_i8(codes), simd.splat(scale))
    }
}
