//! `tandem config`: explanation of keys, the resolved file, and the JSON schema.

use tandem_hub::ModelFiles;
use tandem_train::config::{explain, json_schema};

use crate::args::{ConfigArguments, ConfigCommand};
use crate::exit::{Exit, mistake};
use crate::hub;
use crate::output::print_lines;

pub(crate) fn run(arguments: &ConfigArguments) -> anyhow::Result<Exit> {
    let text = match &arguments.command {
        Some(ConfigCommand::Show(run)) => {
            hub::config(&run.config, &run.overrides, ModelFiles::WithoutWeights)?.to_toml()
        }
        Some(ConfigCommand::Schema) => format!("{:#}", json_schema()),
        None => {
            let texts: Result<Vec<_>, _> = arguments.keys.iter().map(|key| explain(key)).collect();
            texts.map_err(|problem| mistake(problem.to_string()))?.join("\n\n")
        }
    };
    print_lines(&[text.trim_end().to_owned()])?;
    Ok(Exit::Done)
}
