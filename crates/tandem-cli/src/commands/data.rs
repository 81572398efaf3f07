//! `tandem data`: rows as the model sees them, and counts of dropped rows.

use serde_json::{Map, Value, json};
use tandem_data::show::{ShowOptions, show_pair, show_prompt, show_scored, show_unpaired};
use tandem_data::tokenizer::Tokenizer;
use tandem_hub::ModelFiles;
use tandem_train::TrainError;
use tandem_train::inputs::RunInputs;
use tandem_train::recipe::{self, DatasetRow};

use crate::args::DataArguments;
use crate::exit::{Exit, mistake};
use crate::hub;
use crate::output::{has_colours, print_lines};
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
    if arguments.from >= cache.num_rows() && cache.num_rows() > 0 {
        let rows = cache.num_rows();
        return Err(mistake(format!("--from {}: there are {rows} rows, counted from 0", arguments.from)));
    }
    let options = ShowOptions { color: has_colours(), ids: arguments.ids, limit: arguments.limit };

    let recipe = recipe::for_method(config.method);
    let rows = (0..cache.num_rows()).skip(arguments.from).take(arguments.rows);
    if arguments.json {
        let lines = rows.map(|row| {
            let object = row_object(&recipe.row(cache, row), &prepared.tokenizer)?;
            let place =
                [("place".to_owned(), cache.origin(row).to_string().into()), ("row".to_owned(), row.into())];
            Ok(Value::Object(place.into_iter().chain(object).collect()).to_string())
        });
        print_lines(&lines.collect::<anyhow::Result<Vec<_>>>()?)?;
        return Ok(Exit::Done);
    }
    let mut lines = cache.report_lines();
    for row in rows {
        lines.push(format!("\n{}", cache.origin(row)));
        let shown = match recipe.row(cache, row) {
            DatasetRow::Pair(pair) => show_pair(&prepared.tokenizer, &pair, options),
            DatasetRow::Unpaired(row) => show_unpaired(&prepared.tokenizer, &row, options),
            DatasetRow::Scored(row) => show_scored(&prepared.tokenizer, &row, options),
            DatasetRow::Prompt(tokens) => show_prompt(&prepared.tokenizer, tokens, options),
        };
        lines.extend(shown.map_err(TrainError::from)?);
    }
    print_lines(&lines)?;
    Ok(Exit::Done)
}

/// A row's parts, each with its text and ids; of a supervised row also which tokens are trained.
fn row_object(row: &DatasetRow<'_>, tokenizer: &Tokenizer) -> anyhow::Result<Map<String, Value>> {
    let part = |tokens: &[u32]| -> anyhow::Result<Value> {
        Ok(json!({ "text": tokenizer.decode(tokens, false)?, "tokens": tokens }))
    };
    let mut object = Map::new();
    match row {
        DatasetRow::Pair(pair) => {
            let [prompt, other] = pair.prompts();
            object.insert("prompt".to_owned(), part(prompt)?);
            object.insert("chosen".to_owned(), part(pair.chosen)?);
            if prompt.len() != other.len() {
                object.insert("prompt_of_rejected".to_owned(), part(other)?);
            }
            object.insert("rejected".to_owned(), part(pair.rejected)?);
        }
        DatasetRow::Unpaired(row) => {
            object.insert("prompt".to_owned(), part(row.prompt)?);
            object.insert("completion".to_owned(), part(row.completion)?);
            object.insert("label".to_owned(), row.label.into());
        }
        DatasetRow::Scored(row) => {
            object.insert("sequence".to_owned(), part(row.tokens)?);
            // Nothing predicts the first token.
            let is_trained = |(index, scored): (usize, &u8)| Value::from(index > 0 && *scored != 0);
            object.insert("trained".to_owned(), row.scored.iter().enumerate().map(is_trained).collect());
        }
        DatasetRow::Prompt(tokens) => drop(object.insert("prompt".to_owned(), part(tokens)?)),
    }
    Ok(object)
}
