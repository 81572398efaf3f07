//! A recorded config, placed on this machine.

use crate::Result;
use crate::config::{AttentionKernels, Config, Devices, Engine};
use crate::placement::gpus;
use crate::run::provenance::Start;
use crate::run::verify::Request;

/// Returns the config of the recomputation: in its own folders, without trackers, on the devices that were
/// asked for, else on as many ranks as the run had.
pub(super) fn placed(
    mut config: Config,
    recorded: &Config,
    start: &Start,
    request: &Request,
) -> Result<Config> {
    let is_given = |key: &str| request.overridden.iter().any(|given| given == key);
    config.output.clone_from(&request.scratch);
    if !is_given("data.cache") {
        config.data.cache = Some(request.scratch.join("cache"));
    }
    (config.logging.tensorboard, config.logging.mlflow) = (None, None);
    config.logging.command.clear();
    // Nobody chose a name that trackers would have; without them it would be told to have no effect.
    if let Some(name) = request.scratch.file_name() {
        config.logging.run = name.to_string_lossy().into_owned();
    }
    // The checkpoints are deleted when they were compared, and nobody reads the rows.
    (config.train.keep, config.train.record_rows) = (None, false);
    let compute = &mut config.compute;
    // "auto" is another type on another machine.
    compute.dtype = compute.dtype.or_else(|| start.dtype());
    // A timing may choose otherwise.
    if compute.attention == AttentionKernels::Auto {
        compute.attention = start.attention();
    }
    if !is_given("compute.engine") {
        compute.engine = Engine::Auto;
    }
    if !is_given("compute.threads") {
        compute.threads = None;
    }
    if !is_given("compute.memory") {
        compute.memory = None;
    }
    if compute.offload_dir.is_some() && !is_given("compute.offload_dir") {
        compute.offload_dir = Some(request.scratch.clone());
    }
    if !is_given("compute.devices") && !start.is_on_gpus() {
        compute.devices = Devices::Cpu(start.ranks);
    }
    gpus::resolve(compute)?;
    // Groups and stages that these ranks cannot form are left out; the bits are the same without.
    let num_ranks = compute.devices.num_ranks();
    let is_divided = |config: &Config| {
        let compute = &config.compute;
        num_ranks.is_multiple_of(compute.replicate * compute.pipeline * compute.tensor)
    };
    if !is_divided(&config) && !is_given("compute.replicate") {
        config.compute.replicate = 1;
    }
    if !is_divided(&config) && !is_given("compute.pipeline") {
        config.compute.pipeline = 1;
    }
    if !is_divided(&config) && !is_given("compute.tensor") {
        let mut whole = config.clone();
        whole.compute.tensor = 1;
        let changes = whole.changes_since(recorded);
        if !changes.iter().any(|change| change.key == "compute.tensor" && change.alters_run) {
            config = whole;
        }
    }
    Ok(config)
}
