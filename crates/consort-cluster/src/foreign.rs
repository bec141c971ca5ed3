//! Ranks that another launcher starts: who they are by the variables of MLX, Open MPI, MPICH (and what is derived from it) and Slurm.
//!
//! From these comes who a rank is, and nothing else: ranks then meet and exchange data as they always do. No MPI library is
//! needed, and `mpirun -n 4 consort …` works with any of them.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::net::{IpAddr, SocketAddr};

use serde_json::Value;

use crate::error::ClusterError;
use crate::hostfile::devices_from_json;
use crate::identity::{RENDEZVOUS, RankIdentity, parse, within};

/// How a launcher calls what a rank must know. Without a local rank, a rank takes itself to be alone on its host.
struct Dialect {
    rank: &'static str,
    size: &'static str,
    local_rank: &'static str,
    local_size: &'static str,
    /// Names the run, the same on all ranks and different from other runs on the same machines.
    job: &'static [&'static str],
}

const DIALECTS: [Dialect; 3] = [
    Dialect {
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
        job: &["OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"],
    },
    Dialect {
        rank: "PMI_RANK",
        size: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
        local_size: "MPI_LOCALNRANKS",
        job: &["PMI_JOBID", "HYDI_CONTROL_FD"],
    },
    // A script of sbatch has a SLURM_PROCID too, but only srun sets the number of tasks of a step.
    Dialect {
        rank: "SLURM_PROCID",
        size: "SLURM_STEP_NUM_TASKS",
        local_rank: "SLURM_LOCALID",
        local_size: "SLURM_STEP_TASKS_PER_NODE",
        job: &["SLURM_JOB_ID", "SLURM_STEP_ID"],
    },
];

const MLX_RANK: &str = "MLX_RANK";
const MLX_DEVICES: &str = "MLX_IBV_DEVICES";
const MLX_COORDINATOR: &str = "MLX_JACCL_COORDINATOR";
const MLX_HOSTFILE: &str = "MLX_HOSTFILE";
const SLURM_NODES: &str = "SLURM_STEP_NODELIST";

