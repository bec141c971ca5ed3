//! What carries the data between each two ranks, and why: every rank works it out from their hellos, and all find the same.

use crate::FabricError;
use crate::channel::Hello;
use crate::emulate::LinkedRanks;
use crate::fabric::{FabricOptions, TransportChoice};

/// What carries the data of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Carrier {
    SharedMemory,
    Rdma,
    Tcp,
}

/// What carries the data between two ranks, and why, in a few words: the same answer on both. An error if they were told to use what
/// one of them lacks.
pub(crate) fn choose(options: &FabricOptions, one: &Hello, other: &Hello) -> Result<(Carrier, String), FabricError> {
    let several_rails = options.emulate.is_some_and(|link| link.rails > 1);
    let one_machine = one.machine == other.machine;
    let asked = || "as asked".to_owned();
    Ok(match options.transport {
        TransportChoice::Tcp => (Carrier::Tcp, asked()),
        TransportChoice::Auto if one_machine && several_rails => (Carrier::Tcp, "several emulated rails".to_owned()),
        TransportChoice::Auto if one_machine => (Carrier::SharedMemory, "one machine".to_owned()),
        TransportChoice::Auto if options.encrypt => (Carrier::Tcp, "RDMA carries no encryption".to_owned()),
        TransportChoice::Auto => match rdma_rails(one, other) {
            Ok(_) => (Carrier::Rdma, "both ends list devices, and a message came through".to_owned()),
            Err(obstacle) => (Carrier::Tcp, obstacle),
        },
        TransportChoice::Shm if one_machine => (Carrier::SharedMemory, asked()),
        TransportChoice::Shm => {
            return Err(FabricError::Setup(format!(
                "rank {} ({}) and rank {} ({}) are not on one machine under one user, so they cannot share memory; use --transport tcp or auto",
                one.rank, one.host, other.rank, other.host
            )));
        }
        TransportChoice::Rdma => match rdma_rails(one, other) {
            Ok(_) => (Carrier::Rdma, asked()),
            Err(obstacle) => return Err(FabricError::Setup(format!("{obstacle}; use --transport tcp or auto"))),
        },
    })
}

/// Whether there is a link for data between two ranks: the same answer on both.
pub(crate) fn linked(options: &FabricOptions, one: &Hello, other: &Hello) -> bool {
    let emulated = options.emulate.map_or(LinkedRanks::All, |link| link.linked);
    let left = emulated.are_linked(one.rank as usize, other.rank as usize, one.size as usize);
    left && (options.transport != TransportChoice::Rdma || rdma_rails(one, other).is_ok())
}

/// How many RDMA rails the link between two ranks has; the error says why none.
pub(crate) fn rdma_rails(one: &Hello, other: &Hello) -> Result<usize, String> {
    let devices = |from: &Hello, to: &Hello| {
        let Hello { rank, host, rdma, .. } = from;
        let listed = rdma.as_ref().map_err(|obstacle| format!("rank {rank} ({host}) cannot use RDMA: {obstacle}"))?;
        match listed.get(to.rank as usize) {
            None | Some(0) => {
                Err(format!("rank {rank} ({host}) lists no RDMA device for rank {} ({})", to.rank, to.host))
            }
            Some(&devices) => Ok(devices),
        }
    };
    Ok(devices(one, other)?.min(devices(other, one)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(rank: u32, rdma: Result<Vec<usize>, String>) -> Hello {
        Hello { rdma, ..Hello::example(rank, 3) }
    }

    #[test]
    fn rdma_is_taken_by_itself_only_where_both_ends_list_devices() {
        let listing = |rank, devices: [usize; 3]| hello(rank, Ok(devices.to_vec()));
        let without = |rank| hello(rank, Err("no RDMA device is listed".into()));
        let chosen = |transport, encrypt, one, other| {
            choose(&FabricOptions { transport, encrypt, ..FabricOptions::default() }, &one, &other)
                .map(|(carrier, _)| carrier)
        };
        let (one, other) = (|| listing(0, [0, 2, 1]), || listing(1, [1, 0, 0]));
        assert_eq!(rdma_rails(&one(), &other()), Ok(1), "as many as both have");
        for (encrypt, one, other, expected) in [
            (false, one(), other(), Carrier::Rdma),
            (true, one(), other(), Carrier::Tcp),
            (false, one(), listing(2, [0, 0, 0]), Carrier::Tcp),
            (false, listing(2, [0, 1, 0]), other(), Carrier::Tcp),
            (false, without(0), other(), Carrier::Tcp),
            (false, other(), without(0), Carrier::Tcp),
            (false, without(0), without(1), Carrier::Tcp),
        ] {
            let what = format!("{:?} and {:?}", one.rdma, other.rdma);
            assert_eq!(chosen(TransportChoice::Auto, encrypt, one, other).unwrap(), expected, "{what}");
        }
        let refusal = |one, other| chosen(TransportChoice::Rdma, false, one, other).unwrap_err().to_string();
        assert!(
            refusal(one(), without(1))
                .contains("rank 1 (m1) cannot use RDMA: no RDMA device is listed; use --transport tcp")
        );
        assert!(refusal(one(), listing(2, [0, 0, 0])).contains("rank 2 (m2) lists no RDMA device for rank 0 (m0)"));
    }
}
