//! Command lines: launchers, the training scripts of the programs, and hydra's overrides.

use std::collections::HashMap;
use std::path::Path;

use serde_json::{Map, Value};

use super::Program;
use super::document::{Document, at};
use super::shell::{Command, Word, assignment, commands};
use crate::config::error::Result;

/// A training command.
pub(super) struct CommandLine {
    /// Options of the launcher and of the script, those that win last.
    pub documents: Vec<Document>,
    /// Files that options name, in the order of their options: which file, and of which program.
    pub files: Vec<(String, Option<Program>)>,
    /// Method, if the script's name says it.
    pub method: Option<&'static str>,
    /// Line of the command.
    pub line: usize,
    /// Words that stand for arguments which the file does not tell.
    pub left_out: Vec<String>,
}

/// Programs that start a training script.
const LAUNCHERS: [&str; 10] = [
    "python",
    "python3",
    "torchrun",
    "accelerate",
    "deepspeed",
    "trl",
    "axolotl",
    "llamafactory-cli",
    "uv",
    "lmf",
];

/// Commands that start another command, and words of the shell before one.
const PREFIXES: [&str; 36] = [
    "nohup",
    "time",
    "env",
    "exec",
    "command",
    "nice",
    "ionice",
    "sudo",
    "setsid",
    "stdbuf",
    "timeout",
    "numactl",
    "taskset",
    "unbuffer",
    "srun",
    "mpirun",
    "mpiexec",
    "docker",
    "podman",
    "nerdctl",
    "singularity",
    "apptainer",
    "conda",
    "mamba",
    "micromamba",
    "poetry",
    "pdm",
    "pixi",
    "hatch",
    "pipenv",
    "uv",
    "if",
    "then",
    "else",
    "do",
    "!",
];

impl CommandLine {
    /// Finds the training command of a text; `None` if there is none.
    pub(super) fn parse(path: &Path, text: &str, kind: Option<Program>) -> Result<Option<Self>> {
        let mut found: Option<(usize, Vec<Word>)> = None;
        // Assignments alone, or before the command: the environment of the command.
        let mut environment = Map::new();
        for Command { line, words, is_open } in commands(text) {
            for word in words.iter().filter(|word| word.unknown.is_none()) {
                let Some((name, value)) = assignment(&word.text) else { continue };
                if let Some((_, option)) = VARIABLES.iter().find(|(variable, _)| *variable == name) {
                    environment.insert((*option).to_owned(), value.into());
                }
            }
            let start = start(&words);
            if is_open {
                if start.is_some() || is_launcher(&words[0]) {
                    return Err(at(path, Some(line), "a quotation mark of this command is not closed"));
                }
                continue;
            }
            let is_hydra = words.iter().all(|word| assignment(&word.text).is_some())
                && (kind == Some(Program::Mitchell)
                    || words.iter().filter(|word| is_override(&word.text)).count() >= 2);
            if start.is_none() && !is_hydra {
                continue;
            }
            if let Some((first, _)) = found {
                return Err(at(
                    path,
                    Some(line),
                    format!("a second training command, after that of line {first}; give a file with one"),
                ));
            }
            found = Some((line, words[start.unwrap_or(0)..].to_vec()));
        }
        let Some((line, words)) = found else { return Ok(None) };
        let (words, left_out) = told(path, line, &words)?;
        Reader { path, line, kind, files: Vec::new(), left_out, environment }.read(&words).map(Some)
    }
}

/// Returns where a training command begins: at its launcher, behind assignments and prefixes.
fn start(words: &[Word]) -> Option<usize> {
    let first = words.iter().position(|word| assignment(&word.text).is_none())?;
    // An image or an environment may have a launcher's name: `docker run huggingface/trl trl dpo`.
    let is_start = |at: &usize| {
        is_launcher(&words[*at]) && is_training(&words[*at..]) && !words.get(at + 1).is_some_and(is_launcher)
    };
    let is_prefix = PREFIXES.contains(&base_name(&words[first].text));
    let later = (first + 1..words.len()).filter(|_| is_prefix).find(is_start);
    later.or(Some(first).filter(is_start))
}

fn base_name(word: &str) -> &str {
    word.rsplit('/').next().unwrap_or(word)
}

fn is_launcher(word: &Word) -> bool {
    LAUNCHERS.contains(&base_name(&word.text))
}

