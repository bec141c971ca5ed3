//! The bell: how a rank that sleeps on shared memory is woken, without a system call while nobody sleeps.

use std::time::Duration;

use crate::sync::{AtomicU32, Ordering, fence};
#[cfg(not(loom))]
use crate::sys;

/// Lies in shared memory; all zero is a bell whose owner is awake.
#[repr(C)]
pub(crate) struct Bell {
    /// Not zero while the owner sleeps or is about to.
    sleeping: AtomicU32,
    /// Not zero if the owner, before it sleeps, has the system put a fence into every thread that may ring. Then ringing, which is
    /// done far more often, takes none.
    fences_for_peers: AtomicU32,
}

impl Bell {
    /// The owner's first use of the bell, before any peer knows of it.
    pub fn hang_up(&self) {
        self.fences_for_peers.store(u32::from(peers_fence()), Ordering::Relaxed);
    }

    /// The owner says that it is about to sleep. It must look for news once more before [`Bell::sleep`].
    pub fn announce_sleep(&self) {
        self.sleeping.store(1, Ordering::Relaxed);
        // Pairs with the fence in `ring`: either the peer sees the announcement, or the owner sees the peer's news.
        match self.fences_for_peers.load(Ordering::Relaxed) {
            0 => fence(Ordering::SeqCst),
            _ => fence_everywhere(),
        }
    }

    /// The owner sleeps until the bell rings, at most for `timeout`.
    pub fn sleep(&self, timeout: Duration) {
        #[cfg(not(loom))]
        sys::futex_wait(&self.sleeping, 1, timeout);
        #[cfg(loom)]
        let _ = timeout;
        self.stay_awake();
    }

    /// The owner takes the announcement back.
    pub fn stay_awake(&self) {
        self.sleeping.store(0, Ordering::Relaxed);
    }

    /// A peer wakes the owner if it sleeps; call it after making news visible. Returns whether it had to.
    pub fn ring(&self) -> bool {
        if self.fences_for_peers.load(Ordering::Relaxed) == 0 || !peers_fence() {
            fence(Ordering::SeqCst);
        }
        let asleep = self.sleeping.load(Ordering::Relaxed) != 0 && self.sleeping.swap(0, Ordering::Relaxed) != 0;
        #[cfg(not(loom))]
        if asleep {
            sys::futex_wake(&self.sleeping);
        }
        asleep
    }
}

/// Whether peers can put a fence into this process.
fn peers_fence() -> bool {
    #[cfg(not(loom))]
    return sys::joins_fences();
    #[cfg(loom)]
    false
}

fn fence_everywhere() {
    #[cfg(not(loom))]
    sys::fence_everywhere();
}

#[cfg(all(test, loom))]
mod model {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    #[test]
    fn no_news_is_slept_through() {
        loom::model(|| {
            let shared = Arc::new((
                Bell { sleeping: AtomicU32::new(0), fences_for_peers: AtomicU32::new(0) },
                AtomicU32::new(0),
            ));
            let peer = shared.clone();
            let ringing = thread::spawn(move || {
                peer.1.store(1, Ordering::Release);
                peer.0.ring()
            });
            shared.0.announce_sleep();
            let seen = shared.1.load(Ordering::Acquire) == 1;
            let rung = ringing.join().unwrap();
            assert!(seen || rung, "the owner went to sleep and nobody will wake it");
        });
    }
}
