//! The command line of Consort. Thin: it reads flags, starts ranks or is one, and prints what the other crates found.

mod commands;
mod error;
mod flags;
mod invocation;
mod model;
mod network;
mod output;
mod progress;
mod report;
mod resume;
mod roofline;
mod run;

use std::process::ExitCode;

fn main() -> ExitCode {
    error::report_panics();
    match commands::run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => error::finish(&failure),
    }
}
