//! Operations that look at one value, or one row, at a time: in vectors, and in parallel where there are enough of them.

use std::cell::RefCell;
use std::ops::Range;

use consort_compute::portable::rows::gated_value;
use consort_compute::portable::{HostBuffer, HostRouting};
use consort_compute::{Activation, NormGain, PairLayout, RopeSpec};

use crate::isa::{Kernel, LANES, Simd};
use crate::math::{capped, sigmoid};
use crate::memory::Disjoint;
use crate::product::Machine;

/// Values that are worth a task: some microseconds of work.
const TASK_VALUES: usize = 16 << 10;

/// Splits `len` values, in units of `unit`, into tasks.
fn split(machine: Machine<'_>, len: usize, unit: usize, task: impl Fn(Range<usize>) + Sync) {
    let units_of_task = TASK_VALUES.div_ceil(unit.max(1));
    let values = units_of_task * unit;
    machine.pool.run(len.div_ceil(values.max(1)), |i| task(i * values..len.min((i + 1) * values)));
}

/// RMS norm of each run of `width` values of `x`.
pub fn rms_norm(
    machine: Machine<'_>,
    out: &mut HostBuffer,
    x: &HostBuffer,
    width: usize,
    gain: &NormGain<'_, HostBuffer>,
    epsilon: f32,
) {
    let (rows, cols) = x.shape();
    out.reshape(rows, cols);
    normalize(machine, out, Some(x), width, gain, epsilon);
}

/// RMS norm of each run of `width` values of `x`, in place.
pub fn rms_norm_in_place(
    machine: Machine<'_>,
    x: &mut HostBuffer,
    width: usize,
    gain: &NormGain<'_, HostBuffer>,
    epsilon: f32,
) {
    normalize(machine, x, None, width, gain, epsilon);
}

/// Norms `x`, or what is copied there.
fn normalize(
    machine: Machine<'_>,
    x: &mut HostBuffer,
    from: Option<&HostBuffer>,
    width: usize,
    gain: &NormGain<'_, HostBuffer>,
    epsilon: f32,
) {
    let len = x.values().len();
    assert_eq!(len % width, 0, "whole groups");
    if let NormGain::Before(gain) | NormGain::After(gain) = gain {
        assert_eq!(gain.values().len(), width, "one gain for each column of a group");
    }
    let x = Disjoint::new(x.values_mut());
    split(machine, len, width, |range| {
        // SAFETY: tasks have values of their own.
        let x = unsafe { x.slice(range.start, range.len()) };
        if let Some(from) = from {
            x.copy_from_slice(&from.values()[range]);
        }
        machine.isa.run(RmsNorm { x, width, gain, epsilon });
    });
}

struct RmsNorm<'a> {
    x: &'a mut [f32],
    width: usize,
    gain: &'a NormGain<'a, HostBuffer>,
    epsilon: f32,
}

impl Kernel for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for group in self.x.chunks_exact_mut(self.width) {
            if let NormGain::Before(gain) = self.gain {
                multiply(simd, group, gain.values());
            }
            let (vectors, rest) = group.as_chunks();
            let mut squares = simd.splat(0.0);
            for x in vectors {
                let x = simd.load(x);
                squares = simd.fma(x, x, squares);
            }
            let mut squares = f64::from(rest.iter().fold(simd.sum(squares), |sum, x| sum + x * x));
            if !squares.is_finite() {
                // Beyond f32, where the factor would be 0 and the row vanish.
                squares = group.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
            }
            let factor = (1.0 / (squares / self.width as f64 + f64::from(self.epsilon)).sqrt()) as f32;
            let (vectors, rest) = group.as_chunks_mut();
            for x in vectors {
                simd.store(simd.mul(simd.load(x), simd.splat(factor)), x);
            }
            for x in rest {
                *x *= factor;
            }
            if let NormGain::After(gain) = self.gain {
                multiply(simd, group, gain.values());
            }
        }
    }
}

