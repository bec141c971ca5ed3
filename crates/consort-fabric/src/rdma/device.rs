//! One RDMA device: its port, its address, and one slab of registered memory for all rails.

use std::ffi::CStr;
use std::net::Ipv6Addr;

use super::verbs::{self, Context, DeviceHandle, MemoryRegion, PortAttributes, ProtectionDomain, Verbs};

/// The port that is used: devices of interest have one.
const PORT: u8 = 1;

/// One entry of a port's table of global identifiers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GidEntry {
    pub index: u8,
    pub gid: [u8; 16],
    /// Whether it stands for routable RoCE (version 2); `None` where the system does not say.
    pub routable: Option<bool>,
}

impl GidEntry {
    pub fn is_ipv4(&self) -> bool {
        Ipv6Addr::from(self.gid).to_ipv4_mapped().is_some()
    }

    pub fn is_link_local(&self) -> bool {
        Ipv6Addr::from(self.gid).is_unicast_link_local()
    }
}

/// Most addresses of a device that are tried.
const MOST_GIDS: usize = 8;

/// The addresses to be known by, best first: IPv4 over routable RoCE if there is one, and what is nearest to that.
pub(crate) fn rank_gids(table: Vec<GidEntry>) -> Vec<GidEntry> {
    let mut usable: Vec<GidEntry> = table.into_iter().filter(|entry| entry.gid != [0; 16]).collect();
    // The sort is stable: of equals the first comes first, on every run.
    usable.sort_by_key(|entry| (entry.routable == Some(false), !entry.is_ipv4(), entry.is_link_local()));
    usable.truncate(MOST_GIDS);
    usable
}

/// An open device with its slab.
pub(crate) struct Device {
    pub verbs: &'static Verbs,
    pub name: String,
    pub context: *mut Context,
    pub domain: *mut ProtectionDomain,
    pub port: PortAttributes,
    /// Addresses, best first; there is one.
    pub gids: Vec<GidEntry>,
    region: *mut MemoryRegion,
    slab: *mut [Page],
}

/// The library's list of devices.
struct DeviceList {
    verbs: &'static Verbs,
    list: *mut *mut DeviceHandle,
    count: usize,
}

impl DeviceList {
    fn new(verbs: &'static Verbs) -> Self {
        let mut count = 0;
        // SAFETY: the call writes the count and returns a list of that length, or null.
        let list = unsafe { (verbs.get_device_list)(&mut count) };
        Self { verbs, list, count: if list.is_null() { 0 } else { count as usize } }
    }

    fn entries(&self) -> impl Iterator<Item = (*mut DeviceHandle, String)> {
        (0..self.count).map(|at| {
            // SAFETY: the list has `count` entries; names are C strings that live as long as the list.
            unsafe {
                let handle = *self.list.add(at);
                (handle, CStr::from_ptr((self.verbs.get_device_name)(handle)).to_string_lossy().into_owned())
            }
        })
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        if !self.list.is_null() {
            // SAFETY: nobody uses the list any more.
            unsafe { (self.verbs.free_device_list)(self.list) };
        }
    }
}

/// An RDMA device of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaDevice {
    /// Its name, as a hostfile lists it.
    pub name: String,
    /// The address that it would be known by, and the largest packets; or why it cannot be used.
    pub state: Result<String, String>,
}

/// The RDMA devices of this machine, each tried.
///
/// # Errors
/// Why there can be none: no verbs library.
pub fn rdma_devices() -> Result<Vec<RdmaDevice>, String> {
    let verbs = Verbs::open()?;
    Ok(devices(verbs))
}

pub(super) fn devices(verbs: &'static Verbs) -> Vec<RdmaDevice> {
    let list = DeviceList::new(verbs);
    let state = |name: &str| {
        let Device { gids, port, .. } = &Device::open(verbs, Some(name), size_of::<Page>())?;
        let gid = gids[0];
        let address = Ipv6Addr::from(gid.gid);
        let address = address.to_ipv4_mapped().map_or_else(|| address.to_string(), |ipv4| ipv4.to_string());
        Ok(format!(
            "address {address} (GID index {}), packets of {} bytes",
            gid.index,
            128 << port.active_mtu.clamp(0, 5)
        ))
    };
    list.entries().map(|(_, name)| RdmaDevice { state: state(&name), name }).collect()
}

/// Registered memory is made of whole pages.
#[repr(C, align(4096))]
#[derive(Clone, Copy)]
struct Page([u8; 4096]);

