//! Questions of `tandem init`. Each has a flag; without a terminal the flags answer.

use std::io::IsTerminal;
use std::path::Path;

use dialoguer::{Input, Select};
use tandem_hub::HubName;
use tandem_kernels::cuda;
use tandem_train::plan::estimate::device::host_memory;
use tandem_train::size;

use crate::args::{InitArguments, InitMethod, Trained};
use crate::exit::mistake;

/// Everything that a run needs to be told.
pub(super) struct Told {
    pub method: InitMethod,
    pub model: String,
    pub data: Vec<String>,
    pub eval: Vec<String>,
    pub train: Trained,
    pub devices: Option<String>,
    pub memory: Option<String>,
}

/// Takes the flags, and asks for the rest on a terminal.
///
/// # Errors
/// Without a terminal: a necessary flag is missing.
pub(super) fn ask(arguments: &InitArguments) -> anyhow::Result<Told> {
    let asks = !arguments.yes && std::io::stdin().is_terminal() && std::io::stderr().is_terminal();
    let why = if arguments.yes { "--yes asks nothing" } else { "there is no terminal to ask on" };
    let lacking = |flag: &str, what: &str| mistake(format!("{flag} is missing: give {what} ({why})"));
    let method = match arguments.method {
        Some(method) => method,
        None if asks => method()?,
        None => return Err(lacking("--method", "sft, dpo or reward")),
    };
    let model = match &arguments.model {
        Some(model) => model.clone(),
        None if asks => model()?,
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
    Ok(Told { method, model, data, eval, train, devices, memory })
}

fn method() -> anyhow::Result<InitMethod> {
    let items = [
        "sft: imitate demonstrations",
        "dpo: prefer one answer of a pair",
        "reward: a model that scores answers",
    ];
    let index = Select::new().with_prompt("Training method").items(items).default(1).interact()?;
    Ok([InitMethod::Sft, InitMethod::Dpo, InitMethod::Reward][index])
}

fn model() -> anyhow::Result<String> {
    let check = |text: &String| match Path::new(text).exists()
        || HubName::bare(text).is_some()
        || HubName::is_explicit(text)
    {
        true => Ok(()),
        false => Err("no such path, and no name of the hub"),
    };
    Ok(Input::new()
        .with_prompt("Model (a folder, or owner/name of the hub)")
        .validate_with(check)
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
    let index = Select::new().with_prompt("Devices").items(names).default(0).interact()?;
    if let Some(found) = items.swap_remove(index).1 {
        return Ok(Some(found));
    }
    Ok(Some(Input::new().with_prompt("Devices, as 2xA10 or 8xH100").interact_text()?))
}

fn trained() -> anyhow::Result<Trained> {
    let items = ["full: every weight", "lora: a small adapter", "qlora: an adapter on weights in 4 bits"];
    let index = Select::new().with_prompt("What trains").items(items).default(0).interact()?;
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
