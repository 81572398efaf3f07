//! `tandem plan`: memory, time and fit of a run, from a dry run.

use std::path::Path;

use tandem_hub::ModelFiles;
use tandem_train::events::{Event, Observer};
use tandem_train::inputs::RunInputs;
use tandem_train::placement::{self, gpus};
use tandem_train::plan::advise::advice;
use tandem_train::plan::advise::search::search;
use tandem_train::plan::estimate::device::{DeviceKind, DeviceTable, Devices};
use tandem_train::plan::estimate::{Gpu, measure};
use tandem_train::plan::show::text::{best_of, rank_names, ranking};
use tandem_train::plan::{PlanInputs, RunPlan, SyntheticBatch};
use tandem_train::{Config, TrainError, chain, config, weights};

use crate::args::{PlanArguments, overrides};
use crate::commands::init::fresh;
use crate::exit::Exit;
use crate::hub;
use crate::output::{has_colours, print_lines, refuse_other_file};
use crate::watcher::Watcher;

/// Tokens of a micro-batch where there are no rows: the default of `train.micro_batch_tokens`.
const ASSUMED_TOKENS: usize = 4096;
/// Lines shown of a search.
const SHOWN: usize = 12;

pub(crate) fn run(arguments: &PlanArguments) -> anyhow::Result<Exit> {
    if let Some(file) = &arguments.measure {
        return measure(file);
    }
    let table = arguments.device_table.as_deref().map_or(Ok(DeviceTable::built_in()), DeviceTable::read)?;
    let overrides =
        overrides(&arguments.overrides, &[("--memory", "compute.memory", arguments.memory.as_deref())])?;
    // A plan reads configs and rows, no weights.
    let mut config = match (&arguments.model, &arguments.config) {
        (Some(model), _) => {
            let text = fresh::outline(model, arguments.method, arguments.train).to_toml();
            hub::config_text(&text, &overrides, ModelFiles::WithoutWeights)?
        }
        (None, Some(file)) => hub::config(file, &overrides, ModelFiles::WithoutWeights)?,
        (None, None) => unreachable!("clap asks for one of them"),
    };
    let asked = arguments.devices.as_deref().map(|text| table.devices(text)).transpose()?;
    let Devices { count, kind } = devices(&mut config, asked, &table)?;
    let kind = arguments.host_memory.into_iter().fold(kind, DeviceKind::with_host_memory);
    let devices = Devices { count, kind };
    let mut watcher = Watcher::every(1);
    match placement::check(&config.compute) {
        Ok(None) => {}
        Ok(Some(warning)) => watcher.event(&Event::Warning(&warning)),
        Err(error) if arguments.devices.is_none() => return Err(error.into()),
        Err(error) => watcher.event(&Event::Warning(&elsewhere(&error))),
    }
    if let Some(tokens) = arguments.assume_tokens.or(arguments.model.as_ref().map(|_| ASSUMED_TOKENS)) {
        let outline =
            PlanInputs::assume(&config, SyntheticBatch { tokens, scored: arguments.assume_scored })?;
        return show(arguments, &config, &outline, &devices);
    }
    weights::check_given(&config)?;
    let prepared = RunInputs::open(&config, &mut watcher)?;
    watcher.finish();
    show(arguments, &config, &PlanInputs::new(&prepared), &devices)
}

/// Returns the devices that are planned for, and sets those of the config: the `asked` ones, which may not
/// exist here, or those of the config.
pub(super) fn devices(
    config: &mut Config,
    asked: Option<Devices>,
    table: &DeviceTable,
) -> anyhow::Result<Devices> {
    let Some(devices) = asked else {
        gpus::resolve(&mut config.compute)?;
        let kind = match Gpu::for_rank(&config.compute, 0)? {
            Some(gpu) => table.gpu(&gpu.kind.name),
            None => table.find("cpu")?.clone(),
        };
        return Ok(Devices { count: config.compute.devices.num_ranks(), kind });
    };
    // The planned devices may not exist here.
    config.compute.devices = match devices.kind.is_processor() {
        true => gpus::one_of(config::Devices::Auto),
        false => config::Devices::Cuda(config::GpuSet::All),
    };
    if let Some(cores) = devices.kind.cores {
        config.compute.threads.get_or_insert((cores / devices.count).max(1));
    }
    Ok(devices)
}

/// Warning for a plan of other devices: this machine would refuse the run.
fn elsewhere(error: &TrainError) -> String {
    format!("on this machine the run would be refused: {}", chain(error))
}

fn measure(file: &Path) -> anyhow::Result<Exit> {
    let table = measure::processor()?.to_toml();
    tandem_train::replace_file(file, table.as_bytes())?;
    print_lines(&[table.trim_end().to_owned()])?;
    Ok(Exit::Done)
}

fn show(
    arguments: &PlanArguments,
    config: &Config,
    outline: &PlanInputs,
    Devices { count, kind }: &Devices,
) -> anyhow::Result<Exit> {
    arguments.html.iter().try_for_each(|file| refuse_other_file("--html", file))?;
    let plan = RunPlan::make(config, outline, *count, kind)?;
    let found = arguments.search.then(|| search(config, outline, *count, kind));
    // Who searches gets the search's best plan as advice, and others the smallest change.
    let advice = (!plan.fits()).then(|| {
        let best = found.as_deref().and_then(best_of);
        best.unwrap_or_else(|| advice::in_words(config, outline, *count, kind))
    });
    if let Some(file) = &arguments.html {
        let page = plan.page(advice.as_deref());
        tandem_train::replace_file(file, page.as_bytes())?;
    }
    if arguments.json {
        let mut json = plan.to_json();
        if arguments.operations {
            json["operations"] = plan.operations_to_json();
        }
        print_lines(&[format!("{json:#}")])?;
        return verdict(arguments, config, &plan);
    }
    let colour = has_colours();
    let mut lines = Vec::new();
    for (ranks, of_rank) in &plan.ranks {
        if plan.ranks.len() > 1 {
            lines.push(format!("{}:", rank_names(ranks)));
        }
        lines.push(format!("{of_rank}\n"));
    }
    lines.push(format!("{}\n", plan.picture(colour)));
    lines.push(plan.verdict());
    if arguments.operations {
        lines.push(format!("\n{}", plan.operations()));
    }
    lines.extend(advice.map(|advice| format!("\n{advice}")));
    if let Some(found) = found {
        lines.push(match found.len() {
            0 => "\nno plan of this search fits".to_owned(),
            1 => format!("\n1 plan of this search fits:\n{}", ranking(&found)),
            n => format!(
                "\n{n} plans of this search fit, the fastest first:\n{}",
                ranking(&found[..n.min(SHOWN)])
            ),
        });
    }
    print_lines(&lines)?;
    verdict(arguments, config, &plan)
}

/// Returns the exit code of a plan: a run that does not fit is the user's to change.
///
/// # Errors
/// For a plan of this machine: the disk of `compute.offload_dir` has too little room.
fn verdict(arguments: &PlanArguments, config: &Config, plan: &RunPlan) -> anyhow::Result<Exit> {
    if arguments.devices.is_none() {
        placement::check_room(&config.compute, plan.file_bytes())?;
    }
    Ok(if plan.fits() { Exit::Done } else { Exit::UserMistake })
}
