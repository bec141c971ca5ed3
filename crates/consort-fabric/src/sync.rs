//! Atomics and locks, or their model-checked twins, with which `consort-fabric-model` compiles what uses them.

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
