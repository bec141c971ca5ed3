//! Products of bfloat16 pairs: activations rounded to bfloat16 with weights that are bfloat16 numbers as they are (BF16, FP8).
//!
//! The sums are f32 and go through the columns in their order, so unscaled weights give the bits that f32 products of the same
//! activations give, as long as nothing is below 2^-126, which counts as zero here. Scaled ones (FP8 in blocks) are summed up
//! block by block before they are scaled.
//!
//! A few rows that follow each other take all chunks of a panel from memory, one after the other without a stop. Others take a
//! chunk at a time: BF16 where it lies, FP8 unpacked once for all rows.
#![expect(clippy::needless_range_loop, reason = "indices name registers, and compilers unroll them")]

use std::arch::x86_64::{__m512, __m512i};
use std::marker::PhantomData;

use super::{COPIED_ROWS, FEW_ROWS, PANELS, Piece, Sums, Task};
use crate::activations::PairRow;
use crate::isa::{Avx512Bf16, LANES, PairKernel, Quads, Simd};
use crate::weight::{AHEAD_BYTES, CHUNK, Codes, Layout, LoadNumber, Number, Scales, numbers};

/// Pairs of a chunk.
const PAIRS: usize = CHUNK / 2;
/// How far ahead memory is asked for while so many rows multiply that the processor sees too little of what comes: four times as
/// far as otherwise, in the second-level cache.
const FAR_BYTES: usize = 4 * AHEAD_BYTES;
/// Rows from which on that is so.
const FAR_ROWS: usize = 8;

/// What a task works in.
#[repr(C, align(64))]
pub struct Scratch {
    /// Unpacked weights.
    weights: [[Quads; PAIRS]; PANELS],
    /// Rows that don't follow each other in memory are copied here.
    rows: [PairRow; COPIED_ROWS],
}

impl Scratch {
    /// Zeros.
    pub const ZERO: Self = Self { weights: [[[0; 4 * LANES]; PAIRS]; PANELS], rows: [PairRow::ZERO; COPIED_ROWS] };
}

