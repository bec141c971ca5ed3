//! A byte ring for one producer and one consumer, in memory that two processes share.

use std::io;

use crate::stores::Stores;
use crate::sync::{AtomicU64, Ordering};

/// A byte of the ring. The model checker watches each one for uses that overlap.
#[cfg(not(loom))]
type Byte = u8;
#[cfg(loom)]
type Byte = loom::cell::UnsafeCell<u8>;

/// Each index has a cache line of its own (two, because lines are fetched in pairs), so that the ends do not slow each other.
#[repr(C, align(128))]
pub(crate) struct Index(AtomicU64);

/// Bytes ever written and ever read; the ring holds the difference.
#[repr(C)]
pub(crate) struct Indices {
    written: Index,
    read: Index,
}

/// A ring's place in mapped memory. Valid as long as the mapping, which the owner of both keeps.
#[derive(Clone, Copy)]
pub(crate) struct RingMemory {
    indices: *const Indices,
    bytes: *mut Byte,
    /// A power of two.
    capacity: u64,
}

// SAFETY: the pointers lead to shared memory that any thread may use; the two ends keep apart through `Indices`.
unsafe impl Send for RingMemory {}

impl RingMemory {
    /// # Safety
    /// `indices` points to zeroed or live `Indices` and `bytes` to `capacity` bytes, both mapped while the result is in use;
    /// at most one `Producer` and one `Consumer`, in any process, are made of one ring.
    pub unsafe fn new(indices: *const Indices, bytes: *mut Byte, capacity: u64) -> Self {
        assert!(capacity.is_power_of_two());
        Self { indices, bytes, capacity }
    }

    fn indices(&self) -> &Indices {
        // SAFETY: promised at construction.
        unsafe { &*self.indices }
    }

    /// The longest run of at most `length` bytes from `index` on that does not wrap.
    fn run(&self, index: u64, length: u64) -> (usize, usize) {
        let start = index & (self.capacity - 1);
        (start as usize, length.min(self.capacity - start) as usize)
    }

    /// Copies `source` to the bytes from `start` on.
    ///
    /// # Safety
    /// `start + source.len()` is within the ring, and the consumer has left these bytes.
    unsafe fn write(&self, start: usize, source: &[u8], stores: &mut Stores) {
        #[cfg(not(loom))]
        // SAFETY: promised by the caller.
        unsafe {
            stores.write(self.bytes.add(start), source);
        }
        #[cfg(loom)]
        let _ = stores;
        #[cfg(loom)]
        for (at, &byte) in source.iter().enumerate() {
            // SAFETY: promised by the caller, and checked by the model.
            unsafe { (*self.bytes.add(start + at)).with_mut(|target| *target = byte) };
        }
    }

    /// Copies the bytes from `start` on to `target`.
    ///
    /// # Safety
    /// `start + target.len()` is within the ring, and the producer has published these bytes.
    unsafe fn read(&self, start: usize, target: &mut [u8]) {
        #[cfg(not(loom))]
        // SAFETY: promised by the caller.
        unsafe {
            std::ptr::copy_nonoverlapping(self.bytes.add(start), target.as_mut_ptr(), target.len());
        }
        #[cfg(loom)]
        for (at, byte) in target.iter_mut().enumerate() {
            // SAFETY: promised by the caller, and checked by the model.
            unsafe { *byte = (*self.bytes.add(start + at)).with(|source| *source) };
        }
    }

    /// Bytes held, or an error if the peer has written nonsense into its index.
    fn held(&self, written: u64, read: u64) -> io::Result<u64> {
        match written.wrapping_sub(read) {
            held if held <= self.capacity => Ok(held),
            _ => Err(corrupt()),
        }
    }
}

fn corrupt() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the indices of a shared memory ring are corrupt")
}

/// Frames begin at multiples of this, so that payloads that follow a header of this length do too.
const ALIGNMENT: u64 = if cfg!(loom) { 2 } else { 64 };

/// The writing end.
pub(crate) struct Producer {
    ring: RingMemory,
    written: u64,
    /// The consumer's index when last looked at: looking again costs a cache miss, so only when the ring seems full.
    read: u64,
    stores: Stores,
}

impl Producer {
    pub fn new(ring: RingMemory) -> Self {
        Self { ring, written: 0, read: 0, stores: Stores::default() }
    }

    /// Goes on at a multiple of `ALIGNMENT`.
    pub fn align(&mut self) {
        self.written = self.written.next_multiple_of(ALIGNMENT);
    }

    fn room(&self) -> io::Result<u64> {
        match self.written.wrapping_sub(self.read) {
            // What was left out to align may lie beyond a full ring.
            held if held < self.ring.capacity + ALIGNMENT => Ok(self.ring.capacity.saturating_sub(held)),
            _ => Err(corrupt()),
        }
    }

