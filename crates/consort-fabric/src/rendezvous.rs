//! How ranks find each other: rank 0 collects everyone's hello, compares, and hands out the roster; then each rank connects to
//! all lower ones. When all are connected nothing listens any more.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use crate::FabricError;
use crate::carrier::Carrier;
use crate::channel::{Channel, ChannelError, ControlMessage, Hello, Purpose, RailStream};
use crate::error::Side;
use crate::fabric::FabricOptions;
use crate::health::Failure;
use crate::monitor::{Watch, heartbeat_period};
use crate::reception::{Reception, refuse};
use crate::topology::Topology;
use crate::vigil::{SET_UP, Vigil};

/// After a disagreement, how long the other ranks get to come and hear of it.
const REFUSAL_PATIENCE: Duration = Duration::from_secs(1);
/// Between two lines that say whom this rank still waits for.
const WAITING_LINE_EVERY: Duration = Duration::from_secs(5);
/// How long one attempt to reach a rank may take, before the next.
const ATTEMPT_PATIENCE: Duration = Duration::from_secs(2);
/// Between two looks whether a rank that has come was lost, while others are still to come.
const GATHER_LOOK: Duration = Duration::from_millis(100);
/// Between two attempts to reach rank 0.
const RETRY_PAUSE: Duration = Duration::from_millis(50);
/// For a message that the other side will read soon.
const SEND_PATIENCE: Duration = Duration::from_secs(5);

/// What a rank has after the meeting, beside the control connections, which the monitor has.
pub(crate) struct Meeting {
    /// In rank order, this rank's own included.
    pub roster: Vec<Hello>,
    pub topology: Topology,
    /// Data connections by rank and rail; none where shared memory is used.
    pub rails: Vec<Vec<RailStream>>,
    /// Connections for what is passed on, to linked ranks, where not all ranks are.
    pub relays: Vec<Option<RailStream>>,
}

impl Meeting {
    /// A meeting of ranks that have no data connections yet.
    ///
    /// # Errors
    /// Ranks were told to use what they lack, or no way leads from one to another.
    pub fn new(options: &FabricOptions, roster: Vec<Hello>) -> Result<Self, FabricError> {
        let topology = Topology::new(options, &roster)?;
        let rails = roster.iter().map(|_| Vec::new()).collect();
        let relays = roster.iter().map(|_| None).collect();
        Ok(Self { roster, topology, rails, relays })
    }
}

/// Meets all other ranks. `own` lacks its addresses, which become known here.
pub(crate) fn meet(options: &FabricOptions, mut own: Hello, watch: &Watch) -> Result<Meeting, FabricError> {
    let vigil = vigil(options, watch);
    let (roster, mut reception) = if options.rank == 0 {
        let listener = listen(options)?;
        let address = listener.local_addr().map_err(setup)?;
        check_reach(options, address)?;
        let reception = open_reception(options, &mut own, address.ip(), None)?;
        let mut entrance = Reception::new(vec![listener], options.key.clone())?;
        (receive_all(options, own, &mut entrance, watch, vigil)?, reception)
    } else {
        let stream = reach(0, &options.rendezvous, options, vigil)?;
        let (local, remote) = (stream.local_addr().map_err(setup)?, stream.peer_addr().map_err(setup)?);
        check_reach(options, remote)?;
        let control = TcpListener::bind((local.ip(), 0)).map_err(setup)?;
        let reception = open_reception(options, &mut own, local.ip(), Some(control))?;
        let mut channel = Channel::connect(stream, options.key.as_ref(), vigil.within(options.hang_timeout))
            .map_err(|error| unanswered(options, error))?;
        let mut roster = introduce(options, &own, &mut channel, vigil)?;
        watch.add(0, channel);
        // A rank 0 that listens on all addresses is found where this rank found it.
        for address in roster[0].rail_addresses.iter_mut().filter(|address| address.ip().is_unspecified()) {
            address.set_ip(remote.ip());
        }
        (roster, reception)
    };
    roster.iter().for_each(|hello| watch.health.name(hello.rank as usize, &hello.host));
    let mut meeting = Meeting::new(options, roster)?;
    let vigil = self::vigil(options, watch);
    connect_to_lower(options, &mut meeting, watch, vigil)?;
    accept_from_higher(options, &mut meeting, &mut reception, watch, vigil)?;
    Ok(meeting)
}

/// For a stage of the set-up that begins now.
pub(crate) fn vigil<'a>(options: &FabricOptions, watch: &'a Watch) -> Vigil<'a> {
    Vigil::new(&watch.health, Instant::now() + options.connect_timeout, options.hang_timeout)
}

