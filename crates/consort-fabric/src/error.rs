//! What can go wrong between ranks, in one place, so that every caller can tell a lost peer from a wrong call.

use std::time::Duration;

/// What went wrong between ranks. Every variant that concerns a peer names it.
#[derive(Clone, Debug, thiserror::Error)]
pub enum FabricError {
    /// A rank's process ended, its connection broke, or it fell silent.
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
    /// A rank said that it cannot go on.
    #[error("rank {rank} ({host}) gave up: {cause}")]
    Aborted {
        /// The rank that gave up.
        rank: usize,
        /// Its host, as the hello named it.
        host: String,
        /// Its own words.
        cause: String,
    },
    /// Peers are alive but did not take part in an operation in time.
    #[error("{operation} waited {} s for rank {rank} ({host}), which is alive but did not take part", waited.as_secs())]
    Deadline {
        /// What this rank was doing.
        operation: &'static str,
        /// The first rank that it waited for.
        rank: usize,
        /// Its host, as the hello named it.
        host: String,
        /// How long it waited.
        waited: Duration,
    },
    /// Two ranks differ in what must be equal.
    #[error("ranks disagree on {what}: {one}, {other}")]
    Disagreement {
        /// What differs.
        what: String,
        /// Rank 0 and its value.
        one: Box<Side>,
        /// The rank that differs and its value.
        other: Box<Side>,
    },
    /// A frame arrived that belongs to another operation than the one that this rank is in.
    #[error("rank {rank} ({host}) and this rank are in different operations: expected {expected}, received {received}")]
    FrameMismatch {
        /// The sender.
        rank: usize,
        /// Its host.
        host: String,
        /// The frame that this rank's operation needs.
        expected: String,
        /// The frame that came.
        received: String,
    },
    /// Rank 0 could not listen.
    #[error("cannot listen on {address}: {cause}; free the port or choose another")]
    Listen {
        /// The address.
        address: String,
        /// What the system said.
        cause: String,
    },
    /// A rank could not be reached.
    #[error("cannot reach rank {rank} at {address} within {} s: {cause}", waited.as_secs())]
    Unreachable {
        /// The rank.
        rank: usize,
        /// Where it should have been.
        address: String,
        /// How long this rank tried.
        waited: Duration,
        /// The last failure.
        cause: String,
    },
    /// Some ranks never came.
    #[error("{present} of {size} ranks came to {address} within {} s; missing: {missing:?}{remark}", waited.as_secs())]
    Missing {
        /// Ranks that came.
        present: usize,
        /// Ranks in all.
        size: usize,
        /// Where they were expected.
        address: String,
        /// How long rank 0 waited.
        waited: Duration,
        /// The ranks that did not come.
        missing: Vec<usize>,
        /// What may explain it, or nothing.
        remark: String,
    },
    /// Rank 0 refused this rank.
    #[error("rank 0 at {address} refused this rank: {cause}")]
    Refused {
        /// Where rank 0 listens.
        address: String,
        /// Its words.
        cause: String,
    },
    /// The set-up of the fabric failed.
    #[error("setting up the fabric: {0}")]
    Setup(String),
    /// A call or an option that cannot work.
    #[error("{0}")]
    Invalid(String),
}

/// One side of a disagreement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Side {
    /// The rank.
    pub rank: usize,
    /// Its host, as its hello named it.
    pub host: String,
    /// Its value.
    pub value: String,
}

impl std::fmt::Display for Side {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "rank {} ({}) has {}", self.rank, self.host, self.value)
    }
}
