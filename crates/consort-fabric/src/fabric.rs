//! The fabric: one process's connections to all other ranks of a run.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::background::Background;
use crate::channel::{Hello, Purpose};
use crate::emulate::EmulatedLink;
use crate::group::Group;
use crate::health::Failure;
use crate::key::ClusterKey;
use crate::link::Link;
use crate::links::Links;
use crate::monitor::{Monitor, Watch};
use crate::relay::Relay;
use crate::rendezvous::{self, Meeting};
use crate::shm::{self, Region};
use crate::topology::{Algorithm, Topology};
use crate::wiring::{WiredLink, identity, make_links, open_devices};
use crate::{FabricError, sys};

/// Which transport carries data between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum TransportChoice {
    /// The fastest that a link offers: shared memory on one machine; between machines RDMA where both ends name devices for
    /// the link ([`FabricOptions::rdma_devices`]) and can use them, else TCP.
    #[default]
    Auto,
    /// Shared memory: ranks on one machine.
    Shm,
    /// TCP.
    Tcp,
    /// RDMA, through the verbs library.
    Rdma,
}

/// What the values of sums are on the wire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wire {
    /// As they are.
    #[default]
    Full,
    /// Rounded to bf16, and summed in f32: half of the bytes of f32 values. All ranks hold the same bits all the same.
    Bf16,
}

/// What must be equal on all ranks before they work together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Agreement {
    /// `(what, value)`: plan hash, manifest hash, settings. Compared with rank 0's by name; the first difference refuses the run.
    pub items: Vec<(String, String)>,
}

/// How a rank finds the others.
#[derive(Clone, Debug)]
pub struct FabricOptions {
    /// This rank.
    pub rank: usize,
    /// Ranks in all.
    pub size: usize,
    /// `host:port` on which rank 0 listens.
    pub rendezvous: String,
    /// The address on which rank 0 listens instead, where the rendezvous is not one of its own but leads to it.
    pub bind: Option<IpAddr>,
    /// This rank's host name, for messages.
    pub host: String,
    /// Names the run: two runs on one machine never mix.
    pub run_id: String,
    /// Which transport to use.
    pub transport: TransportChoice,
    /// This rank's own address on each cable, in an order that all ranks share. Empty: the one that reaches rank 0.
    pub rail_addresses: Vec<IpAddr>,
    /// The RDMA devices that are cabled to each rank, in rank order, one per rail (this rank's own entry is empty). Empty: no
    /// device, or with [`TransportChoice::Rdma`] the first active one for all ranks.
    pub rdma_devices: Vec<Vec<String>>,
    /// How long to wait until all ranks have come.
    pub connect_timeout: Duration,
    /// Silence after which a peer counts as lost.
    pub hang_timeout: Duration,
    /// How long an operation may wait for peers that are alive.
    pub operation_timeout: Duration,
    /// Proved by both sides of every connection. Without one, all addresses must be this machine's loopback.
    pub key: Option<ClusterKey>,
    /// Whether data on TCP is encrypted; control messages are whenever there is a key.
    pub encrypt: bool,
    /// What the values of sums are on the wire.
    pub wire: Wire,
    /// How groups reduce.
    pub algorithm: Algorithm,
    /// Makes every link behave like a slower one. All ranks must be on one machine.
    pub emulate: Option<EmulatedLink>,
    /// Told of what the run survives but its user should know, such as a lost rail.
    pub warn: fn(&str),
    /// Whether data frames carry a checksum, so that a byte that changed on its way is an error.
    pub checksums: bool,
    /// What must be equal on all ranks.
    pub agreement: Agreement,
}

impl Default for FabricOptions {
    /// One rank on its own; set at least `rank`, `size` and `rendezvous` for more.
    fn default() -> Self {
        Self {
            rank: 0,
            size: 1,
            rendezvous: String::new(),
            bind: None,
            host: "localhost".into(),
            run_id: String::new(),
            transport: TransportChoice::Auto,
            rail_addresses: Vec::new(),
            rdma_devices: Vec::new(),
            connect_timeout: Duration::from_secs(30),
            hang_timeout: Duration::from_secs(10),
            operation_timeout: Duration::from_secs(600),
            key: None,
            encrypt: false,
            wire: Wire::Full,
            algorithm: Algorithm::Auto,
            emulate: None,
            warn: |what| eprintln!("warning: {what}"),
            checksums: cfg!(debug_assertions),
            agreement: Agreement::default(),
        }
    }
}

/// A rank, as the meeting found it.
#[derive(Clone, Debug)]
pub struct Peer {
    /// The rank.
    pub rank: usize,
    /// Its host name.
    pub host: String,
    /// The transport of the link from this rank: `shm`, `tcp`, `tcp+noise` (encrypted), `rdma`,
    /// `rdma (unreliable connection)`, `relay` (through other ranks), or `none` for this rank itself.
    pub transport: &'static str,
    /// Rails of the link.
    pub rails: usize,
    /// How fast each rail was when the link was made, where there are several.
    pub rail_bytes_per_ms: Vec<u32>,
    /// Why the link is over this transport, in a few words; empty for this rank itself.
    pub reason: String,
    /// How far its clock was ahead of this rank's when both said hello, in seconds; start-up delays included.
    pub clock_ahead_s: f64,
}

