//! Reads weights before they are needed, on several threads, in the order in which the loader will ask for them.
//!
//! What the loader will ask for is known: it has run once without reading. Matrices are read in pieces, so that neither a
//! huge tensor nor a fast disk takes more memory than a bound, whatever else the rank holds.

use std::collections::HashMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use consort_checkpoint::{Checkpoint, CheckpointError};
use consort_compute::{FILL_ROWS, Matrix};

/// Enough to keep a fast disk, or a link to another machine, busy.
const THREADS: usize = 4;
/// Bytes of a piece; a piece has at least [`PIECE_ROWS`] rows.
const PIECE_BYTES: usize = 16 << 20;
/// Pieces end at multiples of so many rows, so that halves of every second row can be filled too.
const PIECE_ROWS: usize = 2 * FILL_ROWS;
/// Bytes that have been read, or are being read, and not yet been taken.
const AHEAD_BYTES: usize = 128 << 20;

/// What the loader asks for at once.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Read {
    /// Rows of stacked weights, and of these the columns, or all.
    Matrix {
        names: Vec<String>,
        rows: Vec<Range<usize>>,
        columns: Option<Vec<Range<usize>>>,
        /// Bytes of the part of a row that is held.
        row_bytes: usize,
        /// Weights that it becomes.
        weights: usize,
    },
    /// A whole weight as f32 values.
    Values { name: String, count: usize },
}

impl Read {
    /// The weights of which it reads something.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        match self {
            Self::Matrix { names, .. } => names.as_slice(),
            Self::Values { name, .. } => std::slice::from_ref(name),
        }
        .iter()
        .map(String::as_str)
    }
}

/// A part of a [`Read`] that one thread reads.
struct Job<'a> {
    read: &'a Read,
    rows: Vec<Range<usize>>,
    bytes: usize,
}

/// What a job gives.
enum Piece {
    Rows(Matrix<'static>),
    Values(Vec<f32>),
}

/// The reading threads' common state.
pub(crate) struct ReadAhead<'a> {
    checkpoint: &'a Checkpoint,
    jobs: Vec<Job<'a>>,
    state: Mutex<State>,
    news: Condvar,
}

#[derive(Default)]
struct State {
    /// The next job that nobody has begun.
    next: usize,
    /// The next job that the loader will take.
    taken: usize,
    /// Bytes of jobs that have been begun and not been taken.
    ahead_bytes: usize,
    /// What a thread read, or its panic.
    done: HashMap<usize, std::thread::Result<Result<Piece, CheckpointError>>>,
    ended: bool,
}

impl<'a> ReadAhead<'a> {
    /// Nothing is read yet.
    pub fn new(checkpoint: &'a Checkpoint, reads: impl IntoIterator<Item = &'a Read>) -> Self {
        let jobs = reads.into_iter().flat_map(jobs).collect();
        Self { checkpoint, jobs, state: Mutex::default(), news: Condvar::new() }
    }

    /// Runs `body`, which takes the pieces, while threads read.
    pub fn run<T>(&self, body: impl FnOnce() -> T) -> T {
        std::thread::scope(|scope| {
            for _ in 0..THREADS.min(self.jobs.len()) {
                scope.spawn(|| self.read_all());
            }
            // However the body ends, nobody reads for it any more.
            let _end = End(self);
            body()
        })
    }