/// `x *= y`.
#[inline(always)]
fn multiply<S: Simd>(simd: S, x: &mut [f32], y: &[f32]) {
    let ((x, x_rest), (y, y_rest)) = (x.as_chunks_mut(), y.as_chunks());
    for (x, y) in x.iter_mut().zip(y) {
        simd.store(simd.mul(simd.load(x), simd.load(y)), x);
    }
    for (x, y) in x_rest.iter_mut().zip(y_rest) {
        *x *= y;
    }
}

/// `x += y`.
pub fn add(machine: Machine<'_>, x: &mut HostBuffer, y: &HostBuffer) {
    assert_eq!(x.shape(), y.shape(), "both sides have one shape");
    let (len, y) = (x.values().len(), y.values());
    let x = Disjoint::new(x.values_mut());
    split(machine, len, LANES, |range| {
        // SAFETY: tasks have values of their own.
        let x = unsafe { x.slice(range.start, range.len()) };
        x.iter_mut().zip(&y[range]).for_each(|(x, y)| *x += y);
    });
}

/// `x[i] += row` for every row.
pub fn add_row(machine: Machine<'_>, x: &mut HostBuffer, row: &HostBuffer) {
    let (len, cols) = (x.values().len(), x.cols());
    assert_eq!(row.values().len(), cols, "one value for each column");
    let x = Disjoint::new(x.values_mut());
    split(machine, len, cols, |range| {
        // SAFETY: tasks have rows of their own.
        let x = unsafe { x.slice(range.start, range.len()) };
        for x in x.chunks_exact_mut(cols) {
            x.iter_mut().zip(row.values()).for_each(|(x, y)| *x += y);
        }
    });
}

/// `x = cap · tanh(x / cap)`.
pub fn softcap(machine: Machine<'_>, x: &mut HostBuffer, cap: f32) {
    let len = x.values().len();
    let x = Disjoint::new(x.values_mut());
    split(machine, len, LANES, |range| {
        // SAFETY: tasks have values of their own.
        let x = unsafe { x.slice(range.start, range.len()) };
        machine.isa.run(Softcap { x, cap });
    });
}

struct Softcap<'a> {
    x: &'a mut [f32],
    cap: f32,
}

impl Kernel for Softcap<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { x, cap } = self;
        for x in x.chunks_mut(LANES) {
            let mut lanes = [0.0; LANES];
            lanes[..x.len()].copy_from_slice(x);
            simd.store(capped(simd, simd.load(&lanes), cap), &mut lanes);
            x.copy_from_slice(&lanes[..x.len()]);
        }
    }
}

/// `gate = activation(gate) · up`.
pub fn gated(machine: Machine<'_>, gate: &mut HostBuffer, up: &HostBuffer, activation: Activation) {
    assert_eq!(gate.shape(), up.shape(), "both sides have one shape");
    let (len, up) = (gate.values().len(), up.values());
    let gate = Disjoint::new(gate.values_mut());
    split(machine, len, LANES, |range| {
        // SAFETY: tasks have values of their own.
        let gate = unsafe { gate.slice(range.start, range.len()) };
        machine.isa.run(Gated { gate, up: &up[range], activation });
    });
}

struct Gated<'a> {
    gate: &'a mut [f32],
    up: &'a [f32],
    activation: Activation,
}

impl Kernel for Gated<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { gate, up, activation } = self;
        let ((gate, gate_rest), (up, up_rest)) = (gate.as_chunks_mut(), up.as_chunks());
        for (gate, up) in gate.iter_mut().zip(up) {
            gate_16(simd, gate, up, activation);
        }
        let (mut last_gate, mut last_up) = ([0.0; LANES], [0.0; LANES]);
        last_gate[..gate_rest.len()].copy_from_slice(gate_rest);
        last_up[..up_rest.len()].copy_from_slice(up_rest);
        gate_16(simd, &mut last_gate, &last_up, activation);
        gate_rest.copy_from_slice(&last_gate[..gate_rest.len()]);
    }
}

