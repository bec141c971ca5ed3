//! From one command to many ranks: which hosts there are, how a rank is started on each, and what happens until all have ended.
//!
//! The process that the user starts is the *launcher*. It starts its own executable once per rank, on this machine or over
//! ssh, and tells each rank who it is through the environment ([`RankIdentity`]). Then it supervises ([`supervise`]): it relays
//! output, passes signals on, ends all ranks when one fails, and says which one that was and why. A rank never outlives its
//! launcher: its standard input is a control channel ([`ControlChannel`]) whose end ends the rank.

pub mod cables;
mod control;
pub mod doctor;
mod error;
mod foreign;
mod hostfile;
mod identity;
mod journal;
mod launch;
pub mod links;
mod relay;
mod supervise;

pub use control::ControlChannel;
pub use error::{ClusterError, RankFailure};
pub use hostfile::{Device, Host, Hostfile, LinkSpeed, assignment, parse_size};
pub use identity::RankIdentity;
pub use journal::Replay;
pub use launch::{Launch, RankCommand, settings};
pub use supervise::{EXIT_PEER_LOST, Input, Recovery, supervise};
