//! `tandem data`: rows as the model sees them, and what became of those it does not see.

use std::io::IsTerminal;

use tandem_data::show::{ShowOptions, show_pair, show_scored};
use tandem_train::Config;
use tandem_train::config::Method;
use tandem_train::prepare::Prepared;

use crate::args::DataArguments;
use crate::exit::{Exit, mistake};
use crate::watcher::Watcher;

pub fn run(arguments: &DataArguments) -> anyhow::Result<Exit> {
    let config = Config::load(&arguments.run.config, &arguments.run.overrides)?;
    let mut watcher = Watcher::every(1);
    let prepared = Prepared::open(&config, &mut watcher)?;
    watcher.finish();
    let cache = match (&prepared.eval, arguments.eval) {
        (Some(eval), true) => eval,
        (None, true) => return Err(mistake("data.eval names no held-out rows")),
        (_, false) => &prepared.train,
    };
    let color = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let options = ShowOptions { color, ids: arguments.ids, limit: arguments.limit };

    for line in cache.report_lines() {
        println!("{line}");
    }
    for row in (0..cache.num_rows()).skip(arguments.from).take(arguments.rows) {
        println!("\n{}", cache.origin(row));
        let lines = match config.method {
            Method::Dpo => show_pair(&prepared.tokenizer, &cache.pair(row), options),
            Method::Sft => show_scored(&prepared.tokenizer, &cache.scored(row), options),
        };
        for line in lines.map_err(tandem_train::TrainError::from)? {
            println!("{line}");
        }
    }
    Ok(Exit::Done)
}