    /// The next rows of a matrix.
    pub fn take_rows(&self, read: &Read) -> Result<Matrix<'static>, CheckpointError> {
        match self.take(read)? {
            Piece::Rows(rows) => Ok(rows),
            Piece::Values(_) => unreachable!("a matrix is read as rows"),
        }
    }

    /// The values of a vector.
    pub fn take_values(&self, read: &Read) -> Result<Vec<f32>, CheckpointError> {
        match self.take(read)? {
            Piece::Values(values) => Ok(values),
            Piece::Rows(_) => unreachable!("a vector is read as values"),
        }
    }

    /// Reads a matrix that is not among what is read ahead, piece by piece.
    pub fn read_now(&self, read: &Read, mut fill: impl FnMut(Matrix<'static>)) -> Result<(), CheckpointError> {
        for job in jobs(read) {
            if let Piece::Rows(rows) = self.read(&job)? {
                fill(rows);
            }
        }
        Ok(())
    }

    /// The next piece, which must be one of `read`.
    fn take(&self, read: &Read) -> Result<Piece, CheckpointError> {
        let mut state = self.state();
        let index = state.taken;
        let job = self.jobs.get(index).filter(|job| job.read == read);
        let job = job.expect("a loader asks for the same weights whether it reads or not");
        loop {
            if let Some(piece) = state.done.remove(&index) {
                state.taken += 1;
                state.ahead_bytes -= job.bytes;
                self.news.notify_all();
                drop(state);
                return piece.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            }
            state = self.news.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read_all(&self) {
        let mut state = self.state();
        while let Some(job) = self.jobs.get(state.next).filter(|_| !state.ended) {
            // A piece larger than the bound is read alone.
            if state.ahead_bytes > 0 && state.ahead_bytes + job.bytes > AHEAD_BYTES {
                state = self.news.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let index = state.next;
            state.next += 1;
            state.ahead_bytes += job.bytes;
            drop(state);
            // The loader waits for this piece, whatever happens.
            let piece = catch_unwind(AssertUnwindSafe(|| self.read(job)));
            state = self.state();
            state.done.insert(index, piece);
            self.news.notify_all();
        }
    }

    fn read(&self, job: &Job<'_>) -> Result<Piece, CheckpointError> {
        match job.read {
            Read::Values { name, .. } => self.checkpoint.read_f32(name).map(Piece::Values),
            Read::Matrix { names, columns, .. } => {
                let names: Vec<&str> = names.iter().map(String::as_str).collect();
                let matrix = self.checkpoint.read(&names, &job.rows, columns.as_deref())?;
                Ok(Piece::Rows(matrix.into_owned()))
            }
        }
    }
}

/// Cuts what is asked for at once into what one thread reads.
fn jobs(read: &Read) -> Vec<Job<'_>> {
    let Read::Matrix { rows, row_bytes, .. } = read else {
        let Read::Values { count, .. } = read else { return Vec::new() };
        return vec![Job { read, rows: Vec::new(), bytes: 4 * count }];
    };
    let most_rows = (PIECE_BYTES / row_bytes.max(&1)).max(1).next_multiple_of(PIECE_ROWS);
    let mut jobs: Vec<Job> = Vec::new();
    let mut left = 0;
    for range in rows {
        let mut at = range.start;
        while at < range.end {
            if left == 0 {
                jobs.push(Job { read, rows: Vec::new(), bytes: 0 });
                left = most_rows;
            }
            let piece = at..range.end.min(at + left);
            at = piece.end;
            left -= piece.len();
            if let Some(job) = jobs.last_mut() {
                job.bytes += piece.len() * row_bytes;
                job.rows.push(piece);
            }
        }
    }
    jobs
}

struct End<'a, 'b>(&'a ReadAhead<'b>);

impl Drop for End<'_, '_> {
    fn drop(&mut self) {
        self.0.state().ended = true;
        self.0.news.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_the_rows_in_order_and_end_where_a_backend_can_go_on() {
        let rows = vec![10..5000, 20_000..20_003, 7..9];
        let read =
            Read::Matrix { names: vec!["w".into()], rows: rows.clone(), columns: None, row_bytes: 40_000, weights: 1 };
        let jobs = jobs(&read);
        let covered: Vec<usize> = jobs.iter().flat_map(|job| job.rows.iter().cloned().flatten()).collect();
        assert_eq!(covered, rows.into_iter().flatten().collect::<Vec<_>>());
        let (last, full) = jobs.split_last().unwrap();
        for job in full {
            let rows: usize = job.rows.iter().map(Range::len).sum();
            assert_eq!((rows % PIECE_ROWS, job.bytes), (0, rows * 40_000));
            assert!(job.bytes <= PIECE_BYTES + PIECE_ROWS * 40_000);
        }
        assert!(last.bytes > 0 && full.len() > 5);
    }
}
