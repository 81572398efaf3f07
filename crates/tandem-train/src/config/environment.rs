//! `[online.environment]`: a program that continues conversations and rewards them.

use tandem_judge::{CommandConfig, JudgeError};

use super::Config;
use super::error::Result;
use super::form::integer;
use super::grpo::Aggregation;
use super::judges::command;
use super::keys::{Keys, group, keys};
use super::online::OnlineConfig;
use super::tree::Places;

keys! {
    /// A program that continues conversations and rewards them.
    #[derive(Clone, Debug, PartialEq)]
    pub struct EnvironmentConfig() {
        /// The program, and how it is run.
        command: CommandConfig = group(command),
        /// Most turns of the policy in a conversation. After the last one the environment must end it.
        max_turns: usize = integer(1..=64).or(8),
    }
}

/// Visits the table, if there is one.
pub(super) fn visit(
    now: Option<&Option<EnvironmentConfig>>,
    keys: &mut Keys,
    is_grpo: bool,
) -> Result<Option<EnvironmentConfig>> {
    // The reference page lists every table.
    if is_grpo || matches!(keys, Keys::List(_)) {
        return keys.optional_table("environment", now, EnvironmentConfig::visit);
    }
    keys.refuse(
        "environment",
        "only method = \"grpo\" has conversations; remove [online.environment], or set method = \"grpo\"",
    )?;
    Ok(None)
}

/// Refuses what an environment has no use for.
pub(super) fn check(online: &OnlineConfig, config: &Config, places: &Places) -> Result<()> {
    let Some(section) = &online.environment else { return Ok(()) };
    section.command.check("environment").map_err(|error| match error {
        JudgeError::Option { key, reason, .. } => {
            places.conflict(&format!("online.environment.{key}"), format!("it {reason}"))
        }
        other => places.conflict("online.environment.command", other.to_string()),
    })?;
    let grpo = online.algorithm.grpo();
    let refused = [
        (
            online.server.is_some(),
            "online.server",
            "a server answers a prompt once, without an environment; remove one of the two tables",
        ),
        (
            online.overlap,
            "online.overlap",
            "conversations with an environment are generated before the step; remove one of the two",
        ),
        (
            !config.data.eval.is_empty(),
            "data.eval",
            "held-out prompts are not given to an environment; remove one of the two",
        ),
        (
            grpo.is_some_and(|grpo| grpo.max_resamples > 0),
            "grpo.max_resamples",
            "conversations with an environment are not replaced by others; remove one of the two",
        ),
        (
            grpo.is_some_and(|grpo| grpo.overlong_tokens.is_some()),
            "grpo.overlong_tokens",
            "online.max_new_tokens limits each turn of a conversation with an environment, not the whole; remove one of \
             the two",
        ),
        (
            grpo.is_some_and(|grpo| grpo.aggregation == Aggregation::NormalizeThenSum),
            "grpo.aggregation",
            "it compares judges, and the environment gives the only reward; remove one of the two",
        ),
    ];
    match refused.into_iter().find(|(is_set, ..)| *is_set) {
        Some((_, key, reason)) => {
            Err(places.conflict(key, format!("not supported with [online.environment]: {reason}")))
        }
        None => Ok(()),
    }
}
