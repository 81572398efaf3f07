//! The keys of each kind of judge. Defaults are those of the judges.

use tandem_judge::{
    CommandConfig, Compare, EndpointConfig, ExactConfig, Expect, JsonConfig, LengthConfig, LengthUnit,
    MissingEosConfig, RegexConfig, Rule,
};
use tandem_kernels::Format;

use super::{JudgeKind, RewardSection};
use crate::config::error::ConfigError;
use crate::config::reader::{Entry, Section};

type Result<T, E = ConfigError> = std::result::Result<T, E>;
type Parse = fn(&mut Section) -> Result<JudgeKind>;

/// Every kind, by its name in the config.
const KINDS: [(&str, Parse); 8] = [
    ("length", length),
    ("regex", regex),
    ("exact", exact),
    ("json", json),
    ("missing_eos", missing_eos),
    ("command", command),
    ("endpoint", endpoint),
    ("reward", reward),
];

pub const UNITS: [(&str, LengthUnit); 2] =
    [("tokens", LengthUnit::Tokens), ("characters", LengthUnit::Characters)];
pub const COMPARISONS: [(&str, Compare); 2] = [("text", Compare::Text), ("last_number", Compare::LastNumber)];

/// The greatest number of tokens, characters or items that is taken.
const MANY: u64 = 1 << 32;

/// The names of all kinds, for messages.
pub fn list() -> String {
    KINDS.map(|(name, _)| format!("{name:?}")).join(", ")
}

/// What a judge's table says of the `kind` that it names.
pub fn parse(kind: &Entry, section: &mut Section) -> Result<JudgeKind> {
    kind.one_of(&KINDS)?(section)
}

fn length(section: &mut Section) -> Result<JudgeKind> {
    Ok(JudgeKind::Rule(Rule::Length(LengthConfig {
        unit: section.take("unit").map_or(Ok(LengthUnit::default()), |e| e.one_of(&UNITS))?,
        min: count(section, "min", 0, 0)?,
        max: section.take("max").map(|e| e.integer(0..=MANY)).transpose()?.map(|n| n as usize),
        per_unit: section.take("per_unit").map(|e| e.number("a finite number", |_| true)).transpose()?,
    })))
}

fn regex(section: &mut Section) -> Result<JudgeKind> {
    let pattern = text(&section.required("pattern", "a regular expression")?)?;
    let (expect, field) = (section.take("expect"), section.take("field"));
    let choice = expect.map_or(Ok("match"), |e| {
        e.one_of(&[("match", "match"), ("no_match", "no_match"), ("group", "group")])
    })?;
    let expect = match (choice, field) {
        ("group", Some(field)) => Expect::Group { field: text(&field)? },
        ("group", None) => {
            return Err(section.missing("field", "the row's field that the group should equal"));
        }
        (_, Some(field)) => {
            return Err(field.conflict("only expect = \"group\" compares with a field; remove it"));
        }
        ("no_match", None) => Expect::NoMatch,
        (_, None) => Expect::Match,
    };
    Ok(JudgeKind::Rule(Rule::Regex(RegexConfig { pattern, expect })))
}

fn exact(section: &mut Section) -> Result<JudgeKind> {
    Ok(JudgeKind::Rule(Rule::Exact(ExactConfig {
        field: text(&section.required("field", "the row's field with the right answer")?)?,
        compare: section.take("compare").map_or(Ok(Compare::default()), |e| e.one_of(&COMPARISONS))?,
        fold_case: section.take("fold_case").map_or(Ok(false), |e| e.boolean())?,
    })))
}

fn json(section: &mut Section) -> Result<JudgeKind> {
    let keys = section.take("keys").map_or(Ok(Vec::new()), |e| texts(e, "a list of keys"))?;
    Ok(JudgeKind::Rule(Rule::Json(JsonConfig { keys })))
}

fn missing_eos(section: &mut Section) -> Result<JudgeKind> {
    let default = MissingEosConfig::default();
    let penalty = number(section, "penalty", default.penalty, "a positive number", |x| x > 0.0)?;
    Ok(JudgeKind::Rule(Rule::MissingEos(MissingEosConfig { penalty })))
}

