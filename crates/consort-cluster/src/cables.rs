//! The cables of each host: what the system says of the interfaces and RDMA devices that a hostfile names, and what is wrong with
//! them before anything is sent.

use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

use consort_fabric::RdmaDevice;
use serde::{Deserialize, Serialize};

use crate::doctor::{Failure, HostFacts};
use crate::hostfile::Host;

/// A network interface that has an address.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interface {
    /// `eth0`, `en5`, …
    pub name: String,
    /// Its addresses, each with the number of bits that are the network's.
    pub addresses: Vec<(IpAddr, u32)>,
    /// Whether it is switched on and something is at the other end.
    pub is_up: bool,
    /// The speed that both ends have agreed on, where the system tells.
    pub mbit_per_s: Option<u64>,
    /// The bridge that it is part of.
    pub bridge: Option<String>,
}

/// An RDMA device: its state, or why it cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RdmaFacts {
    /// Its name.
    pub name: String,
    /// Address and packet size, or the obstacle.
    pub state: Result<String, String>,
}

impl From<RdmaDevice> for RdmaFacts {
    fn from(RdmaDevice { name, state }: RdmaDevice) -> Self {
        Self { name, state }
    }
}

/// This machine's interfaces.
pub(crate) fn interfaces() -> Vec<Interface> {
    let mut found: Vec<Interface> = Vec::new();
    let mut list = std::ptr::null_mut();
    // SAFETY: on success the call writes the head of a list that is freed below.
    if unsafe { libc::getifaddrs(&mut list) } != 0 {
        return found;
    }
    let mut entry = list;
    // SAFETY: entries are valid until the list is freed; the last one's `ifa_next` is null.
    while let Some(this) = unsafe { entry.as_ref() } {
        entry = this.ifa_next;
        // SAFETY: every entry has a name.
        let name = unsafe { CStr::from_ptr(this.ifa_name) }.to_string_lossy().into_owned();
        // SAFETY: both are null or point to a socket address that lives as long as the list.
        let known = unsafe { address(this.ifa_addr).zip(address(this.ifa_netmask)) };
        let Some((address, mask)) = known else { continue };
        let network_bits = match mask {
            IpAddr::V4(mask) => mask.to_bits().count_ones(),
            IpAddr::V6(mask) => mask.to_bits().count_ones(),
        };
        let running = (libc::IFF_UP | libc::IFF_RUNNING) as u32;
        match found.iter_mut().find(|interface| interface.name == name) {
            Some(interface) => interface.addresses.push((address, network_bits)),
            None => found.push(Interface {
                is_up: this.ifa_flags & running == running,
                mbit_per_s: read(&name, "speed").and_then(|text| text.parse().ok()),
                bridge: bridge(&name),
                addresses: vec![(address, network_bits)],
                name,
            }),
        }
    }
    // SAFETY: the list came from `getifaddrs`, and no entry is used any more.
    unsafe { libc::freeifaddrs(list) };
    found
}

/// # Safety
/// `address` is null or points to a whole socket address.
unsafe fn address(address: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: as promised; the family says which structure it is.
    unsafe {
        match i32::from(address.as_ref()?.sa_family) {
            libc::AF_INET => {
                let address = address.cast::<libc::sockaddr_in>().read_unaligned().sin_addr;
                Some(Ipv4Addr::from(u32::from_be(address.s_addr)).into())
            }
            libc::AF_INET6 => {
                let address = address.cast::<libc::sockaddr_in6>().read_unaligned().sin6_addr;
                Some(Ipv6Addr::from(address.s6_addr).into())
            }
            _ => None,
        }
    }
}

/// What Linux says of an interface; elsewhere there is no such file.
fn read(interface: &str, file: &str) -> Option<String> {
    let text = std::fs::read_to_string(Path::new("/sys/class/net").join(interface).join(file)).ok()?;
    Some(text.trim().to_owned())
}

fn bridge(interface: &str) -> Option<String> {
    let master = std::fs::read_link(Path::new("/sys/class/net").join(interface).join("master")).ok()?;
    let name = master.file_name()?.to_string_lossy().into_owned();
    Path::new("/sys/class/net").join(&name).join("bridge").exists().then_some(name)
}

