//! TCP as a rail: non-blocking sockets without delay, header and payload in one system call; plain or encrypted.

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::time::Duration;

use crate::channel::RailStream;
use crate::cipher::{Cipher, RECORD_LIMIT, TAG_BYTES};
use crate::rail::{Rail, Wake};
use crate::sys;

/// At most this much per system call: some kernels refuse more than 2 GiB.
const CALL_BYTES: usize = 1 << 30;

/// The rail over an established connection.
pub(crate) fn rail(RailStream { stream, ciphers }: RailStream, encrypt: bool) -> Box<dyn Rail> {
    match ciphers.filter(|_| encrypt) {
        Some((opening, sealing)) => Box::new(SealedRail::new(stream, opening, sealing)),
        None => Box::new(TcpRail { stream }),
    }
}

/// Nothing done now is no error.
pub(crate) fn or_nothing(result: io::Result<usize>) -> io::Result<usize> {
    match result {
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(0),
        other => other,
    }
}

/// Reads what is there; the end of the stream is an error.
pub(crate) fn read_some(mut stream: impl Read, bytes: &mut [u8]) -> io::Result<usize> {
    match stream.read(bytes) {
        Ok(0) if !bytes.is_empty() => {
            Err(io::Error::new(ErrorKind::UnexpectedEof, "the peer closed its data connection"))
        }
        result => or_nothing(result),
    }
}

fn check(stream: &TcpStream, silence: Duration) -> io::Result<()> {
    if let Some(error) = stream.take_error()? {
        return Err(error);
    }
    stream.peer_addr()?;
    match sys::tcp_unanswered(stream.as_raw_fd()) {
        Some(unanswered) if unanswered >= silence => {
            let seconds = unanswered.as_secs_f64();
            Err(io::Error::new(ErrorKind::TimedOut, format!("no answer for {seconds:.1} s; is the cable unplugged?")))
        }
        _ => Ok(()),
    }
}

/// One plain connection.
struct TcpRail {
    stream: TcpStream,
}

impl Rail for TcpRail {
    fn try_send(&mut self, header: &[u8], payload: &[u8]) -> io::Result<usize> {
        let payload = &payload[..payload.len().min(CALL_BYTES)];
        or_nothing(self.stream.write_vectored(&[IoSlice::new(header), IoSlice::new(payload)]))
    }

    fn try_recv(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let length = bytes.len().min(CALL_BYTES);
        read_some(&self.stream, &mut bytes[..length])
    }

    fn wake(&self) -> Wake {
        Wake::Descriptor(self.stream.as_raw_fd())
    }

    fn check(&self, silence: Duration) -> io::Result<()> {
        check(&self.stream, silence)
    }

    fn transport(&self) -> &'static str {
        "tcp"
    }
}

/// Bytes before each record: its length.
const PREFIX_BYTES: usize = 2;

/// One encrypted connection: a sequence of records, each a length and so many sealed bytes.
struct SealedRail {
    stream: TcpStream,
    sealing: Cipher,
    opening: Cipher,
    /// Header and payload side by side, to be sealed.
    plain_out: Vec<u8>,
    /// The record on its way out, and how much of it has gone. Its bytes count as sent when all of it has.
    sealed_out: Vec<u8>,
    gone: usize,
    /// The record on its way in, and how much of it has come.
    sealed_in: Vec<u8>,
    come: usize,
    /// The record that came, and how much of it has been taken.
    plain_in: Vec<u8>,
    plain_length: usize,
    taken: usize,
}

impl SealedRail {
    fn new(stream: TcpStream, opening: Cipher, sealing: Cipher) -> Self {
        let record = PREFIX_BYTES + RECORD_LIMIT + TAG_BYTES;
        Self {
            stream,
            sealing,
            opening,
            plain_out: Vec::with_capacity(RECORD_LIMIT),
            sealed_out: Vec::with_capacity(record),
            gone: 0,
            sealed_in: vec![0; record],
            come: 0,
            plain_in: vec![0; RECORD_LIMIT + TAG_BYTES],
            plain_length: 0,
            taken: 0,
        }
    }

    /// Reads towards the next record; true once it is open.
    fn receive_record(&mut self) -> io::Result<bool> {
        loop {
            let length = match self.come {
                0..PREFIX_BYTES => 0,
                _ => u16::from_le_bytes([self.sealed_in[0], self.sealed_in[1]]) as usize,
            };
            let end = PREFIX_BYTES + length;
            if self.come == end {
                let opened = self.opening.open(&self.sealed_in[PREFIX_BYTES..end], &mut self.plain_in);
                let forged = || io::Error::new(ErrorKind::InvalidData, "an encrypted record was changed on its way");
                (self.plain_length, self.taken, self.come) = (opened.ok_or_else(forged)?, 0, 0);
                return Ok(true);
            }
            let count = read_some(&self.stream, &mut self.sealed_in[self.come..end])?;
            if count == 0 {
                return Ok(false);
            }
            self.come += count;
        }
    }
}

impl Rail for SealedRail {
    fn try_send(&mut self, header: &[u8], payload: &[u8]) -> io::Result<usize> {
        if self.sealed_out.is_empty() {
            self.plain_out.clear();
            for bytes in [header, payload] {
                let room = RECORD_LIMIT - self.plain_out.len();
                self.plain_out.extend_from_slice(&bytes[..bytes.len().min(room)]);
            }
            self.sealed_out.resize(PREFIX_BYTES + self.plain_out.len() + TAG_BYTES, 0);
            let length = self.sealing.seal(&self.plain_out, &mut self.sealed_out[PREFIX_BYTES..]);
            self.sealed_out[..PREFIX_BYTES].copy_from_slice(&(length as u16).to_le_bytes());
            self.gone = 0;
        }
        // The caller offers the same bytes again until they are taken, so an unfinished record stays the right one.
        self.gone += or_nothing(self.stream.write(&self.sealed_out[self.gone..]))?;
        if self.gone < self.sealed_out.len() {
            return Ok(0);
        }
        self.sealed_out.clear();
        Ok(self.plain_out.len())
    }

    fn try_recv(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        if self.taken == self.plain_length && !self.receive_record()? {
            return Ok(0);
        }
        let count = bytes.len().min(self.plain_length - self.taken);
        bytes[..count].copy_from_slice(&self.plain_in[self.taken..self.taken + count]);
        self.taken += count;
        Ok(count)
    }

    fn wake(&self) -> Wake {
        Wake::Descriptor(self.stream.as_raw_fd())
    }

    fn check(&self, silence: Duration) -> io::Result<()> {
        check(&self.stream, silence)
    }

    fn transport(&self) -> &'static str {
        "tcp+noise"
    }
}
