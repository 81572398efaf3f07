//! Files of other programs: YAML, JSON and command lines as settings with their lines.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use yaml_rust2::parser::{Event, MarkedEventReceiver, Parser};
use yaml_rust2::scanner::{Marker, TScalarStyle};
use yaml_rust2::{Yaml, YamlLoader};

use super::Program;
use crate::config::error::{ConfigError, Place, Problem, Result};

/// Settings of one file, or of the options of one command.
#[derive(Clone, Debug)]
pub(super) struct Document {
    pub path: PathBuf,
    pub program: Program,
    pub settings: Map<String, Value>,
    /// Lines by dotted name.
    pub lines: HashMap<String, usize>,
}

/// Settings that only files of one program have.
const MARKS: [(Program, &[&str]); 6] = [
    (
        Program::DeepSpeed,
        &["zero_optimization", "train_micro_batch_size_per_gpu", "zero_allow_untested_optimizer"],
    ),
    (
        Program::Accelerate,
        &["compute_environment", "distributed_type", "main_training_function", "num_machines"],
    ),
    (Program::Axolotl, &["base_model", "sequence_len", "num_epochs", "val_set_size", "lora_target_linear"]),
    (
        Program::LlamaFactory,
        &["finetuning_type", "cutoff_len", "pref_loss", "lora_rank", "template", "stage"],
    ),
    (Program::Mitchell, &["n_epochs", "loss.name", "loss.beta", "exp_name", "local_dirs", "n_eval_examples"]),
    (
        Program::Trl,
        &[
            "model_name_or_path",
            "output_dir",
            "dataset_name",
            "per_device_train_batch_size",
            "learning_rate",
            "peft_type",
            "use_peft",
        ],
    ),
];

impl Document {
    /// Reads a mapping in YAML or JSON; `None` if the text is neither.
    pub(super) fn parse(path: &Path, text: &str, kind: Option<Program>) -> Result<Option<Self>> {
        // PyYAML accepts a byte-order mark.
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let is_json = path.extension().is_some_and(|end| end == "json") || text.trim_start().starts_with('{');
        let (settings, lines) = match is_json {
            true => (json(path, text)?, HashMap::new()),
            false => match yaml(path, text)? {
                Some(read) => read,
                None => return Ok(None),
            },
        };
        let program = match kind.or_else(|| recognise(&settings)) {
            Some(program) => program,
            None => {
                let names: Vec<_> = Program::NAMES.iter().map(|(name, _)| *name).collect();
                return Err(at(
                    path,
                    None,
                    format!(
                        "its settings are of no program that is known here; give --kind, one of {}",
                        names.join(", ")
                    ),
                ));
            }
        };
        Ok(Some(Self { path: path.to_owned(), program, settings, lines }))
    }

    pub(super) fn place(&self, name: &str) -> Place {
        let mut of = name;
        let line = loop {
            match (self.lines.get(of), of.rfind('.')) {
                (Some(line), _) => break Some(*line),
                (None, Some(end)) => of = &of[..end],
                (None, None) => break None,
            }
        };
        Place::File { path: self.path.clone(), line }
    }
}

/// The error for a place in another program's file.
pub(super) fn at(path: &Path, line: Option<usize>, message: impl Into<String>) -> ConfigError {
    let place = Place::File { path: path.to_owned(), line };
    ConfigError { place, problem: Problem::Syntax { message: message.into() } }
}

/// Returns the program whose file has these settings.
fn recognise(settings: &Map<String, Value>) -> Option<Program> {
    let has = |mark: &str| match mark.split_once('.') {
        Some((outer, inner)) => {
            settings.contains_key(mark) || settings.get(outer).is_some_and(|value| value.get(inner).is_some())
        }
        None => settings.contains_key(mark),
    };
    let count = |marks: &[&str]| marks.iter().filter(|mark| has(mark)).count();
    // Axolotl cannot run without this one, and its other names are those of many programs.
    let is_axolotl = has("base_model");
    let counts = MARKS.map(|(program, marks)| match program {
        Program::Axolotl if !is_axolotl => (program, 0),
        _ => (program, count(marks)),
    });
    // The first of the most marks: TRL's names occur in files of the others too.
    let most = counts.iter().map(|(_, count)| *count).max().filter(|count| *count > 0)?;
    let own = counts.iter().find(|(program, count)| *count > 0 && *program != Program::Trl);
    match own {
        Some(_) => {
            counts.iter().filter(|(p, _)| *p != Program::Trl).max_by_key(|(_, count)| *count).map(|(p, _)| *p)
        }
        None => counts.iter().find(|(_, count)| *count == most).map(|(program, _)| *program),
    }
}

fn json(path: &Path, text: &str) -> Result<Map<String, Value>> {
    let value: Value = serde_json::from_str(text)
        .map_err(|error| at(path, Some(error.line()), format!("not valid JSON: {error}")))?;
    match value {
        Value::Object(settings) => Ok(settings),
        _ => Err(at(path, None, "expected a JSON object of settings")),
    }
}

