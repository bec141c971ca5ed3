//! What the waits of the set-up end at: a time, or the loss of a rank, whichever comes first.

use std::io;
use std::time::{Duration, Instant};

use crate::FabricError;
use crate::health::Health;

/// Longest time between two looks at the abort word.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// What a peer gets to answer beyond the time after which the monitor would have lost it: it lives, and is not working.
const ANSWER_PATIENCE: Duration = Duration::from_secs(5);
/// What an error of a rank's loss says it happened in.
pub(crate) const SET_UP: &str = "set-up";

/// The bounds of a wait. The monitor watches the ranks that this one knows already; when it loses one, no wait goes on.
#[derive(Clone, Copy)]
pub(crate) struct Vigil<'a> {
    health: &'a Health,
    deadline: Instant,
    step: Duration,
}

impl<'a> Vigil<'a> {
    /// Waits until `deadline` at the latest. The monitor loses a rank that is silent for `hang_timeout`.
    pub fn new(health: &'a Health, deadline: Instant, hang_timeout: Duration) -> Self {
        Self { health, deadline, step: hang_timeout + ANSWER_PATIENCE }
    }

    /// The same for one message of a peer that is about to send it.
    pub fn step(self) -> Self {
        self.within(self.step)
    }

    /// The same for a wait that may not last longer than `patience`.
    pub fn within(self, patience: Duration) -> Self {
        Self { deadline: self.deadline.min(Instant::now() + patience), ..self }
    }

    /// How much time is left.
    pub fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// Whether none is.
    pub fn is_over(&self) -> bool {
        self.left().is_zero()
    }

    /// The moment of the next look, for waits that can be told one.
    pub fn next_look(&self) -> Instant {
        self.deadline.min(Instant::now() + LOOK_EVERY)
    }

    /// How long it is until then.
    pub fn nap(&self) -> Duration {
        self.next_look().saturating_duration_since(Instant::now())
    }

    /// Ends the wait if a rank is lost.
    pub fn check(&self) -> Result<(), FabricError> {
        self.health.check(SET_UP)
    }

    /// The same where the error passes through what knows only those of the system; see [`from_system`].
    pub fn check_io(&self) -> io::Result<()> {
        self.check().map_err(io::Error::other)
    }
}

/// The error of a step of the set-up: the loss that [`Vigil::check_io`] found, or else what the system said of this step.
pub(crate) fn from_system(step: &str, error: io::Error) -> FabricError {
    error.downcast().unwrap_or_else(|error| FabricError::Setup(format!("{step}: {error}")))
}
