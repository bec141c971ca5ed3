//! Which core a thread runs on.
//!
//! Threads that wait for each other every few microseconds must not share a core, and a scheduler that sees them sleep and
//! wake often packs them together. So each is pinned, within the set of cores that the process was given.

use std::cell::Cell;
use std::num::NonZero;
use std::sync::OnceLock;
use std::thread::available_parallelism;

/// The cores that this process may run on, in ascending order, as they were when first asked for: later, the asking thread
/// may be pinned.
pub fn allowed_cores() -> &'static [usize] {
    static CORES: OnceLock<Vec<usize>> = OnceLock::new();
    CORES.get_or_init(|| allowed().unwrap_or_else(|| (0..available_parallelism().map_or(1, NonZero::get)).collect()))
}

#[cfg(target_os = "linux")]
fn allowed() -> Option<Vec<usize>> {
    // SAFETY: an all-zero set is a valid value, and the size passed is the size of the set.
    let set = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if libc::sched_getaffinity(0, size_of_val(&set), &mut set) != 0 {
            return None;
        }
        set
    };
    // SAFETY: the indices are below the capacity of the set.
    Some((0..libc::CPU_SETSIZE as usize).filter(|&core| unsafe { libc::CPU_ISSET(core, &set) }).collect())
}

#[cfg(not(target_os = "linux"))]
fn allowed() -> Option<Vec<usize>> {
    None
}

/// Pins the calling thread. A core that the system refuses leaves the thread where it is: slower, not wrong.
#[cfg(target_os = "linux")]
pub fn pin(core: usize) {
    if core >= libc::CPU_SETSIZE as usize {
        return;
    }
    // SAFETY: the core is below the capacity of the set, and 0 names the calling thread.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(core, &mut set);
        libc::sched_setaffinity(0, size_of_val(&set), &set);
    }
}

/// Systems without a call for it schedule as they like.
#[cfg(not(target_os = "linux"))]
pub fn pin(_core: usize) {}

/// Pins the calling thread to the first of `cores`, the first time that it asks.
pub fn pin_once(cores: &[usize]) {
    thread_local!(static PINNED: Cell<Option<usize>> = const { Cell::new(None) });
    if let Some(&core) = cores.first()
        && PINNED.get() != Some(core)
    {
        pin(core);
        PINNED.set(Some(core));
    }
}
