//! Many parts of a checkpoint at once: what a rank does when it starts.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use consort_compute::Matrix;

use crate::{Checkpoint, CheckpointError};

/// What one [`Checkpoint::read`] asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    /// Weights, stacked along their rows.
    pub names: Vec<String>,
    /// Rows of the stack, in order.
    pub rows: Vec<Range<usize>>,
    /// Columns; `None` is all of them.
    pub columns: Option<Vec<Range<usize>>>,
}

impl Selection {
    fn names(&self) -> Vec<&str> {
        self.names.iter().map(String::as_str).collect()
    }
}

impl Checkpoint {
    /// Bytes that a selection takes once it is read.
    ///
    /// # Errors
    /// [`CheckpointError::NoTensor`].
    pub fn selection_bytes(&self, selection: &Selection) -> Result<u64, CheckpointError> {
        let first = selection.names.first().map_or("(an empty list of names)", String::as_str);
        let info = self.tensor(first).ok_or_else(|| CheckpointError::NoTensor { name: first.into() })?;
        let all_columns = info.shape.last().copied().unwrap_or(1);
        let columns = selection.columns.as_ref().map_or(all_columns, |columns| columns.iter().map(Range::len).sum());
        let rows: usize = selection.rows.iter().map(Range::len).sum();
        Ok(rows as u64 * info.format.row_bytes(columns) as u64)
    }

    /// Reads all `selections` with `threads` threads, in the order in which they lie in the files, and hands each to `take`
    /// with its index. `progress` hears the bytes read so far and their total, from any thread.
    ///
    /// Memory stays near what `take` keeps: each thread holds one selection at a time, and its pages are given back.
    ///
    /// # Errors
    /// The first error of [`Checkpoint::read`]; no further selection is begun after it.
    pub fn load(
        &self,
        selections: &[Selection],
        threads: usize,
        progress: &(dyn Fn(u64, u64) + Sync),
        take: &(dyn Fn(usize, Matrix<'_>) + Sync),
    ) -> Result<(), CheckpointError> {
        let sizes =
            selections.iter().map(|selection| self.selection_bytes(selection)).collect::<Result<Vec<_>, _>>()?;
        let total = sizes.iter().sum();
        let mut order: Vec<usize> = (0..selections.len()).collect();
        order.sort_by_cached_key(|&index| self.position(&selections[index].names[0]));
        let (next, done) = (AtomicUsize::new(0), AtomicU64::new(0));
        let failure = Mutex::new(None);
        let work = || {
            while let Some(&index) = order.get(next.fetch_add(1, Ordering::Relaxed)) {
                let selection = &selections[index];
                let names = selection.names();
                match self.read(&names, &selection.rows, selection.columns.as_deref()) {
                    Ok(matrix) => take(index, matrix),
                    Err(error) => {
                        next.store(order.len(), Ordering::Relaxed);
                        // A poisoned lock only means that another thread panicked while it stored its error.
                        failure.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).get_or_insert(error);
                        return;
                    }
                }
                self.release(&names);
                progress(done.fetch_add(sizes[index], Ordering::Relaxed) + sizes[index], total);
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..threads.min(selections.len()) {
                scope.spawn(work);
            }
            work();
        });
        match failure.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()) {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}
