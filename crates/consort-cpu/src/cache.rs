//! Writing this step's keys and values into the cache.

use consort_compute::portable::{HostBuffer, HostCache};
use consort_compute::{KvFormat, KvSpec, Run};

use crate::isa::{Kernel, LANES, Simd};
use crate::memory::Disjoint;
use crate::product::Machine;

/// Values that are worth a task.
const TASK_VALUES: usize = 2 << 10;

/// Stores keys `[n, heads · key_dim]` and values `[n, heads · value_dim]` at their runs' positions.
pub fn write(machine: Machine<'_>, cache: &mut HostCache, k: &HostBuffer, v: &HostBuffer, runs: &[Run<'_>]) {
    let spec = *cache.spec();
    let KvSpec { heads, block_tokens, key_dim, value_dim, .. } = spec;
    assert_eq!((k.cols(), v.cols()), (heads * key_dim, heads * value_dim), "keys and values of this cache");
    let [keys, values] = cache.memory_mut().map(Disjoint::new);
    for run in runs {
        // A task has one head of one block, because the keys of a block's tokens lie side by side.
        let first_block = run.start / block_tokens;
        let blocks = (run.start + run.rows.len()).div_ceil(block_tokens) - first_block;
        assert!(blocks <= run.blocks.len(), "a block for each position");
        let task = |task: usize| {
            let (block, head) = (first_block + task / heads, task % heads);
            let positions =
                run.start.max(block * block_tokens)..(run.start + run.rows.len()).min((block + 1) * block_tokens);
            let (place, _) = spec.place(run, positions.start);
            let (key_range, value_range) = (spec.keys(place, head), spec.values(place, head));
            // SAFETY: each task has a block's head for itself: a run's blocks are all different, for it has no more positions
            // than they hold, and runs are written one after the other.
            let (keys, values) = unsafe {
                (keys.slice(key_range.start, key_range.len()), values.slice(value_range.start, value_range.len()))
            };
            for position in positions {
                let row = run.rows.start + (position - run.start);
                let key = &k.row(row)[head * key_dim..][..key_dim];
                let value = &v.row(row)[head * value_dim..][..value_dim];
                let token = position % block_tokens;
                machine.isa.run(Write { spec: &spec, keys, values, token, key, value });
            }
        };
        if run.rows.len() * (k.cols() + v.cols()) < 2 * TASK_VALUES {
            (0..blocks * heads).for_each(task);
        } else {
            machine.pool.run(blocks * heads, task);
        }
    }
}

/// One head's key and value of one token.
struct Write<'a> {
    spec: &'a KvSpec,
    keys: &'a mut [u8],
    values: &'a mut [u8],
    token: usize,
    key: &'a [f32],
    value: &'a [f32],
}

impl Kernel for Write<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { spec, keys, values, token, key, value } = self;
        let halves = matches!(spec.format, KvFormat::F16 | KvFormat::BF16);
        let whole = key.len().is_multiple_of(LANES) && value.len().is_multiple_of(LANES);
        if !halves || !whole || !spec.block_tokens.is_multiple_of(LANES) {
            spec.write_key(keys, token, key);
            spec.write_value(values, token, value);
            return;
        }
        let (panel, lane) = (token / LANES, token % LANES);
        let panel = &mut keys[panel * LANES * spec.key_bytes()..][..LANES * spec.key_bytes()];
        let (columns, _) = panel.as_chunks_mut::<{ 2 * LANES }>();
        for (key, columns) in key.as_chunks().0.iter().zip(columns.as_chunks_mut::<LANES>().0) {
            let mut halves = [0; 2 * LANES];
            store_halves(simd, spec.format, key, &mut halves);
            for (half, column) in halves.as_chunks::<2>().0.iter().zip(columns) {
                column.as_chunks_mut::<2>().0[lane] = *half;
            }
        }
        let row = &mut values[token * spec.value_bytes()..][..spec.value_bytes()];
        for (value, out) in value.as_chunks().0.iter().zip(row.as_chunks_mut().0) {
            store_halves(simd, spec.format, value, out);
        }
    }
}

/// Rounds to two bytes each. Numbers past the format's range become its largest; what is not finite becomes NaN.
#[inline(always)]
fn store_halves<S: Simd>(simd: S, format: KvFormat, x: &[f32; LANES], out: &mut [u8; 2 * LANES]) {
    let largest = if format == KvFormat::F16 { half::f16::MAX.to_f32() } else { half::bf16::MAX.to_f32() };
    let x = simd.load(x);
    let within = simd.min(simd.splat(largest), simd.max(simd.splat(-largest), x));
    // Zero, unless there is an infinity or a NaN.
    let damage = simd.mul(x, simd.splat(0.0));
    let x = simd.add(within, damage);
    match format {
        KvFormat::F16 => simd.store_f16(x, out),
        _ => simd.store_bf16(x, out),
    }
}
