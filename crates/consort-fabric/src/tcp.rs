//! TCP as a rail: non-blocking sockets without delay, header and payload in one system call.

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, RawFd};

use crate::rail::Rail;

/// One connection.
pub(crate) struct TcpRail {
    stream: TcpStream,
}

/// At most this much per system call: some kernels refuse more than 2 GiB.
const CALL_BYTES: usize = 1 << 30;

impl TcpRail {
    pub fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Self { stream })
    }
}

/// Nothing done now is no error.
fn or_nothing(result: io::Result<usize>) -> io::Result<usize> {
    match result {
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(0),
        other => other,
    }
}

impl Rail for TcpRail {
    fn try_send(&mut self, header: &[u8], payload: &[u8]) -> io::Result<usize> {
        let payload = &payload[..payload.len().min(CALL_BYTES)];
        or_nothing(self.stream.write_vectored(&[IoSlice::new(header), IoSlice::new(payload)]))
    }

    fn try_recv(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let length = bytes.len().min(CALL_BYTES);
        match self.stream.read(&mut bytes[..length]) {
            Ok(0) if length > 0 => Err(io::Error::new(ErrorKind::UnexpectedEof, "the peer closed its data connection")),
            result => or_nothing(result),
        }
    }

    fn descriptor(&self) -> Option<RawFd> {
        Some(self.stream.as_raw_fd())
    }

    fn transport(&self) -> &'static str {
        "tcp"
    }
}
