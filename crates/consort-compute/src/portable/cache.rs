//! The key and value cache of one layer in host memory.
//!
//! A pool of blocks of `block_tokens` tokens. Keys and values lie in two separate regions of the same order:
//!
//! ```text
//! [block][head][token in block][feature]
//! ```
//!
//! so the keys of one head in one block are one contiguous piece of memory, which a kernel streams from front to back while
//! it walks a sequence's block table. The features of one head and token are one row of the storage format
//! ([`KvFormat::format`]): `key_dim` values, encoded exactly as a row of a [`Matrix`](crate::Matrix) of that format is.

use crate::{Format, KvFormat, KvSpec, Run};

use super::{AlignedBytes, HostBuffer};

impl KvFormat {
    /// The number format of one head's row.
    pub const fn format(self) -> Format {
        match self {
            Self::F16 => Format::F16,
            Self::BF16 => Format::BF16,
            Self::F32 => Format::F32,
            Self::Q8 => Format::Q8_0,
        }
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
        let region = |dim| AlignedBytes::zeroed(rows * spec.format.format().row_bytes(dim));
        Self { spec, keys: region(spec.key_dim), values: region(spec.value_dim) }
    }

    /// What the cache was made for.
    pub fn spec(&self) -> &KvSpec {
        &self.spec
    }

    /// The memory of the keys and that of the values, for who places it.
    pub fn memory(&self) -> [&[u8]; 2] {
        [&self.keys, &self.values]
    }

    /// Bytes of one head's key of one token.
    pub fn key_bytes(&self) -> usize {
        self.spec.format.format().row_bytes(self.spec.key_dim)
    }

    /// Bytes of one head's value of one token.
    pub fn value_bytes(&self) -> usize {
        self.spec.format.format().row_bytes(self.spec.value_dim)
    }

    /// The keys of one head in one block: `block_tokens` rows of [`key_bytes`](Self::key_bytes).
    pub fn keys(&self, block: u32, head: usize) -> &[u8] {
        let bytes = self.spec.block_tokens * self.key_bytes();
        &self.keys[self.piece(block, head) * bytes..][..bytes]
    }

    /// The values of one head in one block: `block_tokens` rows of [`value_bytes`](Self::value_bytes).
    pub fn values(&self, block: u32, head: usize) -> &[u8] {
        let bytes = self.spec.block_tokens * self.value_bytes();
        &self.values[self.piece(block, head) * bytes..][..bytes]
    }

    fn piece(&self, block: u32, head: usize) -> usize {
        debug_assert!(head < self.spec.heads);
        block as usize * self.spec.heads + head
    }

    /// Where position `position` of a run's sequence is: `(block, token in block)`.
    pub fn place(&self, run: &Run<'_>, position: usize) -> (u32, usize) {
        let tokens = self.spec.block_tokens;
        (run.blocks[(position / tokens) % run.blocks.len()], position % tokens)
    }

    /// Stores keys `[n, heads · key_dim]` and values `[n, heads · value_dim]` at their runs' positions.
    pub fn write(&mut self, k: &HostBuffer, v: &HostBuffer, runs: &[Run<'_>]) {
        let KvSpec { heads, block_tokens, key_dim, value_dim, .. } = self.spec;
        assert_eq!((k.cols(), v.cols()), (heads * key_dim, heads * value_dim), "keys and values of this cache");
        let (key_bytes, value_bytes) = (self.key_bytes(), self.value_bytes());
        let format = self.spec.format.format();
        for run in runs {
            for (position, row) in (run.start..).zip(run.rows.clone()) {
                let (block, token) = self.place(run, position);
                let heads_of_row = k.row(row).chunks_exact(key_dim).zip(v.row(row).chunks_exact(value_dim));
                for (head, (key, value)) in heads_of_row.enumerate() {
                    let slot = self.piece(block, head) * block_tokens + token;
                    format.encode_row(key, &mut self.keys[slot * key_bytes..][..key_bytes]);
                    format.encode_row(value, &mut self.values[slot * value_bytes..][..value_bytes]);
                }
            }
        }
    }
}
