//! Attention over the cache, in tiles (Dao et al. 2022, "FlashAttention").
//!
//! A task takes the query heads that share a key head, for a few consecutive tokens, and walks the positions that they see in
//! tiles: it unpacks keys and values once for all its queries and multiplies with register-blocked microkernels; few queries,
//! as in decoding, multiply what they unpack in registers. Keys lie in the cache as 16 tokens side by side, so that their
//! products need no sum across lanes.
//!
//! The sums of a query are cut into segments of fixed length, which are added up in order to stretches of eight, and those to
//! the whole. With few queries, stretches or segments are tasks of their own, so that a long context occupies all threads.
//! What is added to what depends on positions alone: a query's result has the same bits in any batch, chunk or number of
//! threads.

mod cached;
mod direct;
mod queries;
mod segment;
mod stored;
mod sums;

use std::cell::RefCell;
use std::ops::Range;

use consort_compute::portable::{HostBuffer, HostCache};
use consort_compute::{AttentionSpec, Run};

use crate::isa::{Kernel, Simd};
use crate::memory::Disjoint;
use crate::product::Machine;

use cached::Cached;
use queries::Queries;
use segment::{SEGMENT, at_least, attend_segment};
use sums::Sums;

/// Queries of a task, if one token has no more heads than that: enough to make unpacking cheap, few enough that what a
/// task works in stays in the second-level cache.
const QUERIES: usize = 96;
/// With fewer tasks for each thread, parts of a context become tasks.
const TASKS_OF_THREAD: usize = 4;
/// Segments of a stretch.
const STRETCH: usize = 8;

thread_local! {
    /// Memory of each thread that computes.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
    /// Memory of each thread that calls.
    static CALLER: RefCell<(Plan, Vec<f32>)> = RefCell::default();
}

/// Attention of queries `[n, heads · key_dim]` over the cache, which already holds this step's keys:
/// `out [n, heads · value_dim]`.
pub fn attention(
    machine: Machine<'_>,
    out: &mut HostBuffer,
    q: &HostBuffer,
    cache: &HostCache,
    runs: &[Run<'_>],
    spec: &AttentionSpec<'_, HostBuffer>,
) {
    let (pool, isa) = (machine.pool, machine.isa);
    let (key_dim, value_dim) = (cache.spec().key_dim, cache.spec().value_dim);
    assert_eq!(q.cols(), spec.heads * key_dim, "queries of this cache");
    out.reshape(q.rows(), spec.heads * value_dim);
    let out = Disjoint::new(out.values_mut());
    CALLER.with_borrow_mut(|(plan, memory)| {
        plan.make(runs, spec, cache.spec().heads, pool.threads());
        let plan = &*plan;
        let queries = |share: &Share| {
            let run = &runs[share.run];
            let cached = Cached { cache, run, head: spec.kv_head(share.heads.start, cache.spec().heads) };
            Queries { q, cached, run, spec, heads: share.heads.clone(), tokens: share.tokens.clone() }
        };
        let len = Sums::len(plan.most_queries, value_dim);
        at_least(memory, plan.sums * len, 0.0);
        let sums = Disjoint::new(memory);
        pool.run(plan.tasks.len(), |task| {
            let task = &plan.tasks[task];
            let queries = &queries(&plan.shares[task.share]);
            // SAFETY: each task has sums of its own.
            let sums = task.sums.map(|place| unsafe { sums.slice(place * len, len) });
            SCRATCH.with_borrow_mut(|scratch| {
                isa.run(Attend { queries, segments: task.segments.clone(), sums, out, scratch });
            });
        });
        pool.run(plan.divided.len(), |i| {
            let share = &plan.shares[plan.divided[i]];
            let tasks = &plan.tasks[share.tasks.clone()];
            let first = tasks[0].sums.expect("the tasks of a divided share leave sums");
            // SAFETY: as above; the loop that wrote them is over.
            let sums = unsafe { sums.slice(first * len, tasks.len() * len) };
            SCRATCH.with_borrow_mut(|scratch| isa.run(Merge { queries: &queries(share), tasks, sums, out, scratch }));
        });
    });
}

/// Who does what: made anew for each call, in memory that stays.
#[derive(Default)]
struct Plan {
    /// Query heads that share a KV head.
    groups: Vec<Range<usize>>,
    shares: Vec<Share>,
    tasks: Vec<Task>,
    /// The shares whose segments are tasks.
    divided: Vec<usize>,
    most_queries: usize,
    /// Sums of segments that are tasks.
    sums: usize,
}

/// The query heads of one KV head, for a few tokens of a run.
struct Share {
    run: usize,
    heads: Range<usize>,
    tokens: Range<usize>,
    tasks: Range<usize>,
}

/// Some segments of a share.
struct Task {
    share: usize,
    segments: Range<usize>,
    /// Where its sums go, if it is not the only task of its share.
    sums: Option<usize>,
}

impl Plan {
    fn make(&mut self, runs: &[Run<'_>], spec: &AttentionSpec<'_, HostBuffer>, kv_heads: usize, threads: usize) {
        let Self { groups, shares, tasks, divided, .. } = self;
        groups.clear();
        shares.clear();
        tasks.clear();
        divided.clear();
        for head in 0..spec.heads {
            match groups.last_mut() {
                Some(group) if spec.kv_head(group.start, kv_heads) == spec.kv_head(head, kv_heads) => {
                    group.end = head + 1;
                }
                _ => groups.push(head..head + 1),
            }
        }
        self.most_queries = 0;
        for (run, Run { rows, .. }) in runs.iter().enumerate() {
            for heads in &*groups {
                let step = (QUERIES / heads.len()).clamp(1, rows.len().max(1));
                self.most_queries = self.most_queries.max(step * heads.len());
                // The last tokens, which see the most, first.
                for first in (0..rows.len()).step_by(step).rev() {
                    let tokens = first..rows.len().min(first + step);
                    shares.push(Share { run, heads: heads.clone(), tokens, tasks: 0..0 });
                }
            }
        }
        // The longest pieces that make enough tasks.
        let segments = |share: &Share| {
            let start = runs[share.run].start;
            spec.first_position(start + share.tokens.start) / SEGMENT..(start + share.tokens.end).div_ceil(SEGMENT)
        };
        let enough = TASKS_OF_THREAD * threads;
        let pieces = |share: &Share| segments(share).end.div_ceil(STRETCH) - segments(share).start / STRETCH;
        let step = match threads {
            1 => usize::MAX,
            _ if shares.len() >= enough => usize::MAX,
            _ if shares.iter().map(pieces).sum::<usize>() >= enough => STRETCH,
            _ => 1,
        };
        self.sums = 0;
        for (i, share) in shares.iter_mut().enumerate() {
            let Range { start, end } = segments(share);
            let (first, divided_here) = (tasks.len(), (start / step + 1).saturating_mul(step) < end);
            let mut segment = start;
            while segment < end {
                let next = end.min((segment / step + 1).saturating_mul(step));
                tasks.push(Task { share: i, segments: segment..next, sums: divided_here.then_some(self.sums) });
                self.sums += usize::from(divided_here);
                segment = next;
            }
            share.tasks = first..tasks.len();
            if divided_here {
                divided.push(i);
            }
        }
    }
}

/// Working memory of a thread.
#[derive(Default)]
struct Scratch {
    segment: segment::Scratch,
    /// Sums of all stretches so far, of the stretch in progress, and of its segment in progress.
    sums: [Vec<f32>; 3],
}

impl Scratch {
    /// Memory for segments and for three sums, cleared.
    fn of(&mut self, queries: &Queries<'_>) -> (&mut segment::Scratch, [Sums<'_>; 3]) {
        let len = Sums::len(queries.len(), queries.cache().value_dim);
        let sums = self.sums.each_mut().map(|memory| {
            at_least(memory, len, 0.0);
            let mut sums = Sums::new(&mut memory[..len], queries.len());
            sums.clear();
            sums
        });
        (&mut self.segment, sums)
    }
}

/// Some segments of a share.
struct Attend<'a> {
    queries: &'a Queries<'a>,
    segments: Range<usize>,
    /// Where the sums go if these are not all segments, but some of one stretch.
    sums: Option<&'a mut [f32]>,
    out: Disjoint<'a, f32>,
    scratch: &'a mut Scratch,
}

