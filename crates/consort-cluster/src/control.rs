//! The control channel: a rank's standard input, held open by its launcher for as long as the launcher lives.
//!
//! A pipe closes when its last writer dies, however that happens, and ssh passes the closing on. So the end of the channel
//! is the one reliable sign, on every host, that a rank has nobody left to work for. Since the channel occupies standard
//! input, it also carries what the user types, one line each: `=text` is a line of input, `.` is the end of the input. Where the
//! run has a cluster key, the first line is the key: nothing else that reaches a remote process is hidden from its neighbours.
//! Where rank 0 can be started again, its next line is what the run has generated so far ([`Replay`]).
//!
//! A connection whose cable was pulled does not close. So to ranks on other machines the launcher also sends a line every two
//! seconds that says nothing, and a rank that hears nothing for ten ends.

use std::io::{BufRead, BufReader, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use consort_fabric::ClusterKey;

use crate::journal::{Journal, Replay};

/// Set in a rank whose standard input is a control channel; a rank started by other means may have none. Its value names the
/// channel and the lines that it begins with: `stdin+key+journal`.
pub(crate) const CONTROL: &str = "CONSORT_CONTROL";
const STDIN: &str = "stdin";
const KEY: &str = "key";
const JOURNAL: &str = "journal";
const HEARTBEATS: &str = "heartbeats";
const TERMINAL: &str = "terminal";

/// The variable's value.
pub(crate) fn control_value(key: bool, journal: bool, heartbeats: bool, terminal: bool) -> String {
    let words = [(STDIN, true), (KEY, key), (JOURNAL, journal), (HEARTBEATS, heartbeats), (TERMINAL, terminal)];
    let words = words.into_iter().filter(|(_, is_there)| *is_there);
    words.map(|(word, _)| word).collect::<Vec<_>>().join("+")
}

/// The line that says nothing.
pub(crate) const HEARTBEAT: &str = "~\n";
/// Between two of them.
pub(crate) const HEARTBEAT_EVERY: Duration = Duration::from_secs(2);
/// Silence after which the launcher, or the way to it, counts as gone.
const SILENCE: Duration = Duration::from_secs(10);

/// The exit code of a rank whose launcher is gone. Nobody is left to read it, except in a log of the host.
const EXIT_LAUNCHER_LOST: i32 = 129;

/// A rank's end of the channel.
pub struct ControlChannel {
    input: Receiver<String>,
    key: Option<ClusterKey>,
    replay: Option<Replay>,
    terminal: bool,
}

impl ControlChannel {
    /// Begins to watch the channel that the launcher opened; from now on the process ends when the launcher does.
    /// `None` when this process has no launcher. Call it once, before the first long piece of work.
    pub fn open() -> Option<Self> {
        let value = std::env::var(CONTROL).ok()?;
        let words: Vec<&str> = value.split('+').collect();
        if words[0] != STDIN {
            return None;
        }
        let mut stdin = BufReader::new(std::io::stdin());
        let key = words.contains(&KEY).then(|| receive_key(&mut stdin)).flatten();
        let replay = words.contains(&JOURNAL).then(|| receive_journal(&mut stdin));
        let (sender, input) = channel();
        let heard = Arc::new(AtomicU64::new(0));
        if words.contains(&HEARTBEATS) {
            let heard = heard.clone();
            std::thread::spawn(move || {
                wait_for_silence(&heard);
                std::process::exit(EXIT_LAUNCHER_LOST);
            });
        }
        std::thread::spawn(move || {
            receive(stdin, sender, &heard);
            std::process::exit(EXIT_LAUNCHER_LOST);
        });
        Some(Self { input, key, replay, terminal: words.contains(&TERMINAL) })
    }

    /// Whether the launcher shows on a terminal what this rank writes, whatever this process's own output is: over ssh, and where rank 0
    /// can be started again, that is a pipe.
    pub fn is_terminal(&self) -> bool {
        self.terminal
    }

    /// The cluster key that the launcher handed over.
    pub fn key(&self) -> Option<&ClusterKey> {
        self.key.as_ref()
    }

    /// What this run has generated so far and has to go on with, where rank 0 can be started again.
    pub fn replay(&self) -> Option<&Replay> {
        self.replay.as_ref()
    }

    /// The next line that the user typed, without its end; `None` at the end of the input.
    pub fn next_line(&self) -> Option<String> {
        self.input.recv().ok()
    }
}

/// A line of input, as the launcher sends it.
pub(crate) fn encode_line(line: &str) -> String {
    format!("={line}\n")
}

/// The key, as the launcher sends it.
pub(crate) fn encode_key(key: &ClusterKey) -> String {
    format!("{}\n", key.to_hex())
}

/// The end of the input, as the launcher sends it.
pub(crate) const END_OF_INPUT: &str = ".\n";

/// Reads the first line of a channel that begins with a key.
fn receive_key(channel: &mut impl BufRead) -> Option<ClusterKey> {
    let mut line = String::new();
    // A key's digits and the line's end; something longer is no key.
    channel.take(128).read_line(&mut line).ok()?;
    ClusterKey::from_hex(&line)
}

/// Reads the line with what the run has generated.
fn receive_journal(channel: &mut impl BufRead) -> Replay {
    let mut line = String::new();
    // A launcher that is gone before it has said all is found out at the next read.
    let _ = channel.read_line(&mut line);
    Replay::new(Journal::decode(&line))
}

/// Returns when no line has come for too long.
fn wait_for_silence(heard: &AtomicU64) {
    let tick = Duration::from_secs(1);
    let (mut count, mut since, mut last_tick) = (0, Instant::now(), Instant::now());
    while since.elapsed() < SILENCE {
        std::thread::sleep(tick);
        let now = heard.load(Ordering::Relaxed);
        // If this very process was stopped, the silence means nothing.
        if now != count || last_tick.elapsed() > 3 * tick {
            (count, since) = (now, Instant::now());
        }
        last_tick = Instant::now();
    }
}

/// Reads the channel to its end, and counts its lines.
fn receive(mut channel: impl BufRead, input: Sender<String>, heard: &AtomicU64) {
    let mut input = Some(input);
    let mut line = Vec::new();
    while matches!(channel.read_until(b'\n', &mut line), Ok(1..)) {
        heard.fetch_add(1, Ordering::Relaxed);
        let text = String::from_utf8_lossy(&line);
        match text.trim_end_matches('\n').strip_prefix('=') {
            // A rank that does not read its input has dropped the receiver.
            Some(text) => drop(input.as_ref().map(|input| input.send(text.to_owned()))),
            None if text == HEARTBEAT => {}
            None => input = None,
        }
        line.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_arrive_as_typed_and_the_end_of_input_is_not_the_end_of_the_channel() {
        let sent =
            [&encode_line("hello"), HEARTBEAT, &encode_line(""), &encode_line("= . grüße\r"), END_OF_INPUT, "=late\n"]
                .concat();
        let (sender, input) = channel();
        receive(sent.as_bytes(), sender, &AtomicU64::new(0));
        assert_eq!(input.iter().collect::<Vec<_>>(), ["hello", "", "= . grüße\r"]);
    }

    #[test]
    fn a_key_comes_before_the_input_and_is_no_part_of_it() {
        let key = ClusterKey::from_hex(&"4f".repeat(32)).unwrap();
        let sent = encode_key(&key) + &encode_line("hello");
        let (mut channel, (sender, input)) = (sent.as_bytes(), channel());
        assert_eq!(receive_key(&mut channel), Some(key));
        receive(channel, sender, &AtomicU64::new(0));
        assert_eq!(input.iter().collect::<Vec<_>>(), ["hello"]);
        assert_eq!(receive_key(&mut "=hello\n".as_bytes()), None);
    }
}
