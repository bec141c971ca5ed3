//! How ranks reach each other: the flags for it, and what the fabric makes of them.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use consort_cluster::RankIdentity;
use consort_fabric::{ClusterKey, EmulatedLink, FabricError, FabricOptions, TransportChoice, Wire};
use serde::Serialize;

/// Names the key where `--key` does not: a file, or the key's 64 digits themselves.
const KEY_VARIABLE: &str = "CONSORT_KEY";

/// What carries data between ranks, and how.
#[derive(Args, Clone, Debug)]
pub struct NetworkFlags {
    /// What carries data between ranks
    #[arg(long, value_enum, default_value_t)]
    pub transport: Transport,
    /// The cluster key that all ranks prove to each other; CONSORT_KEY names it too (make one with `consort key new`)
    #[arg(long, value_name = "PATH")]
    pub key: Option<PathBuf>,
    /// Encrypt data on TCP; takes a cluster key
    #[arg(long)]
    pub encrypt: bool,
    /// What the values of sums between ranks are on their way; bf16 halves the bytes and rounds what enters a sum
    #[arg(long, value_enum, default_value_t)]
    pub wire: WireFormat,
    /// Make links between ranks on this machine behave like slower ones: latency=50us,bandwidth=10gbit,loss=1e-4,rails=2
    #[arg(long, value_name = "SETTINGS")]
    pub emulate_link: Option<Emulation>,
    /// Seconds of silence after which another rank counts as lost
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    pub hang_timeout: Duration,
    /// Seconds to wait until all ranks have come together [default: as long as all live; 30 for ranks that were not started by
    /// this program]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub connect_timeout: Option<Duration>,
    /// The port that rank 0 listens on [default: a free one, or 29517 if rank 0 is on another machine]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    pub port: Option<u16>,
    /// The address that rank 0 listens on [default: the one at which the other ranks look for it]
    #[arg(long, value_name = "IP")]
    pub bind: Option<IpAddr>,
}

/// `--transport`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Transport {
    /// The fastest that each link offers
    #[default]
    Auto,
    /// Shared memory, for ranks on one machine
    Shm,
    /// TCP
    Tcp,
    /// RDMA
    Rdma,
}

/// `--wire`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum WireFormat {
    /// As they are
    #[default]
    F32,
    /// Rounded to bf16, summed in f32
    Bf16,
}

impl WireFormat {
    /// The name in reports; none for the one that changes nothing.
    pub fn remark(self) -> &'static str {
        match self {
            Self::F32 => "",
            Self::Bf16 => ", bf16 on the wire",
        }
    }
}

impl From<WireFormat> for Wire {
    fn from(format: WireFormat) -> Self {
        match format {
            WireFormat::F32 => Self::Full,
            WireFormat::Bf16 => Self::Bf16,
        }
    }
}

impl From<Transport> for TransportChoice {
    fn from(choice: Transport) -> Self {
        match choice {
            Transport::Auto => Self::Auto,
            Transport::Shm => Self::Shm,
            Transport::Tcp => Self::Tcp,
            Transport::Rdma => Self::Rdma,
        }
    }
}

/// `--emulate-link`, with the words that it was asked for in: a figure over an emulated link must say so.
#[derive(Clone, Debug)]
pub struct Emulation {
    /// As the user wrote it.
    pub words: String,
    link: EmulatedLink,
}

impl FromStr for Emulation {
    type Err = FabricError;

    fn from_str(words: &str) -> Result<Self, FabricError> {
        Ok(Self { words: words.to_owned(), link: words.parse()? })
    }
}

impl NetworkFlags {
    /// The cluster key, if the user gave one.
    pub fn key(&self) -> Result<Option<ClusterKey>> {
        if let Some(path) = &self.key {
            ensure!(
                path.exists() || !resembles_key(path),
                "--key takes the path of a key file; what it was given names none, and is not shown, since it may be a key"
            );
            return Ok(Some(ClusterKey::load(path)?));
        }
        let Some(named) = std::env::var_os(KEY_VARIABLE).filter(|value| !value.is_empty()) else {
            ensure!(
                !self.encrypt,
                "--encrypt takes a cluster key: make one with `consort key new` and name it with --key"
            );
            return Ok(None);
        };
        match named.to_str().and_then(ClusterKey::from_hex) {
            Some(key) => Ok(Some(key)),
            None => {
                let path = Path::new(&named);
                ensure!(
                    path.exists(),
                    "{KEY_VARIABLE} holds neither a key, which has 64 hexadecimal digits, nor the path of a file; \
                     its value is not shown, since it may be a key"
                );
                Ok(Some(ClusterKey::load(path).context(KEY_VARIABLE)?))
            }
        }
    }

    /// What a rank connects with. `key` is what its launcher handed over; a rank that something else started looks for its own.
    pub fn options(
        &self,
        identity: &RankIdentity,
        key: Option<&ClusterKey>,
        connect_timeout: Duration,
    ) -> Result<FabricOptions> {
        Ok(FabricOptions {
            rank: identity.rank,
            size: identity.size,
            rendezvous: identity.rendezvous.clone(),
            bind: self.bind,
            host: identity.host.clone(),
            run_id: identity.run_id.clone(),
            transport: self.transport.into(),
            rail_addresses: identity.addresses.clone(),
            rdma_devices: identity.rdma.clone(),
            connect_timeout: self.connect_timeout.unwrap_or(connect_timeout),
            hang_timeout: self.hang_timeout,
            key: key.cloned().map_or_else(|| self.key(), |key| Ok(Some(key)))?,
            encrypt: self.encrypt,
            wire: self.wire.into(),
            emulate: self.emulate_link.as_ref().map(|emulation| emulation.link),
            ..FabricOptions::default()
        })
    }

    /// Refuses an emulated link between ranks that the run does not have.
    pub fn check_ranks(&self, ranks: usize) -> Result<(), FabricError> {
        self.emulate_link.as_ref().map_or(Ok(()), |emulation| emulation.link.check_ranks(ranks))
    }

    /// The emulated link, as the user described it.
    pub fn emulation(&self) -> Option<&str> {
        self.emulate_link.as_ref().map(|emulation| emulation.words.as_str())
    }
}

/// Whether a path looks like a key that was typed in its place.
fn resembles_key(path: &Path) -> bool {
    let bytes = path.as_os_str().as_encoded_bytes();
    bytes.len() >= 32 && bytes.iter().all(u8::is_ascii_alphanumeric)
}

fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=86_400.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("expected seconds from 0.1 to 86400".to_owned()),
    }
}