pub(crate) fn setup(error: impl std::fmt::Display) -> FabricError {
    FabricError::Setup(error.to_string())
}

/// Opens this rank's listeners and writes their addresses into its hello.
fn open_reception(
    options: &FabricOptions,
    own: &mut Hello,
    default_address: IpAddr,
    control: Option<TcpListener>,
) -> Result<Reception, FabricError> {
    own.control_address = control.as_ref().map(TcpListener::local_addr).transpose().map_err(setup)?;
    let mut listeners = Vec::from_iter(control);
    let emulated_rails = options.emulate.map_or(1, |link| link.rails);
    let addresses = match &options.rail_addresses[..] {
        [] => vec![default_address; emulated_rails],
        listed => listed.to_vec(),
    };
    for address in addresses {
        let listener = TcpListener::bind((address, 0))
            .map_err(|error| FabricError::Listen { address: address.to_string(), cause: error.to_string() })?;
        own.rail_addresses.push(listener.local_addr().map_err(setup)?);
        listeners.push(listener);
    }
    if options.key.is_none() && own.rail_addresses.iter().any(|address| !address.ip().is_loopback()) {
        return Err(needs_key("the rails are"));
    }
    Reception::new(listeners, options.key.clone())
}

/// Without a key, strangers could join: only this machine may be able to connect.
fn check_reach(options: &FabricOptions, address: SocketAddr) -> Result<(), FabricError> {
    if options.key.is_some() || address.ip().is_loopback() {
        return Ok(());
    }
    Err(needs_key(&format!("the rendezvous {} is", options.rendezvous)))
}

fn needs_key(what: &str) -> FabricError {
    FabricError::Invalid(format!(
        "{what} open to other machines, which takes a cluster key; make one with `consort key new` and give it to all hosts"
    ))
}

/// Where rank 0 listens: at the rendezvous, or at another address of its own through which the rendezvous leads to it.
fn listen(options: &FabricOptions) -> Result<TcpListener, FabricError> {
    let failed = |address: String, cause: String| FabricError::Listen { address, cause };
    let address = match options.bind {
        None => options.rendezvous.clone(),
        Some(ip) => {
            let port = options.rendezvous.rsplit(':').next().unwrap_or_default();
            let port = port.parse().map_err(|_| failed(options.rendezvous.clone(), "it names no port".to_owned()))?;
            SocketAddr::new(ip, port).to_string()
        }
    };
    TcpListener::bind(&*address).map_err(|error| failed(address, error.to_string()))
}

/// Says now and then whom this rank waits for, so that a firewall is not mistaken for a slow start.
struct Waiting {
    next_line: Instant,
    warn: fn(&str),
}

impl Waiting {
    fn start(options: &FabricOptions) -> Self {
        Self { next_line: Instant::now() + WAITING_LINE_EVERY, warn: options.warn }
    }

    /// Says it, if it is time to.
    fn tell(&mut self, line: impl FnOnce() -> String) {
        if Instant::now() >= self.next_line {
            (self.warn)(&line());
            self.next_line = Instant::now() + WAITING_LINE_EVERY;
        }
    }
}

/// Connects to an address, again and again until it answers or time is up.
fn reach(rank: usize, address: &str, options: &FabricOptions, vigil: Vigil) -> Result<TcpStream, FabricError> {
    let mut waiting = Waiting::start(options);
    loop {
        vigil.check()?;
        let attempt = address.to_socket_addrs().and_then(|mut candidates| {
            let mut last = io::Error::new(ErrorKind::NotFound, "the name has no address");
            candidates
                .find_map(|candidate| {
                    let left = vigil.left().clamp(Duration::from_millis(1), ATTEMPT_PATIENCE);
                    TcpStream::connect_timeout(&candidate, left).map_err(|error| last = error).ok()
                })
                .ok_or(last)
        });
        let hopeless = |kind| matches!(kind, ErrorKind::InvalidInput);
        match attempt {
            Ok(stream) => return Ok(stream),
            Err(error) if vigil.left() <= RETRY_PAUSE || hopeless(error.kind()) => {
                let (address, cause) = (address.to_owned(), error.to_string());
                return Err(FabricError::Unreachable { rank, address, waited: options.connect_timeout, cause });
            }
            Err(error) => {
                waiting.tell(|| format!("still waiting for rank {rank} at {address}: {error}"));
                std::thread::sleep(RETRY_PAUSE);
            }
        }
    }
}