fn command(section: &mut Section) -> Result<JudgeKind> {
    let default = CommandConfig::default();
    let give = "a list: a program and its arguments, for example [\"python3\", \"judge.py\"]";
    Ok(JudgeKind::Command(CommandConfig {
        command: texts(section.required("command", give)?, give)?,
        seconds: seconds(section, "seconds", default.seconds)?,
        start_seconds: seconds(section, "start_seconds", default.start_seconds)?,
        in_flight: count(section, "in_flight", default.in_flight, 1)?,
        restarts: count(section, "restarts", default.restarts, 0)?,
        first_pause_s: seconds(section, "first_pause_s", default.first_pause_s)?,
        longest_pause_s: seconds(section, "longest_pause_s", default.longest_pause_s)?,
        grace_s: number(section, "grace_s", default.grace_s, "a number of seconds, 0 or more", |x| x >= 0.0)?,
    }))
}

fn endpoint(section: &mut Section) -> Result<JudgeKind> {
    let default = EndpointConfig::default();
    let address = "an address up to the version, as \"http://localhost:8000/v1\"";
    Ok(JudgeKind::Endpoint(EndpointConfig {
        base_url: text(&section.required("base_url", address)?)?,
        model: text(&section.required("model", "the model's name at the endpoint")?)?,
        api_key_env: section.take("api_key_env").map(|e| text(&e)).transpose()?,
        prompt: section.take("prompt").map_or(Ok(default.prompt), |e| text(&e))?,
        max_tokens: section
            .take("max_tokens")
            .map_or(Ok(default.max_tokens.into()), |e| e.integer(1..=u32::MAX.into()))?
            as u32,
        timeout_s: seconds(section, "timeout_s", default.timeout_s)?,
        retries: count(section, "retries", default.retries, 0)?,
        first_pause_s: seconds(section, "first_pause_s", default.first_pause_s)?,
        longest_pause_s: seconds(section, "longest_pause_s", default.longest_pause_s)?,
        concurrency: count(section, "concurrency", default.concurrency, 1)?,
        cache: section.take("cache").map(|e| e.path()).transpose()?,
        budget: section.take("budget").map(|e| e.integer(1..=i64::MAX as u64)).transpose()?,
    }))
}

fn reward(section: &mut Section) -> Result<JudgeKind> {
    let formats = Format::ALL.map(|format| (format.name(), Some(format)));
    Ok(JudgeKind::Reward(RewardSection {
        model: section.required("model", "the folder of a reward model")?.path()?,
        max_length: count(section, "max_length", 4096, 1)?,
        micro_batch_tokens: count(section, "micro_batch_tokens", 4096, 1)?,
        format: section
            .take("format")
            .map_or(Ok(None), |e| e.one_of(&[&[("auto", None)], &formats[..]].concat()))?,
    }))
}

fn text(entry: &Entry) -> Result<String> {
    entry.string().map(str::to_owned)
}

fn texts(entry: Entry, expected: &str) -> Result<Vec<String>> {
    let wrong = entry.wrong(expected);
    if entry.string().is_ok() {
        return Err(wrong);
    }
    entry.items().iter().map(text).collect::<Result<_>>().map_err(|_| wrong)
}

fn count(section: &mut Section, key: &'static str, default: usize, least: u64) -> Result<usize> {
    section.take(key).map_or(Ok(default), |e| e.integer(least..=MANY).map(|n| n as usize))
}

fn number(
    section: &mut Section,
    key: &'static str,
    default: f64,
    expected: &str,
    is_valid: impl Fn(f64) -> bool,
) -> Result<f64> {
    section.take(key).map_or(Ok(default), |e| e.number(expected, is_valid))
}

fn seconds(section: &mut Section, key: &'static str, default: f64) -> Result<f64> {
    number(section, key, default, "a positive number of seconds", |x| x > 0.0)
}