    /// Copies as much of `header` and `payload` as fits, then publishes both at once.
    pub fn push(&mut self, header: &[u8], payload: &[u8]) -> io::Result<usize> {
        let wanted = (header.len() + payload.len()) as u64;
        let mut room = self.room()?;
        if room < wanted {
            self.read = self.ring.indices().read.0.load(Ordering::Acquire);
            room = self.room()?;
        }
        let start = self.written;
        for part in [header, payload] {
            let part = &part[..part.len().min((room - (self.written - start)) as usize)];
            self.copy_in(part);
        }
        if self.written != start {
            self.ring.indices().written.0.store(self.written, Ordering::Release);
        }
        Ok((self.written - start) as usize)
    }

    fn copy_in(&mut self, mut part: &[u8]) {
        while !part.is_empty() {
            let (start, length) = self.ring.run(self.written, part.len() as u64);
            // SAFETY: `start + length` is within the ring, and `push` made sure that the consumer has left these bytes.
            unsafe { self.ring.write(start, &part[..length], &mut self.stores) };
            self.written += length as u64;
            part = &part[length..];
        }
    }
}

/// The reading end.
pub(crate) struct Consumer {
    ring: RingMemory,
    read: u64,
    /// The producer's index when last looked at.
    written: u64,
}

impl Consumer {
    pub fn new(ring: RingMemory) -> Self {
        Self { ring, read: 0, written: 0 }
    }

    /// Goes on at a multiple of `ALIGNMENT`, as the producer did. False if it has not yet: then nothing may be read.
    pub fn align(&mut self) -> io::Result<bool> {
        let aligned = self.read.next_multiple_of(ALIGNMENT);
        if self.refresh(1)? == 0 {
            return Ok(false);
        }
        self.ring.held(self.written, aligned)?;
        self.read = aligned;
        Ok(true)
    }

    /// Looks how much there is; only if it is less than `wanted` at the producer's index.
    fn refresh(&mut self, wanted: u64) -> io::Result<u64> {
        let held = self.ring.held(self.written, self.read)?;
        if held >= wanted {
            return Ok(held);
        }
        self.written = self.ring.indices().written.0.load(Ordering::Acquire);
        self.ring.held(self.written, self.read)
    }

    /// Looks for bytes that can be read where they lie, up to the ring's end: returns how many, at most `wanted`.
    pub fn look(&mut self, wanted: usize) -> io::Result<usize> {
        let held = self.refresh(wanted as u64)?;
        Ok(self.ring.run(self.read, held).1.min(wanted))
    }

    /// The bytes that [`Consumer::look`] found.
    #[cfg(not(loom))]
    pub fn arrived(&self, length: usize) -> &[u8] {
        let held = self.written.wrapping_sub(self.read);
        let (start, run) = self.ring.run(self.read, held);
        assert!(length <= run, "no more than there is");
        // SAFETY: the producer has published these bytes and leaves them alone until this consumer gives them back, which
        // takes a mutable reference.
        unsafe { std::slice::from_raw_parts(self.ring.bytes.add(start), length) }
    }

    /// Gives bytes back to the producer.
    pub fn consume(&mut self, length: usize) {
        debug_assert!(length as u64 <= self.written.wrapping_sub(self.read));
        self.read += length as u64;
        self.ring.indices().read.0.store(self.read, Ordering::Release);
    }

