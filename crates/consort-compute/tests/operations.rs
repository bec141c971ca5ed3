//! The portable backend against torch and transformers (`oracle/operations.py` writes the fixture), and the properties that
//! every backend must keep: results don't depend on how a prompt is cut, on which blocks a cache uses, or on the other
//! sequences of a batch.

use std::{collections::HashMap, ops::Range};

use consort_compute::{
    Activation, AttentionSpec, Backend, DeltaSpec, Format, KvFormat, KvSpec, Matrix, NormGain, PairLayout, Portable,
    RopeSpec, RouteScore, RouteSpec, Run, portable::HostBuffer,
};
use proptest::prelude::*;
use serde::Deserialize;
use serde_json::Value;

#[derive(Clone, Deserialize)]
struct Stored(usize, usize, String);

impl Stored {
    fn values(&self) -> Vec<f32> {
        let bits = |text| u32::from_str_radix(text, 16).unwrap().swap_bytes();
        (0..self.2.len()).step_by(8).map(|i| f32::from_bits(bits(&self.2[i..i + 8]))).collect()
    }

    fn buffer(&self) -> HostBuffer {
        HostBuffer::from_values(self.0, self.1, &self.values())
    }
}

#[derive(Deserialize)]
struct Case {
    operation: String,
    parameters: HashMap<String, Value>,
    inputs: HashMap<String, Stored>,
    outputs: HashMap<String, Stored>,
}

impl Case {
    /// The cases of one operation, of which there must be `count`.
    fn read(operation: &str, count: usize) -> Vec<Self> {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/operations.json");
        let cases: Vec<Self> = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let cases: Vec<Self> = cases.into_iter().filter(|case| case.operation == operation).collect();
        assert_eq!(cases.len(), count, "cases of {operation}");
        cases
    }

    fn input(&self, name: &str) -> HostBuffer {
        self.inputs[name].buffer()
    }

    fn size(&self, name: &str) -> usize {
        self.parameters[name].as_u64().unwrap() as usize
    }

    fn float(&self, name: &str) -> Option<f32> {
        self.parameters[name].as_f64().map(|x| x as f32)
    }

    fn text(&self, name: &str) -> &str {
        self.parameters[name].as_str().unwrap()
    }

    /// Asserts that each value is within `tolerance` of the stored one, relative to the larger of it and 1.
    fn expect(&self, name: &str, ours: &HostBuffer, tolerance: f32) {
        let theirs = &self.outputs[name];
        assert_eq!(ours.shape(), (theirs.0, theirs.1), "{} {name}", self.operation);
        for (i, (a, b)) in ours.values().iter().zip(theirs.values()).enumerate() {
            let close = (a - b).abs() <= tolerance * b.abs().max(1.0);
            assert!(close, "{} {:?}: value {i} of {name} is {a}, not {b}", self.operation, self.parameters);
        }
    }
}

/// A buffer with room for whatever a test needs.
fn room() -> HostBuffer {
    Portable.buffer(4096)
}

#[test]
fn rms_norm_matches_torch() {
    for case in Case::read("rms_norm", 6) {
        let (x, gain) = (case.input("x"), case.input("gain"));
        let gain = || match case.text("gain") {
            "none" => NormGain::None,
            "after" => NormGain::After(&gain),
            _ => NormGain::Before(&gain),
        };
        let (width, epsilon) = (case.size("width"), case.float("epsilon").unwrap());
        let mut out = room();
        Portable.rms_norm(&mut out, &x, width, gain(), epsilon);
        case.expect("out", &out, 1e-6);
        let mut in_place = x.clone();
        Portable.rms_norm_in_place(&mut in_place, width, gain(), epsilon);
        assert_eq!(in_place.values(), out.values());
    }
}

#[test]
fn rms_norm_of_large_activations_stays_finite() {
    // The square of 1e20 is not an f32.
    let x = HostBuffer::from_values(1, 2, &[1e20, -1e20]);
    let mut out = room();
    Portable.rms_norm(&mut out, &x, 2, NormGain::None, 1e-5);
    assert_eq!(out.values(), [1.0, -1.0]);
}

