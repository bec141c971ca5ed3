//! The commands, one file each.

mod bench;
mod chat;
mod convert;
mod demo;
mod doctor;
mod generate;
mod inspect;
mod key;
mod launch;
mod logits;
mod netbench;
mod pull;
mod version;

use std::ffi::OsString;

use anyhow::{Result, bail};
use clap::error::ErrorKind;
use clap::{Parser, Subcommand};

use crate::error::{EXIT_USAGE, usage_line};
use crate::invocation::Invocation;
use crate::output;

/// Runs one large language model on several machines.
#[derive(Parser)]
#[command(name = "consort", version, about, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Fetch a small model and let it answer with one rank, a pipeline of two and two shards
    Demo(demo::Demo),
    /// Fetch a model and check it
    Pull(pull::Pull),
    /// Show what a model's files hold, and what each rank of a plan would
    Inspect(inspect::Inspect),
    /// Write a model in another number format
    Convert(convert::Convert),
    /// Continue a prompt
    Generate(generate::Generate),
    /// Talk with a model
    Chat(chat::Chat),
    /// Print the logits at every position of a prompt, for comparisons
    Logits(logits::Logits),
    /// Measure time to first token, prefill and decode
    Bench(bench::Bench),
    /// Run one of generate, chat, logits and bench on the machines of a hostfile
    Launch(launch::Launch),
    /// Find out whether hosts and links work, how fast they are, and what to do about those that do not
    Doctor(doctor::Doctor),
    /// Measure the collectives between ranks
    Netbench(netbench::Netbench),
    /// Make a cluster key
    Key(key::Key),
    /// Show the version and what this build can use
    Version(version::Version),
}

/// Reads the command line and runs the command.
pub fn run() -> Result<()> {
    let invocation = Invocation::new()?;
    let Some(cli) = parse(std::env::args_os())? else { return Ok(()) };
    match cli.command {
        Command::Demo(command) => command.run(&invocation),
        Command::Pull(command) => command.run(),
        Command::Inspect(command) => command.run(),
        Command::Convert(command) => command.run(),
        Command::Launch(command) => command.run(invocation),
        Command::Version(command) => command.run(),
        Command::Doctor(command) => command.run(),
        Command::Netbench(command) => command.run(invocation),
        Command::Key(command) => command.run(),
        other => other.run_on_ranks(&invocation),
    }
}

/// Reads a command line. None where help was asked for and has been shown; a mistake ends the process.
fn parse(words: impl Iterator<Item = OsString>) -> Result<Option<Cli>> {
    match Cli::try_parse_from(words) {
        Ok(cli) => Ok(Some(cli)),
        Err(error) => match error.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
                output::help(&error)?;
                Ok(None)
            }
            ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => error.exit(),
            _ => {
                eprintln!("{}", usage_line(&error));
                std::process::exit(EXIT_USAGE.into())
            }
        },
    }
}

impl Command {
    /// The commands that work on one rank or several.
    fn run_on_ranks(self, invocation: &Invocation) -> Result<()> {
        match self {
            Self::Generate(command) => command.run(invocation),
            Self::Chat(command) => command.run(invocation),
            Self::Logits(command) => command.run(invocation),
            Self::Bench(command) => command.run(invocation),
            _ => bail!("only generate, chat, logits and bench run on several machines"),
        }
    }
}
