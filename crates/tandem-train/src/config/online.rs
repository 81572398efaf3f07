//! `[online]`: how answers are generated and which pairs are made of them.

use std::path::Path;

use super::error::ConfigError;
use super::reader::{Entry, Section};
use super::server::{self, ServerConfig};
use super::{AdapterSection, Method};

/// How an online run comes to its pairs.
#[derive(Clone, Debug, PartialEq)]
pub struct OnlineConfig {
    /// What is made of the answers.
    pub algorithm: Algorithm,
    /// Answers to each prompt.
    pub num_answers: usize,
    /// Which of them become pairs.
    pub pairs: Pairs,
    /// Tokens of an answer at most, its end token included.
    pub max_new_tokens: usize,
    /// Divides the logits; 0 takes the most likely token.
    pub temperature: f64,
    /// Only this many most likely tokens are drawn from; `None` (written 0) is all.
    pub top_k: Option<usize>,
    /// Only the most likely tokens that together have this probability.
    pub top_p: f64,
    /// Only tokens of this part of the likeliest one's probability.
    pub min_p: f64,
    /// Makes tokens that are there already less likely.
    pub repetition_penalty: f64,
    /// Strings that end an answer.
    pub stop: Vec<String>,
    /// Answers under way at the same time on a rank, at most. A server has limits of its own.
    pub max_batch: usize,
    /// Steps whose answers are generated at once, by the weights before the first of them.
    pub steps_per_round: u64,
    /// Whether answers are generated and judged while the step before trains.
    pub overlap: bool,
    /// Judged prompts that are kept to be trained on again.
    pub replay_size: usize,
    /// How many of them join each step.
    pub replay_per_step: usize,
    /// Steps between those whose answers are written to `samples.jsonl`; `None` (written 0) writes none.
    pub samples_every: Option<u64>,
    /// Who answers, if this process does not.
    pub server: Option<ServerConfig>,
}

/// What `[online]` depends on besides.
pub(super) struct Around<'a> {
    pub method: Method,
    pub max_length: usize,
    pub output: &'a Path,
    pub adapter: Option<&'a AdapterSection>,
    pub tensor: usize,
}

/// What is made of answers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Algorithm {
    /// Pairs of the policy's own answers.
    Dpo,
    /// A pair of the policy's answer and the reference's, and a pull away from the reference's: exploratory preference
    /// optimisation (arXiv 2405.21046).
    Xpo {
        /// Strength of that pull.
        alpha: f64,
    },
    /// The policy's answer, by how likely it is preferred to one of a mixture of policy and reference: Nash-MD (arXiv 2312.00886).
    NashMd {
        /// The reference's part of the mixture.
        mixture: f64,
    },
}

impl Algorithm {
    /// The name in the config.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Dpo => "dpo",
            Self::Xpo { .. } => "xpo",
            Self::NashMd { .. } => "nash_md",
        }
    }

    /// Whether the reference has to answer too.
    pub const fn asks_reference(self) -> bool {
        !matches!(self, Self::Dpo)
    }
}

/// Which answers to a prompt become pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairs {
    /// The one with the highest score and the one with the lowest.
    BestWorst,
    /// Every two with different scores.
    All,
    /// Two that are drawn.
    Random,
}

