//! `tandem eval`: held-out metrics as one JSON object on stdout; with `--judge`, the win rate of a
//! model.

mod judged;
mod report;
mod side;
mod tally;

use tandem_hub::ModelFiles;
use tandem_train::run::evaluation::evaluate;

use crate::args::EvalArguments;
use crate::exit::{Exit, mistake};
use crate::hub;
use crate::output::print_lines;
use crate::watcher::Watcher;

pub(crate) fn run(arguments: &EvalArguments) -> anyhow::Result<Exit> {
    let EvalArguments { config, overrides, checkpoint, judged } = arguments;
    let Some(config) = config.as_ref().filter(|_| judged.judge.is_none()) else {
        if config.is_some() || !overrides.is_empty() || checkpoint.is_some() {
            let reason =
                "RUN.TOML, --set and --checkpoint apply to the held-out data of a run, not to --judge";
            return Err(mistake(format!("{reason}: leave out either")));
        }
        return judged::run(judged);
    };
    let config = hub::config(config, overrides, ModelFiles::Whole)?;
    let mut watcher = Watcher::every(1);
    let record = evaluate(&config, checkpoint.as_deref(), &mut watcher)?;
    watcher.finish();
    print_lines(&[record.to_json()])?;
    Ok(Exit::Done)
}
