//! Weights as a backend lays them out, kept on disk: the second start neither reads the checkpoint nor repacks.
//!
//! An entry is one weight of one rank. Its key says everything that it depends on: the model's files, the part of the weight,
//! the layout with its version, the instruction set. It is written under another name and renamed when it is whole, and every
//! part of it is checked when it is read.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use consort_checkpoint::Checkpoint;
use consort_checkpoint::scratch::Scratch;
use consort_compute::Backend;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::read_ahead::Read;

/// How the names of unfinished entries end.
const PARTIAL: &str = ".packed-partial";
/// Threads that read an entry.
const THREADS: usize = 4;
/// Bytes that share a checksum.
const PIECE_BYTES: usize = 4 << 20;
/// Longest description at the end of an entry.
const TRAILER_LIMIT: u64 = 16 << 20;

/// A directory of repacked weights, seen by one model.
pub struct RepackedCache {
    directory: PathBuf,
    /// Names the model's files and what is in them.
    model: String,
}

/// What stands at the end of an entry's file, before the length of this.
#[derive(Serialize, Deserialize)]
struct Trailer {
    key: String,
    /// Bytes of the tiles and of the row scales.
    bytes: [u64; 2],
    /// CRC-32 of each piece of the two, one after the other.
    checksums: Vec<u32>,
}

/// An entry whose description fits; its content has not been read.
struct Entry {
    path: PathBuf,
    file: File,
    trailer: Trailer,
}

impl RepackedCache {
    /// The cache in `directory`, which is made if it is not there, and where what a killed process left is removed.
    ///
    /// # Errors
    /// A directory that cannot be made.
    pub fn open(directory: &Path, checkpoint: &Checkpoint) -> io::Result<Self> {
        std::fs::create_dir_all(directory)?;
        Scratch::sweep(directory, PARTIAL);
        Ok(Self { directory: directory.to_owned(), model: checkpoint.manifest().weights_identity() })
    }

    /// The key of weight number `part` of those that a matrix becomes; `layout` names how the backend lays it out.
    fn key(&self, read: &Read, part: usize, layout: &str) -> String {
        format!("{}|{read:?}|{part}|{layout}|{}", self.model, env!("CARGO_PKG_VERSION"))
    }

    fn path(&self, key: &str) -> PathBuf {
        let hash = Sha256::digest(key.as_bytes());
        let name: String = hash.iter().take(20).map(|byte| format!("{byte:02x}")).collect();
        self.directory.join(name + ".packed")
    }

    /// Looks an entry up. A file that does not describe the key is an error that says why.
    fn find(&self, key: &str) -> Result<Option<Entry>, String> {
        let path = self.path(key);
        let describe = |problem: String| format!("{}: {problem}", path.display());
        let file = match open_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(|error| describe(error.to_string()))?,
        };
        let trailer = Trailer::read(&file).map_err(|error| describe(error.to_string()))?;
        match trailer.key == key {
            true => Ok(Some(Entry { path, file, trailer })),
            false => Err(describe("belongs to another weight".into())),
        }
    }

    /// Writes an entry.
    fn store(&self, key: &str, memory: [&[u8]; 2]) -> Result<(), String> {
        let path = self.path(key);
        let write = || -> io::Result<()> {
            let scratch = Scratch::file(&self.directory, PARTIAL)?;
            let mut file = scratch.handle();
            let checksums = memory.iter().flat_map(|part| part.chunks(PIECE_BYTES)).map(crc32fast::hash).collect();
            let bytes = memory.map(|part| part.len() as u64);
            for part in memory {
                file.write_all(part)?;
            }
            let trailer = serde_json::to_vec(&Trailer { key: key.to_owned(), bytes, checksums })?;
            file.write_all(&trailer)?;
            file.write_all(&(trailer.len() as u64).to_le_bytes())?;
            file.sync_data()?;
            scratch.finish(&path)
        };
        write().map_err(|error| format!("{}: {error}; weights are repacked again in the next run", path.display()))
    }
}

/// Opens an entry. Whatever else has its name, a pipe above all, is not waited for.
fn open_file(path: &Path) -> io::Result<File> {
    match path.symlink_metadata()?.is_file() {
        true => File::open(path),
        false => Err(io::Error::new(io::ErrorKind::InvalidData, "is no file")),
    }
}

impl Trailer {
    fn read(file: &File) -> io::Result<Self> {
        let damaged = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what);
        let size = file.metadata()?.len();
        let mut length = [0; 8];
        let end = size.checked_sub(8).ok_or_else(|| damaged("too short"))?;
        file.read_exact_at(&mut length, end)?;
        let length = u64::from_le_bytes(length);
        let start = end.checked_sub(length).filter(|_| length <= TRAILER_LIMIT).ok_or_else(|| damaged("cut"))?;
        let mut text = vec![0; length as usize];
        file.read_exact_at(&mut text, start)?;
        let trailer: Self = serde_json::from_slice(&text)?;
        let pieces: u64 = trailer.bytes.iter().map(|bytes| bytes.div_ceil(PIECE_BYTES as u64)).sum();
        let fits = trailer.bytes[0].checked_add(trailer.bytes[1]) == Some(start);
        match fits && pieces == trailer.checksums.len() as u64 {
            true => Ok(trailer),
            false => Err(damaged("cut")),
        }
    }
}

