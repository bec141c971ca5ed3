//! `consort key`: the secret that keeps strangers out of a run.

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, Subcommand};
use consort_fabric::ClusterKey;

use crate::output;

#[derive(Args)]
pub struct Key {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Write a new key to a file that only its owner can read; an existing file is kept
    New {
        /// The file
        #[arg(default_value = "consort.key")]
        path: PathBuf,
    },
}

impl Key {
    pub fn run(&self) -> Result<()> {
        let Action::New { path } = &self.action;
        ClusterKey::generate(path)?;
        eprintln!("use it with --key {}; hosts that a run starts by ssh get it from the run", path.display());
        Ok(output::text(&format!("{}\n", path.display()))?)
    }
}
