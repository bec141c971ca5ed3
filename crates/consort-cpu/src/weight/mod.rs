//! Weights in the layout that the kernels stream.
//!
//! A weight is cut into **panels** of 16 output features, and a panel into **tiles** of 32 to 256 input features. A tile
//! holds all that is needed to decode it, from front to back as the kernel reads it: the scales of its 16 rows side by side,
//! then their values side by side, so that a vector register holds 16 rows and a product needs no sum across lanes.
//!
//! ```text
//! panel 0: [tile 0][tile 1] .. panel 1: [tile 0][tile 1] ..
//! tile:    [scale of rows 0-15] [bias of rows 0-15] [values of rows 0-15, input features in order]
//! ```
//!
//! F32 and F16 lie feature by feature, BF16 in pairs of features and bytes in quads of them, as products read them.

mod layout;
pub mod numbers;
mod pack;
pub mod scales;
mod split;
#[cfg(target_arch = "x86_64")]
mod tiles;
mod unpack;

use consort_compute::{Format, Matrix};

use crate::isa::LANES;
use crate::memory::WeightMemory;
use crate::pool::Pool;

pub use layout::{Codes, Integers, Layout, Number, STEP, Scales};
pub use numbers::{LoadNumber, LoadQuad};
#[cfg(target_arch = "x86_64")]
pub use tiles::{TileChunk, split as split_activations};
pub use unpack::{
    CHUNK, Factors, FloatChunk, GROUPS, IntegerChunk, QUADS, columns_of_quad, piece, unpack_bits, unpack_step,
};

/// Raised whenever the meaning of a packed weight's bytes changes: stored ones of another version are not read.
pub const LAYOUT_VERSION: u32 = 3;

/// How far ahead of its use memory is asked for, at least: far enough to hide the way from memory, near enough to stay in the
/// first-level cache until then.
pub const AHEAD_BYTES: usize = 4096;

/// A weight `[rows, cols]`, laid out for the kernels.
#[derive(Debug)]
pub struct PackedWeight {
    rows: usize,
    cols: usize,
    layout: Layout,
    data: WeightMemory,
    /// A factor for each row, padded to whole panels; empty when all are 1.
    row_scale: Vec<f32>,
}

impl PackedWeight {
    /// Room for a weight; every value is zero.
    pub fn empty(format: Format, rows: usize, cols: usize) -> Self {
        let layout = Layout::of(format);
        let data = WeightMemory::zeroed(rows.div_ceil(LANES) * cols.div_ceil(layout.block) * layout.tile_bytes);
        Self { rows, cols, layout, data, row_scale: Vec::new() }
    }

    /// Lays a matrix out.
    pub fn new(matrix: &Matrix<'_>, pool: &Pool) -> Self {
        let mut weight = Self::empty(matrix.format, matrix.rows, matrix.cols);
        weight.fill(0, matrix, pool);
        weight
    }

    /// Lays `piece` out: the rows from `first_row` on, with which a panel begins.
    pub fn fill(&mut self, first_row: usize, piece: &Matrix<'_>, pool: &Pool) {
        pack::pack(self, first_row, piece, pool);
    }

    /// The tiles, and the factors of the rows, with room for them if `row_scale`.
    pub fn memory(&mut self, row_scale: bool) -> [&mut [u8]; 2] {
        if row_scale {
            self.row_scale.resize(self.rows.next_multiple_of(LANES), 0.0);
        }
        [&mut self.data, bytemuck::cast_slice_mut(&mut self.row_scale)]
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// How the values are stored.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Bytes that the weight takes.
    pub fn bytes(&self) -> usize {
        self.data.len() + size_of_val(&*self.row_scale)
    }

    /// Bytes from one panel to the next.
    pub fn panel_bytes(&self) -> usize {
        self.cols.div_ceil(self.layout.block) * self.layout.tile_bytes
    }

    /// The tiles of panel `panel`.
    pub fn panel(&self, panel: usize) -> &[u8] {
        &self.data[panel * self.panel_bytes()..][..self.panel_bytes()]
    }

    /// The tiles of panel `panel` that hold chunk `chunk` of the input features, and as many bytes of what comes
    /// later: what to ask memory for in the meantime.
    pub fn chunk(&self, panel: usize, chunk: usize) -> (&[u8], &[u8]) {
        let tiles = self.cols.div_ceil(self.layout.block);
        let tiles_of_chunk = CHUNK / self.layout.block;
        let first = chunk * tiles_of_chunk;
        let last = tiles.min(first + tiles_of_chunk);
        let bytes = self.layout.tile_bytes;
        let (_, rest) = self.data.split_at((panel * tiles + first) * bytes);
        let (chunk, rest) = rest.split_at((last - first) * bytes);
        let ahead = &rest[rest.len().min(AHEAD_BYTES.saturating_sub(chunk.len()))..];
        (chunk, &ahead[..ahead.len().min(chunk.len())])
    }

    /// The factors of a panel's rows, if they have any.
    pub fn panel_scale(&self, panel: usize) -> Option<&[f32; LANES]> {
        self.row_scale.as_chunks().0.get(panel)
    }
}
