//! Collectives that run while their caller computes: one thread per fabric, started when it is first needed, that runs them in
//! the order in which they were started, and sleeps when there are none.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

use crate::FabricError;

/// Collectives that may wait for their turn; starting one more waits until there is room.
const QUEUE_LIMIT: usize = 64;

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queue {
    jobs: Option<Sender<Job>>,
    worker: Option<ThreadId>,
    /// Jobs that have been started and are not done.
    unfinished: usize,
}

/// The thread and its queue.
#[derive(Default)]
pub(crate) struct Background {
    queue: Mutex<Queue>,
    finished: Condvar,
    /// Whether anything was ever started.
    used: AtomicBool,
}

/// A collective that was started with [`Group::start`](crate::Group::start). Whatever becomes of this handle, it runs to its end.
#[must_use = "a collective that nobody waits for may still be using the links"]
pub struct Pending<B> {
    result: Receiver<Result<B, FabricError>>,
}

impl<B> Pending<B> {
    pub(crate) fn done(result: Result<B, FabricError>) -> Self {
        let (sender, receiver) = channel();
        let _ = sender.send(result);
        Self { result: receiver }
    }

    /// Waits until the collective is done, and returns its buffer. Ends as every collective does: by its own deadline, or when a
    /// rank is lost.
    ///
    /// # Errors
    /// Whatever ended the collective.
    pub fn wait(self) -> Result<B, FabricError> {
        let panicked = || FabricError::Invalid("a collective that ran beside its caller panicked".into());
        self.result.recv().unwrap_or_else(|_| Err(panicked()))
    }
}

impl Background {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until all that was started is done: what comes now comes after it on every rank. Not for the thread itself.
    pub fn settle(&self) {
        if !self.used.load(Ordering::Acquire) {
            return;
        }
        let queue = self.queue();
        if queue.worker != Some(std::thread::current().id()) {
            let rest = self.finished.wait_while(queue, |queue| queue.unfinished > 0);
            drop(rest.unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Queues `body`; `done` must be called when it has ended.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn start<B: Send + 'static>(
        &self,
        body: impl FnOnce() -> Result<B, FabricError> + Send + 'static,
    ) -> Result<Pending<B>, FabricError> {
        let mut queue = self
            .finished
            .wait_while(self.queue(), |queue| queue.unfinished >= QUEUE_LIMIT)
            .unwrap_or_else(PoisonError::into_inner);
        if queue.jobs.is_none() {
            let (sender, jobs) = channel::<Job>();
            let thread = std::thread::Builder::new().name("consort-collectives".into());
            let thread = thread.spawn(move || jobs.into_iter().for_each(|job| job()));
            let failed = |error| FabricError::Setup(format!("starting a thread for collectives: {error}"));
            (queue.worker, queue.jobs) = (Some(thread.map_err(failed)?.thread().id()), Some(sender));
        }
        let (sender, result) = channel();
        let job = Box::new(move || {
            // Nobody may be waiting for it.
            let _ = sender.send(body());
        });
        queue.unfinished += 1;
        self.used.store(true, Ordering::Release);
        queue.jobs.as_ref().expect("made above").send(job).expect("the thread ends with its queue");
        Ok(Pending { result })
    }

    /// One job has ended.
    pub fn finish(&self) {
        self.queue().unfinished -= 1;
        self.finished.notify_all();
    }
}
