//! RDMA as a rail: `libibverbs` on Linux (RoCE, InfiniBand, iWARP), `librdma.dylib` on macOS (Thunderbolt 5), opened at run
//! time, so that one build runs with and without them.
//!
//! Sends and receives only, which is what all devices offer, over reliable queue pairs where the device has them and
//! unreliable ones elsewhere.

mod device;
mod rail;
mod verbs;

pub(crate) use device::Device;
pub(crate) use rail::{RAIL_BYTES, connect};
