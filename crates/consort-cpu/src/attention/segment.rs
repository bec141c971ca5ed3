//! The sums of one segment of positions, tile by tile.

use std::ops::Range;

use consort_compute::portable::HostBuffer;
use consort_compute::{AttentionSpec, KvFormat};

use crate::activations::FloatRow;
use crate::isa::{LANES, Simd};
use crate::math::{capped, exp2};
use crate::microkernel::{self, Vectors, multiply};
use crate::weight::CHUNK;

use super::cached::Panels;
use super::direct::{Logits, Values};
use super::queries::Queries;
use super::stored::{Q8, Stored, unit};
use super::sums::{LOWEST, Sums};

/// Positions of a tile: their weights are computed together.
pub const TILE: usize = 128;
/// Positions of a segment.
pub const SEGMENT: usize = 4 * TILE;
/// Panels of keys that are unpacked before they are multiplied: as many as a product takes at a time.
const KEY_PANELS: usize = 2;
/// Up to this many queries multiply what the cache stores, more what was unpacked to memory once.
const FEW_QUERIES: usize = 8;

/// Working memory of a task, taken once.
#[derive(Default)]
pub struct Scratch {
    /// `[chunk of key features][query]`.
    queries: Vec<FloatRow>,
    /// `[panel of 16 positions][feature]`: a feature of 16 keys side by side.
    keys: Vec<[f32; LANES]>,
    /// `[position][16 features]`: 16 features of a value side by side.
    values: Vec<[f32; LANES]>,
    /// `[query][position]`: a tile's logits, then its weights.
    weights: Vec<[f32; TILE]>,
    /// The sums of a block of key features; then the weights, times the scales of the values.
    scaled: Vec<[f32; TILE]>,
}

impl Scratch {
    /// Makes room, and takes the queries in.
    #[inline(always)]
    pub fn load(&mut self, queries: &Queries<'_>) {
        let (n, cache) = (queries.len(), queries.cache());
        at_least(&mut self.queries, cache.key_dim.div_ceil(CHUNK) * n, FloatRow([0.0; CHUNK]));
        at_least(&mut self.keys, KEY_PANELS * cache.key_dim, [0.0; LANES]);
        at_least(&mut self.values, TILE * cache.value_dim.div_ceil(LANES), [0.0; LANES]);
        at_least(&mut self.weights, n, [0.0; TILE]);
        if cache.format == KvFormat::Q8 {
            at_least(&mut self.scaled, n, [0.0; TILE]);
        }
        // Logits are powers of two; a cap is on powers of e.
        let power = if queries.spec.softcap.is_some() { 1.0 } else { std::f32::consts::LOG2_E };
        queries.load(queries.spec.scale * power * unit(cache.format), &mut self.queries);
    }
}

/// Lengthens memory that is too short.
pub fn at_least<T: Clone>(memory: &mut Vec<T>, len: usize, zero: T) {
    if memory.len() < len {
        memory.resize(len, zero);
    }
}

/// The sums of one segment, from queries that were loaded.
#[inline(always)]
pub fn attend_segment<S: Simd>(
    simd: S,
    queries: &Queries<'_>,
    segment: usize,
    sums: &mut Sums<'_>,
    scratch: &mut Scratch,
) {
    sums.clear();
    let visible = queries.visible_to_any();
    let end = visible.end.min((segment + 1) * SEGMENT);
    // Tiles begin at multiples of their length, whatever a window cuts off.
    let first = visible.start.max(segment * SEGMENT) / TILE * TILE;
    let mut panels = queries.cached.panels(first, &visible);
    for tile in (first..end).step_by(TILE) {
        let seen = tile.max(visible.start)..end.min(tile + TILE);
        let next = queries.cached.panels(tile + TILE, &visible);
        logits(simd, queries, tile, &seen, &panels, scratch);
        // Weighing reads no memory: the time to ask for the first of the next tile's keys.
        let mut ahead = next.keys[0].chunks(next.keys[0].len().div_ceil(queries.len()).max(1));
        for (i, weights) in scratch.weights[..queries.len()].iter_mut().enumerate() {
            let visible = queries.visible(i);
            let seen = seen.start.max(visible.start)..seen.end.min(visible.end);
            simd.prefetch_early(ahead.next().unwrap_or_default());
            weigh(simd, queries.spec, i, tile, seen, weights, sums);
        }
        add_values(simd, queries, tile, &seen, [&panels, &next], scratch, sums);
        panels = next;
    }
}

