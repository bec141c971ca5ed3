//! Attention against the portable definition.

mod common;

use common::{Random, activations};
use consort_compute::portable::{HostBuffer, HostCache, attention::attention};
use consort_compute::{AttentionSpec, Backend, KvFormat, KvSpec, Run};
use consort_cpu::isa::Isa;
use consort_cpu::{Cpu, CpuOptions};

fn cpu(isa: Isa, threads: usize) -> Cpu {
    Cpu::new(CpuOptions { threads: Some(threads), unpinned: true, isa: Some(isa), ..CpuOptions::default() }).unwrap()
}

/// A cache with a sequence of `tokens` tokens in shuffled blocks.
fn cache(random: &mut Random, spec: KvSpec, tokens: usize) -> (HostCache, Vec<u32>) {
    let mut blocks: Vec<u32> = (0..spec.blocks as u32).collect();
    for i in (1..blocks.len()).rev() {
        blocks.swap(i, random.below(i + 1));
    }
    let mut cache = HostCache::new(spec);
    let k = activations(random, tokens, spec.heads * spec.key_dim);
    let v = activations(random, tokens, spec.heads * spec.value_dim);
    cache.write(&k, &v, &[Run { rows: 0..tokens, start: 0, blocks: &blocks, slot: 0 }]);
    (cache, blocks)
}

fn assert_close(got: &HostBuffer, want: &HostBuffer, what: &str) {
    assert_eq!(got.shape(), want.shape());
    let size = want.values().iter().fold(0f32, |largest, x| largest.max(x.abs()));
    for (i, (got, want)) in got.values().iter().zip(want.values()).enumerate() {
        assert!((got - want).abs() <= 1e-5 * size, "{what} [{i}]: {got} is not {want}");
    }
}

struct Case {
    heads: usize,
    kv_heads: usize,
    key_dim: usize,
    value_dim: usize,
    block_tokens: usize,
    context: usize,
    tokens: usize,
    window: Option<usize>,
}

const fn case(
    [heads, kv_heads]: [usize; 2],
    [key_dim, value_dim]: [usize; 2],
    block_tokens: usize,
    [context, tokens]: [usize; 2],
    window: Option<usize>,
) -> Case {
    Case { heads, kv_heads, key_dim, value_dim, block_tokens, context, tokens, window }
}

/// Heads that are and are not whole vectors, blocks that are and are not whole panels, contexts and tokens at the edges of
/// panels, tiles, segments and stretches, and windows.
const CASES: &[Case] = &[
    case([3, 1], [64, 64], 16, [40, 40], None),
    case([4, 4], [128, 128], 32, [300, 7], None),
    case([9, 3], [64, 64], 64, [1500, 1], None),
    case([8, 1], [32, 32], 8, [2100, 60], Some(70)),
    case([2, 2], [8, 24], 5, [290, 290], Some(17)),
    case([64, 1], [96, 40], 16, [70, 3], None),
    case([2, 1], [288, 256], 16, [270, 4], None),
    case([5, 1], [80, 80], 64, [129, 9], None),
    case([7, 1], [256, 256], 64, [128, 2], None),
    case([2, 1], [40, 80], 48, [513, 8], Some(512)),
    case([1, 1], [64, 128], 64, [4100, 5], Some(4096)),
    case([6, 2], [20, 20], 16, [9000, 2], None),
];

fn for_each_case(mut check: impl FnMut(&Case, &HostCache, &HostBuffer, Run<'_>, &AttentionSpec<'_, HostBuffer>, &str)) {
    let mut random = Random(1);
    for case in CASES {
        for format in [KvFormat::F16, KvFormat::BF16, KvFormat::F32, KvFormat::FP8, KvFormat::Q8] {
            let spec = KvSpec {
                blocks: case.context.div_ceil(case.block_tokens) + 1,
                block_tokens: case.block_tokens,
                heads: case.kv_heads,
                key_dim: case.key_dim,
                value_dim: case.value_dim,
                format,
            };
            let (cache, blocks) = cache(&mut random, spec, case.context);
            // Logits of ordinary size: the rounding of large ones, which both sides have, grows in the softmax.
            let mut q = activations(&mut random, case.tokens, case.heads * case.key_dim);
            q.values_mut().iter_mut().for_each(|q| *q *= 0.1);
            let sinks = activations(&mut random, 1, case.heads);
            for (sinks, softcap) in [(None, None), (Some(&sinks), None), (None, Some(20.0))] {
                let spec = AttentionSpec {
                    heads: case.heads,
                    kv_head_of: None,
                    scale: (case.key_dim as f32).powf(-0.5),
                    window: case.window,
                    sinks,
                    softcap,
                };
                let run = Run { rows: 0..case.tokens, start: case.context - case.tokens, blocks: &blocks, slot: 0 };
                let name = format!(
                    "{format:?} {} of {} heads, {} tokens of {}, sinks {}, softcap {softcap:?}",
                    case.heads,
                    case.kv_heads,
                    case.tokens,
                    case.context,
                    sinks.is_some()
                );
                check(case, &cache, &q, run, &spec, &name);
            }
        }
    }
}

#[test]
fn attention_is_the_portable_one() {
    let cpus: Vec<Cpu> = Isa::available().into_iter().map(|isa| cpu(isa, 2)).collect();
    for_each_case(|case, cache, q, run, spec, name| {
        let capacity = case.tokens * case.heads * case.value_dim;
        let (mut want, mut got) = (HostBuffer::with_capacity(capacity), HostBuffer::with_capacity(capacity));
        attention(&mut want, q, cache, std::slice::from_ref(&run), spec);
        for cpu in &cpus {
            cpu.attention(&mut got, q, cache, std::slice::from_ref(&run), spec);
            assert_close(&got, &want, &format!("{} {name}", cpu.isa()));
        }
    });
}