/// What went wrong on the connection to rank 0, before it has said who else is there.
fn unanswered(options: &FabricOptions, error: ChannelError) -> FabricError {
    let address = options.rendezvous.clone();
    match error {
        // The system takes connections for a process that is stopped.
        ChannelError::Deadline => FabricError::PeerLost {
            rank: 0,
            host: address,
            operation: SET_UP,
            cause: format!(
                "no sign of life for {} ms, though it has a connection (a stopped process, or another program on that port)",
                options.hang_timeout.as_millis()
            ),
        },
        ChannelError::Closed => {
            let cause = "it closed the connection without an answer (another program, or it has failed)".into();
            FabricError::Refused { address, cause }
        }
        error => FabricError::Refused { address, cause: error.to_string() },
    }
}

/// Says hello to rank 0 and receives the roster. Until all are there both say now and then that they live.
fn introduce(
    options: &FabricOptions,
    own: &Hello,
    channel: &mut Channel,
    vigil: Vigil,
) -> Result<Vec<Hello>, FabricError> {
    let refused = |cause| FabricError::Refused { address: options.rendezvous.clone(), cause };
    let hello = ControlMessage::Hello(Box::new(own.clone()));
    channel.writer.send(&hello, Instant::now() + SEND_PATIENCE).map_err(|error| refused(error.to_string()))?;
    let mut heard = Instant::now();
    loop {
        let next_heartbeat = Instant::now() + heartbeat_period(options.hang_timeout);
        match channel.reader.receive(next_heartbeat) {
            Ok(ControlMessage::Roster(roster))
                if roster.len() == options.size && roster[options.rank] == without_agreement(own.clone()) =>
            {
                return Ok(roster);
            }
            Ok(ControlMessage::Heartbeat) => heard = Instant::now(),
            Ok(ControlMessage::Refused(cause)) => return Err(refused(cause)),
            // Another rank was lost before all were there; its host is rank 0's to know.
            Ok(ControlMessage::Abort(Failure { rank, gave_up, cause })) => {
                let (rank, host) = (rank as usize, "unknown host".to_owned());
                return Err(match gave_up {
                    true => FabricError::Aborted { rank, host, cause },
                    false => FabricError::PeerLost { rank, host, operation: SET_UP, cause },
                });
            }
            Ok(_) => return Err(refused("it sent an unexpected message".into())),
            Err(ChannelError::Deadline) if heard.elapsed() < options.hang_timeout => {
                if vigil.is_over() {
                    let waited_s = options.connect_timeout.as_secs();
                    return Err(refused(format!("no roster within {waited_s} s: another rank may be missing")));
                }
                let _ = channel.writer.send(&ControlMessage::Heartbeat, Instant::now() + SEND_PATIENCE);
            }
            Err(error) => return Err(unanswered(options, error)),
        }
    }
}

/// Rank 0: collects all hellos, compares them with its own, and sends the roster.
fn receive_all(
    options: &FabricOptions,
    own: Hello,
    entrance: &mut Reception,
    watch: &Watch,
    mut vigil: Vigil,
) -> Result<Vec<Hello>, FabricError> {
    let mut roster: Vec<Option<Hello>> = vec![None; options.size];
    let mut refusal: Option<FabricError> = None;
    roster[0] = Some(own.clone());
    let mut waiting = Waiting::start(options);
    while roster.iter().any(Option::is_none) {
        let Some((hello, mut channel)) = entrance.next_hello(Instant::now() + vigil.left().min(GATHER_LOOK))? else {
            if vigil.is_over() {
                break;
            }
            if refusal.is_none() {
                vigil.check()?;
            }
            waiting.tell(|| {
                let missing = (0..options.size).filter(|&rank| roster[rank].is_none()).map(|rank| rank.to_string());
                let missing = missing.collect::<Vec<_>>().join(", ");
                let plural = if missing.contains(',') { "s" } else { "" };
                format!("still waiting for rank{plural} {missing} to come to {}", options.rendezvous)
            });
            continue;
        };
        if hello.run_id != own.run_id {
            let cause = format!("it belongs to run {}, this rank to run {}", own.run_id, hello.run_id);
            refuse(&mut channel, cause);
            continue;
        }
        let rank = hello.rank as usize;
        if let Some(difference) = disagreement(&own, &hello) {
            refuse(&mut channel, difference.to_string());
            refusal.get_or_insert(difference);
            vigil = vigil.within(REFUSAL_PATIENCE);
        } else if rank >= options.size || roster[rank].is_some() {
            refuse(&mut channel, format!("there is a rank {rank} already, or it is not below {}", options.size));
            continue;
        } else {
            watch.health.name(rank, &hello.host);
            watch.add(rank, channel);
        }
        if let Some(seat) = roster.get_mut(rank) {
            *seat = Some(hello);
        }
    }
    let missing: Vec<usize> = (0..options.size).filter(|&rank| roster[rank].is_none()).collect();
    let refusal = refusal.or_else(|| {
        (!missing.is_empty()).then(|| FabricError::Missing {
            present: options.size - missing.len(),
            size: options.size,
            address: options.rendezvous.clone(),
            waited: options.connect_timeout,
            missing,
            remark: entrance.last_closed.take().unwrap_or_default(),
        })
    });
    if let Some(refusal) = refusal {
        watch.tell_all(&ControlMessage::Refused(refusal.to_string()));
        return Err(refusal);
    }
    let roster: Vec<Hello> = roster.into_iter().flatten().map(without_agreement).collect();
    let message = ControlMessage::Roster(roster.clone());
    (1..options.size).for_each(|rank| watch.tell(rank, &message));
    Ok(roster)
}