/// The identity that another launcher gave this process; `None` if there is no sign of one, or the process is its only rank.
pub(crate) fn identity(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<RankIdentity>, ClusterError> {
    if let Some(rank) = lookup(MLX_RANK) {
        return mlx(parse(MLX_RANK, &rank)?, &lookup).map(Some);
    }
    let spoken = DIALECTS.iter().find_map(|dialect| {
        let (rank, size) = (lookup(dialect.rank)?, lookup(dialect.size)?);
        (size != "1").then_some((dialect, rank, size))
    });
    let Some((dialect, rank, size)) = spoken else { return Ok(None) };
    let (rank, size): (usize, usize) = (parse(dialect.rank, &rank)?, parse(dialect.size, &size)?);
    within(dialect.rank, rank, size)?;
    let local_rank = lookup(dialect.local_rank).map_or(Ok(0), |text| parse(dialect.local_rank, &text))?;
    // Slurm names the numbers of all nodes: `4(x2),3`. Nodes of a step are used alike, so the first stands for all.
    let local_size =
        lookup(dialect.local_size).map(|text| text.split(['(', ',']).next().unwrap_or_default().to_owned());
    let local_size: usize = local_size.map_or(Ok(local_rank + 1), |text| parse(dialect.local_size, &text))?;
    let local_size = local_size.max(local_rank + 1);
    let job: Vec<String> = dialect.job.iter().filter_map(|name| lookup(name)).collect();
    let rendezvous = match (lookup(RENDEZVOUS), lookup(SLURM_NODES)) {
        (Some(address), _) => address,
        _ if local_size >= size => SocketAddr::new(IpAddr::from([127, 0, 0, 1]), port_of(&job)).to_string(),
        (None, Some(nodes)) if dialect.rank == "SLURM_PROCID" => format!("{}:{}", first_node(&nodes), port_of(&job)),
        _ => {
            let problem =
                format!("missing: {size} ranks on several hosts must be told where rank 0 listens, as HOST:PORT");
            return Err(ClusterError::Environment { variable: RENDEZVOUS, problem });
        }
    };
    let identity = RankIdentity { rank, size, local_rank, local_size, ..bare(rendezvous, &job.join("-")) };
    Ok(Some(identity))
}

/// What JACCL and the ring of MLX are told: a matrix of devices with a coordinator, or a list of addresses for each rank.
fn mlx(rank: usize, lookup: &impl Fn(&str) -> Option<String>) -> Result<RankIdentity, ClusterError> {
    let complain = |variable: &'static str, problem: String| ClusterError::Environment { variable, problem };
    let read = |variable: &'static str| -> Result<Option<Vec<Value>>, ClusterError> {
        let Some(path) = lookup(variable) else { return Ok(None) };
        let text = std::fs::read_to_string(&path).map_err(|error| complain(variable, format!("{path}: {error}")))?;
        serde_json::from_str(&text).map(Some).map_err(|error| complain(variable, format!("{path}: {error}")))
    };
    let (matrix, hosts) = (read(MLX_DEVICES)?, read(MLX_HOSTFILE)?);
    let addresses_of = |row: &Value| -> Result<Vec<SocketAddr>, ClusterError> {
        let wrong = || complain(MLX_HOSTFILE, format!("expected a list of \"IP:PORT\" for each rank, got {row}"));
        let entries = row.as_array().ok_or_else(wrong)?;
        entries.iter().map(|entry| entry.as_str().and_then(|text| text.parse().ok()).ok_or_else(wrong)).collect()
    };
    let addresses: Vec<Vec<SocketAddr>> = hosts.iter().flatten().map(addresses_of).collect::<Result<_, _>>()?;
    let size = match (&matrix, &hosts) {
        (Some(rows), _) | (None, Some(rows)) => rows.len(),
        (None, None) => {
            let problem = format!("missing, and so is {MLX_HOSTFILE}, although {MLX_RANK} is set");
            return Err(complain(MLX_DEVICES, problem));
        }
    };
    within(MLX_RANK, rank, size)?;
    let rdma = match &matrix {
        Some(rows) => devices_from_json(&rows[rank]).map_err(|problem| complain(MLX_DEVICES, problem))?,
        None => Vec::new(),
    };
    if !rdma.is_empty() && (rdma.len() != size || !rdma[rank].is_empty()) {
        let problem = format!("row {rank} must have an entry for each of the {size} ranks, and null for itself");
        return Err(complain(MLX_DEVICES, problem));
    }
    let first_address = addresses.first().and_then(|row| row.first()).map(SocketAddr::to_string);
    let rendezvous = lookup(RENDEZVOUS).or_else(|| lookup(MLX_COORDINATOR)).or(first_address);
    let rendezvous = rendezvous.ok_or_else(|| {
        complain(
            MLX_COORDINATOR,
            format!("missing: ranks must be told where rank 0 listens, as IP:PORT, if {MLX_HOSTFILE} does not"),
        )
    })?;
    let own: Vec<IpAddr> = addresses.get(rank).into_iter().flatten().map(SocketAddr::ip).collect();
    let at_home = |row: &Vec<SocketAddr>| row.first().map(SocketAddr::ip) == own.first().copied() && !own.is_empty();
    let local_rank = addresses.iter().take(rank).filter(|row| at_home(row)).count();
    let local_size = addresses.iter().filter(|row| at_home(row)).count().max(1);
    let run = rendezvous.clone();
    // Several entries with one address are several connections of one cable to MLX; a rail here is a cable.
    let mut cables = own;
    cables.dedup();
    Ok(RankIdentity { rank, size, local_rank, local_size, addresses: cables, rdma, ..bare(rendezvous, &run) })
}

/// An identity with what other launchers do not say left empty.
fn bare(rendezvous: String, run_id: &str) -> RankIdentity {
    RankIdentity {
        rank: 0,
        size: 1,
        local_rank: 0,
        local_size: 1,
        rendezvous,
        run_id: run_id.to_owned(),
        host: host_name(),
        addresses: Vec::new(),
        rdma: Vec::new(),
        weights: None,
    }
}

fn host_name() -> String {
    let mut name = [0u8; 256];
    // SAFETY: the buffer is as long as said; the last byte is kept zero.
    unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len() - 1) };
    let length = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
    String::from_utf8_lossy(&name[..length]).into_owned()
}

/// The same port on all ranks of a job, and very likely another for other jobs; below those that systems give out by themselves.
fn port_of(job: &[String]) -> u16 {
    let mut hasher = DefaultHasher::new();
    job.hash(&mut hasher);
    20_000 + (hasher.finish() % 9_000) as u16
}

