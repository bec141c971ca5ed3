//! What a figure is worth without its conditions: nothing. So they travel together, in text and in JSON.

use consort_checkpoint::remote::Traffic;
use consort_engine::RankReport;
use consort_fabric::Peer;
use serde::Serialize;

use crate::network::WireFormat;
use crate::output;

/// What every figure depends on.
#[derive(Clone, Debug, Serialize)]
pub struct Conditions {
    /// The model, as the user named it.
    pub model: String,
    /// Its architecture.
    pub architecture: String,
    /// Number formats of its weights, with their bytes on disk, largest first.
    pub formats: Vec<(String, u64)>,
    /// Tokens of context that memory is reserved for.
    pub context: usize,
    /// Most tokens of a prompt that are run as a unit.
    pub chunk: usize,
    /// Sequences at a time.
    pub batch: usize,
    /// Ranks.
    pub ranks: usize,
    /// How ranks divide the model.
    pub plan: String,
    /// What carries data between ranks.
    pub transport: String,
    /// Cables or sockets between each pair of ranks.
    pub rails: usize,
    /// What the links were made to behave like, if they were.
    pub emulated_link: Option<String>,
    /// Whether data on TCP was encrypted.
    pub encrypted: bool,
    /// What the values of sums were on the wire.
    pub wire: WireFormat,
    /// Threads of rank 0.
    pub threads: usize,
    /// How activations enter matrix products.
    pub activations: &'static str,
    /// How keys and values are stored.
    pub kv_format: String,
    /// What computes.
    pub backend: String,
    /// Version of this program.
    pub version: &'static str,
}

/// What a rank without files read, for people.
pub fn traffic_line(model: &str, traffic: &Traffic) -> String {
    let Traffic { fetched_bytes, kept_bytes, damaged_bytes } = *traffic;
    let damaged = match damaged_bytes {
        0 => String::new(),
        bytes => format!("; {} that had been kept were damaged and fetched again where needed", output::size(bytes)),
    };
    let (fetched, kept) = (output::size(fetched_bytes), output::size(kept_bytes));
    format!("{model} is not on this machine: {fetched} came from other ranks, {kept} had been kept{damaged}")
}

impl Conditions {
    /// One line for people.
    pub fn line(&self) -> String {
        let format = self.formats.first().map_or("no weights", |(format, _)| format.as_str());
        let ranks = match self.ranks {
            1 => "1 rank".to_owned(),
            ranks => format!("{ranks} ranks, {}, {} over {}", self.plan, count(self.rails, "rail"), self.links()),
        };
        format!(
            "{} ({}, {format}), {ranks}, {}, {} activations, context {}, chunk {}, KV {}, batch {}, {}, consort {}",
            self.model,
            self.architecture,
            count(self.threads, "thread"),
            self.activations,
            self.context,
            self.chunk,
            self.kv_format,
            self.batch,
            self.backend,
            self.version,
        )
    }

    /// What carried data between ranks, and what was done to it.
    fn links(&self) -> String {
        link_conditions(&self.transport, self.encrypted, self.wire, self.emulated_link.as_deref())
    }
}

/// `tcp, encrypted, bf16 on the wire, emulating latency=50us`.
pub fn link_conditions(transport: &str, encrypted: bool, wire: WireFormat, emulated_link: Option<&str>) -> String {
    let emulation = emulated_link.map(|words| format!(", emulating {words}")).unwrap_or_default();
    format!("{transport}{}{}{emulation}", if encrypted { ", encrypted" } else { "" }, wire.remark())
}

/// What carries data from this rank to the others, and why: `links: ranks 1, 2 over shm (one machine); rank 3 over tcp (…)`.
/// Nothing where one machine's memory is all that is used.
pub fn link_line(peers: &[Peer]) -> Option<String> {
    let mut ways: Vec<((&str, &str), Vec<String>)> = Vec::new();
    for peer in peers.iter().filter(|peer| !peer.reason.is_empty()) {
        let way = (peer.transport, peer.reason.as_str());
        match ways.iter_mut().find(|(known, _)| *known == way) {
            Some((_, ranks)) => ranks.push(peer.rank.to_string()),
            None => ways.push((way, vec![peer.rank.to_string()])),
        }
    }
    let describe = |((transport, reason), ranks): &((&str, &str), Vec<String>)| {
        let ranks = format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, ranks.join(", "));
        format!("{ranks} over {transport} ({reason})")
    };
    let interesting = ways.iter().any(|((transport, _), _)| *transport != "shm");
    interesting.then(|| format!("links: {}", ways.iter().map(describe).collect::<Vec<_>>().join("; ")))
}

/// `1 thread`, `2 threads`.
pub fn count(number: usize, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

/// What each rank held, one row each.
pub fn rank_table(reports: &[RankReport]) -> String {
    let rows: Vec<Vec<String>> = reports
        .iter()
        .map(|report| {
            vec![
                format!("{} ({})", report.rank, report.host),
                format!("{}..{}", report.layers.0, report.layers.1),
                report.shard.to_string(),
                report.transport.clone(),
                output::size(report.weight_bytes),
                report.peak_memory_bytes.map_or_else(|| "unknown".to_owned(), output::size),
            ]
        })
        .collect();
    output::table(&["rank", "layers", "shard", "transport", "weights", "peak memory"], &rows)
}

/// Seconds, for people: `0.1234 s` would claim too much.
pub fn seconds(value: f64) -> String {
    if value < 1.0 { format!("{:.1} ms", value * 1e3) } else { format!("{value:.2} s") }
}

/// A fraction, for people.
pub fn percent(fraction: f64) -> String {
    format!("{:.0} %", fraction * 100.0)
}
