//! Waiting for several links at once: spin, then yield, then sleep; never past a deadline, and never past a failure.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::FabricError;
use crate::frame::{self, Message, Operation};
use crate::health::Failure;
use crate::link::{Link, LinkFault};
use crate::monitor::Watch;
use crate::rail::Wake;
use crate::shm::Region;
use crate::sys::{self, PollEntry};

/// Bounds of the time that a wait spins.
const SPIN_LEAST: Duration = Duration::from_micros(1);
const SPIN_MOST: Duration = Duration::from_micros(32);
/// How long a wait yields before it sleeps: waking takes tens of microseconds, so where a core is free it pays to stay up.
const YIELD: Duration = Duration::from_micros(200);
const YIELD_CROWDED: Duration = Duration::from_micros(40);
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
/// When a data connection breaks, the monitor gets this long to say which rank is to blame: if the peer left because a third
/// rank died, all should name the third.
const VERDICT_GRACE: Duration = Duration::from_millis(400);

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

/// What an operation cost this rank.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cost {
    pub messages: u64,
    pub bytes: u64,
    /// Waits for what peers send, one after another.
    pub hops: u64,
}

/// All links of this rank, and how to wait for them.
pub(crate) struct Links {
    links: Vec<Option<Link>>,
    region: Option<Arc<Region>>,
    watch: Arc<Watch>,
    /// How long a wait spins before it yields. Follows what works: ranks that share a core should not spin at all.
    spin: Duration,
    /// How long a wait yields before it sleeps.
    yielding: Duration,
    operation_timeout: Duration,
    poll_entries: Vec<PollEntry>,
    /// What peers send, until it is added. Grows to what the largest call needs.
    pub scratch: Vec<f32>,
    pub cost: Cost,
}

