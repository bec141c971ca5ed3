//! What this machine can do: the limits that kernels and plans are held against.
//!
//! Absolute speeds of a shared machine say little. A kernel's fraction of a limit that was measured in the same minute says
//! how good the kernel is, and the limits of each rank's machine say what a plan can reach.

use std::hint::black_box;
use std::time::Instant;

use consort_compute::portable::AlignedBytes;

use crate::Cpu;
#[cfg(target_arch = "x86_64")]
use crate::isa::{Avx512Bf16, PairKernel};
use crate::isa::{Isa, Kernel, LANES, Quads, Simd};
use crate::memory::advise_huge_pages;

/// Memory that is read to measure bandwidth: several times the largest last-level cache (480 MiB in servers of today), which
/// also leaves nothing else in the cache.
const READ_BYTES: usize = 1280 << 20;
/// Pieces that threads claim.
const PIECES: usize = 256;
/// Rounds of the arithmetic loops: a fraction of a millisecond, short enough to find a quiet moment on a busy machine.
const ROUNDS: usize = 2_000;
/// Byte products that are added up before the sum is widened: those of a block of 32.
const QUADS: usize = 8;
/// Independent chains of arithmetic: enough to hide its latency. Where 16 lanes take two registers, half of them are.
const CHAINS: usize = 12;

/// The limits of one machine, with all the threads of a [`Cpu`] unless said otherwise.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Roofline {
    /// Bytes per second that one thread reads from memory.
    pub read_bytes_per_second_one_thread: f64,
    /// Bytes per second that all threads read from memory.
    pub read_bytes_per_second: f64,
    /// f32 multiplications and additions per second.
    pub f32_operations_per_second: f64,
    /// 8-bit multiplications and additions of vectors per second, added up to 32 bits for each 32 products.
    pub int8_operations_per_second: f64,
    /// bfloat16 multiplications and additions of vectors per second, if the instruction set has them.
    pub bf16_operations_per_second: Option<f64>,
    /// What tiles do, if the instruction set has them.
    pub tiles: Option<TileLimits>,
}

/// The limits of products in tiles, with all threads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TileLimits {
    /// 8-bit multiplications and additions per second.
    pub int8_operations_per_second: f64,
    /// bfloat16 multiplications and additions per second: f32 activations take three of each.
    pub bf16_operations_per_second: f64,
}

/// Measures limits again and again, so that they can be taken between the measurements of kernels.
pub struct Prober<'a> {
    cpu: &'a Cpu,
    memory: AlignedBytes,
}

impl<'a> Prober<'a> {
    /// Takes the memory that is read.
    pub fn new(cpu: &'a Cpu) -> Self {
        let mut memory = AlignedBytes::zeroed(READ_BYTES);
        advise_huge_pages(&memory);
        memory.fill(1);
        Self { cpu, memory }
    }

    /// The best of `rounds` measurements of everything.
    pub fn measure(&self, rounds: usize) -> Roofline {
        let best = |measure: &dyn Fn() -> f64| (0..rounds).map(|_| measure()).fold(0.0, f64::max);
        Roofline {
            read_bytes_per_second_one_thread: best(&|| self.read(1)),
            read_bytes_per_second: best(&|| self.read(self.cpu.pool().threads())),
            f32_operations_per_second: best(&|| self.f32_arithmetic()),
            int8_operations_per_second: best(&|| self.int8_arithmetic()),
            bf16_operations_per_second: (self.cpu.isa().bf16().is_some()).then(|| best(&|| self.bf16_arithmetic())),
            tiles: self.cpu.isa().has_tiles().then(|| TileLimits {
                int8_operations_per_second: best(&|| self.tile_arithmetic(TileProduct::Bytes)),
                bf16_operations_per_second: best(&|| self.tile_arithmetic(TileProduct::Bf16)),
            }),
        }
    }

    /// Bytes per second, read once through by `threads` threads.
    pub fn read(&self, threads: usize) -> f64 {
        let isa = self.cpu.isa();
        let (quads, _) = self.memory.as_chunks();
        let pieces: Vec<&[Quads]> = quads.chunks(quads.len() / PIECES).collect();
        let read = |piece: usize| {
            black_box(isa.run(Read(pieces[piece])));
        };
        let start = Instant::now();
        if threads == 1 {
            (0..PIECES).for_each(read);
        } else {
            self.cpu.pool().run(PIECES, read);
        }
        READ_BYTES as f64 / start.elapsed().as_secs_f64()
    }

