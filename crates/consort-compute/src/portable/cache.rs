//! The key and value cache of one layer in host memory.
//!
//! A pool of blocks of `block_tokens` tokens. Keys and values lie in two separate regions, each head of a block in one
//! contiguous piece, which a kernel streams from front to back while it walks a sequence's block table:
//!
//! ```text
//! keys:   [block][head][panel of 16 tokens][feature][token of the panel]
//! values: [block][head][token in block][feature]
//! ```
//!
//! So both lie as attention multiplies them, vector by vector: a query's feature with that feature of 16 keys, a weight with
//! 16 features of its value. Only the tokens of a block's last panel may be fewer than 16.
//!
//! What is stored for a key or value is a row of the storage format ([`KvFormat::format`]), encoded exactly as a row of a
//! [`Matrix`](crate::Matrix) of that format is. The values' rows lie whole; in a panel of keys, each number of the row (and
//! each scale of [`KvFormat::Q8`]) lies beside the same number of the panel's other tokens.

use std::ops::Range;

use crate::{Format, KvFormat, KvSpec, Run};

use super::{AlignedBytes, HostBuffer};

/// Tokens whose keys lie side by side.
pub const PANEL_TOKENS: usize = 16;
/// Features that are encoded at a time: one block of any format.
const STEP: usize = 32;

impl KvFormat {
    /// The number format of one head's row.
    pub const fn format(self) -> Format {
        match self {
            Self::F16 => Format::F16,
            Self::BF16 => Format::BF16,
            Self::F32 => Format::F32,
            Self::FP8 => Format::F8E4M3,
            Self::Q8 => Format::Q8_0,
        }
    }

    /// Bytes of the scale in front of each 32 numbers, and of each number.
    pub const fn field_bytes(self) -> (usize, usize) {
        match self {
            Self::F16 | Self::BF16 => (0, 2),
            Self::F32 => (0, 4),
            Self::FP8 => (0, 1),
            Self::Q8 => (2, 1),
        }
    }
}

impl KvSpec {
    /// Bytes of one head's key of one token.
    pub const fn key_bytes(&self) -> usize {
        self.format.format().row_bytes(self.key_dim)
    }

    /// Bytes of one head's value of one token.
    pub const fn value_bytes(&self) -> usize {
        self.format.format().row_bytes(self.value_dim)
    }

    /// Where the keys of one head in one block lie among all keys.
    pub fn keys(&self, block: u32, head: usize) -> Range<usize> {
        self.piece(block, head, self.key_bytes())
    }

    /// Where the values of one head in one block lie among all values.
    pub fn values(&self, block: u32, head: usize) -> Range<usize> {
        self.piece(block, head, self.value_bytes())
    }

    fn piece(&self, block: u32, head: usize, row_bytes: usize) -> Range<usize> {
        debug_assert!(head < self.heads);
        let bytes = self.block_tokens * row_bytes;
        let start = (block as usize * self.heads + head) * bytes;
        start..start + bytes
    }

    /// Where position `position` of a run's sequence is: `(block, token in block)`.
    pub fn place(&self, run: &Run<'_>, position: usize) -> (u32, usize) {
        (run.blocks[(position / self.block_tokens) % run.blocks.len()], position % self.block_tokens)
    }

    /// The panel of a token of a block: where it begins among the bytes of a head's keys, its tokens, and which of them.
    fn panel(&self, token: usize) -> (usize, usize, usize) {
        let first = token / PANEL_TOKENS * PANEL_TOKENS;
        (first * self.key_bytes(), PANEL_TOKENS.min(self.block_tokens - first), token - first)
    }

    /// Stores a key among `keys`, those of its head in its block.
    pub fn write_key(&self, keys: &mut [u8], token: usize, key: &[f32]) {
        let (start, tokens, lane) = self.panel(token);
        let panel = &mut keys[start..];
        let (scale, number) = self.format.field_bytes();
        let step_bytes = scale + STEP * number;
        for (step, key) in key.chunks(STEP).enumerate() {
            let mut row = [0; STEP * size_of::<f32>()];
            let row = &mut row[..self.format.format().row_bytes(key.len())];
            self.format.format().encode_row(key, row);
            let panel = &mut panel[step * step_bytes * tokens..];
            let (scale_bytes, numbers) = row.split_at(scale);
            panel[lane * scale..][..scale].copy_from_slice(scale_bytes);
            for (bytes, column) in numbers.chunks_exact(number).zip(panel[scale * tokens..].chunks_mut(number * tokens))
            {
                column[lane * number..][..number].copy_from_slice(bytes);
            }
        }
    }

