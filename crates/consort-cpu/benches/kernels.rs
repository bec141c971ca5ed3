//! Every kernel as a fraction of what this machine can do.
//!
//! Run with `cargo bench -p consort-cpu -- [words]`: only lines whose name contains one of the words are measured, such as
//! `decode`, `'prefill BF16'` or `'4 rows 2t'`. Limits and kernels are measured in turn, and the best of several rounds counts,
//! because machines are shared. The bandwidth is that of memory larger than any cache; reading it also evicts the weights of
//! decode products before each round; they are also held against what their arithmetic allows at full speed, where that is
//! less: eight rows of 4-bit weights are more products than a processor makes of the bytes that memory gives. Products are held against the limits of vectors, and where there are tiles against theirs
//! too: exact activations take three bfloat16 products each.

#[path = "../tests/common/mod.rs"]
mod common;

use std::time::{Duration, Instant};

use common::{Random, activations, matrix};
use consort_compute::portable::HostBuffer;
use consort_compute::{Backend, Format, Matrix, ScaleFormat};
use consort_cpu::roofline::{Prober, TileProduct};
use consort_cpu::weight::Codes;
use consort_cpu::{Activations, Cpu, CpuOptions};

/// Time for each line, and the fewest rounds in it.
const LINE_TIME: Duration = Duration::from_millis(1200);
const ROUNDS: usize = 5;
/// Bytes of a weight in decode products.
const DECODE_BYTES: usize = 128 << 20;

/// Which limit a kernel is held against.
#[derive(Clone, Copy)]
enum Limit {
    /// Of weights whose bytes take so many operations each, in this arithmetic.
    Decode {
        operations_per_byte: f64,
        arithmetic: fn(&Prober<'_>) -> f64,
    },
    Float,
    Int8,
    Bf16,
}

struct Bench {
    words: Vec<String>,
    threads: usize,
    exact: Cpu,
    int8: Cpu,
    bf16: Cpu,
}

impl Bench {
    /// Measures `work`, which does `amount` bytes or operations, in turn with its limits.
    fn line(&self, prober: &Prober<'_>, name: &str, limit: Limit, amount: f64, mut work: impl FnMut()) {
        work();
        let (mut best, mut best_limit, mut best_other) = (0f64, 0f64, 0f64);
        let begin = Instant::now();
        let mut rounds = 0;
        while rounds < ROUNDS || begin.elapsed() < LINE_TIME {
            rounds += 1;
            let (vectors, other) = match limit {
                Limit::Decode { operations_per_byte, arithmetic } => {
                    // Arithmetic first: reading evicts the weights.
                    let allowed = arithmetic(prober) / operations_per_byte;
                    (prober.read(self.threads), allowed)
                }
                Limit::Float => (prober.f32_arithmetic(), prober.tile_arithmetic(TileProduct::Bf16) / 3.0),
                Limit::Int8 => (prober.int8_arithmetic(), prober.tile_arithmetic(TileProduct::Bytes)),
                Limit::Bf16 => (prober.f32_arithmetic(), prober.bf16_arithmetic()),
            };
            (best_limit, best_other) = (best_limit.max(vectors), best_other.max(other));
            let start = Instant::now();
            work();
            best = best.max(amount / start.elapsed().as_secs_f64());
        }
        let (unit, of_other) = match limit {
            Limit::Decode { .. } if best_other < best_limit => {
                ("GB/s", format!(", {:>3.0} % of what arithmetic allows", 100.0 * best / best_other))
            }
            Limit::Decode { .. } => ("GB/s", String::new()),
            Limit::Bf16 => ("Gop/s", format!(", {:>3.0} % of bf16", 100.0 * best / best_other)),
            _ if self.exact.isa().has_tiles() => ("Gop/s", format!(", {:>3.0} % of tiles", 100.0 * best / best_other)),
            _ => ("Gop/s", String::new()),
        };
        println!("{name:<52} {:>8.1} {unit:<5} {:>4.0} %{of_other}", best / 1e9, 100.0 * best / best_limit);
    }

    fn wants(&self, name: &str) -> bool {
        self.words.is_empty() || self.words.iter().any(|word| name.contains(word))
    }

