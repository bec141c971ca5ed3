//! Activations in the form that products read.
//!
//! Both forms go chunk by chunk of 256 input features and, within a chunk, row by row, so that the rows that a product works
//! on at a time lie side by side.

use consort_compute::portable::HostBuffer;

#[cfg(target_arch = "x86_64")]
use crate::isa::{
    Amx, Avx512,
    amx::{TileKernel, Tiles},
};
use crate::isa::{CENTER, Isa, Kernel, LANES, Simd};
use crate::memory::Disjoint;
use crate::pool::Pool;
#[cfg(target_arch = "x86_64")]
use crate::weight::split_activations;
use crate::weight::{CHUNK, Integers, STEP};

/// How activations enter products.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activations {
    /// As they are: f32 products and sums.
    Exact,
    /// Rounded to 8 bits for each block of 32, with weights that are whole numbers times a scale; exact with others.
    Int8,
    /// `Int8` with weights of at most 8 bits, whose own rounding is larger up to
    /// 4 bits and comparable at 8; `Exact` with others.
    #[default]
    Auto,
}

/// 256 activations of one row, rounded: `x ≈ scale · code` with codes from -127 to 127.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct IntegerRow {
    /// Signed bytes.
    pub codes: [u8; CHUNK],
    /// The scale of each of the weight's groups, of which there are one or two in each 32 that share one.
    pub scales: [f32; 2 * CHUNK / STEP],
    /// The sum of the codes of each of the weight's groups times minus the weight's offset.
    pub offsets: [i32; 2 * CHUNK / STEP],
    /// The sum of the codes of each of the weight's groups times their scale.
    pub sums: [f32; 2 * CHUNK / STEP],
}

impl IntegerRow {
    /// Zeros.
    pub const ZERO: Self = Self { codes: [0; CHUNK], scales: [0.0; 16], offsets: [0; 16], sums: [0.0; 16] };
}

/// 256 activations of one row.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct FloatRow(pub [f32; CHUNK]);

impl FloatRow {
    /// Rows as plain numbers.
    pub fn values(rows: &[Self]) -> &[[f32; CHUNK]] {
        // SAFETY: a row is an array of numbers and nothing else, and the alignment of the array is no larger.
        unsafe { std::slice::from_raw_parts(rows.as_ptr().cast(), rows.len()) }
    }
}

/// 256 activations of one row as sums of three bfloat16 numbers each.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct SplitRow {
    /// The parts, the largest first; columns go in the order of [pairs](crate::weight::TileChunk).
    pub parts: [[u16; CHUNK]; 3],
    /// The sum of the activations of each of the weight's groups.
    pub sums: [f32; 2 * CHUNK / STEP],
}

#[cfg(target_arch = "x86_64")]
impl SplitRow {
    /// Zeros.
    pub const ZERO: Self = Self { parts: [[0; CHUNK]; 3], sums: [0.0; 16] };
}

/// Activations in the forms that products asked for last. Several products read the same activations (queries, keys and
/// values; gate and up), so what was prepared is used again as long as the buffer has not changed.
#[derive(Default)]
pub struct Prepared {
    integers: Form<IntegerRow, (Isa, i16, u8, usize)>,
    floats: Form<FloatRow, ()>,
    #[cfg(target_arch = "x86_64")]
    split: Form<SplitRow, usize>,
}

impl Prepared {
    /// Copies activations into chunks. The last chunk ends in zeros.
    pub fn floats(&mut self, pool: &Pool, x: &HostBuffer) -> &[FloatRow] {
        self.floats.of(pool, x, (), FloatRow([0.0; CHUNK]), |values, out| {
            out.0[..values.len()].copy_from_slice(values);
            out.0[values.len()..].fill(0.0);
        })
    }

    /// Splits activations for a weight with groups of `group`.
    #[cfg(target_arch = "x86_64")]
    pub fn split(&mut self, pool: &Pool, amx: Amx, x: &HostBuffer, group: usize) -> &[SplitRow] {
        self.split.of(pool, x, group, SplitRow::ZERO, |values, out| amx.run(Split { values, group, out }))
    }

    /// Rounds activations for a weight with these codes in groups of `group`.
    pub fn integers(&mut self, pool: &Pool, isa: Isa, x: &HostBuffer, codes: &Integers, group: usize) -> &[IntegerRow] {
        let Integers { offset, largest, .. } = *codes;
        self.integers.of(pool, x, (isa, offset, largest, group), IntegerRow::ZERO, |values, out| {
            isa.run(Quantize { values, offset, largest, group, out });
        })
    }
}

/// The chunks of a buffer's rows in one form, `[chunk][row]`. Memory is only taken for more than there was before.
struct Form<Chunk, Kind> {
    chunks: Vec<Chunk>,
    /// Version and shape of the buffer, and what else the form depends on.
    source: Option<(u64, (usize, usize), Kind)>,
}