impl Pairs {
    /// The names in the config.
    pub const NAMES: [(&'static str, Self); 3] =
        [("best_worst", Self::BestWorst), ("all", Self::All), ("random", Self::Random)];
}

/// The section is there where the method is online, and nowhere else.
pub(super) fn parse(
    entry: Option<Entry>,
    empty: impl FnOnce() -> Result<Section, ConfigError>,
    around: &Around<'_>,
) -> Result<Option<OnlineConfig>, ConfigError> {
    let method = around.method;
    match entry {
        Some(entry) if method != Method::Online => {
            Err(entry.conflict(format!("method = \"{method}\" generates nothing; remove the [online] table")))
        }
        Some(entry) => read(entry.section()?, around).map(Some),
        None if method == Method::Online => read(empty()?, around).map(Some),
        None => Ok(None),
    }
}

fn read(mut section: Section, around: &Around<'_>) -> Result<OnlineConfig, ConfigError> {
    let max_length = around.max_length;
    let server = section.take("server");
    let max_new_tokens = match section.take("max_new_tokens") {
        None if max_length > 64 => 64,
        None => max_length / 2,
        Some(entry) => {
            let tokens = entry.integer(1..=1 << 24)? as usize;
            if tokens >= max_length {
                return Err(entry.conflict(format!(
                    "data.max_length = {max_length} counts prompt and answer together and leaves no room for a prompt; make this \
                     smaller, or that larger"
                )));
            }
            tokens
        }
    };
    let replay = section.take("replay_size");
    let replay_size = replay.as_ref().map_or(Ok(0), |e| e.integer(0..=1 << 20))? as usize;
    let replay_per_step = match section.take("replay_per_step") {
        None => 0,
        Some(entry) => match entry.integer(0..=1 << 20)? as usize {
            n if n > replay_size => {
                return Err(entry.conflict(format!(
                    "replay_size keeps {replay_size} prompts; make it at least as many as join each step"
                )));
            }
            n => n,
        },
    };
    if let Some(entry) = replay.filter(|_| replay_size > 0 && replay_per_step == 0) {
        return Err(entry.conflict(
            "no step would train on what is kept; say with replay_per_step how many prompts join each, or remove this key",
        ));
    }
    let share = |x: f64| (0.0..=1.0).contains(&x);
    let algorithm = algorithm(&mut section)?;
    let two = |entry: &Entry| {
        if !algorithm.asks_reference() {
            return Ok(());
        }
        let name = algorithm.name();
        Err(entry.conflict(format!(
            "algorithm = \"{name}\" has two answers to a prompt, the second of them not the policy's own; remove it"
        )))
    };
    let config = OnlineConfig {
        algorithm,
        num_answers: section.take("answers").map_or(Ok(2), |e| {
            let answers = e.integer(2..=64)?;
            if answers > 2 {
                two(&e)?;
            }
            Ok(answers)
        })? as usize,
        pairs: section.take("pairs").map_or(Ok(Pairs::BestWorst), |e| {
            let pairs = e.one_of(&Pairs::NAMES)?;
            if pairs != Pairs::BestWorst {
                two(&e)?;
            }
            Ok(pairs)
        })?,
        max_new_tokens,
        temperature: section
            .take("temperature")
            .map_or(Ok(0.9), |e| e.number("a number of at least 0", |t| t >= 0.0))?,
        top_k: section
            .take("top_k")
            .map_or(Ok(0), |e| e.integer(0..=1 << 24))
            .map(|k| (k != 0).then_some(k as usize))?,
        top_p: section
            .take("top_p")
            .map_or(Ok(1.0), |e| e.number("a number above 0, at most 1", |p| p > 0.0 && share(p)))?,
        min_p: section.take("min_p").map_or(Ok(0.0), |e| e.number("a number from 0 to 1", share))?,
        repetition_penalty: section
            .take("repetition_penalty")
            .map_or(Ok(1.0), |e| e.number("a positive number", |p| p > 0.0))?,
        stop: section.take("stop").map_or(Ok(Vec::new()), strings)?,
        max_batch: match (section.take("max_batch"), &server) {
            (Some(entry), Some(_)) => {
                return Err(entry.conflict(
                    "a server decides for itself how many answers are under way; remove it, or [online.server], whose \
                     `concurrency` counts requests",
                ));
            }
            (entry, _) => entry.map_or(Ok(64), |e| e.integer(1..=1 << 16))? as usize,
        },
        steps_per_round: section.take("steps_per_round").map_or(Ok(1), |e| e.integer(1..=1 << 16))?,
        overlap: section.take("overlap").map_or(Ok(false), |e| e.boolean())?,
        replay_size,
        replay_per_step,
        samples_every: section
            .take("samples_every")
            .map_or(Ok(10), |e| e.integer(0..=i64::MAX as u64))
            .map(|n| (n != 0).then_some(n))?,
        server: None,
    };
    section.finish()?;
    let Some(entry) = server else { return Ok(config) };
    if let Some(reason) = server::contradicts(&config) {
        return Err(entry.conflict(reason));
    }
    Ok(OnlineConfig { server: Some(server::parse(entry, around)?), ..config })
}

fn algorithm(section: &mut Section) -> Result<Algorithm, ConfigError> {
    let name = section
        .take("algorithm")
        .map_or(Ok("dpo"), |e| e.one_of(&[("dpo", "dpo"), ("xpo", "xpo"), ("nash_md", "nash_md")]))?;
    let (alpha, mixture) = (section.take("alpha"), section.take("mixture"));
    for (entry, own) in [(&alpha, "xpo"), (&mixture, "nash_md")] {
        if let Some(entry) = entry.as_ref().filter(|_| name != own) {
            return Err(entry.conflict(format!("only algorithm = \"{own}\" has it; remove it")));
        }
    }
    Ok(match name {
        "xpo" => Algorithm::Xpo {
            alpha: alpha.map_or(Ok(1e-5), |e| e.number("a number of at least 0", |a| a >= 0.0))?,
        },
        "nash_md" => Algorithm::NashMd {
            mixture: mixture
                .map_or(Ok(0.5), |e| e.number("a number from 0 to 1", |m| (0.0..=1.0).contains(&m)))?,
        },
        _ => Algorithm::Dpo,
    })
}

fn strings(entry: Entry) -> Result<Vec<String>, ConfigError> {
    let string = |item: Entry| match item.string()? {
        "" => Err(item.wrong("a string that is not empty")),
        text => Ok(text.to_owned()),
    };
    entry.items().into_iter().map(string).collect()
}
