//! The few system calls that the standard library does not offer, each behind a safe function.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// One file descriptor to wait for.
pub(crate) type PollEntry = libc::pollfd;

/// What to wait for at a file descriptor. Errors are always waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Interest {
    pub read: bool,
    pub write: bool,
}

impl Interest {
    pub const READ: Self = Self { read: true, write: false };
    pub const WRITE: Self = Self { read: false, write: true };
}

/// An entry that waits until `fd` can be read or written, as `interest` has it.
pub(crate) fn poll_entry(fd: RawFd, interest: Interest) -> PollEntry {
    let read = if interest.read { libc::POLLIN } else { 0 };
    let write = if interest.write { libc::POLLOUT } else { 0 };
    PollEntry { fd, events: read | write, revents: 0 }
}

/// Waits until an entry is ready or `timeout` has passed. An interruption counts as a time-out: callers loop anyway.
pub(crate) fn poll(entries: &mut [PollEntry], timeout: Duration) -> io::Result<usize> {
    let milliseconds = timeout.as_micros().div_ceil(1000).min(i32::MAX as u128) as i32;
    // SAFETY: the pointer and the length describe `entries`, which the kernel writes only while the call runs.
    let ready = unsafe { libc::poll(entries.as_mut_ptr(), entries.len() as libc::nfds_t, milliseconds) };
    match ready {
        0.. => Ok(ready as usize),
        _ => match io::Error::last_os_error() {
            error if error.kind() == io::ErrorKind::Interrupted => Ok(0),
            error => Err(error),
        },
    }
}

/// Sleeps while `word` holds `expected`, until woken or `timeout` has passed. The word may lie in memory that processes share.
#[cfg(target_os = "linux")]
pub(crate) fn futex_wait(word: &AtomicU32, expected: u32, timeout: Duration) {
    let timeout =
        libc::timespec { tv_sec: timeout.as_secs() as libc::time_t, tv_nsec: timeout.subsec_nanos() as libc::c_long };
    // SAFETY: `word` and `timeout` live through the call; FUTEX_WAIT only reads them. Every outcome (woken, value changed,
    // time-out, signal) is handled alike by the caller, who looks again.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, expected, &timeout, 0usize, 0u32) };
}

/// Wakes whoever sleeps on `word`.
#[cfg(target_os = "linux")]
pub(crate) fn futex_wake(word: &AtomicU32) {
    // SAFETY: FUTEX_WAKE only uses the address.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX, 0usize, 0usize, 0u32) };
}

/// Elsewhere there is no wait across processes that is part of the public interface: nap briefly, the caller looks again.
#[cfg(not(target_os = "linux"))]
pub(crate) fn futex_wait(_word: &AtomicU32, _expected: u32, timeout: Duration) {
    std::thread::sleep(timeout.min(Duration::from_micros(100)));
}

/// See [`futex_wait`]: nobody sleeps on a word here.
#[cfg(not(target_os = "linux"))]
pub(crate) fn futex_wake(_word: &AtomicU32) {}

/// Commands of the system call `membarrier`.
#[cfg(target_os = "linux")]
const MEMBARRIER_GLOBAL_EXPEDITED: i32 = 1 << 1;
#[cfg(target_os = "linux")]
const MEMBARRIER_REGISTER_GLOBAL_EXPEDITED: i32 = 1 << 2;

#[cfg(target_os = "linux")]
fn membarrier(command: i32) -> bool {
    // SAFETY: the call takes plain numbers and touches no memory of this process.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}

/// Whether every call of [`fence_everywhere`], in any process, puts a fence into this process's threads. Asks for it the first time.
#[cfg(target_os = "linux")]
pub(crate) fn joins_fences() -> bool {
    static JOINS: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *JOINS.get_or_init(|| membarrier(MEMBARRIER_REGISTER_GLOBAL_EXPEDITED) && membarrier(MEMBARRIER_GLOBAL_EXPEDITED))
}

/// A full fence in this thread and in all running threads of the processes that join. Only for processes that do.
#[cfg(target_os = "linux")]
pub(crate) fn fence_everywhere() {
    let done = membarrier(MEMBARRIER_GLOBAL_EXPEDITED);
    debug_assert!(done, "it worked when this process joined");
}

/// Elsewhere every thread has to fence for itself.
#[cfg(not(target_os = "linux"))]
pub(crate) fn joins_fences() -> bool {
    false
}

/// See [`joins_fences`].
#[cfg(not(target_os = "linux"))]
pub(crate) fn fence_everywhere() {}

/// How long the other end of a TCP connection has not answered, if it owes an answer. A host that is gone, or a cable, answers
/// nothing; one that is only slow to read does.
#[cfg(target_os = "linux")]
pub(crate) fn tcp_unanswered(fd: RawFd) -> Option<Duration> {
    // SAFETY: plain numbers, for which zero is a value.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the call writes at most `length` bytes of `info`, and what an older kernel leaves out stays zero.
    let result =
        unsafe { libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, (&raw mut info).cast(), &mut length) };
    let owes = result == 0 && (info.tcpi_retransmits > 0 || info.tcpi_probes > 0);
    owes.then(|| Duration::from_millis(info.tcpi_last_ack_recv.into()))
}

