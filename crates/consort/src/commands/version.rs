//! `consort version`: what this build is and what it can use.

use anyhow::Result;
use clap::Args;

use crate::output;

#[derive(Args)]
pub struct Version {}

impl Version {
    pub fn run(&self) -> Result<()> {
        let lines = [
            ("consort", env!("CARGO_PKG_VERSION").to_owned()),
            ("built for", format!("{} {}", std::env::consts::ARCH, std::env::consts::OS)),
            ("transports", "shm, tcp, rdma".to_owned()),
            ("architectures", consort_models::architectures().join(", ")),
        ];
        Ok(output::text(&lines.iter().map(|(name, value)| format!("{name:<14}{value}\n")).collect::<String>())?)
    }
}