#[test]
fn gated_activations_match_torch() {
    for case in Case::read("gated", 4) {
        let activation = match case.text("activation") {
            "silu" => Activation::Silu,
            "gelu" => Activation::Gelu,
            "gelu_tanh" => Activation::GeluTanh,
            _ => Activation::ClampedSwiglu { alpha: 1.702, limit: 7.0 },
        };
        let mut gate = case.input("gate");
        Portable.gated(&mut gate, &case.input("up"), activation);
        case.expect("out", &gate, 1e-6);
        assert!(gate.values().iter().all(|x| x.is_finite()));
    }
}

#[test]
fn rope_matches_transformers_and_complex_numbers() {
    for case in Case::read("rope", 4) {
        let spec = RopeSpec {
            head_dim: case.size("head_dim"),
            inverse_frequencies: case.inputs["frequencies"].values(),
            magnitude: case.float("magnitude").unwrap(),
            pairs: if case.text("pairs") == "halves" { PairLayout::Halves } else { PairLayout::Interleaved },
        };
        let positions: Vec<u32> = serde_json::from_value(case.parameters["positions"].clone()).unwrap();
        let mut x = case.input("x");
        Portable.rope(&mut x, &positions, &spec);
        case.expect("out", &x, 1e-6);
    }
}

const KV_FORMATS: [KvFormat; 5] = [KvFormat::F16, KvFormat::BF16, KvFormat::F32, KvFormat::FP8, KvFormat::Q8];

/// How a test runs one sequence through a cache.
struct Layout {
    format: KvFormat,
    block_tokens: usize,
    /// Tokens of each chunk, repeated until the sequence ends.
    chunks: Vec<usize>,
    /// Blocks of the sequence's table, in reverse order of their place in the pool.
    blocks: usize,
}

fn part(x: &HostBuffer, rows: Range<usize>) -> HostBuffer {
    HostBuffer::from_values(rows.len(), x.cols(), &x.values()[rows.start * x.cols()..rows.end * x.cols()])
}

/// Attention of a whole sequence, chunk by chunk: each chunk's keys are written, then its queries look.
fn attend(
    q: &HostBuffer,
    k: &HostBuffer,
    v: &HostBuffer,
    kv_heads: usize,
    spec: &AttentionSpec<'_, HostBuffer>,
    layout: &Layout,
) -> Vec<f32> {
    let mut cache = Portable.cache(KvSpec {
        blocks: layout.blocks,
        block_tokens: layout.block_tokens,
        heads: kv_heads,
        key_dim: k.cols() / kv_heads,
        value_dim: v.cols() / kv_heads,
        format: layout.format,
    });
    let blocks: Vec<u32> = (0..layout.blocks as u32).rev().collect();
    let (mut all, mut out, mut start) = (Vec::new(), room(), 0);
    for chunk in layout.chunks.iter().cycle() {
        let rows = start..(start + chunk).min(q.rows());
        let runs = [Run { rows: 0..rows.len(), start, blocks: &blocks, slot: 0 }];
        Portable.cache_write(&mut cache, &part(k, rows.clone()), &part(v, rows.clone()), &runs);
        Portable.attention(&mut out, &part(q, rows.clone()), &cache, &runs, spec);
        all.extend_from_slice(out.values());
        start = rows.end;
        if start == q.rows() {
            break;
        }
    }
    all
}

