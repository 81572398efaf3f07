//! `tandem checkpoint`: checkpoints as models.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::Context;
use tandem_model::is_checkpoint;
use tandem_train::{Config, checkpoint};

use crate::args::{CheckpointArguments, CheckpointCommand};
use crate::exit::{Exit, mistake};
use crate::output::print_lines;

pub(crate) fn run(arguments: &CheckpointArguments) -> anyhow::Result<Exit> {
    let CheckpointCommand::Export { checkpoint, out, config } = &arguments.command;
    if !is_checkpoint(checkpoint) {
        return Err(mistake(format!(
            "{} is no checkpoint: give a folder step-… of a run's checkpoints, with manifest.json and cursor.json",
            checkpoint.display()
        )));
    }
    if out.exists() {
        return Err(mistake(format!("--out: {} already exists; give a new folder", out.display())));
    }
    let is_among = |folder: &Path| folder.canonicalize().is_ok_and(|folder| folder.ends_with("checkpoints"));
    if out.parent().is_some_and(is_among) && checkpoint.parent().is_some_and(is_among) {
        return Err(mistake(format!(
            "--out: {} would be among the checkpoints of a run; give a folder elsewhere",
            out.display()
        )));
    }
    let config = run_config(checkpoint, config.as_deref())?;
    let num_parameters = checkpoint::export(&config, checkpoint, out)?;
    print_lines(&[format!("{}: {num_parameters} parameters", out.display())])?;
    Ok(Exit::Done)
}

/// Returns the folder `model` of a checkpoint, made now unless another command has made it.
pub(crate) fn model_of(folder: &Path) -> anyhow::Result<PathBuf> {
    let made = folder.join("model");
    if made.exists() {
        return Ok(made);
    }
    // Commands that begin together would write it side by side. Some file systems have no locks.
    let lock = File::open(folder).ok().filter(|folder| folder.lock().is_ok());
    if made.exists() {
        return Ok(made);
    }
    tracing::info!("making a model of the checkpoint: {}", made.display());
    let exported =
        run_config(folder, None).and_then(|config| Ok(checkpoint::export(&config, folder, &made)?));
    drop(lock);
    if let Err(error) = exported {
        if !is_checkpoint(folder) {
            return Err(mistake(format!(
                "{} was deleted meanwhile: its run keeps only the newest checkpoints (train.keep); give another one",
                folder.display()
            )));
        }
        return Err(error.context(format!(
            "cannot make {}; `tandem checkpoint export` takes another folder",
            made.display()
        )));
    }
    Ok(made)
}

/// Reads the configuration of a checkpoint's run.
fn run_config(checkpoint: &Path, given: Option<&Path>) -> anyhow::Result<Config> {
    if let Some(given) = given {
        return Ok(Config::load::<&str>(given, &[])?);
    }
    let absolute = std::path::absolute(checkpoint).context("cannot find this folder")?;
    let path = absolute.parent().and_then(Path::parent).map(|run| run.join("config.toml"));
    let Some(path) = path.filter(|path| path.is_file()) else {
        return Err(mistake(format!(
            "{} does not lie in checkpoints/ of a run's folder with config.toml: give the run's configuration with \
             `tandem checkpoint export --config`",
            checkpoint.display()
        )));
    };
    Ok(Config::load::<&str>(&path, &[])?)
}
