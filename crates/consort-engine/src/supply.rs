//! How ranks load together: those that have the model's files serve those that have none, and all tell rank 0 how far they are.
//!
//! Until all have loaded, a thread of each rank goes through **rounds**. In a round every rank tells all others how far it is
//! and which bytes it needs; then the bytes that the round asked for move, in one order that all ranks know. So nobody
//! waits for a rank that waits for something else, whoever has the files and however many have none. A round without
//! requests is short and rare, one with requests carries a few megabytes for each rank, and that bounds the memory.

use std::collections::{HashMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use consort_checkpoint::remote::{self, Delivery, Fetch, REQUEST_BYTES, Request, Run};
use consort_checkpoint::{Checkpoint, CheckpointError, Difference, Manifest};
use consort_fabric::{Fabric, FabricError, Group, Side};
use serde::{Deserialize, Serialize};

use crate::EngineError;

/// Requests of one rank in one round: enough to keep a fast link busy, few enough to bound the memory of both sides.
const ROUND_REQUESTS: usize = 4;
/// Bytes of a SHA-256.
const HASH_BYTES: usize = 32;
/// Bounds of the wait for something to say. It grows while nothing moves.
const SHORTEST_PAUSE: Duration = Duration::from_micros(100);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// Which ranks have the model's files, and what these are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    /// The same on all ranks that have them.
    pub manifest: Manifest,
    /// These ranks, in order; at least one.
    pub holders: Vec<usize>,
    hosts: Vec<String>,
}

/// Bytes of weights that all ranks have loaded, and what they will have loaded in the end, as far as that is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadProgress {
    /// Bytes loaded.
    pub loaded_bytes: u64,
    /// Bytes in all.
    pub total_bytes: u64,
}

/// Compares the ranks' files, `own` being what this rank has, and says who has them; `None` if nobody has. All ranks call it.
///
/// # Errors
/// On rank 0 [`FabricError::Disagreement`], naming the first file that differs, two ranks, and what each has; on the other ranks
/// that rank 0 gave up.
pub fn compare_files(fabric: Option<&Fabric>, own: Option<&Manifest>) -> Result<Option<Files>, EngineError> {
    let world = fabric.map_or_else(Group::solo, Fabric::world);
    let hosts: Vec<String> = match fabric {
        Some(fabric) => fabric.peers().iter().map(|peer| peer.host.clone()).collect(),
        None => vec!["localhost".to_owned()],
    };
    // A machine may take long to look at its files.
    let hashes: Vec<Option<String>> = exchange(&world, &own.map(Manifest::hash))?;
    let holders: Vec<usize> = (0..hashes.len()).filter(|&rank| hashes[rank].is_some()).collect();
    let Some(&first) = holders.first() else { return Ok(None) };
    let manifest_of = |rank: usize| -> Result<Manifest, EngineError> {
        let mut message = if rank == world.rank() { postcard::to_stdvec(&own)? } else { Vec::new() };
        world.broadcast(rank, &mut message, true)?;
        let manifest: Option<Manifest> = postcard::from_bytes(&message)?;
        manifest.ok_or_else(|| FabricError::Invalid(format!("rank {rank} lost its files")).into())
    };
    let manifest = manifest_of(first)?;
    let Some(&other) = holders.iter().find(|&&rank| hashes[rank] != hashes[first]) else {
        return Ok(Some(Files { manifest, holders, hosts }));
    };
    let difference = manifest.diff(&manifest_of(other)?);
    let Difference { file, ours, theirs } = difference.ok_or_else(|| {
        FabricError::Invalid(format!(
            "ranks {first} and {other} read their files differently; use one build on all hosts"
        ))
    })?;
    if world.rank() != 0 {
        wait_for_the_cause(&world)?;
    }
    let side = |rank: usize, value| Box::new(Side { rank, host: hosts[rank].clone(), value });
    let what = format!("model file {file}");
    Err(FabricError::Disagreement { what, one: side(first, ours), other: side(other, theirs) }.into())
}

