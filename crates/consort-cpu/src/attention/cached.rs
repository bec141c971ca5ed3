//! Where the cache holds keys and values, and how they are unpacked to f32, in the [unit] of their format.

use std::ops::Range;

use consort_compute::portable::{HostCache, PANEL_TOKENS};
use consort_compute::{KvFormat, KvSpec, Run};

use crate::isa::{LANES, Simd};

use super::segment::TILE;
use super::stored::{BF16, F16, F32, FP8, FP8OrNan, Numbers, Q8, Stored, has_nan, unit};

/// A panel of keys is a vector.
const _: () = assert!(PANEL_TOKENS == LANES);
/// Panels of a tile.
const PANELS: usize = TILE / LANES;
/// Vectors that are unpacked between two requests for memory.
const BURST: usize = 8;

/// The keys and values of one head, for one run.
#[derive(Clone, Copy)]
pub struct Cached<'a> {
    pub cache: &'a HostCache,
    pub run: &'a Run<'a>,
    pub head: usize,
}

/// What the cache holds of a tile, panel by panel; nothing where no position is seen, nor in blocks that are not made of
/// whole panels.
#[derive(Default)]
pub struct Panels<'a> {
    pub keys: [&'a [u8]; PANELS],
    pub values: [&'a [u8]; PANELS],
}

impl<'a> Cached<'a> {
    fn spec(&self) -> &'a KvSpec {
        self.cache.spec()
    }

    /// Finds the panels of the tile that begins at `tile`, where it overlaps `seen`.
    pub fn panels(&self, tile: usize, seen: &Range<usize>) -> Panels<'a> {
        let mut panels = Panels::default();
        let (start, end) = (seen.start.max(tile) / LANES * LANES, seen.end.min(tile + TILE));
        let spec = self.spec();
        if start >= end || !spec.block_tokens.is_multiple_of(LANES) {
            return panels;
        }
        let (key_bytes, value_bytes) = (LANES * spec.key_bytes(), LANES * spec.value_bytes());
        let mut position = start;
        while position < end {
            // As many as lie in one block.
            let (block, token) = spec.place(self.run, position);
            let count = (end - position).div_ceil(LANES).min((spec.block_tokens - token) / LANES);
            let (first, places) = (token / LANES, (position - tile) / LANES..);
            let keys = self.cache.keys(block, self.head)[first * key_bytes..].chunks_exact(key_bytes);
            let values = self.cache.values(block, self.head)[first * value_bytes..].chunks_exact(value_bytes);
            for (place, (keys, values)) in places.zip(keys.zip(values)).take(count) {
                (panels.keys[place], panels.values[place]) = (keys, values);
            }
            position += count * LANES;
        }
        panels
    }

    /// Whether the keys of `panel` can be multiplied as they are stored.
    pub fn has_direct_keys(&self, panel: &[u8]) -> bool {
        !panel.is_empty() && self.spec().key_dim.is_multiple_of(self.features_of_block())
    }

    /// Whether the values of `panel` can be multiplied as they are stored.
    pub fn has_direct_values(&self, panel: &[u8]) -> bool {
        !panel.is_empty() && self.spec().value_dim.is_multiple_of(LANES.max(self.features_of_block()))
    }

    /// Whether sums of products with the keys of `panel` are multiplied by their scales.
    pub fn has_scaled_keys(&self, panel: &[u8]) -> bool {
        self.spec().format == KvFormat::Q8 && self.has_direct_keys(panel)
    }

    /// Whether the values of `panel` are multiplied by their weights' products with their scales.
    pub fn has_scaled_values(&self, panel: &[u8]) -> bool {
        self.spec().format == KvFormat::Q8 && self.has_direct_values(panel)
    }

    fn features_of_block(&self) -> usize {
        if self.spec().format == KvFormat::Q8 { 2 * LANES } else { 1 }
    }

    /// Unpacks the keys of 16 positions from `first` on, which lie in `panel`: for each feature, 16 tokens side by side.
    /// Lanes outside `seen` hold anything. Scales are left out if keys [have](Self::has_scaled_keys) any. Asks for the memory `ahead` meanwhile.
    #[inline(always)]
    pub fn unpack_keys<S: Simd>(
        &self,
        simd: S,
        panel: &[u8],
        first: usize,
        seen: &Range<usize>,
        ahead: &[u8],
        out: &mut [[f32; LANES]],
    ) {
        if panel.is_empty() {
            return self.gather_keys(first, seen, out);
        }
        match self.spec().format {
            KvFormat::F16 => unpack::<S, F16>(simd, panel, ahead, out),
            KvFormat::BF16 => unpack::<S, BF16>(simd, panel, ahead, out),
            KvFormat::F32 => unpack::<S, F32>(simd, panel, ahead, out),
            KvFormat::FP8 if has_nan(&[panel]) => unpack::<S, FP8OrNan>(simd, panel, ahead, out),
            KvFormat::FP8 => unpack::<S, FP8>(simd, panel, ahead, out),
            KvFormat::Q8 if self.has_scaled_keys(panel) => unpack_q8_key_codes(simd, panel, ahead, out),
            KvFormat::Q8 => unpack_q8_keys(simd, panel, ahead, out),
        }
    }

    /// The same of positions whose blocks are not made of whole panels.
    fn gather_keys(&self, first: usize, seen: &Range<usize>, out: &mut [[f32; LANES]]) {
        const STEP: usize = 32;
        let unit = unit(self.spec().format);
        for position in seen.start.max(first)..seen.end.min(first + LANES) {
            let (block, token) = self.spec().place(self.run, position);
            let keys = self.cache.keys(block, self.head);
            for (step, out) in out.chunks_mut(STEP).enumerate() {
                let mut key = [0.0; STEP];
                self.spec().read_key(keys, token, step * STEP, &mut key[..out.len()]);
                for (key, out) in key.iter().zip(out) {
                    out[position - first] = *key / unit;
                }
            }
        }
    }

    /// Unpacks the values of the positions `seen`, all of one panel: for each token, 16 features side by side, without their
    /// scales if they [have](Self::has_scaled_values) any. Asks for the memory `ahead` meanwhile.
    #[inline(always)]
    pub fn unpack_values<S: Simd>(
        &self,
        simd: S,
        panel: &[u8],
        seen: Range<usize>,
        ahead: &[u8],
        out: &mut [[f32; LANES]],
    ) {
        if !self.has_direct_values(panel) {
            return self.gather_values(seen, out);
        }
        let bytes = panel.len() / LANES;
        let rows = &panel[seen.start % LANES * bytes..][..seen.len() * bytes];
        match self.spec().format {
            KvFormat::F16 => unpack::<S, F16>(simd, rows, ahead, out),
            KvFormat::BF16 => unpack::<S, BF16>(simd, rows, ahead, out),
            KvFormat::F32 => unpack::<S, F32>(simd, rows, ahead, out),
            KvFormat::FP8 if has_nan(&[rows]) => unpack::<S, FP8OrNan>(simd, rows, ahead, out),
            KvFormat::FP8 => unpack::<S, FP8>(simd, rows, ahead, out),
            KvFormat::Q8 => unpack_q8_values(simd, rows, ahead, out),
        }
    }

    /// The same of values that are not whole vectors, or lie in blocks that are not made of whole panels.
    fn gather_values(&self, seen: Range<usize>, out: &mut [[f32; LANES]]) {
        let (dim, unit) = (self.spec().value_dim, unit(self.spec().format));
        for (position, out) in seen.zip(out.chunks_exact_mut(dim.div_ceil(LANES))) {
            let (block, token) = self.spec().place(self.run, position);
            let (value, rest) = out.as_flattened_mut().split_at_mut(dim);
            self.spec().read_value(self.cache.values(block, self.head), token, value);
            value.iter_mut().for_each(|value| *value /= unit);
            rest.fill(0.0);
        }
    }
}

