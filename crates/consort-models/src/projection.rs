//! Linear layers.

use std::ops::Range;

use consort_compute::Backend;

use crate::{Loader, ModelError};

/// A linear layer with an optional bias.
pub(crate) struct Projection<B: Backend> {
    pub weight: B::Weight,
    pub bias: Option<B::Buffer>,
}

impl<B: Backend> Projection<B> {
    /// `out = x · wᵀ + bias`.
    pub(crate) fn apply(&self, b: &B, out: &mut B::Buffer, x: &B::Buffer) {
        b.matmul(out, x, &self.weight);
        if let Some(bias) = &self.bias {
            b.add_row(out, bias);
        }
    }

    /// Loads the output features `part` of `name`, whose weight is `[out, in]`.
    pub(crate) fn rows(
        loader: &mut Loader<'_, B>,
        name: &str,
        shape: [usize; 2],
        part: &Range<usize>,
        bias: bool,
    ) -> Result<Self, ModelError> {
        Self::segments(loader, name, shape, std::slice::from_ref(part), bias)
    }

    /// Loads several runs of output features of `name`, in order: this shard's part of each segment of a fused layer.
    pub(crate) fn segments(
        loader: &mut Loader<'_, B>,
        name: &str,
        shape: [usize; 2],
        parts: &[Range<usize>],
        bias: bool,
    ) -> Result<Self, ModelError> {
        let bias = match bias {
            true => Some(loader.table(&format!("{name}.bias"), &shape[..1], parts, 1)?),
            false => {
                loader.check_no_bias(name, shape[0])?;
                None
            }
        };
        Ok(Self { weight: loader.matrix(&[&format!("{name}.weight")], &shape, parts, None)?, bias })
    }

    /// Loads the input features `part` of `name`. The bias belongs to the sum, so only the first shard adds it.
    pub(crate) fn columns(
        loader: &mut Loader<'_, B>,
        name: &str,
        shape: [usize; 2],
        part: &Range<usize>,
        bias: bool,
    ) -> Result<Self, ModelError> {
        if !bias {
            loader.check_no_bias(name, shape[0])?;
        }
        let bias = bias && loader.placement.shard == 0;
        Ok(Self {
            weight: loader.columns(&format!("{name}.weight"), shape, part)?,
            bias: bias.then(|| loader.vector(&format!("{name}.bias"), shape[0])).transpose()?,
        })
    }
}
