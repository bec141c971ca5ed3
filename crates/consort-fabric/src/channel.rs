//! A control connection: small typed messages over TCP, read without ever blocking and never trusted. With a cluster key, both
//! sides prove it first and everything after that is encrypted.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::FabricError;
use crate::cipher::{Cipher, HANDSHAKE_LIMIT, Handshake, RECORD_LIMIT, TAG_BYTES};
use crate::health::Failure;
use crate::key::ClusterKey;
use crate::shm::RegionAddress;
use crate::sys::{self, Interest};
use crate::vigil::Vigil;

/// First bytes of every control message.
const MAGIC: [u8; 4] = *b"CNST";
/// First bytes of a handshake message.
const HANDSHAKE_MAGIC: [u8; 4] = *b"CNSK";
/// Version of the control protocol. Read before anything else of a message, so that other versions can be named.
pub(crate) const PROTOCOL: u16 = 4;
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
    /// This rank has all its links.
    Ready,
    /// Still alive.
    Heartbeat,
    /// The fabric has failed.
    Abort(Failure),
    /// This rank leaves in good order.
    Goodbye,
    /// So many frames have come whole on that rail.
    Acknowledged { rail: u8, frames: u64 },
    /// This rank uses that rail no more; so many frames had come whole on it.
    RailLost { rail: u8, frames: u64 },
    /// A frame that was lost with its rail.
    Resent { header: Vec<u8>, payload: Vec<u8> },
}

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Purpose {
    /// Control messages.
    Control,
    /// The same control messages, over another cable.
    Spare,
    /// The rail of that index: after the hello, data frames only.
    Rail(u8),
    /// What ranks pass on for others.
    Relay,
}

/// Who a rank is and what it brings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub purpose: Purpose,
    pub run_id: String,
    pub rank: u32,
    pub size: u32,
    pub host: String,
    /// Items that must be equal on all ranks.
    pub agreement: Vec<(String, String)>,
    /// Time of day in nanoseconds, to show how far clocks differ.
    pub clock_ns: u64,
    /// Ranks of equal machines can share memory.
    pub machine: String,
    /// The cores on which it may run.
    pub cores: Vec<u32>,
    /// Where higher ranks connect for control messages.
    pub control_address: Option<SocketAddr>,
    /// Where higher ranks connect for each rail.
    pub rail_addresses: Vec<SocketAddr>,
    /// For each rank, how many RDMA devices this one has for the link to it; or why it cannot use RDMA.
    pub rdma: Result<Vec<usize>, String>,
    /// The region in which peers on this machine write.
    pub region: Option<RegionAddress>,
}

#[cfg(test)]
impl Hello {
    /// What a rank of a run of `size` on machines of their own might say.
    pub fn example(rank: u32, size: u32) -> Self {
        Self {
            purpose: Purpose::Control,
            run_id: String::new(),
            rank,
            size,
            host: format!("m{rank}"),
            agreement: Vec::new(),
            clock_ns: 0,
            machine: rank.to_string(),
            cores: Vec::new(),
            control_address: None,
            rail_addresses: Vec::new(),
            rdma: Ok(Vec::new()),
            region: None,
        }
    }
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
    #[error("one side has a cluster key and the other has none")]
    KeyMissing,
    #[error("the cluster keys differ")]
    KeyDiffers,
    #[error("{0}")]
    Lost(Box<FabricError>),
}

impl From<io::Error> for ChannelError {
    fn from(error: io::Error) -> Self {
        Self::Broken(error)
    }
}

/// Both halves of a control connection.
pub(crate) struct Channel {
    pub reader: ChannelReader,
    pub writer: ChannelWriter,
    /// An accepted connection whose other side has not proved the key yet.
    handshake: Option<Handshake>,
}

/// The reading half.
pub(crate) struct ChannelReader {
    stream: TcpStream,
    /// Bytes of the record or message that is being read.
    raw: Vec<u8>,
    cipher: Option<Cipher>,
    /// Plain bytes of the current message.
    plain: Vec<u8>,
    /// Its body's length, once its prefix is here.
    body_length: Option<usize>,
}

/// The writing half.
pub(crate) struct ChannelWriter {
    stream: TcpStream,
    cipher: Option<Cipher>,
    /// A message that went out only in part spoils the stream.
    spoilt: bool,
}

/// A connection that said hello as a rail: bare, with its ciphers if a key is in use.
pub(crate) struct RailStream {
    pub stream: TcpStream,
    /// For reading and for writing.
    pub ciphers: Option<(Cipher, Cipher)>,
}

