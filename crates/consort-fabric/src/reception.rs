//! Where a rank receives others: listeners, and connections on them until they have said who they are.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use crate::FabricError;
use crate::channel::{Channel, ChannelError, ControlMessage, Hello, PROTOCOL};
use crate::key::ClusterKey;
use crate::rendezvous::setup;
use crate::sys::{self, Interest};

/// A connection that has not said a whole hello by then is closed.
const HELLO_PATIENCE: Duration = Duration::from_secs(5);
/// Connections that may be about to say hello at once; the oldest makes room for one more.
const WAITING_LIMIT: usize = 256;

/// Listeners and the connections on them that have not said a whole hello yet. Bytes that are no hello close their connection
/// and harm nothing else.
pub(crate) struct Reception {
    listeners: Vec<TcpListener>,
    key: Option<ClusterKey>,
    waiting: VecDeque<(Channel, SocketAddr, Instant)>,
    /// Why the last connection was closed that did not say hello, in case that it was a rank after all.
    pub last_closed: Option<String>,
}

impl Reception {
    pub fn new(listeners: Vec<TcpListener>, key: Option<ClusterKey>) -> Result<Self, FabricError> {
        for listener in &listeners {
            listener.set_nonblocking(true).map_err(setup)?;
        }
        Ok(Self { listeners, key, waiting: VecDeque::new(), last_closed: None })
    }

    /// The next complete hello, or `None` at the deadline.
    pub fn next_hello(&mut self, deadline: Instant) -> Result<Option<(Hello, Channel)>, FabricError> {
        loop {
            self.accept_all();
            if let Some(found) = self.read_all() {
                return Ok(Some(found));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            let descriptors = (self.listeners.iter().map(|listener| listener.as_raw_fd()))
                .chain(self.waiting.iter().map(|(channel, ..)| channel.reader.descriptor()));
            let mut entries: Vec<_> =
                descriptors.map(|descriptor| sys::poll_entry(descriptor, Interest::READ)).collect();
            sys::poll(&mut entries, left).map_err(setup)?;
        }
    }

    fn accept_all(&mut self) {
        for listener in &self.listeners {
            loop {
                match listener.accept() {
                    Ok((stream, address)) => {
                        if self.waiting.len() == WAITING_LIMIT {
                            self.waiting.pop_front();
                        }
                        if let Ok(channel) = Channel::accept(stream, self.key.as_ref()) {
                            self.waiting.push_back((channel, address, Instant::now()));
                        }
                    }
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    // Out of descriptors, or the connection is gone already: make room, look again later.
                    Err(_) => {
                        self.waiting.pop_front();
                        break;
                    }
                }
            }
        }
    }

    fn read_all(&mut self) -> Option<(Hello, Channel)> {
        let mut at = 0;
        while at < self.waiting.len() {
            let (channel, address, since) = &mut self.waiting[at];
            let fault = match channel.try_receive() {
                Ok(Some(ControlMessage::Hello(hello))) => {
                    let (channel, ..) = self.waiting.remove(at)?;
                    return Some((*hello, channel));
                }
                Ok(None) if since.elapsed() < HELLO_PATIENCE => {
                    at += 1;
                    continue;
                }
                Ok(_) => ChannelError::Garbage,
                Err(fault) => fault,
            };
            match fault {
                ChannelError::Protocol(version) => {
                    refuse(channel, format!("it speaks protocol version {PROTOCOL}, this rank version {version}"));
                }
                ChannelError::KeyMissing => refuse(channel, fault.to_string()),
                _ => {}
            }
            self.last_closed = Some(format!("; a connection from {address} was closed: {fault}"));
            self.waiting.remove(at);
        }
        None
    }
}

/// Tells the other end why it may not come in, if it listens.
pub(crate) fn refuse(channel: &mut Channel, cause: String) {
    let _ = channel.writer.send(&ControlMessage::Refused(cause), Instant::now() + Duration::from_millis(100));
}