impl Task<'_> {
    /// Products of rounded activations with weights that are bfloat16 numbers, perhaps scaled.
    #[inline(always)]
    pub(super) fn pairs(&self, dot: Avx512Bf16, x: &[PairRow], scratch: &mut Scratch, sums: &mut [Sums]) {
        let all = self.rows.len();
        if all <= FEW_ROWS && self.neighbours(x, 0, all).is_some() {
            return self.few_pairs(dot, x, &mut sums[0]);
        }
        for chunk in 0..self.w.cols().div_ceil(CHUNK) {
            for (piece, sums) in self.pieces(chunk).zip(&mut *sums) {
                self.many_pairs(dot, piece, self.chunk(x, chunk), scratch, sums);
            }
        }
    }

    /// All chunks of a panel of BF16, or of two of FP8, whose few sums would wait for each other.
    #[inline(always)]
    fn few_pairs(&self, dot: Avx512Bf16, x: &[PairRow], sums: &mut Sums) {
        let (all, e4m3) = (self.rows.len(), self.w.layout().codes == Codes::E4M3);
        let mut panels = [Panel::default(); PANELS];
        for (panel, at) in panels.iter_mut().zip(self.panels.clone()) {
            panel.tiles = self.w.panel(at);
        }
        let step = if e4m3 && all < FAR_ROWS { 2 } else { 1 };
        for first in (0..self.panels.len()).step_by(step) {
            let mut row = 0;
            while row < all {
                let block = Block {
                    layout: self.w.layout(),
                    panels: &panels,
                    places: [first, (first + 1).min(self.panels.len() - 1)],
                    x,
                    x_rows: self.x_rows,
                    first_row: self.group.rows.input(self.rows.start) + row,
                    sums: &mut sums[row..],
                };
                row += match (e4m3, all - row) {
                    (false, 8..) => block.multiply::<BF16, 8, 1>(dot),
                    (false, 4..) => block.multiply::<BF16, 4, 1>(dot),
                    (false, 2..) => block.multiply::<BF16, 2, 1>(dot),
                    (false, _) => block.multiply::<BF16, 1, 1>(dot),
                    (true, 8..) => block.multiply::<E4M3, 8, 1>(dot),
                    (true, 4..) => block.multiply::<E4M3, 4, 2>(dot),
                    (true, 2..) => block.multiply::<E4M3, 2, 2>(dot),
                    (true, _) => block.multiply::<E4M3, 1, 2>(dot),
                };
            }
        }
    }

    /// A chunk of a few panels.
    #[inline(always)]
    fn many_pairs(&self, dot: Avx512Bf16, piece: Piece, x: &[PairRow], scratch: &mut Scratch, sums: &mut Sums) {
        let (layout, count) = (self.w.layout(), piece.panels.len());
        let Scratch { weights, rows: copies } = scratch;
        let mut panels = [Panel::default(); PANELS];
        for ((panel, weights), at) in panels.iter_mut().zip(weights).zip(piece.panels.clone()) {
            let (tiles, ahead) = self.w.chunk(at, piece.chunk);
            panel.tiles = tiles;
            if layout.codes == Codes::E4M3 {
                unpack(dot, layout, tiles, ahead, weights);
                panel.pairs = weights;
            } else {
                panel.pairs = tiles.as_chunks().0;
            }
        }
        let all = self.rows.len();
        let rows = if self.neighbours(x, 0, all).is_some() { all } else { COPIED_ROWS };
        for from in (0..all).step_by(rows) {
            let x = self.gather(x, from, rows.min(all - from), copies);
            for first in (0..count).step_by(2) {
                let mut row = 0;
                while row < x.len() {
                    let block = Block {
                        layout,
                        panels: &panels,
                        places: [first, (first + 1).min(count - 1)],
                        x,
                        x_rows: x.len(),
                        first_row: row,
                        sums: &mut sums[from + row..],
                    };
                    row += match x.len() - row {
                        12.. => block.multiply::<Unpacked, 12, 2>(dot),
                        8.. => block.multiply::<Unpacked, 8, 2>(dot),
                        4.. => block.multiply::<Unpacked, 4, 2>(dot),
                        2.. => block.multiply::<Unpacked, 2, 2>(dot),
                        _ => block.multiply::<Unpacked, 1, 2>(dot),
                    };
                }
            }
        }
    }
}

/// Unpacks the codes of a chunk, without their scales, and asks for the memory of `ahead` meanwhile.
#[inline(always)]
fn unpack(dot: Avx512Bf16, layout: &Layout, tiles: &[u8], ahead: &[u8], out: &mut [Quads; PAIRS]) {
    let simd = dot.vectors();
    let mut out = out.as_chunks_mut::<2>().0.iter_mut();
    let mut ahead = ahead.chunks(size_of::<Quads>());
    for tile in tiles.chunks_exact(layout.tile_bytes) {
        for (codes, out) in tile[layout.scale_bytes..].as_chunks().0.iter().zip(&mut out) {
            simd.prefetch(ahead.next().unwrap_or_default());
            let pairs = dot.pairs_of_e4m3(codes);
            simd.store_bytes(pairs[0], &mut out[0]);
            simd.store_bytes(pairs[1], &mut out[1]);
        }
    }
}

/// Some chunks of a panel.
#[derive(Clone, Copy, Default)]
struct Panel<'a> {
    tiles: &'a [u8],
    /// Their codes as pairs, if they are in a cache.
    pairs: &'a [Quads],
}

/// How four columns are read.
trait Pairs {
    /// Vectors that hold them.
    const VECTORS: usize;
    /// Whether there are formats of them with scales.
    const MAY_SCALE: bool;
    /// Whether they are in a cache.
    const CACHED: bool;
    /// Reads them.
    fn load(dot: Avx512Bf16, lines: &[Quads]) -> [__m512i; 2];
}

/// Pairs that are in a cache.
struct Unpacked;
/// BF16 from memory.
struct BF16;
/// FP8 from memory.
struct E4M3;