impl Channel {
    /// The accepting side. Nothing is parsed before the other side has proved `key`, if there is one.
    pub fn accept(stream: TcpStream, key: Option<&ClusterKey>) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let reader = ChannelReader {
            stream: stream.try_clone()?,
            raw: Vec::new(),
            cipher: None,
            plain: Vec::new(),
            body_length: None,
        };
        let writer = ChannelWriter { stream, cipher: None, spoilt: false };
        Ok(Self { reader, writer, handshake: key.map(|key| Handshake::new(key, false)) })
    }

    /// The connecting side: proves the key, and has the other side prove it.
    pub fn connect(stream: TcpStream, key: Option<&ClusterKey>, vigil: Vigil) -> Result<Self, ChannelError> {
        let mut channel = Self::accept(stream, None)?;
        let Some(key) = key else { return Ok(channel) };
        let mut handshake = Handshake::new(key, true);
        // The first message on a connection finds room.
        channel.writer.write_handshake(&handshake.write(), vigil.next_look())?;
        loop {
            match channel.reader.read_handshake() {
                Ok(Some(answer)) if handshake.read(&answer) => break,
                // The other side closes without a word when it cannot read what this side sent.
                Ok(Some(_)) | Err(ChannelError::Closed) => return Err(ChannelError::KeyDiffers),
                Ok(None) if vigil.is_over() => return Err(ChannelError::Deadline),
                Ok(None) => {
                    vigil.check().map_err(|lost| ChannelError::Lost(Box::new(lost)))?;
                    channel.reader.wait(vigil.nap())?;
                }
                Err(error) => return Err(error),
            }
        }
        channel.seal(handshake);
        Ok(channel)
    }

    /// The next message, if the other side has proved the key and the message is complete.
    pub fn try_receive(&mut self) -> Result<Option<ControlMessage>, ChannelError> {
        if let Some(handshake) = &mut self.handshake {
            let Some(message) = self.reader.read_handshake()? else { return Ok(None) };
            if !handshake.read(&message) {
                return Err(ChannelError::KeyDiffers);
            }
            let answer = handshake.write();
            // The answer is short and the first thing on this connection: there is room for it.
            self.writer.write_handshake(&answer, Instant::now())?;
            let handshake = self.handshake.take().expect("checked above");
            self.seal(handshake);
        }
        self.reader.try_receive()
    }

    fn seal(&mut self, handshake: Handshake) {
        let (reading, writing) = handshake.finish();
        (self.reader.cipher, self.writer.cipher) = (Some(reading), Some(writing));
    }

    /// The bare connection, for use as a rail. Nothing has been read beyond the hello.
    pub fn into_rail(self) -> RailStream {
        RailStream { stream: self.writer.stream, ciphers: self.reader.cipher.zip(self.writer.cipher) }
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
            match &mut self.cipher {
                None => {
                    let missing = PREFIX_BYTES + self.body_length.unwrap_or(0) - self.plain.len();
                    if !fill(&self.stream, &mut self.plain, missing)? {
                        return Ok(None);
                    }
                }
                Some(cipher) => {
                    let Some(record) = read_record(&self.stream, &mut self.raw)? else { return Ok(None) };
                    let start = self.plain.len();
                    self.plain.resize(start + record.len(), 0);
                    let length = cipher.open(record, &mut self.plain[start..]).ok_or(ChannelError::Garbage)?;
                    self.plain.truncate(start + length);
                    self.raw.clear();
                }
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
            self.wait(left)?;
        }
    }

    /// Waits until there may be something to read.
    fn wait(&self, patience: Duration) -> Result<(), ChannelError> {
        sys::poll(&mut [sys::poll_entry(self.descriptor(), Interest::READ)], patience)?;
        Ok(())
    }

    /// A handshake message, once it is complete.
    fn read_handshake(&mut self) -> Result<Option<Vec<u8>>, ChannelError> {
        let prefix = HANDSHAKE_MAGIC.len() + 1;
        loop {
            let seen = self.raw.len().min(HANDSHAKE_MAGIC.len());
            if self.raw[..seen] != HANDSHAKE_MAGIC[..seen] {
                let plain = self.raw[..seen] == MAGIC[..seen];
                return Err(if plain { ChannelError::KeyMissing } else { ChannelError::Garbage });
            }
            let length = self.raw.get(prefix - 1).map_or(0, |&length| length as usize);
            if length > HANDSHAKE_LIMIT {
                return Err(ChannelError::Garbage);
            }
            let missing = prefix + length - self.raw.len();
            if missing == 0 {
                let message = self.raw.split_off(prefix);
                self.raw.clear();
                return Ok(Some(message));
            }
            if !fill(&self.stream, &mut self.raw, missing)? {
                return Ok(None);
            }
        }
    }

    fn decode(&mut self) -> Result<Option<ControlMessage>, ChannelError> {
        self.body_length = check_prefix(&self.plain)?;
        let message = decode(&self.plain)?;
        if message.is_some() {
            self.plain.clear();
            self.body_length = None;
        }
        Ok(message)
    }
}

/// The message that `bytes` are, if they are all of it.
pub(crate) fn decode(bytes: &[u8]) -> Result<Option<ControlMessage>, ChannelError> {
    let Some(length) = check_prefix(bytes)? else { return Ok(None) };
    match bytes[PREFIX_BYTES..].len() {
        there if there < length => Ok(None),
        there if there > length => Err(ChannelError::Garbage),
        _ => postcard::from_bytes(&bytes[PREFIX_BYTES..]).map(Some).map_err(|_| ChannelError::Garbage),
    }
}

