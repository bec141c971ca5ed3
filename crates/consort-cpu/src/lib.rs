//! The CPU backend: SIMD kernels, weight layouts, the thread pool.
