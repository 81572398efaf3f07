//! `tandem plan`: what a run would put where, how long it would take and whether it fits, from a dry run.

use std::fs;
use std::io::{self, IsTerminal};
use std::path::Path;

use anyhow::Context;
use tandem_kernels::DType;
use tandem_train::Config;
use tandem_train::plan::device::{DeviceTable, Devices};
use tandem_train::plan::search::search;
use tandem_train::plan::text::{rank_names, ranking};
use tandem_train::plan::{Assumed, Outline, RunPlan, advice, measure};
use tandem_train::prepare::Prepared;

use crate::args::PlanArguments;
use crate::exit::Exit;
use crate::output::print_lines;
use crate::watcher::Watcher;

/// Lines of a search that are shown.
const SHOWN: usize = 12;

pub fn run(arguments: &PlanArguments) -> anyhow::Result<Exit> {
    if let Some(file) = &arguments.measure {
        return measure(file);
    }
    let table = arguments.device_table.as_deref().map_or(Ok(DeviceTable::built_in()), DeviceTable::read)?;
    let mut overrides = arguments.overrides.clone();
    overrides.extend(arguments.memory.iter().map(|size| format!("compute.memory={size}")));
    let file = arguments.config.as_deref().expect("clap asks for it");
    let mut config = Config::load(file, &overrides)?;
    let devices = match &arguments.devices {
        Some(text) => table.devices(text)?,
        None => Devices { count: config.compute.devices.num_ranks(), kind: table.find("cpu")?.clone() },
    };
    if !devices.kind.is_processor() {
        config.compute.dtype.get_or_insert(DType::Bf16);
    }
    if let (Some(cores), Some(_)) = (devices.kind.cores, &arguments.devices) {
        config.compute.threads.get_or_insert((cores / devices.count).max(1));
    }
    if let Some(tokens) = arguments.assume_tokens {
        let outline = Outline::assume(&config, Assumed { tokens, scored: arguments.assume_scored })?;
        return show(arguments, &config, &outline, &devices);
    }
    let mut watcher = Watcher::every(1);
    let prepared = Prepared::open(&config, &mut watcher)?;
    watcher.finish();
    show(arguments, &config, &Outline::of(&prepared), &devices)
}

fn measure(file: &Path) -> anyhow::Result<Exit> {
    let table = measure::processor()?.to_toml();
    fs::write(file, &table).with_context(|| format!("cannot write {}", file.display()))?;
    print_lines(&[table.trim_end().to_owned()])?;
    Ok(Exit::Done)
}

fn show(
    arguments: &PlanArguments,
    config: &Config,
    outline: &Outline,
    Devices { count, kind }: &Devices,
) -> anyhow::Result<Exit> {
    let plan = RunPlan::make(config, outline, *count, kind)?;
    let advice = if plan.fit().fits() { None } else { Some(advice::in_words(config, outline, *count, kind)) };
    if let Some(file) = &arguments.html {
        let page = plan.page(advice.as_deref());
        fs::write(file, page).with_context(|| format!("cannot write {}", file.display()))?;
    }
    if arguments.json {
        print_lines(&[format!("{:#}", plan.to_json())])?;
        return Ok(Exit::Done);
    }
    let colour =
        io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let mut lines = Vec::new();
    for (ranks, of_rank) in &plan.ranks {
        if plan.ranks.len() > 1 {
            lines.push(format!("{}:", rank_names(ranks)));
        }
        lines.push(format!("{of_rank}\n"));
    }
    lines.push(format!("{}\n", plan.picture(colour)));
    lines.push(plan.verdict());
    lines.extend(advice.map(|advice| format!("\n{advice}")));
    if arguments.search {
        let found = search(config, outline, *count, kind);
        lines.push(match found.len() {
            0 => "\nno plan of this search fits".to_owned(),
            n => format!(
                "\n{n} plans of this search fit, the fastest first:\n{}",
                ranking(&found[..n.min(SHOWN)])
            ),
        });
    }
    print_lines(&lines)?;
    Ok(Exit::Done)
}
