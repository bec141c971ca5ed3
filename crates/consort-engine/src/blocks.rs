//! Cache blocks: which sequence holds which.
//!
//! Only rank 0 allocates. The numbers that it hands out travel in the step log, and every rank keeps the tables that follow
//! from them.

use std::collections::HashMap;

/// The free blocks of one pool.
#[derive(Debug)]
pub(crate) struct Pool {
    free: Vec<u32>,
}

impl Pool {
    pub(crate) fn new(blocks: usize) -> Self {
        Self { free: (0..blocks as u32).rev().collect() }
    }

    /// Takes `count` blocks, or none at all if there are fewer.
    pub(crate) fn take(&mut self, count: usize) -> Option<Vec<u32>> {
        let keep = self.free.len().checked_sub(count)?;
        Some(self.free.split_off(keep).into_iter().rev().collect())
    }

    pub(crate) fn give_back(&mut self, blocks: impl IntoIterator<Item = u32>) {
        self.free.extend(blocks);
    }

    pub(crate) fn free(&self) -> usize {
        self.free.len()
    }
}

/// The block tables of one sequence, as every rank keeps them.
#[derive(Debug, Default)]
pub(crate) struct Tables {
    /// For layers that see everything.
    pub full: Vec<u32>,
    /// The ring of sliding-window layers.
    pub window: Vec<u32>,
}

/// The tables of all live sequences.
pub(crate) type AllTables = HashMap<u64, Tables>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_lent_once_and_come_back() {
        let mut pool = Pool::new(4);
        let mut held = pool.take(3).unwrap();
        assert!(pool.take(2).is_none());
        held.extend(pool.take(1).unwrap());
        held.sort_unstable();
        assert_eq!(held, [0, 1, 2, 3]);
        pool.give_back(held);
        assert_eq!(pool.free(), 4);
    }
}
