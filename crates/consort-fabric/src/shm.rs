//! Shared memory between ranks of one machine.
//!
//! Each rank owns one region: a bell and one ring per peer, in which that peer writes. Peers find it through the owner's
//! descriptor table (`/proc/PID/fd/N`), so that on Linux no name ever exists and a killed rank leaves nothing behind.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::bell::Bell;
use crate::rail::{Rail, Wake};
use crate::ring::{Consumer, Indices, Producer, RingMemory};

/// Where a region's parts lie; the same on all ranks because it follows from the number of ranks.
#[derive(Clone, Copy)]
struct Layout {
    ranks: usize,
    ring_bytes: usize,
}

/// Room for the bell and the region's identity.
const HEAD_BYTES: usize = 4096;
/// What regions are multiples of: the page of Apple's processors, to which macOS rounds the size of a shared object up.
const PAGE_BYTES: usize = 16 << 10;

impl Layout {
    /// All rings of a rank together stay near 4 MiB, so that 64 ranks on one machine still fit.
    fn new(ranks: usize) -> Self {
        Self { ranks, ring_bytes: ((4 << 20) / ranks.next_power_of_two()).clamp(64 << 10, 512 << 10) }
    }
    fn indices(&self, peer: usize) -> usize {
        HEAD_BYTES + peer * size_of::<Indices>()
    }
    fn ring(&self, peer: usize) -> usize {
        self.indices(self.ranks).next_multiple_of(PAGE_BYTES) + peer * self.ring_bytes
    }
    fn total(&self) -> usize {
        self.ring(self.ranks)
    }
}

/// The start of every region.
#[repr(C)]
struct Head {
    /// Rung by whoever changes a ring.
    bell: Bell,
    /// Which run and rank this region belongs to: a process id may be used again by a stranger.
    identity: [u8; 32],
}

/// How a peer finds a region.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RegionAddress {
    process: u32,
    descriptor: i32,
    /// Where descriptors of other processes cannot be opened: the object's name.
    name: Option<String>,
}

/// A mapped region, its own or a peer's.
pub(crate) struct Region {
    start: *mut u8,
    layout: Layout,
    /// Kept open by the owner, so that peers can open it.
    _file: File,
}

// SAFETY: a region is memory shared between processes; all access goes through atomics and the rings' protocol.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Makes this rank's own region.
    pub fn create(ranks: usize, identity: [u8; 32]) -> io::Result<(Self, RegionAddress)> {
        let (file, name) = create_object()?;
        let layout = Layout::new(ranks);
        file.set_len(layout.total() as u64)?;
        let address = RegionAddress { process: std::process::id(), descriptor: file.as_raw_fd(), name };
        let region = Self::map(file, layout)?;
        region.bell().hang_up();
        // SAFETY: the region is mapped, zeroed and not yet known to anyone else.
        unsafe { (*region.start.cast::<Head>()).identity = identity };
        Ok((region, address))
    }

    /// Maps a peer's region, after checking that it is the peer's.
    pub fn open(address: &RegionAddress, ranks: usize, identity: [u8; 32]) -> io::Result<Self> {
        let file = open_object(address)?;
        let layout = Layout::new(ranks);
        if file.metadata()?.len() != layout.total() as u64 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the shared region has an unexpected size"));
        }
        let region = Self::map(file, layout)?;
        // SAFETY: mapped; the owner wrote the identity before it told anyone of the region.
        if unsafe { (*region.start.cast::<Head>()).identity } != identity {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the shared region belongs to another run"));
        }
        Ok(region)
    }

    fn map(file: File, layout: Layout) -> io::Result<Self> {
        // SAFETY: a fresh mapping of a file of that length; no existing memory is touched.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                layout.total(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        match start {
            libc::MAP_FAILED => Err(io::Error::last_os_error()),
            start => Ok(Self { start: start.cast(), layout, _file: file }),
        }
    }

    /// The owner's bell.
    pub fn bell(&self) -> &Bell {
        // SAFETY: mapped as long as `self`, aligned to a page, accessed only atomically after creation.
        unsafe { &(*self.start.cast::<Head>()).bell }
    }

    fn ring(&self, peer: usize) -> RingMemory {
        assert!(peer < self.layout.ranks);
        // SAFETY: both offsets are within the mapping; `ShmRail` keeps the region alive and is made once per pair of ranks.
        unsafe {
            RingMemory::new(
                self.start.add(self.layout.indices(peer)).cast(),
                self.start.add(self.layout.ring(peer)).cast(),
                self.layout.ring_bytes as u64,
            )
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length; nothing refers to it any more.
        unsafe { libc::munmap(self.start.cast(), self.layout.total()) };
    }
}

