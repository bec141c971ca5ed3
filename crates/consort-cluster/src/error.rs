//! What can go wrong between the command and its ranks.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Why a run could not be started, or how it ended.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// The hostfile could not be read.
    #[error("hostfile {}: {error}", path.display())]
    HostfileIo {
        /// The file.
        path: PathBuf,
        /// What the system said. Not a `source`, because the message says it already.
        error: std::io::Error,
    },
    /// The hostfile says something that cannot be used.
    #[error("hostfile {}: {place}: {problem}", path.display())]
    Hostfile {
        /// The file.
        path: PathBuf,
        /// The entry and field: `host 2 (m3), field "slots"`.
        place: String,
        /// What is wrong and what was expected.
        problem: String,
    },
    /// More ranks were asked for than the hosts have slots.
    #[error(
        "{ranks} ranks were asked for, but the hosts have {slots} slots: use fewer ranks, or add hosts or slots to the hostfile"
    )]
    TooFewSlots {
        /// Ranks asked for.
        ranks: usize,
        /// Slots of all hosts.
        slots: usize,
    },
    /// Ranks on several hosts, and nothing says where they find rank 0.
    #[error(
        "host 0 ({host}) needs an address that the other hosts reach: add \"ips\": [\"192.168.1.1\"] to its entry in the hostfile"
    )]
    NoAddress {
        /// Rank 0's host.
        host: String,
    },
    /// Rank 0 was to listen at an address that this machine does not have.
    #[error(
        "host 0 ({host}): rank 0 cannot listen on {address}: {error}; {named_by} must be an address of this machine"
    )]
    ForeignAddress {
        /// Rank 0's host.
        host: String,
        /// The address.
        address: std::net::IpAddr,
        /// Where the user gave the address.
        named_by: &'static str,
        /// What the system said. Not a `source`, because the message says it already.
        error: std::io::Error,
    },
    /// Ranks meet where other machines could join them, and nothing keeps strangers out.
    #[error(
        "ranks meet at {address}, which other machines reach, and that takes a cluster key: make one with `consort key new` and name it with --key"
    )]
    NeedsKey {
        /// Where rank 0 was to listen.
        address: SocketAddr,
    },
    /// The environment that a launcher sets is incomplete or contradicts itself.
    #[error("environment variable {variable}: {problem}")]
    Environment {
        /// The variable.
        variable: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// A rank's process could not be started.
    #[error("rank {rank} ({host}) could not be started: {program}: {error}")]
    Start {
        /// The rank.
        rank: usize,
        /// Its host.
        host: String,
        /// The program that was to run.
        program: String,
        /// What the system said. Not a `source`, because the message says it already.
        error: std::io::Error,
    },
    /// A system call that supervision rests on failed.
    #[error("{what}: {error}")]
    System {
        /// What was attempted.
        what: &'static str,
        /// What the system said. Not a `source`, because the message says it already.
        error: std::io::Error,
    },
    /// A rank failed; all others were ended.
    #[error("{0}")]
    Rank(Box<RankFailure>),
    /// A rank was lost, and the run cannot go on with the others.
    #[error("{failure}; the run cannot go on with what is left: {problem}")]
    CannotReplan {
        /// The loss.
        failure: Box<RankFailure>,
        /// What is in the way.
        problem: String,
    },
    /// The user or the system asked the launcher to end, and all ranks have ended.
    #[error("stopped by {}", signal_name(*signal))]
    Interrupted {
        /// The signal.
        signal: i32,
    },
}

impl ClusterError {
    /// The exit code that a command ending with this error should have: the failed rank's own; 128 + signal after a signal.
    pub fn exit_code(&self) -> u8 {
        let code = match self {
            Self::Rank(failure) | Self::CannotReplan { failure, .. } => failure.exit_code,
            Self::Interrupted { signal } => 128 + signal,
            _ => 1,
        };
        u8::try_from(code).ok().filter(|code| *code != 0).unwrap_or(1)
    }
}

/// How the rank that is to blame for the end of a run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankFailure {
    /// The rank.
    pub rank: usize,
    /// Its host.
    pub host: String,
    /// What happened, as a clause: `failed with exit code 3`.
    pub what: String,
    /// Its exit code; 128 + signal when a signal killed it.
    pub exit_code: i32,
    /// The rank that was lost through no error of its own, so that another start may succeed; none where a rank failed by itself.
    pub lost: Option<usize>,
    /// The message it gave itself before it ended, or else the last lines that it wrote to its standard error.
    pub last_lines: Vec<String>,
}

impl fmt::Display for RankFailure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "rank {} ({}) {}", self.rank, self.host, self.what)?;
        match self.last_lines.as_slice() {
            [] => Ok(()),
            [line] => write!(formatter, ": {line}"),
            lines => write!(formatter, "; its last lines:\n    {}", lines.join("\n    ")),
        }
    }
}

/// `signal 9 (SIGKILL)`.
pub(crate) fn signal_name(signal: i32) -> String {
    let name = match signal {
        libc::SIGHUP => "SIGHUP",
        libc::SIGINT => "SIGINT",
        libc::SIGQUIT => "SIGQUIT",
        libc::SIGILL => "SIGILL",
        libc::SIGABRT => "SIGABRT",
        libc::SIGBUS => "SIGBUS",
        libc::SIGFPE => "SIGFPE",
        libc::SIGKILL => "SIGKILL",
        libc::SIGSEGV => "SIGSEGV",
        libc::SIGPIPE => "SIGPIPE",
        libc::SIGTERM => "SIGTERM",
        _ => return format!("signal {signal}"),
    };
    format!("signal {signal} ({name})")
}