/// A hello after its agreement was compared, which may be long and is of no use to others.
fn without_agreement(hello: Hello) -> Hello {
    Hello { agreement: Vec::new(), ..hello }
}

/// The first thing on which a rank differs from rank 0, by name: either may have things that the other lacks.
fn disagreement(own: &Hello, other: &Hello) -> Option<FabricError> {
    let value = |hello: &Hello, name: &str| {
        let item = hello.agreement.iter().find(|(known, _)| known == name);
        item.map_or_else(|| "(nothing)".to_owned(), |(_, value)| value.clone())
    };
    let mut names = own.agreement.iter().chain(&other.agreement).map(|(name, _)| name);
    let what = names.find(|name| value(own, name) != value(other, name))?;
    let side = |hello: &Hello| {
        Box::new(Side { rank: hello.rank as usize, host: hello.host.clone(), value: value(hello, what) })
    };
    Some(FabricError::Disagreement { what: what.clone(), one: side(own), other: side(other) })
}

/// Connections over the network that carry the data of the link between two ranks.
fn rail_count(topology: &Topology, one: &Hello, other: &Hello) -> usize {
    match topology.carrier(one.rank as usize, other.rank as usize) {
        None | Some(Carrier::SharedMemory) => 0,
        Some(Carrier::Tcp | Carrier::Rdma) => one.rail_addresses.len().min(other.rail_addresses.len()),
    }
}

/// Whether two ranks pass on to each other what is for others.
fn pass_on(topology: &Topology, one: usize, other: usize) -> bool {
    topology.relays() && topology.are_linked(one, other)
}

/// The rail beside which the second control connection runs: the first cable often carries the first one too.
fn spare_rail(rails: usize) -> Option<usize> {
    (rails > 1).then(|| rails - 1)
}

fn connect_to_lower(
    options: &FabricOptions,
    meeting: &mut Meeting,
    watch: &Watch,
    vigil: Vigil,
) -> Result<(), FabricError> {
    let Meeting { roster, topology, rails, relays } = meeting;
    let own = &roster[options.rank];
    let connect = |rank: usize, address: SocketAddr, purpose: Purpose| {
        let failed = |error: ChannelError| match error {
            ChannelError::Lost(lost) => *lost,
            error => FabricError::Setup(format!("connecting to rank {rank} ({}): {error}", roster[rank].host)),
        };
        let stream = reach(rank, &address.to_string(), options, vigil)?;
        let mut channel = Channel::connect(stream, options.key.as_ref(), vigil.step()).map_err(failed)?;
        let hello = ControlMessage::Hello(Box::new(Hello { purpose, ..own.clone() }));
        channel.writer.send(&hello, Instant::now() + SEND_PATIENCE).map_err(failed)?;
        Ok::<_, FabricError>(channel)
    };
    for (rank, peer) in roster.iter().enumerate().take(options.rank) {
        if let Some(address) = peer.control_address {
            watch.add(rank, connect(rank, address, Purpose::Control)?);
        }
        let count = rail_count(topology, own, peer);
        for (rail, &address) in peer.rail_addresses.iter().enumerate().take(count) {
            rails[rank].push(connect(rank, address, Purpose::Rail(rail as u8))?.into_rail());
        }
        if let Some(rail) = spare_rail(count) {
            watch.add(rank, connect(rank, peer.rail_addresses[rail], Purpose::Spare)?);
        }
        if let Some(&address) = peer.rail_addresses.first().filter(|_| pass_on(topology, options.rank, rank)) {
            relays[rank] = Some(connect(rank, address, Purpose::Relay)?.into_rail());
        }
    }
    Ok(())
}

