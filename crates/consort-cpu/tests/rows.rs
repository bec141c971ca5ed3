//! The smaller operations against the portable ones, and independence of threads.

mod common;

use common::{Random, activations};
use consort_compute::portable::{self, HostBuffer};
use consort_compute::{Activation, Backend, DeltaSpec, NormGain, PairLayout, RopeSpec, Run};
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
fn delta_rule() {
    let mut random = Random(4);
    for spec in [
        DeltaSpec { key_heads: 2, value_heads: 4, key_dim: 24, value_dim: 32 },
        DeltaSpec { key_heads: 1, value_heads: 1, key_dim: 8, value_dim: 12 },
    ] {
        let (keys, values) = (spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim);
        let qkv = activations(&mut random, 41, 2 * keys + values);
        let mut decay = activations(&mut random, 41, spec.value_heads);
        decay.values_mut().iter_mut().for_each(|decay| *decay = -decay.abs());
        let beta = activations(&mut random, 41, spec.value_heads);
        let state = activations(&mut random, 3, values * spec.key_dim);
        let runs =
            [Run { rows: 0..20, start: 0, blocks: &[], slot: 2 }, Run { rows: 20..41, start: 7, blocks: &[], slot: 0 }];
        let (mut want, mut want_state) = (HostBuffer::with_capacity(41 * values), state.clone());
        portable::delta::delta_rule(&mut want, &qkv, &decay, &beta, &mut want_state, &runs, spec);
        let size = want.values().iter().fold(0f32, |largest, x| largest.max(x.abs()));
        for cpu in cpus() {
            let (mut got, mut got_state) = (HostBuffer::with_capacity(41 * values), state.clone());
            cpu.delta_rule(&mut got, &qkv, &decay, &beta, &mut got_state, &runs, spec);
            for (got, want) in [(&got, &want), (&got_state, &want_state)] {
                for (got, want) in got.values().iter().zip(want.values()) {
                    assert!((got - want).abs() <= 1e-5 * size, "{}: {got} is not {want}", cpu.isa());
                }
            }
        }
    }
}

/// Runs are worked on at the same time: two with one slot or one row would write to the same memory.
#[test]
fn delta_rule_takes_only_runs_that_are_apart() {
    let spec = DeltaSpec { key_heads: 1, value_heads: 1, key_dim: 8, value_dim: 16 };
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