/// Whether the words of a launcher train: they name a script, a module, a file, or a method of `trl`.
fn is_training(words: &[Word]) -> bool {
    let is_file = |word: &Word| [".py", ".yaml", ".yml"].iter().any(|end| word.text.ends_with(end));
    let is_method = |word: &Word| word.unknown.is_some() || method_of(&word.text).is_some();
    let is_llama = matches!(base_name(&words[0].text), "llamafactory-cli" | "lmf");
    words[1..].iter().any(is_file)
        || is_llama && words.get(1).is_some_and(|word| word.text == "train")
        || base_name(&words[0].text) == "trl" && words.get(1).is_some_and(is_method)
        || words.iter().any(|word| word.text == "-m")
}

/// Returns the texts of a command's words, and the variables that stand for further arguments.
fn told(path: &Path, line: usize, words: &[Word]) -> Result<(Vec<String>, Vec<String>)> {
    let (mut texts, mut left_out) = (Vec::new(), Vec::new());
    for (index, word) in words.iter().enumerate() {
        let Some(variable) = &word.unknown else {
            texts.push(word.text.clone());
            continue;
        };
        let option = index.checked_sub(1).map(|before| words[before].text.as_str());
        let option = option.filter(|text| text.starts_with("--") && !text.contains('='));
        let is_all = variable.trim_start_matches(['$', '{']).starts_with(['@', '*']);
        // Words of an array are settings that the script does tell.
        let is_further = index > 1 && option.is_none() && !variable.contains('[');
        if *variable == word.text && (is_all || is_further) {
            left_out.push(variable.clone());
            continue;
        }
        let shown: Vec<_> = option.into_iter().chain([word.text.as_str()]).collect();
        return Err(at(
            path,
            Some(line),
            format!(
                "`{}`: no line before it assigns `{variable}` a plain text; write its value into the command, or \
                 assign it in a line of its own above",
                shown.join(" ")
            ),
        ));
    }
    Ok((texts, left_out))
}

/// hydra's `name=value`.
fn is_override(word: &str) -> bool {
    word.split_once('=').is_some_and(|(name, _)| {
        !name.is_empty() && name.chars().all(|c| c.is_ascii_lowercase() || matches!(c, '_' | '.' | '0'..='9'))
    })
}

struct Reader<'a> {
    path: &'a Path,
    line: usize,
    kind: Option<Program>,
    files: Vec<(String, Option<Program>)>,
    left_out: Vec<String>,
    environment: Map<String, Value>,
}

