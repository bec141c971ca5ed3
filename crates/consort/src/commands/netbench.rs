//! `consort netbench`: how fast ranks exchange data, without a model.

use std::path::PathBuf;

use anyhow::{Result, bail, ensure};
use clap::{Args, ValueEnum};
use consort_cluster::doctor::{available_bytes, installed_bytes};
use consort_cluster::links::{self, Link};
use consort_cluster::{Hostfile, Input, RankIdentity, Recovery, parse_size};
use consort_fabric::netbench::{self, Measurement, NetbenchOptions};
use consort_fabric::{Algorithm, Fabric, FabricError, FabricOptions};
use serde::Serialize;

use crate::flags::JsonFlag;
use crate::invocation::Invocation;
use crate::network::{NetworkFlags, WireFormat};
use crate::output;
use crate::report::{count, link_conditions};
use crate::run;

#[derive(Args)]
pub struct Netbench {
    /// Number of ranks [default: one per slot of the hostfile, or 2]
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u16).range(2..=1024))]
    ranks: Option<u16>,
    /// The machines [default: this one]
    #[arg(long, value_name = "PATH")]
    hostfile: Option<PathBuf>,
    /// Only collectives whose name begins like this, and the train of all-reduces
    #[arg(long, value_name = "NAME", default_value = "", value_parser = collective_name)]
    only: String,
    /// Smallest message
    #[arg(long, value_name = "SIZE", default_value = "1KiB", value_parser = message_bytes)]
    min_bytes: usize,
    /// Largest message; each size is four times the one before
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = message_bytes)]
    max_bytes: usize,
    /// Most repetitions of each measurement; large messages get fewer
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    repetitions: u32,
    /// Values of the hidden vector in the train of 200 dependent all-reduces
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..))]
    hidden: u32,
    /// How sums are made, for comparison; all but auto may be slower
    #[arg(long, value_enum, default_value_t)]
    algorithm: SumAlgorithm,
    /// Measure the link between each pair of ranks in both directions instead
    #[arg(long)]
    links: bool,
    #[command(flatten)]
    network: NetworkFlags,
    #[command(flatten)]
    json: JsonFlag,
}

/// `--algorithm`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum SumAlgorithm {
    /// What suits links and size
    #[default]
    Auto,
    /// Whole vectors to all: one hop
    Direct,
    /// Parts to all and back: less to send
    Scatter,
    /// From rank to rank and back, as in a ring of cables
    Line,
}

impl From<SumAlgorithm> for Algorithm {
    fn from(algorithm: SumAlgorithm) -> Self {
        match algorithm {
            SumAlgorithm::Auto => Self::Auto,
            SumAlgorithm::Direct => Self::Direct,
            SumAlgorithm::Scatter => Self::Scatter,
            SumAlgorithm::Line => Self::Line,
        }
    }
}

/// The JSON object.
#[derive(Serialize)]
struct Answer<'a> {
    conditions: Conditions<'a>,
    measurements: Vec<Measurement>,
    links: Vec<Link>,
}

/// What the figures depend on.
#[derive(Serialize)]
struct Conditions<'a> {
    /// In rank order.
    hosts: Vec<&'a str>,
    transport: &'static str,
    /// Cables or sockets of the links of rank 0, at least.
    rails: usize,
    emulated_link: Option<&'a str>,
    encrypted: bool,
    wire: WireFormat,
    algorithm: SumAlgorithm,
    version: &'static str,
}

impl Netbench {
    pub fn run(&self, invocation: Invocation) -> Result<()> {
        match &invocation.identity {
            Some(identity) => self.take_part(&invocation, identity),
            None => self.begin(invocation),
        }
    }

    fn begin(&self, invocation: Invocation) -> Result<()> {
        output::check_writable(&self.json)?;
        let hostfile = self.hostfile.as_deref().map(Hostfile::read).transpose()?;
        let slots = hostfile.as_ref().map_or(2, Hostfile::slots);
        let ranks = self.ranks.map_or(slots, usize::from);
        ensure!(ranks >= 2, "the hostfile has one slot, and it takes two ranks to measure anything");
        let here = |file: &Hostfile| {
            file.hosts.iter().filter(|host| host.is_this_machine()).map(|host| host.slots).sum::<usize>().min(ranks)
        };
        self.check(hostfile.as_ref().map_or(ranks, here))?;
        let invocation = Invocation { hostfile, ..invocation };
        let arguments = invocation.arguments.clone();
        invocation.launch(arguments, ranks, Some(&self.network), Input::Unused, Recovery::default())
    }

    /// Refuses what nothing would be measured with, and what `ranks` on this machine have no memory for.
    fn check(&self, ranks: usize) -> Result<()> {
        let Self { min_bytes, max_bytes, .. } = self;
        ensure!(
            min_bytes <= max_bytes,
            "--min-bytes {min_bytes} is more than --max-bytes {max_bytes}: no size is between"
        );
        let needed = self.options().needed_bytes().saturating_mul(ranks as u64);
        if let Some(available) =
            available_bytes().or_else(installed_bytes).filter(|&bytes| bytes < needed && !self.links)
        {
            bail!(
                "netbench needs {} for {} on this machine, {} are available: choose a smaller --max-bytes or --hidden",
                output::size(needed),
                count(ranks, "rank"),
                output::size(available)
            );
        }
        Ok(())
    }