/// The logits of a tile.
#[inline(always)]
fn logits<S: Simd>(
    simd: S,
    queries: &Queries<'_>,
    tile: usize,
    seen: &Range<usize>,
    panels: &Panels<'_>,
    scratch: &mut Scratch,
) {
    let (n, key_dim) = (queries.len(), queries.cache().key_dim);
    let Scratch { queries: rows, keys, weights, scaled, .. } = scratch;
    let end = (seen.end - tile).div_ceil(LANES);
    let mut panel = (seen.start - tile) / LANES;
    if n <= FEW_QUERIES && queries.cached.has_direct_keys(panels.keys[panel]) {
        let logits = Logits {
            queries: rows,
            key_dim,
            panels: &panels.keys[panel..end],
            // This tile's values come next.
            ahead: &panels.values[panel..end],
            first: panel,
        };
        return logits.write(simd, queries.cache().format, &mut weights[..n]);
    }
    while panel < end {
        let count = KEY_PANELS.min(end - panel);
        for (i, keys) in keys.chunks_exact_mut(key_dim).enumerate().take(count) {
            let first = tile + (panel + i) * LANES;
            let ahead = panels.values[panel + i];
            queries.cached.unpack_keys(simd, panels.keys[panel + i], first, seen, ahead, keys);
        }
        for weights in &mut weights[..n] {
            weights[panel * LANES..(panel + count) * LANES].fill(0.0);
        }
        let keys = &*keys;
        if queries.cached.has_scaled_keys(panels.keys[panel]) {
            for first in (0..key_dim).step_by(Q8::FEATURES) {
                for sums in &mut scaled[..n] {
                    sums[panel * LANES..(panel + count) * LANES].fill(0.0);
                }
                let (chunk, column) = (first / CHUNK, first % CHUNK);
                let rows = FloatRow::values(&rows[chunk * n..(chunk + 1) * n]);
                let columns = column..column + Q8::FEATURES;
                let vectors = Vectors { lanes: &keys[first..], stride: key_dim, step: 1, count };
                let out = &mut scaled[..n].as_flattened_mut().as_chunks_mut().0[panel..];
                multiply(
                    simd,
                    rows,
                    columns,
                    vectors,
                    &mut microkernel::Sums { lanes: out, stride: TILE / LANES },
                    &[],
                );
                for panel in panel..panel + count {
                    let scales = Q8::key_scales(simd, &Q8::keys(panels.keys[panel])[first / Q8::FEATURES]);
                    for (sums, logits) in scaled.iter().zip(&mut weights[..n]) {
                        let (sums, logits) = (&sums.as_chunks().0[panel], &mut logits.as_chunks_mut().0[panel]);
                        simd.store(simd.fma(simd.load(sums), scales, simd.load(logits)), logits);
                    }
                }
            }
            panel += count;
            continue;
        }
        let out = &mut weights[..n].as_flattened_mut().as_chunks_mut().0[panel..];
        let mut out = microkernel::Sums { lanes: out, stride: TILE / LANES };
        for chunk in 0..key_dim.div_ceil(CHUNK) {
            let columns = 0..(key_dim - chunk * CHUNK).min(CHUNK);
            let keys = Vectors { lanes: &keys[chunk * CHUNK..], stride: key_dim, step: 1, count };
            multiply(simd, FloatRow::values(&rows[chunk * n..(chunk + 1) * n]), columns, keys, &mut out, &[]);
        }
        panel += count;
    }
}

