//! Watches over the ranks of a run until all have ended, and says how it ended.
//!
//! One loop owns all processes and decides everything; threads only bring it news: a signal, a line that a rank wrote. When a
//! rank fails, the others get a moment to notice by themselves, then SIGTERM, then SIGKILL; all of that fits into two seconds.

use std::ffi::OsString;
use std::io::{BufRead, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdin, ExitStatus, Stdio};
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::control;
use crate::error::{ClusterError, RankFailure, signal_name};
use crate::hostfile::Hostfile;
use crate::journal::Journal;
use crate::launch::{Launch, RankCommand};
use crate::relay::{Tail, continue_copy, relay};

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
/// Beyond the time after which the other ranks lose a silent one, how long a stopped process may stay so: none of them may know it
/// yet.
const STOPPED: Duration = Duration::from_secs(5);

/// What becomes of the launcher's standard input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// Nobody reads it.
    Unused,
    /// Rank 0 reads it, line by line, through its [`ControlChannel`](crate::ControlChannel).
    ToRankZero,
}

/// How a run goes on after a rank was lost. By itself it does not.
#[derive(Clone, Copy, Default)]
pub struct Recovery<'a> {
    /// How often the ranks are started again.
    pub restarts: usize,
    /// Goes on without the lost rank: given the hosts and the number of ranks that are left, the flags by which these divide the
    /// model, or why they cannot.
    pub replan: Option<&'a dyn Fn(&Hostfile, usize) -> Result<Vec<OsString>, String>>,
}

/// Starts the ranks and returns when all of them have ended.
///
/// Rank 0 writes to this process's standard output; all that ranks write to standard error is relayed line by line, with
/// the rank's name before it except for rank 0's. SIGINT, SIGTERM and SIGHUP end all ranks; a second one ends them at once. The
/// calling thread must live until this returns, since on Linux ranks die with it; the signal handlers stay installed afterwards.
///
/// Where `recovery` allows it, a rank that is lost (killed, silent, or out of reach; not one that failed with an error of its own)
/// has all ranks started again. Rank 0 is told what it had generated and what the user had typed, and what it says once more
/// is not shown twice.
///
/// # Errors
/// A rank could not be started, a rank failed (the error names the one to blame), or a signal ended the run.
pub fn supervise(launch: Launch, input: Input, recovery: Recovery<'_>) -> Result<(), ClusterError> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP, SIGCHLD])
        .map_err(|error| ClusterError::System { what: "installing signal handlers", error })?;
    let (news, inbox) = channel();
    let handle = signals.handle();
    let to_loop = news.clone();
    let listener = std::thread::spawn(move || {
        for signal in signals.forever() {
            let _ = to_loop.send(News::Signal(signal));
        }
    });
    let result = attempts(launch, input, recovery, &news, &inbox);
    handle.close();
    // The listener cannot panic: it only sends.
    let _ = listener.join();
    result
}

/// Starts the ranks, and starts them again as often as they are lost and it is allowed.
fn attempts(
    launch: Launch,
    input: Input,
    recovery: Recovery<'_>,
    news: &Sender<News>,
    inbox: &Receiver<News>,
) -> Result<(), ClusterError> {
    let mut launch = Launch { recovers: recovery.restarts > 0, ..launch };
    let arguments = launch.arguments.clone();
    let console = Arc::new(Console::default());
    let mut memory = Memory::default();
    if input == Input::ToRankZero {
        let console = console.clone();
        std::thread::spawn(move || forward_input(&console));
    }
    let mut attempt = 0;
    loop {
        let outcome = launch
            .commands()
            .and_then(|commands| Supervisor::start(commands, attempt, news, &console, &memory, launch.recovers))
            .and_then(|supervisor| supervisor.run(inbox, &mut memory, launch.hang_timeout));
        let failure = match outcome {
            Err(ClusterError::Rank(failure)) if failure.lost.is_some() && attempt < recovery.restarts => failure,
            outcome => return outcome,
        };
        let of_all = format!("start {} of {}", attempt + 2, recovery.restarts + 1);
        let tokens = memory.journal.unfinished_tokens();
        match recovery.replan.zip(failure.lost) {
            None => eprintln!("{failure}; all ranks are started again ({of_all}, {tokens} tokens to replay)"),
            Some((replan, lost)) => {
                launch = launch.without(lost);
                let flags = match launch.ranks {
                    0 => Err("no rank is left".to_owned()),
                    ranks => replan(&launch.hostfile, ranks),
                };
                let flags =
                    flags.map_err(|problem| ClusterError::CannotReplan { failure: failure.clone(), problem })?;
                let words: Vec<_> = flags.iter().map(|flag| flag.to_string_lossy()).collect();
                eprintln!("{failure}; going on with {} ({of_all}, {tokens} tokens to replay)", words.join(" "));
                launch.arguments = arguments.iter().cloned().chain(flags).collect();
            }
        }
        pause(attempt, inbox)?;
        attempt += 1;
    }
}

