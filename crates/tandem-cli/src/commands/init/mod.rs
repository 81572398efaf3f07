//! `tandem init`: the first run.toml, from answers or from another program's settings.

mod facts;
mod fresh;
mod look;
mod questions;

use std::fs;
use std::path::Path;

use anyhow::Context;
use tandem_train::config::{Answers, Draft, Method, Program, Translation, translate};
use tandem_train::plan::estimate::device::DeviceTable;

use crate::args::{ForeignProgram, InitArguments, InitMethod};
use crate::commands::init::facts::LocalFacts;
use crate::commands::init::look::{Look, look};
use crate::exit::{Exit, mistake};
use crate::output::print_lines;

pub(crate) fn run(arguments: &InitArguments) -> anyhow::Result<Exit> {
    if let Some(second) = &arguments.second {
        let (config, folder) = (arguments.file.display(), second.display());
        return Err(mistake(format!(
            "init writes one file, a run's configuration; for random weights: tandem init-weights {config} {folder}"
        )));
    }
    if arguments.file.exists() && !arguments.overwrite {
        return Err(mistake(format!(
            "{} already exists; give another name, or --overwrite",
            arguments.file.display()
        )));
    }
    let (draft, translation) = match &arguments.from[..] {
        [] => (fresh::draft(&questions::ask(arguments)?, arguments), None),
        _ => {
            let translation = translated(arguments)?;
            (translation.draft.clone(), Some(translation))
        }
    };
    finish(arguments, draft, translation.as_ref())
}

fn translated(arguments: &InitArguments) -> anyhow::Result<Translation> {
    // Ranks of the other machine, if its devices are named, are those that the run had.
    let planned = arguments.devices.as_deref().and_then(planned_ranks);
    let answers = Answers {
        method: arguments.method.map(Method::from),
        model: arguments.model.clone(),
        train: arguments.data.clone(),
        eval: arguments.eval_data.clone(),
        output: arguments.output.clone(),
        ranks: arguments.ranks,
        assumed_ranks: planned,
    };
    let facts = LocalFacts::new(&arguments.file, !arguments.no_plan);
    let mut translation = translate(&arguments.from, arguments.kind.map(Program::from), &answers, &facts)?;
    let files: Vec<_> = arguments.from.iter().map(|file| file.display().to_string()).collect();
    let programs: Vec<_> = translation.programs.iter().map(|program| program.title()).collect();
    translation.draft.header = vec![format!(
        "Written by `tandem init --from {}` from settings of {}. A comment behind a key is its origin there.",
        files.join(" --from "),
        programs.join(", ")
    )];
    set_devices(&mut translation.draft, arguments.devices.as_deref(), arguments.memory.as_deref());
    Ok(translation)
}

/// Number of ranks of `2xA10`.
fn planned_ranks(devices: &str) -> Option<u64> {
    DeviceTable::built_in().devices(devices).ok().map(|devices| devices.count as u64)
}

/// Writes devices and memory as they were asked for.
fn set_devices(draft: &mut Draft, devices: Option<&str>, memory: Option<&str>) {
    match devices {
        Some(devices) if planned_ranks(devices).is_some() => {
            let name = if devices.to_ascii_lowercase().ends_with("cpu") { "cpu" } else { "cuda" };
            draft.set("compute.devices", name, format!("planned for {devices}"));
        }
        Some(devices) => draft.set("compute.devices", devices, ""),
        None => {}
    }
    if let Some(memory) = memory {
        draft.set("compute.memory", memory, "the most that a rank may use");
    }
}

/// Writes the file, plans the run, and writes what the plan changes.
fn finish(arguments: &InitArguments, mut draft: Draft, from: Option<&Translation>) -> anyhow::Result<Exit> {
    let file = &arguments.file;
    write(file, &draft)?;
    let mut lines = vec![format!("{}: written", file.display())];
    lines.extend(remarks(&draft));
    let mut exit = Exit::Done;
    if !arguments.no_plan {
        let packed = from.and_then(|from| from.packed);
        match look(arguments, &mut draft, packed)? {
            Look::NotHere(reason) => lines.push(format!("not planned: {reason}")),
            Look::Planned { lines: found, fits, changed } => {
                if changed {
                    write(file, &draft)?;
                }
                lines.extend(found);
                exit = if fits { Exit::Done } else { Exit::UserMistake };
            }
        }
    } else {
        // What the file says must at least be read.
        tandem_train::Config::load::<&str>(file, &[])?;
    }
    lines.push(format!("start it: {}", launch(file, from)));
    print_lines(&lines)?;
    Ok(exit)
}

fn write(file: &Path, draft: &Draft) -> anyhow::Result<()> {
    if let Some(folder) = file.parent() {
        fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    }
    fs::write(file, draft.to_toml()).with_context(|| format!("cannot write {}", file.display()))
}

/// One line for each setting that cannot be had or is not known.
fn remarks(draft: &Draft) -> Vec<String> {
    let missing =
        draft.missing.iter().map(|remark| format!("cannot be had: {}: {}", remark.setting, remark.reason));
    let unknown = draft.unknown.iter().map(|remark| format!("not known, left out: {}", remark.setting));
    let mut lines: Vec<_> = missing.chain(unknown).collect();
    if !draft.not_needed.is_empty() {
        lines.push(format!("{} settings are not needed; the file says why", draft.not_needed.len()));
    }
    lines
}

/// The command that starts the run.
fn launch(file: &Path, from: Option<&Translation>) -> String {
    let train = format!("train {}", file.display());
    match from {
        Some(from) if from.machines > 1 => format!(
            "tandem launch -n {} --nodes {} --node 0 --address FIRST-HOST:29500 {train}",
            (from.ranks / from.machines).max(1),
            from.machines
        ),
        _ => format!("tandem {train}"),
    }
}

impl From<InitMethod> for Method {
    fn from(method: InitMethod) -> Self {
        match method {
            InitMethod::Sft => Self::Sft,
            InitMethod::Dpo => Self::Dpo,
            InitMethod::Reward => Self::Reward,
        }
    }
}

impl From<ForeignProgram> for Program {
    fn from(program: ForeignProgram) -> Self {
        match program {
            ForeignProgram::Trl => Self::Trl,
            ForeignProgram::Axolotl => Self::Axolotl,
            ForeignProgram::LlamaFactory => Self::LlamaFactory,
            ForeignProgram::Accelerate => Self::Accelerate,
            ForeignProgram::Deepspeed => Self::DeepSpeed,
            ForeignProgram::Mitchell => Self::Mitchell,
        }
    }
}