#[test]
fn attention_matches_transformers_however_a_prompt_is_cut() {
    for case in Case::read("attention", 7) {
        let (q, k, v) = (case.input("q"), case.input("k"), case.input("v"));
        let sinks = case.inputs.get("sinks").map(Stored::buffer);
        let window = case.parameters["window"].as_u64().map(|window| window as usize);
        let spec = AttentionSpec {
            heads: case.size("heads"),
            kv_head_of: None,
            scale: case.float("scale").unwrap(),
            window,
            sinks: sinks.as_ref(),
            softcap: case.float("softcap"),
        };
        let (block_tokens, tokens) = (2, q.rows());
        // One, two and three tokens at a time; the prompt whole and then token by token; everything at once.
        let prompt = tokens.saturating_sub(6).max(1);
        for chunks in [vec![1], vec![2], vec![3], [vec![prompt], vec![1; 6]].concat(), vec![tokens]] {
            // A window's ring must hold a chunk and what its first query sees, wherever these begin in a block.
            let longest = chunks.iter().max().unwrap();
            let ring = window.map(|window| (window - 1 + longest).div_ceil(block_tokens) + 1);
            let blocks = ring.unwrap_or(tokens.div_ceil(block_tokens));
            let layout = Layout { format: KvFormat::F32, block_tokens, chunks, blocks };
            let out = attend(&q, &k, &v, case.size("kv_heads"), &spec, &layout);
            case.expect("out", &HostBuffer::from_values(tokens, out.len() / tokens, &out), 2e-6);
        }
    }
}

fn plain_attention<'a>(heads: usize) -> AttentionSpec<'a, HostBuffer> {
    AttentionSpec { heads, kv_head_of: None, scale: 0.25, window: None, sinks: None, softcap: None }
}

/// Numbers without a pattern, between -1 and 1.
fn noise(rows: usize, cols: usize, seed: u32) -> HostBuffer {
    let mut state = seed.wrapping_mul(0x9E37_79B9) | 1;
    let values: Vec<f32> = (0..rows * cols)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            state as f32 / u32::MAX as f32 * 2.0 - 1.0
        })
        .collect();
    HostBuffer::from_values(rows, cols, &values)
}

#[test]
fn an_uneven_share_of_heads_reads_the_kv_heads_it_names() {
    // Five query heads of a rank whose two KV heads serve two and three of them.
    let (tokens, dim) = (5, 4);
    let (q, k, v) = (noise(tokens, 5 * dim, 1), noise(tokens, 2 * dim, 2), noise(tokens, 2 * dim, 3));
    let layout = Layout { format: KvFormat::F32, block_tokens: 4, chunks: vec![tokens], blocks: 2 };
    let spec = AttentionSpec { kv_head_of: Some(&[0, 0, 1, 1, 1]), ..plain_attention(5) };
    let uneven = attend(&q, &k, &v, 2, &spec, &layout);

    let columns = |x: &HostBuffer, head: usize| -> HostBuffer {
        let values: Vec<f32> = (0..tokens).flat_map(|row| x.row(row)[head * dim..][..dim].to_vec()).collect();
        HostBuffer::from_values(tokens, dim, &values)
    };
    for (head, kv_head) in [0, 0, 1, 1, 1].into_iter().enumerate() {
        let (k, v) = (columns(&k, kv_head), columns(&v, kv_head));
        let alone = attend(&columns(&q, head), &k, &v, 1, &plain_attention(1), &layout);
        let ours: Vec<f32> = uneven.chunks(5 * dim).flat_map(|row| row[head * dim..][..dim].to_vec()).collect();
        assert_eq!(ours, alone, "head {head}");
    }
}

#[test]
fn cache_formats_differ_by_no_more_than_their_rounding() {
    let (tokens, dim) = (12, 64);
    let (q, k, v) = (noise(tokens, 2 * dim, 4), noise(tokens, dim, 5), noise(tokens, dim, 6));
    let run = |format| {
        attend(&q, &k, &v, 1, &plain_attention(2), &Layout { format, block_tokens: 4, chunks: vec![5], blocks: 3 })
    };
    let exact = run(KvFormat::F32);
    for (format, bound) in [
        (KvFormat::F16, 1.0 / 2048.0),
        (KvFormat::BF16, 1.0 / 256.0),
        (KvFormat::FP8, 1.0 / 16.0),
        (KvFormat::Q8, 1.0 / 127.0),
    ] {
        let error = run(format).iter().zip(&exact).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(error > 0.0 && error < bound, "{format:?} is off by {error}");
    }
}

