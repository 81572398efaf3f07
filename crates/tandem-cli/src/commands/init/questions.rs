//! Questions of `tandem init`. Each has a flag; without a terminal the flags answer.

use std::fmt::Display;
use std::io::{ErrorKind, IsTerminal};
use std::path::Path;

use clap::ValueEnum;
use dialoguer::{Input, Select};
use tandem_data::record::RowKind;
use tandem_data::source::peek::fitting_kinds;
use tandem_data::source::{Source, Sources};
use tandem_hub::HubName;
use tandem_kernels::cuda;
use tandem_train::config::Method;
use tandem_train::plan::estimate::device::host_memory;
use tandem_train::size;

use super::judges;
use crate::args::{InitArguments, InitMethod, Trained};
use crate::exit::mistake;
use crate::signals::show_cursor_when_interrupted;

/// Everything that a run needs to be told.
pub(super) struct Told {
    pub method: InitMethod,
    pub model: String,
    pub data: Vec<String>,
    pub eval: Vec<String>,
    pub judges: Vec<String>,
    pub teacher: Option<String>,
    pub train: Trained,
    pub devices: Option<String>,
    pub memory: Option<String>,
}

/// Takes the flags, and asks for the rest on a terminal.
///
/// # Errors
/// A flag that does not go with the method. Without a terminal: a necessary flag is missing.
pub(super) fn ask(arguments: &InitArguments) -> anyhow::Result<Told> {
    let asks = !arguments.yes && std::io::stdin().is_terminal() && std::io::stderr().is_terminal();
    if asks {
        show_cursor_when_interrupted()?;
    }
    let why = if arguments.yes { "--yes asks nothing" } else { "there is no terminal to ask on" };
    let lacking = |flag: &str, what: &str| mistake(format!("{flag} is missing: give {what} ({why})"));
    let model = match &arguments.model {
        Some(model) => model.clone(),
        None if asks => ask_model("Model")?,
        None => return Err(lacking("--model", "a model's folder or its name on the hub")),
    };
    let data = match &arguments.data[..] {
        [] if asks => vec![rows("Training rows (a file, or hf://owner/name/train)", false)?],
        [] => return Err(lacking("--data", "a file of rows, or hf://owner/name/train")),
        data => data.to_vec(),
    };
    let eval = match &arguments.eval_data[..] {
        [] if asks => {
            let eval = rows("Held-out rows (empty for none)", true)?;
            if eval.is_empty() { Vec::new() } else { vec![eval] }
        }
        eval => eval.to_vec(),
    };
    let method = match arguments.method {
        Some(method) => method,
        None if asks => ask_method(fitting(&data).first().copied())?,
        None => {
            return Err(lacking("--method", &format!("{}{}", listed(&all(), "or"), fit(&data))));
        }
    };
    let judges = match &arguments.judge[..] {
        [] if !Method::from(method).generates() => Vec::new(),
        [] if asks => vec![ask_judge()?],
        [] => {
            let what = format!(
                "a reward model's folder, or a file of [[judges]] tables, FILE.toml, for --method {}",
                name(method)
            );
            return Err(lacking("--judge", &what));
        }
        _ if !Method::from(method).generates() => {
            return Err(unused("--judge", method, "generates no completions to judge"));
        }
        judges => judges.to_vec(),
    };
    let teacher = match &arguments.teacher {
        Some(_) if method != InitMethod::Distill => {
            return Err(unused("--teacher", method, "has no teacher"));
        }
        None if method == InitMethod::Distill && asks => Some(ask_model("Teacher")?),
        None if method == InitMethod::Distill => {
            return Err(lacking(
                "--teacher",
                "the teacher's folder or its name on the hub, for --method distill",
            ));
        }
        teacher => teacher.clone(),
    };
    let devices = match &arguments.devices {
        None if asks => devices()?,
        devices => devices.clone(),
    };
    let train = match arguments.train {
        Some(train) => train,
        None if asks => trained()?,
        None => Trained::Full,
    };
    let memory = match &arguments.memory {
        None if asks => memory()?,
        memory => memory.clone(),
    };
    Ok(Told { method, model, data, eval, judges, teacher, train, devices, memory })
}

/// Returns a mistake for a flag that the method has no use for.
fn unused(flag: &str, method: InitMethod, why: &str) -> anyhow::Error {
    mistake(format!("--method {} {why}; remove {flag}", name(method)))
}

fn name(method: InitMethod) -> &'static str {
    Method::from(method).name()
}

fn all() -> Vec<InitMethod> {
    InitMethod::value_variants().to_vec()
}

/// Returns the methods' names as `a, b or c`.
fn listed(methods: &[InitMethod], last: &str) -> String {
    let names: Vec<_> = methods.iter().map(|&method| name(method)).collect();
    match names.split_last() {
        Some((end, [])) => (*end).to_owned(),
        Some((end, names)) => format!("{} {last} {end}", names.join(", ")),
        None => String::new(),
    }
}

/// Returns the methods that read rows like the first one; none if it cannot be read.
fn fitting(data: &[String]) -> Vec<InitMethod> {
    let sources = Sources(data.iter().map(Source::new).collect());
    let kinds: Vec<RowKind> = fitting_kinds(&sources).unwrap_or_default();
    all().into_iter().filter(|&method| kinds.contains(&Method::from(method).rows())).collect()
}

