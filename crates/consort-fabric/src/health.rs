//! The abort word: one first failure per process, which every wait checks.

use std::sync::PoisonError;

use serde::{Deserialize, Serialize};

use crate::FabricError;
use crate::sync::{AtomicBool, Mutex, Ordering};

/// Why the fabric cannot go on, and whose fault it is. Sent to all ranks, so that all name the same one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Failure {
    /// The culprit.
    pub rank: u32,
    /// True if the culprit itself said that it cannot go on; false if others lost it.
    pub gave_up: bool,
    /// What was seen or said.
    pub cause: String,
}

/// Shared by the monitor, which finds failures, and the collectives, which wait.
pub(crate) struct Health {
    /// Set after `first` is filled, read on every turn of a wait.
    failed: AtomicBool,
    first: Mutex<Option<Failure>>,
    /// Ranks that said goodbye: an operation that still needs one of them cannot end.
    departed: Vec<AtomicBool>,
    /// By rank, as far as they are known.
    hosts: Mutex<Vec<String>>,
}

impl Health {
    /// For `size` ranks, whose hosts are not known yet.
    pub fn new(size: usize) -> Self {
        let departed = (0..size).map(|_| AtomicBool::new(false)).collect();
        let hosts = Mutex::new(vec!["unknown host".to_owned(); size]);
        Self { failed: AtomicBool::new(false), first: Mutex::new(None), departed, hosts }
    }

    /// From now on messages name this host for `rank`.
    pub fn name(&self, rank: usize, host: &str) {
        let mut hosts = self.hosts.lock().unwrap_or_else(PoisonError::into_inner);
        hosts[rank] = host.to_owned();
    }

    /// Keeps the first failure; returns whether this was it.
    pub fn fail(&self, failure: Failure) -> bool {
        let mut first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
        if first.is_some() {
            return false;
        }
        *first = Some(failure);
        self.failed.store(true, Ordering::Release);
        true
    }

    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    pub fn failure(&self) -> Option<Failure> {
        self.first.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Ends `operation` with the first failure, if there is one.
    pub fn check(&self, operation: &'static str) -> Result<(), FabricError> {
        if !self.has_failed() {
            return Ok(());
        }
        let failure = self.failure().expect("the flag is set after the failure is stored");
        Err(self.error(failure, operation))
    }

    /// The typed form of a failure.
    pub fn error(&self, failure: Failure, operation: &'static str) -> FabricError {
        let rank = failure.rank as usize;
        let host = self.host(rank);
        if failure.gave_up {
            FabricError::Aborted { rank, host, cause: failure.cause }
        } else {
            FabricError::PeerLost { rank, host, operation, cause: failure.cause }
        }
    }

    pub fn host(&self, rank: usize) -> String {
        let hosts = self.hosts.lock().unwrap_or_else(PoisonError::into_inner);
        hosts.get(rank).map_or_else(|| "unknown host".to_owned(), String::clone)
    }

    pub fn depart(&self, rank: usize) {
        self.departed[rank].store(true, Ordering::Release);
    }

    pub fn has_departed(&self, rank: usize) -> bool {
        self.departed[rank].load(Ordering::Acquire)
    }
}

#[cfg(all(test, loom))]
mod model {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    #[test]
    fn the_first_failure_is_kept_and_whole() {
        loom::model(|| {
            let failure = |rank| Failure { rank, gave_up: false, cause: String::new() };
            let health = Arc::new(Health::new(3));
            let reporters = [1, 2].map(|rank| {
                let health = health.clone();
                thread::spawn(move || health.fail(failure(rank)))
            });
            // Whoever sees the flag finds a failure, and always the same.
            let early = health.has_failed().then(|| health.failure().expect("the failure behind the flag"));
            let firsts = reporters.map(|reporter| reporter.join().unwrap());
            assert_eq!(firsts.iter().filter(|&&first| first).count(), 1);
            let kept = health.failure().unwrap();
            assert!(early.is_none_or(|early| early == kept));
            assert_eq!(kept.rank, if firsts[0] { 1 } else { 2 });
        });
    }
}