#[test]
fn a_broken_key_shows_in_the_output() {
    for format in KV_FORMATS {
        let (q, v) = (noise(3, 32, 1), noise(3, 32, 3));
        let mut k = noise(3, 32, 2);
        k.row_mut(1)[7] = f32::NAN;
        let layout = Layout { format, block_tokens: 4, chunks: vec![3], blocks: 1 };
        let out = attend(&q, &k, &v, 1, &plain_attention(1), &layout);
        assert!(out[..32].iter().all(|x| x.is_finite()) && out[32..].iter().all(|x| x.is_nan()), "{format:?}");
    }
}

#[test]
fn routing_and_experts_match_torch() {
    for case in Case::read("route", 4) {
        let correction = case.inputs.get("correction").map(Stored::buffer);
        let logits = case.input("logits");
        let (tokens, experts) = logits.shape();
        let top_k = case.size("top_k");
        let spec = |local| RouteSpec {
            top_k,
            score: match case.text("score") {
                "softmax" => RouteScore::Softmax,
                "softmax_of_top" => RouteScore::SoftmaxOfTop,
                _ => RouteScore::Sigmoid,
            },
            correction: correction.as_ref(),
            normalize_epsilon: case.float("normalize"),
            scale: case.float("scale").unwrap(),
            local,
        };
        let mut routing = Portable.routing(tokens, top_k);
        Portable.route(&mut routing, &logits, &spec(0..experts));
        let chosen: Vec<f32> = routing.experts().iter().map(|&expert| expert as f32).collect();
        assert_eq!(chosen, case.outputs["experts"].values());
        case.expect("weights", &HostBuffer::from_values(tokens, top_k, routing.weights()), 1e-6);

        // Ranks that share the experts out, unevenly, add up to one that has them all.
        let (x, weights) = (case.input("x"), case.input("weights"));
        let expert_rows = weights.rows() / experts;
        for bounds in [vec![0, experts], vec![0, 1, 5, experts]] {
            let mut sum = room();
            sum.reshape(tokens, expert_rows);
            sum.values_mut().fill(0.0);
            for local in bounds.windows(2).map(|bounds| bounds[0]..bounds[1]) {
                let rows = part(&weights, local.start * expert_rows..local.end * expert_rows);
                let w = Portable.weight(Matrix::encode(Format::F32, rows.rows(), rows.cols(), rows.values()));
                let (mut products, mut combined) = (room(), room());
                Portable.route(&mut routing, &logits, &spec(local));
                Portable.expert_matmul(&mut products, &x, &w, &routing);
                Portable.expert_combine(&mut combined, &products, &routing);
                Portable.add(&mut sum, &combined);
            }
            case.expect("combined", &sum, 2e-6);
        }
    }
}

fn route(logits: &[f32], top_k: usize, score: RouteScore) -> (Vec<u32>, Vec<f32>) {
    let mut routing = Portable.routing(1, top_k);
    let local = 0..logits.len();
    let spec = RouteSpec { top_k, score, correction: None, normalize_epsilon: None, scale: 1.0, local };
    Portable.route(&mut routing, &HostBuffer::from_values(1, logits.len(), logits), &spec);
    (routing.experts().to_vec(), routing.weights().to_vec())
}

#[test]
fn ties_between_experts_go_to_the_lower_one() {
    for score in [RouteScore::Softmax, RouteScore::SoftmaxOfTop, RouteScore::Sigmoid] {
        assert_eq!(route(&[0.5, 2.0, 2.0, 0.5, 2.0], 4, score).0, [1, 2, 4, 0], "{score:?}");
        assert_eq!(route(&[0.0, -0.0, 0.0], 2, score).0, [0, 1], "{score:?}");
    }
}

#[test]
fn a_nan_logit_is_chosen_and_shows() {
    for score in [RouteScore::Softmax, RouteScore::SoftmaxOfTop, RouteScore::Sigmoid] {
        let (experts, weights) = route(&[9.0, 1.0, f32::NAN, 8.0], 2, score);
        assert!(experts.contains(&2) || weights.iter().all(|w| w.is_nan()), "{score:?}: {experts:?} {weights:?}");
        assert!(weights.iter().any(|w| w.is_nan()), "{score:?}: {weights:?}");
    }
}