/// Before the first new start nobody waits; before each other one longer, since a machine may need time to come back.
fn pause(attempt: usize, inbox: &Receiver<News>) -> Result<(), ClusterError> {
    let seconds = (1u64 << attempt.min(5)) - 1;
    let deadline = Instant::now() + Duration::from_secs(seconds);
    loop {
        match inbox.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(News::Signal(signal)) if signal != SIGCHLD => return Err(ClusterError::Interrupted { signal }),
            Ok(_) => {}
            Err(_) => return Ok(()),
        }
    }
}

/// What outlives the ranks.
#[derive(Default)]
struct Memory {
    journal: Journal,
    /// Bytes of rank 0's output that were passed on.
    delivered: Arc<AtomicU64>,
}

/// What the user has typed so far, as the control channel carries it, and the rank 0 that gets it.
#[derive(Default)]
struct Console {
    state: Mutex<(String, Option<Control>)>,
}

/// The launcher's end of a control channel: closing it asks the rank to end. Shared with the thread that forwards input.
type Control = Arc<Mutex<Option<ChildStdin>>>;

impl Console {
    /// Sends text to rank 0, now and to every rank 0 that follows.
    fn send(&self, text: &str) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.0.push_str(text);
        if let Some(control) = &state.1 {
            write(control, text);
        }
    }

    /// From now on `control` leads to rank 0, which gets `preamble` first and then all that was sent so far.
    fn attach(&self, control: Control, preamble: &str) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        write(&control, preamble);
        write(&control, &state.0);
        state.1 = Some(control);
    }
}

fn write(control: &Control, text: &str) {
    let mut control = control.lock().unwrap_or_else(PoisonError::into_inner);
    // A rank that is gone is found out by other means.
    control.iter_mut().for_each(|pipe| drop(pipe.write_all(text.as_bytes())));
}

enum News {
    Signal(i32),
    Line { attempt: usize, rank: usize, line: String },
    StreamEnded { attempt: usize },
}

struct Process {
    rank: usize,
    host: String,
    remote: bool,
    child: Child,
    control: Control,
    tail: Tail,
    /// Whether this launcher has told it to end.
    told_to_end: bool,
    /// Since when it has been stopped, by a signal that halts it; and whether it was ended for it.
    stopped_since: Option<Instant>,
    stayed_stopped: bool,
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
    attempt: usize,
    processes: Vec<Process>,
    open_streams: usize,
    interrupted_by: Option<i32>,
    terminate_at: Option<Instant>,
    kill_at: Option<Instant>,
}

impl Supervisor {
    fn start(
        commands: Vec<RankCommand>,
        attempt: usize,
        news: &Sender<News>,
        console: &Arc<Console>,
        memory: &Memory,
        recovers: bool,
    ) -> Result<Self, ClusterError> {
        let mut supervisor = Self {
            attempt,
            processes: Vec::new(),
            open_streams: 0,
            interrupted_by: None,
            terminate_at: None,
            kill_at: None,
        };
        for RankCommand { rank, host, remote, mut command, key } in commands {
            command.stdin(Stdio::piped()).stderr(Stdio::piped());
            command.stdout(if rank == 0 && !recovers { Stdio::inherit() } else { Stdio::piped() });
            let mut child = command.spawn().map_err(|error| ClusterError::Start {
                rank,
                host: host.clone(),
                program: command.get_program().to_string_lossy().into_owned(),
                error,
            })?;
            let label = if rank == 0 { String::new() } else { format!("[rank {rank} {host}] ") };
            supervisor.open_streams += usize::from(child.stderr.is_some()) + usize::from(child.stdout.is_some());
            let reporter = Reporter { attempt, rank, label, news: news.clone() };
            if let Some(stream) = child.stderr.take() {
                reporter.clone().relay_lines(stream);
            }
            match child.stdout.take() {
                Some(stream) if rank == 0 => reporter.deliver(stream, memory.delivered.clone()),
                Some(stream) => reporter.relay_lines(stream),
                None => {}
            }
            let control = Arc::new(Mutex::new(child.stdin.take()));
            if let Some(key) = &key {
                // It fits into the pipe's buffer.
                write(&control, &control::encode_key(key));
            }
            // In a thread of its own: all that was generated and typed may not fit into the pipe until rank 0 reads it.
            let (console, to_rank) = (console.clone(), control.clone());
            let preamble = if recovers { memory.journal.encode() } else { String::new() };
            std::thread::spawn(move || {
                if rank == 0 {
                    console.attach(to_rank.clone(), &preamble);
                }
                if remote {
                    beat(&to_rank);
                }
            });
            supervisor.processes.push(Process {
                rank,
                host,
                remote,
                child,
                control,
                tail: Tail::default(),
                told_to_end: false,
                stopped_since: None,
                stayed_stopped: false,
                end: None,
            });
        }
        Ok(supervisor)
    }