    fn take_part(&self, invocation: &Invocation, identity: &RankIdentity) -> Result<()> {
        self.check(identity.local_size)?;
        // A rank that computes is pinned too. Left to the system, two ranks that wait for each other often share a core.
        if let Some(&core) = run::cores(Some(identity)).first() {
            consort_cpu::pin(core);
        }
        let options = self.network.options(identity, invocation.key(), invocation.connect_timeout())?;
        let fabric = Fabric::connect(FabricOptions { algorithm: self.algorithm.into(), ..options })?;
        let (measurements, links) = self.measure(&fabric).inspect_err(|error| fabric.abort(&error.to_string()))?;
        if identity.rank != 0 {
            return Ok(());
        }
        let world = fabric.world();
        let conditions = Conditions {
            hosts: fabric.peers().iter().map(|peer| peer.host.as_str()).collect(),
            transport: world.transport(),
            rails: fabric.peers().iter().filter(|peer| peer.rails > 0).map(|peer| peer.rails).min().unwrap_or(0),
            emulated_link: self.network.emulation(),
            encrypted: self.network.encrypt,
            wire: self.network.wire,
            algorithm: self.algorithm,
            version: env!("CARGO_PKG_VERSION"),
        };
        let wrong = measurements.iter().find(|measurement| !measurement.correct).cloned();
        let answer = Answer { conditions, measurements, links };
        if !self.json.takes_stdout() {
            output::text(&answer.text(self.hidden))?;
        }
        output::json(&self.json, &answer)?;
        match wrong {
            Some(Measurement { collective, bytes, .. }) => {
                bail!("{collective} of {bytes} bytes gave wrong values: do not trust this network, and report it")
            }
            None => Ok(()),
        }
    }

    fn measure(&self, fabric: &Fabric) -> Result<(Vec<Measurement>, Vec<Link>), FabricError> {
        if self.links {
            return Ok((Vec::new(), links::measure(fabric)?));
        }
        Ok((netbench::run(&fabric.world(), &self.options())?, Vec::new()))
    }

    fn options(&self) -> NetbenchOptions {
        NetbenchOptions {
            only: self.only.clone(),
            smallest_bytes: self.min_bytes,
            largest_bytes: self.max_bytes,
            repetitions: self.repetitions as usize,
            hidden: self.hidden as usize,
        }
    }
}

impl Answer<'_> {
    fn text(&self, hidden: u32) -> String {
        let Conditions { hosts, transport, rails, emulated_link, encrypted, wire, algorithm, version } =
            &self.conditions;
        let mut links = link_conditions(transport, *encrypted, *wire, *emulated_link);
        if *algorithm != SumAlgorithm::Auto {
            links += &format!(", sums {algorithm:?}").to_lowercase();
        }
        let rails = crate::report::count(*rails, "rail");
        let line = format!("{} ranks on {}, {rails} over {links}, consort {version}\n", hosts.len(), hosts.join(", "));
        if self.links.is_empty() { line + &self.collectives(hidden) } else { line + &link_table(hosts, &self.links) }
    }

    fn collectives(&self, hidden: u32) -> String {
        let row = |it: &Measurement| {
            let time = |us: f64| format!("{us:.1}");
            let rate = |gb_s: f64| if gb_s > 0.0 { format!("{gb_s:.3}") } else { "-".to_owned() };
            vec![
                it.collective.to_owned(),
                it.bytes.to_string(),
                it.repetitions.to_string(),
                time(it.min_us),
                time(it.median_us),
                time(it.p99_us),
                rate(it.algorithm_gb_s),
                rate(it.bus_gb_s),
                if it.correct { "yes" } else { "NO" }.to_owned(),
            ]
        };
        let heading =
            ["collective", "bytes", "repetitions", "min µs", "median µs", "p99 µs", "GB/s", "bus GB/s", "correct"];
        let rows: Vec<_> = self.measurements.iter().map(row).collect();
        let train = self.measurements.iter().find(|it| it.collective.ends_with("train"));
        let train = train.map(|it| {
            format!(
                "a train of 200 dependent all-reduces of {hidden} values, as in decoding: {:.2} ms\n",
                it.median_us * 0.2
            )
        });
        output::table(&heading, &rows) + &train.unwrap_or_default()
    }
}

/// The links between hosts, one direction in each row.
pub fn link_table(hosts: &[impl AsRef<str>], links: &[Link]) -> String {
    let name = |rank: usize| format!("{} ({rank})", hosts[rank].as_ref());
    let row = |link: &Link| {
        vec![
            format!("{} -> {}", name(link.from), name(link.to)),
            link.transport.clone(),
            link.rails.to_string(),
            format!("{:.1} µs", link.latency_us),
            format!("{:.3} GB/s", link.bandwidth_gb_s),
            match &link.rails_gb_s[..] {
                [] => "-".to_owned(),
                rails => rails.iter().map(|speed| format!("{speed:.3}")).collect::<Vec<_>>().join(" + "),
            },
        ]
    };
    output::table(
        &["link", "transport", "rails", "latency", "bandwidth", "each rail"],
        &links.iter().map(row).collect::<Vec<_>>(),
    )
}

/// The beginning of a collective's name.
fn collective_name(text: &str) -> Result<String, String> {
    match netbench::names().any(|name| name.starts_with(text)) {
        true => Ok(text.to_owned()),
        false => Err(format!("there are {}", netbench::names().collect::<Vec<_>>().join(", "))),
    }
}

/// A size of a message in bytes, in whole values of four bytes.
fn message_bytes(text: &str) -> Result<usize, String> {
    let bytes = parse_size(text)? as usize;
    if (4..=1 << 40).contains(&bytes) { Ok(bytes / 4 * 4) } else { Err("expected 4 bytes to 1 TiB".to_owned()) }
}
