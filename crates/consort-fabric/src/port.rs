//! A port that is kept for whoever is to listen on it.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use crate::sys;

/// A port that nobody listens on, and that the system gives to nobody who asks for any port while this lives. Who asks for this very
/// one, and sets `SO_REUSEADDR` as listeners of the standard library do, gets it. That is so on Linux; elsewhere the port is found,
/// but not kept.
///
/// Between the search for a free port and rank 0's listening a process starts. Where runs start all the time, as in tests,
/// another would now and then be given the port meanwhile.
#[derive(Debug)]
pub struct ReservedPort {
    address: SocketAddr,
    /// Bound to the address, and not listening.
    socket: Option<OwnedFd>,
}

impl ReservedPort {
    /// Some free port of one of this machine's addresses.
    ///
    /// # Errors
    /// The address does not belong to this machine, or no port is free.
    pub fn of(address: IpAddr) -> io::Result<Self> {
        loop {
            let found = TcpListener::bind((address, 0))?.local_addr()?;
            match sys::bind_aside(found) {
                Ok(socket) => return Ok(Self { address: found, socket }),
                // Somebody was quicker.
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Where to listen.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Has the process that the command starts keep the port for as long as it lives, and this one until then.
    pub fn keep_in(self, command: &mut Command) {
        let Some(socket) = self.socket else { return };
        let inherit = move || {
            // SAFETY: plain integers; in the new process the descriptor is this socket as well.
            match unsafe { libc::fcntl(socket.as_raw_fd(), libc::F_SETFD, 0) } {
                -1 => Err(io::Error::last_os_error()),
                _ => Ok(()),
            }
        };
        // SAFETY: the closure allocates nothing, takes no lock and makes one async-signal-safe call.
        unsafe { command.pre_exec(inherit) };
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_reserved_port_goes_to_who_asks_for_it_alone() {
        for address in ["127.0.0.1", "::1"] {
            let Ok(port) = ReservedPort::of(address.parse().unwrap()) else { continue };
            let listener = TcpListener::bind(port.address()).unwrap();
            assert!(TcpListener::bind(port.address()).is_err(), "one listens already");
            drop(listener);
            drop(TcpListener::bind(port.address()).unwrap());
            // Whoever takes any port until there are no more never gets this one.
            let taken: Vec<_> = std::iter::from_fn(|| sys::bind_aside(SocketAddr::new(port.address().ip(), 0)).ok())
                .take(500)
                .map(|socket| TcpListener::from(socket.unwrap()).local_addr().unwrap())
                .collect();
            assert!(!taken.contains(&port.address()));
        }
    }

    #[test]
    fn a_process_that_was_started_keeps_the_port() {
        let port = ReservedPort::of([127, 0, 0, 1].into()).unwrap();
        let (address, descriptor) = (port.address(), port.socket.as_ref().unwrap().as_raw_fd());
        let kept = |command: &mut Command| {
            let output = command.args(["-c", &format!("readlink /proc/self/fd/{descriptor}")]).output().unwrap();
            String::from_utf8(output.stdout).unwrap()
        };
        assert_eq!(kept(&mut Command::new("sh")), "", "not in every process");
        let mut command = Command::new("sh");
        port.keep_in(&mut command);
        assert!(kept(&mut command).starts_with("socket:"));
        drop(command);
        TcpListener::bind(address).unwrap();
    }
}
