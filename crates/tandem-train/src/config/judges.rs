//! `[[judges]]`: judges of generated completions, and the weights of their scores.

mod kinds;

use std::path::{Path, PathBuf};

use tandem_judge::{CommandConfig, EndpointConfig, JudgeError, OwnConfig, Rule};
use tandem_kernels::Format;

use super::Method;
use super::error::{ConfigError, Result};
use super::form::{boolean, choice, filled, number};
use super::hub::Lookup;
use super::keys::{Keys, keys};
use super::reader::Section;
use super::tree::{Node, Places};
pub(super) use kinds::{KINDS, command};

/// A judge of a panel.
#[derive(Clone, Debug, PartialEq)]
pub struct JudgeSection {
    /// Name of its scores in metrics and samples.
    pub name: String,
    /// Factor of its scores.
    pub weight: f64,
    /// Whether the others score a completion that it gives no score.
    pub may_abstain: bool,
    /// Kind and options.
    pub kind: JudgeKind,
}

/// A judge's kind and options.
#[derive(Clone, Debug, PartialEq)]
pub enum JudgeKind {
    /// A rule over the text.
    Rule(Rule),
    /// A program.
    Command(CommandConfig),
    /// A chat model behind an HTTP endpoint.
    Endpoint(EndpointConfig),
    /// A reward model.
    Reward(RewardSection),
    /// A function of the program that uses this library.
    Own(OwnConfig),
}

/// A reward model that scores completions.
#[derive(Clone, Debug, PartialEq)]
pub struct RewardSection {
    /// Model folder, with its tokenizer.
    pub model: PathBuf,
    /// Most tokens of a prompt and its completion; a longer text has no score.
    pub max_length: usize,
    /// Approximate tokens per forward pass, which determine its memory.
    pub micro_batch_tokens: usize,
    /// Format of its matrices; `None` for the compute type.
    pub format: Option<Format>,
}

impl JudgeSection {
    pub(super) fn visit(now: Option<&Self>, keys: &mut Keys) -> Result<Self> {
        let list = KINDS.map(|kind| format!("{kind:?}")).join(", ");
        keys! { let keys, now;
            /// Kind of the judge. Each kind has keys of its own, in the tables below.
            kind = choice(KINDS.map(|kind| (kind, kind)))
                .or(KINDS[0])
                .required_if(true, format!("the judge's kind: one of {list}")),
                now.kind.name();
            /// Name of its scores. Every judge needs a different one.
            name = filled("a name").or(kind.to_owned()).shown("the kind"), now.name.clone();
            /// Factor of its scores. A judge with weight 0 is asked but does not count; at least one
            /// must count.
            weight = number(..).or(1.0), now.weight;
            /// Let the other judges score a completion to which it gives no score. Otherwise that completion
            /// has no score.
            may_abstain = boolean().or(false), now.may_abstain;
        }
        Ok(Self { name, weight, may_abstain, kind: JudgeKind::visit(kind, now.map(|now| &now.kind), keys)? })
    }
}

impl JudgeKind {
    /// Checks the options as the judge itself does when it is built.
    fn check(&self, name: &str) -> Result<(), JudgeError> {
        match self {
            Self::Rule(Rule::Length(config)) => config.check(name),
            Self::Rule(Rule::Regex(config)) => config.check(name),
            Self::Rule(Rule::Exact(config)) => config.check(name),
            Self::Rule(Rule::MissingEos(config)) => config.check(name),
            Self::Command(config) => config.check(name),
            Self::Endpoint(config) => config.check(name),
            Self::Own(config) => config.check(name),
            Self::Rule(Rule::Json(_)) | Self::Reward(_) => Ok(()),
        }
    }
}

/// Reads a file of `[[judges]]` tables, as `tandem eval --judge` takes it.
///
/// # Errors
/// As [`Config::load`](super::Config::load).
pub fn load_judges(path: &Path) -> Result<Vec<JudgeSection>> {
    read_judges(path, &Lookup::default())
}

pub(super) fn read_judges(path: &Path, lookup: &Lookup) -> Result<Vec<JudgeSection>> {
    let text = tandem_files::read_text(path, tandem_files::MAX_CONFIG)
        .map_err(|source| ConfigError::unreadable(path, &source))?;
    let tree = Node::parse(&text, path)?;
    let places = Places::new(&tree, path);
    let mut keys = Keys::Read(Section::root(tree, path, false, lookup));
    let judges = keys.tables("judges", TABLES, None, JudgeSection::visit)?;
    keys.finish()?;
    check(&judges, &places)?;
    Ok(judges)
}

const TABLES: &str = "a [[judges]] table for each judge";

/// The judges of a run; none for a method that generates nothing, or with an environment.
pub(super) fn visit(
    now: Option<&Vec<JudgeSection>>,
    keys: &mut Keys,
    method: Method,
    has_environment: bool,
) -> Result<Vec<JudgeSection>> {
    if has_environment && !matches!(keys, Keys::List(_)) {
        keys.refuse(
            "judges",
            "with [online.environment] the environment gives the reward; remove the [[judges]] tables",
        )?;
        return Ok(Vec::new());
    }
    if method.generates() {
        return keys.tables("judges", TABLES, now, JudgeSection::visit);
    }
    let reason = match method {
        Method::Distill => {
            "method = \"distill\" learns from its teacher alone; remove the [[judges]] tables".to_owned()
        }
        _ => format!("method = \"{method}\" generates no completions to judge; remove the [[judges]] tables"),
    };
    keys.refuse("judges", &reason)?;
    Ok(Vec::new())
}

/// Refuses options that a judge refuses, two judges of one name, and a panel without any weight.
pub(super) fn check(judges: &[JudgeSection], places: &Places) -> Result<()> {
    for (index, judge) in judges.iter().enumerate() {
        let key = |key: &str| format!("judges[{index}].{key}");
        if judges[..index].iter().any(|other| other.name == judge.name) {
            let named = if places.has(&key("name")) { "name" } else { "kind" };
            let reason =
                format!("another judge is named {:?} too; set a different `name` for each", judge.name);
            return Err(places.conflict(&key(named), reason));
        }
        judge.kind.check(&judge.name).map_err(|error| match error {
            JudgeError::Option { key: option, reason, .. } => {
                places.conflict(&key(option), format!("it {reason}"))
            }
            other => places.conflict(&key("kind"), other.to_string()),
        })?;
    }
    if !judges.is_empty() && judges.iter().all(|judge| judge.weight == 0.0) {
        return Err(places.conflict("judges", "no judge's score counts; set a `weight` other than 0 for one"));
    }
    Ok(())
}
