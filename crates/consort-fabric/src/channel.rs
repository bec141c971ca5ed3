//! A control connection: small typed messages over TCP, read without ever blocking and never trusted.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::health::Failure;
use crate::shm::RegionAddress;
use crate::sys;

/// First bytes of every control message.
const MAGIC: [u8; 4] = *b"CNST";
/// Version of the control protocol. Read before anything else of a message, so that other versions can be named.
pub(crate) const PROTOCOL: u16 = 1;
/// Magic, protocol, length.
const PREFIX_BYTES: usize = 10;
/// Longest message: a roster of many ranks with many agreement items.
const MESSAGE_LIMIT: usize = 1 << 20;

/// Everything that ranks say to each other on control connections.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ControlMessage {
    /// The first message of every connection.
    Hello(Box<Hello>),
    /// Rank 0 to all: everyone's hello, in rank order.
    Roster(Vec<Hello>),
    /// Rank 0 will not have this rank.
    Refused(String),
    /// To rank 0: this rank has all its connections.
    Ready,
    /// From rank 0: all ranks are ready.
    Start,
    /// Still alive.
    Heartbeat,
    /// The fabric has failed.
    Abort(Failure),
    /// This rank leaves in good order.
    Goodbye,
}

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Purpose {
    /// Control messages.
    Control,
    /// The rail of that index: after the hello, data frames only.
    Rail(u8),
}

/// Who a rank is and what it brings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub purpose: Purpose,
    pub run_id: String,
    pub rank: u32,
    pub size: u32,
    pub host: String,
    /// Version of the build.
    pub build: String,
    /// Items that must be equal on all ranks.
    pub agreement: Vec<(String, String)>,
    /// Transport asked for.
    pub transport: String,
    /// Time of day in nanoseconds, to show how far clocks differ.
    pub clock_ns: u64,
    /// Ranks of equal machines can share memory.
    pub machine: String,
    /// Where higher ranks connect for control messages.
    pub control_address: Option<SocketAddr>,
    /// Where higher ranks connect for each rail.
    pub rail_addresses: Vec<SocketAddr>,
    /// The region in which peers on this machine write.
    pub region: Option<RegionAddress>,
}

/// Why a connection cannot be used any more.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ChannelError {
    #[error("the connection was closed")]
    Closed,
    #[error("{0}")]
    Broken(io::Error),
    #[error("bytes that are not of this protocol")]
    Garbage,
    #[error("protocol version {0} (this build speaks {PROTOCOL})")]
    Protocol(u16),
    #[error("no answer in time")]
    Deadline,
}

/// The reading half.
pub(crate) struct ChannelReader {
    stream: TcpStream,
    /// Bytes read and not yet decoded.
    pending: Vec<u8>,
    closed: bool,
}

/// The writing half.
pub(crate) struct ChannelWriter {
    stream: TcpStream,
    /// A message that went out only in part spoils the stream.
    spoilt: bool,
}

/// Both halves of a control connection.
pub(crate) struct Channel {
    pub reader: ChannelReader,
    pub writer: ChannelWriter,
}

impl Channel {
    pub fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let reader = ChannelReader { stream: stream.try_clone()?, pending: Vec::new(), closed: false };
        Ok(Self { reader, writer: ChannelWriter { stream, spoilt: false } })
    }

    /// The bare connection, for use as a rail. Nothing may have been read beyond the hello.
    pub fn into_stream(self) -> Result<TcpStream, ChannelError> {
        if self.reader.pending.is_empty() { Ok(self.writer.stream) } else { Err(ChannelError::Garbage) }
    }
}

impl ChannelReader {
    pub fn descriptor(&self) -> RawFd {
        self.stream.as_raw_fd()
    }

    /// The next message if it is complete. Messages that came before the end of the connection are returned before the end is.
    pub fn try_receive(&mut self) -> Result<Option<ControlMessage>, ChannelError> {
        loop {
            if let Some(message) = self.decode()? {
                return Ok(Some(message));
            }
            if self.closed {
                return Err(ChannelError::Closed);
            }
            let mut chunk = [0; 4096];
            // One message at a time: bytes after a rail's hello belong to the rail.
            let wanted = self.missing_bytes().min(chunk.len());
            match self.stream.read(&mut chunk[..wanted]) {
                Ok(0) => self.closed = true,
                Ok(count) => self.pending.extend_from_slice(&chunk[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(ChannelError::Broken(error)),
            }
        }
    }

    /// Waits for the next message.
    pub fn receive(&mut self, deadline: Instant) -> Result<ControlMessage, ChannelError> {
        loop {
            if let Some(message) = self.try_receive()? {
                return Ok(message);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ChannelError::Deadline);
            }
            sys::poll(&mut [sys::poll_entry(self.descriptor(), false)], left).map_err(ChannelError::Broken)?;
        }
    }

    fn length(&self) -> Option<usize> {
        let bytes = self.pending.get(6..PREFIX_BYTES)?;
        Some(u32::from_le_bytes(bytes.try_into().expect("four bytes")) as usize)
    }

    fn missing_bytes(&self) -> usize {
        PREFIX_BYTES + self.length().unwrap_or(0) - self.pending.len()
    }

    fn decode(&mut self) -> Result<Option<ControlMessage>, ChannelError> {
        let seen = self.pending.len().min(MAGIC.len());
        if self.pending[..seen] != MAGIC[..seen] {
            return Err(ChannelError::Garbage);
        }
        if let Some(version) = self.pending.get(4..6) {
            let version = u16::from_le_bytes([version[0], version[1]]);
            if version != PROTOCOL {
                return Err(ChannelError::Protocol(version));
            }
        }
        let Some(length) = self.length() else { return Ok(None) };
        if length > MESSAGE_LIMIT {
            return Err(ChannelError::Garbage);
        }
        if self.missing_bytes() > 0 {
            return Ok(None);
        }
        let message = postcard::from_bytes(&self.pending[PREFIX_BYTES..]).map_err(|_| ChannelError::Garbage)?;
        self.pending.clear();
        Ok(Some(message))
    }
}

impl ChannelWriter {
    /// Sends a message, waiting for room until `deadline`.
    pub fn send(&mut self, message: &ControlMessage, deadline: Instant) -> Result<(), ChannelError> {
        let bytes = encode(message);
        let mut sent = 0;
        while sent < bytes.len() {
            if self.spoilt {
                return Err(ChannelError::Closed);
            }
            match self.stream.write(&bytes[sent..]) {
                Ok(count) => sent += count,
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        self.spoilt = sent > 0;
                        return Err(ChannelError::Deadline);
                    }
                    let mut entry = [sys::poll_entry(self.stream.as_raw_fd(), true)];
                    sys::poll(&mut entry, left.min(Duration::from_millis(10))).map_err(ChannelError::Broken)?;
                }
                Err(error) => {
                    self.spoilt = true;
                    return Err(ChannelError::Broken(error));
                }
            }
        }
        Ok(())
    }
}

fn encode(message: &ControlMessage) -> Vec<u8> {
    let body = postcard::to_stdvec(message).expect("control messages have a plain data model");
    let mut bytes = Vec::with_capacity(PREFIX_BYTES + body.len());
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&PROTOCOL.to_le_bytes());
    bytes.extend_from_slice(&(body.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&body);
    bytes
}
