//! `[[judges]]`: who scores generated answers, and what each one's scores weigh.

mod kinds;
mod written;

use std::fs;
use std::path::{Path, PathBuf};

use tandem_judge::{CommandConfig, EndpointConfig, JudgeError, Rule};
use tandem_kernels::Format;

use super::Method;
use super::error::{ConfigError, Problem};
use super::reader::{Entry, Section};
use super::tree::{Node, Value};
pub(super) use written::entries;

/// A judge of a panel.
#[derive(Clone, Debug, PartialEq)]
pub struct JudgeSection {
    /// The name under which its scores are stored.
    pub name: String,
    /// What its scores are multiplied by.
    pub weight: f64,
    /// What it is.
    pub kind: JudgeKind,
}

/// What scores.
#[derive(Clone, Debug, PartialEq)]
pub enum JudgeKind {
    /// The text alone.
    Rule(Rule),
    /// A program.
    Command(CommandConfig),
    /// A chat model behind an address.
    Endpoint(EndpointConfig),
    /// A reward model.
    Reward(RewardSection),
}

/// A reward model that scores answers.
#[derive(Clone, Debug, PartialEq)]
pub struct RewardSection {
    /// Its folder, with its tokenizer.
    pub model: PathBuf,
    /// The most tokens of a prompt and its answer; a longer text has no score. Not more than the model has positions.
    pub max_length: usize,
    /// About how many tokens go through the model at once, which is what its memory grows with.
    pub micro_batch_tokens: usize,
    /// How its matrices are kept; `None` for the type that it computes in.
    pub format: Option<Format>,
}

impl JudgeKind {
    /// The name in the config.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Rule(Rule::Length(_)) => "length",
            Self::Rule(Rule::Regex(_)) => "regex",
            Self::Rule(Rule::Exact(_)) => "exact",
            Self::Rule(Rule::Json(_)) => "json",
            Self::Rule(Rule::MissingEos(_)) => "missing_eos",
            Self::Command(_) => "command",
            Self::Endpoint(_) => "endpoint",
            Self::Reward(_) => "reward",
        }
    }

    /// Whether the options make sense, as the judge itself will ask when it is built.
    fn check(&self, name: &str) -> Result<(), JudgeError> {
        match self {
            Self::Rule(Rule::Length(config)) => config.check(name),
            Self::Rule(Rule::Regex(config)) => config.check(name),
            Self::Rule(Rule::Exact(config)) => config.check(name),
            Self::Rule(Rule::MissingEos(config)) => config.check(name),
            Self::Command(config) => config.check(name),
            Self::Endpoint(config) => config.check(name),
            Self::Rule(Rule::Json(_)) | Self::Reward(_) => Ok(()),
        }
    }
}

/// Reads a file that has `[[judges]]` tables and nothing else, as `tandem eval --judge` takes it.
///
/// # Errors
/// As [`Config::load`](super::Config::load).
pub fn load_judges(path: &Path) -> Result<Vec<JudgeSection>, ConfigError> {
    let text = fs::read_to_string(path).map_err(|source| ConfigError::unreadable(path, &source))?;
    let mut root = Section::root(Node::parse(&text, path)?, path)?;
    let judges = parse(Some(root.required("judges", "a [[judges]] table for each judge")?))?;
    root.finish()?;
    Ok(judges)
}

/// Lets `[[judges]]` pass where the method has answers to judge.
pub(super) fn under(method: Method, root: &mut Section) -> Result<Option<Entry>, ConfigError> {
    match (method, root.take("judges")) {
        (Method::Online, None) => {
            Err(root.missing("judges", "a [[judges]] table for each judge of the answers that are generated"))
        }
        (Method::Sft | Method::Dpo | Method::Reward, Some(entry)) => Err(entry.conflict(format!(
            "method = \"{method}\" generates no answers that could be judged; remove the [[judges]] tables"
        ))),
        (_, entry) => Ok(entry),
    }
}

/// The judges; none where the key is absent.
pub(super) fn parse(entry: Option<Entry>) -> Result<Vec<JudgeSection>, ConfigError> {
    let Some(entry) = entry else { return Ok(Vec::new()) };
    if !matches!(&entry.node.value, Value::Array(items) if !items.is_empty()) {
        return Err(entry.wrong("a [[judges]] table for each judge"));
    }
    let weightless = entry.conflict("no judge's score counts; give one a `weight` other than 0");
    let mut judges: Vec<JudgeSection> = Vec::new();
    for item in entry.items() {
        judges.push(judge(item, &judges)?);
    }
    if judges.iter().all(|judge| judge.weight == 0.0) {
        return Err(weightless);
    }
    Ok(judges)
}

fn judge(entry: Entry, others: &[JudgeSection]) -> Result<JudgeSection, ConfigError> {
    let doubled = |key: &Entry, name: &str| {
        key.conflict(format!("another judge is named {name:?} too; give each a `name` of its own"))
    };
    let (table, table_place) = (entry.key.clone(), entry.node.place.clone());
    let mut section = entry.section()?;
    let places = section.places();
    let kind = section.required("kind", &format!("what judges: one of {}", kinds::list()))?;
    let name = section.take("name");
    let weight = section.take("weight");
    let judge = JudgeSection {
        weight: weight.map_or(Ok(1.0), |e| e.number("a finite number", |_| true))?,
        name: match &name {
            Some(entry) if entry.string()?.is_empty() => return Err(entry.wrong("a name")),
            Some(entry) => entry.string()?.to_owned(),
            None => kind.string().unwrap_or_default().to_owned(),
        },
        kind: kinds::parse(&kind, &mut section)?,
    };
    if others.iter().any(|other| other.name == judge.name) {
        return Err(doubled(name.as_ref().unwrap_or(&kind), &judge.name));
    }
    section.finish()?;
    judge.kind.check(&judge.name).map_err(|error| {
        let (key, reason) = match error {
            JudgeError::Option { key, reason, .. } => (key, format!("it {reason}")),
            other => ("kind", other.to_string()),
        };
        let place = places.into_iter().find(|(name, _)| name == key).map_or(table_place, |(_, place)| place);
        ConfigError { place, problem: Problem::Conflict { key: format!("{table}.{key}"), reason } }
    })?;
    Ok(judge)
}