/// Says which methods the rows fit.
fn fit(data: &[String]) -> String {
    let methods = fitting(data);
    let rows = data.first().map_or("", String::as_str);
    if methods.is_empty() {
        String::new()
    } else {
        format!("; rows of {rows} fit {}", listed(&methods, "and"))
    }
}

fn ask_method(fitting: Option<InitMethod>) -> anyhow::Result<InitMethod> {
    let items: Vec<_> =
        all().into_iter().map(|method| format!("{}: {}", name(method), purpose(method))).collect();
    let default = all().iter().position(|&method| method == fitting.unwrap_or(InitMethod::Dpo)).unwrap_or(0);
    let index = choose("Training method", &items, default)?;
    Ok(all()[index])
}

fn purpose(method: InitMethod) -> &'static str {
    match method {
        InitMethod::Sft => "imitate demonstrations",
        InitMethod::Dpo => "prefer one answer of a pair",
        InitMethod::Kto => "prefer answers with a good label to those with a bad one",
        InitMethod::Reward => "a model that scores answers",
        InitMethod::Online => "prefer the better of the model's own answers, which judges score",
        InitMethod::Grpo => "make the model's own answers likelier that judges score above their group",
        InitMethod::Distill => "imitate a teacher's probabilities",
    }
}

/// Has one of several items chosen, and returns its index.
fn choose<T: Display>(prompt: &str, items: &[T], default: usize) -> anyhow::Result<usize> {
    let chosen = Select::new().with_prompt(prompt).items(items).default(default).interact();
    if matches!(&chosen, Err(dialoguer::Error::IO(error)) if error.kind() == ErrorKind::Interrupted) {
        // Whoever heeds the signal ends the process, after the cursor is shown again.
        std::thread::park();
    }
    Ok(chosen?)
}

fn ask_judge() -> anyhow::Result<String> {
    let check = |text: &String| match judges::is_file(text) && !Path::new(text).exists() {
        true => Err("no such file"),
        false => is_model(text),
    };
    Ok(Input::new()
        .with_prompt("Judge (a reward model's folder, or a file of [[judges]])")
        .validate_with(check)
        .interact_text()?)
}

/// Checks that a text is a path or a name of the hub.
fn is_model(text: &str) -> Result<(), &'static str> {
    match Path::new(text).exists() || HubName::bare(text).is_some() || HubName::is_explicit(text) {
        true => Ok(()),
        false => Err("no such path, and no name of the hub"),
    }
}

fn ask_model(whose: &str) -> anyhow::Result<String> {
    Ok(Input::new()
        .with_prompt(format!("{whose} (a folder, or owner/name of the hub)"))
        .validate_with(|text: &String| is_model(text))
        .interact_text()?)
}

fn rows(prompt: &str, may_be_empty: bool) -> anyhow::Result<String> {
    let check = |text: &String| match text.as_str() {
        "" if may_be_empty => Ok(()),
        text if text.contains('*') || HubName::is_explicit(text) || Path::new(text).exists() => Ok(()),
        _ => Err("no such file"),
    };
    Ok(Input::new().with_prompt(prompt).allow_empty(may_be_empty).validate_with(check).interact_text()?)
}

/// Devices of this machine, or others.
fn devices() -> anyhow::Result<Option<String>> {
    let memory = host_memory().map_or(String::new(), |bytes| format!(", {}", size::in_words(bytes)));
    let mut items: Vec<(String, Option<String>)> = Vec::new();
    for gpu in cuda::list().unwrap_or_default() {
        let name = format!("GPU {}: {}, {}", gpu.ordinal, gpu.name, size::in_words(gpu.total_memory as u64));
        items.push((name, Some(format!("cuda:{}", gpu.ordinal))));
    }
    if items.len() > 1 {
        items.insert(0, (format!("all {} GPUs of this machine", items.len()), Some("cuda".to_owned())));
    }
    items.push((format!("the CPU of this machine{memory}"), Some("cpu".to_owned())));
    items.push(("devices of another machine".to_owned(), None));
    let names: Vec<_> = items.iter().map(|(name, _)| name.as_str()).collect();
    let index = choose("Devices", &names, 0)?;
    if let Some(found) = items.swap_remove(index).1 {
        return Ok(Some(found));
    }
    Ok(Some(Input::new().with_prompt("Devices, as 2xA10 or 8xH100").interact_text()?))
}

fn trained() -> anyhow::Result<Trained> {
    let items = ["full: every weight", "lora: a small adapter", "qlora: an adapter on weights in 4 bits"];
    let index = choose("What trains", &items, 0)?;
    Ok([Trained::Full, Trained::Lora, Trained::Qlora][index])
}

fn memory() -> anyhow::Result<Option<String>> {
    let check = |text: &String| match text.is_empty() || size::parse(text).is_some() {
        true => Ok(()),
        false => Err("a size with its unit, for example 24GiB"),
    };
    let prompt = "Most memory of each rank, as 24GiB (empty for all)";
    let text: String =
        Input::new().with_prompt(prompt).allow_empty(true).validate_with(check).interact_text()?;
    Ok((!text.is_empty()).then_some(text))
}
