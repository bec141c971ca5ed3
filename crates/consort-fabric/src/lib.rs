//! Bytes between ranks: transports (shared memory, TCP, RDMA), rails, groups, collectives, liveness, handshake.
//!
//! A rank calls [`Fabric::connect`] once, takes the [`Group`]s that its plan needs, and calls their collectives. Every call
//! has a deadline and ends early when any rank of the fabric is lost. This crate knows nothing of models.
//!
//! From the bottom: `rail` is one byte pipe between two ranks; `link` cuts messages into frames over a link's rails;
//! `links` waits for several links at once, with deadlines and the abort word; `collective` is what groups do with that.
//! Beside them, `rendezvous` makes the connections and `monitor` watches that all ranks live.

mod background;
mod bell;
mod carrier;
mod channel;
mod cipher;
mod collective;
#[cfg(test)]
mod corpus;
mod element;
mod emulate;
mod error;
mod fabric;
mod frame;
mod group;
mod health;
mod key;
mod ledger;
mod line;
mod link;
mod links;
mod monitor;
pub mod netbench;
mod port;
mod probe;
mod rail;
mod rdma;
mod receiving;
mod reception;
mod reduce;
mod relay;
mod rendezvous;
mod ring;
mod shm;
mod stores;
mod sync;
mod sys;
mod tcp;
mod topology;
mod vigil;
mod waiting;
mod wiring;

pub use background::Pending;
pub use element::{Element, Plain};
pub use emulate::{EmulatedLink, LinkedRanks};
pub use error::{FabricError, Side};
pub use fabric::{Agreement, Fabric, FabricOptions, Peer, TransportChoice, Wire};
pub use frame::Operation;
pub use group::{Counter, Group};
pub use key::ClusterKey;
pub use port::ReservedPort;
pub use rdma::{RdmaDevice, rdma_devices};
pub use topology::Algorithm;

/// Entry points of the fuzz targets (`fuzz/`): decoders of what peers send.
#[cfg(any(fuzzing, test))]
#[doc(hidden)]
pub mod fuzzing {
    /// Decodes `bytes` as a control message, as a frame header and as the header of a chunk that is passed on; none may panic. Returns
    /// which of them it is.
    pub fn decode(bytes: &[u8]) -> [bool; 3] {
        let message = matches!(crate::channel::decode(bytes), Ok(Some(_)));
        let frame = bytes.first_chunk().and_then(|header| {
            let frame = crate::frame::Frame::decode(header).ok()?;
            assert!(frame.offset + frame.segment <= frame.message.length);
            assert_eq!(&frame.encode(), header);
            Some(frame)
        });
        let chunk = bytes.first_chunk().and_then(|header| {
            let (chunk, flow) = crate::relay::Chunk::decode(header)?;
            assert_eq!(&chunk.encode(flow), header);
            Some(chunk)
        });
        [message, frame.is_some(), chunk.is_some()]
    }
}
