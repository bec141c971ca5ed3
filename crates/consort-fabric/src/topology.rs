//! Which ranks are linked, over what, and so which algorithms a group uses. Every rank works this out from the roster, and all find
//! the same.

use crate::FabricError;
use crate::carrier::{Carrier, carrier, linked};
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
    /// Each with every other.
    Mesh,
    /// Each with the one before and the one after.
    Line,
}

/// What carries the data between each two ranks.
pub(crate) struct Topology {
    size: usize,
    carriers: Vec<Option<Carrier>>,
    algorithm: Algorithm,
}

impl Topology {
    /// The topology of a roster.
    ///
    /// # Errors
    /// Ranks were told to use what they lack, or no algorithm fits their links.
    pub fn new(options: &FabricOptions, roster: &[Hello]) -> Result<Self, FabricError> {
        let mut carriers = Vec::with_capacity(roster.len() * roster.len());
        for one in roster {
            for other in roster {
                let has = one.rank != other.rank && linked(options, one, other);
                carriers.push(if has { Some(carrier(options, one, other)?) } else { None });
            }
        }
        let topology = Self { size: roster.len(), carriers, algorithm: options.algorithm };
        let world: Vec<usize> = (0..roster.len()).collect();
        topology.shape(&world)?;
        Ok(topology)
    }

    pub fn are_linked(&self, one: usize, other: usize) -> bool {
        self.carrier(one, other).is_some()
    }

    fn carrier(&self, one: usize, other: usize) -> Option<Carrier> {
        self.carriers[one * self.size + other]
    }

    /// How these ranks, in this order, are linked.
    ///
    /// # Errors
    /// [`FabricError::Invalid`] if two neighbours have no link.
    pub fn shape(&self, ranks: &[usize]) -> Result<Shape, FabricError> {
        let all = |&one: &usize| ranks.iter().all(|&other| one == other || self.carrier(one, other).is_some());
        if ranks.iter().all(all) && self.algorithm != Algorithm::Line {
            return Ok(Shape::Mesh);
        }
        match ranks.windows(2).find(|pair| self.carrier(pair[0], pair[1]).is_none()) {
            None => Ok(Shape::Line),
            Some(pair) => Err(FabricError::Invalid(format!(
                "ranks {} and {} have no link, but are neighbours in group {ranks:?}; put ranks in the order of their cables",
                pair[0], pair[1]
            ))),
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