/// Turns a query's logits of a tile into weights, and adds them up. The query sees the positions `seen`.
#[inline(always)]
fn weigh<S: Simd>(
    simd: S,
    spec: &AttentionSpec<'_, HostBuffer>,
    query: usize,
    tile: usize,
    seen: Range<usize>,
    weights: &mut [f32; TILE],
    sums: &mut Sums<'_>,
) {
    if seen.is_empty() {
        return weights.fill(0.0);
    }
    let (start, end) = (seen.start - tile, seen.end - tile);
    if let Some(cap) = spec.softcap {
        let to_base_2 = simd.splat(std::f32::consts::LOG2_E);
        for logits in &mut weights.as_chunks_mut().0[start / LANES..end.div_ceil(LANES)] {
            simd.store(simd.mul(capped(simd, simd.load(logits), cap), to_base_2), logits);
        }
    }
    weights[..start].fill(LOWEST);
    weights[end..].fill(LOWEST);
    let (weights, _) = weights.as_chunks_mut::<LANES>();
    let mut largest = simd.splat(LOWEST);
    for logits in &weights[start / LANES..end.div_ceil(LANES)] {
        largest = simd.max(largest, simd.load(logits));
    }
    let (before, here) = (sums.largest[query], simd.largest(largest));
    sums.raise(simd, query, if here > before { here } else { before });
    let minus = simd.splat(-sums.largest[query]);
    let mut total = simd.splat(0.0);
    for weights in &mut weights[start / LANES..end.div_ceil(LANES)] {
        // What is not seen is so low that its weight is zero.
        let weight = exp2(simd, simd.add(simd.load(weights), minus));
        simd.store(weight, weights);
        total = simd.add(total, weight);
    }
    weights[..start / LANES].fill([0.0; LANES]);
    weights[end.div_ceil(LANES)..].fill([0.0; LANES]);
    sums.weight[query] += simd.sum(total);
}

/// Adds the weighted values of a tile.
#[inline(always)]
fn add_values<S: Simd>(
    simd: S,
    queries: &Queries<'_>,
    tile: usize,
    seen: &Range<usize>,
    [panels, next]: [&Panels<'_>; 2],
    scratch: &mut Scratch,
    sums: &mut Sums<'_>,
) {
    let (n, vectors) = (queries.len(), sums.vectors());
    let mut out = microkernel::Sums { lanes: sums.values, stride: vectors };
    let weights = &scratch.weights[..n];
    let seen_here = seen.start - tile..seen.end - tile;
    if n <= FEW_QUERIES && queries.cached.has_direct_values(panels.values[seen_here.start / LANES]) {
        let values = Values { weights, panels: &panels.values, seen: seen_here, ahead: &next.keys[1..] };
        return values.add(simd, queries.cache().format, &mut out);
    }
    let mut position = seen.start;
    while position < seen.end {
        let panel_end = seen.end.min((position / LANES + 1) * LANES);
        let panel = (position - tile) / LANES;
        let out = &mut scratch.values[(position - seen.start) * vectors..(panel_end - seen.start) * vectors];
        queries.cached.unpack_values(simd, panels.values[panel], position..panel_end, next.keys[panel], out);
        position = panel_end;
    }
    if !queries.cached.has_scaled_values(panels.values[seen_here.start / LANES]) {
        let values = Vectors { lanes: &scratch.values, stride: 1, step: vectors, count: vectors };
        return multiply(simd, weights, seen_here, values, &mut out, &[]);
    }
    for vector in (0..vectors).step_by(Q8::VECTORS_OF_SCALE) {
        for panel in seen_here.start / LANES..seen_here.end.div_ceil(LANES) {
            let scales = Q8::value_scales(simd, panels.values[panel], vector);
            for (weights, scaled) in weights.iter().zip(&mut scratch.scaled) {
                let weights = simd.load(&weights.as_chunks().0[panel]);
                simd.store(simd.mul(weights, scales), &mut scaled.as_chunks_mut().0[panel]);
            }
        }
        let values = &scratch.values[vector..];
        let values = Vectors { lanes: values, stride: 1, step: vectors, count: Q8::VECTORS_OF_SCALE };
        let mut out = microkernel::Sums { lanes: &mut out.lanes[vector..], stride: vectors };
        multiply(simd, &scratch.scaled[..n], seen_here.clone(), values, &mut out, &[]);
    }
}