    /// Bytes per second of scattered memory, read piece by piece by all threads, each of which asks for its next piece while it
    /// reads one: a processor itself looks ahead only where memory goes on.
    pub fn read_pieces(&self, pieces: &[&[u8]]) -> f64 {
        let (pool, isa) = (self.cpu.pool(), self.cpu.isa());
        let parts: Vec<_> = pieces.chunks(pieces.len().div_ceil(pool.threads()).max(1)).collect();
        let start = Instant::now();
        pool.run(parts.len(), |part| {
            black_box(isa.run(ReadPieces(parts[part])));
        });
        pieces.iter().map(|piece| piece.len()).sum::<usize>() as f64 / start.elapsed().as_secs_f64()
    }

    /// f32 operations per second of all threads.
    pub fn f32_arithmetic(&self) -> f64 {
        self.arithmetic(2 * LANES * CHAINS, |isa| {
            black_box(isa.run(MultiplyFloats));
        })
    }

    /// 8-bit operations per second of all threads.
    pub fn int8_arithmetic(&self) -> f64 {
        self.arithmetic(2 * 4 * LANES * QUADS * CHAINS, |isa| {
            black_box(isa.run(MultiplyBytes));
        })
    }

    /// bfloat16 operations per second of all threads; zero if there are no products of bfloat16 in vectors.
    pub fn bf16_arithmetic(&self) -> f64 {
        match self.cpu.isa().bf16() {
            None => 0.0,
            #[cfg(target_arch = "x86_64")]
            Some(bf16) => self.arithmetic(2 * 2 * LANES * CHAINS, |_| bf16.run(MultiplyPairs)),
        }
    }

    /// Operations per second in tiles of all threads; zero if there are none.
    pub fn tile_arithmetic(&self, product: TileProduct) -> f64 {
        if !self.cpu.isa().has_tiles() {
            return 0.0;
        }
        let bytes = match product {
            TileProduct::Bytes => 1,
            TileProduct::Bf16 => 2,
        };
        // Four tiles of 16 by 16 sums, each of 64 bytes of products.
        self.arithmetic(4 * 2 * LANES * LANES * 64 / bytes, |isa| multiply_tiles(isa, product))
    }

    /// `operations` are those of one round.
    fn arithmetic(&self, operations: usize, kernel: impl Fn(Isa) + Sync) -> f64 {
        let (pool, isa) = (self.cpu.pool(), self.cpu.isa());
        let tasks = 4 * pool.threads();
        let start = Instant::now();
        pool.run(tasks, |_| kernel(isa));
        (operations * ROUNDS * tasks) as f64 / start.elapsed().as_secs_f64()
    }
}

/// Reads memory.
struct Read<'a>(&'a [Quads]);

impl Kernel for Read<'_> {
    type Output = Quads;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Quads {
        let mut all = [simd.load_bytes(&[0; 4 * LANES]); 4];
        for quads in self.0.as_chunks::<4>().0 {
            for (all, quad) in all.iter_mut().zip(quads) {
                *all = simd.or(*all, simd.load_bytes(quad));
            }
        }
        let mut out = [0; 4 * LANES];
        simd.store_bytes(simd.or(simd.or(all[0], all[1]), simd.or(all[2], all[3])), &mut out);
        out
    }
}

/// Reads pieces of memory, and asks for the next meanwhile.
struct ReadPieces<'a>(&'a [&'a [u8]]);

impl Kernel for ReadPieces<'_> {
    type Output = Quads;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Quads {
        let mut all = simd.load_bytes(&[0; 4 * LANES]);
        for (i, piece) in self.0.iter().enumerate() {
            let next: &[u8] = self.0.get(i + 1).copied().unwrap_or_default();
            let mut next = next.chunks(4 * LANES);
            for quads in piece.as_chunks().0 {
                simd.prefetch_early(next.next().unwrap_or_default());
                all = simd.or(all, simd.load_bytes(quads));
            }
        }
        let mut out = [0; 4 * LANES];
        simd.store_bytes(all, &mut out);
        out
    }
}

/// Multiplies and adds f32 in registers.
struct MultiplyFloats;

