//! The rail: one byte pipe between two ranks. Everything above it (frames, deadlines, collectives, striping) is written once.

use std::io;
use std::os::fd::RawFd;
use std::time::Duration;

use crate::vigil::Vigil;

/// What ends a sleep when there is news.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wake {
    /// The descriptor becomes ready.
    Descriptor(RawFd),
    /// The peer wakes this rank through its shared region.
    Bell,
    /// Nothing: look again after a while.
    Look,
}

/// A byte pipe in both directions that never blocks. Bytes come out in the order in which they went in.
pub(crate) trait Rail: Send {
    /// Takes as many bytes of `header` followed by `payload` as there is room for; returns how many.
    fn try_send(&mut self, header: &[u8], payload: &[u8]) -> io::Result<usize>;

    /// Fills the start of `bytes` with what has arrived; returns how many. An ended pipe is an error, never `Ok(0)`.
    fn try_recv(&mut self, bytes: &mut [u8]) -> io::Result<usize>;

    /// The next byte to be sent, or to be received, is a frame's first: a rail that is read in place aligns it. False if nothing
    /// has come yet.
    fn begin_frame(&mut self, _sending: bool) -> io::Result<bool> {
        Ok(true)
    }

    /// Whether what arrives can be read where it lies. Then [`Rail::look`], [`Rail::arrived`] and [`Rail::consume`] do that.
    fn reads_in_place(&self) -> bool {
        false
    }

    /// How many bytes lie in one piece, at most `wanted`.
    fn look(&mut self, _wanted: usize) -> io::Result<usize> {
        Ok(0)
    }

    /// The next `length` bytes, no more than [`Rail::look`] found.
    fn arrived(&self, _length: usize) -> &[u8] {
        &[]
    }

    /// These bytes have been read.
    fn consume(&mut self, _length: usize) -> io::Result<()> {
        Ok(())
    }

    /// What a long wait sleeps on.
    fn wake(&self) -> Wake;

    /// The next moment (of the machine's monotonic clock) at which this rail could go on without its descriptor saying so.
    fn busy_until_ns(&self) -> Option<u64> {
        None
    }

    /// Whether the pipe still holds, without reading from it: an error if it is known to be broken, or if its peer's machine has
    /// owed an answer for `silence`.
    fn check(&self, _silence: Duration) -> io::Result<()> {
        Ok(())
    }

    /// Whether the peer's leaving comes as an error of [`Rail::try_recv`], after all that it sent: its goodbye on another way may be
    /// faster and means nothing for this rail.
    fn ends_in_band(&self) -> bool {
        false
    }

    /// Waits a little, until what was sent has left this process for good: only then may the rail be dropped in good order.
    fn finish(&mut self) {}

    /// The name in reports.
    fn transport(&self) -> &'static str;
}

/// Sends all of `bytes`, outside of any frame: for what two ends agree on at set-up.
pub(crate) fn send_whole(rail: &mut dyn Rail, bytes: &[u8], vigil: Vigil) -> io::Result<()> {
    repeat(bytes.len(), vigil, |done| rail.try_send(&[], &bytes[done..]))
}

/// Fills `bytes`, outside of any frame.
pub(crate) fn receive_whole(rail: &mut dyn Rail, bytes: &mut [u8], vigil: Vigil) -> io::Result<()> {
    repeat(bytes.len(), vigil, |done| rail.try_recv(&mut bytes[done..]))
}

fn repeat(total: usize, vigil: Vigil, mut step: impl FnMut(usize) -> io::Result<usize>) -> io::Result<()> {
    let mut done = 0;
    while done < total {
        let count = step(done)?;
        done += count;
        if count == 0 {
            vigil.check_io()?;
            if vigil.is_over() {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "a rail carries nothing; is it connected?"));
            }
            std::thread::sleep(Duration::from_micros(20));
        }
    }
    Ok(())
}
