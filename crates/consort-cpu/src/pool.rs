//! One persistent team of threads that splits loops.
//!
//! A decode step is a few hundred short parallel loops, so entering and leaving one must cost about a microsecond: workers
//! spin for a moment between loops and park only when nothing comes. A loop is cut into units that threads *claim*: each
//! thread starts with a span of its own, so that it reads the memory that it touched first, and then takes from the others.
//! The loop ends when every unit is done, not when every thread has been seen, so a worker that the scheduler keeps off its
//! core holds up at most the unit that it works on.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::thread::{JoinHandle, Thread};
use std::time::Duration;

use crate::affinity;

/// Pauses that a worker spins before it parks: some tens of microseconds, longer than the serial work between two loops of
/// a step, shorter than a scheduler's time slice.
const WORKER_SPINS: u32 = 4_000;
/// Pauses that the caller spins for the last units before it parks.
const CALLER_SPINS: u32 = 2_000;
/// A caller that parks looks again after this long even if nobody wakes it.
const CALLER_NAP: Duration = Duration::from_millis(1);
/// Units of a span are counted in 16 bits.
const SPAN_UNITS: usize = u16::MAX as usize;

/// A part of the loop: `epoch` in the upper 32 bits, then the next unit and the end, 16 bits each. A claim is one
/// compare-and-swap that fails when the loop it belongs to is over.
#[repr(align(128))]
#[derive(Default)]
struct Span(AtomicU64);

impl Span {
    fn set(&self, epoch: u32, begin: usize, end: usize) {
        debug_assert!(begin <= end && end <= SPAN_UNITS);
        self.0.store(u64::from(epoch) << 32 | (begin as u64) << 16 | end as u64, Ordering::Release);
    }

    fn claim(&self, epoch: u32) -> Option<usize> {
        let mut state = self.0.load(Ordering::Acquire);
        loop {
            let (next, end) = (state >> 16 & 0xFFFF, state & 0xFFFF);
            if (state >> 32) as u32 != epoch || next == end {
                return None;
            }
            match self.0.compare_exchange_weak(state, state + (1 << 16), Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(next as usize),
                Err(now) => state = now,
            }
        }
    }
}

/// A loop in progress. It lives on the caller's stack until all its units are done.
struct Job<'a> {
    body: &'a (dyn Fn(usize) + Sync),
    tasks: usize,
    /// Tasks of one unit.
    grain: usize,
    /// Units of one span.
    span: usize,
    caller: Thread,
}

impl Job<'_> {
    fn unit(&self, thread: usize, index: usize) {
        let begin = (thread * self.span + index) * self.grain;
        (begin..(begin + self.grain).min(self.tasks)).for_each(self.body);
    }
}

struct Shared {
    epoch: AtomicU32,
    job: AtomicPtr<Job<'static>>,
    spans: Box<[Span]>,
    /// Units not yet done.
    remaining: AtomicUsize,
    /// A loop is in progress; a second one from another thread, or from inside the first, runs on its caller alone.
    busy: AtomicBool,
    caller_parked: AtomicBool,
    panicked: AtomicBool,
    stop: AtomicBool,
    parked: Box<[AtomicBool]>,
}

impl Shared {
    /// Claims and does units of loop `epoch` until none is left. Returns a panic of the body, after which the other units
    /// still run, because the loop cannot end while another thread may be inside it.
    fn work(&self, epoch: u32, thread: usize) -> Option<Box<dyn Any + Send>> {
        let job = self.job.load(Ordering::Acquire);
        let threads = self.spans.len();
        let (mut done, mut panic) = (0, None);
        for turn in 0..threads {
            let owner = (thread + turn) % threads;
            while let Some(index) = self.spans[owner].claim(epoch) {
                // SAFETY: a claimed unit is not yet counted as done, so the caller is still inside `Pool::run` and its job
                // is alive. The job was published before the spans of its epoch, and a claim with that epoch cannot
                // succeed once a later job has been published, so `job` is the one that the unit belongs to.
                let job = unsafe { &*job };
                if let Err(payload) = catch_unwind(AssertUnwindSafe(|| job.unit(owner, index))) {
                    self.panicked.store(true, Ordering::Relaxed);
                    panic = Some(payload);
                }
                done += 1;
            }
        }
        if done > 0 {
            // SAFETY: as above: the units counted in `done` have not been handed in.
            let caller = unsafe { &(*job).caller }.clone();
            if self.remaining.fetch_sub(done, Ordering::SeqCst) == done && self.caller_parked.load(Ordering::SeqCst) {
                caller.unpark();
            }
        }
        panic
    }

    fn worker(&self, thread: usize) {
        let mut seen = 0;
        loop {
            let epoch = self.next_epoch(seen, thread);
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            seen = epoch;
            // The flag tells the caller of a panic; its message has gone to the standard error already.
            drop(self.work(epoch, thread));
        }
    }

    /// Waits for a loop after `seen`: spins, then parks.
    fn next_epoch(&self, seen: u32, thread: usize) -> u32 {
        loop {
            for _ in 0..WORKER_SPINS {
                let epoch = self.epoch.load(Ordering::Acquire);
                if epoch != seen {
                    return epoch;
                }
                std::hint::spin_loop();
            }
            self.parked[thread].store(true, Ordering::SeqCst);
            while self.epoch.load(Ordering::SeqCst) == seen {
                std::thread::park();
            }
            self.parked[thread].store(false, Ordering::Relaxed);
        }
    }
}