#[test]
fn pairs_of_other_ranks_give_zero_rows_and_take_no_bias() {
    let mut routing = Portable.routing(2, 2);
    let logits = HostBuffer::from_values(2, 4, &[4.0, 3.0, 0.0, 0.0, 0.0, 0.0, 3.0, 4.0]);
    let spec = RouteSpec {
        top_k: 2,
        score: RouteScore::Softmax,
        correction: None,
        normalize_epsilon: Some(0.0),
        scale: 1.0,
        local: 1..3,
    };
    Portable.route(&mut routing, &logits, &spec);
    assert_eq!(routing.experts(), [0, 1, 3, 2]);
    assert_eq!(
        routing.groups().map(|(e, pairs)| (e, pairs.to_vec())).collect::<Vec<_>>(),
        [(0, vec![1]), (1, vec![3])]
    );

    let w = Portable.weight(Matrix::encode(Format::F32, 2, 1, &[10.0, 20.0]));
    let bias = HostBuffer::from_values(2, 1, &[0.5, 0.25]);
    let mut out = room();
    Portable.expert_matmul(&mut out, &HostBuffer::from_values(2, 1, &[1.0, 2.0]), &w, &routing);
    Portable.expert_add(&mut out, &bias, &routing);
    assert_eq!(out.values(), [0.0, 10.5, 0.0, 40.25]);
    let pairs = out.clone();
    Portable.expert_matmul(&mut out, &pairs, &w, &routing);
    assert_eq!(out.values(), [0.0, 105.0, 0.0, 805.0], "a row per pair is taken as such");
}

#[test]
fn causal_convolution_matches_torch() {
    for case in Case::read("causal_conv", 1) {
        let (x, weight) = (case.input("x"), case.input("weight"));
        let mut state = HostBuffer::from_values(1, 3 * x.cols(), &vec![f32::NAN; 3 * x.cols()]);
        let mut out = room();
        let runs = [Run { rows: 0..x.rows(), start: 0, blocks: &[], slot: 0 }];
        Portable.causal_conv(&mut out, &x, &weight, &mut state, &runs);
        case.expect("out", &out, 1e-6);
        assert_eq!(state.values(), part(&x, 4..7).values(), "the state holds the last inputs, oldest first");
    }
}

#[test]
fn delta_gates_match_torch() {
    for case in Case::read("delta_gates", 1) {
        let (mut a, mut b) = (case.input("a"), case.input("b"));
        Portable.delta_gates(&mut a, &mut b, &case.input("a_log"), &case.input("dt_bias"));
        case.expect("decay", &a, 1e-6);
        case.expect("beta", &b, 1e-6);
    }
}

#[test]
fn delta_rule_matches_transformers() {
    for case in Case::read("delta_rule", 1) {
        let spec = DeltaSpec {
            key_heads: case.size("key_heads"),
            value_heads: case.size("value_heads"),
            key_dim: case.size("key_dim"),
            value_dim: case.size("value_dim"),
            tiled: false,
        };
        let qkv = case.input("qkv");
        let width = spec.value_heads * spec.key_dim * spec.value_dim;
        let mut state = HostBuffer::from_values(1, width, &vec![f32::NAN; width]);
        let mut out = room();
        let runs = [Run { rows: 0..qkv.rows(), start: 0, blocks: &[], slot: 0 }];
        Portable.delta_rule(&mut out, &qkv, &case.input("decay"), &case.input("beta"), &mut state, &runs, spec);
        case.expect("out", &out, 2e-6);
        case.expect("state", &state, 2e-6);
    }
}