#[inline(always)]
fn gate_16<S: Simd>(simd: S, gate: &mut [f32; LANES], up: &[f32; LANES], activation: Activation) {
    let (x, u) = (simd.load(gate), simd.load(up));
    let value = match activation {
        Activation::Silu => simd.mul(x, sigmoid(simd, x)),
        Activation::GeluTanh => {
            // (1 + tanh(y)) / 2 is sigmoid(2y).
            let cubic = simd.fma(simd.mul(simd.mul(x, x), x), simd.splat(0.044_715), x);
            let twice = simd.splat(2.0 * (2.0 / std::f32::consts::PI).sqrt());
            simd.mul(x, sigmoid(simd, simd.mul(cubic, twice)))
        }
        Activation::ClampedSwiglu { alpha, limit } => {
            // A NaN is the second operand, which the comparison keeps.
            let x = simd.min(simd.splat(limit), x);
            let u = simd.max(simd.splat(-limit), simd.min(simd.splat(limit), u));
            let gate_value = simd.mul(x, sigmoid(simd, simd.mul(x, simd.splat(alpha))));
            return simd.store(simd.fma(gate_value, u, gate_value), gate);
        }
        Activation::Gelu => {
            for (gate, up) in gate.iter_mut().zip(up) {
                *gate = gated_value(*gate, *up, activation);
            }
            return;
        }
    };
    simd.store(simd.mul(value, u), gate);
}

/// `x *= sigmoid(gate)`; each gate column serves `x.cols / gate.cols` consecutive columns.
pub fn sigmoid_gate(machine: Machine<'_>, x: &mut HostBuffer, gate: &HostBuffer) {
    assert_eq!(x.rows(), gate.rows(), "one row of gates for each row");
    assert_eq!(x.cols() % gate.cols().max(1), 0, "each gate serves as many columns");
    let (len, gate) = (x.values().len(), gate.values());
    if gate.is_empty() {
        return;
    }
    let width = len / gate.len();
    let x = Disjoint::new(x.values_mut());
    split(machine, len, width.next_multiple_of(LANES), |range| {
        // SAFETY: tasks have values of their own.
        let x = unsafe { x.slice(range.start, range.len()) };
        machine.isa.run(SigmoidGate { x, first: range.start, gate, width });
    });
}

struct SigmoidGate<'a> {
    x: &'a mut [f32],
    /// Where `x` begins in its buffer.
    first: usize,
    gate: &'a [f32],
    width: usize,
}

impl Kernel for SigmoidGate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { x, first, gate, width } = self;
        for (i, x) in x.chunks_mut(LANES).enumerate() {
            let (at, mut factors) = (first + i * LANES, [0.0; LANES]);
            let (first_gate, last_gate) = (at / width, (at + x.len() - 1) / width);
            if first_gate == last_gate {
                factors.fill(gate[first_gate]);
            } else if width == 1 {
                factors[..x.len()].copy_from_slice(&gate[at..at + x.len()]);
            } else {
                for (lane, factor) in factors.iter_mut().enumerate().take(x.len()) {
                    *factor = gate[(at + lane) / width];
                }
            }
            let gates = simd.load(&factors);
            simd.store(sigmoid(simd, gates), &mut factors);
            for (x, factor) in x.iter_mut().zip(factors) {
                *x *= factor;
            }
        }
    }
}

/// `out[t] = Σ weight · x[pair]` over token `t`'s local pairs.
pub fn expert_combine(machine: Machine<'_>, out: &mut HostBuffer, x: &HostBuffer, routing: &HostRouting) {
    assert_eq!(x.rows(), routing.pairs(), "a row per pair");
    let (cols, top_k) = (x.cols(), routing.top_k());
    out.reshape(x.rows() / top_k, cols);
    let len = out.values().len();
    let out = Disjoint::new(out.values_mut());
    split(machine, len, cols, |range| {
        let first = range.start / cols.max(1);
        // SAFETY: tasks have rows of their own.
        let out = unsafe { out.slice(range.start, range.len()) };
        machine.isa.run(Combine { out, first, x, routing });
    });
}

/// The rows of some tokens.
struct Combine<'a> {
    out: &'a mut [f32],
    /// The token of the first row.
    first: usize,
    x: &'a HostBuffer,
    routing: &'a HostRouting,
}

