//! Memory that several threads fill, and pages large enough that streaming it does not wait for translations.

use std::marker::PhantomData;

/// A slice that threads write to in parts that don't overlap.
#[derive(Clone, Copy)]
pub struct Disjoint<'a, T> {
    start: *mut T,
    len: usize,
    memory: PhantomData<&'a mut [T]>,
}

// SAFETY: the only access is `slice`, whose caller vouches that parts don't overlap.
unsafe impl<T: Send> Send for Disjoint<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    /// Takes the slice over for as long as threads write to it.
    pub fn new(memory: &'a mut [T]) -> Self {
        Self { start: memory.as_mut_ptr(), len: memory.len(), memory: PhantomData }
    }

    /// A part of the slice.
    ///
    /// # Safety
    /// No two parts that are alive at the same time overlap.
    ///
    /// # Panics
    /// If the part is not inside the slice.
    pub unsafe fn slice(&self, from: usize, len: usize) -> &'a mut [T] {
        assert!(from <= self.len && len <= self.len - from, "{from} + {len} of {}", self.len);
        // SAFETY: in bounds, and exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(from), len) }
    }
}

/// Asks for 2 MiB pages, before the memory is first written. Advice: what the system makes of it changes speed only.
#[cfg(target_os = "linux")]
pub fn advise_huge_pages(memory: &[u8]) {
    const PAGE_BYTES: usize = 4096;
    let skip = memory.as_ptr().align_offset(PAGE_BYTES);
    if memory.len() > skip + (2 << 20) {
        // SAFETY: the range lies inside the slice, and the advice changes no contents.
        unsafe {
            libc::madvise(memory.as_ptr().add(skip).cast_mut().cast(), memory.len() - skip, libc::MADV_HUGEPAGE);
        }
    }
}

/// Other systems choose page sizes themselves.
#[cfg(not(target_os = "linux"))]
pub fn advise_huge_pages(_memory: &[u8]) {}
