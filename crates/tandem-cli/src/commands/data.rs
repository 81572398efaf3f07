//! `tandem data`: rows as the model sees them, and counts of dropped rows.

use std::io::IsTerminal;

use tandem_data::show::{ShowOptions, show_pair, show_prompt, show_scored};
use tandem_hub::ModelFiles;
use tandem_train::TrainError;
use tandem_train::inputs::RunInputs;
use tandem_train::recipe::{self, DatasetRow};

use crate::args::DataArguments;
use crate::exit::{Exit, mistake};
use crate::hub;
use crate::output::print_lines;
use crate::watcher::Watcher;

pub(crate) fn run(arguments: &DataArguments) -> anyhow::Result<Exit> {
    let config = hub::config(&arguments.run.config, &arguments.run.overrides, ModelFiles::WithoutWeights)?;
    let mut watcher = Watcher::every(1);
    let prepared = RunInputs::open(&config, &mut watcher)?;
    watcher.finish();
    let cache = match (&prepared.eval, arguments.eval) {
        (Some(eval), true) => eval,
        (None, true) => return Err(mistake("data.eval names no held-out rows")),
        (_, false) => &prepared.train,
    };
    let color = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let options = ShowOptions { color, ids: arguments.ids, limit: arguments.limit };

    let recipe = recipe::for_method(config.method);
    let mut lines = cache.report_lines();
    for row in (0..cache.num_rows()).skip(arguments.from).take(arguments.rows) {
        lines.push(format!("\n{}", cache.origin(row)));
        let shown = match recipe.row(cache, row) {
            DatasetRow::Pair(pair) => show_pair(&prepared.tokenizer, &pair, options),
            DatasetRow::Scored(row) => show_scored(&prepared.tokenizer, &row, options),
            DatasetRow::Prompt(tokens) => show_prompt(&prepared.tokenizer, tokens, options),
        };
        lines.extend(shown.map_err(TrainError::from)?);
    }
    print_lines(&lines)?;
    Ok(Exit::Done)
}
