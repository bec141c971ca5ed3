//! Attention as a fraction of what this machine can do.
//!
//! Run with `cargo bench -p consort-cpu --bench attention -- [words]`: only lines whose name contains one of the words are
//! measured. Limits and kernels are measured in turn, and the best of several rounds counts, because machines are shared.

#[path = "../tests/common/mod.rs"]
mod common;

use std::time::{Duration, Instant};

use common::{Random, activations};
use consort_compute::portable::HostBuffer;
use consort_compute::{AttentionSpec, Backend, KvFormat, KvSpec, Run};
use consort_cpu::roofline::Prober;
use consort_cpu::{Cpu, CpuOptions};

/// Time for each line, and the fewest rounds in it.
const LINE_TIME: Duration = Duration::from_millis(800);
const ROUNDS: usize = 5;

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

    /// One sequence with `context` positions, of which the last `tokens` ask. One token is held against the bytes that are
    /// read, several against the multiplications.
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
        let (amount, unit, limit): (usize, &str, &dyn Fn() -> f64) = match tokens {
            1 => (2 * seen * kv_heads * format.format().row_bytes(dim), "GB/s", &|| prober.read(self.threads())),
            _ => (4 * seen * heads * dim, "Gop/s", &|| prober.f32_arithmetic()),
        };
        let mut work = || self.cpu.attention(&mut out, &q, &cache, &run, &spec);
        work();
        let (mut best, mut best_limit) = (0f64, 0f64);
        let (begin, mut rounds) = (Instant::now(), 0);
        while rounds < ROUNDS || begin.elapsed() < LINE_TIME {
            rounds += 1;
            best_limit = best_limit.max(limit());
            let start = Instant::now();
            work();
            best = best.max(amount as f64 / start.elapsed().as_secs_f64());
        }
        println!("{name:<52} {:>8.1} {unit:<5} {:>4.0} %", best / 1e9, 100.0 * best / best_limit);
    }
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    let all = consort_cpu::allowed_cores().len();
    for threads in if all > 1 { vec![1, all] } else { vec![1] } {
        let options = CpuOptions { threads: Some(threads), ..CpuOptions::default() };
        let bench = Bench { words: words.clone(), cpu: Cpu::new(options).expect("this machine has a CPU") };
        let prober = Prober::new(&bench.cpu);
        println!("{threads} threads, {}", bench.cpu.isa());
        for dim in [64, 128] {
            for format in [KvFormat::F16, KvFormat::BF16, KvFormat::F32, KvFormat::FP8, KvFormat::Q8] {
                bench.attention(&prober, format, 65_536, 1, dim, usize::MAX);
                bench.attention(&prober, format, 2_048, 1, dim, usize::MAX);
            }
            for context in [8_192, 65_536] {
                bench.attention(&prober, KvFormat::F16, context, 256, dim, usize::MAX);
            }
            bench.attention(&prober, KvFormat::F16, 65_536, 256, dim, 1024);
        }
    }
}