#[test]
fn results_depend_on_neither_threads_nor_chunks() {
    for isa in Isa::available() {
        let cpus = [cpu(isa, 1), cpu(isa, 3)];
        for_each_case(|case, cache, q, run, spec, name| {
            let width = case.heads * case.value_dim;
            let (mut want, mut got) =
                (HostBuffer::with_capacity(case.tokens * width), HostBuffer::with_capacity(case.tokens * width));
            cpus[0].attention(&mut want, q, cache, std::slice::from_ref(&run), spec);
            cpus[1].attention(&mut got, q, cache, std::slice::from_ref(&run), spec);
            assert_eq!(got.values(), want.values(), "{isa} {name}: threads");
            for token in 0..case.tokens {
                let alone = HostBuffer::from_values(1, q.cols(), q.row(token));
                let run = Run { rows: 0..1, start: run.start + token, ..run.clone() };
                cpus[token % 2].attention(&mut got, &alone, cache, &[run], spec);
                assert_eq!(got.values(), want.row(token), "{isa} {name}: token {token}");
            }
        });
    }
}

#[test]
fn an_uneven_share_of_heads() {
    let mut random = Random(3);
    let spec = KvSpec { blocks: 10, block_tokens: 16, heads: 2, key_dim: 16, value_dim: 16, format: KvFormat::BF16 };
    let (cache, blocks) = cache(&mut random, spec, 150);
    let q = activations(&mut random, 20, 5 * 16);
    let spec = AttentionSpec {
        heads: 5,
        kv_head_of: Some(&[0, 1, 1, 1, 0]),
        scale: 0.25,
        window: None,
        sinks: None,
        softcap: None,
    };
    let run = Run { rows: 0..20, start: 130, blocks: &blocks, slot: 0 };
    let (mut want, mut got) = (HostBuffer::with_capacity(1600), HostBuffer::with_capacity(1600));
    attention(&mut want, &q, &cache, std::slice::from_ref(&run), &spec);
    for isa in Isa::available() {
        cpu(isa, 2).attention(&mut got, &q, &cache, std::slice::from_ref(&run), &spec);
        assert_close(&got, &want, &isa.to_string());
    }
}

/// What is written is what the portable definition writes, byte for byte.
#[test]
fn keys_and_values_are_written() {
    let mut random = Random(4);
    for format in [KvFormat::F16, KvFormat::BF16, KvFormat::F32, KvFormat::FP8, KvFormat::Q8] {
        for (heads, key_dim, value_dim, block_tokens) in
            [(3, 64, 64, 64), (2, 128, 48, 16), (1, 20, 40, 64), (2, 32, 32, 5)]
        {
            let spec = KvSpec { blocks: 60, block_tokens, heads, key_dim, value_dim, format };
            let blocks: Vec<u32> = (0..60).map(|block| block * 7 % 60).collect();
            let mut k = activations(&mut random, 140, heads * key_dim);
            let v = activations(&mut random, 140, heads * value_dim);
            // Numbers at and past the ends of the formats, and halfway between two of theirs.
            let extremes =
                [65504.0, 65520.0, 1e9, -1e38, f32::MAX, 1e-8, -6e-8, 0.0, -0.0, 1.0 + 1.0 / 2048.0, 1.0 + 1.0 / 256.0];
            k.values_mut()[..11].copy_from_slice(&extremes);
            let run = |rows, start, blocks| Run { rows, start, blocks, slot: 0 };
            let runs = [run(0..1, 9, &blocks[..20]), run(1..100, 0, &blocks[20..40]), run(100..140, 3, &blocks[40..])];
            let mut want = HostCache::new(spec);
            want.write(&k, &v, &runs);
            for isa in Isa::available() {
                let mut got = HostCache::new(spec);
                cpu(isa, 2).cache_write(&mut got, &k, &v, &runs);
                assert!(got.memory() == want.memory(), "{isa} {spec:?}");
            }
        }
    }
}

#[test]
fn damage_shows_in_every_format() {
    for isa in Isa::available() {
        for format in [KvFormat::F16, KvFormat::BF16, KvFormat::F32, KvFormat::FP8, KvFormat::Q8] {
            for damage in [f32::NAN, f32::INFINITY] {
                for broken_key in [true, false] {
                    if broken_key && damage.is_infinite() && format == KvFormat::F32 {
                        continue; // Kept as it is, it may well give a weight of zero.
                    }
                    let cpu = cpu(isa, 1);
                    let mut random = Random(5);
                    let spec = KvSpec { blocks: 2, block_tokens: 16, heads: 1, key_dim: 32, value_dim: 32, format };
                    let [mut k, mut v, q] = [(); 3].map(|()| activations(&mut random, 20, 32));
                    if broken_key { &mut k } else { &mut v }.row_mut(17)[3] = damage;
                    let run = [Run { rows: 0..20, start: 0, blocks: &[0, 1], slot: 0 }];
                    let mut cache = cpu.cache(spec);
                    cpu.cache_write(&mut cache, &k, &v, &run);
                    let spec = AttentionSpec {
                        heads: 1,
                        kv_head_of: None,
                        scale: 0.1,
                        window: None,
                        sinks: None,
                        softcap: None,
                    };
                    let mut out = HostBuffer::with_capacity(20 * 32);
                    cpu.attention(&mut out, &q, &cache, &run, &spec);
                    for row in 17..20 {
                        assert!(out.row(row).iter().any(|x| !x.is_finite()), "{isa} {format:?} {damage} {row}");
                    }
                }
            }
        }
    }
}
