//! Waiting for several links at once; never past a deadline, and never past a failure.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::FabricError;
use crate::fabric::Wire;
use crate::frame::{self, Message, Operation};
use crate::health::Failure;
use crate::link::{Link, LinkFault};
use crate::monitor::Watch;
use crate::rail::Wake;
use crate::shm::Region;
use crate::sys::{self, PollEntry};
use crate::waiting::{Patience, Pause, Wait};

/// Longest sleep between two looks at the abort word.
const SLEEP_LIMIT: Duration = Duration::from_millis(50);
/// Longest sleep while both a shared-memory peer and a TCP peer could bring news: only one of them can wake this rank.
const MIXED_SLEEP_LIMIT: Duration = Duration::from_micros(500);
/// Bounds of the time after which a rail that wakes nobody is looked at again.
const LOOK_LEAST: Duration = Duration::from_micros(20);
const LOOK_MOST: Duration = Duration::from_millis(1);
/// A peer that has said goodbye may still have bytes on their way; after this much silence it has not.
const DEPARTURE_GRACE: Duration = Duration::from_millis(250);
/// A wait this long asks whether the rails still hold.
const QUIET_BEFORE_CHECK: Duration = Duration::from_secs(1);
/// How long a rank that leaves waits until what was lost with a rail has come another way.
const SETTLING_PATIENCE: Duration = Duration::from_secs(2);

/// What one turn did for one link.
pub(crate) enum Step {
    /// Nothing more to do for this link.
    Done,
    /// Bytes moved, more are to come.
    Moved,
    /// Nothing moved.
    Stuck,
}

impl Step {
    /// The step of a link that goes on until its messages are through.
    pub fn of(link: &Link, moved: bool) -> Self {
        match (link.is_sending() || link.is_receiving(), moved) {
            (false, _) => Self::Done,
            (true, true) => Self::Moved,
            (true, false) => Self::Stuck,
        }
    }
}

/// A link that cannot go on, by its rank.
pub(crate) type RankFault = (usize, LinkFault);

/// What one turn over all links did.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Turn {
    pub moved: bool,
    /// A rank that must yet do something; none once all is done.
    pub waiting_for: Option<usize>,
}

/// All links of this rank, by rank.
pub(crate) struct LinkTable(Vec<Option<Link>>);

impl LinkTable {
    pub fn get(&self, rank: usize) -> &Link {
        self.0[rank].as_ref().expect("groups are made of ranks that are linked as their algorithms need")
    }

    pub fn get_mut(&mut self, rank: usize) -> &mut Link {
        self.0[rank].as_mut().expect("groups are made of ranks that are linked as their algorithms need")
    }

    /// Does something with one link.
    pub fn with<T>(
        &mut self,
        rank: usize,
        body: impl FnOnce(&mut Link) -> Result<T, LinkFault>,
    ) -> Result<T, RankFault> {
        body(self.get_mut(rank)).map_err(|fault| (rank, fault))
    }
}

/// What an operation cost this rank.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cost {
    pub messages: u64,
    pub bytes: u64,
    /// Waits for what peers send, one after another.
    pub hops: u64,
}

impl Cost {
    /// Counts a message that is sent.
    pub fn count(&mut self, message: Message) {
        self.messages += 1;
        self.bytes += message.length;
    }
}

/// All links of this rank, and how to wait for them.
pub(crate) struct Links {
    table: LinkTable,
    region: Option<Arc<Region>>,
    watch: Arc<Watch>,
    /// What values of sums are on the wire.
    pub wire: Wire,
    patience: Patience,
    operation_timeout: Duration,
    poll_entries: Vec<PollEntry>,
    /// Values in the form that they have on the wire, where it is another. Grows to what the largest call needs.
    pub encoded: Vec<u8>,
    pub cost: Cost,
}

impl Links {
    pub fn new(
        links: Vec<Option<Link>>,
        region: Option<Arc<Region>>,
        watch: Arc<Watch>,
        wire: Wire,
        crowded: bool,
        operation_timeout: Duration,
    ) -> Self {
        let looking = links.iter().flatten().flat_map(Link::rails).any(|rail| rail.wake() == Wake::Look);
        Self {
            poll_entries: Vec::with_capacity(links.len()),
            table: LinkTable(links),
            region,
            watch,
            wire,
            patience: Patience::new(crowded, looking),
            operation_timeout,
            encoded: Vec::new(),
            cost: Cost::default(),
        }
    }