/// Looks at as much of a message's prefix as is there; the body's length, once the prefix is whole.
fn check_prefix(bytes: &[u8]) -> Result<Option<usize>, ChannelError> {
    let seen = bytes.len().min(MAGIC.len());
    if bytes[..seen] != MAGIC[..seen] {
        let sealed = bytes[..seen] == HANDSHAKE_MAGIC[..seen];
        return Err(if sealed { ChannelError::KeyMissing } else { ChannelError::Garbage });
    }
    if let Some(version) = bytes.get(4..6) {
        let version = u16::from_le_bytes([version[0], version[1]]);
        if version != PROTOCOL {
            return Err(ChannelError::Protocol(version));
        }
    }
    let Some(length) = bytes.get(6..PREFIX_BYTES) else { return Ok(None) };
    let length = u32::from_le_bytes(length.try_into().expect("four bytes")) as usize;
    if length > MESSAGE_LIMIT { Err(ChannelError::Garbage) } else { Ok(Some(length)) }
}

/// Reads at most `wanted` bytes, so that none that belong to what comes next are taken; false if nothing is there now.
fn fill(mut stream: &TcpStream, bytes: &mut Vec<u8>, wanted: usize) -> Result<bool, ChannelError> {
    let mut chunk = [0; 4096];
    let wanted = wanted.min(chunk.len());
    loop {
        match stream.read(&mut chunk[..wanted]) {
            Ok(0) => return Err(ChannelError::Closed),
            Ok(count) => {
                bytes.extend_from_slice(&chunk[..count]);
                return Ok(true);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(ChannelError::Broken(error)),
        }
    }
}

/// The next sealed record, once it is complete: two bytes of length, and the record.
fn read_record<'a>(stream: &TcpStream, raw: &'a mut Vec<u8>) -> Result<Option<&'a [u8]>, ChannelError> {
    loop {
        let length = raw.get(..2).map_or(0, |bytes| u16::from_le_bytes([bytes[0], bytes[1]]) as usize);
        let missing = 2 + length - raw.len();
        if missing == 0 {
            return Ok(Some(&raw[2..]));
        }
        if !fill(stream, raw, missing)? {
            return Ok(None);
        }
    }
}

impl ChannelWriter {
    /// Sends a message, waiting for room until `deadline`.
    pub fn send(&mut self, message: &ControlMessage, deadline: Instant) -> Result<(), ChannelError> {
        let mut bytes = encode(message);
        if let Some(cipher) = &mut self.cipher {
            bytes = bytes.chunks(RECORD_LIMIT).flat_map(|chunk| seal_record(cipher, chunk)).collect();
        }
        self.write(&bytes, deadline)
    }

    fn write_handshake(&mut self, message: &[u8], deadline: Instant) -> Result<(), ChannelError> {
        self.write(&[&HANDSHAKE_MAGIC, &[message.len() as u8][..], message].concat(), deadline)
    }

    fn write(&mut self, bytes: &[u8], deadline: Instant) -> Result<(), ChannelError> {
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
                        // A sealed record has used up its number even if none of it went out.
                        self.spoilt = sent > 0 || self.cipher.is_some();
                        return Err(ChannelError::Deadline);
                    }
                    let mut entry = [sys::poll_entry(self.stream.as_raw_fd(), Interest::WRITE)];
                    sys::poll(&mut entry, left.min(Duration::from_millis(10)))?;
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

/// The bytes of `message` on a connection without a key.
pub(crate) fn encode(message: &ControlMessage) -> Vec<u8> {
    let body = postcard::to_stdvec(message).expect("control messages have a plain data model");
    let mut bytes = Vec::with_capacity(PREFIX_BYTES + body.len());
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&PROTOCOL.to_le_bytes());
    bytes.extend_from_slice(&(body.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&body);
    bytes
}

fn seal_record(cipher: &mut Cipher, plain: &[u8]) -> Vec<u8> {
    let mut record = vec![0; 2 + plain.len() + TAG_BYTES];
    let length = cipher.seal(plain, &mut record[2..]) as u16;
    record[..2].copy_from_slice(&length.to_le_bytes());
    record
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_messages_are_refused_or_another_message() {
        let messages = [
            ControlMessage::Heartbeat,
            ControlMessage::Refused("no".into()),
            ControlMessage::Abort(Failure { rank: 3, gave_up: false, cause: "its process ended".into() }),
        ];
        for message in messages {
            let bytes = encode(&message);
            assert_eq!(decode(&bytes).unwrap(), Some(message));
            for length in 0..bytes.len() {
                assert!(matches!(decode(&bytes[..length]), Ok(None)), "a message cut after {length} bytes");
            }
            assert!(decode(&[&bytes[..], &[0]].concat()).is_err());
            for bit in 0..8 * bytes.len() {
                let mut damaged = bytes.clone();
                damaged[bit / 8] ^= 1 << (bit % 8);
                // A flipped bit of a text is another text: what matters is that nothing panics, and nothing is taken for the original.
                assert!(decode(&damaged).map_or(true, |decoded| decoded != decode(&bytes).unwrap()), "bit {bit}");
            }
        }
    }
}
