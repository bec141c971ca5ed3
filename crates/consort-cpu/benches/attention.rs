//! Attention and the delta rule as a fraction of what this machine can do, and what a parallel region costs, alone and beside
//! other work.
//!
//! Run with `cargo bench -p consort-cpu --bench attention -- [words]`: only lines whose name contains one of the words are
//! measured. Limits and kernels are measured in turn, and the best of several rounds counts, because machines are shared.

#[path = "../tests/common/mod.rs"]
mod common;

use std::hint::black_box;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{Random, activations, matrix};
use consort_compute::portable::HostBuffer;
use consort_compute::{AttentionSpec, Backend, DeltaSpec, Format, KvFormat, KvSpec, Run};
use consort_cpu::roofline::Prober;
use consort_cpu::{Cpu, CpuOptions};

/// Time for each line, and the fewest rounds in it.
const LINE_TIME: Duration = Duration::from_millis(800);
const ROUNDS: usize = 5;

/// How long steps are counted, alone and beside other work.
const FOREIGN_TIME: Duration = Duration::from_secs(3);
/// Set in the processes that are the other work.
const BUSY: &str = "CONSORT_BENCH_BUSY";

/// What bounds a line: its name, and how to measure it, in the line's unit.
type Limit<'a> = (&'static str, &'a dyn Fn() -> f64);

struct Bench {
    words: Vec<String>,
    cpu: Cpu,
}

impl Bench {
    fn threads(&self) -> usize {
        self.cpu.pool().threads()
    }

    fn wants(&self, name: &str) -> bool {
        self.words.is_empty() || self.words.iter().any(|word| name.contains(word))
    }

    /// Everything but what needs other processes.
    fn lines(&self) {
        let prober = Prober::new(&self.cpu);
        println!("{} threads, {}", self.threads(), self.cpu.isa());
        for dim in [64, 128] {
            for format in [KvFormat::F16, KvFormat::BF16, KvFormat::F32, KvFormat::FP8, KvFormat::Q8] {
                self.attention(&prober, format, 65_536, 1, dim, usize::MAX);
                self.attention(&prober, format, 2_048, 1, dim, usize::MAX);
            }
            for context in [8_192, 65_536] {
                self.attention(&prober, KvFormat::F16, context, 256, dim, usize::MAX);
            }
            self.attention(&prober, KvFormat::F16, 65_536, 256, dim, 1024);
        }
        self.delta(&prober);
        self.region();
    }

    /// One sequence with `context` positions, of which the last `tokens` ask. Several are held against the multiplications; one
    /// against the bytes that are read, as fast as memory in a row, as memory in the cache's blocks, and as the
    /// multiplications of these bytes allow: the least of them is what can be reached.
    fn attention(
        &self,
        prober: &Prober<'_>,
        format: KvFormat,
        context: usize,
        tokens: usize,
        dim: usize,
        window: usize,
    ) {
        let (heads, kv_heads, block_tokens) = (8, 2, 64);
        let windowed = window < context;
        let shown = if windowed { format!(" window {window}") } else { String::new() };
        let name = format!("attention {format:?} {tokens} of {context}{shown} head {dim} {}t", self.threads());
        if !self.wants(&name) {
            return;
        }
        // Blocks as a running server hands them out: in no order.
        let count = context / block_tokens;
        let blocks: Vec<u32> = (0..count).map(|i| (i * 37 % count) as u32).collect();
        let spec = KvSpec { blocks: count, block_tokens, heads: kv_heads, key_dim: dim, value_dim: dim, format };
        let mut cache = self.cpu.cache(spec);
        let kv = activations(&mut Random(1), context, kv_heads * dim);
        self.cpu.cache_write(&mut cache, &kv, &kv, &[Run { rows: 0..context, start: 0, blocks: &blocks, slot: 0 }]);
        let q = activations(&mut Random(2), tokens, heads * dim);
        let mut out = HostBuffer::with_capacity(tokens * heads * dim);
        let run = [Run { rows: 0..tokens, start: context - tokens, blocks: &blocks, slot: 0 }];
        let window = windowed.then_some(window);
        let spec = AttentionSpec { heads, kv_head_of: None, scale: 0.1, window, sinks: None, softcap: None };
        let seen: usize =
            (context - tokens..context).map(|position| window.unwrap_or(usize::MAX).min(position + 1)).sum();
        let bytes = (2 * seen * kv_heads * format.format().row_bytes(dim)) as f64;
        let operations = (4 * seen * heads * dim) as f64;
        let work = || self.cpu.attention(&mut out, &q, &cache, &run, &spec);
        let multiply: Limit<'_> = ("multiplying", &|| prober.f32_arithmetic());
        if tokens > 1 {
            return self.line(&name, operations, "Gop/s", &[multiply], work);
        }
        // What is read, in the order in which it is.
        let pieces: Vec<_> = (0..kv_heads)
            .flat_map(|head| blocks.iter().flat_map(move |&block| [(block, head, true), (block, head, false)]))
            .map(|(block, head, key)| if key { cache.keys(block, head) } else { cache.values(block, head) })
            .collect();
        let read: Limit<'_> = ("reading", &|| prober.read(self.threads()));
        let read_pieces: Limit<'_> = ("reading in blocks", &|| prober.read_pieces(&pieces));
        let multiply: Limit<'_> = ("multiplying", &|| bytes / operations * prober.f32_arithmetic());
        self.line(&name, bytes, "GB/s", &[read, read_pieces, multiply], work);
    }

