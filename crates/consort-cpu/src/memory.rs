//! Memory that several threads fill, and pages large enough that streaming it does not wait for translations.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use consort_compute::portable::{ALIGNMENT_BYTES, AlignedBytes};

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

/// Zero bytes for a weight. Small weights lie in a row, so that they have large pages too: most matrices of a small model, or of one
/// that is divided among many ranks, are smaller than such a page.
pub struct WeightMemory {
    region: Arc<Region>,
    from: usize,
    len: usize,
}

/// Memory of one large weight or of many small ones.
struct Region {
    start: *mut u8,
    /// What `start` points to; used through it alone.
    _memory: AlignedBytes,
}

// SAFETY: the memory is used only by `WeightMemory`, each of which has a part for itself.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    fn new(len: usize) -> Arc<Self> {
        let mut memory = AlignedBytes::zeroed(len);
        advise_huge_pages(&memory);
        Arc::new(Self { start: memory.as_mut_ptr(), _memory: memory })
    }
}

impl WeightMemory {
    /// Of a region for small weights: some pages, so that little is left over.
    const REGION_BYTES: usize = 32 << 20;
    /// Larger ones have a region each.
    const SMALL_BYTES: usize = 4 << 20;

    /// `len` zero bytes.
    pub fn zeroed(len: usize) -> Self {
        /// The region that has room, and how much of it is taken. It goes with the last of its weights.
        static OPEN: Mutex<(Weak<Region>, usize)> = Mutex::new((Weak::new(), 0));
        if len > Self::SMALL_BYTES {
            return Self { region: Region::new(len), from: 0, len };
        }
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let (region, from) = match open.0.upgrade() {
            Some(region) if Self::REGION_BYTES - open.1 >= len => (region, open.1),
            _ => (Region::new(Self::REGION_BYTES), 0),
        };
        *open = (Arc::downgrade(&region), (from + len).next_multiple_of(ALIGNMENT_BYTES));
        Self { region, from, len }
    }
}

impl Deref for WeightMemory {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: inside the region, which lives as long; nobody else has this part, which was handed out once.
        unsafe { std::slice::from_raw_parts(self.region.start.add(self.from), self.len) }
    }
}

impl DerefMut for WeightMemory {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.region.start.add(self.from), self.len) }
    }
}

impl std::fmt::Debug for WeightMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "WeightMemory({})", self.len)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_share_no_byte_and_begin_with_zeros() {
        let sizes = [1, 63, 64, 65, 1000, 3 << 20, 4 << 20, (4 << 20) + 1, 0, 100];
        for _ in 0..8 {
            let mut weights: Vec<_> = sizes.iter().map(|&len| WeightMemory::zeroed(len)).collect();
            for (value, weight) in (1..).zip(&mut weights) {
                assert!(weight.iter().all(|&byte| byte == 0));
                assert!(weight.is_empty() || weight.as_ptr().addr().is_multiple_of(ALIGNMENT_BYTES));
                weight.fill(value);
            }
            for ((value, weight), len) in (1..).zip(&weights).zip(sizes) {
                assert_eq!(weight.len(), len);
                assert!(weight.iter().all(|&byte| byte == value));
            }
        }
    }
}
