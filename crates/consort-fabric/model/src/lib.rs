//! The parts of the fabric that several threads or processes use at once, compiled with loom's atomics: their tests try every order
//! in which the threads of a model can run (`cargo test --release -p consort-fabric-model`).
//!
//! A crate of its own, so that nothing else is compiled again for it.
#![cfg(test)]
#![allow(dead_code)] // The models use a part of each.

#[path = "../../src/bell.rs"]
mod bell;
#[path = "../../src/error.rs"]
mod error;
#[path = "../../src/health.rs"]
mod health;
#[path = "../../src/ring.rs"]
mod ring;
#[path = "../../src/stores.rs"]
mod stores;
#[path = "../../src/sync.rs"]
mod sync;

use error::FabricError;
