//! Measures all collectives between local ranks: `netbench RANKS TRANSPORT [LARGEST_BYTES [COLLECTIVE [ALGORITHM [EMULATED_LINK]]]]`.
//! Each rank is pinned to a core, as a rank that computes is; ranks beyond the number of cores share them in turn. `NETBENCH_CORES`
//! takes fewer cores. Prints one JSON object per line.

use std::process::Command;

use consort_fabric::netbench::{NetbenchOptions, run};
use consort_fabric::{Algorithm, Fabric, FabricOptions, TransportChoice};

/// Set for the ranks that rank 0 starts: `rank address`.
const ORDER: &str = "NETBENCH_ORDER";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let argument = |at: usize, default: &str| arguments.get(at).map_or(default, String::as_str).to_owned();
    let size: usize = argument(0, "2").parse()?;
    let transport = match argument(1, "auto").as_str() {
        "shm" => TransportChoice::Shm,
        "tcp" => TransportChoice::Tcp,
        _ => TransportChoice::Auto,
    };
    let (rank, rendezvous) = match std::env::var(ORDER) {
        Ok(order) => {
            let (rank, address) = order.split_once(' ').ok_or("a malformed order")?;
            (rank.parse()?, address.to_owned())
        }
        Err(_) => (0, format!("127.0.0.1:{}", 40_000 + std::process::id() % 20_000)),
    };
    let mut others = Vec::new();
    for other in (1..size).filter(|_| rank == 0) {
        let mut command = Command::new(std::env::current_exe()?);
        others.push(command.args(&arguments).env(ORDER, format!("{other} {rendezvous}")).spawn()?);
    }
    // Not before: what a process starts may run where it may.
    let cores = std::env::var("NETBENCH_CORES").ok().and_then(|cores| cores.parse().ok());
    pin(rank % cores.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from)));
    let algorithm = match argument(4, "auto").as_str() {
        "direct" => Algorithm::Direct,
        "scatter" => Algorithm::Scatter,
        "line" => Algorithm::Line,
        _ => Algorithm::Auto,
    };
    let emulate = arguments.get(5).map(|link| link.parse()).transpose()?;
    let options = FabricOptions { rank, size, transport, rendezvous, algorithm, emulate, ..FabricOptions::default() };
    let fabric = Fabric::connect(options)?;
    let (largest_bytes, only) = (argument(2, "67108864").parse()?, argument(3, ""));
    let measurements = run(&fabric.world(), &NetbenchOptions { largest_bytes, only, ..NetbenchOptions::default() })?;
    for measurement in measurements.iter().filter(|_| rank == 0) {
        println!("{}", serde_json::to_string(measurement)?);
    }
    others.iter_mut().try_for_each(|other| other.wait().map(drop))?;
    Ok(())
}

/// Pins this process, which has one thread so far. A core that the system refuses leaves it where it is.
#[cfg(target_os = "linux")]
fn pin(core: usize) {
    // SAFETY: an empty set is all zeros, the core is below its capacity, and 0 names the calling thread.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(core, &mut set);
        libc::sched_setaffinity(0, size_of_val(&set), &set);
    }
}

/// Other systems place ranks as they like.
#[cfg(not(target_os = "linux"))]
fn pin(_core: usize) {}