/// What is in the way of RDMA, and what helps. The first fragment that the obstacle contains counts.
const RDMA_REMEDIES: [(&str, &str); 7] = [
    ("librdma.dylib is not installed", "update HOST to macOS 26.2 or later"),
    ("is not installed", "install the verbs library on HOST (Debian: libibverbs1 and ibverbs-providers)"),
    (
        "there is no RDMA device",
        "correct \"rdma\" in the hostfile; on a Mac, start HOST into Recovery and run `rdma_ctl enable` in its Terminal; on Linux, load the \
         adapter's driver",
    ),
    ("its port is not active", "plug in the cable and bring the interface behind the device up, at both ends"),
    ("GID", "give the interface behind the device an IPv4 address"),
    ("cannot be registered", "raise the limit of locked memory on HOST (ulimit -l)"),
    ("", "see what `ibv_devinfo` on HOST says"),
];

/// What is wrong with the interfaces and devices that the hostfile names, seen from the hosts that answered.
pub fn examine(hosts: &[Host], facts: &[Option<&HostFacts>]) -> Vec<Failure> {
    let mut failures = Vec::new();
    let answered = || hosts.iter().zip(facts).filter_map(|(host, facts)| Some((host, (*facts)?)));
    for (host, facts) in answered() {
        let mut fail = |what: String, remedy: String| failures.push(Failure::new(&host.ssh, what, remedy));
        for ip in host.ips.iter().filter(|ip| !ip.is_loopback()) {
            match interface_of(facts, *ip) {
                None => fail(
                    format!("none of its interfaces has the address {ip}"),
                    "correct \"ips\" in the hostfile, or give the address to the interface".to_owned(),
                ),
                Some(Interface { name, is_up: false, .. }) => fail(
                    format!("interface {name} ({ip}) has no link"),
                    format!("plug in the cable at both ends, and switch it on: ip link set {name} up"),
                ),
                Some(Interface { name, bridge: Some(bridge), .. }) => fail(
                    format!("interface {name} ({ip}) is part of the bridge {bridge}"),
                    format!(
                        "take it out: ip link set {name} nomaster (on a Mac: remove it from the Thunderbolt Bridge)"
                    ),
                ),
                Some(_) => {}
            }
        }
        let mut devices: Vec<&String> = host.rdma.iter().flatten().collect();
        devices.sort();
        devices.dedup();
        for device in devices {
            let known = facts.rdma.iter().find(|known| known.name == *device).map(|known| known.state.clone());
            let none = || facts.rdma_obstacle.clone().unwrap_or_else(|| format!("there is no RDMA device {device}"));
            if let Err(obstacle) = known.unwrap_or_else(|| Err(none())) {
                let remedy =
                    RDMA_REMEDIES.iter().find(|(fragment, _)| obstacle.contains(fragment)).map_or("", |it| it.1);
                fail(obstacle, remedy.replace("HOST", &host.ssh));
            }
        }
    }
    let answered: Vec<_> = answered().collect();
    for (at, first) in answered.iter().enumerate() {
        failures.extend(answered[at + 1..].iter().filter_map(|second| crossed(*first, *second)));
    }
    failures
}

/// The interface with an address.
pub fn interface_of(facts: &HostFacts, ip: IpAddr) -> Option<&Interface> {
    facts.interfaces.iter().find(|interface| interface.addresses.iter().any(|(address, _)| *address == ip))
}

/// Cables that are listed in another order at one end than at the other.
fn crossed((one, facts): (&Host, &HostFacts), (other, _): (&Host, &HostFacts)) -> Option<Failure> {
    let leads = |ip: IpAddr, to: IpAddr| {
        let mut addresses = facts.interfaces.iter().flat_map(|interface| &interface.addresses);
        addresses.any(|&(address, bits)| address == ip && same_network(address, to, bits))
    };
    let cables = one.ips.len().min(other.ips.len());
    let wrong = (0..cables).find(|&cable| {
        !leads(one.ips[cable], other.ips[cable]) && other.ips.iter().any(|&to| leads(one.ips[cable], to))
    })?;
    let order: Vec<String> =
        one.ips.iter().filter_map(|&ip| other.ips.iter().find(|&&to| leads(ip, to)).map(IpAddr::to_string)).collect();
    let what = format!(
        "the addresses of their cables are listed in different orders: {} and {} are not in one network",
        one.ips[wrong], other.ips[wrong]
    );
    let remedy = format!("list the \"ips\" of {} in the order {}", other.ssh, order.join(", "));
    Some(Failure::new(&format!("{} <-> {}", one.ssh, other.ssh), what, remedy))
}

