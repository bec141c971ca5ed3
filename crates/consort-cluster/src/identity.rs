//! How a launcher tells a rank who it is: a handful of environment variables, written and read in this file only.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::error::ClusterError;
use crate::foreign;
use crate::hostfile::{Device, devices_from_json, devices_to_json};

/// Who a rank is and where it finds the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankIdentity {
    /// This rank, from 0.
    pub rank: usize,
    /// Ranks in all.
    pub size: usize,
    /// This rank's place among the ranks on its host, from 0: which share of the cores is its own.
    pub local_rank: usize,
    /// Ranks on its host.
    pub local_size: usize,
    /// `host:port` on which rank 0 listens.
    pub rendezvous: String,
    /// Names the run: two runs on one machine never mix.
    pub run_id: String,
    /// Its host's name, for messages.
    pub host: String,
    /// Its host's addresses for data, one per cable; empty where the hostfile has none.
    pub addresses: Vec<IpAddr>,
    /// For each rank, this one's RDMA devices that lead to it; empty where the hostfile says nothing about RDMA.
    pub rdma: Vec<Vec<Device>>,
    /// The directory on its host that models are in, where the hostfile names one.
    pub weights: Option<PathBuf>,
}

const RANK: &str = "CONSORT_RANK";
const SIZE: &str = "CONSORT_SIZE";
const LOCAL_RANK: &str = "CONSORT_LOCAL_RANK";
const LOCAL_SIZE: &str = "CONSORT_LOCAL_SIZE";
pub(crate) const RENDEZVOUS: &str = "CONSORT_RENDEZVOUS";
const RUN_ID: &str = "CONSORT_RUN_ID";
const HOST: &str = "CONSORT_HOST";
const ADDRESSES: &str = "CONSORT_ADDRESSES";
const RDMA: &str = "CONSORT_RDMA";
const WEIGHTS: &str = "CONSORT_WEIGHTS";

/// Whether a variable says who a rank is.
pub(crate) fn is_variable(name: &str) -> bool {
    [RANK, SIZE, LOCAL_RANK, LOCAL_SIZE, RENDEZVOUS, RUN_ID, HOST, ADDRESSES, RDMA, WEIGHTS].contains(&name)
}

impl RankIdentity {
    /// The identity that a launcher gave this process, this program's own or another's, or `None` when the user
    /// started it.
    ///
    /// # Errors
    /// A variable is missing, malformed, or out of range.
    pub fn from_environment() -> Result<Option<Self>, ClusterError> {
        let lookup = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        match Self::from_lookup(|name| std::env::var(name).ok())? {
            Some(identity) => Ok(Some(identity)),
            None => foreign::identity(lookup),
        }
    }