impl Kernel for Combine<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { out, first, x, routing } = self;
        let top_k = routing.top_k();
        for (token, out) in (first..).zip(out.chunks_exact_mut(x.cols())) {
            out.fill(0.0);
            for pair in token * top_k..(token + 1) * top_k {
                if routing.local_expert(pair).is_some() {
                    add_scaled(simd, out, x.row(pair), routing.weights()[pair]);
                }
            }
        }
    }
}

/// `x += factor · y`.
#[inline(always)]
fn add_scaled<S: Simd>(simd: S, x: &mut [f32], y: &[f32], factor: f32) {
    let ((x, x_rest), (y, y_rest)) = (x.as_chunks_mut(), y.as_chunks());
    for (x, y) in x.iter_mut().zip(y) {
        simd.store(simd.fma(simd.load(y), simd.splat(factor), simd.load(x)), x);
    }
    for (x, y) in x_rest.iter_mut().zip(y_rest) {
        *x += factor * y;
    }
}

/// Turns each head of `x` by its row's position.
pub fn rope(machine: Machine<'_>, x: &mut HostBuffer, positions: &[u32], spec: &RopeSpec) {
    thread_local!(static TURNS: RefCell<Vec<Turns>> = RefCell::default());
    assert_eq!(positions.len(), x.rows(), "one position for each row");
    let (len, cols) = (x.values().len(), x.cols());
    TURNS.with_borrow_mut(|memory| {
        let turns = Turns::of(memory, positions, spec);
        let x = Disjoint::new(x.values_mut());
        split(machine, len, cols, |range| {
            // SAFETY: tasks have rows of their own.
            let x = unsafe { x.slice(range.start, range.len()) };
            for (row, x) in x.chunks_exact_mut(cols).enumerate() {
                turns.turn(range.start / cols + row, x, spec);
            }
        });
    });
}

/// Sines and cosines of a step. All layers of a kind turn by the same angles, so they are computed once.
struct Turns {
    spec: RopeSpec,
    positions: Vec<u32>,
    /// `[row][pair]`: cosine and sine.
    factors: Vec<[f32; 2]>,
}

impl Turns {
    /// Kinds of layers that are remembered: no model has more.
    const KINDS: usize = 4;

    /// The factors of these positions, computed unless the last ones of this kind were the same.
    fn of<'a>(memory: &'a mut Vec<Self>, positions: &[u32], spec: &RopeSpec) -> &'a Self {
        let known = memory.iter().position(|turns| turns.spec == *spec).unwrap_or_else(|| {
            memory.truncate(Self::KINDS - 1);
            memory.push(Self { spec: spec.clone(), positions: Vec::new(), factors: Vec::new() });
            memory.len() - 1
        });
        let turns = &mut memory[known];
        if turns.positions != positions {
            turns.positions.clear();
            turns.positions.extend_from_slice(positions);
            turns.factors.clear();
            let angles = positions.iter().flat_map(|&p| spec.inverse_frequencies.iter().map(move |f| p as f32 * f));
            turns.factors.extend(angles.map(|angle| {
                let (sin, cos) = f64::from(angle).sin_cos();
                [cos as f32 * spec.magnitude, sin as f32 * spec.magnitude]
            }));
        }
        turns
    }

    fn turn(&self, row: usize, heads: &mut [f32], spec: &RopeSpec) {
        let pairs = spec.inverse_frequencies.len();
        let factors = &self.factors[row * pairs..][..pairs];
        for head in heads.chunks_exact_mut(spec.head_dim) {
            let (rotary, _) = head.split_at_mut(2 * pairs);
            match spec.pairs {
                PairLayout::Halves => {
                    let (first, second) = rotary.split_at_mut(pairs);
                    for ((a, b), [cos, sin]) in first.iter_mut().zip(second).zip(factors) {
                        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
                    }
                }
                PairLayout::Interleaved => {
                    for ([a, b], [cos, sin]) in rotary.as_chunks_mut().0.iter_mut().zip(factors) {
                        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
                    }
                }
            }
        }
    }
}