type Read = (Map<String, Value>, HashMap<String, usize>);

/// Most values of a YAML file, those counted that its aliases repeat: a few hundred bytes make billions.
const MOST_VALUES: usize = 100_000;

fn yaml(path: &Path, text: &str) -> Result<Option<Read>> {
    let mut scan = Scan::default();
    // What is no YAML is told below.
    if Parser::new_from_str(text).load(&mut scan, true).is_ok() && scan.values.count > MOST_VALUES {
        let reason = format!("more than {MOST_VALUES} values, with those that aliases (`*name`) repeat");
        return Err(at(path, None, reason));
    }
    let documents = match YamlLoader::load_from_str(text) {
        Ok(documents) => documents,
        // A command line is often no YAML either; a mapping is announced by its first lines.
        Err(_) if !looks_like_yaml(path, text) => return Ok(None),
        Err(error) => {
            let line = Some(error.marker().line());
            return Err(at(path, line, format!("not valid YAML: {}", error.info())));
        }
    };
    let [Yaml::Hash(_)] = &documents[..] else {
        return match documents.len() {
            0 | 1 => Ok(None),
            _ => Err(at(path, None, "expected one YAML document, found several; split the file")),
        };
    };
    let Value::Object(settings) = plain(&documents[0]) else { return Ok(None) };
    // A command line with one `: ` is a mapping, too; its key has blanks, as no setting's name has.
    if settings.keys().all(|key| key.contains(char::is_whitespace)) {
        return Ok(None);
    }
    let settings = Value::Object(settings);
    if let Some((name, reference)) = reference("", &settings) {
        let line = scan.places.lines.get(&name).copied();
        let reason =
            format!("`{name}`: no file says what {reference} stands for; write the value in its place");
        return Err(at(path, line, reason));
    }
    let Value::Object(settings) = settings else { return Ok(None) };
    Ok(Some((settings, scan.places.lines)))
}

fn looks_like_yaml(path: &Path, text: &str) -> bool {
    path.extension().is_some_and(|end| end == "yaml" || end == "yml")
        || text.lines().filter(|line| !line.trim_start().starts_with('#')).any(|line| {
            line.split_once(": ").is_some_and(|(key, _)| key.chars().all(|c| c.is_alphanumeric() || c == '_'))
        })
}

/// YAML as JSON. Keys that are no text become text; tags and aliases are resolved by the reader.
fn plain(yaml: &Yaml) -> Value {
    match yaml {
        Yaml::Real(text) => text.parse::<f64>().map_or_else(|_| text.clone().into(), Value::from),
        Yaml::Integer(number) => (*number).into(),
        // YAML 1.1, which PyYAML reads, has these words as switches.
        Yaml::String(text) => match text.as_str() {
            "yes" | "Yes" | "on" | "On" | "True" | "TRUE" => true.into(),
            "no" | "No" | "off" | "Off" | "False" | "FALSE" => false.into(),
            _ => text.clone().into(),
        },
        Yaml::Boolean(flag) => (*flag).into(),
        Yaml::Array(items) => items.iter().map(plain).collect(),
        Yaml::Hash(entries) => {
            let entry = |(key, value): (&Yaml, &Yaml)| {
                let key = match key {
                    Yaml::String(text) | Yaml::Real(text) => text.clone(),
                    Yaml::Integer(number) => number.to_string(),
                    Yaml::Boolean(flag) => flag.to_string(),
                    _ => return None,
                };
                Some((key, plain(value)))
            };
            let mut table: Map<_, _> = entries.iter().filter_map(entry).collect();
            merge(&mut table);
            Value::Object(table)
        }
        Yaml::Null | Yaml::BadValue | Yaml::Alias(_) => Value::Null,
    }
}

/// Resolves the merge key `<<` of YAML 1.1: a mapping, or a list of them, whose entries stand behind the own ones.
fn merge(table: &mut Map<String, Value>) {
    let is_mapping = match table.get("<<") {
        Some(Value::Array(items)) => items.iter().all(Value::is_object),
        Some(value) => value.is_object(),
        None => false,
    };
    if !is_mapping {
        return;
    }
    let merged = match table.shift_remove("<<") {
        Some(Value::Array(items)) => items,
        other => other.into_iter().collect(),
    };
    for (key, value) in merged.into_iter().filter_map(|mapping| mapping.as_object().cloned()).flatten() {
        table.entry(key).or_insert(value);
    }
}

/// Returns the name of a value with a reference like `${oc.env:HOME}`, which no file tells, and the reference.
fn reference(name: &str, value: &Value) -> Option<(String, String)> {
    match value {
        Value::String(text) if !text.contains("{{") && !text.contains("{%") => {
            let (_, rest) = text.split_once("${")?;
            let (inner, _) = rest.split_once('}')?;
            Some((name.to_owned(), format!("${{{inner}}}")))
        }
        Value::Array(items) => items.iter().find_map(|item| reference(name, item)),
        Value::Object(entries) => entries.iter().find_map(|(key, value)| {
            let name = if name.is_empty() { key.clone() } else { format!("{name}.{key}") };
            reference(&name, value)
        }),
        _ => None,
    }
}

