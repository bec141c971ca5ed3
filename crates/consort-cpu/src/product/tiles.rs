//! Products in tiles: 16 rows of activations by 16 output features at once.
//!
//! Rounded activations and integer codes are products of bytes; the sums of a group are whole numbers and are scaled in the
//! order of the vector kernels, so the results are the same to the bit.
//!
//! Exact activations are split into three bfloat16 numbers, which hold all the 24 bits of an f32. Weights are bfloat16 numbers
//! as they are (BF16, FP8, and the codes of all scaled formats, which have at most 8 bits), or the sum of two (F16) or three
//! (F32). A product of two bfloat16 numbers is exact in f32, and sums are f32, so all that is rounded is sums, and these
//! are shorter chains than those of the vector kernels. Against sums in f64, relative to the root of the sum of squared
//! products, the root mean square error of 2048 products is 1.4e-7 to 3.4e-7 in tiles, from format to format, and 7.5e-7 to
//! 8.4e-7 in vectors (`tests/products.rs`, which holds every format to it).

use super::{PANELS, Piece, Sums, Task};
use crate::activations::{IntegerRow, SplitRow};
use crate::isa::amx::{Products, TILE_ROWS, Tiles};
use crate::isa::{Avx512, LANES, Quads, Simd};
use crate::weight::{CHUNK, IntegerChunk, Integers, STEP, Scales, TileChunk};

/// What a task works in.
#[repr(C, align(64))]
pub struct Scratch {
    weights: [TileChunk; PANELS],
    /// Of each group of a chunk.
    products: [Products<i32>; CHUNK / 16],
    split_products: [Products<f32>; CHUNK / 16],
    /// Rows that don't follow each other in memory are copied here.
    integer_rows: [IntegerRow; TILE_ROWS],
    split_rows: [SplitRow; TILE_ROWS],
}

impl Scratch {
    /// Zeros.
    pub const ZERO: Self = Self {
        weights: [const { TileChunk::ZERO }; PANELS],
        products: [[[0; LANES]; TILE_ROWS]; CHUNK / 16],
        split_products: [[[0.0; LANES]; TILE_ROWS]; CHUNK / 16],
        integer_rows: [IntegerRow::ZERO; TILE_ROWS],
        split_rows: [SplitRow::ZERO; TILE_ROWS],
    };
}

/// Bytes of one part of a row of split activations.
const PART_BYTES: usize = 2 * CHUNK;

