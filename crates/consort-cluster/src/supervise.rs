//! Watches over the ranks of a run until all have ended, and says how it ended.
//!
//! One loop owns all processes and decides everything; threads only bring it news: a signal, a line that a rank wrote. When a
//! rank fails, the others get a moment to notice by themselves, then SIGTERM, then SIGKILL; all of that fits into two seconds.

use std::io::{BufRead, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdin, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::control;
use crate::error::{ClusterError, RankFailure, signal_name};
use crate::launch::RankCommand;
use crate::relay::{Tail, relay};

/// The exit code by which a rank says that it ended because it lost another one (`EX_UNAVAILABLE` of `sysexits.h`): it is a
/// witness, not the culprit.
pub const EXIT_PEER_LOST: u8 = 69;

/// After a failure, how long the other ranks have to notice it and say what they saw.
const NOTICE: Duration = Duration::from_millis(500);
/// Between SIGTERM and SIGKILL.
const TERMINATE: Duration = Duration::from_millis(700);
/// After rank 0 has finished its work, how long the others have to end.
const FINISH: Duration = Duration::from_secs(5);
/// After a rank's end, how long to wait for what it wrote last. A process that it started may hold its streams open.
const LAST_WORDS: Duration = Duration::from_millis(300);

/// What becomes of the launcher's standard input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// Nobody reads it.
    Unused,
    /// Rank 0 reads it, line by line, through its [`ControlChannel`](crate::ControlChannel).
    ToRankZero,
}

/// Starts the ranks, given in rank order, and returns when all of them have ended.
///
/// Rank 0 writes to this process's standard output itself; all that ranks write to standard error is relayed line by line, with
/// the rank's name before it except for rank 0's. SIGINT, SIGTERM and SIGHUP end all ranks; a second one ends them at once. The
/// calling thread must live until this returns, since on Linux ranks die with it; the signal handlers stay installed afterwards.
///
/// # Errors
/// A rank could not be started, a rank failed (the error names the one to blame), or a signal ended the run.
pub fn supervise(commands: Vec<RankCommand>, input: Input) -> Result<(), ClusterError> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP, SIGCHLD])
        .map_err(|source| ClusterError::System { what: "installing signal handlers", source })?;
    let (news, inbox) = channel();
    let handle = signals.handle();
    let to_loop = news.clone();
    let listener = std::thread::spawn(move || {
        for signal in signals.forever() {
            let _ = to_loop.send(News::Signal(signal));
        }
    });
    let result = Supervisor::start(commands, &news, input).and_then(|supervisor| supervisor.run(&inbox));
    handle.close();
    // The listener cannot panic: it only sends.
    let _ = listener.join();
    result
}

enum News {
    Signal(i32),
    Line { rank: usize, line: String },
    StreamEnded,
}

struct Process {
    rank: usize,
    host: String,
    remote: bool,
    child: Child,
    /// The launcher's end of the control channel: closing it asks the rank to end. Shared with the thread that forwards input.
    control: Arc<Mutex<Option<ChildStdin>>>,
    tail: Tail,
    /// Whether this launcher has told it to end.
    told_to_end: bool,
    end: Option<End>,
}

/// How a process ended.
struct End {
    status: ExitStatus,
    /// How many ranks had ended before it.
    order: usize,
    /// Whether it did so by itself.
    unprompted: bool,
}

struct Supervisor {
    processes: Vec<Process>,
    open_streams: usize,
    interrupted_by: Option<i32>,
    terminate_at: Option<Instant>,
    kill_at: Option<Instant>,
}