/// The first of Slurm's list of nodes, such as `m[01-04,7],n1`.
fn first_node(list: &str) -> String {
    let name_end = list.find([',', '[']).unwrap_or(list.len());
    let (name, rest) = list.split_at(name_end);
    let number = rest.strip_prefix('[').map_or("", |rest| rest.split(['-', ',', ']']).next().unwrap_or_default());
    format!("{name}{number}")
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn given(variables: &[(&str, &str)]) -> Result<Option<RankIdentity>, String> {
        let find = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        identity(find).map_err(|error| error.to_string())
    }

    #[test]
    fn mpi_and_slurm_say_who_a_rank_is() {
        let open_mpi = given(&[
            ("OMPI_COMM_WORLD_RANK", "2"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "2"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
            ("PMIX_NAMESPACE", "17"),
        ]);
        let identity = open_mpi.unwrap().unwrap();
        assert_eq!((identity.rank, identity.size, identity.local_rank, identity.local_size), (2, 4, 2, 4));
        assert!(identity.rendezvous.starts_with("127.0.0.1:2"), "{}", identity.rendezvous);
        let slurm = [
            ("SLURM_PROCID", "5"),
            ("SLURM_STEP_NUM_TASKS", "8"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_STEP_TASKS_PER_NODE", "4(x2)"),
            ("SLURM_STEP_NODELIST", "m[07-08]"),
            ("SLURM_JOB_ID", "9"),
        ];
        let identity = given(&slurm).unwrap().unwrap();
        assert_eq!((identity.rank, identity.size, identity.local_rank, identity.local_size), (5, 8, 1, 4));
        assert!(identity.rendezvous.starts_with("m07:2"), "{}", identity.rendezvous);
        let mut other = slurm;
        (other[0].1, other[2].1) = ("0", "0");
        assert_eq!(given(&other).unwrap().unwrap().rendezvous, identity.rendezvous, "the same for all ranks of a job");
        let told = given(&[&slurm[..], &[("CONSORT_RENDEZVOUS", "m07:4000")]].concat()).unwrap().unwrap();
        assert_eq!(told.rendezvous, "m07:4000");
    }

    #[test]
    fn what_another_launcher_leaves_open_is_asked_for() {
        assert_eq!(given(&[]), Ok(None));
        assert_eq!(given(&[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "1")]), Ok(None));
        // A script of sbatch is no rank.
        assert_eq!(given(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4")]), Ok(None));
        let several_hosts =
            [("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "4"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "2")];
        assert!(given(&several_hosts).unwrap_err().starts_with("environment variable CONSORT_RENDEZVOUS: missing"));
        assert!(given(&[("PMI_RANK", "4"), ("PMI_SIZE", "4")]).unwrap_err().contains("PMI_RANK: 4 is not below"));
        assert!(given(&[("PMI_RANK", "x"), ("PMI_SIZE", "4")]).unwrap_err().contains("PMI_RANK: expected a number"));
    }

    #[test]
    fn nodes_are_listed_as_slurm_does() {
        for (list, first) in [("m1", "m1"), ("m1,m2", "m1"), ("m[01-04,7],n1", "m01"), ("rack-a[3]", "rack-a3")] {
            assert_eq!(first_node(list), first);
        }
    }

    fn file(text: &str) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file
    }

    #[test]
    fn mlx_gives_devices_and_a_coordinator_or_addresses() {
        let matrix = file(r#"[[null, "rdma_en5", ["a", "b"]], ["rdma_en5", null, "c"], [["a", "b"], "c", null]]"#);
        let path = matrix.path().to_str().unwrap();
        let jaccl = [("MLX_RANK", "2"), ("MLX_IBV_DEVICES", path), ("MLX_JACCL_COORDINATOR", "192.168.1.1:32323")];
        let identity = given(&jaccl).unwrap().unwrap();
        assert_eq!((identity.rank, identity.size, identity.local_size), (2, 3, 1));
        assert_eq!(identity.rendezvous, "192.168.1.1:32323");
        assert_eq!(identity.rdma, [vec!["a".to_owned(), "b".to_owned()], vec!["c".to_owned()], vec![]]);

        let hosts =
            file(r#"[["10.0.0.1:5000", "10.0.1.1:5001"], ["10.0.0.2:5002", "10.0.0.2:5003"], ["10.0.0.2:5004"]]"#);
        let ring = [("MLX_RANK", "2"), ("MLX_HOSTFILE", hosts.path().to_str().unwrap())];
        let identity = given(&ring).unwrap().unwrap();
        assert_eq!((identity.rank, identity.size, identity.local_rank, identity.local_size), (2, 3, 1, 2));
        assert_eq!((identity.rendezvous.as_str(), identity.addresses.len()), ("10.0.0.1:5000", 1));

        let half = file(r#"[["a", null], [null]]"#);
        let half = half.path().to_str().unwrap();
        for (variables, expected) in [
            (&[("MLX_RANK", "0")][..], "MLX_IBV_DEVICES: missing, and so is MLX_HOSTFILE"),
            (&[("MLX_RANK", "3"), jaccl[1], jaccl[2]], "MLX_RANK: 3 is not below the number of ranks, 3"),
            (&[("MLX_RANK", "0"), jaccl[1]], "MLX_JACCL_COORDINATOR: missing"),
            (&[("MLX_RANK", "0"), ("MLX_HOSTFILE", path)], "MLX_HOSTFILE: expected a list of"),
            (&[("MLX_RANK", "0"), ("MLX_IBV_DEVICES", half), jaccl[2]], "MLX_IBV_DEVICES: row 0 must have"),
            (&[("MLX_RANK", "0"), ("MLX_IBV_DEVICES", "/nowhere")], "MLX_IBV_DEVICES: /nowhere: No such file"),
        ] {
            let error = given(variables).unwrap_err();
            assert!(error.contains(expected), "{error}\n  expected: {expected}");
        }
    }
}
