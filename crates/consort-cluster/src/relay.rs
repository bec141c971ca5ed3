//! What ranks write, on its way to the user: whole lines, each with the name of the rank that wrote it.
//!
//! A thread per stream does the writing, so that a terminal that takes no output cannot keep the supervisor from its work.

use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;

use crate::journal::is_record;

/// A rank that cannot go on says why in one last line that begins so. It is not relayed: the supervisor reports the failure of
/// the rank that is to blame, and the failures that followed from it would only hide it.
const ERROR_PREFIX: &str = "error: ";

/// What is wrong, if the line is a last one: a rank's own, or that of an ssh client that did not reach one.
fn last_word(line: &str) -> Option<&str> {
    let is_from_ssh = line.starts_with("ssh: ")
        || line.ends_with("Host key verification failed.")
        || (line.contains(": Permission denied (") && line.ends_with(")."));
    line.strip_prefix(ERROR_PREFIX).or(is_from_ssh.then_some(line))
}

/// A line longer than this is relayed in parts, so that a rank that never ends its line cannot take the launcher's memory.
const LONGEST_LINE_BYTES: u64 = 64 * 1024;

/// Lines of a rank that are kept for the report of its failure.
const KEPT_LINES: usize = 5;

/// What a rank said last.
#[derive(Default)]
pub(crate) struct Tail {
    error: Option<String>,
    lines: VecDeque<String>,
}

impl Tail {
    pub(crate) fn push(&mut self, line: &str) {
        match last_word(line) {
            // What else goes wrong after the first error goes wrong because of it.
            Some(error) => {
                self.error.get_or_insert_with(|| error.to_owned());
            }
            None => {
                self.lines.truncate(KEPT_LINES - 1);
                self.lines.push_front(line.to_owned());
            }
        }
    }

    /// The rank's own error where it gave one, otherwise its last lines.
    pub(crate) fn report(&self) -> Vec<String> {
        match &self.error {
            Some(error) => vec![error.clone()],
            None => self.lines.iter().rev().cloned().collect(),
        }
    }

    /// The rank's own error alone, for one that was ended from outside: what it happened to say before explains nothing.
    pub(crate) fn error(&self) -> Vec<String> {
        self.error.iter().cloned().collect()
    }
}

/// Copies the lines of `stream` to `terminal`, each after `label`, and to `heard`, until the stream ends.
pub(crate) fn relay<E>(
    stream: impl Read,
    label: &str,
    terminal: &mut impl Write,
    heard: &Sender<E>,
    event: impl Fn(String) -> E,
) {
    let mut stream = BufReader::new(stream);
    let mut bytes = Vec::new();
    while matches!(stream.by_ref().take(LONGEST_LINE_BYTES).read_until(b'\n', &mut bytes), Ok(1..)) {
        let text = String::from_utf8_lossy(&bytes);
        let line = text.trim_end_matches(['\n', '\r']);
        if last_word(line).is_none() && !is_record(line) {
            // One call per line keeps lines of different ranks whole. A closed terminal is no reason to stop listening.
            let _ = terminal.write_all(format!("{label}{line}\n").as_bytes());
        }
        let _ = heard.send(event(line.to_owned()));
        bytes.clear();
    }
}

/// Copies `stream` to `output` from where earlier copies of the same bytes have got to, and keeps count in `delivered`: what a
/// rank says again after it was started again is not shown twice.
pub(crate) fn continue_copy(mut stream: impl Read, output: &mut impl Write, delivered: &AtomicU64) -> io::Result<()> {
    let (mut position, mut chunk) = (0, vec![0; 64 * 1024]);
    loop {
        let count = match stream.read(&mut chunk) {
            Ok(0) => return Ok(()),
            Ok(count) => count as u64,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        let known = delivered.load(Ordering::SeqCst).saturating_sub(position).min(count);
        output.write_all(&chunk[known as usize..count as usize])?;
        output.flush()?;
        position += count;
        delivered.fetch_max(position, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_are_kept_in_order_and_an_error_replaces_them() {
        let mut tail = Tail::default();
        (0..8).for_each(|line| tail.push(&line.to_string()));
        assert_eq!(tail.report(), ["3", "4", "5", "6", "7"]);
        tail.push("error: disk full");
        tail.push("error: cannot say goodbye");
        tail.push("afterwards");
        assert_eq!(tail.report(), ["disk full"]);
    }

    #[test]
    fn what_ssh_says_last_is_kept_for_the_report() {
        for said in [
            "ssh: connect to host m2 port 22: Connection refused",
            "user@m2: Permission denied (publickey,password).",
            "Host key verification failed.",
        ] {
            let (sender, heard) = std::sync::mpsc::channel();
            let mut terminal = Vec::new();
            relay(format!("Banner\n{said}\n").as_bytes(), "[rank 1 m2] ", &mut terminal, &sender, |line| line);
            assert_eq!(terminal, b"[rank 1 m2] Banner\n");
            let mut tail = Tail::default();
            heard.try_iter().for_each(|line| tail.push(&line));
            assert_eq!(tail.report(), [said]);
        }
    }

    #[test]
    fn a_line_without_an_end_is_relayed_in_parts() {
        let (sender, heard) = std::sync::mpsc::channel();
        let (endless, mut terminal) = (std::io::repeat(b'x').take(2 * LONGEST_LINE_BYTES + 1), Vec::new());
        relay(endless, "[rank 1] ", &mut terminal, &sender, |line| line.len() as u64);
        assert_eq!(heard.try_iter().collect::<Vec<_>>(), [LONGEST_LINE_BYTES, LONGEST_LINE_BYTES, 1]);
        assert!(terminal.ends_with(b"x\n[rank 1] x\n"));
    }

    #[test]
    fn what_was_said_before_is_not_said_again() {
        let (mut output, delivered) = (Vec::new(), AtomicU64::new(0));
        for said in ["once upon", "once", "once upon a time", "once upon a time"] {
            continue_copy(said.as_bytes(), &mut output, &delivered).unwrap();
        }
        assert_eq!(output, b"once upon a time");
    }
}
