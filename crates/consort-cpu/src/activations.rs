//! Activations in the form that products read.
//!
//! All forms go chunk by chunk of 256 input features and, within a chunk, row by row, so that the rows that a product works
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
use crate::weight::{CHUNK, Codes, GROUPS, Integers, Layout, STEP};

/// How activations enter products.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activations {
    /// As they are: f32 products and sums.
    Exact,
    /// Rounded to 8 bits for each block of 32, with weights that are whole numbers times a scale; exact with others.
    Int8,
    /// Rounded to bfloat16, with weights that are bfloat16 numbers, perhaps scaled (BF16, FP8); exact with others. Products and
    /// sums are f32.
    Bf16,
    /// `Int8` with whole numbers of at most 8 bits, whose own rounding is larger up to 4 bits and comparable at 8; `Bf16` with
    /// BF16, whose rounding is the same, and FP8, whose is larger, where the processor multiplies bfloat16 faster than f32;
    /// `Exact` with others.
    #[default]
    Auto,
}

impl Activations {
    /// What is done with weights of this layout: never `Auto`.
    pub fn with(self, layout: &Layout, isa: Isa) -> Self {
        let bf16 = matches!(layout.codes, Codes::BF16 | Codes::E4M3);
        match self {
            Self::Int8 | Self::Auto if layout.integers().is_some() => Self::Int8,
            Self::Bf16 if bf16 => Self::Bf16,
            Self::Auto if bf16 && isa.bf16().is_some() => Self::Bf16,
            _ => Self::Exact,
        }
    }
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

/// 256 activations of one row and the sums of the weight's groups of them, of which there are one or two in each 32.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct GroupedRow(pub [f32; CHUNK + GROUPS]);

impl GroupedRow {
    /// Zeros.
    pub const ZERO: Self = Self([0.0; CHUNK + GROUPS]);

    /// Rows as plain numbers.
    pub fn values(rows: &[Self]) -> &[[f32; CHUNK + GROUPS]] {
        // SAFETY: a row is an array of numbers and nothing else, and the alignment of the array is no larger.
        unsafe { std::slice::from_raw_parts(rows.as_ptr().cast(), rows.len()) }
    }
}

/// 256 activations of one row in bfloat16, as pairs: the first of two in the upper half.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct PairRow(pub [u32; CHUNK / 2]);

#[cfg(target_arch = "x86_64")]
impl PairRow {
    /// Zeros.
    pub const ZERO: Self = Self([0; CHUNK / 2]);
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
    floats: Form<GroupedRow, (Isa, bool, bool)>,
    #[cfg(target_arch = "x86_64")]
    pairs: Form<PairRow, Isa>,
    #[cfg(target_arch = "x86_64")]
    split: Form<SplitRow, (usize, bool)>,
}

impl Prepared {
    /// Copies activations into chunks, rounded to bfloat16 if `round`, and sums them up in groups of 32, or of 16 if `halves`.
    pub fn floats(&mut self, pool: &Pool, isa: Isa, x: &HostBuffer, round: bool, halves: bool) -> &[GroupedRow] {
        self.floats.of(pool, x, (isa, round, halves), GroupedRow::ZERO, |values, out| {
            isa.run(SumGroups { values, round, halves, out });
        })
    }

    /// Rounds activations to bfloat16.
    #[cfg(target_arch = "x86_64")]
    pub fn pairs(&mut self, pool: &Pool, isa: Isa, x: &HostBuffer) -> &[PairRow] {
        self.pairs.of(pool, x, isa, PairRow::ZERO, |values, out| isa.run(RoundPairs { values, out }))
    }

    /// Splits activations, rounded to bfloat16 if `round`, for a weight with groups of `group`.
    #[cfg(target_arch = "x86_64")]
    pub fn split(&mut self, pool: &Pool, amx: Amx, x: &HostBuffer, group: usize, round: bool) -> &[SplitRow] {
        let split = |values: &[f32], out: &mut SplitRow| amx.run(Split { values, group, round, out });
        self.split.of(pool, x, (group, round), SplitRow::ZERO, split)
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

/// Copies up to 256 values, followed by zeros, and sums groups of them up.
struct SumGroups<'a> {
    values: &'a [f32],
    round: bool,
    halves: bool,
    out: &'a mut GroupedRow,
}

impl Kernel for SumGroups<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { values, round, halves, out } = self;
        let mut padded = [0.0; CHUNK];
        let values = chunk(values, &mut padded);
        let (out, sums) = out.0.split_at_mut(CHUNK);
        for (i, (x, out)) in values.as_chunks().0.iter().zip(out.as_chunks_mut().0).enumerate() {
            let mut x = simd.load(x);
            if round {
                let mut halves = [0; 2 * LANES];
                simd.store_bf16(x, &mut halves);
                x = simd.load_bf16(&halves);
            }
            simd.store(x, out);
            let sum = simd.sum(x);
            match (halves, i % 2) {
                (true, _) => sums[i] = sum,
                (false, 0) => sums[i / 2] = sum,
                (false, _) => sums[i / 2] += sum,
            }
        }
    }
}

/// Rounds up to 256 values to bfloat16.
#[cfg(target_arch = "x86_64")]
struct RoundPairs<'a> {
    values: &'a [f32],
    out: &'a mut PairRow,
}

#[cfg(target_arch = "x86_64")]
impl Kernel for RoundPairs<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let mut padded = [0.0; CHUNK];
        let values = chunk(self.values, &mut padded).as_chunks().0;
        for (values, out) in values.iter().zip(self.out.0.as_chunks_mut::<{ LANES / 2 }>().0) {
            let mut halves = [0; 2 * LANES];
            simd.store_bf16(simd.load(values), &mut halves);
            for (pair, out) in halves.as_chunks().0.iter().zip(out) {
                *out = u32::from_le_bytes(*pair).rotate_left(16);
            }
        }
    }
}

/// Splits up to 256 values.
#[cfg(target_arch = "x86_64")]
struct Split<'a> {
    values: &'a [f32],
    group: usize,
    round: bool,
    out: &'a mut SplitRow,
}

#[cfg(target_arch = "x86_64")]
impl TileKernel for Split<'_> {
    #[inline(always)]
    fn run(self, _tiles: &mut Tiles, simd: Avx512) {
        let Self { values, group, round, out } = self;
        let mut padded = [0.0; CHUNK];
        let values = chunk(values, &mut padded);
        for (i, values) in values.as_chunks().0.iter().enumerate() {
            let mut x = simd.load(values);
            if round {
                let mut halves = [0; 2 * LANES];
                simd.store_bf16(x, &mut halves);
                x = simd.load_bf16(&halves);
            }
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
