//! A group: the public face of the collectives.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use half::bf16;

use crate::FabricError;
use crate::background::Pending;
use crate::collective::{self, Members};
use crate::element::{Element, Plain};
use crate::fabric::{Shared, Wire};
use crate::frame::Operation;
use crate::line;
use crate::links::{Cost, Links};
use crate::reduce::Reduction;
use crate::relay::RELAYED;
use crate::topology::Shape;

/// What a group has spent on one kind of operation, on this rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counter {
    /// Calls.
    pub calls: u64,
    /// Messages sent.
    pub messages: u64,
    /// Payload bytes sent.
    pub bytes_sent: u64,
    /// Waits for what peers send, one after another.
    pub hops: u64,
    /// Time spent, waiting included.
    pub nanoseconds: u64,
}

/// A [`Counter`] that a shared reference can add to.
#[derive(Default)]
struct Tally([AtomicU64; 5]);

/// An ordered subset of ranks that does collectives together. Calls are made by one thread at a time, and in the same order by
/// all members.
#[derive(Clone)]
pub struct Group(Arc<Inner>);

struct Inner {
    /// None for a group of one rank without a fabric.
    shared: Option<Arc<Shared>>,
    ranks: Vec<usize>,
    position: usize,
    identity: u32,
    shape: Shape,
    /// See [`Members::direct_bytes`].
    direct_bytes: usize,
    tallies: [Tally; Operation::ALL.len()],
}

impl Group {
    pub(crate) fn new(shared: Arc<Shared>, ranks: Vec<usize>, position: usize, identity: u32, shape: Shape) -> Self {
        let direct_bytes = shared.topology.direct_bytes(&ranks);
        let tallies = Default::default();
        Self(Arc::new(Inner { shared: Some(shared), ranks, position, identity, shape, direct_bytes, tallies }))
    }

    /// The group of one rank: every collective returns at once.
    pub fn solo() -> Self {
        let tallies = Default::default();
        let (shape, direct_bytes) = (Shape::Mesh, 0);
        Self(Arc::new(Inner { shared: None, ranks: vec![0], position: 0, identity: 0, shape, direct_bytes, tallies }))
    }

    /// This rank's place in the group.
    pub fn rank(&self) -> usize {
        self.0.position
    }

    /// Members of the group.
    pub fn size(&self) -> usize {
        self.0.ranks.len()
    }

    /// The members' ranks in the fabric, in group order.
    pub fn ranks(&self) -> &[usize] {
        &self.0.ranks
    }