    /// Starts sending a message to `rank`.
    pub fn begin_send(&mut self, rank: usize, message: Message) {
        self.cost.count(message);
        self.table.get_mut(rank).begin_send(message);
    }

    /// Starts receiving a message from `rank`.
    pub fn begin_receive(&mut self, rank: usize, message: Message) {
        self.table.get_mut(rank).begin_receive(message);
    }

    /// Name of the transport to `rank`.
    pub fn transport(&self, rank: usize) -> &'static str {
        self.table.0[rank].as_ref().and_then(|link| link.rails().next()).map_or("none", |rail| rail.transport())
    }

    /// Turns over the links to `ranks` (skipping this rank itself), each by itself, until `step` is done with all.
    pub fn drive_each(
        &mut self,
        operation: Operation,
        ranks: &[usize],
        idle: bool,
        mut step: impl FnMut(usize, &mut Link) -> Result<Step, LinkFault>,
    ) -> Result<(), FabricError> {
        self.drive(operation, ranks, idle, |table, _| {
            let mut turn = Turn::default();
            for (position, &rank) in ranks.iter().enumerate() {
                let Some(link) = &mut table.0[rank] else { continue };
                match step(position, link).map_err(|fault| (rank, fault))? {
                    Step::Done => {}
                    Step::Moved => turn = Turn { moved: true, waiting_for: Some(rank) },
                    Step::Stuck => turn.waiting_for = Some(rank),
                }
            }
            Ok(turn)
        })
    }

    /// Repeats `turn`, which uses the links to `ranks`, until it is done. With `idle`, waits as long as the fabric lives.
    pub fn drive(
        &mut self,
        operation: Operation,
        ranks: &[usize],
        idle: bool,
        mut turn: impl FnMut(&mut LinkTable, &mut Cost) -> Result<Turn, RankFault>,
    ) -> Result<(), FabricError> {
        let receives = |&rank: &usize| self.table.0[rank].as_ref().is_some_and(Link::is_receiving);
        self.cost.hops += u64::from(ranks.iter().any(receives));
        let mut wait = Wait::new();
        loop {
            let result = turn(&mut self.table, &mut self.cost);
            for &rank in ranks {
                let Some(link) = &mut self.table.0[rank] else { continue };
                post(&self.watch, rank, link);
            }
            let Turn { moved, waiting_for } = result.map_err(|(rank, fault)| self.fault(rank, operation, fault))?;
            let Some(rank) = waiting_for else {
                self.stay_awake(&mut wait);
                return Ok(());
            };
            if moved {
                self.stay_awake(&mut wait);
                wait.stir();
            } else {
                self.pause(&mut wait, rank, operation, idle)?;
            }
        }
    }

    /// Nothing moved: waits a little, a little longer each time, or finds that there is nothing to wait for.
    fn pause(&mut self, wait: &mut Wait, rank: usize, operation: Operation, idle: bool) -> Result<(), FabricError> {
        self.watch.health.check(operation.name())?;
        let Pause::Sleep(quiet) = self.patience.pause(wait, idle) else { return Ok(()) };
        if let Some(region) = self.region.as_ref().filter(|_| !std::mem::replace(&mut wait.announced, true)) {
            region.bell().announce_sleep();
            return Ok(()); // One more turn, and then to sleep: a peer that moved before the announcement wakes nobody.
        }
        self.check_patience(wait.waited(), rank, operation, idle, quiet)?;
        if quiet > QUIET_BEFORE_CHECK {
            self.check_rails(operation)?;
        }
        self.sleep(quiet);
        wait.announced = false;
        Ok(())
    }

    fn check_patience(
        &self,
        waited: Duration,
        rank: usize,
        operation: Operation,
        idle: bool,
        quiet: Duration,
    ) -> Result<(), FabricError> {
        let in_band = || self.table.0[rank].as_ref().is_some_and(Link::ends_in_band);
        if self.watch.health.has_departed(rank) && quiet > DEPARTURE_GRACE && !in_band() {
            return Err(self.lost(rank, operation, "it has left the run".into()));
        }
        if !idle && waited > self.operation_timeout {
            let host = self.watch.health.host(rank);
            let error = FabricError::Deadline { operation: operation.name(), rank, host, waited };
            self.watch.report(Failure { rank: rank as u32, gave_up: false, cause: error.to_string() });
            return Err(error);
        }
        Ok(())
    }

    fn check_rails(&mut self, operation: Operation) -> Result<(), FabricError> {
        for rank in 0..self.table.0.len() {
            let Some(link) = &mut self.table.0[rank] else { continue };
            let result = link.check(self.watch.rail_silence);
            post(&self.watch, rank, link);
            result.map_err(|fault| self.fault(rank, operation, fault))?;
        }
        Ok(())
    }

    fn sleep(&mut self, quiet: Duration) {
        self.poll_entries.clear();
        let (mut shared_memory, mut limit) = (false, SLEEP_LIMIT);
        for (rail, interest) in self.table.0.iter().flatten().flat_map(Link::waiting_rails) {
            if let Some(moment) = rail.busy_until_ns() {
                limit = limit.min(Duration::from_nanos(moment.saturating_sub(sys::monotonic_ns())));
            }
            match rail.wake() {
                Wake::Descriptor(descriptor) => self.poll_entries.push(sys::poll_entry(descriptor, interest)),
                Wake::Bell => shared_memory = true,
                // A short wait is answered soon; in a long one nobody is in a hurry.
                Wake::Look => limit = limit.min((quiet / 16).clamp(LOOK_LEAST, LOOK_MOST)),
            }
        }
        match &self.region {
            Some(region) if shared_memory && self.poll_entries.is_empty() => region.bell().sleep(limit),
            None if self.poll_entries.is_empty() => std::thread::sleep(limit),
            region => {
                let limit = if shared_memory { limit.min(MIXED_SLEEP_LIMIT) } else { limit };
                // A failing poll returns at once; the abort word and the deadline still end the wait.
                let _ = sys::poll(&mut self.poll_entries, limit);
                region.iter().for_each(|region| region.bell().stay_awake());
            }
        }
    }

    fn stay_awake(&self, wait: &mut Wait) {
        if std::mem::take(&mut wait.announced) {
            self.region.iter().for_each(|region| region.bell().stay_awake());
        }
    }

    fn fault(&self, rank: usize, operation: Operation, fault: LinkFault) -> FabricError {
        match fault {
            LinkFault::Broken(error) => {
                self.watch.await_verdict();
                self.lost(rank, operation, format!("its data connection broke: {error}"))
            }
            LinkFault::Mismatch { expected, received } => {
                let error = frame::mismatch(rank, &self.watch.health.host(rank), expected, received);
                self.watch.report(Failure { rank: rank as u32, gave_up: true, cause: error.to_string() });
                error
            }
        }
    }

    /// Reports `rank` as lost, unless another failure came first; returns whichever was first.
    fn lost(&self, rank: usize, operation: Operation, cause: String) -> FabricError {
        let failure = Failure { rank: rank as u32, gave_up: false, cause };
        self.watch.report(failure.clone());
        self.watch.health.error(self.watch.health.failure().unwrap_or(failure), operation.name())
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        if self.watch.health.has_failed() {
            return;
        }
        self.table.0.iter_mut().flatten().for_each(Link::finish);
        // What was lost with a rail must still get to the peer, although nothing waits for it here.
        let start = Instant::now();
        loop {
            let mut settling = self.watch.is_resending();
            for (rank, link) in self.table.0.iter_mut().enumerate() {
                let Some(link) = link else { continue };
                let checked = link.check(self.watch.rail_silence);
                post(&self.watch, rank, link);
                settling |= checked.is_ok() && link.is_settling() && !self.watch.health.has_departed(rank);
            }
            if !settling || self.watch.health.has_failed() || start.elapsed() > SETTLING_PATIENCE {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Says to the peer and to the user what a link has to say.
fn post(watch: &Watch, rank: usize, link: &mut Link) {
    if let Some((posts, lost)) = link.take_posts() {
        posts.iter().for_each(|post| watch.tell(rank, post));
        lost.iter().for_each(|lost| watch.count_lost_rail(rank, lost));
    }
}
