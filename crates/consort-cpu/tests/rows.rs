//! The smaller operations against the portable ones, and independence of threads.

mod common;

use common::{Random, activations};
use consort_compute::portable::{self, HostBuffer, HostRouting};
use consort_compute::{Activation, Backend, DeltaSpec, NormGain, PairLayout, RopeSpec, RouteScore, RouteSpec, Run};
use consort_cpu::isa::Isa;
use consort_cpu::{Cpu, CpuOptions};

fn cpus() -> impl Iterator<Item = Cpu> {
    Isa::available().into_iter().flat_map(|isa| {
        [1, 3].map(|threads| {
            let options =
                CpuOptions { threads: Some(threads), unpinned: true, isa: Some(isa), ..CpuOptions::default() };
            Cpu::new(options).unwrap()
        })
    })
}

fn assert_close(got: &HostBuffer, want: &HostBuffer, what: &str) {
    assert_eq!(got.shape(), want.shape());
    for (i, (got, want)) in got.values().iter().zip(want.values()).enumerate() {
        assert!((got - want).abs() <= 2e-6 * want.abs() + 1e-6, "{what} [{i}]: {got} is not {want}");
    }
}

/// Shapes with and without incomplete vectors, below and above what is shared out.
const SHAPES: &[(usize, usize)] = &[(1, 1), (3, 17), (5, 64), (300, 144)];

#[test]
fn norms() {
    let mut random = Random(1);
    for &(rows, cols) in SHAPES {
        let (x, gain) = (activations(&mut random, rows, cols), activations(&mut random, 1, cols));
        let gains = || [NormGain::None, NormGain::After(&gain), NormGain::Before(&gain)];
        for i in 0..3 {
            let mut want = x.clone();
            portable::norm::rms_norm_in_place(want.values_mut(), cols, &gains()[i], 1e-5);
            for cpu in cpus() {
                let mut got = HostBuffer::with_capacity(rows * cols);
                let [none, after, before] = gains();
                cpu.rms_norm(&mut got, &x, cols, [none, after, before].into_iter().nth(i).unwrap(), 1e-5);
                assert_close(&got, &want, &format!("{} norm {i} of [{rows}, {cols}]", cpu.isa()));
            }
        }
    }
}

/// The squares of the largest activations leave f32; the norm does not. Of equal values it is 1, whatever they are.
#[test]
fn norms_of_large_values() {
    for cols in [1, 16, 17, 64] {
        for value in [7e19f32, -7e19, 3e38] {
            let x = HostBuffer::from_values(1, cols, &vec![value; cols]);
            for cpu in cpus() {
                let mut got = HostBuffer::with_capacity(cols);
                cpu.rms_norm(&mut got, &x, cols, NormGain::None, 1e-5);
                let want = HostBuffer::from_values(1, cols, &vec![value.signum(); cols]);
                assert_close(&got, &want, &format!("{} norm of {cols} times {value}", cpu.isa()));
            }
        }
    }
}

/// Nothing makes up a number for a row whose norm is none.
#[test]
fn an_infinite_sum_of_squares_is_no_zero() {
    let (mut x, mut squares) = (HostBuffer::from_values(1, 2, &[7e19; 2]), HostBuffer::with_capacity(1));
    portable::norm::sum_squares(&mut squares, &x);
    portable::norm::scale_by_squares(&mut x, &squares, 2, 1e-5);
    assert!(x.values().iter().all(|x| x.is_nan()), "{:?}", x.values());
}

