//! The short causal convolution in front of a recurrent layer: channels are independent, so they are what threads share out.

use consort_compute::Run;
use consort_compute::portable::{HostBuffer, delta};

use crate::delta::assert_apart;
use crate::isa::{Kernel, LANES, Simd};
use crate::math::sigmoid;
use crate::memory::Disjoint;
use crate::product::Machine;

/// Inputs that one output can depend on; wider kernels take the portable way.
const MOST_TAPS: usize = 8;
/// Channels of a task.
const TASK_CHANNELS: usize = 512;

/// Depthwise causal convolution and SiLU: see [`Backend::causal_conv`](consort_compute::Backend::causal_conv).
pub fn causal_conv(
    machine: Machine<'_>,
    out: &mut HostBuffer,
    x: &HostBuffer,
    weight: &HostBuffer,
    state: &mut HostBuffer,
    runs: &[Run<'_>],
) {
    let (channels, taps) = weight.shape();
    assert_eq!((x.cols(), state.cols()), (channels, (taps - 1) * channels), "channels");
    if !channels.is_multiple_of(LANES) || taps > MOST_TAPS {
        return delta::causal_conv(out, x, weight, state, runs);
    }
    assert_apart(runs, x.rows(), state.rows());
    out.reshape(x.rows(), channels);
    let state_cols = state.cols();
    let (out, state) = (Disjoint::new(out.values_mut()), Disjoint::new(state.values_mut()));
    let tasks = channels.div_ceil(TASK_CHANNELS);
    machine.pool.run(runs.len() * tasks, |task| {
        let (run, first) = (&runs[task / tasks], task % tasks * TASK_CHANNELS);
        for channel in (first..channels.min(first + TASK_CHANNELS)).step_by(LANES) {
            machine.isa.run(Channels { out, x, weight, state, state_cols, run, channel });
        }
    });
}

/// 16 channels of a run.
struct Channels<'a> {
    out: Disjoint<'a, f32>,
    x: &'a HostBuffer,
    weight: &'a HostBuffer,
    state: Disjoint<'a, f32>,
    state_cols: usize,
    run: &'a Run<'a>,
    channel: usize,
}

impl Kernel for Channels<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { out, x, weight, state, state_cols, run, channel } = self;
        let (channels, taps) = weight.shape();
        let mut weights = [[0.0; LANES]; MOST_TAPS];
        let rows = &weight.values()[channel * taps..][..LANES * taps];
        for (lane, row) in rows.chunks_exact(taps).enumerate() {
            for (weights, weight) in weights.iter_mut().zip(row) {
                weights[lane] = *weight;
            }
        }
        // The inputs before the run's first token, oldest first.
        let before = |tap: usize| {
            // SAFETY: no two runs have one slot, as was asserted, and no two tasks one channel of a run.
            unsafe { state.slice(run.slot * state_cols + tap * channels + channel, LANES) }
        };
        let mut inputs = [[0.0; LANES]; MOST_TAPS];
        if run.start > 0 {
            for (tap, inputs) in inputs.iter_mut().enumerate().take(taps - 1) {
                inputs.copy_from_slice(before(tap));
            }
        }
        for row in run.rows.clone() {
            inputs[taps - 1].copy_from_slice(&x.row(row)[channel..channel + LANES]);
            let mut sum = simd.splat(0.0);
            for tap in 0..taps {
                sum = simd.fma(simd.load(&weights[tap]), simd.load(&inputs[tap]), sum);
            }
            // SAFETY: as above, for rows.
            let out = unsafe { out.slice(row * channels + channel, LANES) };
            simd.store(simd.mul(sum, sigmoid(simd, sum)), &mut out.as_chunks_mut().0[0]);
            inputs.copy_within(1..taps, 0);
        }
        for (tap, inputs) in inputs.iter().enumerate().take(taps - 1) {
            before(tap).copy_from_slice(inputs);
        }
    }
}