impl Links {
    pub fn new(
        links: Vec<Option<Link>>,
        region: Option<Arc<Region>>,
        watch: Arc<Watch>,
        local_ranks: usize,
        operation_timeout: Duration,
    ) -> Self {
        // A spinning rank must not keep the one that it waits for from its core.
        let crowded = local_ranks > std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            poll_entries: Vec::with_capacity(links.len()),
            links,
            region,
            watch,
            spin: SPIN_LEAST,
            yielding: if crowded { YIELD_CROWDED } else { YIELD },
            operation_timeout,
            scratch: Vec::new(),
            cost: Cost::default(),
        }
    }

    /// Starts sending a message to `rank`.
    pub fn begin_send(&mut self, rank: usize, message: Message) {
        self.cost.messages += 1;
        self.cost.bytes += message.length;
        self.link(rank).begin_send(message);
    }

    /// Starts receiving a message from `rank`.
    pub fn begin_receive(&mut self, rank: usize, message: Message) {
        self.link(rank).begin_receive(message);
    }

    fn link(&mut self, rank: usize) -> &mut Link {
        self.links[rank].as_mut().expect("a rank has a link to every other, and sends nothing to itself")
    }

    /// Name of the transport to `rank`.
    pub fn transport(&self, rank: usize) -> &'static str {
        self.links[rank].as_ref().and_then(|link| link.rails().next()).map_or("none", |rail| rail.transport())
    }

    /// Turns over the links to `ranks` (skipping this rank itself) until `step` is done with each. With `idle`, waits as long as the fabric lives.
    pub fn drive(
        &mut self,
        operation: Operation,
        ranks: &[usize],
        idle: bool,
        mut step: impl FnMut(usize, &mut Link) -> Result<Step, LinkFault>,
    ) -> Result<(), FabricError> {
        let receives = |&rank: &usize| self.links[rank].as_ref().is_some_and(Link::is_receiving);
        self.cost.hops += u64::from(ranks.iter().any(receives));
        let mut wait = Wait::start();
        loop {
            let (mut moved, mut waiting_for) = (false, None);
            for (position, &rank) in ranks.iter().enumerate() {
                let Some(link) = &mut self.links[rank] else { continue };
                let step = step(position, link);
                post(&self.watch, rank, link);
                match step {
                    Ok(Step::Done) => {}
                    Ok(Step::Moved) => (moved, waiting_for) = (true, Some(rank)),
                    Ok(Step::Stuck) => waiting_for = Some(rank),
                    Err(fault) => return Err(self.fault(rank, operation, fault)),
                }
            }
            let Some(rank) = waiting_for else {
                self.stay_awake(&mut wait);
                return Ok(());
            };
            if moved {
                self.stay_awake(&mut wait);
                if let Some(since) = wait.quiet_since.take() {
                    let spun = since.elapsed() <= self.spin;
                    self.spin = if spun { (self.spin * 2).min(SPIN_MOST) } else { (self.spin / 2).max(SPIN_LEAST) };
                }
            } else {
                self.pause(&mut wait, rank, operation, idle)?;
            }
        }
    }

    /// Nothing moved: waits a little, a little longer each time, or finds that there is nothing to wait for.
    fn pause(&mut self, wait: &mut Wait, rank: usize, operation: Operation, idle: bool) -> Result<(), FabricError> {
        self.watch.health.check(operation.name())?;
        let quiet = wait.quiet_since.get_or_insert_with(Instant::now).elapsed();
        if quiet < self.spin {
            std::hint::spin_loop();
        } else if quiet < self.spin + self.yielding {
            std::thread::yield_now();
        } else if self.region.is_some() && !wait.announced {
            self.region.iter().for_each(|region| region.bell().announce_sleep());
            wait.announced = true; // One more turn, and then to sleep: a peer that moved before the announcement wakes nobody.
        } else {
            self.check_patience(wait, rank, operation, idle, quiet)?;
            if quiet > QUIET_BEFORE_CHECK {
                self.check_rails(operation)?;
            }
            self.sleep(quiet);
            wait.announced = false;
        }
        Ok(())
    }

    fn check_patience(
        &self,
        wait: &Wait,
        rank: usize,
        operation: Operation,
        idle: bool,
        quiet: Duration,
    ) -> Result<(), FabricError> {
        if self.watch.health.has_departed(rank) && quiet > DEPARTURE_GRACE {
            return Err(self.lost(rank, operation, "it has left the run".into()));
        }
        let waited = wait.start.elapsed();
        if !idle && waited > self.operation_timeout {
            let host = self.watch.health.host(rank).to_owned();
            let error = FabricError::Deadline { operation: operation.name(), rank, host, waited };
            self.watch.report(Failure { rank: rank as u32, gave_up: false, cause: error.to_string() });
            return Err(error);
        }
        Ok(())
    }

    fn check_rails(&mut self, operation: Operation) -> Result<(), FabricError> {
        for rank in 0..self.links.len() {
            let Some(link) = &mut self.links[rank] else { continue };
            let result = link.check(self.watch.rail_silence);
            post(&self.watch, rank, link);
            result.map_err(|fault| self.fault(rank, operation, fault))?;
        }
        Ok(())
    }

    fn sleep(&mut self, quiet: Duration) {
        self.poll_entries.clear();
        let (mut shared_memory, mut limit) = (false, SLEEP_LIMIT);
        for (rail, interest) in self.links.iter().flatten().flat_map(Link::waiting_rails) {
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
                let start = Instant::now();
                while !self.watch.health.has_failed() && start.elapsed() < VERDICT_GRACE {
                    std::thread::sleep(Duration::from_millis(2));
                }
                self.lost(rank, operation, format!("its data connection broke: {error}"))
            }
            LinkFault::Mismatch { expected, received } => {
                let error = frame::mismatch(rank, self.watch.health.host(rank), expected, received);
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
        self.links.iter_mut().flatten().for_each(Link::finish);
        // What was lost with a rail must still get to the peer, although nothing waits for it here.
        let start = Instant::now();
        loop {
            let mut settling = self.watch.is_resending();
            for (rank, link) in self.links.iter_mut().enumerate() {
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

/// One wait's state.
struct Wait {
    start: Instant,
    /// Since when nothing has moved.
    quiet_since: Option<Instant>,
    /// Whether peers have been told that this rank is about to sleep.
    announced: bool,
}

impl Wait {
    fn start() -> Self {
        Self { start: Instant::now(), quiet_since: None, announced: false }
    }
}