#[test]
fn gates() {
    let mut random = Random(2);
    let kinds = [
        Activation::Silu,
        Activation::GeluTanh,
        Activation::Gelu,
        Activation::ClampedSwiglu { alpha: 1.702, limit: 7.0 },
    ];
    for &(rows, cols) in SHAPES {
        let (gate, up) = (activations(&mut random, rows, cols), activations(&mut random, rows, cols));
        for kind in kinds {
            let mut want = gate.clone();
            portable::rows::gated(&mut want, &up, kind);
            for cpu in cpus() {
                let mut got = gate.clone();
                cpu.gated(&mut got, &up, kind);
                assert_close(&got, &want, &format!("{} {kind:?} of [{rows}, {cols}]", cpu.isa()));
            }
        }
        for gates in [1, cols] {
            let gate = activations(&mut random, rows, gates);
            let mut want = up.clone();
            portable::rows::sigmoid_gate(&mut want, &gate);
            for cpu in cpus() {
                let mut got = up.clone();
                cpu.sigmoid_gate(&mut got, &gate);
                assert_close(&got, &want, &format!("{} {gates} sigmoid gates of [{rows}, {cols}]", cpu.isa()));
            }
        }
    }
}

#[test]
fn sums_and_turns() {
    let mut random = Random(3);
    for &(rows, cols) in SHAPES {
        let (x, y) = (activations(&mut random, rows, cols), activations(&mut random, rows, cols));
        let mut want = x.clone();
        portable::rows::add(&mut want, &y);
        for cpu in cpus() {
            let mut got = x.clone();
            cpu.add(&mut got, &y);
            assert_eq!(got.values(), want.values());
        }
        let row = activations(&mut random, 1, cols);
        let mut want = x.clone();
        portable::rows::add_row(&mut want, &row);
        for cpu in cpus() {
            let mut got = x.clone();
            cpu.add_row(&mut got, &row);
            assert_eq!(got.values(), want.values());
        }
        let mut want = x.clone();
        portable::rows::softcap(&mut want, 2.0);
        for cpu in cpus() {
            let mut got = x.clone();
            cpu.softcap(&mut got, 2.0);
            assert_close(&got, &want, &format!("{} softcap", cpu.isa()));
        }
    }
    for pairs in [PairLayout::Halves, PairLayout::Interleaved] {
        let inverse_frequencies = (0..12).map(|i| 10_000f32.powf(-(i as f32) / 12.0)).collect();
        let spec = RopeSpec { head_dim: 32, inverse_frequencies, magnitude: 1.25, pairs };
        let x = activations(&mut random, 300, 3 * 32);
        for first in [0, 100_000] {
            let positions: Vec<u32> = (first..first + 300).collect();
            let mut want = x.clone();
            portable::rope::rope(&mut want, &positions, &spec);
            for cpu in cpus() {
                let mut got = x.clone();
                cpu.rope(&mut got, &positions, &spec);
                assert_eq!(got.values(), want.values(), "{pairs:?}");
            }
        }
    }
}

#[test]
fn experts_are_combined() {
    let mut random = Random(6);
    for (tokens, cols) in [(1, 17), (3, 64), (200, 144)] {
        let logits = activations(&mut random, tokens, 7);
        let spec = RouteSpec {
            top_k: 3,
            score: RouteScore::Sigmoid,
            correction: None,
            normalize_epsilon: None,
            scale: 2.0,
            local: 1..6,
        };
        let mut routing = HostRouting::with_capacity(tokens, 3);
        routing.route(&logits, &spec);
        let x = activations(&mut random, tokens * 3, cols);
        let (mut want, mut got) = (HostBuffer::with_capacity(tokens * cols), HostBuffer::with_capacity(tokens * cols));
        portable::experts::expert_combine(&mut want, &x, &routing);
        for cpu in cpus() {
            cpu.expert_combine(&mut got, &x, &routing);
            let size = want.values().iter().fold(0f32, |largest, x| largest.max(x.abs()));
            for (got, want) in got.values().iter().zip(want.values()) {
                assert!((got - want).abs() <= 1e-6 * size, "{} [{tokens}, {cols}]: {got} is not {want}", cpu.isa());
            }
        }
    }
}