/// See above: elsewhere the system is left to find out.
#[cfg(not(target_os = "linux"))]
pub(crate) fn tcp_unanswered(_fd: RawFd) -> Option<Duration> {
    None
}

/// A socket that is bound to an address and does not listen, beside which another may listen there.
///
/// # Errors
/// Another has the address.
#[cfg(target_os = "linux")]
pub(crate) fn bind_aside(address: SocketAddr) -> io::Result<Option<OwnedFd>> {
    let done = |result: i32| if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) };
    let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    // SAFETY: plain integers.
    let socket = done(unsafe { libc::socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) })?;
    // SAFETY: the descriptor is new, and nobody else's.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    let fd = socket.as_raw_fd();
    let yes = 1i32;
    // SAFETY: `yes` lives through the call, which reads the bytes of it.
    done(unsafe {
        libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_REUSEADDR, (&raw const yes).cast(), size_of_val(&yes) as u32)
    })?;
    match address {
        SocketAddr::V4(address) => {
            // SAFETY: plain numbers, for which zero is a value.
            let mut name: libc::sockaddr_in = unsafe { std::mem::zeroed() };
            name.sin_family = family as libc::sa_family_t;
            name.sin_port = address.port().to_be();
            name.sin_addr.s_addr = u32::from(*address.ip()).to_be();
            // SAFETY: `name` is a whole address of its family and lives through the call.
            done(unsafe { libc::bind(fd, (&raw const name).cast(), size_of_val(&name) as u32) })?;
        }
        SocketAddr::V6(address) => {
            // SAFETY: as above.
            let mut name: libc::sockaddr_in6 = unsafe { std::mem::zeroed() };
            name.sin6_family = family as libc::sa_family_t;
            name.sin6_port = address.port().to_be();
            name.sin6_addr.s6_addr = address.ip().octets();
            name.sin6_scope_id = address.scope_id();
            // SAFETY: as above.
            done(unsafe { libc::bind(fd, (&raw const name).cast(), size_of_val(&name) as u32) })?;
        }
    }
    Ok(Some(socket))
}

/// See above: elsewhere, none may listen beside another.
#[cfg(not(target_os = "linux"))]
pub(crate) fn bind_aside(_address: SocketAddr) -> io::Result<Option<OwnedFd>> {
    Ok(None)
}

/// The cores on which this thread may run.
#[cfg(target_os = "linux")]
pub(crate) fn allowed_cores() -> Vec<u32> {
    // SAFETY: an all-zero set is a valid value, and the call writes no more than its size.
    let (result, set) = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        (libc::sched_getaffinity(0, size_of_val(&set), &mut set), set)
    };
    match result {
        // SAFETY: the indices are below the set's capacity.
        0 => (0..libc::CPU_SETSIZE as u32).filter(|&core| unsafe { libc::CPU_ISSET(core as usize, &set) }).collect(),
        _ => all_cores(), // More than fit into a set.
    }
}

/// See above: elsewhere, as many as there are.
#[cfg(not(target_os = "linux"))]
pub(crate) fn allowed_cores() -> Vec<u32> {
    all_cores()
}

fn all_cores() -> Vec<u32> {
    (0..std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32)).collect()
}

/// The machine's monotonic clock, which its processes share.
pub(crate) fn monotonic_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call only writes `time`; this clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Names this machine (more exactly: this kernel, process namespace and user), so that ranks know whom they can share memory with.
pub(crate) fn machine() -> String {
    // SAFETY: getuid has no preconditions.
    let user = unsafe { libc::getuid() };
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_else(|_| host_name());
    let namespace = std::fs::read_link("/proc/self/ns/pid").map(|path| path.display().to_string()).unwrap_or_default();
    format!("{}/{namespace}/{user}", boot.trim())
}

fn host_name() -> String {
    let mut name = [0u8; 256];
    // SAFETY: the buffer is as long as said; the last byte is kept zero.
    unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len() - 1) };
    let length = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
    String::from_utf8_lossy(&name[..length]).into_owned()
}
