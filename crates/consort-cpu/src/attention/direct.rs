//! Products of few queries with keys and values as the cache stores them.
//!
//! Each vector is unpacked in a register, for up to four queries at a time: multiplying with four takes as long as
//! unpacking, which other parts of a processor do meanwhile, and nothing goes through memory in between. More queries share
//! what is unpacked once, to memory ([`super::segment`]). Both ways multiply and add the same numbers in the same order.

use std::marker::PhantomData;
use std::ops::Range;

use consort_compute::KvFormat;

use crate::activations::FloatRow;
use crate::isa::{Kernel, LANES, Simd};
use crate::microkernel::Sums;
use crate::weight::CHUNK;

use super::segment::TILE;
use super::stored::{BF16, F16, F32, FP8, FP8OrNan, Q8, Stored, has_nan};

/// Queries that are multiplied at a time.
const ROWS: usize = 4;
/// Panels of keys, or vectors of values, that are multiplied at a time where registers are many.
const WIDE: usize = 4;
const LINE_BYTES: usize = 64;

/// Memory to ask for meanwhile: that of each panel, in pieces.
#[derive(Clone, Copy)]
struct Ahead<'a> {
    panels: &'a [&'a [u8]],
    piece_bytes: usize,
}

impl<'a> Ahead<'a> {
    /// Each panel is asked for `times` times.
    fn new(panels: &'a [&'a [u8]], times: usize) -> Self {
        let bytes = panels.first().map_or(0, |panel| panel.len());
        Self { panels, piece_bytes: bytes.div_ceil(times.max(1)).next_multiple_of(LINE_BYTES) }
    }

    #[inline(always)]
    fn ask<S: Simd>(&self, simd: S, panel: usize, time: usize) {
        let Some(panel) = self.panels.get(panel) else { return };
        let start = time * self.piece_bytes;
        if start < panel.len() {
            simd.prefetch_early(&panel[start..panel.len().min(start + self.piece_bytes)]);
        }
    }
}

/// The logits of queries for whole panels of keys.
pub struct Logits<'a> {
    /// `[chunk of features][query]`.
    pub queries: &'a [FloatRow],
    pub key_dim: usize,
    pub panels: &'a [&'a [u8]],
    /// What to ask for while each panel is multiplied.
    pub ahead: &'a [&'a [u8]],
    /// Where the first panel's logits go in each query's tile.
    pub first: usize,
}