/// Unpacks numbers that have no scale.
#[inline(always)]
fn unpack<S: Simd, F: Numbers>(simd: S, bytes: &[u8], ahead: &[u8], out: &mut [[f32; LANES]]) {
    let packed = F::packed(bytes);
    let mut ahead = Ahead::new(ahead, packed.len());
    let ((packed, packed_rest), (out, out_rest)) = (packed.as_chunks::<BURST>(), out.as_chunks_mut::<BURST>());
    for (packed, out) in packed.iter().zip(out) {
        ahead.ask(simd);
        for i in 0..BURST {
            simd.store(F::load(simd, &packed[i]), &mut out[i]);
        }
    }
    for (packed, out) in packed_rest.iter().zip(out_rest) {
        simd.store(F::load(simd, packed), out);
    }
}

/// Unpacks a panel of keys of signed bytes: for each 32 features, the scales of 16 tokens and then their codes.
#[inline(always)]
fn unpack_q8_keys<S: Simd>(simd: S, panel: &[u8], ahead: &[u8], out: &mut [[f32; LANES]]) {
    const STEP: usize = 32;
    let mut ahead = Ahead::new(ahead, out.len());
    for (step, out) in panel.chunks(LANES * (2 + STEP)).zip(out.chunks_mut(STEP)) {
        let (scales, codes) = step.split_at(2 * LANES);
        let scales = simd.load_f16(&scales.as_chunks().0[0]);
        for (codes, out) in codes.as_chunks::<LANES>().0.chunks(BURST).zip(out.chunks_mut(BURST)) {
            ahead.ask(simd);
            for (codes, out) in codes.iter().zip(out) {
                simd.store(simd.mul(simd.load_i8(codes), scales), out);
            }
        }
    }
}

