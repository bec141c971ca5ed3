//! `consort doctor`: whether hosts and links work, how fast they are, and what to do about those that do not.

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args;
use consort_cluster::doctor::{Failure, HostFacts, ModelFacts, Visit, compare, measure_links, visit_all};
use consort_cluster::links::Link;
use consort_cluster::{Host, Hostfile, cables};
use serde::Serialize;

use crate::commands::netbench::link_table;
use crate::flags::JsonFlag;
use crate::model::ModelFiles;
use crate::{output, report};

const VERSION: &str = env!("CARGO_PKG_VERSION");

#[derive(Args)]
pub struct Doctor {
    /// The machines [default: this one]
    #[arg(long, value_name = "PATH")]
    hostfile: Option<PathBuf>,
    /// Also check that every host has this model; nothing is fetched from the Hub
    #[arg(short, long)]
    model: Option<String>,
    /// The cluster key; CONSORT_KEY names it too
    #[arg(long, value_name = "PATH")]
    key: Option<PathBuf>,
    /// Write the hostfile with the memory and the speed of links that were measured
    #[arg(long, value_name = "PATH")]
    write: Option<PathBuf>,
    /// Only say what the other flags ask of this host, as one line of JSON
    #[arg(long, hide = true)]
    facts: bool,
    /// The directory that models are in on this host
    #[arg(long, hide = true)]
    weights: Option<PathBuf>,
    #[command(flatten)]
    json: JsonFlag,
}

/// The JSON object.
#[derive(Serialize)]
struct Answer {
    version: &'static str,
    hosts: Vec<HostAnswer>,
    /// The cables that the hostfile names: host, number, device, address, state.
    #[serde(skip)]
    cables: Vec<Vec<String>>,
    /// Ranks are places in `hosts`.
    links: Vec<Link>,
    failures: Vec<Failure>,
}

/// One host, with what it said if it answered.
#[derive(Serialize)]
struct HostAnswer {
    host: String,
    #[serde(flatten)]
    visit: Option<Visit>,
}

impl Doctor {
    pub fn run(&self) -> Result<()> {
        if self.facts {
            let facts = HostFacts::here(VERSION, self.model.as_deref().map(|name| self.model_facts(name)));
            return Ok(output::text(&format!("{}\n", serde_json::to_string(&facts)?))?);
        }
        output::check_writable(&self.json)?;
        let hostfile = match &self.hostfile {
            Some(path) => Hostfile::read(path)?,
            None => Hostfile::local(1),
        };
        let answer = self.examine(&hostfile)?;
        if !self.json.takes_stdout() {
            output::text(&answer.text())?;
        }
        output::json(&self.json, &answer)?;
        if let Some(path) = &self.write {
            let text = serde_json::to_string_pretty(&answer.measured(hostfile).to_json())?;
            std::fs::write(path, text + "\n").with_context(|| path.display().to_string())?;
        }
        match answer.failures.len() {
            0 => Ok(()),
            failures => bail!("{} found", report::count(failures, "failure")),
        }
    }

    /// Whether this host has the model.
    fn model_facts(&self, name: &str) -> ModelFacts {
        let model = ModelFiles::open(name, self.weights.as_deref());
        let manifest_hash = model.map(|it| it.checkpoint.manifest_hash()).map_err(|error| format!("{error:#}"));
        ModelFacts { name: name.to_owned(), manifest_hash }
    }

    fn examine(&self, hostfile: &Hostfile) -> Result<Answer> {
        let program = std::env::current_exe().context("finding this executable, to ask hosts with")?;
        let hosts = &hostfile.hosts;
        let visits = visit_all(hosts, &program, |host| self.question(host));
        let mut failures = compare(hosts, &visits, VERSION);
        let facts: Vec<_> = visits.iter().map(|visit| visit.as_ref().ok().map(|visit| &visit.facts)).collect();
        failures.extend(cables::examine(hosts, &facts));
        let reached: Vec<usize> = (0..hosts.len()).filter(|&host| visits[host].is_ok()).collect();
        let key = self.key.iter().flat_map(|path| [OsString::from("--key"), path.into()]);
        let flags: Vec<OsString> = key.chain(["--connect-timeout".into(), "10".into()]).collect();
        let measure = |hosts: &[usize]| -> Result<Vec<Link>, Failure> {
            let links = measure_links(hostfile, hosts, &program, &flags)?;
            let named = |link: Link| Link { from: hosts[link.from], to: hosts[link.to], ..link };
            Ok(links.into_iter().map(named).collect())
        };
        let mut links = Vec::new();
        match reached.as_slice() {
            [] | [_] => {}
            all => match measure(all) {
                Ok(measured) => links = measured,
                Err(failure) if all.len() == 2 => failures.push(failure),
                // One bad link spoils the run of all: pair by pair it shows which.
                Err(failure) => {
                    let before = failures.len();
                    for (at, &first) in all.iter().enumerate() {
                        for &second in &all[at + 1..] {
                            match measure(&[first, second]) {
                                Ok(measured) => links.extend(measured),
                                Err(failure) => failures.push(failure),
                            }
                        }
                    }
                    if failures.len() == before {
                        failures.push(failure);
                    }
                }
            },
        }
        let answer =
            |(host, visit): (&Host, Result<Visit, Failure>)| HostAnswer { host: host.ssh.clone(), visit: visit.ok() };
        let cables = hosts.iter().zip(&facts).flat_map(|(host, facts)| cable_rows(host, *facts)).collect();
        let hosts = hosts.iter().zip(visits).map(answer).collect();
        Ok(Answer { version: VERSION, hosts, cables, links, failures })
    }