/// A team of threads: the caller and `threads - 1` workers.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// The core of each thread, the caller's first; empty when threads are not pinned.
    cores: Vec<usize>,
}

impl Pool {
    /// A team of `threads` threads. Thread `i` is pinned to `cores[i]`; the thread that runs loops is thread 0 and is
    /// pinned when it first does. An empty `cores` pins nothing.
    ///
    /// # Errors
    /// When the system refuses another thread.
    pub fn new(threads: usize, cores: Vec<usize>) -> std::io::Result<Self> {
        assert!(threads > 0 && (cores.is_empty() || cores.len() >= threads), "a core for each thread");
        let shared = Arc::new(Shared {
            epoch: AtomicU32::new(0),
            job: AtomicPtr::new(null_mut()),
            spans: (0..threads).map(|_| Span::default()).collect(),
            remaining: AtomicUsize::new(0),
            busy: AtomicBool::new(false),
            caller_parked: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            parked: (0..threads).map(|_| AtomicBool::new(false)).collect(),
        });
        let mut pool = Self { shared, workers: Vec::with_capacity(threads - 1), cores };
        for thread in 1..threads {
            let (shared, core) = (pool.shared.clone(), pool.cores.get(thread).copied());
            let worker = std::thread::Builder::new().name(format!("cpu-{thread}")).spawn(move || {
                if let Some(core) = core {
                    affinity::pin(core);
                }
                shared.worker(thread);
            })?;
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    /// Threads of the team, the caller included.
    pub fn threads(&self) -> usize {
        self.shared.spans.len()
    }

    /// Runs `body(0) .. body(tasks - 1)`, each once, in no particular order. Returns when all are done.
    ///
    /// # Panics
    /// When `body` does.
    pub fn run(&self, tasks: usize, body: impl Fn(usize) + Sync) {
        let shared = &*self.shared;
        let threads = self.threads();
        if threads == 1 || tasks <= 1 || shared.busy.swap(true, Ordering::Acquire) {
            return (0..tasks).for_each(body);
        }
        affinity::pin_once(&self.cores);
        let grain = tasks.div_ceil(threads * SPAN_UNITS);
        let units = tasks.div_ceil(grain);
        let span = units.div_ceil(threads);
        let job = Job { body: &body, tasks, grain, span, caller: std::thread::current() };
        let epoch = shared.epoch.load(Ordering::Relaxed).wrapping_add(1);
        shared.remaining.store(units, Ordering::Relaxed);
        shared.job.store((&raw const job).cast_mut().cast(), Ordering::Release);
        for (thread, slot) in shared.spans.iter().enumerate() {
            slot.set(epoch, 0, units.saturating_sub(thread * span).min(span));
        }
        shared.epoch.store(epoch, Ordering::SeqCst);
        for (parked, worker) in shared.parked[1..].iter().zip(&self.workers).take(units - 1) {
            if parked.load(Ordering::SeqCst) && parked.swap(false, Ordering::SeqCst) {
                worker.thread().unpark();
            }
        }
        let panic = shared.work(epoch, 0);
        self.wait();
        let panicked = shared.panicked.swap(false, Ordering::Relaxed);
        shared.busy.store(false, Ordering::Release);
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
        assert!(!panicked, "a worker thread panicked");
    }

    /// Waits until all units are done.
    fn wait(&self) {
        let shared = &*self.shared;
        for _ in 0..CALLER_SPINS {
            if shared.remaining.load(Ordering::Acquire) == 0 {
                return;
            }
            std::hint::spin_loop();
        }
        shared.caller_parked.store(true, Ordering::SeqCst);
        while shared.remaining.load(Ordering::SeqCst) != 0 {
            std::thread::park_timeout(CALLER_NAP);
        }
        shared.caller_parked.store(false, Ordering::Relaxed);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches what its body throws, so it ends normally.
            let _ = worker.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads, vec![]).unwrap();
            for tasks in [0, 1, 2, 3, 64, 1_000, 400_000] {
                let counts: Vec<AtomicU32> = (0..tasks).map(|_| AtomicU32::new(0)).collect();
                pool.run(tasks, |task| {
                    counts[task].fetch_add(1, Ordering::Relaxed);
                });
                assert!(
                    counts.iter().all(|count| count.load(Ordering::Relaxed) == 1),
                    "{threads} threads, {tasks} tasks"
                );
            }
        }
    }

    #[test]
    fn many_short_loops() {
        let pool = Pool::new(3, vec![]).unwrap();
        let sum = AtomicUsize::new(0);
        for _ in 0..20_000 {
            pool.run(4, |task| {
                sum.fetch_add(task, Ordering::Relaxed);
            });
        }
        assert_eq!(sum.into_inner(), 20_000 * 6);
    }

    #[test]
    fn a_loop_inside_a_loop_runs_on_its_caller() {
        let pool = Pool::new(2, vec![]).unwrap();
        let sum = AtomicUsize::new(0);
        pool.run(4, |_| {
            pool.run(5, |task| {
                sum.fetch_add(task, Ordering::Relaxed);
            })
        });
        assert_eq!(sum.into_inner(), 4 * 10);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(2, vec![]).unwrap();
        for bad in 0..8 {
            let run = catch_unwind(AssertUnwindSafe(|| pool.run(8, |task| assert_ne!(task, bad))));
            assert!(run.is_err());
        }
        let sum = AtomicUsize::new(0);
        pool.run(8, |task| {
            sum.fetch_add(task, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 28);
    }
}