    /// The name of the transport in use, for reports: that of [`Peer::transport`](crate::Peer::transport) where all members that are
    /// linked to this rank have the same, `mixed` where they differ, `relay` where none is linked, `none` for a group of one.
    pub fn transport(&self) -> &'static str {
        let Some(shared) = &self.0.shared else { return "none" };
        let links = shared.links.lock().unwrap_or_else(PoisonError::into_inner);
        let names = || self.ranks().iter().map(|&rank| links.transport(rank)).filter(|&name| name != "none");
        let mut direct = names().filter(|&name| name != RELAYED);
        let first = direct.next().or(names().next()).unwrap_or("none");
        if direct.all(|name| name == first) { first } else { "mixed" }
    }

    /// What this group has spent on each kind of operation so far.
    pub fn counters(&self) -> [(Operation, Counter); Operation::ALL.len()] {
        Operation::ALL.map(|operation| (operation, self.0.tallies[operation as usize].read()))
    }

    /// Sums `values` over the group, in f32 and in rank order, so that all members hold the same bits.
    pub fn all_reduce<T: Element>(&self, values: &mut [T]) -> Result<(), FabricError> {
        self.reduce(Reduction::Sum, values)
    }

    /// The largest of each value over the group; one that is no number loses against any that is.
    pub fn all_reduce_max<T: Element>(&self, values: &mut [T]) -> Result<(), FabricError> {
        self.reduce(Reduction::Max, values)
    }

    fn reduce<T: Element>(&self, reduction: Reduction, values: &mut [T]) -> Result<(), FabricError> {
        self.run(Operation::AllReduce, |links, members| match (self.0.shape, links.wire) {
            (Shape::Mesh, Wire::Full) => collective::all_reduce::<T, T>(links, members, reduction, values),
            (Shape::Mesh, Wire::Bf16) => collective::all_reduce::<T, bf16>(links, members, reduction, values),
            (Shape::Line, _) => line::reduce(links, members, Operation::AllReduce, reduction, values),
        })
    }

    /// `values` is cut into one part per member, of the given lengths; this rank's part is filled in, the others arrive.
    pub fn all_gather<T: Plain>(&self, values: &mut [T], lengths: &[usize]) -> Result<(), FabricError> {
        self.check_lengths(values.len(), lengths)?;
        self.run(Operation::AllGather, |links, members| match self.0.shape {
            Shape::Mesh => collective::all_gather(links, members, values, lengths),
            Shape::Line => line::all_gather(links, members, values, lengths),
        })
    }

    /// Sums `values` as [`Group::all_reduce`] does and leaves each member its own part summed, of the given lengths; the rest is
    /// unspecified.
    pub fn reduce_scatter<T: Element>(&self, values: &mut [T], lengths: &[usize]) -> Result<(), FabricError> {
        self.check_lengths(values.len(), lengths)?;
        self.run(Operation::ReduceScatter, |links, members| match (self.0.shape, links.wire) {
            (Shape::Mesh, Wire::Full) => collective::reduce_scatter::<T, T>(links, members, values, lengths),
            (Shape::Mesh, Wire::Bf16) => collective::reduce_scatter::<T, bf16>(links, members, values, lengths),
            (Shape::Line, _) => line::reduce(links, members, Operation::ReduceScatter, Reduction::Sum, values),
        })
    }

    /// A part of `outgoing` to each member, and a part of `incoming` from each, of the given lengths.
    pub fn all_to_all<T: Plain>(
        &self,
        outgoing: &[T],
        outgoing_lengths: &[usize],
        incoming: &mut [T],
        incoming_lengths: &[usize],
    ) -> Result<(), FabricError> {
        self.check_lengths(outgoing.len(), outgoing_lengths)?;
        self.check_lengths(incoming.len(), incoming_lengths)?;
        if outgoing_lengths[self.rank()] != incoming_lengths[self.rank()] {
            return Err(FabricError::Invalid("a member's part for itself has two lengths".into()));
        }
        let (from, to) = ((outgoing, outgoing_lengths), (incoming, incoming_lengths));
        if self.size() == 1 {
            to.0.copy_from_slice(from.0);
        }
        self.run(Operation::AllToAll, |links, members| collective::all_to_all(links, members, from, to))
    }

    /// Sends `message` from `root` to all; elsewhere it is replaced (it may grow). With `idle`, a receiver waits as long as
    /// the fabric lives, and parks: for the step log between requests.
    pub fn broadcast(&self, root: usize, message: &mut Vec<u8>, idle: bool) -> Result<(), FabricError> {
        self.check_member(root)?;
        self.run(Operation::Broadcast, |links, members| match self.0.shape {
            Shape::Mesh => collective::broadcast(links, members, root, message, idle),
            Shape::Line => line::broadcast(links, members, root, message, idle),
        })
    }

    /// Every member's message, of any length, to all; in member order, this rank's own included. `idle` as in
    /// [`Group::broadcast`].
    pub fn exchange(&self, message: &[u8], idle: bool) -> Result<Vec<Vec<u8>>, FabricError> {
        let mut messages = vec![message.to_vec()];
        self.run(Operation::AllGather, |links, members| {
            messages = collective::exchange(links, members, message, idle)?;
            Ok(())
        })?;
        Ok(messages)
    }

    /// Returns when every member has called it. With `idle`, it waits as long as the fabric lives: for work before it that may
    /// take one member much longer than another, such as loading.
    pub fn barrier(&self, idle: bool) -> Result<(), FabricError> {
        self.run(Operation::Barrier, |links, members| match self.0.shape {
            Shape::Mesh => collective::barrier(links, members, idle),
            Shape::Line => line::barrier(links, members, idle),
        })
    }

    /// Sends values to a member; returns when `values` may be reused.
    pub fn send<T: Plain>(&self, to: usize, values: &[T]) -> Result<(), FabricError> {
        self.check_peer(to)?;
        self.run(Operation::PointToPoint, |links, members| collective::send(links, members, to, values))
    }

    /// Receives exactly `values.len()` values from a member.
    pub fn recv<T: Plain>(&self, from: usize, values: &mut [T]) -> Result<(), FabricError> {
        self.check_peer(from)?;
        self.run(Operation::PointToPoint, |links, members| collective::recv(links, members, from, values))
    }

    /// Sends bytes to a member, which learns their number from the message.
    pub fn send_bytes(&self, to: usize, message: &[u8]) -> Result<(), FabricError> {
        self.check_peer(to)?;
        self.run(Operation::PointToPoint, |links, members| collective::send_bytes(links, members, to, message))
    }

    /// Receives bytes from a member; `message` becomes as long as what was sent.
    pub fn recv_bytes(&self, from: usize, message: &mut Vec<u8>) -> Result<(), FabricError> {
        self.check_peer(from)?;
        self.run(Operation::PointToPoint, |links, members| collective::recv_bytes(links, members, from, message))
    }

    /// Starts a collective (or several) that runs beside the caller on a buffer of its own:
    /// `group.start(values, |group, values| group.all_reduce(values))`. What this fabric's groups are asked next comes after it, on
    /// this rank as on all.
    pub fn start<B: Send + 'static>(
        &self,
        mut buffer: B,
        body: impl FnOnce(&Self, &mut B) -> Result<(), FabricError> + Send + 'static,
    ) -> Result<Pending<B>, FabricError> {
        let group = self.clone();
        let Some(shared) = self.0.shared.clone().filter(|_| self.size() > 1) else {
            return Ok(Pending::done(body(self, &mut buffer).map(|()| buffer)));
        };
        shared.clone().background.start(move || {
            let _finish = Finish(shared);
            body(&group, &mut buffer).map(|()| buffer)
        })
    }

    /// Runs a collective on the fabric's links and counts what it cost. A failed fabric runs nothing.
    fn run(
        &self,
        operation: Operation,
        body: impl FnOnce(&mut Links, Members) -> Result<(), FabricError>,
    ) -> Result<(), FabricError> {
        let Some(shared) = self.0.shared.as_ref().filter(|_| self.size() > 1) else { return Ok(()) };
        shared.watch.health.check(operation.name())?;
        shared.background.settle();
        let mut links = shared.links.lock().unwrap_or_else(PoisonError::into_inner);
        let start = Instant::now();
        links.cost = Cost::default();
        let Inner { ranks, position, identity, direct_bytes, .. } = &*self.0;
        let members = Members { ranks, position: *position, group: *identity, direct_bytes: *direct_bytes };
        let result = body(&mut links, members);
        self.0.tallies[operation as usize].add(links.cost, start.elapsed().as_nanos() as u64);
        result
    }

    fn check_member(&self, position: usize) -> Result<(), FabricError> {
        if position < self.size() {
            return Ok(());
        }
        Err(FabricError::Invalid(format!("member {position} of a group of {} does not exist", self.size())))
    }

    fn check_peer(&self, position: usize) -> Result<(), FabricError> {
        self.check_member(position)?;
        if position == self.rank() {
            return Err(FabricError::Invalid("a rank cannot send to itself".into()));
        }
        Ok(())
    }

    fn check_lengths(&self, values: usize, lengths: &[usize]) -> Result<(), FabricError> {
        if lengths.len() == self.size() && lengths.iter().sum::<usize>() == values {
            return Ok(());
        }
        Err(FabricError::Invalid(format!(
            "parts {lengths:?} do not cut {values} values for a group of {}",
            self.size()
        )))
    }
}

/// Says that a job of the background thread has ended, however it did.
struct Finish(Arc<Shared>);

impl Drop for Finish {
    fn drop(&mut self) {
        self.0.background.finish();
    }
}

impl Tally {
    fn add(&self, cost: Cost, nanoseconds: u64) {
        for (total, amount) in self.0.iter().zip([1, cost.messages, cost.bytes, cost.hops, nanoseconds]) {
            total.fetch_add(amount, Ordering::Relaxed);
        }
    }

    fn read(&self) -> Counter {
        let [calls, messages, bytes_sent, hops, nanoseconds] =
            [0, 1, 2, 3, 4].map(|at: usize| self.0[at].load(Ordering::Relaxed));
        Counter { calls, messages, bytes_sent, hops, nanoseconds }
    }
}