impl Logits<'_> {
    /// Computes them, for each of the queries that `out` has a tile for.
    #[inline(always)]
    pub fn write<S: Simd>(&self, simd: S, format: KvFormat, out: &mut [[f32; TILE]]) {
        match format {
            KvFormat::F16 => simd.call(WriteLogits::<F16>::new(self, out)),
            KvFormat::BF16 => simd.call(WriteLogits::<BF16>::new(self, out)),
            KvFormat::F32 => simd.call(WriteLogits::<F32>::new(self, out)),
            KvFormat::FP8 if has_nan(self.panels) => simd.call(WriteLogits::<FP8OrNan>::new(self, out)),
            KvFormat::FP8 => simd.call(WriteLogits::<FP8>::new(self, out)),
            KvFormat::Q8 => simd.call(WriteLogits::<Q8>::new(self, out)),
        }
    }

    #[inline(always)]
    fn rows<S: Simd, F: Stored, const ROWS: usize>(&self, simd: S, row: usize, out: &mut [[f32; TILE]]) -> usize {
        let mut panel = 0;
        while panel < self.panels.len() {
            panel += if const { S::REGISTERS >= 32 } && self.panels.len() - panel >= WIDE {
                self.block::<S, F, ROWS, WIDE>(simd, row, panel, out)
            } else {
                self.block::<S, F, ROWS, 1>(simd, row, panel, out)
            };
        }
        ROWS
    }

    // Places of registers: iterators over them would be harder to read.
    #[allow(clippy::needless_range_loop)]
    #[inline(always)]
    fn block<S: Simd, F: Stored, const ROWS: usize, const PANELS: usize>(
        &self,
        simd: S,
        row: usize,
        panel: usize,
        out: &mut [[f32; TILE]],
    ) -> usize {
        let n = out.len();
        let ahead = if row == 0 { &self.ahead[panel..panel + PANELS] } else { &[] };
        let ahead = Ahead::new(ahead, self.key_dim / PANELS);
        let mut sums = [[simd.splat(0.0); PANELS]; ROWS];
        if const { F::SCALED } {
            for out in &mut out[row..row + ROWS] {
                out.as_chunks_mut::<LANES>().0[self.first + panel..][..PANELS].fill([0.0; LANES]);
            }
        }
        for chunk in 0..self.key_dim.div_ceil(CHUNK) {
            let columns = (self.key_dim - chunk * CHUNK).min(CHUNK);
            let queries: &[FloatRow; ROWS] = self.queries[chunk * n + row..].first_chunk().expect("as many queries");
            let mut panels: [&[F::Keys]; PANELS] = [&[]; PANELS];
            for p in 0..PANELS {
                panels[p] = &F::keys(self.panels[panel + p])[chunk * CHUNK / F::FEATURES..][..columns / F::FEATURES];
            }
            for step in 0..columns / F::FEATURES {
                for k in 0..F::FEATURES {
                    let column = step * F::FEATURES + k;
                    ahead.ask(simd, column % PANELS, (chunk * CHUNK + column) / PANELS);
                    let mut lanes = [simd.splat(0.0); PANELS];
                    for p in 0..PANELS {
                        lanes[p] = F::key(simd, &panels[p][step], k);
                    }
                    for i in 0..ROWS {
                        let x = simd.splat(queries[i].0[column]);
                        for p in 0..PANELS {
                            sums[i][p] = simd.fma(x, lanes[p], sums[i][p]);
                        }
                    }
                }
                if const { F::SCALED } {
                    for p in 0..PANELS {
                        let scales = F::key_scales(simd, &panels[p][step]);
                        for i in 0..ROWS {
                            let logits = &mut out[row + i].as_chunks_mut::<LANES>().0[self.first + panel + p];
                            simd.store(simd.fma(sums[i][p], scales, simd.load(logits)), logits);
                            sums[i][p] = simd.splat(0.0);
                        }
                    }
                }
            }
        }
        if const { F::SCALED } {
            return PANELS;
        }
        for i in 0..ROWS {
            let logits = &mut out[row + i].as_chunks_mut::<LANES>().0[self.first + panel..][..PANELS];
            for p in 0..PANELS {
                simd.store(sums[i][p], &mut logits[p]);
            }
        }
        PANELS
    }
}

/// [`Logits`] of one format, a function of its own.
struct WriteLogits<'a, F> {
    logits: &'a Logits<'a>,
    out: &'a mut [[f32; TILE]],
    format: PhantomData<F>,
}

impl<'a, F> WriteLogits<'a, F> {
    fn new(logits: &'a Logits<'a>, out: &'a mut [[f32; TILE]]) -> Self {
        Self { logits, out, format: PhantomData }
    }
}

impl<F: Stored> Kernel for WriteLogits<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { logits, out, .. } = self;
        let (mut row, count) = (0, out.len());
        while row < count {
            row += match count - row {
                ROWS.. => logits.rows::<S, F, ROWS>(simd, row, out),
                2.. => logits.rows::<S, F, 2>(simd, row, out),
                _ => logits.rows::<S, F, 1>(simd, row, out),
            };
        }
    }
}

/// Adds the values of a tile's panels, weighted.
pub struct Values<'a> {
    /// `[query][position]`.
    pub weights: &'a [[f32; TILE]],
    /// Those of the tile.
    pub panels: &'a [&'a [u8]],
    /// The positions of the tile that are seen.
    pub seen: Range<usize>,
    /// What to ask for while each panel is multiplied.
    pub ahead: &'a [&'a [u8]],
}