// SAFETY: verbs objects may be used by any thread; the library locks them, and rails keep to their own parts of the slab.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    pub const PORT: u8 = PORT;

    /// Opens the device of that name, or the first whose port is active, with `slab_bytes` of registered memory. The error says
    /// in one line what is in the way.
    pub fn open(verbs: &'static Verbs, wanted: Option<&str>, slab_bytes: usize) -> Result<Self, String> {
        let list = DeviceList::new(verbs);
        let mut obstacle = match wanted {
            Some(name) => format!("there is no RDMA device {name}"),
            None => "there is no RDMA device".into(),
        };
        for (handle, name) in list.entries().filter(|(_, name)| wanted.is_none_or(|wanted| wanted == name)) {
            // SAFETY: the handle comes from the list, which is freed only afterwards.
            let context = unsafe { (verbs.open_device)(handle) };
            match Self::set_up(verbs, context, &name, slab_bytes) {
                Ok(device) => return Ok(device),
                Err(error) => obstacle = format!("RDMA device {name}: {error}"),
            }
        }
        Err(obstacle)
    }

    fn set_up(verbs: &'static Verbs, context: *mut Context, name: &str, slab_bytes: usize) -> Result<Self, String> {
        if context.is_null() {
            return Err("it cannot be opened".into());
        }
        let found = active_port(verbs, context).and_then(|port| {
            let table = Self::gid_table(verbs, context, name, &port)?;
            let entries = table.len();
            match rank_gids(table) {
                gids if gids.is_empty() => {
                    Err(format!("no usable address among its {entries} GIDs; give the interface an IPv4 address"))
                }
                gids => Ok((port, gids)),
            }
        });
        let (port, gids) = match found {
            Ok(found) => found,
            Err(error) => {
                // SAFETY: open, and used by nothing.
                unsafe { (verbs.close_device)(context) };
                return Err(error);
            }
        };
        // SAFETY: the context is open.
        let domain = unsafe { (verbs.alloc_pd)(context) };
        let slab = Box::into_raw(vec![Page([0; 4096]); slab_bytes.div_ceil(size_of::<Page>())].into_boxed_slice());
        let length = slab.len() * size_of::<Page>();
        let region = if domain.is_null() {
            std::ptr::null_mut()
        } else {
            // SAFETY: the slab lives, unmoved, until the region is deregistered in `drop`.
            unsafe { (verbs.reg_mr)(domain, slab.cast(), length, verbs::ACCESS_LOCAL_WRITE) }
        };
        let device = Self { verbs, name: name.to_owned(), context, domain, port, gids, region, slab };
        if device.region.is_null() {
            let error = std::io::Error::last_os_error();
            return Err(format!(
                "{length} bytes cannot be registered ({error}); raise the locked memory limit (ulimit -l)"
            ));
        }
        Ok(device)
    }

    fn gid_table(
        verbs: &Verbs,
        context: *mut Context,
        name: &str,
        port: &PortAttributes,
    ) -> Result<Vec<GidEntry>, String> {
        let mut table = Vec::new();
        for index in 0..port.gid_table_length.clamp(0, 255) {
            let mut gid = [0u64; 2];
            // SAFETY: the context is open; the call writes 16 bytes.
            if unsafe { (verbs.query_gid)(context, PORT, index, &mut gid) } != 0 {
                continue;
            }
            let routable = (verbs.is_routable)(name, PORT, index);
            let gid = bytemuck::cast(gid);
            table.push(GidEntry { index: index as u8, gid, routable });
        }
        if table.is_empty() { Err("its GID table is empty".into()) } else { Ok(table) }
    }

    /// Whether the port is still up.
    pub fn check_port(&self) -> Result<(), String> {
        active_port(self.verbs, self.context).map(|_| ())
    }

    pub fn local_key(&self) -> u32 {
        // SAFETY: registered while `self` lives (checked in `set_up`).
        unsafe { (*self.region).local_key }
    }

    /// The slab's first byte; rails keep to their own parts.
    pub fn slab(&self) -> *mut u8 {
        self.slab.cast()
    }
}

/// The port's attributes, if it is up.
fn active_port(verbs: &Verbs, context: *mut Context) -> Result<PortAttributes, String> {
    let mut port = PortAttributes::default();
    // SAFETY: the context is open and `port` has the layout that the call fills.
    match unsafe { (verbs.query_port)(context, PORT, &mut port) } {
        0 if port.state == verbs::PORT_ACTIVE => Ok(port),
        0 => Err(format!("its port is not active (state {}); is the cable in and the interface up?", port.state)),
        error => Err(format!("its port cannot be queried (error {error})")),
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: each object was made by `set_up` (or is null) and nothing uses it any more: rails hold the device alive.
        unsafe {
            if !self.region.is_null() {
                (self.verbs.dereg_mr)(self.region);
            }
            if !self.domain.is_null() {
                (self.verbs.dealloc_pd)(self.domain);
            }
            (self.verbs.close_device)(self.context);
            drop(Box::from_raw(self.slab));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(index: u8, address: &str, routable: Option<bool>) -> GidEntry {
        GidEntry { index, gid: address.parse::<Ipv6Addr>().unwrap().octets(), routable }
    }

    fn chosen(table: &[GidEntry]) -> Option<u8> {
        rank_gids(table.to_vec()).first().map(|entry| entry.index)
    }

    #[test]
    fn the_address_is_chosen_by_what_it_is_not_by_its_place() {
        assert_eq!(chosen(&[]), None);
        assert_eq!(chosen(&[entry(0, "::", None)]), None);
        assert_eq!(chosen(&[entry(0, "fe80::1", None)]), Some(0));
        assert_eq!(chosen(&[entry(0, "::", None), entry(1, "::", None), entry(2, "::ffff:10.0.0.1", None)]), Some(2));
        assert_eq!(chosen(&[entry(0, "fe80::1", None), entry(1, "::ffff:10.0.0.1", None)]), Some(1));
        let versions = [entry(0, "::ffff:10.0.0.1", Some(false)), entry(1, "::ffff:10.0.0.1", Some(true))];
        assert_eq!(chosen(&versions), Some(1));
        assert_eq!(chosen(&[entry(0, "fe80::1", Some(true)), entry(1, "2001:db8::1", Some(true))]), Some(1));
        // Two equally good: the first, on every run.
        assert_eq!(chosen(&[entry(3, "::ffff:10.0.0.1", None), entry(5, "::ffff:10.0.0.2", None)]), Some(3));
    }

    #[test]
    fn a_machine_without_devices_says_so_in_one_line() {
        if let Err(error) = Verbs::open().and_then(|verbs| Device::open(verbs, Some("no_such_device"), 4096)) {
            assert!(!error.is_empty() && !error.contains('\n'), "{error}");
        } else {
            panic!("opened a device that does not exist");
        }
    }
}
