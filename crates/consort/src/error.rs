//! From an error to one clear line and an exit code.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::io;
use std::process::ExitCode;

use consort_cluster::{ClusterError, EXIT_PEER_LOST};
use consort_engine::EngineError;
use consort_fabric::FabricError;
use consort_models::ModelError;

/// The exit code of a command line that cannot be understood.
pub const EXIT_USAGE: u8 = 2;

/// Prints the error and chooses the exit code. A reader that closed our standard output has seen enough: that is no failure.
pub fn finish(failure: &anyhow::Error) -> ExitCode {
    if failure.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe) {
        return ExitCode::SUCCESS;
    }
    eprintln!("error: {}", one_line(&format!("{failure:#}")));
    let code = if let Some(error) = failure.downcast_ref::<ClusterError>() {
        error.exit_code()
    } else if failure.downcast_ref().is_some_and(is_witness) || failure.downcast_ref().is_some_and(is_loss) {
        EXIT_PEER_LOST
    } else {
        1
    };
    ExitCode::from(code)
}

/// Text from files and peers with its control characters written out: it can neither break the line nor steer a terminal.
fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for character in text.chars() {
        match character.is_control() {
            true => line.extend(character.escape_default()),
            false => line.push(character),
        }
    }
    line
}

/// Whether this rank failed only because another one did.
pub fn is_witness(error: &EngineError) -> bool {
    matches!(error, EngineError::Fabric(error) | EngineError::Model(ModelError::Fabric(error)) if is_loss(error))
}

fn is_loss(error: &FabricError) -> bool {
    use FabricError::{Aborted, Deadline, Missing, PeerLost, Refused, Unreachable};
    matches!(
        error,
        PeerLost { .. } | Aborted { .. } | Deadline { .. } | Missing { .. } | Refused { .. } | Unreachable { .. }
    )
}

/// Makes of a panic what it is, a defect of this program, in one line; with `RUST_BACKTRACE=1` a backtrace follows. One that a
/// model's tokenizer causes in a library becomes an error that names the file.
pub fn report_panics() {
    std::panic::set_hook(Box::new(|panic| {
        if consort_checkpoint::tokenizer::is_guarded() {
            return;
        }
        let place = panic.location().map(|place| format!(" at {place}")).unwrap_or_default();
        let message = panic.payload_as_str().unwrap_or("no message").replace('\n', " ");
        eprintln!("error: internal error{place}: {message}; this is a defect of consort, please report it");
        let backtrace = Backtrace::capture();
        if backtrace.status() == BacktraceStatus::Captured {
            eprintln!("{backtrace}");
        }
    }));
}

/// Puts clap's message, which it spreads over several lines, on one.
pub fn usage_line(error: &clap::Error) -> String {
    let message = error.to_string();
    let lines = message.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:"));
    let kept: Vec<&str> = lines.filter(|line| !line.is_empty() && !line.starts_with("For more information")).collect();
    kept.join(" ")
}

#[cfg(test)]
mod tests {
    use super::one_line;

    #[test]
    fn control_characters_are_written_out() {
        assert_eq!(one_line("a\u{1b}[31m\nerror: é"), "a\\u{1b}[31m\\nerror: é");
    }
}