/// Facts of a YAML file that are known before it is read.
#[derive(Default)]
struct Scan {
    values: Values,
    places: Places,
}

impl MarkedEventReceiver for Scan {
    fn on_event(&mut self, event: Event, marker: Marker) {
        self.values.count(&event);
        self.places.note(&event, marker.line());
    }
}

/// Number of values of a YAML file as a reader makes them, which copies the value of an anchor for each alias.
#[derive(Default)]
struct Values {
    count: usize,
    /// The open mappings and lists: their anchors, and the values before them.
    open: Vec<(usize, usize)>,
    of_anchor: HashMap<usize, usize>,
}

impl Values {
    fn count(&mut self, event: &Event) {
        match event {
            Event::Scalar(_, _, anchor, _) => {
                self.count = self.count.saturating_add(1);
                self.of_anchor.insert(*anchor, 1);
            }
            Event::Alias(anchor) => {
                let copied = self.of_anchor.get(anchor).copied().unwrap_or(1);
                self.count = self.count.saturating_add(copied);
            }
            Event::SequenceStart(anchor, _) | Event::MappingStart(anchor, _) => {
                self.open.push((*anchor, self.count));
                self.count = self.count.saturating_add(1);
            }
            Event::SequenceEnd | Event::MappingEnd => {
                if let Some((anchor, before)) = self.open.pop() {
                    self.of_anchor.insert(anchor, self.count - before);
                }
            }
            _ => {}
        }
    }
}

/// Lines of the keys of nested mappings.
#[derive(Default)]
struct Places {
    lines: HashMap<String, usize>,
    /// The open mappings and lists: the name so far, and the key whose value comes next.
    open: Vec<Level>,
}

struct Level {
    name: String,
    is_mapping: bool,
    key: Option<String>,
}

impl Places {
    /// Takes a scalar as a key or a value; returns the name of the value that begins.
    fn next(&mut self, scalar: Option<&str>, line: usize) -> Option<String> {
        let Some(level) = self.open.last_mut() else { return Some(String::new()) };
        if !level.is_mapping {
            return None;
        }
        match (level.key.take(), scalar) {
            (Some(key), _) => Some(key),
            (None, Some(text)) => {
                let name =
                    if level.name.is_empty() { text.to_owned() } else { format!("{}.{text}", level.name) };
                self.lines.entry(name.clone()).or_insert(line);
                level.key = Some(name);
                None
            }
            // A mapping or list as a key: none of its names matters.
            (None, None) => None,
        }
    }

    fn note(&mut self, event: &Event, line: usize) {
        match event {
            Event::Scalar(
                text,
                TScalarStyle::Plain | TScalarStyle::SingleQuoted | TScalarStyle::DoubleQuoted,
                ..,
            ) => {
                self.next(Some(text), line);
            }
            Event::Scalar(..) | Event::Alias(_) => {
                self.next(None, line);
            }
            Event::MappingStart(..) | Event::SequenceStart(..) => {
                let is_mapping = matches!(event, Event::MappingStart(..));
                let name = self.next(None, line);
                // Names inside of lists are not told apart.
                let inside_list = self.open.iter().any(|level| !level.is_mapping);
                let name = name.filter(|_| !inside_list).unwrap_or_default();
                self.open.push(Level { name, is_mapping: is_mapping && !inside_list, key: None });
            }
            Event::MappingEnd | Event::SequenceEnd => {
                self.open.pop();
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_line_with_one_colon_is_no_yaml() {
        for text in ["trl sft --run_name \"a: b\"", "python a.py --lr_scheduler_kwargs '{\"power\": 2}'"] {
            let read = Document::parse(Path::new("train.sh"), text, None).expect("no mistake");
            assert!(read.is_none(), "{text}");
        }
    }

    #[test]
    fn aliases_that_multiply_values_are_counted_before_they_are_copied() {
        let list = |name: &str| vec![format!("*{name}"); 9].join(",");
        let mut bomb = "a: &a [1,1,1,1,1,1,1,1,1]\n".to_owned();
        for (before, name) in "abcdefghi".chars().zip("bcdefghij".chars()) {
            bomb += &format!("{name}: &{name} [{}]\n", list(&before.to_string()));
        }
        let error = Document::parse(Path::new("bomb.yaml"), &bomb, None).expect_err("billions of values");
        assert!(error.to_string().contains("with those that aliases (`*name`) repeat"), "{error}");
        let few = "base: &base {learning_rate: 1}\nlearning_rate: 1e-5\ndataset_name: d\nother: *base\n";
        let read = Document::parse(Path::new("few.yaml"), few, Some(Program::Trl)).expect("no mistake");
        assert_eq!(read.expect("a mapping").settings["other"]["learning_rate"], 1);
    }
}