#[test]
fn causal_convolutions() {
    let mut random = Random(7);
    for (channels, taps) in [(16, 4), (528, 4), (20, 4), (32, 1), (32, 2), (16, 9)] {
        let x = activations(&mut random, 30, channels);
        let weight = activations(&mut random, channels, taps);
        let mut state = activations(&mut random, 3, ((taps - 1) * channels).max(1));
        state.reshape(3, (taps - 1) * channels);
        let runs = [
            Run { rows: 0..12, start: 0, blocks: &[], slot: 2 },
            Run { rows: 12..13, start: 5, blocks: &[], slot: 0 },
            Run { rows: 13..30, start: 1, blocks: &[], slot: 1 },
        ];
        let (mut want, mut want_state) = (HostBuffer::with_capacity(30 * channels), state.clone());
        portable::delta::causal_conv(&mut want, &x, &weight, &mut want_state, &runs);
        for cpu in cpus() {
            let (mut got, mut got_state) = (HostBuffer::with_capacity(30 * channels), state.clone());
            cpu.causal_conv(&mut got, &x, &weight, &mut got_state, &runs);
            assert_eq!(got_state.values(), want_state.values());
            let size = want.values().iter().fold(0f32, |largest, x| largest.max(x.abs()));
            for (got, want) in got.values().iter().zip(want.values()) {
                assert!((got - want).abs() <= 1e-6 * size, "{} {channels} {taps}: {got} is not {want}", cpu.isa());
            }
        }
    }
}

/// Inputs of a delta layer.
struct Delta {
    spec: DeltaSpec,
    qkv: HostBuffer,
    decay: HostBuffer,
    beta: HostBuffer,
    state: HostBuffer,
}

impl Delta {
    fn new(random: &mut Random, spec: DeltaSpec, tokens: usize) -> Self {
        let (keys, values) = (spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim);
        let qkv = activations(random, tokens, 2 * keys + values);
        let mut decay = activations(random, tokens, spec.value_heads);
        decay.values_mut().iter_mut().for_each(|decay| *decay = -decay.abs());
        let mut beta = activations(random, tokens, spec.value_heads);
        beta.values_mut().iter_mut().for_each(|beta| *beta = 1.0 / (1.0 + (-*beta).exp()));
        let state = activations(random, 3, values * spec.key_dim);
        Self { spec, qkv, decay, beta, state }
    }

