//! How this process came to be: typed by a user, or started as a rank; and what it takes to start ranks of its own.

use std::ffi::OsString;
use std::io::IsTerminal;
use std::time::Duration;

use anyhow::{Context, Result};
use consort_cluster::{ControlChannel, Hostfile, Input, Launch, RankIdentity, Recovery, Replay, supervise};
use consort_fabric::ClusterKey;

use crate::network::NetworkFlags;

/// The command line and the place of this process in a run.
pub struct Invocation {
    /// Who this process is, if a launcher started it.
    pub identity: Option<RankIdentity>,
    /// What the user types in a chat, if a launcher started this process.
    pub control: Option<ControlChannel>,
    /// The command and its flags, as each rank gets them.
    pub arguments: Vec<OsString>,
    /// The machines, if `launch` named them.
    pub hostfile: Option<Hostfile>,
    /// The ranks' environment, beside their identity, as `launch` set it.
    pub environment: Vec<(String, String)>,
}

impl Invocation {
    /// This process's own.
    pub fn new() -> Result<Self> {
        Ok(Self {
            identity: RankIdentity::from_environment()?,
            // Before anything else: from here on this process ends when its launcher does.
            control: ControlChannel::open(),
            arguments: std::env::args_os().skip(1).collect(),
            hostfile: None,
            environment: Vec::new(),
        })
    }

    /// The cluster key that this rank's launcher handed over.
    pub fn key(&self) -> Option<&ClusterKey> {
        self.control.as_ref().and_then(ControlChannel::key)
    }

    /// What an earlier rank 0 of this run has generated, if this one may be started again.
    pub fn replay(&self) -> Option<Replay> {
        self.control.as_ref().and_then(ControlChannel::replay).cloned()
    }

    /// How long a rank waits for the others where the user does not say. One of them may have to download the model first, and
    /// the launcher notices when one has died; a rank that has no launcher must not wait for ever.
    pub fn connect_timeout(&self) -> Duration {
        Duration::from_secs(if self.control.is_some() { 24 * 3600 } else { 30 })
    }

    /// Starts `ranks` ranks of this executable with these arguments and returns when all have ended.
    pub fn launch(
        &self,
        arguments: Vec<OsString>,
        ranks: usize,
        network: Option<&NetworkFlags>,
        input: Input,
        recovery: Recovery<'_>,
    ) -> Result<()> {
        network.map_or(Ok(()), |network| network.check_ranks(ranks))?;
        let launch = Launch {
            program: std::env::current_exe().context("finding this executable, to start ranks with")?,
            arguments,
            hostfile: self.hostfile.clone().unwrap_or_else(|| Hostfile::local(ranks)),
            ranks,
            port: network.and_then(|network| network.port),
            bind: network.and_then(|network| network.bind),
            environment: self.environment.clone(),
            key: network.map_or(Ok(None), NetworkFlags::key)?,
            hang_timeout: network.map_or(Duration::from_secs(10), |network| network.hang_timeout),
            recovers: false,
            terminal: std::io::stdout().is_terminal(),
        };
        Ok(supervise(launch, input, recovery)?)
    }
}
