//! A group: the public face of the collectives.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use crate::FabricError;
use crate::collective::{self, Members};
use crate::fabric::Shared;
use crate::frame::Operation;
use crate::links::{Cost, Links};

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

/// An ordered subset of ranks that does collectives together. Calls are made by one thread at a time, and in the same order by all members.
pub struct Group {
    /// None for a group of one rank without a fabric.
    shared: Option<Arc<Shared>>,
    ranks: Vec<usize>,
    position: usize,
    identity: u32,
    tallies: [Tally; Operation::ALL.len()],
}

impl Group {
    pub(crate) fn new(shared: Arc<Shared>, ranks: Vec<usize>, position: usize, identity: u32) -> Self {
        Self { shared: Some(shared), ranks, position, identity, tallies: Default::default() }
    }

    /// The group of one rank: every collective returns at once.
    pub fn solo() -> Self {
        Self { shared: None, ranks: vec![0], position: 0, identity: 0, tallies: Default::default() }
    }

    /// This rank's place in the group.
    pub fn rank(&self) -> usize {
        self.position
    }

    /// Members of the group.
    pub fn size(&self) -> usize {
        self.ranks.len()
    }

    /// The members' ranks in the fabric, in group order.
    pub fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    /// The name of the transport in use, for reports: that of [`Peer::transport`](crate::Peer::transport) where all members have
    /// the same, `mixed` where they differ, `none` for a group of one.
    pub fn transport(&self) -> &'static str {
        let Some(shared) = &self.shared else { return "none" };
        let links = shared.links.lock().unwrap_or_else(PoisonError::into_inner);
        let others = (0..self.size()).filter(|&position| position != self.position);
        let mut names = others.map(|position| links.transport(self.ranks[position]));
        let first = names.next().unwrap_or("none");
        if names.all(|name| name == first) { first } else { "mixed" }
    }

    /// What this group has spent on each kind of operation so far.
    pub fn counters(&self) -> [(Operation, Counter); Operation::ALL.len()] {
        Operation::ALL.map(|operation| (operation, self.tallies[operation as usize].read()))
    }

    /// Sums `values` over the group, in rank order, so that all members hold the same bits.
    pub fn all_reduce(&self, values: &mut [f32]) -> Result<(), FabricError> {
        self.run(Operation::AllReduce, |links, members| collective::all_reduce(links, members, values))
    }

    /// `values` is cut into one part per member, of the given lengths; this rank's part is filled in, the others arrive.
    pub fn all_gather(&self, values: &mut [f32], lengths: &[usize]) -> Result<(), FabricError> {
        self.check_lengths(values, lengths)?;
        self.run(Operation::AllGather, |links, members| collective::all_gather(links, members, values, lengths))
    }

    /// Sums `values` in rank order and leaves each member its own part summed, of the given lengths; the rest is unspecified.
    pub fn reduce_scatter(&self, values: &mut [f32], lengths: &[usize]) -> Result<(), FabricError> {
        self.check_lengths(values, lengths)?;
        self.run(Operation::ReduceScatter, |links, members| collective::reduce_scatter(links, members, values, lengths))
    }

    /// Sends `message` from `root` to all; elsewhere it is replaced (it may grow). With `idle`, a receiver waits as long as
    /// the fabric lives, and parks: for the step log between requests.
    pub fn broadcast(&self, root: usize, message: &mut Vec<u8>, idle: bool) -> Result<(), FabricError> {
        self.check_member(root)?;
        self.run(Operation::Broadcast, |links, members| collective::broadcast(links, members, root, message, idle))
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
        self.run(Operation::Barrier, |links, members| collective::barrier(links, members, idle))
    }

    /// Sends values to a member; returns when `values` may be reused.
    pub fn send(&self, to: usize, values: &[f32]) -> Result<(), FabricError> {
        self.check_peer(to)?;
        self.run(Operation::PointToPoint, |links, members| collective::send(links, members, to, values))
    }

    /// Receives exactly `values.len()` values from a member.
    pub fn recv(&self, from: usize, values: &mut [f32]) -> Result<(), FabricError> {
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

    /// Runs a collective on the fabric's links and counts what it cost. A failed fabric runs nothing.
    fn run(
        &self,
        operation: Operation,
        body: impl FnOnce(&mut Links, Members) -> Result<(), FabricError>,
    ) -> Result<(), FabricError> {
        let Some(shared) = self.shared.as_ref().filter(|_| self.size() > 1) else { return Ok(()) };
        shared.watch.health.check(operation.name())?;
        let mut links = shared.links.lock().unwrap_or_else(PoisonError::into_inner);
        let start = Instant::now();
        links.cost = Cost::default();
        let members = Members { ranks: &self.ranks, position: self.position, group: self.identity };
        let result = body(&mut links, members);
        self.tallies[operation as usize].add(links.cost, start.elapsed().as_nanos() as u64);
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
        if position != self.position {
            return Ok(());
        }
        Err(FabricError::Invalid("a rank cannot send to itself".into()))
    }

    fn check_lengths(&self, values: &[f32], lengths: &[usize]) -> Result<(), FabricError> {
        if lengths.len() == self.size() && lengths.iter().sum::<usize>() == values.len() {
            return Ok(());
        }
        Err(FabricError::Invalid(format!(
            "parts {lengths:?} do not cut {} values for a group of {}",
            values.len(),
            self.size()
        )))
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
