//! Atomics and locks, or their model-checked twins: `RUSTFLAGS="--cfg loom" cargo test --release -p consort-fabric --lib model`
//! tries every order in which the threads of a model can run.

#[cfg(loom)]
pub(crate) use loom::sync::{
    Mutex,
    atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence},
};
#[cfg(not(loom))]
pub(crate) use std::sync::{
    Mutex,
    atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence},
};