#[cfg(target_os = "linux")]
fn create_object() -> io::Result<(File, Option<String>)> {
    // SAFETY: the name is a C string; the result is checked.
    let descriptor: RawFd = unsafe { libc::memfd_create(c"consort-fabric".as_ptr(), libc::MFD_CLOEXEC) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a fresh descriptor that nothing else owns.
    Ok((unsafe { File::from_raw_fd(descriptor) }, None))
}

#[cfg(target_os = "linux")]
fn open_object(address: &RegionAddress) -> io::Result<File> {
    let path = format!("/proc/{}/fd/{}", address.process, address.descriptor);
    File::options().read(true).write(true).open(path)
}

#[cfg(not(target_os = "linux"))]
fn create_object() -> io::Result<(File, Option<String>)> {
    use std::sync::atomic::{AtomicU32, Ordering};
    /// Regions that this process has made.
    static MADE: AtomicU32 = AtomicU32::new(0);
    let name = format!("/consort-{}-{}", std::process::id(), MADE.fetch_add(1, Ordering::Relaxed));
    // A process of the same number may have been killed before it could forget its name.
    unlink(&name);
    Ok((posix_object(&name, libc::O_CREAT | libc::O_EXCL)?, Some(name)))
}

#[cfg(not(target_os = "linux"))]
fn open_object(address: &RegionAddress) -> io::Result<File> {
    let missing = || io::Error::new(io::ErrorKind::InvalidData, "the shared region has no name");
    posix_object(address.name.as_deref().ok_or_else(missing)?, 0)
}

#[cfg(not(target_os = "linux"))]
fn posix_object(name: &str, flags: libc::c_int) -> io::Result<File> {
    let name = std::ffi::CString::new(name)?;
    // SAFETY: the name is a C string; the result is checked.
    let descriptor: RawFd = unsafe { libc::shm_open(name.as_ptr(), flags | libc::O_RDWR, 0o600) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a fresh descriptor that nothing else owns.
    Ok(unsafe { File::from_raw_fd(descriptor) })
}

/// Removes the object's name, once all peers have opened it.
pub(crate) fn forget_name(address: &RegionAddress) {
    address.name.as_deref().iter().for_each(|name| unlink(name));
}

/// Removes a name, if there is an object of it.
fn unlink(name: &str) {
    if let Ok(name) = std::ffi::CString::new(name) {
        // SAFETY: the name is a C string. Nothing to do if it is gone already.
        unsafe { libc::shm_unlink(name.as_ptr()) };
    }
}

/// At most so much is written at a time: the peer reads the start of a message while the rest is being written.
const PUSH_BYTES: usize = 16 << 10;

/// Two rings, one in each rank's region.
pub(crate) struct ShmRail {
    outgoing: Producer,
    incoming: Consumer,
    peer: Arc<Region>,
    _own: Arc<Region>,
}

impl ShmRail {
    /// The rail between this rank, the owner of `own`, and the owner of `peer`. Once per pair.
    pub fn new(rank: usize, own: Arc<Region>, peer_rank: usize, peer: Region) -> Self {
        Self {
            outgoing: Producer::new(peer.ring(rank)),
            incoming: Consumer::new(own.ring(peer_rank)),
            peer: Arc::new(peer),
            _own: own,
        }
    }
}

impl Rail for ShmRail {
    fn try_send(&mut self, header: &[u8], payload: &[u8]) -> io::Result<usize> {
        let count = self.outgoing.push(header, &payload[..payload.len().min(PUSH_BYTES)])?;
        if count > 0 {
            self.peer.bell().ring();
        }
        Ok(count)
    }

    fn try_recv(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let count = self.incoming.pop(bytes)?;
        if count > 0 {
            // The peer may sleep until there is room.
            self.peer.bell().ring();
        }
        Ok(count)
    }

    fn begin_frame(&mut self, sending: bool) -> io::Result<bool> {
        if sending {
            self.outgoing.align();
            return Ok(true);
        }
        self.incoming.align()
    }

    fn reads_in_place(&self) -> bool {
        true
    }

    fn look(&mut self, wanted: usize) -> io::Result<usize> {
        self.incoming.look(wanted)
    }

    fn arrived(&self, length: usize) -> &[u8] {
        self.incoming.arrived(length)
    }

    fn consume(&mut self, length: usize) -> io::Result<()> {
        self.incoming.consume(length);
        // The peer may sleep until there is room.
        self.peer.bell().ring();
        Ok(())
    }

    fn wake(&self) -> Wake {
        Wake::Bell
    }

    fn transport(&self) -> &'static str {
        "shm"
    }
}