/// Unpacks the codes of such a panel, of whole blocks of 32 features.
#[inline(always)]
fn unpack_q8_key_codes<S: Simd>(simd: S, panel: &[u8], ahead: &[u8], out: &mut [[f32; LANES]]) {
    let mut ahead = Ahead::new(ahead, out.len());
    for (keys, out) in Q8::keys(panel).iter().zip(out.chunks_exact_mut(Q8::FEATURES)) {
        for (k, out) in out.iter_mut().enumerate() {
            if k % BURST == 0 {
                ahead.ask(simd);
            }
            simd.store(Q8::key(simd, keys, k), out);
        }
    }
}

/// Unpacks the codes of values of signed bytes, which follow a scale for each 32 features.
#[inline(always)]
fn unpack_q8_values<S: Simd>(simd: S, rows: &[u8], ahead: &[u8], out: &mut [[f32; LANES]]) {
    let mut ahead = Ahead::new(ahead, out.len());
    let (blocks, out) = (rows.as_chunks::<{ 2 + 2 * LANES }>().0, out.as_chunks_mut::<2>().0);
    for (blocks, out) in blocks.chunks(BURST / 2).zip(out.chunks_mut(BURST / 2)) {
        ahead.ask(simd);
        for (block, [first, second]) in blocks.iter().zip(out) {
            let codes = block[2..].as_chunks().0;
            simd.store(simd.load_i8(&codes[0]), first);
            simd.store(simd.load_i8(&codes[1]), second);
        }
    }
}

/// Memory that is asked for piece by piece, between other work.
struct Ahead<'a>(std::slice::Chunks<'a, u8>);

impl<'a> Ahead<'a> {
    /// `vectors` are those of the other work.
    fn new(memory: &'a [u8], vectors: usize) -> Self {
        const LINE_BYTES: usize = 64;
        let bursts = vectors.div_ceil(BURST).max(1);
        Self(memory.chunks(memory.len().div_ceil(bursts).next_multiple_of(LINE_BYTES).max(LINE_BYTES)))
    }

    #[inline(always)]
    fn ask<S: Simd>(&mut self, simd: S) {
        if let Some(bytes) = self.0.next() {
            simd.prefetch_early(bytes);
        }
    }
}