impl Task<'_> {
    /// Products of rounded activations with integer codes.
    #[inline(always)]
    #[expect(clippy::too_many_arguments, reason = "what a task is made of, borrowed apart")]
    pub(super) fn tile_integers(
        &self,
        tiles: &mut Tiles,
        simd: Avx512,
        piece: Piece,
        codes: &Integers,
        x: &[IntegerRow],
        weights: &mut [IntegerChunk],
        scratch: &mut Scratch,
        sums: &mut Sums,
    ) {
        let layout = self.w.layout();
        let (group, bias) = (layout.group.min(STEP), layout.has_bias());
        let pairs = piece.columns.div_ceil(2 * group);
        let mut later: &[u8] = &[];
        for (panel, weights) in piece.panels.clone().zip(&mut *weights) {
            let (bytes, ahead) = self.w.chunk(panel, piece.chunk);
            let ahead = piece.now_and_later(ahead);
            weights.unpack_bytes(simd, layout, codes, bytes, ahead.0);
            later = ahead.1;
        }
        let weights = &weights[..piece.panels.len()];
        let chunk = self.chunk(x, piece.chunk);
        for from in (0..self.rows.len()).step_by(TILE_ROWS) {
            self.prefetch_rows(simd, &piece, x, from);
            let rows = TILE_ROWS.min(self.rows.len() - from);
            tiles.shape(rows, group);
            let x = self.gather(chunk, from, rows, &mut scratch.integer_rows);
            for (panel, weights) in weights.iter().enumerate() {
                // SAFETY: `x` has as many rows as the tiles, and the groups are inside a chunk.
                unsafe {
                    let (x, stride) = (x.as_ptr().cast(), size_of::<IntegerRow>());
                    if codes.unsigned_bytes() {
                        tiles.dot_bytes::<true>(pairs, x, stride, &weights.codes, later, &mut scratch.products);
                    } else {
                        tiles.dot_bytes::<false>(pairs, x, stride, &weights.codes, later, &mut scratch.products);
                    }
                }
                let weights = GroupScales { scales: &weights.factors.scales, biases: &weights.factors.biases, bias };
                scale_integers(simd, weights, x, &scratch.products[..2 * pairs], panel, &mut sums[from..from + rows]);
            }
            later = &[];
        }
    }

    /// Products of exact activations with weights of any format.
    #[inline(always)]
    #[expect(clippy::too_many_arguments, reason = "what a task is made of, borrowed apart")]
    pub(super) fn tile_floats(
        &self,
        tiles: &mut Tiles,
        simd: Avx512,
        piece: Piece,
        x: &[SplitRow],
        integers: &mut [IntegerChunk],
        scratch: &mut Scratch,
        sums: &mut Sums,
    ) {
        if self.w.layout().scales == Scales::One {
            self.tile_unscaled(tiles, simd, piece, x, scratch, sums);
        } else {
            self.tile_scaled(tiles, simd, piece, x, integers, scratch, sums);
        }
    }

    /// The sums of unscaled products stay in tiles for a whole chunk.
    #[inline(always)]
    fn tile_unscaled(
        &self,
        tiles: &mut Tiles,
        simd: Avx512,
        piece: Piece,
        x: &[SplitRow],
        scratch: &mut Scratch,
        sums: &mut Sums,
    ) {
        let (layout, chunk) = (self.w.layout(), self.chunk(x, piece.chunk));
        for part in (0..TileChunk::parts(layout)).rev() {
            // With few rows, half of what comes is asked for between products.
            let mut later: &[u8] = &[];
            for (panel, weights) in piece.panels.clone().zip(&mut scratch.weights) {
                let (bytes, mut ahead) = self.w.chunk(panel, piece.chunk);
                if self.rows.len() <= TILE_ROWS {
                    let half = ahead.split_at(ahead.len() / 2);
                    ahead = half.0;
                    later = if panel == piece.panels.start { half.1 } else { later };
                }
                weights.unpack_part(simd, layout, part, bytes, ahead);
            }
            for from in (0..self.rows.len()).step_by(TILE_ROWS) {
                self.prefetch_rows(simd, &piece, x, from);
                let rows = TILE_ROWS.min(self.rows.len() - from);
                tiles.shape(rows, 2 * STEP);
                let x = self.gather(chunk, from, rows, &mut scratch.split_rows);
                // SAFETY: `x` has as many rows as the tiles, and the steps are inside a chunk; panels without weights of
                // their own take what is there, and nobody looks at their sums.
                unsafe {
                    tiles.accumulate::<PART_BYTES, { size_of::<TileChunk>() }>(
                        piece.columns.div_ceil(STEP),
                        x.as_ptr().cast(),
                        size_of::<SplitRow>(),
                        scratch.weights.as_ptr().cast::<Quads>(),
                        (later, self.w.panel_bytes()),
                        &mut sums[from..from + rows],
                    );
                }
            }
        }
    }

    /// The sums of each group are scaled.
    #[inline(always)]
    #[expect(clippy::too_many_arguments, reason = "what a task is made of, borrowed apart")]
    fn tile_scaled(
        &self,
        tiles: &mut Tiles,
        simd: Avx512,
        piece: Piece,
        x: &[SplitRow],
        integers: &mut [IntegerChunk],
        scratch: &mut Scratch,
        sums: &mut Sums,
    ) {
        let layout = self.w.layout();
        let (group, bias) = (layout.group.min(STEP), layout.has_bias());
        let pairs = piece.columns.div_ceil(2 * group);
        let mut later: &[u8] = &[];
        for ((panel, integers), weights) in piece.panels.clone().zip(&mut *integers).zip(&mut scratch.weights) {
            let (bytes, ahead) = self.w.chunk(panel, piece.chunk);
            let ahead = piece.now_and_later(ahead);
            weights.unpack_codes(simd, layout, integers, bytes, ahead.0);
            later = ahead.1;
        }
        let integers = &integers[..piece.panels.len()];
        let chunk = self.chunk(x, piece.chunk);
        for from in (0..self.rows.len()).step_by(TILE_ROWS) {
            self.prefetch_rows(simd, &piece, x, from);
            let rows = TILE_ROWS.min(self.rows.len() - from);
            tiles.shape(rows, 2 * group);
            let x = self.gather(chunk, from, rows, &mut scratch.split_rows);
            for (panel, (integers, weights)) in integers.iter().zip(&scratch.weights).enumerate() {
                // SAFETY: as for integers.
                unsafe {
                    let (x, stride) = (x.as_ptr().cast(), size_of::<SplitRow>());
                    tiles.dot_split::<PART_BYTES>(pairs, x, stride, &weights.0, later, &mut scratch.split_products);
                }
                let weights = GroupScales { scales: &integers.factors.scales, biases: &integers.factors.biases, bias };
                scale_floats(
                    simd,
                    weights,
                    x,
                    &scratch.split_products[..2 * pairs],
                    panel,
                    &mut sums[from..from + rows],
                );
            }
            later = &[];
        }
    }

    /// Asks for a part of the next chunk's activations while the 16 rows from `from` on are multiplied: without it, every row
    /// of a chunk would wait for memory.
    #[inline(always)]
    fn prefetch_rows<T>(&self, simd: Avx512, piece: &Piece, x: &[T], from: usize) {
        let index = (piece.panels.start - self.panels.start) / PANELS;
        let parts = self.panels.len().div_ceil(PANELS);
        let rows = TILE_ROWS.div_ceil(parts);
        let first = (piece.chunk + 1) * self.x_rows + self.group.rows.input(self.rows.start + from) + index * rows;
        for row in &x[x.len().min(first)..x.len().min(first + rows)] {
            simd.prefetch_far(row);
        }
    }
}