impl Pairs for Unpacked {
    const VECTORS: usize = 2;
    const MAY_SCALE: bool = true;
    const CACHED: bool = true;
    #[inline(always)]
    fn load(dot: Avx512Bf16, lines: &[Quads]) -> [__m512i; 2] {
        [dot.vectors().load_bytes(&lines[0]), dot.vectors().load_bytes(&lines[1])]
    }
}

impl Pairs for BF16 {
    const VECTORS: usize = 2;
    const MAY_SCALE: bool = false;
    const CACHED: bool = false;
    #[inline(always)]
    fn load(dot: Avx512Bf16, lines: &[Quads]) -> [__m512i; 2] {
        Unpacked::load(dot, lines)
    }
}

impl Pairs for E4M3 {
    const VECTORS: usize = 1;
    const MAY_SCALE: bool = true;
    const CACHED: bool = false;
    #[inline(always)]
    fn load(dot: Avx512Bf16, lines: &[Quads]) -> [__m512i; 2] {
        dot.pairs_of_e4m3(&lines[0])
    }
}

/// Some rows and panels.
struct Block<'a> {
    layout: &'a Layout,
    panels: &'a [Panel<'a>; PANELS],
    /// Which of them to multiply; perhaps the same twice.
    places: [usize; 2],
    /// Chunk by chunk, `x_rows` rows of each.
    x: &'a [PairRow],
    x_rows: usize,
    /// The first to multiply.
    first_row: usize,
    /// Of the rows to multiply, and those after them.
    sums: &'a mut [[[f32; LANES]; PANELS]],
}

impl Block<'_> {
    /// Multiplies `ROWS` rows, and returns their number.
    #[inline(always)]
    fn multiply<P: Pairs, const ROWS: usize, const COUNT: usize>(self, dot: Avx512Bf16) -> usize {
        if P::MAY_SCALE && self.layout.scales != Scales::One {
            self.multiply_as::<P, ROWS, COUNT, true>(dot);
        } else {
            self.multiply_as::<P, ROWS, COUNT, false>(dot);
        }
        ROWS
    }

    #[inline(always)]
    fn multiply_as<P: Pairs, const ROWS: usize, const COUNT: usize, const SCALED: bool>(self, dot: Avx512Bf16) {
        dot.run(Multiply::<P, ROWS, COUNT, SCALED> {
            layout: self.layout,
            panels: std::array::from_fn(|p| self.panels[self.places[p]]),
            places: std::array::from_fn(|p| self.places[p]),
            x: self.x,
            x_rows: self.x_rows,
            first_row: self.first_row,
            sums: self.sums.first_chunk_mut().expect("as many sums"),
            pairs: PhantomData,
        });
    }
}

/// `ROWS` rows and `COUNT` panels. With scales it is a function of its own, because sums of groups beside sums of all take more
/// registers than there are.
struct Multiply<'a, P, const ROWS: usize, const COUNT: usize, const SCALED: bool> {
    layout: &'a Layout,
    panels: [Panel<'a>; COUNT],
    /// Where the panels' sums are.
    places: [usize; COUNT],
    x: &'a [PairRow],
    x_rows: usize,
    first_row: usize,
    sums: &'a mut [[[f32; LANES]; PANELS]; ROWS],
    pairs: PhantomData<P>,
}