impl Kernel for Attend<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { queries, segments, sums, out, scratch } = self;
        let (scratch, [mut total, mut stretch, mut part]) = scratch.of(queries);
        scratch.load(queries);
        let whole = sums.is_none();
        if let Some(sums) = sums {
            let len = Sums::len(queries.len(), queries.cache().value_dim);
            stretch = Sums::new(&mut sums[..len], queries.len());
        }
        let mut segment = segments.start;
        while segment < segments.end {
            let next = segments.end.min((segment / STRETCH + 1) * STRETCH);
            stretch.clear();
            for segment in segment..next {
                attend_segment(simd, queries, segment, &mut part, scratch);
                stretch.merge(simd, &mut part);
            }
            if whole {
                total.merge(simd, &mut stretch);
            }
            segment = next;
        }
        if whole {
            total.finish(simd, queries, out);
        }
    }
}

/// Adds up what the tasks of a share have left.
struct Merge<'a> {
    queries: &'a Queries<'a>,
    tasks: &'a [Task],
    /// Of each task, as many values.
    sums: &'a mut [f32],
    out: Disjoint<'a, f32>,
    scratch: &'a mut Scratch,
}

impl Kernel for Merge<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { queries, tasks, sums, out, scratch } = self;
        let len = Sums::len(queries.len(), queries.cache().value_dim);
        let room = sums.len() / tasks.len();
        let (_, [mut total, mut stretch, _]) = scratch.of(queries);
        let mut sums = sums.chunks_exact_mut(room);
        for tasks in tasks.chunk_by(|a, b| a.segments.start / STRETCH == b.segments.start / STRETCH) {
            stretch.clear();
            for sums in sums.by_ref().take(tasks.len()) {
                stretch.merge(simd, &mut Sums::new(&mut sums[..len], queries.len()));
            }
            total.merge(simd, &mut stretch);
        }
        total.finish(simd, queries, out);
    }
}
