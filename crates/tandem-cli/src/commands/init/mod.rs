//! `tandem init`: the first run.toml, from answers or from another program's settings.

mod facts;
pub(super) mod fresh;
mod judges;
mod look;
mod questions;

use std::fs;
use std::path::Path;

use anyhow::Context;
use tandem_train::Config;
use tandem_train::config::{Answers, Draft, Method, Problem, Program, Translation, translate};
use tandem_train::plan::estimate::device::{DeviceTable, Devices};

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
    if !arguments.from.is_empty() {
        let planned = arguments.devices.as_deref().map_or(Ok(None), planned)?;
        let translation = translated(arguments, planned.as_ref())?;
        return finish(arguments, translation.draft.clone(), planned.as_ref(), Some(&translation));
    }
    let told = questions::ask(arguments)?;
    let planned = told.devices.as_deref().map_or(Ok(None), planned)?;
    finish(arguments, fresh::draft(&told, arguments)?, planned.as_ref(), None)
}

fn translated(arguments: &InitArguments, planned: Option<&Devices>) -> anyhow::Result<Translation> {
    let answers = Answers {
        method: arguments.method.map(Method::from),
        model: arguments.model.clone(),
        train: arguments.data.clone(),
        eval: arguments.eval_data.clone(),
        output: arguments.output.clone(),
        ranks: arguments.ranks,
        // Devices that are named are those that the run had, unless it says otherwise.
        assumed_ranks: planned.map(|devices| devices.count as u64),
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

/// Devices of another machine, as `2xA10`; `None` for a value of `compute.devices`.
fn planned(devices: &str) -> anyhow::Result<Option<Devices>> {
    let is_counted = devices.starts_with(|first: char| first.is_ascii_digit());
    Ok(if is_counted { Some(DeviceTable::built_in().devices(devices)?) } else { None })
}

/// Writes devices and memory as they were asked for.
fn set_devices(draft: &mut Draft, devices: Option<&str>, memory: Option<&str>) {
    match devices {
        Some(devices) if devices.starts_with(|first: char| first.is_ascii_digit()) => {
            let name = if devices.to_ascii_lowercase().ends_with("cpu") { "cpu" } else { "cuda" };
            draft.set("compute.devices", name, format!("planned for {devices}"));
        }
        Some(devices) => draft.set("compute.devices", devices, "auto, cpu, cpu:4, cuda or cuda:0,1"),
        None => {}
    }
    if let Some(memory) = memory {
        draft.set("compute.memory", memory, "the most that a rank may use");
    }
}

/// Writes the file, plans the run, and writes what the plan changes.
fn finish(
    arguments: &InitArguments,
    mut draft: Draft,
    planned: Option<&Devices>,
    from: Option<&Translation>,
) -> anyhow::Result<Exit> {
    let file = &arguments.file;
    let before = tandem_files::read(file, tandem_files::MAX_CONFIG).ok();
    // A missing key can be added to the file, but no run can have such a value.
    if let (Some(_), Err(error)) = (from, Config::from_text(&draft.to_toml(), file))
        && matches!(error.problem, Problem::Value { .. })
    {
        return Err(mistake(format!("{}: not written: {}", file.display(), error.problem)));
    }
    write(file, &draft)?;
    let mut lines = vec![format!("{}: written", file.display())];
    lines.extend(remarks(&draft));
    match checked(arguments, &mut draft, planned, from, &mut lines) {
        Ok(exit) => {
            if exit == Exit::Done {
                lines.push(format!("start it: {}", launch(file, &draft, from)));
            }
            print_lines(&lines)?;
            Ok(exit)
        }
        // A translation is of use although its model or rows are elsewhere. Answers are given again.
        Err(error) if from.is_some() => {
            print_lines(&lines)?;
            Err(error)
        }
        Err(error) => {
            match before {
                Some(text) => tandem_train::replace_file(file, &text).map_err(anyhow::Error::from),
                None => fs::remove_file(file).map_err(anyhow::Error::from),
            }
            .with_context(|| format!("cannot restore {}", file.display()))?;
            Err(error)
        }
    }
}

/// Looks at model and rows and plans the run, unless told not to; adds what is found to `lines`.
fn checked(
    arguments: &InitArguments,
    draft: &mut Draft,
    planned: Option<&Devices>,
    from: Option<&Translation>,
    lines: &mut Vec<String>,
) -> anyhow::Result<Exit> {
    let file = &arguments.file;
    if arguments.no_plan {
        // What the file says must at least be read.
        Config::load::<&str>(file, &[])?;
        return Ok(Exit::Done);
    }
    match look(file, planned, draft, from)? {
        Look::NotHere(reason) => {
            lines.push(format!("not planned: {reason}"));
            Ok(Exit::Done)
        }
        Look::Planned { lines: found, fits, changed } => {
            if changed {
                write(file, draft)?;
            }
            lines.extend(found);
            Ok(if fits { Exit::Done } else { Exit::UserMistake })
        }
    }
}

fn write(file: &Path, draft: &Draft) -> anyhow::Result<()> {
    if let Some(folder) = file.parent() {
        fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    }
    Ok(tandem_train::replace_file(file, draft.to_toml().as_bytes())?)
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
fn launch(file: &Path, draft: &Draft, from: Option<&Translation>) -> String {
    let train = format!("train {}", file.display());
    match from {
        Some(from) if from.machines > 1 => format!(
            "tandem launch -n {} --nodes {} --node 0 --address FIRST-HOST:29500 {train}",
            (from.ranks / from.machines).max(1),
            from.machines
        ),
        // The GPUs of a machine are ranks of one process; its processor is one rank unless it is told otherwise.
        Some(from) if from.ranks > 1 && is_one_processor(draft) => {
            format!("tandem launch -n {} {train}", from.ranks)
        }
        _ => format!("tandem {train}"),
    }
}

fn is_one_processor(draft: &Draft) -> bool {
    draft.get("compute.devices").is_some_and(|devices| devices.as_str() == Some("cpu"))
}

impl From<InitMethod> for Method {
    fn from(method: InitMethod) -> Self {
        match method {
            InitMethod::Sft => Self::Sft,
            InitMethod::Dpo => Self::Dpo,
            InitMethod::Kto => Self::Kto,
            InitMethod::Reward => Self::Reward,
            InitMethod::Online => Self::Online,
            InitMethod::Grpo => Self::Grpo,
            InitMethod::Distill => Self::Distill,
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
