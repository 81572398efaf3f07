//! `tandem plan`: what a run would put where, from a dry run.

use tandem_train::Config;
use tandem_train::plan::Plan;
use tandem_train::prepare::Prepared;

use crate::args::RunArguments;
use crate::exit::Exit;
use crate::output::print_lines;
use crate::watcher::Watcher;

pub fn run(arguments: &RunArguments) -> anyhow::Result<Exit> {
    let config = Config::load(&arguments.config, &arguments.overrides)?;
    let mut watcher = Watcher::every(1);
    let prepared = Prepared::open(&config, &mut watcher)?;
    watcher.finish();
    // The ranks of a stage need the same, those of another stage do not.
    let (tensor, pipeline) = (config.compute.tensor, config.compute.pipeline);
    for stage in 0..pipeline {
        let plan = Plan::make(&config, &prepared, stage * tensor, config.compute.devices.num_ranks())?;
        let gap = if stage > 0 { "\n" } else { "" };
        print_lines(&[format!("{gap}{plan}")])?;
    }
    Ok(Exit::Done)
}
