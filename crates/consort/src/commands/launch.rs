//! `consort launch`: one of the other commands, on the machines of a hostfile.

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;
use consort_cluster::{Hostfile, RankIdentity};

use crate::commands::parse;
use crate::invocation::Invocation;

#[derive(Args)]
pub struct Launch {
    /// The machines, in JACCL's JSON format (see docs/hostfile.md)
    #[arg(long, value_name = "PATH")]
    hostfile: PathBuf,
    /// Set a variable in every rank's environment; may be repeated
    #[arg(long = "env", value_name = "NAME=VALUE", value_parser = consort_cluster::assignment)]
    environment: Vec<(String, String)>,
    /// generate, chat, logits or bench, with its flags
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

impl Launch {
    pub fn run(self, invocation: Invocation) -> Result<()> {
        if let Some(RankIdentity { rank, size, .. }) = &invocation.identity {
            bail!("another launcher started this as rank {rank} of {size}: leave out `launch --hostfile`");
        }
        let hostfile = Hostfile::read(&self.hostfile)?;
        for warning in &hostfile.warnings {
            eprintln!("hostfile {}: {warning}", self.hostfile.display());
        }
        let arguments = self.command;
        let words = std::iter::once(OsString::from("consort")).chain(arguments.iter().cloned());
        let Some(inner) = parse(words)? else { return Ok(()) };
        let invocation =
            Invocation { arguments, hostfile: Some(hostfile), environment: self.environment, ..invocation };
        inner.command.run_on_ranks(&invocation)
    }
}
