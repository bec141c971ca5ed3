//! A weight in host memory, as a checkpoint hands it to a backend.

use std::borrow::Cow;

use crate::Format;

/// A matrix `[rows, cols]` in its stored format: `y = x · Wᵀ` maps `cols` input features to `rows` output features.
///
/// Expert weights are one matrix with the experts stacked along the rows.
#[derive(Clone, Debug)]
pub struct Matrix<'a> {
    /// How the values are stored.
    pub format: Format,
    /// Output features.
    pub rows: usize,
    /// Input features. When not a multiple of the block, the rest of each row's last block is zero.
    pub cols: usize,
    /// `rows` × `format.row_bytes(cols)` bytes.
    pub data: Cow<'a, [u8]>,
    /// A factor for each row, `[rows]`: the global scale of NVFP4, the scale of per-tensor or per-channel FP8.
    pub row_scale: Option<Vec<f32>>,
}

impl<'a> Matrix<'a> {
    /// Wraps stored bytes.
    ///
    /// # Panics
    /// If `data` is not exactly `rows` rows long: whoever reads files checks sizes before this.
    pub fn new(format: Format, rows: usize, cols: usize, data: impl Into<Cow<'a, [u8]>>) -> Self {
        let data = data.into();
        assert_eq!(data.len(), rows * format.row_bytes(cols), "{format} matrix [{rows}, {cols}]");
        Self { format, rows, cols, data, row_scale: None }
    }

    /// The same matrix with a factor for each row.
    ///
    /// # Panics
    /// If there is not one factor for each row.
    pub fn with_row_scale(mut self, row_scale: Vec<f32>) -> Self {
        assert_eq!(row_scale.len(), self.rows, "one scale for each row");
        self.row_scale = Some(row_scale);
        self
    }

    /// The stored bytes of row `row`.
    pub fn row(&self, row: usize) -> &[u8] {
        let bytes = self.format.row_bytes(self.cols);
        &self.data[row * bytes..(row + 1) * bytes]
    }

    /// The same matrix with bytes of its own, copied if they were borrowed.
    pub fn into_owned(self) -> Matrix<'static> {
        Matrix { data: Cow::Owned(self.data.into_owned()), ..self }
    }

    /// Bytes that the matrix takes in its stored form.
    pub fn bytes(&self) -> usize {
        self.data.len() + self.row_scale.as_ref().map_or(0, |s| s.len() * 4)
    }
}