impl Supervisor {
    fn start(commands: Vec<RankCommand>, news: &Sender<News>, input: Input) -> Result<Self, ClusterError> {
        let mut supervisor =
            Self { processes: Vec::new(), open_streams: 0, interrupted_by: None, terminate_at: None, kill_at: None };
        for RankCommand { rank, host, remote, mut command, key } in commands {
            command.stdin(Stdio::piped()).stderr(Stdio::piped());
            command.stdout(if rank == 0 { Stdio::inherit() } else { Stdio::piped() });
            let mut child = command.spawn().map_err(|source| ClusterError::Start {
                rank,
                host: host.clone(),
                program: command.get_program().to_string_lossy().into_owned(),
                source,
            })?;
            let label = if rank == 0 { String::new() } else { format!("[rank {rank} {host}] ") };
            supervisor.open_streams += usize::from(child.stderr.is_some()) + usize::from(child.stdout.is_some());
            if let Some(stream) = child.stderr.take() {
                spawn_relay(stream, rank, label.clone(), news.clone());
            }
            if let Some(stream) = child.stdout.take() {
                spawn_relay(stream, rank, label, news.clone());
            }
            let mut control = child.stdin.take();
            if let (Some(pipe), Some(key)) = (&mut control, &key) {
                // It fits into the pipe's buffer. A rank that is gone already is found out soon.
                let _ = pipe.write_all(control::encode_key(key).as_bytes());
            }
            let control = Arc::new(Mutex::new(control));
            if rank == 0 && input == Input::ToRankZero {
                let control = Arc::clone(&control);
                std::thread::spawn(move || forward_input(&control));
            }
            let process =
                Process { rank, host, remote, child, control, tail: Tail::default(), told_to_end: false, end: None };
            supervisor.processes.push(process);
        }
        Ok(supervisor)
    }

    fn run(mut self, inbox: &Receiver<News>) -> Result<(), ClusterError> {
        // A rank may have ended before the first SIGCHLD could be told apart, and signals merge: always look at all of them.
        self.reap()?;
        while self.processes.iter().any(|process| process.end.is_none()) {
            match self.next_news(inbox) {
                Some(News::Signal(SIGCHLD)) => self.reap()?,
                Some(News::Signal(signal)) => self.interrupt(signal),
                Some(other) => self.listen(other),
                None => {}
            }
            self.meet_deadlines();
        }
        self.hear_last_words(inbox);
        self.verdict()
    }

    /// Waits for news, until the next deadline.
    fn next_news(&self, inbox: &Receiver<News>) -> Option<News> {
        let deadline = [self.terminate_at, self.kill_at].into_iter().flatten().min();
        let patience = deadline.map_or(Duration::from_secs(3600), |at| at.saturating_duration_since(Instant::now()));
        inbox.recv_timeout(patience).ok()
    }

    fn listen(&mut self, news: News) {
        match news {
            News::Line { rank, line } => self.processes[rank].tail.push(&line),
            News::StreamEnded => self.open_streams -= 1,
            News::Signal(_) => {}
        }
    }

    /// Takes note of the processes that have ended, and decides what follows for the others.
    fn reap(&mut self) -> Result<(), ClusterError> {
        let mut order = self.processes.iter().filter(|process| process.end.is_some()).count();
        let mut longest_wait = None;
        for process in self.processes.iter_mut().filter(|process| process.end.is_none()) {
            let status = process
                .child
                .try_wait()
                .map_err(|source| ClusterError::System { what: "waiting for a rank's process", source })?;
            let Some(status) = status else { continue };
            process.end = Some(End { status, order, unprompted: !process.told_to_end });
            order += 1;
            let wait = match (status.success(), process.rank) {
                (false, _) => Some(NOTICE),
                (true, 0) => Some(FINISH),
                (true, _) => None,
            };
            longest_wait = longest_wait.into_iter().chain(wait).min();
        }
        if let Some(wait) = longest_wait {
            self.terminate_by(Instant::now() + wait);
        }
        Ok(())
    }

    fn interrupt(&mut self, signal: i32) {
        let now = Instant::now();
        match self.interrupted_by {
            None => self.terminate_by(now),
            Some(_) => self.kill_at = Some(now),
        }
        self.interrupted_by.get_or_insert(signal);
    }

    fn terminate_by(&mut self, time: Instant) {
        // Once SIGTERM is out, only SIGKILL is left to wait for.
        if self.kill_at.is_none() {
            self.terminate_at = self.terminate_at.into_iter().chain([time]).min();
        }
    }

    fn meet_deadlines(&mut self) {
        let now = Instant::now();
        if self.terminate_at.is_some_and(|at| at <= now) {
            self.terminate_at = None;
            self.kill_at = Some(now + TERMINATE);
            self.end_all(SIGTERM);
        }
        if self.kill_at.is_some_and(|at| at <= now) {
            // Repeated until all have ended: a process that was being started may have missed the first.
            self.kill_at = Some(now + TERMINATE);
            self.end_all(libc::SIGKILL);
        }
    }