/// What a fabric and its groups share. The last of them says goodbye to the other ranks.
pub(crate) struct Shared {
    pub links: Mutex<Links>,
    pub watch: Arc<Watch>,
    pub topology: Arc<Topology>,
    pub background: Background,
    /// Before the monitor: it ends when the monitor has heard that all are done.
    _relay: Option<Relay>,
    _monitor: Monitor,
    rank: usize,
    peers: Vec<Peer>,
    groups: Mutex<Vec<Vec<usize>>>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.watch.report(Failure { rank: self.rank as u32, gave_up: true, cause: "it panicked".into() });
        }
    }
}

/// This rank's connections to all others.
pub struct Fabric {
    shared: Arc<Shared>,
}

impl Fabric {
    /// Meets the other ranks, compares agreements, and sets up the data transports.
    ///
    /// # Errors
    /// [`FabricError::Disagreement`] on rank 0 and [`FabricError::Refused`] on the others when ranks differ in what must be equal;
    /// [`FabricError::Listen`], [`FabricError::Unreachable`] or [`FabricError::Missing`] when they cannot meet;
    /// [`FabricError::PeerLost`] or [`FabricError::Aborted`], on all ranks, when one ends or falls silent before all are ready.
    pub fn connect(options: FabricOptions) -> Result<Self, FabricError> {
        if options.size == 0 || options.rank >= options.size || options.size > u16::MAX as usize {
            let FabricOptions { rank, size, .. } = options;
            return Err(FabricError::Invalid(format!("rank {rank} of {size} does not exist")));
        }
        if options.encrypt && options.key.is_none() {
            return Err(FabricError::Invalid("encryption needs a cluster key; make one with `consort key new`".into()));
        }
        if options.encrypt && options.transport == TransportChoice::Rdma {
            return Err(FabricError::Invalid("RDMA carries no encryption; use --transport tcp".into()));
        }
        if options.emulate.is_some_and(|link| link.rails > 1) && options.transport == TransportChoice::Shm {
            return Err(FabricError::Invalid("several emulated rails need --transport tcp".into()));
        }
        let clock_ns = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64);
        let own = Hello {
            purpose: Purpose::Control,
            run_id: options.run_id.clone(),
            rank: options.rank as u32,
            size: options.size as u32,
            host: options.host.clone(),
            agreement: agreement_items(&options),
            clock_ns,
            machine: sys::machine(),
            cores: sys::allowed_cores(),
            control_address: None,
            rail_addresses: Vec::new(),
            rdma: Err(String::new()),
            region: None,
        };
        let monitor = Monitor::start(options.rank, options.size, options.hang_timeout, options.warn)
            .map_err(|error| FabricError::Setup(format!("starting the monitor: {error}")))?;
        let watch = monitor.watch.clone();
        Self::set_up(options, own, monitor).map_err(|error| watch.explain(error))
    }

    /// Becomes one of the ranks of a run, watched by `monitor` from the first connection on.
    fn set_up(options: FabricOptions, mut own: Hello, monitor: Monitor) -> Result<Self, FabricError> {
        let watch = monitor.watch.clone();
        let devices = open_devices(&options);
        own.rdma = match &devices {
            Ok(devices) => Ok(devices.iter().map(Vec::len).collect()),
            Err(obstacle) => Err(obstacle.clone()),
        };
        let mut region = None;
        if matches!(options.transport, TransportChoice::Auto | TransportChoice::Shm) && options.size > 1 {
            let (created, address) = Region::create(options.size, identity(&own))
                .map_err(|error| FabricError::Setup(format!("making shared memory: {error}")))?;
            (region, own.region) = (Some(Arc::new(created)), Some(address));
        }
        let mut meeting = if options.size == 1 {
            watch.health.name(0, &own.host);
            Meeting::new(&options, vec![own.clone()])?
        } else {
            rendezvous::meet(&options, own.clone(), &watch)?
        };
        let vigil = rendezvous::vigil(&options, &watch);
        let devices = devices.unwrap_or_default();
        let (links, relay) = make_links(&options, &mut meeting, region.as_ref(), devices, vigil)?;
        let peers = describe_peers(&options, &meeting.roster, &links);
        let links: Vec<Option<Link>> = links.into_iter().map(|link| link.map(|wired| wired.link)).collect();
        let ledgers = links.iter().map(|link| link.as_ref().and_then(Link::ledger)).collect();
        watch.start_together(ledgers, relay.is_some(), rendezvous::vigil(&options, &watch))?;
        own.region.iter().for_each(shm::forget_name);

        let topology = Arc::new(meeting.topology);
        let relay = relay
            .map(|parts| Relay::start(parts, options.rank, topology.clone(), watch.clone()))
            .transpose()
            .map_err(|error| FabricError::Setup(format!("starting the relay: {error}")))?;
        let crowded = shares_cores(&meeting.roster, &own.machine);
        let links = Links::new(links, region, watch.clone(), options.wire, crowded, options.operation_timeout);
        let shared = Shared {
            links: Mutex::new(links),
            watch,
            topology,
            background: Background::default(),
            _relay: relay,
            _monitor: monitor,
            rank: options.rank,
            peers,
            groups: Mutex::new(Vec::new()),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// All ranks in order, this one included.
    pub fn peers(&self) -> &[Peer] {
        &self.shared.peers
    }

    /// Whether two ranks have a link of their own; with most transports all have. Others reach each other through ranks in between.
    pub fn are_linked(&self, one: usize, other: usize) -> bool {
        self.shared.topology.are_linked(one, other)
    }

    /// Rails that broke while others of their link were left, on this rank's links, so far.
    pub fn rails_lost(&self) -> usize {
        self.shared.watch.rails_lost()
    }

    /// The group of all ranks.
    pub fn world(&self) -> Group {
        let ranks: Vec<usize> = (0..self.shared.peers.len()).collect();
        let shape = self.shared.topology.shape(&ranks);
        Group::new(self.shared.clone(), ranks, self.shared.rank, 0, shape)
    }

    /// An ordered subset of ranks that does collectives together. Every member must ask for the same groups in the same order.
    ///
    /// # Errors
    /// [`FabricError::Invalid`] if this rank is not a member, or a member does not exist or is named twice.
    pub fn group(&self, ranks: &[usize]) -> Result<Group, FabricError> {
        let invalid = |what: &str| Err(FabricError::Invalid(format!("group {ranks:?} {what}")));
        if let Some(rank) = ranks.iter().find(|&&rank| rank >= self.shared.peers.len()) {
            return invalid(&format!("names rank {rank}, which does not exist"));
        }
        if (1..ranks.len()).any(|at| ranks[..at].contains(&ranks[at])) {
            return invalid("names a rank twice");
        }
        let Some(position) = ranks.iter().position(|&rank| rank == self.shared.rank) else {
            return invalid(&format!("does not contain this rank ({})", self.shared.rank));
        };
        let shape = self.shared.topology.shape(ranks);
        let mut groups = self.shared.groups.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let earlier = groups.iter().filter(|group| *group == ranks).count();
        groups.push(ranks.to_vec());
        Ok(Group::new(self.shared.clone(), ranks.to_vec(), position, group_identity(ranks, earlier), shape))
    }

    /// Tells all ranks that this one cannot go on, and why. Their operations, and this rank's, end with [`FabricError::Aborted`].
    pub fn abort(&self, cause: &str) {
        self.shared.watch.report(Failure { rank: self.shared.rank as u32, gave_up: true, cause: cause.into() });
    }
}

/// Whether the ranks of a machine outnumber the cores that they may run on: then a rank that spins may keep another from its core.
fn shares_cores(roster: &[Hello], machine: &str) -> bool {
    let local = || roster.iter().filter(|hello| hello.machine == machine);
    let cores: BTreeSet<u32> = local().flat_map(|hello| hello.cores.iter().copied()).collect();
    local().count() > cores.len()
}

/// What must be equal on all ranks: the fabric's own items, then the caller's.
fn agreement_items(options: &FabricOptions) -> Vec<(String, String)> {
    let own: [_; 7] = [
        ("build version", env!("CARGO_PKG_VERSION").to_owned()),
        ("number of ranks", options.size.to_string()),
        ("transport", format!("{:?}", options.transport).to_lowercase()),
        ("emulated link", options.emulate.map_or("none".to_owned(), |link| format!("{link:?}"))),
        ("wire format", format!("{:?}", options.wire).to_lowercase()),
        ("algorithm", format!("{:?}", options.algorithm).to_lowercase()),
        ("encryption", if options.encrypt { "on" } else { "off" }.to_owned()),
    ];
    own.map(|(what, value)| (what.to_owned(), value)).into_iter().chain(options.agreement.items.clone()).collect()
}

/// Equal on all members and different from other groups', without a word between ranks. 0 is the world's.
fn group_identity(ranks: &[usize], earlier: usize) -> u32 {
    let words = ranks.iter().chain([&earlier]);
    words.fold(0x811C_9DC5u32, |hash, &word| (hash ^ word as u32).wrapping_mul(0x0100_0193)).max(1)
}

fn describe_peers(options: &FabricOptions, roster: &[Hello], links: &[WiredLink]) -> Vec<Peer> {
    let own = &roster[options.rank];
    let describe = |(hello, link): (&Hello, &WiredLink)| Peer {
        rank: hello.rank as usize,
        host: hello.host.clone(),
        transport: link.as_ref().and_then(|wired| wired.link.rails().next()).map_or("none", |rail| rail.transport()),
        rails: link.as_ref().map_or(0, |wired| wired.link.rails().count()),
        rail_bytes_per_ms: link.as_ref().map_or_else(Vec::new, |wired| wired.speeds.clone()),
        reason: link.as_ref().map_or_else(String::new, |wired| wired.reason.clone()),
        clock_ahead_s: (hello.clock_ns as f64 - own.clock_ns as f64) / 1e9,
    };
    roster.iter().zip(links).map(describe).collect()
}
