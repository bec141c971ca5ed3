//! Liveness: one thread per process that sleeps on the control connections to all other ranks, from the first of them on: ranks
//! are watched while they still find each other and set up their links.
//!
//! A dead process closes its connections, which its peers see at once; a stopped or unplugged one stops sending heartbeats. Where a
//! link has several cables, there are two control connections, and all is said on both: a peer is lost with the last of them.
//! Either becomes the first failure in [`Health`], and a notice to all, so that every rank names the same culprit.

use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::FabricError;
use crate::channel::{Channel, ChannelError, ChannelReader, ChannelWriter, ControlMessage};
use crate::health::{Failure, Health};
use crate::ledger::Ledger;
use crate::link::LostRail;
use crate::sys::{self, Interest};
use crate::vigil::{SET_UP, Vigil};

/// How long a message that the peer needs may wait for room in a socket: its monitor reads as soon as it can.
const POST_PATIENCE: Duration = Duration::from_secs(10);
/// The same where another connection may take it instead.
const SHARED_PATIENCE: Duration = Duration::from_secs(1);
/// When a data connection breaks, the monitor gets this long to say which rank is to blame: if the peer left because a third
/// rank died, all should name the third.
const VERDICT_GRACE: Duration = Duration::from_millis(400);
/// Between two looks whether all ranks are ready.
const READY_NAP: Duration = Duration::from_micros(200);
/// How long a notice may wait for room in a socket: it only does if the peer is stopped, and then the notice is not for it.
const NOTICE_PATIENCE: Duration = Duration::from_millis(20);

/// What is known once a rank has all its links.
struct Links {
    /// By rank, of links with several rails.
    ledgers: Vec<Option<Arc<Ledger>>>,
    /// Whether ranks are watched after their goodbye, since they pass on what others send until all have said it.
    lingers: bool,
}

/// The writing side: anyone may report a failure.
pub(crate) struct Watch {
    pub health: Health,
    own_rank: usize,
    /// By rank; none to this rank itself.
    writers: Vec<Mutex<Vec<ChannelWriter>>>,
    /// Connections that the thread does not know of yet, and what tells it of them.
    arrivals: Mutex<Vec<(usize, ChannelReader)>>,
    wake: UnixStream,
    has_ended: AtomicBool,
    links: OnceLock<Links>,
    /// Ranks that have all their links.
    ready: Vec<AtomicBool>,
    rails_lost: AtomicUsize,
    /// Threads that send frames again.
    resending: AtomicUsize,
    /// How long the machine at the other end of one of several rails may owe an answer.
    pub rail_silence: Duration,
    said_goodbye: AtomicBool,
    warn: fn(&str),
}

impl Watch {
    /// Keeps `failure` if it is the first, and then tells all other ranks.
    pub fn report(&self, failure: Failure) {
        if self.health.fail(failure.clone()) {
            self.tell_all(&ControlMessage::Abort(failure));
        }
    }