impl<P: Pairs, const ROWS: usize, const COUNT: usize, const SCALED: bool> PairKernel
    for Multiply<'_, P, ROWS, COUNT, SCALED>
{
    #[inline(always)]
    fn run(self, dot: Avx512Bf16) {
        let (simd, Self { layout, panels, places, x, x_rows, first_row, sums, .. }) = (dot.vectors(), self);
        let mut totals = [[simd.splat(0.0); COUNT]; ROWS];
        for i in 0..ROWS {
            for p in 0..COUNT {
                totals[i][p] = simd.load(&sums[i][places[p] % PANELS]);
            }
        }
        let mut part = Part::<P, ROWS, COUNT> { x: &[PairRow::ZERO; ROWS], lines: [&[]; COUNT], pairs: PhantomData };
        if !SCALED {
            let chunk_bytes = CHUNK / layout.block * layout.tile_bytes;
            let bytes = panels[0].tiles.len();
            for (chunk, from) in (0..bytes).step_by(chunk_bytes).enumerate() {
                part.x = x[chunk * x_rows + first_row..].first_chunk().expect("as many rows");
                for p in 0..COUNT {
                    part.lines[p] = match P::CACHED {
                        true => panels[p].pairs,
                        false => panels[p].tiles[from..bytes.min(from + chunk_bytes)].as_chunks().0,
                    };
                }
                let quads = (bytes - from).min(chunk_bytes) / layout.tile_bytes * (layout.block / 4);
                part.multiply(dot, 0, quads, &mut totals);
            }
        } else {
            let quads = layout.block / 4;
            for tile in 0..panels[0].tiles.len() / layout.tile_bytes {
                let (chunk, first) = (tile * layout.block / CHUNK, tile * layout.block % CHUNK / 4);
                part.x = x[chunk * x_rows + first_row..].first_chunk().expect("as many rows");
                for p in 0..COUNT {
                    part.lines[p] = match P::CACHED {
                        true => &panels[p].pairs[2 * quads * tile..],
                        false => panels[p].tiles[tile * layout.tile_bytes + layout.scale_bytes..].as_chunks().0,
                    };
                }
                let mut products = [[simd.splat(0.0); COUNT]; ROWS];
                part.multiply(dot, first, quads, &mut products);
                for p in 0..COUNT {
                    let head = &panels[p].tiles[tile * layout.tile_bytes..][..layout.scale_bytes];
                    let scale = match layout.scales {
                        Scales::Plain { number: Number::E8M0, .. } => numbers::E8M0::load(simd, head),
                        _ => numbers::F32::load(simd, head),
                    };
                    for i in 0..ROWS {
                        totals[i][p] = simd.fma(products[i][p], scale, totals[i][p]);
                    }
                }
            }
        }
        for i in 0..ROWS {
            for p in 0..COUNT {
                simd.store(totals[i][p], &mut sums[i][places[p] % PANELS]);
            }
        }
    }
}

/// A part of a chunk.
struct Part<'a, P, const ROWS: usize, const COUNT: usize> {
    x: &'a [PairRow; ROWS],
    lines: [&'a [Quads]; COUNT],
    pairs: PhantomData<P>,
}

impl<P: Pairs, const ROWS: usize, const COUNT: usize> Part<'_, P, ROWS, COUNT> {
    /// Adds the products of `quads` quads of columns, which are those from `first` on in the rows.
    #[inline(always)]
    fn multiply(&self, dot: Avx512Bf16, first: usize, quads: usize, sums: &mut [[__m512; COUNT]; ROWS]) {
        let simd = dot.vectors();
        assert!(first + quads <= CHUNK / 4, "quads of a chunk");
        for p in 0..COUNT {
            assert!(P::VECTORS * quads <= self.lines[p].len(), "as many lines");
        }
        for quad in 0..quads {
            let mut pairs = [[simd.load_bytes(&[0; 4 * LANES]); 2]; COUNT];
            for p in 0..COUNT {
                // SAFETY: as was just checked.
                let lines = unsafe { self.lines[p].get_unchecked(P::VECTORS * quad..P::VECTORS * (quad + 1)) };
                for line in lines {
                    match (P::CACHED, ROWS < FAR_ROWS) {
                        (true, _) => {}
                        (false, true) => simd.prefetch_after(line, AHEAD_BYTES),
                        (false, false) => simd.prefetch_early_after(line, FAR_BYTES),
                    }
                }
                pairs[p] = P::load(dot, lines);
            }
            for half in 0..2 {
                for i in 0..ROWS {
                    // SAFETY: as was just checked.
                    let x = unsafe { *self.x[i].0.get_unchecked(2 * (first + quad) + half) };
                    for p in 0..COUNT {
                        sums[i][p] = dot.add_products(sums[i][p], pairs[p][half], x);
                    }
                }
            }
        }
    }
}
