//! The decode path takes no memory once it has run.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{Random, activations, matrix};
use consort_compute::{
    Activation, AttentionSpec, Backend, DeltaSpec, Format, KvFormat, KvSpec, NormGain, PairLayout, RopeSpec,
    RouteScore, RouteSpec, Run,
};
use consort_cpu::{Cpu, CpuOptions};

/// The system's allocator, counting.
struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: hands everything to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise, passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise, passed on.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_decode_step_allocates_nothing() {
    let cpu = Cpu::new(CpuOptions { threads: Some(2), unpinned: true, ..CpuOptions::default() }).unwrap();
    let mut random = Random(1);
    let (width, heads, head_dim, experts) = (128, 4, 32, 4);
    let embedding = cpu.weight(matrix(&mut random, Format::Q4K, 256, 256));
    let dense: Vec<_> = [Format::BF16, Format::Q4_1, Format::Q8_0, Format::NvFp4]
        .map(|format| cpu.weight(matrix(&mut random, format, width, width)))
        .into();
    let stacked = cpu.weight(matrix(&mut random, Format::Q4_0, experts * 48, width));
    let gain = activations(&mut random, 1, width);
    let logits = activations(&mut random, 1, experts);
    let rope = |theta: f32| RopeSpec {
        head_dim,
        inverse_frequencies: (0..16).map(|i| theta.powf(-(i as f32) / 16.0)).collect(),
        magnitude: 1.0,
        pairs: PairLayout::Halves,
    };
    let ropes = [rope(10_000.0), rope(500_000.0)];
    let spec =
        |format| KvSpec { blocks: 256, block_tokens: 16, heads: 1, key_dim: head_dim, value_dim: head_dim, format };
    let mut caches = [KvFormat::F16, KvFormat::BF16, KvFormat::F32, KvFormat::FP8, KvFormat::Q8]
        .map(|format| cpu.cache(spec(format)));
    let blocks: Vec<u32> = (0..256).collect();
    let mut routing = cpu.routing(1, 2);
    let route = RouteSpec {
        top_k: 2,
        score: RouteScore::Softmax,
        correction: None,
        normalize_epsilon: None,
        scale: 1.0,
        local: 0..experts,
    };
    let attention = AttentionSpec { heads, kv_head_of: None, scale: 0.2, window: None, sinks: None, softcap: None };
    let [mut x, mut y, mut q, mut k, mut pairs] = [(); 5].map(|()| cpu.buffer(1024));

    let delta = DeltaSpec { key_heads: 1, value_heads: 1, key_dim: 32, value_dim: 32, tiled: false };
    let (qkv, taps) = (activations(&mut random, 1, 96), activations(&mut random, 96, 4));
    let gates = activations(&mut random, 1, 1);
    let (mut inputs, mut state) = (activations(&mut random, 1, 3 * 96), activations(&mut random, 1, 32 * 32));

    let mut step = |position: usize| {
        cpu.embed(&mut y, &embedding, &[7]);
        cpu.upload(&mut x, 1, width, gain.values());
        cpu.rms_norm(&mut y, &x, width, NormGain::After(&gain), 1e-5);
        for (w, rope) in dense.iter().zip(ropes.iter().cycle()) {
            cpu.matmul(&mut q, &y, w);
            cpu.rope(&mut q, &[position as u32], rope);
        }
        let run = Run { rows: 0..1, start: position, blocks: &blocks, slot: 0 };
        cpu.upload(&mut k, 1, head_dim, &gain.values()[..head_dim]);
        for cache in &mut caches {
            cpu.cache_write(cache, &k, &k, std::slice::from_ref(&run));
            cpu.attention(&mut y, &q, cache, std::slice::from_ref(&run), &attention);
        }
        cpu.add(&mut x, &y);
        cpu.route(&mut routing, &logits, &route);
        cpu.expert_matmul(&mut pairs, &x, &stacked, &routing);
        cpu.expert_combine(&mut k, &pairs, &routing);
        cpu.gated(&mut q, &x, Activation::Silu);
        let run = Run { rows: 0..1, start: position, blocks: &[], slot: 0 };
        cpu.causal_conv(&mut q, &qkv, &taps, &mut inputs, std::slice::from_ref(&run));
        cpu.delta_rule(&mut y, &q, &gates, &gates, &mut state, std::slice::from_ref(&run), delta);
    };
    // The second thread may come late and warm up later, so warm up for a while, at the longest context.
    for _ in 0..300 {
        step(3999);
    }
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    for position in 3000..3100 {
        step(position);
    }
    assert_eq!(ALLOCATIONS.load(Ordering::Relaxed) - before, 0);
}