fn same_network(one: IpAddr, other: IpAddr, network_bits: u32) -> bool {
    let differing = match (one, other) {
        (IpAddr::V4(one), IpAddr::V4(other)) => (one.to_bits() ^ other.to_bits()).leading_zeros(),
        (IpAddr::V6(one), IpAddr::V6(other)) => (one.to_bits() ^ other.to_bits()).leading_zeros(),
        _ => return false,
    };
    differing >= network_bits
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn host(ssh: &str, ips: &[&str]) -> Host {
        Host { ssh: ssh.to_owned(), ips: ips.iter().map(|text| ip(text)).collect(), slots: 1, ..Host::default() }
    }

    fn facts(interfaces: &[(&str, &str, bool, Option<&str>)]) -> HostFacts {
        let interface = |&(name, address, is_up, bridge): &(&str, &str, bool, Option<&str>)| Interface {
            name: name.to_owned(),
            addresses: vec![(ip(address), 24)],
            is_up,
            mbit_per_s: None,
            bridge: bridge.map(str::to_owned),
        };
        HostFacts { interfaces: interfaces.iter().map(interface).collect(), ..HostFacts::default() }
    }

    #[test]
    fn this_machine_has_its_loopback() {
        let found = interfaces();
        let home = found.iter().find(|interface| interface.addresses.contains(&(ip("127.0.0.1"), 8)));
        assert!(home.is_some_and(|interface| interface.is_up && interface.bridge.is_none()), "{found:?}");
    }

    #[test]
    fn each_fault_of_a_cable_has_a_remedy() {
        let hosts =
            [host("m1", &["10.0.0.1", "10.0.1.1"]), host("m2", &["10.0.1.2", "10.0.0.2"]), host("m3", &["10.0.0.3"])];
        let one = facts(&[("e0", "10.0.0.1", true, None), ("e1", "10.0.1.1", true, None)]);
        let other = facts(&[("e0", "10.0.0.2", false, None), ("e1", "10.0.1.2", true, Some("br0"))]);
        let failures = examine(&hosts, &[Some(&one), Some(&other), Some(&facts(&[]))]);
        let told: Vec<String> = failures.iter().map(|it| format!("{}: {}: {}", it.place, it.what, it.remedy)).collect();
        for (at, expected) in [
            (0, "m2: interface e1 (10.0.1.2) is part of the bridge br0: take it out: ip link set e1 nomaster"),
            (1, "m2: interface e0 (10.0.0.2) has no link: plug in the cable"),
            (2, "m3: none of its interfaces has the address 10.0.0.3: correct \"ips\""),
            (
                3,
                "m1 <-> m2: the addresses of their cables are listed in different orders: 10.0.0.1 and 10.0.1.2 are not in one network",
            ),
        ] {
            assert!(told[at].starts_with(expected), "{told:#?}");
        }
        assert!(told[3].ends_with("list the \"ips\" of m2 in the order 10.0.0.2, 10.0.1.2"), "{told:#?}");
        assert_eq!(told.len(), 4);
        // A network behind a router is none of our business.
        let far = [host("m1", &["10.0.0.1"]), host("m2", &["172.16.0.2"])];
        let there = facts(&[("e0", "172.16.0.2", true, None)]);
        assert_eq!(examine(&far, &[Some(&one), Some(&there)]), []);
    }

    #[test]
    fn what_is_in_the_way_of_rdma_has_a_remedy() {
        let listing = |name: &str| Host { rdma: vec![vec![], vec![name.to_owned()]], ..host("m1", &[]) };
        let with = |rdma: Vec<RdmaFacts>, obstacle: Option<&str>| HostFacts {
            rdma,
            rdma_obstacle: obstacle.map(str::to_owned),
            ..HostFacts::default()
        };
        let device = |state: Result<&str, &str>| {
            vec![RdmaFacts { name: "a".into(), state: state.map(str::to_owned).map_err(str::to_owned) }]
        };
        assert_eq!(examine(&[listing("a")], &[Some(&with(device(Ok("fine")), None))]), []);
        for (facts, expected) in [
            (with(vec![], Some("libibverbs.so.1 is not installed")), "install the verbs library on m1"),
            (with(vec![], Some("/usr/lib/librdma.dylib is not installed")), "macOS 26.2"),
            (with(vec![], None), "start m1 into Recovery and run `rdma_ctl enable`"),
            (with(device(Err("RDMA device a: its port is not active (state 1)")), None), "plug in the cable"),
            (with(device(Err("RDMA device a: its GID table is empty")), None), "an IPv4 address"),
            (with(device(Err("RDMA device a: 4096 bytes cannot be registered")), None), "limit of locked memory on m1"),
            (with(device(Err("RDMA device a: it cannot be opened")), None), "ibv_devinfo"),
        ] {
            let failures = examine(&[listing("a")], &[Some(&facts)]);
            assert!(failures[0].remedy.contains(expected), "{failures:?}");
        }
    }
}
