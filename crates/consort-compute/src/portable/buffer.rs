//! Buffers in host memory. Every backend that computes on host memory shares them, so that results can be compared and
//! collectives reach them in place.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error},
    fmt,
    ops::{Deref, DerefMut},
    ptr::NonNull,
    slice,
    sync::atomic::{AtomicU64, Ordering},
};

/// Where a buffer starts: a cache line, which is also the widest vector register.
pub const ALIGNMENT_BYTES: usize = 64;
/// Bytes of the pages that systems keep for large memory.
const LARGE_PAGE_BYTES: usize = 2 << 20;

/// A fixed number of bytes, zero at first, that start at a multiple of [`ALIGNMENT_BYTES`]. The operating system provides
/// pages of a large one only when they are first written, so a cache may be reserved at full size.
pub struct AlignedBytes {
    start: NonNull<u8>,
    len: usize,
    /// What was allocated: the bytes and room to align them in.
    allocation: NonNull<u8>,
}

impl AlignedBytes {
    /// `len` zero bytes.
    pub fn zeroed(len: usize) -> Self {
        let layout = Self::layout(len);
        // Asked for an alignment, an allocator may write the zeros itself, and so touch every page: we align.
        // SAFETY: the layout's size is not zero, as there is always room to align in.
        let allocation = NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap_or_else(|| handle_alloc_error(layout));
        let skip = allocation.align_offset(Self::alignment(len));
        // SAFETY: the allocation has room for the skipped bytes.
        Self { start: unsafe { allocation.add(skip) }, len, allocation }
    }

    /// Where `len` bytes begin: large ones where a large page may.
    const fn alignment(len: usize) -> usize {
        if len < LARGE_PAGE_BYTES { ALIGNMENT_BYTES } else { LARGE_PAGE_BYTES }
    }

    fn layout(len: usize) -> Layout {
        let bytes = len.checked_add(Self::alignment(len)).expect("a buffer is smaller than the address space");
        Layout::array::<u8>(bytes).expect("a buffer is smaller than the address space")
    }

    /// The bytes as f32 values; a rest of fewer than four bytes is left out.
    pub fn as_f32(&self) -> &[f32] {
        // SAFETY: the memory is initialized, aligned for f32, lives as long as `self`, and every bit pattern is an f32.
        unsafe { slice::from_raw_parts(self.start.as_ptr().cast(), self.len / 4) }
    }

    /// The same, to change.
    pub fn as_f32_mut(&mut self) -> &mut [f32] {
        // SAFETY: as in `as_f32`; `&mut self` makes the access exclusive.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr().cast(), self.len / 4) }
    }
}

// SAFETY: the memory belongs to this value alone, like a `Box<[u8]>`.
unsafe impl Send for AlignedBytes {}
// SAFETY: shared access only reads.
unsafe impl Sync for AlignedBytes {}

impl Drop for AlignedBytes {
    fn drop(&mut self) {
        // SAFETY: `zeroed` allocated this with the same layout.
        unsafe { dealloc(self.allocation.as_ptr(), Self::layout(self.len)) }
    }
}

impl Deref for AlignedBytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the memory is initialized and lives as long as `self`.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for AlignedBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; `&mut self` makes the access exclusive.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Clone for AlignedBytes {
    fn clone(&self) -> Self {
        let mut copy = Self::zeroed(self.len);
        copy.copy_from_slice(self);
        copy
    }
}

impl fmt::Debug for AlignedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AlignedBytes({})", self.len)
    }
}

/// A number that no buffer has had before.
fn next_version() -> u64 {
    static VERSIONS: AtomicU64 = AtomicU64::new(0);
    VERSIONS.fetch_add(1, Ordering::Relaxed)
}

/// A matrix of f32 activations `[rows, cols]`, row-major and without gaps, in memory of fixed capacity.
#[derive(Clone, Debug)]
pub struct HostBuffer {
    memory: AlignedBytes,
    rows: usize,
    cols: usize,
    version: u64,
}

impl HostBuffer {
    /// A buffer with room for `capacity` values, shaped `[0, 0]`.
    pub fn with_capacity(capacity: usize) -> Self {
        Self { memory: AlignedBytes::zeroed(capacity * size_of::<f32>()), rows: 0, cols: 0, version: next_version() }
    }

    /// Two buffers of one version and one shape hold the same values: what was computed from one stands for the other. Every
    /// access that could change a value makes a new version.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// A buffer that holds `values` and has no room for more.
    ///
    /// # Panics
    /// If there are not `rows · cols` values.
    pub fn from_values(rows: usize, cols: usize, values: &[f32]) -> Self {
        let mut buffer = Self::with_capacity(values.len());
        buffer.upload(rows, cols, values);
        buffer
    }

    /// Values that fit.
    pub fn capacity(&self) -> usize {
        self.memory.as_f32().len()
    }

    /// Tokens, as a rule.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Features.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// `(rows, cols)`.
    pub fn shape(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }

    /// Gives the buffer another shape; what it holds is then unspecified.
    ///
    /// # Panics
    /// If the shape does not fit the capacity: operations never grow a buffer.
    pub fn reshape(&mut self, rows: usize, cols: usize) {
        let capacity = self.capacity();
        assert!(rows * cols <= capacity, "[{rows}, {cols}] does not fit a buffer of {capacity} values");
        (self.rows, self.cols) = (rows, cols);
    }

    /// Copies values in and shapes the buffer.
    ///
    /// # Panics
    /// If there are not `rows · cols` values, or if they don't fit.
    pub fn upload(&mut self, rows: usize, cols: usize, values: &[f32]) {
        self.reshape(rows, cols);
        self.values_mut().copy_from_slice(values);
    }

    /// Copies another buffer's shape and values.
    pub fn copy_from(&mut self, other: &Self) {
        self.upload(other.rows, other.cols, other.values());
    }

    /// All values.
    pub fn values(&self) -> &[f32] {
        &self.memory.as_f32()[..self.rows * self.cols]
    }

    /// All values, to change.
    pub fn values_mut(&mut self) -> &mut [f32] {
        self.version = next_version();
        &mut self.memory.as_f32_mut()[..self.rows * self.cols]
    }

    /// The values of one row.
    pub fn row(&self, row: usize) -> &[f32] {
        &self.values()[row * self.cols..][..self.cols]
    }

    /// The values of one row, to change.
    pub fn row_mut(&mut self, row: usize) -> &mut [f32] {
        let cols = self.cols;
        &mut self.values_mut()[row * cols..][..cols]
    }
}