#[test]
fn rows_are_added_scaled_blended_and_selected() {
    let x = HostBuffer::from_values(2, 2, &[1.0, 2.0, 3.0, 4.0]);
    let row = Portable.vector(&[10.0, 20.0]);
    let apply = |f: &dyn Fn(&mut HostBuffer)| {
        let mut y = x.clone();
        f(&mut y);
        y.values().to_vec()
    };
    assert_eq!(apply(&|y| Portable.add(y, &x)), [2.0, 4.0, 6.0, 8.0]);
    assert_eq!(apply(&|y| Portable.add_row(y, &row)), [11.0, 22.0, 13.0, 24.0]);
    assert_eq!(apply(&|y| Portable.scale(y, -2.0)), [-2.0, -4.0, -6.0, -8.0]);
    assert_eq!(apply(&|y| Portable.scale_rows(y, &[2.0, 0.5])), [2.0, 4.0, 1.5, 2.0]);
    assert_eq!(apply(&|y| Portable.blend(y, &row, &x, &Portable.vector(&[1.0, -1.0]))), [11.0, 38.0, 33.0, 76.0]);
    assert_eq!(apply(&|y| Portable.softcap(y, 1e-3)), [1e-3; 4]);
    // sigmoid(0) is a half; one gate may serve several columns.
    assert_eq!(
        apply(&|y| Portable.sigmoid_gate(y, &HostBuffer::from_values(2, 1, &[0.0, 40.0]))),
        [0.5, 1.0, 3.0, 4.0]
    );
    let mut out = room();
    Portable.select_rows(&mut out, &x, &[1, 1, 0]);
    assert_eq!((out.shape(), out.values()), ((3, 2), &[3.0, 4.0, 3.0, 4.0, 1.0, 2.0][..]));
}

#[test]
fn a_product_takes_the_row_scale_and_the_rest_of_a_block_into_account() {
    let values: Vec<f32> = noise(3, 40, 9).values().to_vec();
    let x = noise(2, 40, 10);
    for format in [Format::F32, Format::F8E4M3, Format::NvFp4, Format::Q8_0] {
        let w = Matrix::encode(format, 3, 40, &values);
        let (mut out, mut rows) = (room(), room());
        Portable.matmul(&mut out, &x, &w);
        Portable.embed(&mut rows, &w, &[2, 0, 1, 3]);
        assert_eq!(rows.row(3), [0.0; 40], "a token of another shard");
        for (feature, row) in [(2, 0), (0, 1), (1, 2)] {
            let sum: f64 = x.row(1).iter().zip(rows.row(row)).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            assert!((f64::from(out.row(1)[feature]) - sum).abs() < 1e-6, "{format}");
        }
    }
}

#[test]
#[should_panic(expected = "does not fit")]
fn a_buffer_never_grows() {
    Portable.buffer(10).reshape(3, 4);
}

#[test]
fn buffers_start_at_a_cache_line() {
    for capacity in [0, 1, 17, 5000] {
        let buffer = Portable.buffer(capacity);
        assert_eq!(buffer.values().as_ptr() as usize % 64, 0);
        assert_eq!(buffer.capacity(), capacity);
    }
}

