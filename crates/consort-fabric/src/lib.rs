//! Bytes between ranks: transports (shared memory, TCP, RDMA), rails, groups, collectives, liveness, handshake.
//!
//! A rank calls [`Fabric::connect`] once, takes the [`Group`]s that its plan needs, and calls their collectives. Every call
//! has a deadline and ends early when any rank of the fabric is lost. This crate knows nothing of models.

use std::time::Duration;

/// What went wrong between ranks. Every variant that concerns a peer names it.
#[derive(Debug, thiserror::Error)]
pub enum FabricError {
    /// A rank's process ended or its connection broke.
    #[error("rank {rank} ({host}) was lost during {operation}: {cause}")]
    PeerLost {
        /// The lost rank.
        rank: usize,
        /// Its host, as the hello named it.
        host: String,
        /// What this rank was doing.
        operation: &'static str,
        /// What was seen.
        cause: String,
    },
}

/// Which transport carries data between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum TransportChoice {
    /// The fastest that a link offers.
    #[default]
    Auto,
    /// Shared memory: ranks on one machine.
    Shm,
    /// TCP.
    Tcp,
}

/// What must be equal on all ranks before they work together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Agreement {
    /// `(what, value)`: version, plan hash, manifest hash, settings. Compared in order; the first difference refuses the run.
    pub items: Vec<(String, String)>,
}

/// How a rank finds the others.
#[derive(Clone, Debug)]
pub struct FabricOptions {
    /// This rank.
    pub rank: usize,
    /// Ranks in all.
    pub size: usize,
    /// `host:port` on which rank 0 listens.
    pub rendezvous: String,
    /// This rank's host name, for messages.
    pub host: String,
    /// Names the run: two runs on one machine never mix.
    pub run_id: String,
    /// Which transport to use.
    pub transport: TransportChoice,
    /// Silence after which a peer counts as lost.
    pub hang_timeout: Duration,
    /// What must be equal on all ranks.
    pub agreement: Agreement,
}

/// This rank's connections to all others.
pub struct Fabric;

impl Fabric {
    /// Meets the other ranks, compares agreements, and sets up the data transports.
    pub fn connect(_options: FabricOptions) -> Result<Self, FabricError> {
        todo!()
    }
    /// The group of all ranks.
    pub fn world(&self) -> Group {
        todo!()
    }
    /// An ordered subset of ranks that does collectives together. Every member must ask for the same groups in the same order.
    pub fn group(&self, _ranks: &[usize]) -> Result<Group, FabricError> {
        todo!()
    }
    /// Tells all ranks that this one cannot go on, and why.
    pub fn abort(&self, _cause: &str) {}
}

/// An ordered subset of ranks that does collectives together. Calls are made by one thread at a time.
pub struct Group;

impl Group {
    /// The group of one rank: every collective returns at once.
    pub fn solo() -> Self {
        Self
    }
    /// This rank's place in the group.
    pub fn rank(&self) -> usize {
        0
    }
    /// Members of the group.
    pub fn size(&self) -> usize {
        1
    }
    /// The name of the transport in use, for reports: `shm`, `tcp`, `rdma`, `none`.
    pub fn transport(&self) -> &'static str {
        "none"
    }
    /// Sums `values` over the group, in rank order, so that all members hold the same bits.
    pub fn all_reduce(&self, _values: &mut [f32]) -> Result<(), FabricError> {
        Ok(())
    }
    /// `values` is cut into one part per member, of the given lengths; this rank's part is filled in, the others arrive.
    pub fn all_gather(&self, _values: &mut [f32], _lengths: &[usize]) -> Result<(), FabricError> {
        Ok(())
    }
    /// Sums `values` in rank order and leaves each member its own part summed, of the given lengths; the rest is unspecified.
    pub fn reduce_scatter(&self, _values: &mut [f32], _lengths: &[usize]) -> Result<(), FabricError> {
        Ok(())
    }
    /// Sends `message` from `root` to all; elsewhere it is replaced (it may grow). With `idle`, a receiver waits as long as
    /// the fabric lives, and parks: for the step log between requests.
    pub fn broadcast(&self, _root: usize, _message: &mut Vec<u8>, _idle: bool) -> Result<(), FabricError> {
        Ok(())
    }
    /// Returns when every member has called it.
    pub fn barrier(&self) -> Result<(), FabricError> {
        Ok(())
    }
    /// Sends values to a member; returns when `values` may be reused.
    pub fn send(&self, _to: usize, _values: &[f32]) -> Result<(), FabricError> {
        Ok(())
    }
    /// Receives exactly `values.len()` values from a member.
    pub fn recv(&self, _from: usize, _values: &mut [f32]) -> Result<(), FabricError> {
        Ok(())
    }
}
