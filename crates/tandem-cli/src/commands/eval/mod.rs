//! `tandem eval`: the metrics of the held-out rows as one JSON object on stdout.

use tandem_train::Config;
use tandem_train::evaluation::evaluate;

use crate::args::EvalArguments;
use crate::exit::Exit;
use crate::output::print_lines;
use crate::watcher::Watcher;

pub fn run(arguments: &EvalArguments) -> anyhow::Result<Exit> {
    super::refuse_several_ranks()?;
    let config = Config::load(&arguments.run.config, &arguments.run.overrides)?;
    let mut watcher = Watcher::every(1);
    let record = evaluate(&config, arguments.checkpoint.as_deref(), &mut watcher)?;
    watcher.finish();
    print_lines(&[record.to_json()])?;
    Ok(Exit::Done)
}
