//! `tandem train`: config, plan, run.

use std::sync::atomic::AtomicBool;

use tandem_train::Config;
use tandem_train::ranks;
use tandem_train::run_dir::Start;
use tandem_train::trainer::Outcome;

use crate::args::TrainArguments;
use crate::exit::Exit;
use crate::signals;
use crate::watcher::Watcher;

pub fn run(arguments: &TrainArguments) -> anyhow::Result<Exit> {
    super::refuse_several_ranks()?;
    let config = Config::load(&arguments.run.config, &arguments.run.overrides)?;
    let start = match (arguments.resume, arguments.overwrite) {
        (true, _) => Start::Resume,
        (_, true) => Start::Overwrite,
        _ => Start::Fresh,
    };
    let stop = signals::stop_flag()?;
    train(&config, start, &mut Watcher::every(1), &stop)
}

/// Trains until the end, or until `stop` is set, and saves.
pub fn train(
    config: &Config,
    start: Start,
    watcher: &mut Watcher,
    stop: &AtomicBool,
) -> anyhow::Result<Exit> {
    Ok(match ranks::train(config, start, watcher, stop)? {
        Outcome::Finished(_) => Exit::Done,
        Outcome::Stopped(_) => Exit::Interrupted,
    })
}
