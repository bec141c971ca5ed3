//! Which ranks are linked, over what, and so which algorithms a group uses and through whom ranks without a link talk. Every rank works
//! this out from the roster, and all find the same.

use std::collections::VecDeque;

use crate::FabricError;
use crate::carrier::{self, Carrier, linked};
use crate::channel::Hello;
use crate::fabric::FabricOptions;

/// How a group brings its members' values together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Algorithm {
    /// What suits the group's links and the length of the vector.
    #[default]
    Auto,
    /// Every member sends its whole vector to all others: one hop.
    Direct,
    /// Each member reduces a part, and all gather the parts: less to send.
    Scatter,
    /// Along the line of members, up and down again: for groups that are not linked each with each.
    Line,
}

/// How a group's members are linked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// Each with every other, some perhaps through other ranks.
    Mesh,
    /// Each with the one before and the one after.
    Line,
}

/// What carries the data between each two ranks.
pub(crate) struct Topology {
    size: usize,
    /// None between ranks that have no link (and from a rank to itself).
    carriers: Vec<Option<Carrier>>,
    /// The rank to which one passes what is for another: the other itself, if they are linked.
    next_hops: Vec<usize>,
    algorithm: Algorithm,
}

impl Topology {
    /// The topology of a roster.
    ///
    /// # Errors
    /// Ranks were told to use what they lack, or no way leads from one to another.
    pub fn new(options: &FabricOptions, roster: &[Hello]) -> Result<Self, FabricError> {
        let size = roster.len();
        let mut carriers = Vec::with_capacity(size * size);
        for one in roster {
            for other in roster {
                let has = one.rank != other.rank && linked(options, one, other);
                carriers.push(if has { Some(carrier::choose(options, one, other)?.0) } else { None });
            }
        }
        let mut topology =
            Self { size, carriers, next_hops: vec![usize::MAX; size * size], algorithm: options.algorithm };
        (0..size).for_each(|to| topology.lead_to(to));
        let nowhere = (0..size * size).find(|&pair| topology.next_hops[pair] == usize::MAX);
        let Some((from, to)) = nowhere.map(|pair| (pair / size, pair % size)) else { return Ok(topology) };
        // Whoever was told to use what it lacks should hear so.
        carrier::choose(options, &roster[from], &roster[to])?;
        Err(FabricError::Invalid(format!("ranks {from} and {to} have no link, and no way through other ranks either")))
    }

    /// Finds each rank's next hop towards `to`: along the shortest way, through the lowest ranks.
    fn lead_to(&mut self, to: usize) {
        self.next_hops[to * self.size + to] = to;
        let mut reached = VecDeque::from([to]);
        while let Some(rank) = reached.pop_front() {
            for from in 0..self.size {
                // Ranks as far from `to` are met in the order of their own next hops.
                if self.are_linked(from, rank) && self.next_hops[from * self.size + to] == usize::MAX {
                    self.next_hops[from * self.size + to] = rank;
                    reached.push_back(from);
                }
            }
        }
    }

    pub fn are_linked(&self, one: usize, other: usize) -> bool {
        self.carrier(one, other).is_some()
    }

    /// What carries the data between two ranks, if they are linked.
    pub fn carrier(&self, one: usize, other: usize) -> Option<Carrier> {
        self.carriers[one * self.size + other]
    }

    /// The rank to which `from` passes what is for `to`.
    pub fn next_hop(&self, from: usize, to: usize) -> usize {
        self.next_hops[from * self.size + to]
    }

    /// The ranks through which `from` reaches `to`.
    pub fn between(&self, from: usize, to: usize) -> Vec<usize> {
        let hops = std::iter::successors(Some(self.next_hop(from, to)), |&rank| Some(self.next_hop(rank, to)));
        hops.take_while(|&rank| rank != to).collect()
    }

    /// Whether some ranks talk through others.
    pub fn relays(&self) -> bool {
        (0..self.size * self.size).any(|pair| self.next_hops[pair] != pair % self.size)
    }

    /// How these ranks, in this order, are linked.
    pub fn shape(&self, ranks: &[usize]) -> Shape {
        let all = |&one: &usize| ranks.iter().all(|&other| one == other || self.are_linked(one, other));
        let along = || ranks.windows(2).all(|pair| self.are_linked(pair[0], pair[1]));
        match self.algorithm {
            Algorithm::Line => Shape::Line,
            _ if ranks.iter().all(all) || !along() => Shape::Mesh,
            _ => Shape::Line,
        }
    }

    /// Bytes up to which vectors are sent whole to all members: the length at which both ways take as long.
    ///
    /// Of n members, each sends and receives n - 1 vectors if they go whole, and 2 (n - 1) / n if they are scattered and gathered.
    /// That takes one more hop, and a message more per member. What these two cost, in bytes that could be sent
    /// meanwhile, was measured with three and four ranks (`consort netbench --algorithm direct` beside `scatter`).
    pub fn direct_bytes(&self, ranks: &[usize]) -> usize {
        match self.algorithm {
            Algorithm::Direct => return usize::MAX,
            Algorithm::Scatter => return 0,
            Algorithm::Auto | Algorithm::Line => {}
        }
        let pairs = ranks.iter().flat_map(|&one| ranks.iter().filter_map(move |&other| self.carrier(one, other)));
        let limit = |carrier| {
            let (hop, message) = match carrier {
                Carrier::SharedMemory => (40 << 10, 2 << 10),
                // RDMA has not been measured on hardware.
                Carrier::Tcp | Carrier::Rdma => (72 << 10, 10 << 10),
            };
            let members = ranks.len();
            // Two members send as much either way.
            let less = (members - 1) * members.saturating_sub(2);
            ((hop + (members - 1) * message) * members).checked_div(less).unwrap_or(usize::MAX)
        };
        pairs.map(limit).min().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::channel::Hello;

    fn topology(size: u32, links: &str) -> Result<Topology, FabricError> {
        let emulate = Some(format!("topology={links}").parse().unwrap());
        let roster: Vec<Hello> = (0..size).map(|rank| Hello::example(rank, size)).collect();
        Topology::new(&FabricOptions { emulate, ..FabricOptions::default() }, &roster)
    }

    #[test]
    fn ways_are_shortest_and_the_same_on_every_run() {
        let ring = topology(6, "ring").unwrap();
        assert_eq!(ring.between(0, 1), [0; 0]);
        assert_eq!(ring.between(0, 4), [5]);
        assert_eq!(ring.between(0, 3), [1, 2], "of two as short, the one through lower ranks");
        assert!(ring.relays() && !topology(3, "ring").unwrap().relays());
        let star = topology(4, "0-1/0-2/0-3").unwrap();
        assert_eq!((star.between(1, 3), star.between(3, 0)), (vec![0], vec![]));
        for (ranks, shape) in
            [(&[0, 1][..], Shape::Mesh), (&[1, 0, 2], Shape::Line), (&[0, 1, 2], Shape::Mesh), (&[1, 3], Shape::Mesh)]
        {
            assert_eq!(star.shape(ranks), shape, "{ranks:?}");
        }
    }

    #[test]
    fn ranks_that_nothing_connects_are_named() {
        let error = topology(4, "0-1/2-3").err().unwrap().to_string();
        assert!(error.contains("ranks 0 and 2 have no link, and no way through other ranks"), "{error}");
    }
}
