//! What can go wrong between a config and a forward pass.

use consort_checkpoint::CheckpointError;
use consort_compute::ComputeError;
use consort_fabric::FabricError;

/// An error of this crate. Each names the key, the weight or the plan that it is about.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A key that the architecture needs is absent.
    #[error("{key} is missing")]
    MissingKey {
        /// The key and where it belongs: [`crate::Config::place`].
        key: String,
    },
    /// A key holds something that cannot be meant.
    #[error("{key} = {value}: expected {expected}")]
    BadKey {
        /// The key and where it is: [`crate::Config::place`].
        key: String,
        /// What it holds.
        value: String,
        /// What would be right.
        expected: String,
    },
    /// No file of this crate runs this architecture.
    #[error("architecture {name:?} is not supported; supported are {supported}")]
    UnknownArchitecture {
        /// `model_type` of the config.
        name: String,
        /// The supported ones.
        supported: String,
    },
    /// The config asks for something that the architecture's file does not do.
    #[error("{architecture}: {feature} is not implemented")]
    Unsupported {
        /// The architecture.
        architecture: String,
        /// The feature, with its key and value.
        feature: String,
    },
    /// A weight is absent.
    #[error("weight {name:?} is missing from the checkpoint")]
    MissingWeight {
        /// The weight.
        name: String,
    },
    /// A weight has another shape than the config says.
    #[error("weight {name:?} has shape {found:?}; the config says {expected:?}")]
    WeightShape {
        /// The weight.
        name: String,
        /// Its shape in the checkpoint.
        found: Vec<usize>,
        /// The shape that follows from the config.
        expected: Vec<usize>,
    },
    /// A number of the config contradicts a weight.
    #[error("{key} = {value}: weight {name:?} has shape {found:?}, not {expected:?}")]
    Contradicts {
        /// The key and where it is: [`crate::Config::place`].
        key: String,
        /// What it holds.
        value: String,
        /// The weight.
        name: String,
        /// Its shape in the checkpoint.
        found: Vec<usize>,
        /// The shape that follows from the number.
        expected: Vec<usize>,
    },
    /// A weight that a model of this config has no use for: it is the config of another model.
    #[error("weight {name:?} is in the checkpoint, but {reason}; this is the configuration of another model")]
    UnusedWeight {
        /// The weight.
        name: String,
        /// The key that contradicts it, where that is known.
        reason: String,
    },
    /// A plan does not fit the model.
    #[error("plan {plan}: {reason}")]
    PlanDoesNotFit {
        /// The plan.
        plan: String,
        /// Why, with the numbers and the remedy.
        reason: String,
    },
    /// The model's files.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The other ranks.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// The device.
    #[error(transparent)]
    Compute(#[from] ComputeError),
}
