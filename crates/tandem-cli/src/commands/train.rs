//! `tandem train`: config, plan, run.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use tandem_comm::{Launch, LocalRanks};
use tandem_hub::ModelFiles;
use tandem_train::run::run_dir::RunDirPolicy;
use tandem_train::run::{Outcome, spawn};
use tandem_train::{Config, Options};

use crate::args::{LaunchArguments, TrainArguments};
use crate::exit::Exit;
use crate::log::LogArguments;
use crate::watcher::Watcher;
use crate::{hub, processes, signals};

pub(crate) fn run(arguments: &TrainArguments, log: LogArguments) -> anyhow::Result<Exit> {
    let launch = Launch::detect()?;
    // A single process starts all local ranks.
    if let LocalRanks::Count(ranks) = launch.ranks_here
        && ranks > 1
    {
        return super::launch::run(
            &LaunchArguments::for_ranks(&launch, ranks, std::env::args().skip(1).collect()),
            log,
        );
    }
    let config = hub::config(&arguments.run.config, &arguments.overrides()?, ModelFiles::Whole)?;
    let start = match (arguments.resume, arguments.overwrite) {
        (true, _) => RunDirPolicy::Resume,
        (_, true) => RunDirPolicy::Overwrite,
        _ => RunDirPolicy::Fresh,
    };
    let options = Options { profile: arguments.profile, ..Options::from(start) };
    // Processes meet first, and tell one another that they stop.
    let at_once = Arc::new(AtomicBool::new(!launch.is_distributed()));
    let stop = signals::stop_flag_of_run(&at_once)?;
    let save = signals::save_flag()?;
    let watcher = Watcher::every(1).kept_for(&config).printing_json(arguments.json);
    let watcher = &mut watcher.saving_on(save).saving_after(at_once);
    if launch.is_distributed() {
        return Ok(exit(&processes::train(&launch, config, options, watcher, &stop)?));
    }
    train(&config, options, watcher, &stop)
}

/// Trains until the end, or until `stop` is set, and saves.
pub(crate) fn train(
    config: &Config,
    options: impl Into<Options>,
    watcher: &mut Watcher,
    stop: &AtomicBool,
) -> anyhow::Result<Exit> {
    Ok(exit(&spawn::train(config, options, watcher, stop)?))
}

fn exit(outcome: &Outcome) -> Exit {
    match outcome {
        Outcome::Finished(_) => Exit::Done,
        Outcome::Stopped(_) => Exit::Interrupted,
    }
}
