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
    print_lines(&[Plan::make(&config, &prepared, 0, config.compute.devices.num_ranks())?.to_string()])?;
    Ok(Exit::Done)
}