impl Reader<'_> {
    fn read(mut self, words: &[String]) -> Result<CommandLine> {
        let (launcher, script) = split(words);
        let mut documents = Vec::new();
        let head = base_name(&words[0]);
        // Axolotl hands on what stands behind `--`.
        let behind = script.iter().position(|word| head == "axolotl" && word == "--");
        let (script, launcher) = match behind {
            Some(at) => (&script[..at], &script[at + 1..]),
            None => (script, launcher),
        };
        let mut launched = options(launcher);
        if matches!(head, "llamafactory-cli" | "lmf") {
            launched.extend(self.environment.clone());
        }
        let processes = processes(&launched);
        if let Some(file) = launched.get("config_file").and_then(Value::as_str) {
            self.files.push((file.to_owned(), Some(Program::Accelerate)));
        }
        let own = launched.into_iter().filter(|(name, _)| is_accelerates(name)).chain(processes);
        let settings: Map<String, Value> = own.collect();
        if !settings.is_empty() {
            documents.push(self.document(Program::Accelerate, settings));
        }
        let name = script.first().map_or("", |word| word.rsplit('/').next().unwrap_or(word));
        let rest = script.get(1..).unwrap_or(&[]);
        let is_hydra = script.iter().filter(|word| is_override(word)).count() * 2
            > script.len().saturating_sub(1)
            && script.iter().all(|word| !word.starts_with("--"))
            && !rest
                .iter()
                .chain(script.first())
                .any(|word| word.ends_with(".yaml") || word.ends_with(".yml"));
        if self.kind == Some(Program::Mitchell) || (self.kind.is_none() && is_hydra && !script.is_empty()) {
            let words = if is_override(&script[0]) { script } else { rest };
            let settings = words.iter().filter_map(|word| word.split_once('='));
            let settings =
                settings.map(|(name, value)| (name.trim_start_matches('+').to_owned(), bare(value)));
            documents.push(self.document(Program::Mitchell, settings.collect()));
            return Ok(self.command(documents, None));
        }
        let mut settings = options(rest);
        let configured = ["config"].iter().find_map(|name| settings.remove(*name));
        if let Some(Value::String(file)) = configured {
            self.files.push((file, self.kind));
        }
        // Axolotl and LLaMA-Factory take their file without an option.
        let files = script.iter().filter(|word| word.ends_with(".yaml") || word.ends_with(".yml"));
        for file in files
            .filter(|file| !self.files.iter().any(|(known, _)| known == *file))
            .cloned()
            .collect::<Vec<_>>()
        {
            let is_value = script.windows(2).any(|pair| pair[0].starts_with("--") && pair[1] == file);
            if !is_value {
                self.files.push((file, None));
            }
        }
        settings.retain(|name, _| name != "_" && !(head == "axolotl" && name == "launcher"));
        let program = self.kind.unwrap_or_else(|| program_of(words, &settings));
        // LLaMA-Factory has settings behind its file as hydra has.
        if program == Program::LlamaFactory && !self.files.is_empty() {
            let words = rest.iter().filter(|word| is_override(word)).filter_map(|word| word.split_once('='));
            let more: Vec<_> = words.map(|(name, value)| (name.to_owned(), bare(value))).collect();
            settings.extend(more);
        }
        if !settings.is_empty() {
            documents.push(self.document(program, settings));
        }
        Ok(self.command(documents, method_of(name)))
    }

    fn command(self, documents: Vec<Document>, method: Option<&'static str>) -> CommandLine {
        CommandLine { documents, files: self.files, method, line: self.line, left_out: self.left_out }
    }

    fn document(&self, program: Program, settings: Map<String, Value>) -> Document {
        let lines: HashMap<String, usize> = settings.keys().map(|name| (name.clone(), self.line)).collect();
        Document { path: self.path.to_owned(), program, settings, lines }
    }
}

/// Splits a command into the launcher's options and the script with its own.
fn split(words: &[String]) -> (&[String], &[String]) {
    let head = words[0].rsplit('/').next().unwrap_or(&words[0]);
    if matches!(head, "trl" | "axolotl" | "llamafactory-cli" | "lmf") || is_override(&words[0]) {
        // `trl dpo`, `axolotl train`: the method or verb stands for the script.
        return if is_override(&words[0]) { (&[], words) } else { (&[], &words[1..]) };
    }
    let is_script =
        |(index, word): &(usize, &String)| *index > 0 && (word.ends_with(".py") || words[index - 1] == "-m");
    let script = words.iter().enumerate().find(is_script).map_or(words.len(), |(index, _)| index);
    // `accelerate launch -m axolotl.cli.train` and `python -m torch.distributed.run x.py`.
    match words.get(script).map(String::as_str) {
        Some("torch.distributed.run" | "torch.distributed.launch" | "accelerate.commands.launch") => {
            let inner = words[script + 1..].iter().position(|word| word.ends_with(".py"));
            let inner = inner.map_or(words.len(), |index| script + 1 + index);
            (&words[script + 1..inner], &words[inner..])
        }
        _ => (&words[1..script], &words[script..]),
    }
}

/// Options as settings: `--name value`, `--name=value`, `--name a b`, `--flag`, `--no_flag`; a short one by `-n`.
fn options(words: &[String]) -> Map<String, Value> {
    let mut settings = Map::new();
    let mut index = 0;
    while index < words.len() {
        let word = &words[index];
        index += 1;
        let is_short = word.len() > 1 && word.starts_with('-') && word.parse::<f64>().is_err();
        let Some(name) = word.strip_prefix("--").or(is_short.then_some(word.as_str())) else { continue };
        if let Some((name, value)) = name.split_once('=') {
            settings.insert(name.replace('-', "_"), bare(value));
            continue;
        }
        let is_value = |word: &String| {
            !(word.starts_with("--") || word.starts_with('-') && word.parse::<f64>().is_err())
        };
        let count = words[index..].iter().take_while(|word| is_value(word)).count();
        let values: Vec<Value> = words[index..index + count].iter().map(|word| bare(word)).collect();
        index += count;
        let name = if word.starts_with("--") { name.replace('-', "_") } else { name.to_owned() };
        match (&values[..], name.strip_prefix("no_")) {
            ([], Some(positive)) => settings.insert(positive.to_owned(), false.into()),
            ([], None) => settings.insert(name, true.into()),
            ([only], _) => settings.insert(name, only.clone()),
            _ => settings.insert(name, values.into()),
        };
    }
    settings
}