    fn run(mut self, inbox: &Receiver<News>, memory: &mut Memory, hang_timeout: Duration) -> Result<(), ClusterError> {
        // A rank may have ended before the first SIGCHLD could be told apart, and signals merge: always look at all of them.
        self.reap()?;
        self.look_for_stopped(hang_timeout);
        while self.processes.iter().any(|process| process.end.is_none()) {
            match self.next_news(inbox, hang_timeout) {
                Some(News::Signal(SIGCHLD)) => {
                    self.reap()?;
                    self.look_for_stopped(hang_timeout);
                }
                Some(News::Signal(signal)) => self.interrupt(signal),
                Some(other) => self.listen(other, memory),
                None => {}
            }
            self.meet_deadlines(hang_timeout);
        }
        self.hear_last_words(inbox, memory);
        self.verdict()
    }

    /// Waits for news, until the next deadline.
    fn next_news(&self, inbox: &Receiver<News>, hang_timeout: Duration) -> Option<News> {
        let stopped = self.processes.iter().filter_map(|process| process.stopped_since);
        let stopped = stopped.map(|since| since + hang_timeout + STOPPED);
        let deadline = [self.terminate_at, self.kill_at].into_iter().flatten().chain(stopped).min();
        let patience = deadline.map_or(Duration::from_secs(3600), |at| at.saturating_duration_since(Instant::now()));
        inbox.recv_timeout(patience).ok()
    }

    fn listen(&mut self, news: News, memory: &mut Memory) {
        match news {
            News::Line { attempt, rank, line } if attempt == self.attempt => {
                if rank != 0 || !memory.journal.note(&line) {
                    self.processes[rank].tail.push(&line);
                }
            }
            News::StreamEnded { attempt } if attempt == self.attempt => self.open_streams -= 1,
            // Late words of ranks that were started again since.
            News::Line { .. } | News::StreamEnded { .. } | News::Signal(_) => {}
        }
    }

    /// Takes note of the processes that have ended, and decides what follows for the others.
    fn reap(&mut self) -> Result<(), ClusterError> {
        let mut order = self.processes.iter().filter(|process| process.end.is_some()).count();
        let mut wait = None;
        for process in self.processes.iter_mut().filter(|process| process.end.is_none()) {
            let status = process
                .child
                .try_wait()
                .map_err(|error| ClusterError::System { what: "waiting for a rank's process", error })?;
            let Some(status) = status else { continue };
            process.end = Some(End { status, order, unprompted: !process.told_to_end });
            order += 1;
            let patience = match (status.success(), process.rank) {
                (false, _) => Some(NOTICE),
                (true, 0) => Some(FINISH),
                (true, _) => None,
            };
            wait = wait.into_iter().chain(patience).min();
        }
        if let Some(wait) = wait {
            self.terminate_by(Instant::now() + wait);
        }
        Ok(())
    }

