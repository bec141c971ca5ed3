//! The rail: one byte pipe between two ranks. Everything above it (frames, deadlines, collectives, striping) is written once.

use std::io;
use std::os::fd::RawFd;

/// A byte pipe in both directions that never blocks. Bytes come out in the order in which they went in.
pub(crate) trait Rail: Send {
    /// Takes as many bytes of `header` followed by `payload` as there is room for; returns how many.
    fn try_send(&mut self, header: &[u8], payload: &[u8]) -> io::Result<usize>;

    /// Fills the start of `bytes` with what has arrived; returns how many. An ended pipe is an error, never `Ok(0)`.
    fn try_recv(&mut self, bytes: &mut [u8]) -> io::Result<usize>;

    /// What a long wait sleeps on: a descriptor, or `None` for shared memory, whose peers wake this rank themselves.
    fn descriptor(&self) -> Option<RawFd>;

    /// The next moment (of the machine's monotonic clock) at which this rail could go on without its descriptor saying so.
    fn busy_until_ns(&self) -> Option<u64> {
        None
    }

    /// The name in reports.
    fn transport(&self) -> &'static str;
}