impl Kernel for MultiplyFloats {
    type Output = [[f32; LANES]; CHAINS];

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Self::Output {
        let mut out = [[0.0; LANES]; CHAINS];
        if S::REGISTERS > 2 * CHAINS {
            multiply_floats::<S, CHAINS>(simd, &mut out);
        } else {
            let (first, second) = out.split_at_mut(CHAINS / 2);
            multiply_floats::<S, { CHAINS / 2 }>(simd, first);
            multiply_floats::<S, { CHAINS / 2 }>(simd, second);
        }
        out
    }
}

#[inline(always)]
fn multiply_floats<S: Simd, const CHAINS: usize>(simd: S, out: &mut [[f32; LANES]]) {
    let (a, b) = (simd.splat(black_box(0.999)), simd.splat(black_box(0.001)));
    let mut sums = [simd.splat(1.0); CHAINS];
    for _ in 0..ROUNDS {
        for sum in &mut sums {
            *sum = simd.fma(*sum, a, b);
        }
    }
    for (sum, out) in sums.into_iter().zip(out) {
        simd.store(sum, out);
    }
}

/// Multiplies and adds pairs of bfloat16 in registers.
#[cfg(target_arch = "x86_64")]
struct MultiplyPairs;

#[cfg(target_arch = "x86_64")]
impl PairKernel for MultiplyPairs {
    #[inline(always)]
    fn run(self, dot: Avx512Bf16) {
        let simd = dot.vectors();
        let w = simd.load_bytes(black_box(&[0x3C; 4 * LANES]));
        let mut sums = [simd.splat(1.0); CHAINS];
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = dot.add_products(*sum, w, 0x3C00_3C00);
            }
        }
        let mut out = [0.0; LANES];
        for sum in sums {
            simd.store(sum, &mut out);
            black_box(&out);
        }
    }
}

/// Multiplies bytes and adds them up to 32 bits.
struct MultiplyBytes;

impl Kernel for MultiplyBytes {
    type Output = [[f32; LANES]; CHAINS];

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Self::Output {
        let mut out = [[0.0; LANES]; CHAINS];
        if S::REGISTERS > 2 * CHAINS {
            multiply_bytes::<S, CHAINS>(simd, &mut out);
        } else {
            let (first, second) = out.split_at_mut(CHAINS / 2);
            multiply_bytes::<S, { CHAINS / 2 }>(simd, first);
            multiply_bytes::<S, { CHAINS / 2 }>(simd, second);
        }
        out
    }
}

#[inline(always)]
fn multiply_bytes<S: Simd, const CHAINS: usize>(simd: S, out: &mut [[f32; LANES]]) {
    let mut totals = [simd.splat_int(0); CHAINS];
    let weights = [[3; 4 * LANES]; QUADS];
    let x: [[u8; 4]; CHAINS] = std::array::from_fn(|i| [i as u8, 2, 3, 4]);
    for _ in 0..ROUNDS {
        // Hidden from the compiler, which would multiply only once.
        let (weights, x) = (black_box(&weights), black_box(&x));
        let mut sums = [simd.start_sums(simd.splat_int(0)); CHAINS];
        for w in weights {
            let w = simd.load_bytes(w);
            for i in 0..CHAINS {
                sums[i] = simd.dot_bytes(sums[i], w, x[i]);
            }
        }
        for i in 0..CHAINS {
            totals[i] = simd.add_ints(totals[i], simd.total(sums[i], simd.splat_int(0)));
        }
    }
    for (total, out) in totals.into_iter().zip(out) {
        simd.store(simd.to_floats(total), out);
    }
}

/// A kind of product of tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TileProduct {
    /// Of bytes.
    Bytes,
    /// Of bfloat16.
    Bf16,
}

#[cfg(target_arch = "x86_64")]
fn multiply_tiles(isa: Isa, product: TileProduct) {
    use crate::isa::{Avx512, amx};

    struct Multiply(TileProduct);

    impl amx::TileKernel for Multiply {
        #[inline(always)]
        fn run(self, tiles: &mut amx::Tiles, _simd: Avx512) {
            tiles.multiply_only(ROUNDS, self.0 == TileProduct::Bf16);
        }
    }

    if let Some(amx) = isa.amx() {
        amx.run(Multiply(product));
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn multiply_tiles(_isa: Isa, _product: TileProduct) {}