/// The connections that a higher rank is still to make to this one.
struct Seats {
    control: bool,
    rails: Vec<Option<RailStream>>,
    spare: bool,
    relay: bool,
}

impl Seats {
    fn are_taken(&self) -> bool {
        !self.control && !self.spare && !self.relay && self.rails.iter().all(Option::is_some)
    }
}

fn accept_from_higher(
    options: &FabricOptions,
    meeting: &mut Meeting,
    reception: &mut Reception,
    watch: &Watch,
    vigil: Vigil,
) -> Result<(), FabricError> {
    let Meeting { roster, topology, rails, relays } = meeting;
    let own = &roster[options.rank];
    let seats = |peer: &Hello| {
        if peer.rank <= own.rank {
            return Seats { control: false, rails: Vec::new(), spare: false, relay: false };
        }
        let count = rail_count(topology, own, peer);
        Seats {
            // Rank 0 has them from the start.
            control: own.rank > 0,
            rails: (0..count).map(|_| None).collect(),
            spare: spare_rail(count).is_some(),
            relay: pass_on(topology, options.rank, peer.rank as usize),
        }
    };
    let mut expected: Vec<Seats> = roster.iter().map(seats).collect();
    let mut waiting = Waiting::start(options);
    while let Some(missing) = expected.iter().position(|seats| !seats.are_taken()) {
        let Some((hello, channel)) = reception.next_hello(vigil.next_look())? else {
            vigil.check()?;
            let host = &roster[missing].host;
            waiting.tell(|| format!("still waiting for connections of rank {missing} ({host})"));
            if vigil.is_over() {
                return Err(FabricError::PeerLost {
                    rank: missing,
                    host: host.clone(),
                    operation: SET_UP,
                    cause: format!("it did not connect within {} s", options.connect_timeout.as_secs()),
                });
            }
            continue;
        };
        // Only who is in the roster may come in; the hello, with its clock and addresses, serves as the ticket.
        let purpose = hello.purpose;
        let known = roster.get(hello.rank as usize);
        if known.is_none_or(|known| *known != Hello { purpose: known.purpose, ..hello.clone() }) {
            continue;
        }
        let rank = hello.rank as usize;
        let seats = &mut expected[rank];
        match purpose {
            Purpose::Control if std::mem::take(&mut seats.control) => watch.add(rank, channel),
            Purpose::Spare if std::mem::take(&mut seats.spare) => watch.add(rank, channel),
            Purpose::Relay if std::mem::take(&mut seats.relay) => relays[rank] = Some(channel.into_rail()),
            Purpose::Rail(rail) => {
                if let Some(seat) = seats.rails.get_mut(rail as usize).filter(|seat| seat.is_none()) {
                    *seat = Some(channel.into_rail());
                }
            }
            Purpose::Control | Purpose::Spare | Purpose::Relay => {}
        }
    }
    for (rails, expected) in rails.iter_mut().zip(expected) {
        rails.extend(expected.rails.into_iter().flatten());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_is_named_whatever_its_place() {
        let with = |rank, items: &[(&str, &str)]| {
            let agreement = items.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect();
            Hello { agreement, ..Hello::example(rank, 3) }
        };
        let own = with(0, &[("plan", "tensor:2"), ("model file a", "1"), ("model file c", "3")]);
        let said = |items: &[(&str, &str)]| disagreement(&own, &with(1, items)).map(|error| error.to_string());
        assert_eq!(said(&[("model file c", "3"), ("plan", "tensor:2"), ("model file a", "1")]), None);
        for (items, expected) in [
            (
                &[("plan", "tensor:2"), ("model file a", "2"), ("model file c", "3")][..],
                "model file a: rank 0 (m0) has 1, rank 1 (m1) has 2",
            ),
            (
                &[("plan", "tensor:2"), ("model file a", "1")],
                "model file c: rank 0 (m0) has 3, rank 1 (m1) has (nothing)",
            ),
            (
                &[("plan", "tensor:2"), ("environment variable X", "on"), ("model file a", "1"), ("model file c", "3")],
                "environment variable X: rank 0 (m0) has (nothing), rank 1 (m1) has on",
            ),
        ] {
            assert_eq!(said(items).unwrap(), format!("ranks disagree on {expected}"));
        }
    }
}
