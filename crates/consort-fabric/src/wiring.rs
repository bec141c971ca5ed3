//! From a meeting to links: which carrier each pair of ranks uses, and the rails over it.

use std::io;
use std::sync::Arc;

use crate::carrier::{self, Carrier};
use crate::channel::Hello;
use crate::emulate::EmulatedRail;
use crate::fabric::{FabricOptions, TransportChoice};
use crate::link::Link;
use crate::rail::Rail;
use crate::rdma::{self, Device, Verbs};
use crate::relay::{RelayParts, RelayRail};
use crate::rendezvous::Meeting;
use crate::shm::{Region, ShmRail};
use crate::vigil::{Vigil, from_system};
use crate::{FabricError, probe, tcp};

/// What a rank writes at the start of its region, and a peer expects there.
pub(crate) fn identity(hello: &Hello) -> [u8; 32] {
    let mut identity = [0; 32];
    identity[..8].copy_from_slice(&hello.clock_ns.to_le_bytes());
    identity[8..12].copy_from_slice(&hello.rank.to_le_bytes());
    for (at, byte) in hello.run_id.bytes().enumerate() {
        identity[12 + at % 20] ^= byte;
    }
    identity
}

/// A device and the rail's place in its slab.
pub(crate) type DevicePlace = (Arc<Device>, usize);

/// Opens each named device once, with room for all its rails. The error says why RDMA cannot be used.
pub(crate) fn open_devices(options: &FabricOptions) -> Result<Vec<Vec<DevicePlace>>, String> {
    if options.size == 1 || !matches!(options.transport, TransportChoice::Auto | TransportChoice::Rdma) {
        return Err("it was not asked for".into());
    }
    let names = match &options.rdma_devices[..] {
        // Without a word on where its cable leads, a device may reach nobody.
        [] if options.transport == TransportChoice::Auto => return Err("no RDMA device is listed".into()),
        [] => (0..options.size).map(|rank| vec![None; usize::from(rank != options.rank)]).collect::<Vec<_>>(),
        listed if listed.len() == options.size => {
            listed.iter().map(|names| names.iter().map(|name| Some(name.as_str())).collect()).collect()
        }
        listed => return Err(format!("{} lists of RDMA devices for {} ranks", listed.len(), options.size)),
    };
    let mut opened: Vec<(Option<&str>, Arc<Device>, usize)> = Vec::new();
    let mut place = |name| -> Result<DevicePlace, String> {
        if let Some((_, device, used)) = opened.iter_mut().find(|(known, ..)| *known == name) {
            *used += 1;
            return Ok((device.clone(), *used - 1));
        }
        let rails = names.iter().flatten().filter(|&&other| other == name).count();
        let device = Arc::new(Device::open(Verbs::open()?, name, rails * rdma::RAIL_BYTES)?);
        opened.push((name, device.clone(), 1));
        Ok((device, 0))
    };
    names.iter().map(|names| names.iter().map(|&name| place(name)).collect()).collect()
}

/// A link to another rank.
pub(crate) struct Wired {
    pub link: Link,
    /// Why it is over what it is over, in a few words.
    pub reason: String,
    /// Bytes per millisecond of each rail, where there are several.
    pub speeds: Vec<u32>,
}

/// None to this rank itself.
pub(crate) type WiredLink = Option<Wired>;

/// Links over shared memory, over the meeting's connections, or through other ranks; the rails of links that have several are
/// measured. Beside them, what the relay works with, if ranks talk through others.
pub(crate) fn make_links(
    options: &FabricOptions,
    meeting: &mut Meeting,
    region: Option<&Arc<Region>>,
    devices: Vec<Vec<DevicePlace>>,
    vigil: Vigil,
) -> Result<(Vec<WiredLink>, Option<RelayParts>), FabricError> {
    let failed = |peer: &Hello, error: io::Error| {
        from_system(&format!("connecting to rank {} ({})", peer.rank, peer.host), error)
    };
    let own = &meeting.roster[options.rank];
    let mut links: Vec<WiredLink> = meeting.roster.iter().map(|_| None).collect();
    let mut relay = RelayParts::default();
    let emulated = |rail: Box<dyn Rail>, at| match options.emulate {
        Some(link) => Box::new(EmulatedRail::new(rail, link, at)),
        None => rail,
    };
    for round in 0..options.size {
        let Some(rank) = probe::opponent(options.rank, round, options.size) else { continue };
        let peer = &meeting.roster[rank];
        if let Some(stream) = meeting.relays[rank].take() {
            relay.hops.push((rank, emulated(tcp::rail(stream, options.encrypt), 0)));
        }
        if !meeting.topology.are_linked(options.rank, rank) {
            let (rail, stream) = RelayRail::new().map_err(|error| failed(peer, error))?;
            relay.streams.push((rank, stream));
            let between = meeting.topology.between(options.rank, rank).iter().map(usize::to_string).collect::<Vec<_>>();
            let reason = format!("no link of their own; through rank {}", between.join(" and "));
            let link = Link::new(vec![Box::new(rail)], &[1], options.checksums);
            links[rank] = Some(Wired { link, reason, speeds: vec![1] });
            continue;
        }
        let mut rails: Vec<Box<dyn Rail>> = Vec::new();
        let (chosen, mut reason) = carrier::choose(options, own, peer)?;
        let mut streams = meeting.rails[rank].drain(..).map(|stream| tcp::rail(stream, options.encrypt));
        match (chosen, region, &peer.region) {
            (Carrier::SharedMemory, Some(region), Some(address)) => {
                let theirs =
                    Region::open(address, options.size, identity(peer)).map_err(|error| failed(peer, error))?;
                rails.push(Box::new(ShmRail::new(options.rank, region.clone(), rank, theirs)));
            }
            (Carrier::Rdma, ..) => {
                let mut side = streams.next().expect("a link that is not shared memory has a connection");
                // One rail per device that both ends have for this link, in order.
                let count = carrier::rdma_rails(own, peer).map_err(FabricError::Setup)?;
                let devices = devices[rank].iter().take(count);
                let connected: io::Result<Result<Vec<_>, String>> = devices
                    .map(|(device, place)| rdma::connect(device, *place, &mut *side, options.rank < rank, vigil))
                    .collect();
                match connected.map_err(|error| failed(peer, error))? {
                    Ok(connected) => rails = connected,
                    Err(obstacle) if options.transport == TransportChoice::Auto => {
                        reason = obstacle;
                        rails.push(side);
                        rails.extend(streams);
                    }
                    Err(obstacle) => {
                        return Err(failed(peer, io::Error::other(format!("{obstacle}; use --transport tcp or auto"))));
                    }
                }
            }
            _ => rails.extend(streams),
        }
        rails = rails.into_iter().enumerate().map(|(at, rail)| emulated(rail, at)).collect();
        let mut speeds = vec![1; rails.len()];
        if rails.len() > 1 {
            speeds = probe::measure(&mut rails, options.rank < rank, vigil).map_err(|error| failed(peer, error))?;
        }
        let link = Link::new(rails, &speeds, options.checksums);
        links[rank] = Some(Wired { link, reason, speeds });
    }
    Ok((links, meeting.topology.relays().then_some(relay)))
}