    fn decode(&self, prober: &Prober<'_>) {
        for format in formats() {
            let cols = 4096;
            let rows = (DECODE_BYTES / format.row_bytes(cols)).next_multiple_of(64);
            for (mode, cpu, arithmetic) in self.modes() {
                let name = |n: usize| format!("decode {format} {mode} {n} rows {}t", self.threads);
                if !takes(format, mode) || ![1, 4, 8].iter().any(|&n| self.wants(&name(n))) {
                    continue;
                }
                let w = cpu.weight(large_matrix(format, rows, cols));
                for n in [1, 4, 8].into_iter().filter(|&n| self.wants(&name(n))) {
                    let x = activations(&mut Random(1), n, cols);
                    let mut out = HostBuffer::with_capacity(n * rows);
                    let bytes = cpu.weight_bytes(&w) as f64;
                    let limit = Limit::Decode { operations_per_byte: (2 * n * rows * cols) as f64 / bytes, arithmetic };
                    self.line(prober, &name(n), limit, bytes, || cpu.matmul(&mut out, &x, &w));
                }
            }
        }
    }

    fn prefill(&self, prober: &Prober<'_>) {
        let (n, rows, cols) = (512, 2048, 2048);
        for format in formats() {
            for ((mode, cpu, _), limit) in self.modes().into_iter().zip([Limit::Int8, Limit::Bf16, Limit::Float]) {
                let name = format!("prefill {format} {mode} {n} rows {}t", self.threads);
                if !takes(format, mode) || !self.wants(&name) {
                    continue;
                }
                let w = cpu.weight(large_matrix(format, rows, cols));
                let x = activations(&mut Random(1), n, cols);
                let mut out = HostBuffer::with_capacity(n * rows);
                let operations = 2.0 * (n * rows * cols) as f64;
                self.line(prober, &name, limit, operations, || cpu.matmul(&mut out, &x, &w));
            }
        }
    }

    /// Ways in which activations enter products, and the arithmetic of each.
    fn modes(&self) -> [(&'static str, &Cpu, fn(&Prober<'_>) -> f64); 3] {
        [
            ("int8", &self.int8, |prober| prober.int8_arithmetic()),
            ("bf16", &self.bf16, |prober| prober.bf16_arithmetic()),
            ("exact", &self.exact, exact_arithmetic),
        ]
    }

    /// What rounded activations add to the error of the weights' own format, in products of Gaussian weights with Gaussian
    /// activations some of whose features are ten times as large. Errors are relative to the products of the weights in F32;
    /// formats that are only read cannot be measured, but those of the affine family with groups of 32 are Q4_1's and Q5_1's.
    fn errors(&self) {
        let (n, rows, cols) = (64, 256, 2048);
        let mut random = Random(3);
        let weights: Vec<f32> = (0..rows * cols).map(|_| gaussian(&mut random)).collect();
        let sizes: Vec<f32> = (0..cols).map(|_| if random.below(100) == 0 { 10.0 } else { 1.0 }).collect();
        let x: Vec<f32> = (0..n * cols).map(|i| sizes[i % cols] * gaussian(&mut random)).collect();
        let x = HostBuffer::from_values(n, cols, &x);
        let product = |cpu: &Cpu, matrix: &Matrix<'_>| {
            let mut out = HostBuffer::with_capacity(n * rows);
            cpu.matmul(&mut out, &x, &cpu.weight(matrix.clone()));
            out
        };
        let reference = product(&self.exact, &Matrix::encode(Format::F32, rows, cols, &weights));
        let distance = |a: &HostBuffer, b: &HostBuffer| {
            let squares = |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x * x)).sum::<f64>();
            let difference = squares(&mut a.values().iter().zip(b.values()).map(|(a, b)| a - b));
            (difference / squares(&mut reference.values().iter().copied())).sqrt()
        };
        let affine = [2, 3, 4, 5, 6, 8].map(|bits| Format::Affine { bits, group: 64, scale: ScaleFormat::BF16 });
        let small = [4, 5].map(|bits| Format::Affine { bits, group: 32, scale: ScaleFormat::F16 });
        let floats = [Format::BF16, Format::F8E4M3, Format::F8E4M3Block128, Format::MxFp8];
        for format in floats.into_iter().chain([Format::NvFp4, Format::MxFp4, Format::Q8_0]).chain(affine).chain(small)
        {
            let name = format!("errors {format}");
            if !self.wants(&name) {
                continue;
            }
            let matrix = Matrix::encode(format, rows, cols, &weights);
            let (mode, cpu) = if takes(format, "int8") { ("int8", &self.int8) } else { ("bf16", &self.bf16) };
            let (exact, rounded) = (product(&self.exact, &matrix), product(cpu, &matrix));
            let (own, added) = (distance(&exact, &reference), distance(&rounded, &exact));
            println!("{name:<52} own {own:.1e}, {mode} activations {added:.1e}, ratio {:.2}", added / own);
        }
    }
}

