//! The operations that a forward pass is made of, the number formats that weights are stored in, and a plain portable
//! implementation that defines what each operation means.
//!
//! * [`Format`] and [`Matrix`]: how a weight is stored, one self-contained block after another.
//! * [`Backend`]: the operations, over buffers that may live on a device.
//! * [`Portable`]: every operation as plain loops. It is the definition that faster backends are tested against.
//!
//! This crate opens no files and no sockets.

mod backend;
pub mod decode;
mod encode;
mod format;
mod matrix;
pub mod portable;

pub use backend::{
    Activation, AttentionSpec, Backend, ComputeError, DeltaSpec, FILL_ROWS, KvFormat, KvSpec, NormGain, PairLayout,
    RopeSpec, RouteScore, RouteSpec, Run,
};
pub use format::{Format, ScaleFormat};
pub use matrix::Matrix;
pub use portable::Portable;