    fn end_all(&mut self, signal: i32) {
        for process in self.processes.iter_mut().filter(|process| process.end.is_none()) {
            process.tell_to_end(signal);
        }
    }

    fn hear_last_words(&mut self, inbox: &Receiver<News>) {
        let deadline = Instant::now() + LAST_WORDS;
        while self.open_streams > 0 {
            match inbox.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(news) => self.listen(news),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
            }
        }
    }

    fn verdict(&self) -> Result<(), ClusterError> {
        if let Some(signal) = self.interrupted_by {
            return Err(ClusterError::Interrupted { signal });
        }
        let failed = self.processes.iter().filter_map(|process| {
            let end = process.end.as_ref()?;
            (!end.status.success()).then_some((process, end))
        });
        match failed.min_by_key(|(_, end)| (end.innocence(), end.order)) {
            Some((process, end)) => Err(ClusterError::Rank(process.failure(end))),
            None => Ok(()),
        }
    }
}

impl End {
    /// How unlikely it is that this rank began the trouble.
    fn innocence(&self) -> u8 {
        match (self.unprompted, self.status.signal()) {
            (false, _) => 3,
            (true, Some(_)) => 0,
            (true, None) if self.status.code() == Some(EXIT_PEER_LOST.into()) => 2,
            (true, None) => 1,
        }
    }
}

impl Process {
    /// Closes the control channel and signals the process with all that it started.
    fn tell_to_end(&mut self, signal: i32) {
        self.told_to_end = true;
        // While input is being forwarded the lock is taken, perhaps by a write that never ends: then the signal must do.
        if let Ok(mut control) = self.control.try_lock() {
            control.take();
        }
        // A process id that does not fit cannot have come from the kernel.
        if let Ok(group) = libc::pid_t::try_from(self.child.id()) {
            // SAFETY: kill takes plain integers. The group is the child's own, and the child has not been waited for, so the
            // number cannot have passed to another process.
            unsafe { libc::kill(-group, signal) };
        }
    }

    fn failure(&self, end: &End) -> RankFailure {
        let (what, exit_code) = match (end.status.signal(), end.status.code()) {
            _ if !end.unprompted => ("did not end after rank 0 had finished, and was stopped".to_owned(), 1),
            (Some(signal), _) => {
                let hint = match signal {
                    libc::SIGKILL => " (if nobody did that, the machine ran out of memory)",
                    _ => "",
                };
                (format!("was killed by {}{hint}", signal_name(signal)), 128 + signal)
            }
            (None, Some(255)) if self.remote => {
                ("was lost: ssh could not connect, the connection broke, or the process was killed".to_owned(), 255)
            }
            (None, code) => {
                let code = code.unwrap_or(1);
                (format!("failed with exit code {code}"), code)
            }
        };
        RankFailure { rank: self.rank, host: self.host.clone(), what, exit_code, last_lines: self.tail.report() }
    }
}

impl Drop for Process {
    /// No rank outlives its supervisor, however that ends.
    fn drop(&mut self) {
        if self.end.is_none() {
            self.tell_to_end(libc::SIGKILL);
            let _ = self.child.wait();
        }
    }
}

fn spawn_relay(stream: impl std::io::Read + Send + 'static, rank: usize, label: String, news: Sender<News>) {
    std::thread::spawn(move || {
        relay(stream, &label, &news, |line| News::Line { rank, line });
        let _ = news.send(News::StreamEnded);
    });
}

/// Sends this process's standard input to rank 0, line by line, until either ends.
fn forward_input(control: &Mutex<Option<ChildStdin>>) {
    let send = |text: &str| {
        let mut control = control.lock().unwrap_or_else(PoisonError::into_inner);
        control.as_mut().is_some_and(|pipe| pipe.write_all(text.as_bytes()).is_ok())
    };
    let mut line = Vec::new();
    let mut input = std::io::stdin().lock();
    while matches!(input.read_until(b'\n', &mut line), Ok(1..)) {
        let text = String::from_utf8_lossy(&line);
        if !send(&control::encode_line(text.trim_end_matches('\n'))) {
            return;
        }
        line.clear();
    }
    send(control::END_OF_INPUT);
}