    /// Takes note of processes that were stopped, or go on, and tells the user: nobody hears of a stopped rank that has not met the
    /// others yet.
    fn look_for_stopped(&mut self, hang_timeout: Duration) {
        for process in self.processes.iter_mut().filter(|process| process.end.is_none()) {
            let since = process.is_stopped().then(|| process.stopped_since.unwrap_or_else(Instant::now));
            if since.is_some() && process.stopped_since.is_none() {
                let (Process { rank, host, .. }, limit) = (&*process, hang_timeout + STOPPED);
                let (pid, limit_s) = (process.child.id(), limit.as_secs_f32());
                eprintln!(
                    "warning: rank {rank} ({host}) is stopped: `kill -CONT {pid}` lets it go on, and after {limit_s} s it is lost"
                );
            }
            process.stopped_since = since;
        }
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

    fn meet_deadlines(&mut self, hang_timeout: Duration) {
        let now = Instant::now();
        for process in self.processes.iter_mut().filter(|process| process.end.is_none()) {
            if process.stopped_since.is_some_and(|since| since + hang_timeout + STOPPED <= now) {
                process.stopped_since = None;
                process.stayed_stopped = !process.told_to_end;
                process.tell_to_end(libc::SIGKILL);
            }
        }
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

    fn hear_last_words(&mut self, inbox: &Receiver<News>, memory: &mut Memory) {
        let deadline = Instant::now() + LAST_WORDS;
        while self.open_streams > 0 {
            match inbox.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(news) => self.listen(news, memory),
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
        match failed.min_by_key(|(process, end)| (!process.stayed_stopped, end.innocence(), end.order)) {
            Some((process, end)) => {
                let lost = self.lost(process, end);
                Err(ClusterError::Rank(Box::new(RankFailure { lost, ..process.failure(end) })))
            }
            None => Ok(()),
        }
    }

    /// The rank without which the run may go on, if the culprit did not fail by an error of its own.
    fn lost(&self, culprit: &Process, end: &End) -> Option<usize> {
        // A witness speaks of another rank: one that had to be ended, since it did not end by itself.
        if culprit.stayed_stopped {
            return Some(culprit.rank);
        }
        let silent = || self.processes.iter().find(|process| process.end.as_ref().is_some_and(|end| !end.unprompted));
        match (end.unprompted, end.status.signal(), end.status.code()) {
            (true, Some(_), _) => Some(culprit.rank),
            (true, None, Some(255)) if culprit.remote => Some(culprit.rank),
            (true, None, Some(code)) if code == i32::from(EXIT_PEER_LOST) => {
                Some(silent().map_or(culprit.rank, |process| process.rank))
            }
            _ => None,
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

    /// Whether a signal has halted it, so that it is neither running nor ended.
    fn is_stopped(&self) -> bool {
        // SAFETY: an all-zero structure is a valid value; the call writes it, waits for nothing, and leaves the child as it is. The
        // child has not been waited for, so the number is still its own.
        let (result, seen) = unsafe {
            let mut seen: libc::siginfo_t = std::mem::zeroed();
            let options = libc::WSTOPPED | libc::WNOHANG | libc::WNOWAIT;
            (libc::waitid(libc::P_PID, self.child.id(), &mut seen, options), seen)
        };
        result == 0 && seen.si_signo == libc::SIGCHLD && seen.si_code == libc::CLD_STOPPED
    }

    fn failure(&self, end: &End) -> RankFailure {
        let (what, exit_code) = match (end.status.signal(), end.status.code()) {
            _ if self.stayed_stopped => {
                ("was lost: its process was stopped and did not go on".to_owned(), EXIT_PEER_LOST.into())
            }
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
        // Whoever was killed did not come to say why.
        let killed = matches!(end.status.signal(), Some(libc::SIGKILL | SIGTERM));
        let last_lines = if killed { self.tail.error() } else { self.tail.report() };
        RankFailure { rank: self.rank, host: self.host.clone(), what, exit_code, lost: None, last_lines }
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

/// What brings one rank's streams to the user and to the loop, in a thread for each.
#[derive(Clone)]
struct Reporter {
    attempt: usize,
    rank: usize,
    label: String,
    news: Sender<News>,
}

impl Reporter {
    /// Lines of text.
    fn relay_lines(self, stream: impl Read + Send + 'static) {
        let Self { attempt, rank, label, news } = self;
        std::thread::spawn(move || {
            relay(stream, &label, &mut std::io::stderr(), &news, |line| News::Line { attempt, rank, line });
            let _ = news.send(News::StreamEnded { attempt });
        });
    }

    /// Rank 0's output, as far as it was not delivered already. If nobody reads ours any more, rank 0 is to find that out.
    fn deliver(self, stream: impl Read + Send + 'static, delivered: Arc<AtomicU64>) {
        std::thread::spawn(move || {
            let _ = continue_copy(stream, &mut std::io::stdout(), &delivered);
            let _ = self.news.send(News::StreamEnded { attempt: self.attempt });
        });
    }
}

/// Tells a rank on another machine that its launcher lives and is in reach, until its control channel is closed.
fn beat(control: &Control) {
    let open = || {
        let mut control = control.lock().unwrap_or_else(PoisonError::into_inner);
        control.as_mut().is_some_and(|pipe| pipe.write_all(control::HEARTBEAT.as_bytes()).is_ok())
    };
    while open() {
        std::thread::sleep(control::HEARTBEAT_EVERY);
    }
}

/// Sends this process's standard input to rank 0, line by line.
fn forward_input(console: &Console) {
    let mut line = Vec::new();
    let mut input = std::io::stdin().lock();
    while matches!(input.read_until(b'\n', &mut line), Ok(1..)) {
        let text = String::from_utf8_lossy(&line);
        console.send(&control::encode_line(text.trim_end_matches('\n')));
        line.clear();
    }
    console.send(control::END_OF_INPUT);
}