    /// What `runs` give, and the states after them.
    fn on(&self, cpu: &Cpu, runs: &[Run<'_>]) -> [Vec<f32>; 2] {
        let values = self.spec.value_heads * self.spec.value_dim;
        let (mut out, mut state) = (HostBuffer::with_capacity(self.qkv.rows() * values), self.state.clone());
        cpu.delta_rule(&mut out, &self.qkv, &self.decay, &self.beta, &mut state, runs, self.spec);
        [out.values().to_vec(), state.values().to_vec()]
    }

    /// The same token by token in f64.
    fn exactly(&self, runs: &[Run<'_>]) -> [Vec<f64>; 2] {
        let DeltaSpec { key_heads, value_heads, key_dim, value_dim, tiled } = self.spec;
        let wide = |x: &[f32]| -> Vec<f64> { x.iter().map(|&x| f64::from(x)).collect() };
        let unit = |x: &[f32]| -> Vec<f64> {
            let x = wide(x);
            let length = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
            x.iter().map(|x| x / length).collect()
        };
        let mut out = vec![0.0; self.qkv.rows() * value_heads * value_dim];
        let mut states = wide(self.state.values());
        let size = key_dim * value_dim;
        for run in runs {
            for head in 0..value_heads {
                let state = &mut states[(run.slot * value_heads + head) * size..][..size];
                if run.start == 0 {
                    state.fill(0.0);
                }
                for row in run.rows.clone() {
                    let (q, kv) = self.qkv.row(row).split_at(key_heads * key_dim);
                    let (k, v) = kv.split_at(key_heads * key_dim);
                    let key_head = if tiled { head % key_heads } else { head / (value_heads / key_heads) } * key_dim;
                    let (q, k) = (unit(&q[key_head..][..key_dim]), unit(&k[key_head..][..key_dim]));
                    let v = wide(&v[head * value_dim..][..value_dim]);
                    let decay = f64::from(self.decay.row(row)[head]).exp();
                    let beta = f64::from(self.beta.row(row)[head]);
                    state.iter_mut().for_each(|state| *state *= decay);
                    for feature in 0..value_dim {
                        let recalled: f64 = (0..key_dim).map(|i| k[i] * state[i * value_dim + feature]).sum();
                        let correction = beta * (v[feature] - recalled);
                        (0..key_dim).for_each(|i| state[i * value_dim + feature] += k[i] * correction);
                        let answer: f64 = (0..key_dim).map(|i| q[i] * state[i * value_dim + feature]).sum();
                        out[(row * value_heads + head) * value_dim + feature] = answer / (key_dim as f64).sqrt();
                    }
                }
            }
        }
        [out, states]
    }

    fn assert_near(&self, got: &[Vec<f32>; 2], want: &[Vec<f64>; 2], what: &str) {
        for (got, want) in got.iter().zip(want) {
            let size = want.iter().fold(0f64, |largest, x| largest.max(x.abs()));
            for (got, want) in got.iter().zip(want) {
                assert!((f64::from(*got) - want).abs() <= 3e-6 * size, "{what}: {got} is not {want}");
            }
        }
    }
}

const fn delta_spec([key_heads, value_heads]: [usize; 2], [key_dim, value_dim]: [usize; 2]) -> DeltaSpec {
    DeltaSpec { key_heads, value_heads, key_dim, value_dim, tiled: false }
}

const DELTA_SPECS: &[DeltaSpec] = &[
    delta_spec([2, 4], [24, 32]),
    DeltaSpec { tiled: true, ..delta_spec([2, 4], [24, 32]) },
    delta_spec([1, 2], [128, 128]),
    delta_spec([1, 1], [8, 12]),
    delta_spec([1, 1], [256, 48]),
    delta_spec([1, 1], [260, 16]),
];

#[test]
fn delta_rule() {
    let mut random = Random(4);
    for &spec in DELTA_SPECS {
        let delta = Delta::new(&mut random, spec, 300);
        let run = |rows, start, slot| Run { rows, start, blocks: &[], slot };
        // Runs shorter and longer than a chunk, which begin and end inside one.
        for runs in [
            vec![run(0..7, 0, 2), run(7..8, 3, 0), run(8..30, 50, 1)],
            vec![run(0..64, 0, 2), run(64..129, 64, 0), run(129..300, 7, 1)],
        ] {
            let want = delta.exactly(&runs);
            for cpu in cpus() {
                let got = delta.on(&cpu, &runs);
                let rows = runs.last().unwrap().rows.end;
                let values = spec.value_heads * spec.value_dim;
                let [out, state] = got;
                let (mut got, mut want) = ([out, state], want.clone());
                got[0].truncate(rows * values);
                want[0].truncate(rows * values);
                delta.assert_near(&got, &want, &format!("{} {spec:?}", cpu.isa()));
            }
        }
    }
}

/// Keys that all point one way, decays that forget everything and nothing, and full corrections.
#[test]
fn delta_rule_of_extremes() {
    let mut random = Random(8);
    let spec = delta_spec([1, 1], [32, 16]);
    for (decay, beta) in [(0.0, 1.0), (-1e-4, 1.0), (-80.0, 1.0), (f32::NEG_INFINITY, 0.5), (-1e30, 1.0), (-0.1, 0.0)] {
        let mut delta = Delta::new(&mut random, spec, 130);
        delta.decay.values_mut().fill(decay);
        delta.beta.values_mut().fill(beta);
        let key: Vec<f32> = delta.qkv.row(0)[32..64].to_vec();
        for row in 0..130 {
            delta.qkv.row_mut(row)[32..64].copy_from_slice(&key);
        }
        let runs = [Run { rows: 0..130, start: 5, blocks: &[], slot: 1 }];
        let want = delta.exactly(&runs);
        for cpu in cpus() {
            delta.assert_near(&delta.on(&cpu, &runs), &want, &format!("{} {decay} {beta}", cpu.isa()));
        }
    }
}

/// However a prompt is cut, the results are those of the whole within their rounding; cut where chunks end, they are the same.
#[test]
fn delta_rule_of_pieces() {
    let mut random = Random(9);
    let spec = delta_spec([1, 2], [64, 32]);
    let delta = Delta::new(&mut random, spec, 256);
    let whole = [Run { rows: 0..256, start: 0, blocks: &[], slot: 0 }];
    let want = delta.exactly(&whole);
    for cpu in cpus() {
        let all = delta.on(&cpu, &whole);
        for cuts in [vec![64, 192], vec![1, 2, 3, 100, 250], (1..256).collect()] {
            let mut part = Delta { state: delta.state.clone(), ..Delta::new(&mut random, spec, 256) };
            (part.qkv, part.decay, part.beta) = (delta.qkv.clone(), delta.decay.clone(), delta.beta.clone());
            let mut out = Vec::new();
            for (start, end) in [0].iter().chain(&cuts).zip(cuts.iter().chain(&[256])) {
                let run = Run { rows: *start..*end, start: *start, blocks: &[], slot: 0 };
                let [rows, state] = part.on(&cpu, &[run]);
                out.extend_from_slice(&rows[start * 64..end * 64]);
                part.state.values_mut().copy_from_slice(&state);
            }
            let got = [out, part.state.values().to_vec()];
            delta.assert_near(&got, &want, &format!("{} {cuts:?}", cpu.isa()));
            if cuts.iter().all(|cut| cut % 64 == 0) {
                assert_eq!(got, all);
            }
        }
    }
}

/// The squares of the largest keys leave f32.
#[test]
fn delta_rule_of_large_keys() {
    let spec = delta_spec([1, 1], [16, 16]);
    let mut delta = Delta::new(&mut Random(10), spec, 20);
    for row in 0..20 {
        delta.qkv.row_mut(row)[..32].iter_mut().for_each(|x| *x *= 1e30);
    }
    let runs = [Run { rows: 0..20, start: 0, blocks: &[], slot: 0 }];
    let want = delta.exactly(&runs);
    for cpu in cpus() {
        delta.assert_near(&delta.on(&cpu, &runs), &want, &cpu.isa().to_string());
    }
}

/// Runs are worked on at the same time: two with one slot or one row would write to the same memory.
#[test]
fn delta_rule_takes_only_runs_that_are_apart() {
    let spec = DeltaSpec { key_heads: 1, value_heads: 1, key_dim: 8, value_dim: 16, tiled: false };
    let mut random = Random(5);
    let [qkv, gates, state] = [32, 1, 8 * 16].map(|cols| activations(&mut random, 4, cols));
    let run = |rows, slot| Run { rows, start: 1, blocks: &[], slot };
    let refused = [
        [run(0..2, 1), run(2..4, 1)],
        [run(0..3, 0), run(2..4, 1)],
        [run(1..4, 0), run(0..2, 1)],
        [run(0..2, 0), run(2..5, 1)],
        [run(0..2, 0), run(2..4, 4)],
    ];
    for cpu in cpus() {
        let delta_rule = |runs: &[Run<'_>]| {
            let (mut out, mut state) = (HostBuffer::with_capacity(5 * 16), state.clone());
            cpu.delta_rule(&mut out, &qkv, &gates, &gates, &mut state, runs, spec);
        };
        delta_rule(&[run(2..4, 3), run(0..2, 0)]);
        for runs in &refused {
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| delta_rule(runs)));
            assert!(result.is_err(), "{runs:?}");
        }
    }
}