    /// Measures `work`, which does `amount` bytes or operations, in turn with its limits.
    fn line(&self, name: &str, amount: f64, unit: &str, limits: &[Limit<'_>], mut work: impl FnMut()) {
        work();
        let (mut best, mut best_limits) = (0f64, vec![0f64; limits.len()]);
        let (begin, mut rounds) = (Instant::now(), 0);
        while rounds < ROUNDS || begin.elapsed() < LINE_TIME {
            rounds += 1;
            for ((_, limit), best) in limits.iter().zip(&mut best_limits) {
                *best = best.max(limit());
            }
            let start = Instant::now();
            work();
            best = best.max(amount / start.elapsed().as_secs_f64());
        }
        print!("{name:<52} {:>8.1} {unit:<5}", best / 1e9);
        for ((name, _), limit) in limits.iter().zip(best_limits) {
            print!(" {:>4.0} % of {name} ({:.1})", 100.0 * best / limit, limit / 1e9);
        }
        println!();
    }

    /// A delta layer of Qwen3-Next: its rule, and how long that takes beside the products around it.
    fn delta(&self, prober: &Prober<'_>) {
        let (tokens, hidden) = (256, 2048);
        let spec = DeltaSpec { key_heads: 16, value_heads: 32, key_dim: 128, value_dim: 128, tiled: false };
        let name = format!("delta rule {tokens} tokens {}t", self.threads());
        if !self.wants(&name) {
            return;
        }
        let (keys, values) = (spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim);
        let mut random = Random(1);
        let qkv = activations(&mut random, tokens, 2 * keys + values);
        let beta = activations(&mut random, tokens, spec.value_heads);
        let mut decay = activations(&mut random, tokens, spec.value_heads);
        decay.values_mut().iter_mut().for_each(|decay| *decay = -decay.abs());
        let mut state = activations(&mut random, 1, values * spec.key_dim);
        let mut out = HostBuffer::with_capacity(tokens * values);
        let run = [Run { rows: 0..tokens, start: 0, blocks: &[], slot: 0 }];
        // Four products of a state, as the definition has them.
        let operations = 8.0 * (tokens * spec.value_heads * spec.key_dim * spec.value_dim) as f64;
        let rule = &mut || self.cpu.delta_rule(&mut out, &qkv, &decay, &beta, &mut state, &run, spec);
        self.line(&name, operations, "Gop/s", &[("multiplying", &|| prober.f32_arithmetic())], &mut *rule);

        let weights = [(2 * keys + 2 * values, hidden), (hidden, values)]
            .map(|(rows, cols)| self.cpu.weight(matrix(&mut random, Format::Q8_0, rows, cols)));
        let x = [hidden, values].map(|cols| activations(&mut random, tokens, cols));
        let mut y = HostBuffer::with_capacity(tokens * (2 * keys + 2 * values));
        let products = &mut || x.iter().zip(&weights).for_each(|(x, w)| self.cpu.matmul(&mut y, x, w));
        let ratio = shortest(rule) / shortest(products);
        println!("{name:<52} {ratio:>8.2} times the products around it (Q8_0, int8 activations)");
    }

    /// What an empty region costs.
    fn region(&self) {
        let name = format!("region of {} tasks {}t", self.threads(), self.threads());
        if self.threads() == 1 || !self.wants(&name) {
            return;
        }
        const REGIONS: usize = 2_000;
        let mut regions = || {
            for _ in 0..REGIONS {
                self.cpu.pool().run(self.threads(), |task| {
                    black_box(task);
                });
            }
        };
        println!("{name:<52} {:>8.2} us", 1e6 * shortest(&mut regions) / REGIONS as f64);
    }

    /// Regions as in a decode step, alone and with a busy process for each core.
    fn foreign(&self) {
        let name = format!("beside busy processes {}t", self.threads());
        if self.threads() == 1 || !self.wants(&name) {
            return;
        }
        let alone = apart(|| self.steps_per_second());
        let program = std::env::current_exe().expect("the bench has a path");
        let mut busy: Vec<_> = (0..consort_cpu::allowed_cores().len())
            .map(|_| Command::new(&program).env(BUSY, "1").stdout(Stdio::null()).spawn().expect("another process"))
            .collect();
        let beside = apart(|| self.steps_per_second());
        for process in &mut busy {
            // One that has ended by itself is gone already.
            let _ = process.kill();
            let _ = process.wait();
        }
        println!("{name:<52} {:>8.0} steps/s, {:.0} % of {alone:.0} alone", beside, 100.0 * beside / alone);
    }

    /// A step: 200 regions of about 50 us, with some serial work between them.
    fn steps_per_second(&self) -> f64 {
        let work = |rounds: usize| {
            let mut x = black_box(1.0f64);
            for _ in 0..rounds {
                x = x.mul_add(0.999, 0.001);
            }
            black_box(x);
        };
        let tasks = 8 * self.threads();
        let (begin, mut steps) = (Instant::now(), 0);
        while begin.elapsed() < FOREIGN_TIME {
            for _ in 0..200 {
                self.cpu.pool().run(tasks, |_| work(3_000));
                work(1_000);
            }
            steps += 1;
        }
        f64::from(steps) / begin.elapsed().as_secs_f64()
    }
}

/// Runs `work` on a thread of its own, which the pool pins: the main thread stays free, because other processes inherit where
/// it may run.
fn apart<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    std::thread::scope(|scope| scope.spawn(work).join().expect("a bench does not panic"))
}

/// The shortest of several times, in seconds.
fn shortest(work: &mut dyn FnMut()) -> f64 {
    work();
    let times = (0..ROUNDS).map(|_| {
        let start = Instant::now();
        work();
        start.elapsed().as_secs_f64()
    });
    times.fold(f64::INFINITY, f64::min)
}

fn main() {
    if std::env::var_os(BUSY).is_some() {
        // Ends by itself if the bench does not come to end it.
        let begin = Instant::now();
        while begin.elapsed() < 10 * FOREIGN_TIME {
            black_box((0..100_000u64).map(black_box).sum::<u64>());
        }
        return;
    }
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    let all = consort_cpu::allowed_cores().len();
    for threads in if all > 1 { vec![1, all] } else { vec![1] } {
        let options = CpuOptions { threads: Some(threads), ..CpuOptions::default() };
        let bench = Bench { words: words.clone(), cpu: Cpu::new(options).expect("this machine has a CPU") };
        apart(|| bench.lines());
        bench.foreign();
    }
}