/// What the products of groups are multiplied by.
#[derive(Clone, Copy)]
struct GroupScales<'a> {
    scales: &'a [[f32; LANES]; CHUNK / 16],
    biases: &'a [[f32; LANES]; CHUNK / 16],
    bias: bool,
}

/// `sums[i] += Σ products[group][i] · scale of the group and of x[i] + bias · sum of x[i]`, group by group.
#[inline(always)]
fn scale_integers(
    simd: Avx512,
    weights: GroupScales<'_>,
    x: &[IntegerRow],
    products: &[Products<i32>],
    panel: usize,
    sums: &mut [[[f32; LANES]; PANELS]],
) {
    let (fours, rest) = sums.as_chunks_mut::<4>();
    let (x_fours, x_rest) = x.as_chunks::<4>();
    let first_of_rest = 4 * fours.len();
    for (i, (x, sums)) in x_fours.iter().zip(fours).enumerate() {
        scale_integer_rows(simd, weights, x, products, 4 * i, panel, sums);
    }
    for (i, (x, sums)) in x_rest.iter().zip(rest).enumerate() {
        scale_integer_rows(
            simd,
            weights,
            std::array::from_ref(x),
            products,
            first_of_rest + i,
            panel,
            std::array::from_mut(sums),
        );
    }
}

/// The same for `ROWS` rows from row `first` of the products on.
#[inline(always)]
fn scale_integer_rows<const ROWS: usize>(
    simd: Avx512,
    weights: GroupScales<'_>,
    x: &[IntegerRow; ROWS],
    products: &[Products<i32>],
    first: usize,
    panel: usize,
    sums: &mut [[[f32; LANES]; PANELS]; ROWS],
) {
    let mut registers = [simd.splat(0.0); ROWS];
    for i in 0..ROWS {
        registers[i] = simd.load(&sums[i][panel]);
    }
    // The compiler sees that no row is past a tile.
    let first = first.min(TILE_ROWS - ROWS);
    for (group, ((products, scale), bias)) in products.iter().zip(weights.scales).zip(weights.biases).enumerate() {
        let scale = simd.load(scale);
        for i in 0..ROWS {
            let scale = simd.mul(scale, simd.splat(x[i].scales[group % x[i].scales.len()]));
            registers[i] = simd.fma(simd.to_floats(simd.load_ints(&products[first + i])), scale, registers[i]);
        }
        if weights.bias {
            let bias = simd.load(bias);
            for i in 0..ROWS {
                registers[i] = simd.fma(bias, simd.splat(x[i].sums[group % x[i].sums.len()]), registers[i]);
            }
        }
    }
    for i in 0..ROWS {
        simd.store(registers[i], &mut sums[i][panel]);
    }
}

/// `sums[i] += Σ products[group][i] · scale of the group + bias · sum of x[i]`, group by group.
#[inline(always)]
fn scale_floats(
    simd: Avx512,
    weights: GroupScales<'_>,
    x: &[SplitRow],
    products: &[Products<f32>],
    panel: usize,
    sums: &mut [[[f32; LANES]; PANELS]],
) {
    for (i, (x, sums)) in x.iter().zip(sums).enumerate() {
        let row = i % TILE_ROWS;
        let mut sum = simd.load(&sums[panel]);
        for (((products, scale), bias), x_sum) in products.iter().zip(weights.scales).zip(weights.biases).zip(&x.sums) {
            sum = simd.fma(simd.load(&products[row]), simd.load(scale), sum);
            if weights.bias {
                sum = simd.fma(simd.load(bias), simd.splat(*x_sum), sum);
            }
        }
        simd.store(sum, &mut sums[panel]);
    }
}