    fn from_lookup(lookup: impl Fn(&'static str) -> Option<String>) -> Result<Option<Self>, ClusterError> {
        if lookup(RANK).is_none() {
            return Ok(None);
        }
        let text = |variable| {
            lookup(variable).ok_or_else(|| ClusterError::Environment {
                variable,
                problem: format!("missing, although {RANK} is set"),
            })
        };
        let number = |variable| parse::<usize>(variable, &text(variable)?);
        let identity = Self {
            rank: number(RANK)?,
            size: number(SIZE)?,
            local_rank: number(LOCAL_RANK)?,
            local_size: number(LOCAL_SIZE)?,
            rendezvous: text(RENDEZVOUS)?,
            run_id: text(RUN_ID)?,
            host: text(HOST)?,
            addresses: addresses(&text(ADDRESSES)?)?,
            rdma: lookup(RDMA).filter(|list| !list.is_empty()).map_or(Ok(Vec::new()), |list| rdma(&list))?,
            weights: lookup(WEIGHTS).filter(|path| !path.is_empty()).map(PathBuf::from),
        };
        within(RANK, identity.rank, identity.size)?;
        within(LOCAL_RANK, identity.local_rank, identity.local_size)?;
        Ok(Some(identity))
    }

    /// The variables that make a process this rank.
    pub fn to_environment(&self) -> [(&'static str, String); 10] {
        let weights = self.weights.as_deref().unwrap_or(Path::new(""));
        [
            (RANK, self.rank.to_string()),
            (SIZE, self.size.to_string()),
            (LOCAL_RANK, self.local_rank.to_string()),
            (LOCAL_SIZE, self.local_size.to_string()),
            (RENDEZVOUS, self.rendezvous.clone()),
            (RUN_ID, self.run_id.clone()),
            (HOST, self.host.clone()),
            (ADDRESSES, self.addresses.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(",")),
            (RDMA, if self.rdma.is_empty() { String::new() } else { devices_to_json(&self.rdma).to_string() }),
            (WEIGHTS, weights.display().to_string()),
        ]
    }
}

pub(crate) fn parse<T: FromStr>(variable: &'static str, value: &str) -> Result<T, ClusterError> {
    value
        .parse()
        .map_err(|_| ClusterError::Environment { variable, problem: format!("expected a number, got \"{value}\"") })
}

fn addresses(list: &str) -> Result<Vec<IpAddr>, ClusterError> {
    let parse = |text: &str| {
        text.parse().map_err(|_| ClusterError::Environment {
            variable: ADDRESSES,
            problem: format!("expected IP addresses between commas, got \"{text}\""),
        })
    };
    list.split(',').filter(|text| !text.is_empty()).map(parse).collect()
}

fn rdma(list: &str) -> Result<Vec<Vec<Device>>, ClusterError> {
    let list = serde_json::from_str(list).map_err(|error| error.to_string());
    list.and_then(|list| devices_from_json(&list))
        .map_err(|problem| ClusterError::Environment { variable: RDMA, problem })
}

pub(crate) fn within(variable: &'static str, index: usize, size: usize) -> Result<(), ClusterError> {
    if index < size {
        return Ok(());
    }
    Err(ClusterError::Environment { variable, problem: format!("{index} is not below the number of ranks, {size}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity() -> RankIdentity {
        RankIdentity {
            rank: 3,
            size: 4,
            local_rank: 1,
            local_size: 2,
            rendezvous: "[fd00::1]:4000".to_owned(),
            run_id: "a-b".to_owned(),
            host: "m2".to_owned(),
            addresses: vec!["10.0.0.2".parse().unwrap(), "fd00::2".parse().unwrap()],
            rdma: vec![vec!["a".to_owned()], vec!["b".to_owned(), "c".to_owned()], vec![], vec![]],
            weights: Some("/models".into()),
        }
    }

    #[test]
    fn what_a_launcher_writes_a_rank_reads() {
        let variables = identity().to_environment();
        let lookup = |name| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.clone());
        assert_eq!(RankIdentity::from_lookup(lookup).unwrap(), Some(identity()));
        assert_eq!(RankIdentity::from_lookup(|_| None).unwrap(), None);
    }

    #[test]
    fn a_wrong_variable_is_named() {
        for (name, value) in [
            ("CONSORT_RANK", "4"),
            ("CONSORT_SIZE", "x"),
            ("CONSORT_LOCAL_RANK", "2"),
            ("CONSORT_LOCAL_SIZE", "-1"),
            ("CONSORT_ADDRESSES", "10.0.0.1,m2"),
            ("CONSORT_RDMA", "[3]"),
        ] {
            let variables = identity().to_environment();
            let lookup = |key| match key == name {
                true => Some(value.to_owned()),
                false => variables.iter().find(|(other, _)| *other == key).map(|(_, value)| value.clone()),
            };
            let error = RankIdentity::from_lookup(lookup).expect_err(name).to_string();
            assert!(error.starts_with("environment variable CONSORT_"), "{error}");
        }
        let only_rank = |name| (name == RANK).then(|| "0".to_owned());
        assert!(RankIdentity::from_lookup(only_rank).unwrap_err().to_string().contains("CONSORT_SIZE: missing"));
    }
}