/// A word of a command: `[a,b]` is a list, `null` nothing, other words text.
fn bare(word: &str) -> Value {
    match word {
        "null" | "None" => Value::Null,
        _ if word.starts_with('[') || word.starts_with('{') => {
            serde_json::from_str(word).unwrap_or_else(|_| match word.starts_with('[') {
                true => {
                    let items = word.trim_matches(['[', ']']).split(',').map(str::trim);
                    items.filter(|item| !item.is_empty()).map(|item| item.trim_matches(['"', '\''])).collect()
                }
                false => word.into(),
            })
        }
        _ => word.into(),
    }
}

/// Ranks and machines that torchrun or DeepSpeed's launcher starts.
fn processes(launched: &Map<String, Value>) -> Vec<(String, Value)> {
    let count =
        |names: &[&str]| names.iter().find_map(|name| launched.get(*name)).and_then(super::values::as_count);
    let machines = count(&["nnodes", "num_nodes"]).unwrap_or(1);
    let (ranks, machines) = match (count(&["nproc_per_node", "num_gpus"]), launched.get("include")) {
        (Some(each), _) => (each.saturating_mul(machines), machines),
        (None, Some(Value::String(hosts))) if hosts.split('@').all(|host| host.contains(':')) => {
            included(hosts)
        }
        (None, _) => return Vec::new(),
    };
    let machines = (machines > 1).then(|| ("num_machines".to_owned(), machines.into()));
    [("num_processes".to_owned(), ranks.into())].into_iter().chain(machines).collect()
}

/// GPUs and hosts that `--include` of DeepSpeed's launcher names: `host:0,1@other:2`.
fn included(hosts: &str) -> (u64, u64) {
    let gpus = |host: &str| host.rsplit(':').next().unwrap_or_default().split(',').count();
    let hosts: Vec<_> = hosts.split('@').map(gpus).collect();
    (hosts.iter().sum::<usize>() as u64, hosts.len() as u64)
}

/// Options of torchrun that LLaMA-Factory takes from the environment.
const VARIABLES: [(&str, &str); 2] = [("NPROC_PER_NODE", "nproc_per_node"), ("NNODES", "nnodes")];

/// Whether an option of a launcher is a setting and not a file.
fn is_accelerates(name: &str) -> bool {
    Program::Accelerate.find(name).is_some()
}

fn program_of(words: &[String], settings: &Map<String, Value>) -> Program {
    let says = |text: &str| words.iter().take(6).any(|word| word.contains(text));
    match () {
        () if says("axolotl") => Program::Axolotl,
        () if says("llamafactory") || says("lmf") || settings.contains_key("finetuning_type") => {
            Program::LlamaFactory
        }
        () => Program::Trl,
    }
}

/// Words of a script's name, and the method that TRL's trainer of it has. The first that occurs counts.
const SCRIPTS: [(&str, &str); 18] = [
    ("online", "online_dpo"),
    ("nash", "nash_md"),
    ("xpo", "xpo"),
    ("ppo", "ppo"),
    ("rloo", "rloo"),
    ("grpo", "grpo"),
    ("gkd", "gkd"),
    ("distillation", "distillation"),
    ("orpo", "orpo"),
    ("simpo", "simpo"),
    ("cpo", "cpo"),
    ("bco", "bco"),
    ("kto", "kto"),
    ("dpo", "dpo"),
    ("sft", "sft"),
    ("prm", "prm"),
    ("reward", "reward"),
    ("rm", "reward"),
];

/// The method of a script, or of `trl`'s first word, or of another file's name.
pub(super) fn method_of(script: &str) -> Option<&'static str> {
    let script = script.to_ascii_lowercase();
    let has = |word: &str| script.split(|c: char| !c.is_alphanumeric()).any(|part| part == word);
    SCRIPTS.iter().find(|(word, _)| has(word)).map(|(_, method)| *method)
}