    /// Waits a little for a failure that explains what has just broken.
    pub fn await_verdict(&self) {
        let start = Instant::now();
        while !self.health.has_failed() && start.elapsed() < VERDICT_GRACE {
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Tells all other ranks that this one needs nothing more.
    pub fn say_goodbye(&self) {
        if !self.said_goodbye.swap(true, Ordering::AcqRel) {
            self.tell_all(&ControlMessage::Goodbye);
        }
    }

    /// Says something to one rank, and waits until there is room for it.
    pub fn tell(&self, rank: usize, message: &ControlMessage) {
        say(&self.writers[rank], message, POST_PATIENCE);
    }

    /// From now on watches this connection to `rank`, and says on it what is said to it: the first, or one over another cable.
    pub fn add(&self, rank: usize, Channel { reader, writer, .. }: Channel) {
        lock(&self.writers[rank]).push(writer);
        lock(&self.arrivals).push((rank, reader));
        self.wake();
    }

    /// This rank has all its links: waits until all others have theirs.
    pub fn start_together(
        &self,
        ledgers: Vec<Option<Arc<Ledger>>>,
        lingers: bool,
        vigil: Vigil,
    ) -> Result<(), FabricError> {
        if self.links.set(Links { ledgers, lingers }).is_err() {
            unreachable!("a fabric is set up once");
        }
        self.ready[self.own_rank].store(true, Ordering::Release);
        let ranks = (0..self.ready.len()).filter(|&rank| rank != self.own_rank);
        ranks.for_each(|rank| self.tell(rank, &ControlMessage::Ready));
        let start = Instant::now();
        while let Some(rank) = self.ready.iter().position(|ready| !ready.load(Ordering::Acquire)) {
            vigil.check()?;
            if vigil.is_over() {
                let (host, waited) = (self.health.host(rank), start.elapsed());
                return Err(FabricError::Deadline { operation: SET_UP, rank, host, waited });
            }
            std::thread::sleep(READY_NAP);
        }
        Ok(())
    }

    /// What ended the set-up: the rank that was lost, if one was, or else `error`, which the others are told.
    pub fn explain(&self, error: FabricError) -> FabricError {
        let may_follow_from_a_loss = matches!(error, FabricError::Setup(_) | FabricError::Unreachable { .. });
        if may_follow_from_a_loss {
            self.await_verdict();
            if let Some(failure) = self.health.failure().filter(|failure| !failure.gave_up) {
                return self.health.error(failure, SET_UP);
            }
        }
        self.report(Failure { rank: self.own_rank as u32, gave_up: true, cause: error.to_string() });
        error
    }

    /// Both ends of a link have given up one of its rails: the user should know.
    pub fn count_lost_rail(&self, rank: usize, lost: &LostRail) {
        self.rails_lost.fetch_add(1, Ordering::Relaxed);
        let LostRail { rail, left, cause } = lost;
        let (host, rails) = (self.health.host(rank), if *left == 1 { "rail that is" } else { "rails that are" });
        (self.warn)(&format!(
            "rail {rail} to rank {rank} ({host}) was lost: {cause}; the run goes on over the {left} {rails} left"
        ));
    }

    /// Rails that were lost so far, on this rank's links.
    pub fn rails_lost(&self) -> usize {
        self.rails_lost.load(Ordering::Relaxed)
    }

    /// Whether frames that were lost with a rail are being sent again.
    pub fn is_resending(&self) -> bool {
        self.resending.load(Ordering::Acquire) > 0
    }

    /// Sends to all. A connection that takes no message is the monitor's business, which sees it break.
    pub fn tell_all(&self, message: &ControlMessage) {
        self.writers.iter().for_each(|writers| say(writers, message, NOTICE_PATIENCE));
    }

    fn wake(&self) {
        // If there is no room, the thread has enough to wake up for.
        let _ = (&self.wake).write(&[0]);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Says something on all connections to one rank. One that does not take what another takes is given up: it has missed something.
fn say(writers: &Mutex<Vec<ChannelWriter>>, message: &ControlMessage, patience: Duration) {
    let mut writers = lock(writers);
    let patience = if writers.len() > 1 { patience.min(SHARED_PATIENCE) } else { patience };
    let taken: Vec<bool> =
        writers.iter_mut().map(|writer| writer.send(message, Instant::now() + patience).is_ok()).collect();
    if taken.contains(&true) {
        let mut taken = taken.into_iter();
        writers.retain(|_| taken.next().is_some_and(|taken| taken));
    }
}

/// The thread and the means to end it.
pub(crate) struct Monitor {
    pub watch: Arc<Watch>,
    thread: Option<JoinHandle<()>>,
}

impl Monitor {
    /// Starts to watch over a run in which this is `own_rank` of `size`, with no connections yet.
    pub fn start(own_rank: usize, size: usize, hang_timeout: Duration, warn: fn(&str)) -> std::io::Result<Self> {
        let (wake, woken) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        woken.set_nonblocking(true)?;
        let watch = Arc::new(Watch {
            health: Health::new(size),
            own_rank,
            writers: (0..size).map(|_| Mutex::new(Vec::new())).collect(),
            arrivals: Mutex::new(Vec::new()),
            wake,
            has_ended: AtomicBool::new(false),
            links: OnceLock::new(),
            ready: (0..size).map(|_| AtomicBool::new(false)).collect(),
            rails_lost: AtomicUsize::new(0),
            resending: AtomicUsize::new(0),
            // So much sooner than a peer counts as lost that there is time to go on without the rail.
            rail_silence: hang_timeout / 2,
            said_goodbye: AtomicBool::new(false),
            warn,
        });
        let shared = watch.clone();
        let thread = std::thread::Builder::new()
            .name("consort-monitor".into())
            .spawn(move || watch_peers(&shared, &woken, hang_timeout))?;
        Ok(Self { watch, thread: Some(thread) })
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.watch.say_goodbye();
        self.watch.has_ended.store(true, Ordering::Release);
        self.watch.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// How often a rank says that it lives.
pub(crate) fn heartbeat_period(hang_timeout: Duration) -> Duration {
    (hang_timeout / 8).clamp(Duration::from_millis(10), Duration::from_secs(1))
}

struct WatchedPeer {
    rank: usize,
    readers: Vec<ChannelReader>,
    /// On any of them.
    heard: Instant,
}

fn watch_peers(watch: &Arc<Watch>, mut woken: &UnixStream, hang_timeout: Duration) {
    let heartbeat = heartbeat_period(hang_timeout);
    let mut next_heartbeat = Instant::now();
    let mut peers: Vec<WatchedPeer> = Vec::new();
    loop {
        let now = Instant::now();
        if now >= next_heartbeat {
            watch.tell_all(&ControlMessage::Heartbeat);
            // If this very process was stopped, its peers' silence means nothing: listen again before judging them.
            if now > next_heartbeat + hang_timeout / 4 {
                peers.iter_mut().for_each(|peer| peer.heard = now);
            }
            next_heartbeat = now + heartbeat;
        }
        let readers = peers.iter().flat_map(|peer| &peer.readers);
        let mut entries: Vec<_> = readers.map(|reader| sys::poll_entry(reader.descriptor(), Interest::READ)).collect();
        entries.push(sys::poll_entry(woken.as_raw_fd(), Interest::READ));
        if let Err(error) = sys::poll(&mut entries, next_heartbeat.saturating_duration_since(Instant::now())) {
            let cause = format!("it cannot watch its control connections: {error}");
            watch.report(Failure { rank: watch.own_rank as u32, gave_up: true, cause });
            return;
        }
        while matches!(woken.read(&mut [0; 64]), Ok(1..)) {}
        if watch.has_ended.load(Ordering::Acquire) {
            return;
        }
        for (rank, reader) in lock(&watch.arrivals).drain(..) {
            match peers.iter_mut().find(|peer| peer.rank == rank) {
                Some(peer) => peer.readers.push(reader),
                None => peers.push(WatchedPeer { rank, readers: vec![reader], heard: Instant::now() }),
            }
        }
        peers.retain_mut(|peer| match hear(watch, peer, hang_timeout) {
            Ok(keep) => keep,
            Err(failure) => {
                watch.report(failure);
                false
            }
        });
    }
}

/// Reads all that a peer has said; false once it has left, an error if it is lost.
fn hear(watch: &Arc<Watch>, peer: &mut WatchedPeer, hang_timeout: Duration) -> Result<bool, Failure> {
    let lost = |cause: String| Failure { rank: peer.rank as u32, gave_up: false, cause };
    let mut at = 0;
    while let Some(reader) = peer.readers.get_mut(at) {
        match reader.try_receive() {
            Ok(Some(ControlMessage::Abort(failure))) => {
                // The sender has told the others too, but it may be gone before all have heard: pass it on.
                watch.report(failure);
                return Ok(false);
            }
            Ok(Some(ControlMessage::Goodbye)) => {
                watch.health.depart(peer.rank);
                if !watch.links.get().is_some_and(|links| links.lingers) {
                    return Ok(false);
                }
            }
            Ok(Some(ControlMessage::Ready)) => watch.ready[peer.rank].store(true, Ordering::Release),
            Ok(Some(message)) => {
                peer.heard = Instant::now();
                if !hear_of_rails(watch, peer.rank, message) {
                    return Err(lost("what it said of its rails makes no sense".into()));
                }
            }
            Ok(None) => at += 1,
            Err(error) => {
                peer.readers.remove(at);
                match error {
                    _ if !peer.readers.is_empty() => {}
                    ChannelError::Closed if watch.health.has_departed(peer.rank) => return Ok(false),
                    ChannelError::Closed => return Err(lost("its process ended".into())),
                    error => return Err(lost(format!("its control connection broke: {error}"))),
                }
            }
        }
    }
    if peer.heard.elapsed() >= hang_timeout {
        return Err(lost(format!("no sign of life for {} ms", hang_timeout.as_millis())));
    }
    Ok(true)
}

/// What a peer says of the rails to it; false if it makes no sense.
fn hear_of_rails(watch: &Arc<Watch>, rank: usize, message: ControlMessage) -> bool {
    let ledger = watch.links.get().and_then(|links| links.ledgers[rank].as_ref());
    match message {
        ControlMessage::Acknowledged { rail, frames } => {
            ledger.is_some_and(|ledger| ledger.acknowledge(rail.into(), frames))
        }
        ControlMessage::Resent { header, payload } => ledger.is_some_and(|ledger| ledger.deliver(&header, payload)),
        ControlMessage::RailLost { rail, frames } => {
            let Some(again) = ledger.and_then(|ledger| ledger.lose(rail.into(), frames)) else { return false };
            // Not here: the peer's monitor may have as much to send, and must be heard meanwhile.
            let watch = watch.clone();
            watch.resending.fetch_add(1, Ordering::AcqRel);
            let resend = move || {
                again.into_iter().for_each(|frame| watch.tell(rank, &frame.resend()));
                watch.resending.fetch_sub(1, Ordering::AcqRel);
            };
            std::thread::Builder::new().name("consort-resend".into()).spawn(resend).is_ok()
        }
        _ => true,
    }
}