impl Entry {
    /// Whether rows have factors.
    fn has_row_scale(&self) -> bool {
        self.trailer.bytes[1] > 0
    }

    /// Reads the entry into a weight's memory; an error says what is wrong, and the memory holds anything then.
    fn read(&self, memory: [&mut [u8]; 2]) -> Result<(), String> {
        if memory.each_ref().map(|part| part.len() as u64) != self.trailer.bytes {
            return Err(format!("{}: has another size", self.path.display()));
        }
        let [tiles, scales] = memory;
        let scales_start = tiles.len() as u64;
        let offsets = (0u64..).step_by(PIECE_BYTES);
        let pieces = offsets.clone().zip(tiles.chunks_mut(PIECE_BYTES));
        let pieces = pieces.chain(offsets.map(|at| scales_start + at).zip(scales.chunks_mut(PIECE_BYTES)));
        let pieces: Vec<_> = pieces.zip(&self.trailer.checksums).map(Some).map(Mutex::new).collect();
        let (next, damaged) = (AtomicUsize::new(0), AtomicBool::new(false));
        let read = || {
            while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
                let piece = piece.lock().unwrap_or_else(PoisonError::into_inner).take();
                let Some(((offset, out), checksum)) = piece else { continue };
                let sound = self.file.read_exact_at(out, offset).is_ok() && crc32fast::hash(out) == *checksum;
                damaged.fetch_or(!sound, Ordering::Relaxed);
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..THREADS.min(pieces.len()) {
                scope.spawn(read);
            }
            read();
        });
        match damaged.into_inner() {
            true => Err(format!("{}: a checksum differs", self.path.display())),
            false => Ok(()),
        }
    }
}

/// The cache, as one loading uses it.
pub(crate) struct RepackedWeights<'a> {
    cache: &'a RepackedCache,
    layout: String,
    /// For each matrix that will be read, in order, the entries of all weights that it becomes, or none.
    entries: VecDeque<Vec<Entry>>,
    /// A disk that took one entry badly is not asked to take more.
    stores: bool,
    /// Entries that were of no use, and what is wrong with the first.
    damaged: (usize, String),
}

/// What became of the wish to restore weights.
pub(crate) enum Restored {
    /// They are complete.
    Complete,
    /// They are not in the cache.
    Absent,
    /// They are in the cache and damaged: their memory holds anything.
    Damaged,
}

impl<'a> RepackedWeights<'a> {
    /// Looks up what will be read; `None` where the backend's weights cannot be stored.
    pub fn find<B: Backend>(cache: &'a RepackedCache, backend: &B, reads: &[Read]) -> Option<Self> {
        let layout = backend.layout_name()?;
        let mut found_all = Self { cache, layout, entries: VecDeque::new(), stores: true, damaged: (0, String::new()) };
        for read in reads {
            let Read::Matrix { weights, .. } = read else { continue };
            let mut found = Vec::new();
            for part in 0..*weights {
                match cache.find(&cache.key(read, part, &found_all.layout)) {
                    Ok(entry) => found.extend(entry),
                    Err(problem) => found_all.note_damage(problem),
                }
            }
            let complete = found.len() == *weights;
            found_all.entries.push_back(if complete { found } else { Vec::new() });
        }
        Some(found_all)
    }

    fn note_damage(&mut self, problem: String) {
        let (count, first) = &mut self.damaged;
        *count += 1;
        if *count == 1 {
            *first = problem;
        }
    }

    /// Says what was found damaged, in one line however much it is.
    pub fn report(&self, warn: &mut dyn FnMut(String)) {
        match &self.damaged {
            (0, _) => {}
            (1, only) => warn(format!("{only}; this repacked weight is written anew")),
            (count, first) => warn(format!("{first}; this and {} more repacked weights are written anew", count - 1)),
        }
    }

    /// What has to be read from the checkpoint.
    pub fn absent<'r>(&self, reads: &'r [Read]) -> Vec<&'r Read> {
        let mut entries = self.entries.iter();
        let is_absent = |read: &&Read| match read {
            Read::Matrix { .. } => entries.next().is_none_or(Vec::is_empty),
            Read::Values { .. } => true,
        };
        reads.iter().filter(is_absent).collect()
    }

    /// Restores the weights of the next matrix.
    pub fn restore<B: Backend>(&mut self, backend: &B, weights: &mut [B::Weight]) -> Restored {
        let entries = self.entries.pop_front().unwrap_or_default();
        if entries.is_empty() {
            return Restored::Absent;
        }
        for (entry, weight) in entries.iter().zip(weights) {
            let memory = backend.weight_memory(weight, entry.has_row_scale());
            if let Err(problem) = memory.map_or(Ok(()), |memory| entry.read(memory)) {
                self.note_damage(problem);
                return Restored::Damaged;
            }
        }
        Restored::Complete
    }

    /// Stores the weights that `read` became.
    pub fn store<B: Backend>(
        &mut self,
        backend: &B,
        read: &Read,
        weights: &mut [B::Weight],
        warn: &mut dyn FnMut(String),
    ) {
        for (part, weight) in weights.iter_mut().enumerate() {
            let Some(memory) = backend.weight_memory(weight, false).filter(|_| self.stores) else { return };
            let key = self.cache.key(read, part, &self.layout);
            if let Err(problem) = self.cache.store(&key, memory.map(|memory| &*memory)) {
                warn(problem);
                self.stores = false;
            }
        }
    }
}
