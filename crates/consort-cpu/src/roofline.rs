//! What this machine can do: the limits that kernels and plans are held against.
//!
//! Absolute speeds of a shared machine say little. A kernel's fraction of a limit that was measured in the same minute says
//! how good the kernel is, and the limits of each rank's machine say what a plan can reach.

use std::hint::black_box;
use std::time::Instant;

use consort_compute::portable::AlignedBytes;

use crate::Cpu;
use crate::isa::{Isa, Kernel, LANES, Quads, Simd};
use crate::memory::advise_huge_pages;

/// Memory that is read to measure bandwidth: several times the largest last-level cache.
const READ_BYTES: usize = 128 << 20;
/// Pieces that threads claim.
const PIECES: usize = 64;
/// Rounds of the arithmetic loops: a fraction of a millisecond, short enough to find a quiet moment on a busy machine.
const ROUNDS: usize = 10_000;
/// Independent chains of arithmetic: enough to hide its latency, few enough for the registers.
const CHAINS: usize = 6;

/// The limits of one machine, with all the threads of a [`Cpu`] unless said otherwise.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Roofline {
    /// Bytes per second that one thread reads from memory.
    pub read_bytes_per_second_one_thread: f64,
    /// Bytes per second that all threads read from memory.
    pub read_bytes_per_second: f64,
    /// f32 multiplications and additions per second.
    pub f32_operations_per_second: f64,
    /// 8-bit multiplications and additions into 32 bits per second, without sharing the widening of sums among products.
    pub int8_operations_per_second: f64,
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

    /// f32 operations per second of all threads.
    pub fn f32_arithmetic(&self) -> f64 {
        self.arithmetic(2 * LANES * CHAINS, |isa| {
            black_box(isa.run(MultiplyFloats));
        })
    }

    /// 8-bit operations per second of all threads.
    pub fn int8_arithmetic(&self) -> f64 {
        self.arithmetic(2 * 4 * LANES * CHAINS, |isa| {
            black_box(isa.run(MultiplyBytes));
        })
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

/// Multiplies and adds f32 in registers.
struct MultiplyFloats;

impl Kernel for MultiplyFloats {
    type Output = [[f32; LANES]; CHAINS];

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Self::Output {
        let (a, b) = (simd.splat(black_box(0.999)), simd.splat(black_box(0.001)));
        let mut sums = [simd.splat(1.0); CHAINS];
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = simd.fma(*sum, a, b);
            }
        }
        let mut out = [[0.0; LANES]; CHAINS];
        for (sum, out) in sums.into_iter().zip(&mut out) {
            simd.store(sum, out);
        }
        out
    }
}

/// Multiplies bytes and adds them up to 32 bits.
struct MultiplyBytes;

impl Kernel for MultiplyBytes {
    type Output = [[f32; LANES]; CHAINS];

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Self::Output {
        let mut sums = [simd.splat_int(0); CHAINS];
        let weights = [[3; 4 * LANES]; CHAINS];
        for _ in 0..ROUNDS {
            // Hidden from the compiler, which would multiply only once.
            let weights = black_box(&weights);
            for (sum, w) in sums.iter_mut().zip(weights) {
                let products = simd.dot_bytes(simd.zero_sums(), simd.load_bytes(w), [1, 2, 3, 4]);
                *sum = simd.add_ints(*sum, simd.total(products));
            }
        }
        let mut out = [[0.0; LANES]; CHAINS];
        for (sum, out) in sums.into_iter().zip(&mut out) {
            simd.store(simd.to_floats(sum), out);
        }
        out
    }
}
