//! The `tandem` command, as a library with two doors: [`main`] for the program, and [`Requests`] for tests with hostile requests.
//!
//! `args` defines the command line, `commands` has one file per subcommand, `exit` decides the exit
//! code.

#![warn(unreachable_pub)]

mod agent;
mod args;
mod closing;
mod commands;
mod exit;
mod generation;
mod hub;
mod json_events;
mod log;
mod output;
mod page;
mod processes;
mod quickstart;
mod run_folder;
mod shell;
mod signals;
mod step_line;
mod watcher;

use std::process::ExitCode;

use clap::Parser;

use crate::args::{Arguments, Command};
use crate::exit::Exit;

pub use crate::commands::serve::Requests;

/// Runs the command of the process's arguments.
pub fn main() -> ExitCode {
    signals::end_with_launcher();
    signals::survive_file_limit();
    let arguments = Arguments::parse();
    arguments.log.begin();
    // A panic is a broken invariant of ours; its message is printed already.
    let exit = match std::panic::catch_unwind(|| run(arguments)) {
        Ok(Ok(exit)) => exit,
        Ok(Err(error)) => Exit::from_error(&exit::tell(error)),
        Err(_) => Exit::OwnFault,
    };
    exit.into()
}

fn run(arguments: Arguments) -> anyhow::Result<Exit> {
    if !matches!(arguments.command, Command::Train(_) | Command::Launch(_)) {
        commands::refuse_several_ranks()?;
    }
    match arguments.command {
        Command::Train(train) => commands::train::run(&train, arguments.log),
        Command::Plan(arguments) => commands::plan::run(&arguments),
        Command::Config(arguments) => commands::config::run(&arguments),
        Command::Data(arguments) => commands::data::run(&arguments),
        Command::Eval(arguments) => commands::eval::run(&arguments),
        Command::Runs(arguments) => commands::runs::run(&arguments),
        Command::Watch(arguments) => commands::watch::run(&arguments),
        Command::Report(arguments) => commands::report::run(&arguments),
        Command::Generate(arguments) => commands::generate::run(&arguments),
        Command::Chat(arguments) => commands::chat::run(&arguments),
        Command::Serve(arguments) => commands::serve::run(&arguments),
        Command::Merge(arguments) => commands::merge::run(&arguments),
        Command::Export(arguments) => commands::export::run(&arguments),
        Command::Checkpoint(arguments) => commands::checkpoint::run(&arguments),
        Command::Verify(arguments) => Ok(commands::verify::run(&arguments)),
        Command::Init(arguments) => commands::init::run(&arguments),
        Command::InitWeights(arguments) => commands::init_weights::run(&arguments),
        Command::Launch(launch) => commands::launch::run(&launch, arguments.log),
        Command::Doctor(arguments) => commands::doctor::run(&arguments),
        Command::Completions(arguments) => commands::manual::completions(&arguments),
        Command::Man(arguments) => commands::manual::pages(&arguments),
        Command::Quickstart(arguments) => quickstart::run(&arguments),
    }
}