    /// What `consort` is asked on a host.
    fn question(&self, host: &Host) -> Vec<OsString> {
        let mut arguments: Vec<OsString> = ["doctor", "--facts"].map(OsString::from).into();
        if let Some(model) = &self.model {
            arguments.extend(["--model".into(), model.into()]);
        }
        if let Some(weights) = &host.weights {
            arguments.extend(["--weights".into(), weights.into()]);
        }
        arguments
    }
}

/// A row for each address and each RDMA device that the hostfile names.
fn cable_rows(host: &Host, facts: Option<&HostFacts>) -> Vec<Vec<String>> {
    let Some(facts) = facts else { return Vec::new() };
    let row = |cable: usize, name: &str, address: String, state: String| {
        vec![host.ssh.clone(), cable.to_string(), name.to_owned(), address, state]
    };
    let address = |(cable, ip): (usize, &IpAddr)| {
        let interface = cables::interface_of(facts, *ip);
        let name = interface.map_or("-", |interface| interface.name.as_str());
        let speed = interface.and_then(|interface| interface.mbit_per_s);
        let speed = speed.map_or_else(String::new, |speed| format!(", {} Gbit/s", speed as f64 / 1e3));
        let state = interface.map_or("missing", |interface| if interface.is_up { "up" } else { "down" });
        row(cable, name, ip.to_string(), format!("{state}{speed}"))
    };
    let device = |name: &String| {
        let state = facts.rdma.iter().find(|known| known.name == *name).map(|known| known.state.as_ref());
        row(
            0,
            name,
            "-".to_owned(),
            state.map_or("missing", |state| state.map_or("unusable", String::as_str)).to_owned(),
        )
    };
    let mut devices: Vec<&String> = host.rdma.iter().flatten().collect();
    devices.sort();
    devices.dedup();
    host.ips.iter().enumerate().map(address).chain(devices.into_iter().map(device)).collect()
}

impl Answer {
    /// The hostfile with what was measured in place of what was not known.
    fn measured(&self, mut hostfile: Hostfile) -> Hostfile {
        let count = hostfile.hosts.len();
        for (at, (host, answer)) in hostfile.hosts.iter_mut().zip(&self.hosts).enumerate() {
            let facts = answer.visit.as_ref().map(|visit| &visit.facts);
            host.memory_bytes =
                host.memory_bytes.or(facts.and_then(|facts| facts.available_bytes.or(facts.memory_bytes)));
            let speed = |to| self.links.iter().find(|link| (link.from, link.to) == (at, to)).map(Link::speed);
            host.links = if count > 1 { (0..count).map(speed).collect() } else { Vec::new() };
        }
        hostfile
    }

    fn text(&self) -> String {
        let row = |host: &HostAnswer| {
            let Some(Visit { facts, clock_ahead_s }) = &host.visit else {
                return [host.host.as_str(), "no", "-", "-", "-", "-", "-"].map(str::to_owned).into();
            };
            let memory = |bytes: Option<u64>| bytes.map_or_else(|| "unknown".to_owned(), output::size);
            let model = facts.model.as_ref().map_or("-", |it| if it.manifest_hash.is_ok() { "yes" } else { "no" });
            vec![
                host.host.clone(),
                "yes".to_owned(),
                facts.version.clone(),
                memory(facts.memory_bytes),
                memory(facts.available_bytes),
                format!("{clock_ahead_s:+.3} s"),
                model.to_owned(),
            ]
        };
        let heading = ["host", "reached", "consort", "memory", "available", "clock", "model"];
        let mut text = output::table(&heading, &self.hosts.iter().map(row).collect::<Vec<_>>());
        if !self.cables.is_empty() {
            let heading = ["host", "cable", "interface or device", "address", "state"];
            text += &format!("\n{}", output::table(&heading, &self.cables));
        }
        if !self.links.is_empty() {
            let names: Vec<&str> = self.hosts.iter().map(|host| host.host.as_str()).collect();
            text += &format!("\n{}", link_table(&names, &self.links));
        }
        for Failure { place, what, remedy } in &self.failures {
            text += &format!("\n{place}: {what}\n  remedy: {remedy}\n");
        }
        text
    }
}