/// Operations per second on f32 values, in the quickest way: tiles multiply three bfloat16 parts of each.
fn exact_arithmetic(prober: &Prober<'_>) -> f64 {
    prober.f32_arithmetic().max(prober.tile_arithmetic(TileProduct::Bf16) / 3.0)
}

fn formats() -> Vec<Format> {
    let affine = Format::Affine { bits: 4, group: 64, scale: ScaleFormat::BF16 };
    let floats = [Format::BF16, Format::F16, Format::F32, Format::F8E4M3, Format::MxFp8];
    let integers = [Format::Q4_1, Format::Q8_0, Format::Q4_0, Format::Q4K, Format::Q6K, Format::Q5_0, Format::Q5K];
    let more = [Format::NvFp4, Format::MxFp4, affine, Format::Q2K, Format::Q3K, Format::IQ4NL];
    floats.into_iter().chain(integers).chain(more).collect()
}

/// Whether weights of this format are multiplied with such activations.
fn takes(format: Format, mode: &str) -> bool {
    let codes = consort_cpu::weight::Layout::of(format).codes;
    match mode {
        "int8" => matches!(codes, Codes::Integers(_)),
        "bf16" => matches!(codes, Codes::BF16 | Codes::E4M3),
        _ => true,
    }
}

/// A sum of twelve uniform numbers.
fn gaussian(random: &mut Random) -> f32 {
    (0..12).map(|_| random.value()).sum::<f32>() / 2.0
}

/// A matrix whose 64 first rows repeat, because random numbers take longer to make than to multiply.
fn large_matrix(format: Format, rows: usize, cols: usize) -> Matrix<'static> {
    let few = matrix(&mut Random(2), format, 64, cols);
    let bytes = rows * format.row_bytes(cols);
    let data: Vec<u8> = few.data.iter().copied().cycle().take(bytes).collect();
    Matrix::new(format, rows, cols, data)
}

fn cpu(threads: usize, activations: Activations) -> Cpu {
    Cpu::new(CpuOptions { threads: Some(threads), activations, ..CpuOptions::default() })
        .expect("this machine has a CPU")
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    let all = consort_cpu::allowed_cores().len();
    for threads in if all > 1 { vec![1, all] } else { vec![1] } {
        let bench = Bench {
            words: words.clone(),
            threads,
            exact: cpu(threads, Activations::Exact),
            int8: cpu(threads, Activations::Int8),
            bf16: cpu(threads, Activations::Bf16),
        };
        let prober = Prober::new(&bench.exact);
        let limits = prober.measure(3);
        println!(
            "{threads} threads, {}: read {:.1} GB/s (one thread {:.1}), f32 {:.0} Gop/s, int8 {:.0} Gop/s, bf16 {:.0} Gop/s",
            bench.exact.isa(),
            limits.read_bytes_per_second / 1e9,
            limits.read_bytes_per_second_one_thread / 1e9,
            limits.f32_operations_per_second / 1e9,
            limits.int8_operations_per_second / 1e9,
            limits.bf16_operations_per_second.unwrap_or_default() / 1e9,
        );
        if let Some(tiles) = limits.tiles {
            println!(
                "in tiles: int8 {:.0} Gop/s, bf16 {:.0} Gop/s",
                tiles.int8_operations_per_second / 1e9,
                tiles.bf16_operations_per_second / 1e9,
            );
        }
        if threads == 1 {
            bench.errors();
        }
        bench.decode(&prober);
        bench.prefill(&prober);
    }
}
