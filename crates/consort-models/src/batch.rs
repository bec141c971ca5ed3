//! What one step runs.

use consort_compute::Run;

/// The tokens of one step, as a forward pass sees them.
#[derive(Clone, Debug)]
pub struct Batch<'a> {
    /// Token ids, one run after another, `[tokens]`.
    pub tokens: &'a [u32],
    /// Each token's position in its sequence, `[tokens]`.
    pub positions: &'a [u32],
    /// The runs.
    pub runs: &'a [BatchRun<'a>],
    /// Rows of the batch whose logits are wanted, ascending.
    pub logit_rows: &'a [u32],
}

/// One sequence's part of a step.
#[derive(Clone, Debug)]
pub struct BatchRun<'a> {
    /// The run with the block table of layers that see everything.
    pub full: Run<'a>,
    /// The same with the ring table of sliding-window layers.
    pub window: Run<'a>,
}
