//! Writing into memory that another core has read last.
//!
//! A plain store must first take its cache line away from the reader. Where that is quick, the reader then finds the bytes in the
//! writer's cache; between cores that are far apart (of different core complexes, say) it takes longer than all the rest. Stores
//! past the caches take nothing away, and the reader gets the bytes from memory. Which is better depends on where the system has put
//! the two ranks, and may change: so plain stores are timed, and others used for a while where they were slow.

use std::time::{Duration, Instant};

/// Shorter runs are always written plainly: the reader wants them at once.
const TIMED_FROM_BYTES: usize = 8 << 10;
/// Plain stores that take so long for a cache line are slow: near cores take 6 ns, far ones 26 (AMD Zen 4).
const SLOW_LINE: Duration = Duration::from_nanos(12);
const LINE_BYTES: u32 = 64;
/// Runs that are written past the caches before a plain one is timed again.
const STREAMED_RUNS: u32 = 64;

/// How one writer stores.
#[derive(Default)]
pub(crate) struct Stores {
    /// Runs still to be written past the caches.
    streamed_left: u32,
}

impl Stores {
    /// Copies `source` to `target`.
    ///
    /// # Safety
    /// There are as many writable bytes at `target`, which nobody else uses meanwhile.
    pub unsafe fn write(&mut self, target: *mut u8, source: &[u8]) {
        // SAFETY: promised by the caller, in all three cases.
        unsafe {
            if source.len() < TIMED_FROM_BYTES {
                std::ptr::copy_nonoverlapping(source.as_ptr(), target, source.len());
            } else if self.streamed_left > 0 {
                self.streamed_left -= 1;
                stream(target, source);
            } else {
                let start = Instant::now();
                std::ptr::copy_nonoverlapping(source.as_ptr(), target, source.len());
                if start.elapsed() > SLOW_LINE * (source.len() as u32 / LINE_BYTES) {
                    self.streamed_left = STREAMED_RUNS;
                }
            }
        }
    }
}

/// Copies `source` to `target` past the caches. Stores that follow are seen after it.
///
/// # Safety
/// There are as many writable bytes at `target`, which nobody else uses meanwhile.
#[cfg(target_arch = "x86_64")]
unsafe fn stream(target: *mut u8, source: &[u8]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    let (head, rest) = source.split_at(target.align_offset(size_of::<__m128i>()).min(source.len()));
    let (middle, tail) = rest.as_chunks::<{ size_of::<__m128i>() }>();
    // SAFETY: the three parts lie one after another within the bytes that the caller promised, and the middle one is aligned.
    unsafe {
        std::ptr::copy_nonoverlapping(head.as_ptr(), target, head.len());
        let target = target.add(head.len());
        for (at, chunk) in middle.iter().enumerate() {
            _mm_stream_si128(target.cast::<__m128i>().add(at), _mm_loadu_si128(chunk.as_ptr().cast()));
        }
        std::ptr::copy_nonoverlapping(tail.as_ptr(), target.add(size_of_val(middle)), tail.len());
        _mm_sfence();
    }
}

/// See above: elsewhere stores are left to the system's own copy.
///
/// # Safety
/// There are as many writable bytes at `target`, which nobody else uses meanwhile.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn stream(target: *mut u8, source: &[u8]) {
    // SAFETY: promised by the caller.
    unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), target, source.len()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_write_the_same_bytes_wherever_they_begin() {
        let source: Vec<u8> = (0..20_000).map(|at| (at * 31 % 251) as u8).collect();
        for (start, length) in [(0, 8192), (1, 8192), (15, 8193), (16, 16_384), (63, 9999), (5, 0), (7, 3)] {
            for streamed_left in [0, 1] {
                let mut target = vec![0xEE; 20_100];
                let mut stores = Stores { streamed_left };
                // SAFETY: the target is long enough for the longest run behind the last start.
                unsafe { stores.write(target.as_mut_ptr().add(start), &source[start..start + length]) };
                assert!(target[start..start + length] == source[start..start + length], "{length} bytes at {start}");
                assert!(target[..start].iter().chain(&target[start + length..]).all(|&byte| byte == 0xEE));
            }
        }
    }
}
