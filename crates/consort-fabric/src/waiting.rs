//! How a wait passes the time: it spins, then yields, then sleeps.

use std::time::{Duration, Instant};

/// Fruitless turns between two looks at the clock: a look costs as much as a turn, and far more where it is a system call.
const TURNS_PER_LOOK: u32 = 16;
/// Bounds of the time that a wait spins, where it does. Where ranks outnumber cores it does not: a peer may be waiting for the core.
const SPIN_LEAST: Duration = Duration::from_micros(1);
const SPIN_MOST: Duration = Duration::from_micros(50);
/// The latter where nothing but looking tells what has come. Less than a yield to a peer may take: two such ranks may share a core.
const SPIN_MOST_LOOKING: Duration = Duration::from_micros(300);
/// A yield that takes so long has let a peer run, which had no core of its own: the system may put two ranks on one core though
/// others are free. A shorter one has found nobody. A longer one has let a stranger run, which is worse than to spin.
const YIELD_TO_PEER: std::ops::Range<Duration> = Duration::from_micros(2)..Duration::from_micros(500);
/// How long a wait yields before it sleeps: waking takes tens of microseconds, so while a step runs and a core is free it pays to
/// stay up for as long as another rank may compute.
const YIELD: Duration = Duration::from_millis(5);
const YIELD_IDLE: Duration = Duration::from_micros(200);
const YIELD_CROWDED: Duration = Duration::from_micros(40);

/// One wait's state.
pub(crate) struct Wait {
    /// Turns since anything moved, and that at which to look at the clock.
    turns: u32,
    look_at: u32,
    /// When the clock was looked at first, and first since anything moved.
    start: Option<Instant>,
    quiet_since: Option<Instant>,
    /// Whether peers have been told that this rank is about to sleep.
    pub announced: bool,
}

impl Wait {
    /// A wait that begins.
    pub fn new() -> Self {
        Self { turns: 0, look_at: TURNS_PER_LOOK, start: None, quiet_since: None, announced: false }
    }

    /// Something moved.
    pub fn stir(&mut self) {
        (self.turns, self.look_at, self.quiet_since) = (0, TURNS_PER_LOOK, None);
    }

    /// Time since the wait began.
    pub fn waited(&self) -> Duration {
        self.start.map_or(Duration::ZERO, |start| start.elapsed())
    }
}

/// What to do after a turn in which nothing moved.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Pause {
    /// The next turn.
    Over,
    /// Sleep: nothing has moved for so long.
    Sleep(Duration),
}

/// How long this rank's waits spin and yield.
pub(crate) struct Patience {
    /// Follows what yields tell: where threads wait for a core, nobody should spin.
    spin: Duration,
    spin_most: Duration,
    /// Whether ranks outnumber cores.
    crowded: bool,
    /// Whether there are rails that wake nobody.
    looking: bool,
}

impl Patience {
    /// The patience of a rank that may share its core (`crowded`), or has rails that wake nobody (`looking`).
    pub fn new(crowded: bool, looking: bool) -> Self {
        let spin_most = if looking { SPIN_MOST_LOOKING } else { SPIN_MOST };
        Self { spin: if crowded { Duration::ZERO } else { spin_most }, spin_most, crowded, looking }
    }

    /// Passes a little time, a little more each time. `idle` waits are those in which no step runs.
    pub fn pause(&mut self, wait: &mut Wait, idle: bool) -> Pause {
        wait.turns = wait.turns.saturating_add(1);
        let spins = !self.spin.is_zero();
        if spins && wait.turns < wait.look_at {
            // Where a turn looks at a device's queue, that is pause enough.
            if !self.looking {
                std::hint::spin_loop();
            }
            return Pause::Over;
        }
        let now = Instant::now();
        wait.start.get_or_insert(now);
        let quiet = now - *wait.quiet_since.get_or_insert(now);
        let yielding = match (self.crowded, idle) {
            (true, _) => YIELD_CROWDED,
            (false, true) => YIELD_IDLE,
            (false, false) => YIELD,
        };
        if quiet < self.spin {
            wait.look_at = wait.turns.saturating_add(TURNS_PER_LOOK);
        } else if quiet < self.spin + yielding {
            std::thread::yield_now();
            if !self.crowded {
                self.learn(now.elapsed());
            }
        } else {
            return Pause::Sleep(quiet);
        }
        Pause::Over
    }

    /// A yield took so long.
    fn learn(&mut self, took: Duration) {
        self.spin = match YIELD_TO_PEER.contains(&took) {
            true if self.spin > SPIN_LEAST => self.spin / 4,
            true => Duration::ZERO,
            false => (self.spin * 2).clamp(SPIN_LEAST, self.spin_most),
        };
    }
}