/// Runs `body`, which loads this rank's part of the model, and returns when all ranks have loaded theirs. `own` is this rank's
/// checkpoint, if it has the files: it serves the others. `progress` hears how far all ranks are, on a thread of its own.
///
/// # Errors
/// Those of `body`; the loss of a rank; the failure of another rank to load.
pub fn load_together<T, E: From<EngineError>>(
    fabric: Option<&Fabric>,
    files: &Files,
    own: Option<&Checkpoint>,
    progress: impl FnMut(LoadProgress) + Send,
    body: impl FnOnce(&Desk) -> Result<T, E>,
) -> Result<T, E> {
    let world = fabric.map_or_else(Group::solo, Fabric::world);
    let desk = Desk(std::sync::Arc::default());
    let (loaded, rounds) = std::thread::scope(|scope| {
        let rounds = scope.spawn(|| {
            // However the rounds end, nobody may wait for them any more.
            let _closes = Closes(&desk);
            let end = Rounds { world: &world, files, own, desk: &desk }.run(progress);
            if let (Err(EngineError::Checkpoint(error)), Some(fabric)) = (&end, fabric) {
                fabric.abort(&error.to_string());
            }
            end
        });
        let loaded = {
            let mut finishes = Finishes { desk: &desk, phase: Phase::Failed };
            let loaded = body(&desk);
            if loaded.is_ok() {
                finishes.phase = Phase::Loaded;
            }
            loaded
        };
        (loaded, rounds.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    match (loaded, rounds) {
        (Ok(loaded), Ok(End::AllLoaded)) => Ok(loaded),
        // What went wrong here goes first, unless it went wrong because of what happened elsewhere.
        (Err(error), Ok(End::Failed { here: true } | End::AllLoaded)) => Err(error),
        (_, Ok(End::Failed { .. })) => match wait_for_the_cause(&world) {
            Ok(()) => {
                Err(EngineError::from(FabricError::Invalid("another rank could not load its part".into())).into())
            }
            Err(cause) => Err(cause.into()),
        },
        (_, Err(error)) => Err(error.into()),
    }
}

/// Another rank is about to say why it cannot go on: waits for its words.
fn wait_for_the_cause(world: &Group) -> Result<(), EngineError> {
    Ok(world.barrier(true)?)
}

/// Every rank's value, in rank order.
fn exchange<T: Serialize + for<'a> Deserialize<'a>>(world: &Group, value: &T) -> Result<Vec<T>, EngineError> {
    let messages = world.exchange(&postcard::to_stdvec(value)?, true)?;
    messages.iter().map(|message| Ok(postcard::from_bytes(message)?)).collect()
}

/// Where a rank stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
enum Phase {
    #[default]
    Loading,
    Loaded,
    Failed,
}

/// What a rank says in a round.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Status {
    phase: Phase,
    loaded_bytes: u64,
    total_bytes: u64,
    /// File and runs.
    requests: Vec<(u32, Vec<Run>)>,
}

/// Where the part of a rank that loads and the thread that goes through the rounds meet.
#[derive(Clone)]
pub struct Desk(std::sync::Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    news: Condvar,
}

#[derive(Default)]
struct State {
    status: Status,
    /// Requests that no round has taken yet, with their numbers.
    waiting: VecDeque<(u64, Request)>,
    deliveries: HashMap<u64, Delivery>,
    next_number: u64,
    /// The phase that the other ranks know of.
    told: Phase,
    /// There are no more rounds.
    closed: bool,
}

impl Desk {
    /// So many bytes will be loaded here.
    pub fn expect(&self, bytes: u64) {
        self.state().status.total_bytes += bytes;
    }

    /// So many bytes more have been loaded here.
    pub fn advance(&self, bytes: u64) {
        self.state().status.loaded_bytes += bytes;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until there is something to say, but no longer than `pause`: the status, and the numbers of its requests.
    fn take(&self, pause: Duration) -> (Status, Vec<u64>) {
        let nothing = |state: &mut State| state.waiting.is_empty() && state.status.phase == state.told;
        let waited = self.0.news.wait_timeout_while(self.state(), pause, nothing);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.told = state.status.phase;
        let count = state.waiting.len().min(ROUND_REQUESTS);
        let (numbers, requests): (Vec<u64>, Vec<Request>) = state.waiting.drain(..count).unzip();
        let requests = requests.into_iter().map(|request| (request.file as u32, request.runs)).collect();
        (Status { requests, ..state.status.clone() }, numbers)
    }

    fn deliver(&self, number: u64, delivery: Delivery) {
        self.state().deliveries.insert(number, delivery);
        self.0.news.notify_all();
    }
}

impl Fetch for Desk {
    fn fetch(&self, request: Request) -> Result<Delivery, CheckpointError> {
        let path = format!("file {} of the model", request.file + 1);
        let mut state = self.state();
        let number = state.next_number;
        state.next_number += 1;
        state.waiting.push_back((number, request));
        self.0.news.notify_all();
        loop {
            if let Some(delivery) = state.deliveries.remove(&number) {
                return Ok(delivery);
            }
            if state.closed {
                return Err(CheckpointError::Peer { path });
            }
            state = self.0.news.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Says that there are no more rounds, even if a panic ends them.
struct Closes<'a>(&'a Desk);

impl Drop for Closes<'_> {
    fn drop(&mut self) {
        self.0.state().closed = true;
        self.0.0.news.notify_all();
    }
}

/// Says how loading ended, even if a panic ends it.
struct Finishes<'a> {
    desk: &'a Desk,
    phase: Phase,
}

impl Drop for Finishes<'_> {
    fn drop(&mut self) {
        self.desk.state().status.phase = self.phase;
        self.desk.0.news.notify_all();
    }
}

/// Why the rounds ended.
enum End {
    AllLoaded,
    Failed { here: bool },
}

struct Rounds<'a> {
    world: &'a Group,
    files: &'a Files,
    own: Option<&'a Checkpoint>,
    desk: &'a Desk,
}

impl Rounds<'_> {
    fn run(&self, mut progress: impl FnMut(LoadProgress)) -> Result<End, EngineError> {
        let mut pause = SHORTEST_PAUSE;
        loop {
            let (mine, numbers) = self.desk.take(pause);
            let statuses: Vec<Status> = exchange(self.world, &mine)?;
            progress(LoadProgress {
                loaded_bytes: statuses.iter().map(|status| status.loaded_bytes).sum(),
                total_bytes: statuses.iter().map(|status| status.total_bytes).sum(),
            });
            if statuses.iter().any(|status| status.phase == Phase::Failed) {
                return Ok(End::Failed { here: mine.phase == Phase::Failed });
            }
            self.serve(&statuses)?;
            self.receive(&mine, &numbers)?;
            if statuses.iter().all(|status| status.phase == Phase::Loaded) {
                return Ok(End::AllLoaded);
            }
            let moved = statuses.iter().any(|status| !status.requests.is_empty());
            pause = if moved { SHORTEST_PAUSE } else { (pause * 2).min(LONGEST_PAUSE) };
        }
    }

    /// Who answers the request `position` of a rank: all that have the files take turns.
    fn server(&self, rank: usize, position: usize) -> usize {
        let holders = &self.files.holders;
        holders[(rank + position) % holders.len()]
    }

    /// Answers what falls to this rank, in the order of ranks and requests: every rank's sends and receives follow that one order.
    /// While one answer is on its way, the next is read.
    fn serve(&self, statuses: &[Status]) -> Result<(), EngineError> {
        let requests = statuses.iter().enumerate().flat_map(|(rank, status)| {
            status.requests.iter().enumerate().map(move |(position, request)| (rank, position, request))
        });
        let me = self.world.rank();
        let mine: Vec<_> = requests.filter(|&(rank, position, _)| self.server(rank, position) == me).collect();
        let (Some(own), false) = (self.own, mine.is_empty()) else { return Ok(()) };
        std::thread::scope(|scope| {
            let (sender, answers) = std::sync::mpsc::sync_channel(1);
            scope.spawn(move || {
                for (rank, _, (file, runs)) in mine {
                    let answer = self.read(own, *file as usize, runs).map(|answer| (rank, answer));
                    let failed = answer.is_err();
                    if sender.send(answer).is_err() || failed {
                        return;
                    }
                }
            });
            for answer in answers {
                let (rank, message) = answer?;
                self.world.send_bytes(rank, &message)?;
            }
            Ok(())
        })
    }

    /// The bytes of a request, and behind them their SHA-256.
    fn read(&self, own: &Checkpoint, file: usize, runs: &[Run]) -> Result<Vec<u8>, CheckpointError> {
        let name = self.files.manifest.files.get(file).map_or("", |file| file.name.as_str());
        let mut message = Vec::with_capacity(REQUEST_BYTES as usize + HASH_BYTES);
        let hash = remote::answer(own.source(), name, &Request { file, runs: runs.to_vec() }, &mut message)?;
        message.extend_from_slice(&hash);
        Ok(message)
    }

    /// Receives the answers to this rank's own requests.
    fn receive(&self, mine: &Status, numbers: &[u64]) -> Result<(), EngineError> {
        for (position, &number) in numbers.iter().enumerate().take(mine.requests.len()) {
            let server = self.server(self.world.rank(), position);
            let mut bytes = Vec::new();
            self.world.recv_bytes(server, &mut bytes)?;
            let from = format!("rank {server} ({})", self.files.hosts[server]);
            // A message that is too short for a hash has none that fits.
            let sha256 = split_hash(&mut bytes).unwrap_or_default();
            self.desk.deliver(number, Delivery { bytes, sha256, from });
        }
        Ok(())
    }
}

/// Takes the SHA-256 from the end of a message.
fn split_hash(message: &mut Vec<u8>) -> Option<[u8; HASH_BYTES]> {
    let hash = *message.last_chunk()?;
    message.truncate(message.len() - HASH_BYTES);
    Some(hash)
}
