//! RDMA as a rail: `libibverbs` on Linux (RoCE, InfiniBand, iWARP), `librdma.dylib` on macOS (Thunderbolt 5), opened at run
//! time, so that one build runs with and without them.
//!
//! Sends and receives only, which is what all devices offer, over reliable queue pairs where the device has them and
//! unreliable ones elsewhere.

mod device;
#[cfg(test)]
mod double;
mod queues;
mod rail;
mod setup;
#[cfg(test)]
mod tests;
mod verbs;

pub(crate) use device::Device;
pub use device::{RdmaDevice, rdma_devices};
pub(crate) use rail::RAIL_BYTES;
pub(crate) use setup::connect;
pub(crate) use verbs::Verbs;