/// A batch of sequences, each cut into chunks, as `(sequence, rows of it)` in the order in which the chunks run.
fn schedule(cuts: &[Vec<usize>], tokens: &[usize]) -> Vec<(usize, Range<usize>)> {
    let mut chunks = Vec::new();
    let mut starts = vec![0; tokens.len()];
    for turn in 0.. {
        let before = chunks.len();
        for (sequence, &tokens) in tokens.iter().enumerate() {
            let start = starts[sequence];
            if start < tokens {
                let end = (start + cuts[sequence][turn % cuts[sequence].len()]).min(tokens);
                chunks.push((sequence, start..end));
                starts[sequence] = end;
            }
        }
        if chunks.len() == before {
            break;
        }
    }
    chunks
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn recurrent_layers_give_the_same_bits_however_sequences_are_cut_and_mixed(
        tokens in prop::collection::vec(1usize..12, 2),
        cuts in prop::collection::vec(prop::collection::vec(1usize..5, 1..4), 2),
        together in any::<bool>(),
        seed in any::<u32>(),
    ) {
        let spec = DeltaSpec { key_heads: 1, value_heads: 2, key_dim: 4, value_dim: 3, tiled: false };
        let (width, state_width) = (14, 24);
        let kernel = noise(width, 4, seed);
        let inputs: Vec<_> = tokens.iter().zip(0..).map(|(&n, i)| {
            let mut decay = noise(n, 2, seed ^ 77 ^ i);
            decay.values_mut().iter_mut().for_each(|x| *x = -x.abs());
            (noise(n, width, seed ^ i), decay, noise(n, 2, seed ^ 99 ^ i))
        }).collect();

        // Steps of one chunk, or of a chunk of every sequence.
        let chunks = schedule(&cuts, &tokens);
        let steps: Vec<Vec<_>> = if together {
            let mut steps: Vec<Vec<(usize, Range<usize>)>> = Vec::new();
            for chunk in chunks {
                match steps.last_mut() {
                    Some(step) if step.iter().all(|(sequence, _)| *sequence != chunk.0) => step.push(chunk),
                    _ => steps.push(vec![chunk]),
                }
            }
            steps
        } else {
            chunks.into_iter().map(|chunk| vec![chunk]).collect()
        };

        let run = |steps: &[Vec<(usize, Range<usize>)>]| {
            let mut conv_state = HostBuffer::from_values(2, 3 * width, &vec![f32::NAN; 6 * width]);
            let mut state = HostBuffer::from_values(2, state_width, &vec![f32::NAN; 2 * state_width]);
            let mut results = vec![Vec::new(); 2];
            for step in steps {
                let stack = |pick: fn(&(HostBuffer, HostBuffer, HostBuffer)) -> &HostBuffer| {
                    let parts: Vec<_> = step.iter().map(|(s, rows)| part(pick(&inputs[*s]), rows.clone())).collect();
                    let values: Vec<f32> = parts.iter().flat_map(|part| part.values().to_vec()).collect();
                    HostBuffer::from_values(values.len() / parts[0].cols(), parts[0].cols(), &values)
                };
                let mut row = 0;
                let runs: Vec<_> = step.iter().map(|(sequence, rows)| {
                    row += rows.len();
                    Run { rows: row - rows.len()..row, start: rows.start, blocks: &[], slot: 1 - sequence }
                }).collect();
                let (mut mixed, mut out) = (room(), room());
                Portable.causal_conv(&mut mixed, &stack(|i| &i.0), &kernel, &mut conv_state, &runs);
                Portable.delta_rule(&mut out, &mixed, &stack(|i| &i.1), &stack(|i| &i.2), &mut state, &runs, spec);
                for ((sequence, _), run) in step.iter().zip(&runs) {
                    results[*sequence].extend_from_slice(part(&out, run.rows.clone()).values());
                }
            }
            (results, conv_state.values().to_vec(), state.values().to_vec())
        };
        let whole: Vec<Vec<_>> = (0..2).map(|sequence| vec![(sequence, 0..tokens[sequence])]).collect();
        prop_assert_eq!(run(&steps), run(&whole));
    }

    #[test]
    fn attention_gives_the_same_bits_however_a_prompt_is_cut_and_placed(
        tokens in 1usize..20,
        chunks in prop::collection::vec(1usize..6, 1..5),
        block_tokens in 1usize..6,
        window in prop::option::of(1usize..8),
        seed in any::<u32>(),
    ) {
        let (q, k, v) = (noise(tokens, 8, seed), noise(tokens, 4, seed ^ 1), noise(tokens, 4, seed ^ 2));
        let spec = AttentionSpec { window, ..plain_attention(2) };
        let longest = *chunks.iter().max().unwrap();
        let ring = window.map(|window| (window - 1 + longest).div_ceil(block_tokens) + 1);
        let blocks = ring.unwrap_or(tokens.div_ceil(block_tokens));
        for format in KV_FORMATS {
            let cut = attend(&q, &k, &v, 1, &spec, &Layout { format, block_tokens, chunks: chunks.clone(), blocks });
            let whole = Layout { format, block_tokens: tokens, chunks: vec![tokens], blocks: 1 };
            prop_assert_eq!(cut, attend(&q, &k, &v, 1, &spec, &whole));
        }
    }
}
