//! The CPU backend: SIMD kernels, weight layouts, the thread pool.
//!
//! * [`Cpu`] is the [`Backend`](consort_compute::Backend): what a forward pass calls.
//! * [`isa`]: vector operations, and the choice among instruction sets.
//! * [`weight`]: how weights lie in memory, and how they are unpacked.
//! * [`product`]: matrix products, dense and by expert.
//! * [`pool`]: the threads.
//! * [`roofline`]: what this machine can do, to hold kernels and plans against.

mod activations;
mod affinity;
mod attention;
mod backend;
mod cache;
mod conv;
mod delta;
pub mod isa;
mod math;
mod memory;
mod microkernel;
pub mod pool;
pub mod product;
pub mod roofline;
mod rows;
pub mod weight;

pub use activations::Activations;
pub use affinity::{allowed_cores, pin};
pub use backend::{Cpu, CpuError, CpuOptions};
