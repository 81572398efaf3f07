//! A judge as its table, with every default written out.

use tandem_judge::{
    CommandConfig, EndpointConfig, ExactConfig, Expect, JsonConfig, LengthConfig, MissingEosConfig,
    RegexConfig, Rule,
};
use tandem_kernels::Format;
use toml::Value;

use super::kinds::{COMPARISONS, UNITS};
use super::{JudgeKind, JudgeSection, RewardSection};
use crate::config::resolved::{Entries, integer, name, path};

/// The keys and values of a judge's table.
pub fn entries(judge: &JudgeSection) -> Entries {
    let mut out: Entries = vec![
        ("kind", judge.kind.name().into()),
        ("name", judge.name.clone().into()),
        ("weight", judge.weight.into()),
    ];
    out.extend(match &judge.kind {
        JudgeKind::Rule(rule) => self::rule(rule),
        JudgeKind::Command(config) => command(config),
        JudgeKind::Endpoint(config) => endpoint(config),
        JudgeKind::Reward(section) => reward(section),
    });
    out
}

fn rule(rule: &Rule) -> Entries {
    match rule {
        Rule::Length(LengthConfig { unit, min, max, per_unit }) => {
            let mut out = vec![("unit", name(&UNITS, *unit)), ("min", count(*min))];
            out.extend(max.map(|max| ("max", count(max))));
            out.extend(per_unit.map(|score| ("per_unit", score.into())));
            out
        }
        Rule::Regex(RegexConfig { pattern, expect }) => {
            let mut out = vec![("pattern", pattern.clone().into())];
            out.extend(match expect {
                Expect::Match => vec![("expect", "match".into())],
                Expect::NoMatch => vec![("expect", "no_match".into())],
                Expect::Group { field } => vec![("expect", "group".into()), ("field", field.clone().into())],
            });
            out
        }
        Rule::Exact(ExactConfig { field, compare, fold_case }) => vec![
            ("field", field.clone().into()),
            ("compare", name(&COMPARISONS, *compare)),
            ("fold_case", (*fold_case).into()),
        ],
        Rule::Json(JsonConfig { keys }) => vec![("keys", list(keys))],
        Rule::MissingEos(MissingEosConfig { penalty }) => vec![("penalty", (*penalty).into())],
    }
}

fn command(config: &CommandConfig) -> Entries {
    vec![
        ("command", list(&config.command)),
        ("seconds", config.seconds.into()),
        ("start_seconds", config.start_seconds.into()),
        ("in_flight", count(config.in_flight)),
        ("restarts", count(config.restarts)),
        ("first_pause_s", config.first_pause_s.into()),
        ("longest_pause_s", config.longest_pause_s.into()),
        ("grace_s", config.grace_s.into()),
    ]
}

fn endpoint(config: &EndpointConfig) -> Entries {
    let mut out = vec![("base_url", config.base_url.clone().into()), ("model", config.model.clone().into())];
    out.extend(config.api_key_env.clone().map(|variable| ("api_key_env", variable.into())));
    out.extend([
        ("prompt", config.prompt.clone().into()),
        ("max_tokens", integer(config.max_tokens.into())),
        ("timeout_s", config.timeout_s.into()),
        ("retries", count(config.retries)),
        ("first_pause_s", config.first_pause_s.into()),
        ("longest_pause_s", config.longest_pause_s.into()),
        ("concurrency", count(config.concurrency)),
    ]);
    out.extend(config.cache.as_deref().map(|folder| ("cache", path(folder))));
    out.extend(config.budget.map(|requests| ("budget", integer(requests))));
    out
}

fn reward(section: &RewardSection) -> Entries {
    vec![
        ("model", path(&section.model)),
        ("max_length", count(section.max_length)),
        ("micro_batch_tokens", count(section.micro_batch_tokens)),
        ("format", section.format.map_or("auto", Format::name).into()),
    ]
}

fn count(number: usize) -> Value {
    integer(number as u64)
}

fn list(texts: &[String]) -> Value {
    Value::Array(texts.iter().map(|text| text.clone().into()).collect())
}