impl<Chunk, Kind> Default for Form<Chunk, Kind> {
    fn default() -> Self {
        Self { chunks: Vec::new(), source: None }
    }
}

impl<Chunk: Copy + Send, Kind: PartialEq> Form<Chunk, Kind> {
    /// The chunks of `x`, prepared unless they are there already.
    fn of(
        &mut self,
        pool: &Pool,
        x: &HostBuffer,
        kind: Kind,
        zero: Chunk,
        prepare: impl Fn(&[f32], &mut Chunk) + Sync,
    ) -> &[Chunk] {
        let (rows, cols) = x.shape();
        let len = cols.div_ceil(CHUNK) * rows;
        let source = Some((x.version(), x.shape(), kind));
        if self.source != source {
            self.source = None;
            if self.chunks.len() < len {
                self.chunks.resize(len, zero);
            }
            let out = Disjoint::new(&mut self.chunks);
            pool.run(rows, |row| {
                for (chunk, values) in x.row(row).chunks(CHUNK).enumerate() {
                    // SAFETY: each task has a row of its own.
                    let [out] = (unsafe { out.slice(chunk * rows + row, 1) }) else { unreachable!("one chunk") };
                    prepare(values, out);
                }
            });
            self.source = source;
        }
        &self.chunks[..len]
    }
}

/// A whole chunk, or what there is of one and zeros.
#[inline(always)]
fn chunk<'a>(values: &'a [f32], zeros: &'a mut [f32; CHUNK]) -> &'a [f32; CHUNK] {
    if let Ok(values) = values.try_into() {
        return values;
    }
    zeros[..values.len()].copy_from_slice(values);
    zeros
}

/// Rounds up to 256 values.
struct Quantize<'a> {
    values: &'a [f32],
    offset: i16,
    largest: u8,
    group: usize,
    out: &'a mut IntegerRow,
}

impl Kernel for Quantize<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { values, offset, largest, group, out } = self;
        let offset = if S::sums_hold(largest) == 0 { offset - CENTER } else { offset };
        let mut padded = [0.0; CHUNK];
        let values = chunk(values, &mut padded);
        let (halves, _) = values.as_chunks::<LANES>();
        for (block, halves) in halves.chunks_exact(2).enumerate() {
            let x = [simd.load(&halves[0]), simd.load(&halves[1])];
            let scale = scale_of(simd, x);
            let inverse = simd.splat(if scale > 0.0 { 1.0 / scale } else { 0.0 });
            let q = [simd.round(simd.mul(x[0], inverse)), simd.round(simd.mul(x[1], inverse))];
            for (half, q) in q.into_iter().enumerate() {
                simd.store_i8(q, &mut out.codes.as_chunks_mut().0[2 * block + half]);
            }
            // Sums of up to 32 whole numbers below 128 are exact.
            let sums = [simd.sum(q[0]), simd.sum(q[1])];
            let mut put = |group: usize, sum: f32| {
                out.scales[group] = scale;
                out.offsets[group] = -i32::from(offset) * sum as i32;
                out.sums[group] = sum * scale;
            };
            if group < STEP {
                put(2 * block, sums[0]);
                put(2 * block + 1, sums[1]);
            } else {
                put(block, sums[0] + sums[1]);
            }
        }
    }
}

/// Splits up to 256 values.
#[cfg(target_arch = "x86_64")]
struct Split<'a> {
    values: &'a [f32],
    group: usize,
    out: &'a mut SplitRow,
}

#[cfg(target_arch = "x86_64")]
impl TileKernel for Split<'_> {
    #[inline(always)]
    fn run(self, _tiles: &mut Tiles, simd: Avx512) {
        let Self { values, group, out } = self;
        let mut padded = [0.0; CHUNK];
        let values = chunk(values, &mut padded);
        for (i, values) in values.as_chunks().0.iter().enumerate() {
            let x = simd.load(values);
            for (part, out) in split_activations(x).into_iter().zip(&mut out.parts) {
                out.as_chunks_mut().0[i] = part;
            }
            let sum = simd.sum(x);
            if group < STEP || i % 2 == 0 {
                out.sums[if group < STEP { i } else { i / 2 }] = sum;
            } else {
                out.sums[i / 2] += sum;
            }
        }
    }
}

/// A 127th of the largest magnitude; NaN if any value is not finite, so that damage shows.
#[inline(always)]
fn scale_of<S: Simd>(simd: S, x: [S::Floats; 2]) -> f32 {
    let minus = simd.splat(-1.0);
    let magnitude = [simd.max(x[0], simd.mul(x[0], minus)), simd.max(x[1], simd.mul(x[1], minus))];
    // Zero, unless there is an infinity or a NaN.
    let damage = simd.add(simd.mul(x[0], simd.splat(0.0)), simd.mul(x[1], simd.splat(0.0)));
    simd.largest(simd.max(magnitude[0], magnitude[1])) / 127.0 + simd.sum(damage)
}