    /// Copies what is there into the start of `bytes`.
    pub fn pop(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let held = self.refresh(bytes.len() as u64)?;
        let total = (held as usize).min(bytes.len());
        let mut rest = &mut bytes[..total];
        while !rest.is_empty() {
            let (start, length) = self.ring.run(self.read, rest.len() as u64);
            // SAFETY: `start + length` is within the ring, and the producer has published these bytes and left them.
            unsafe { self.ring.read(start, &mut rest[..length]) };
            self.read += length as u64;
            rest = &mut rest[length..];
        }
        if total > 0 {
            self.ring.indices().read.0.store(self.read, Ordering::Release);
        }
        Ok(total)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_out_in_order_across_the_wrap() {
        let indices = Indices { written: Index(AtomicU64::new(0)), read: Index(AtomicU64::new(0)) };
        let mut bytes = [0u8; 64];
        // SAFETY: both outlive the ends, of which there is one each.
        let ring = unsafe { RingMemory::new(&indices, bytes.as_mut_ptr(), 64) };
        let (mut producer, mut consumer) = (Producer::new(ring), Consumer::new(ring));
        let (mut sent, mut received) = (0u8, 0u8);
        for step in 1..500usize {
            let header: Vec<u8> = (0..step % 7).map(|i| sent.wrapping_add(i as u8)).collect();
            let payload: Vec<u8> = (0..step % 40).map(|i| sent.wrapping_add((header.len() + i) as u8)).collect();
            sent = sent.wrapping_add(producer.push(&header, &payload).unwrap() as u8);
            let mut out = vec![0; step % 33];
            let count = consumer.pop(&mut out).unwrap();
            for &byte in &out[..count] {
                assert_eq!(byte, received);
                received = received.wrapping_add(1);
            }
        }
    }

    #[test]
    fn frames_are_aligned_and_read_where_they_lie() {
        let indices = Indices { written: Index(AtomicU64::new(0)), read: Index(AtomicU64::new(0)) };
        let mut bytes = [0u8; 256];
        // SAFETY: both outlive the ends, of which there is one each.
        let ring = unsafe { RingMemory::new(&indices, bytes.as_mut_ptr(), 256) };
        let (mut producer, mut consumer) = (Producer::new(ring), Consumer::new(ring));
        for frame in 0..1000usize {
            let payload: Vec<u8> = (0..(frame * 37) % 190).map(|at| (frame + at) as u8).collect();
            producer.align();
            let sent = producer.push(&[frame as u8; 64], &payload).unwrap();
            // A full ring takes the rest later; the alignment is not repeated.
            let mut rest = 64 + payload.len() - sent;
            assert!(consumer.align().unwrap());
            let mut header = [0; 64];
            assert_eq!(consumer.pop(&mut header).unwrap(), 64);
            assert_eq!(header, [frame as u8; 64]);
            let mut received = Vec::new();
            while received.len() < payload.len() {
                let length = consumer.look(payload.len() - received.len()).unwrap();
                received.extend_from_slice(consumer.arrived(length));
                consumer.consume(length);
                rest -= producer.push(&[], &payload[payload.len() - rest..]).unwrap();
            }
            assert_eq!(received, payload);
        }
    }

    #[test]
    fn corrupt_indices_are_an_error() {
        let indices = Indices { written: Index(AtomicU64::new(1 << 40)), read: Index(AtomicU64::new(0)) };
        let mut bytes = [0u8; 64];
        // SAFETY: both outlive the consumer.
        let ring = unsafe { RingMemory::new(&indices, bytes.as_mut_ptr(), 64) };
        assert!(Consumer::new(ring).pop(&mut [0; 8]).is_err());
    }
}

#[cfg(all(test, loom))]
mod model {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    /// Lets the model own what is shared memory otherwise.
    struct Shared {
        indices: Indices,
        bytes: [UnsafeCell<u8>; 2],
    }

    #[test]
    fn frames_begin_where_the_producer_aligned_them() {
        loom::model(|| {
            let zero = || UnsafeCell::new(0);
            let indices = Indices { written: Index(AtomicU64::new(0)), read: Index(AtomicU64::new(0)) };
            let shared = Arc::new((indices, [zero(), zero(), zero(), zero()]));
            let ring = |shared: &(Indices, [UnsafeCell<u8>; 4])| {
                // SAFETY: both threads hold `shared` while they use the ring, and make one end each.
                unsafe { RingMemory::new(&shared.0, shared.1.as_ptr().cast_mut(), 4) }
            };
            let other = shared.clone();
            let writing = thread::spawn(move || {
                let mut producer = Producer::new(ring(&other));
                for frame in [1, 2] {
                    producer.align();
                    assert_eq!(producer.push(&[frame], &[]).unwrap(), 1);
                }
            });
            let mut consumer = Consumer::new(ring(&shared));
            let (mut frames, mut byte) = (Vec::new(), [0]);
            let mut look = |frames: &mut Vec<u8>| {
                if consumer.align().unwrap() && consumer.pop(&mut byte).unwrap() == 1 {
                    frames.push(byte[0]);
                }
            };
            look(&mut frames);
            look(&mut frames);
            writing.join().unwrap();
            look(&mut frames);
            look(&mut frames);
            assert_eq!(frames, [1, 2]);
        });
    }

    #[test]
    fn no_byte_is_read_early_or_overwritten() {
        loom::model(|| {
            let shared = Arc::new(Shared {
                indices: Indices { written: Index(AtomicU64::new(0)), read: Index(AtomicU64::new(0)) },
                bytes: [UnsafeCell::new(0), UnsafeCell::new(0)],
            });
            let ring = |shared: &Shared| {
                // SAFETY: both threads hold `shared` while they use the ring, and make one end each.
                unsafe { RingMemory::new(&shared.indices, shared.bytes.as_ptr().cast_mut(), 2) }
            };
            let other = shared.clone();
            let writing = thread::spawn(move || {
                let mut producer = Producer::new(ring(&other));
                // More than fits: what is written after the wrap must wait for the reader.
                let first = producer.push(&[1], &[2]).unwrap();
                first + producer.push(&[first as u8 + 1], &[]).unwrap()
            });
            let mut consumer = Consumer::new(ring(&shared));
            let (mut received, mut buffer) = (Vec::new(), [0; 2]);
            for _ in 0..2 {
                let count = consumer.pop(&mut buffer).unwrap();
                received.extend_from_slice(&buffer[..count]);
            }
            let written = writing.join().unwrap();
            let count = consumer.pop(&mut buffer).unwrap();
            received.extend_from_slice(&buffer[..count]);
            let count = consumer.pop(&mut buffer).unwrap();
            received.extend_from_slice(&buffer[..count]);
            assert_eq!(received, (1..=written as u8).collect::<Vec<_>>());
        });
    }
}