impl Values<'_> {
    /// Adds them.
    #[inline(always)]
    pub fn add<S: Simd>(&self, simd: S, format: KvFormat, out: &mut Sums<'_>) {
        match format {
            KvFormat::F16 => simd.call(AddValues::<F16>::new(self, out)),
            KvFormat::BF16 => simd.call(AddValues::<BF16>::new(self, out)),
            KvFormat::F32 => simd.call(AddValues::<F32>::new(self, out)),
            KvFormat::FP8 if has_nan(self.panels) => simd.call(AddValues::<FP8OrNan>::new(self, out)),
            KvFormat::FP8 => simd.call(AddValues::<FP8>::new(self, out)),
            KvFormat::Q8 => simd.call(AddValues::<Q8>::new(self, out)),
        }
    }

    #[inline(always)]
    fn rows<S: Simd, F: Stored, const ROWS: usize>(&self, simd: S, row: usize, out: &mut Sums<'_>) -> usize {
        let mut vector = 0;
        while vector < out.stride {
            vector += if const { S::REGISTERS >= 32 } && out.stride - vector >= WIDE {
                self.block::<S, F, ROWS, WIDE>(simd, row, vector, out)
            } else {
                self.block::<S, F, ROWS, 1>(simd, row, vector, out)
            };
        }
        ROWS
    }

    #[allow(clippy::needless_range_loop)]
    #[inline(always)]
    fn block<S: Simd, F: Stored, const ROWS: usize, const VECTORS: usize>(
        &self,
        simd: S,
        row: usize,
        vector: usize,
        out: &mut Sums<'_>,
    ) -> usize {
        let weights = &self.weights[row..row + ROWS];
        let ahead = Ahead::new(if row == 0 { self.ahead } else { &[] }, LANES * out.stride.div_ceil(VECTORS));
        let mut sums = [[simd.splat(0.0); VECTORS]; ROWS];
        for i in 0..ROWS {
            let lanes = &out.lanes[(row + i) * out.stride + vector..][..VECTORS];
            for v in 0..VECTORS {
                sums[i][v] = simd.load(&lanes[v]);
            }
        }
        let mut scaled = [[[0.0; LANES]; ROWS]; VECTORS];
        for panel in self.seen.start / LANES..self.seen.end.div_ceil(LANES) {
            let bytes = self.panels[panel];
            let row_bytes = bytes.len() / LANES;
            for v in (0..VECTORS).step_by(F::VECTORS_OF_SCALE) {
                let scales = F::value_scales(simd, bytes, vector + v);
                for i in 0..ROWS {
                    let weights = simd.load(&weights[i].as_chunks().0[panel]);
                    simd.store(simd.mul(weights, scales), &mut scaled[v][i]);
                }
            }
            let first = panel * LANES;
            for token in self.seen.start.max(first) - first..self.seen.end.min(first + LANES) - first {
                ahead.ask(simd, panel, vector / VECTORS * LANES + token);
                let value = &bytes[token * row_bytes..][..row_bytes];
                let lanes = F::values::<S, VECTORS>(simd, value, vector);
                for i in 0..ROWS {
                    for v in 0..VECTORS {
                        let weight = simd.splat(scaled[v / F::VECTORS_OF_SCALE * F::VECTORS_OF_SCALE][i][token]);
                        sums[i][v] = simd.fma(weight, lanes[v], sums[i][v]);
                    }
                }
            }
        }
        for i in 0..ROWS {
            let lanes = &mut out.lanes[(row + i) * out.stride + vector..][..VECTORS];
            for v in 0..VECTORS {
                simd.store(sums[i][v], &mut lanes[v]);
            }
        }
        VECTORS
    }
}

/// [`Values`] of one format, a function of its own.
struct AddValues<'a, 'b, F> {
    values: &'a Values<'a>,
    out: &'a mut Sums<'b>,
    format: PhantomData<F>,
}

impl<'a, 'b, F> AddValues<'a, 'b, F> {
    fn new(values: &'a Values<'a>, out: &'a mut Sums<'b>) -> Self {
        Self { values, out, format: PhantomData }
    }
}

impl<F: Stored> Kernel for AddValues<'_, '_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { values, out, .. } = self;
        let (mut row, count) = (0, values.weights.len());
        while row < count {
            row += match count - row {
                ROWS.. => values.rows::<S, F, ROWS>(simd, row, out),
                2.. => values.rows::<S, F, 2>(simd, row, out),
                _ => values.rows::<S, F, 1>(simd, row, out),
            };
        }
    }
}