    /// Reads the features from `first` on of a key among `keys`, those of its head in its block. `first` is a multiple of 32.
    pub fn read_key(&self, keys: &[u8], token: usize, first: usize, key: &mut [f32]) {
        assert_eq!(first % STEP, 0, "whole blocks");
        let (start, tokens, lane) = self.panel(token);
        let panel = &keys[start..];
        let (scale, number) = self.format.field_bytes();
        let step_bytes = scale + STEP * number;
        for (step, key) in key.chunks_mut(STEP).enumerate() {
            let mut row = [0; STEP * size_of::<f32>()];
            let row = &mut row[..self.format.format().row_bytes(key.len())];
            let panel = &panel[(first / STEP + step) * step_bytes * tokens..];
            let (scale_bytes, numbers) = row.split_at_mut(scale);
            scale_bytes.copy_from_slice(&panel[lane * scale..][..scale]);
            for (bytes, column) in numbers.chunks_exact_mut(number).zip(panel[scale * tokens..].chunks(number * tokens))
            {
                bytes.copy_from_slice(&column[lane * number..][..number]);
            }
            self.format.format().decode_row(row, key);
        }
    }

    /// Stores a value among `values`, those of its head in its block.
    pub fn write_value(&self, values: &mut [u8], token: usize, value: &[f32]) {
        let bytes = self.value_bytes();
        self.format.format().encode_row(value, &mut values[token * bytes..][..bytes]);
    }

    /// Reads a value from `values`, those of its head in its block.
    pub fn read_value(&self, values: &[u8], token: usize, value: &mut [f32]) {
        let bytes = self.value_bytes();
        self.format.format().decode_row(&values[token * bytes..][..bytes], value);
    }
}

/// The key and value cache of one layer.
#[derive(Clone, Debug)]
pub struct HostCache {
    spec: KvSpec,
    keys: AlignedBytes,
    values: AlignedBytes,
}

impl HostCache {
    /// An empty cache.
    pub fn new(spec: KvSpec) -> Self {
        let rows = spec.blocks * spec.heads * spec.block_tokens;
        let region = |row_bytes| AlignedBytes::zeroed(rows * row_bytes);
        Self { spec, keys: region(spec.key_bytes()), values: region(spec.value_bytes()) }
    }

    /// What the cache was made for.
    pub fn spec(&self) -> &KvSpec {
        &self.spec
    }

    /// The memory of the keys and that of the values.
    pub fn memory(&self) -> [&[u8]; 2] {
        [&self.keys, &self.values]
    }

    /// The same, to change.
    pub fn memory_mut(&mut self) -> [&mut [u8]; 2] {
        [&mut self.keys, &mut self.values]
    }

    /// The keys of one head in one block.
    pub fn keys(&self, block: u32, head: usize) -> &[u8] {
        &self.keys[self.spec.keys(block, head)]
    }

    /// The values of one head in one block.
    pub fn values(&self, block: u32, head: usize) -> &[u8] {
        &self.values[self.spec.values(block, head)]
    }

    /// Stores keys `[n, heads · key_dim]` and values `[n, heads · value_dim]` at their runs' positions.
    pub fn write(&mut self, k: &HostBuffer, v: &HostBuffer, runs: &[Run<'_>]) {
        let spec = self.spec;
        let KvSpec { heads, key_dim, value_dim, .. } = spec;
        assert_eq!((k.cols(), v.cols()), (heads * key_dim, heads * value_dim), "keys and values of this cache");
        for run in runs {
            for (position, row) in (run.start..).zip(run.rows.clone()) {
                let (block, token) = spec.place(run, position);
                let heads_of_row = k.row(row).chunks_exact(key_dim).zip(v.row(row).chunks_exact(value_dim));
                for (head, (key, value)) in heads_of_row.enumerate() {
                    spec.write_key(&mut self.keys[spec.keys(block, head)], token, key);
                    spec.write_value(&mut self.values[spec.values(block, head)], token, value);
                }
            }
        }
    }
}
