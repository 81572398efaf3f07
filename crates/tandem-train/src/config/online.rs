//! `[online]`: generation of completions, and the pairs made from them.

use std::ops::Bound::{Excluded, Included};
use std::path::Path;

use super::Config;
use super::distill::DistillConfig;
use super::environment::{self, EnvironmentConfig};
use super::error::Result;
use super::form::{COUNT, Form, POSITIVE, boolean, choice, custom, filled, integer, number, texts_value};
use super::grpo::{Aggregation, GrpoConfig};
use super::keys::{Keys, group, keys};
use super::reader::Entry;
use super::server::{self, ServerConfig};
use super::tree::Places;
use crate::objective::GrpoOptions;

keys! {
    /// Generation of completions, and the pairs made from them.
    #[derive(Clone, Debug, PartialEq)]
    pub struct OnlineConfig(
        max_length: usize,
        output: &Path,
        grpo: Option<GrpoConfig>,
        distill: Option<DistillConfig>,
        answers_eval: bool,
    ) {
        /// Use of the completions.
        algorithm: Algorithm = group(|now, keys: &mut Keys| Algorithm::visit(now, keys, grpo, distill)),
        /// Completions per prompt; one is enough for distillation alone.
        num_answers: usize = integer(1..=64)
            .unless(|answers: &usize| match *answers {
                1 => distill.is_none().then(|| "completions are compared, which takes two; set 2 or more".to_owned()),
                2 => None,
                _ => algorithm.refuse_more(),
            })
            .or(if grpo.is_some() { 8 } else if distill.is_some() { 1 } else { 2 })
            .shown("2; 8 for GRPO, 1 for distillation")
            .named("answers"),
        /// Completions that become pairs: those with the highest and the lowest score, every two
        /// with different scores, or two at random. Two equal scores are no pair.
        pairs: Pairs = choice(Pairs::NAMES)
            .unless(|pairs| (*pairs != Pairs::BestWorst).then(|| algorithm.refuse_more()).flatten())
            .or(Pairs::BestWorst)
            .only(!algorithm.is_of_method(), algorithm.refuse_pairs()),
        /// Most tokens of a completion, its end token included; less than `data.max_length`.
        max_new_tokens: usize = integer(1..=1 << 24)
            .unit("tokens")
            .unless(|tokens: &usize| (*tokens >= max_length).then(|| format!(
                "data.max_length = {max_length} counts prompt and completion together and leaves no room for a \
                 prompt; lower this key or raise data.max_length"
            )))
            .or(if max_length > 64 { 64 } else { max_length / 2 })
            .shown("64; half of `data.max_length` if that is 64 or less"),
        /// Divisor of the logits; 0 takes the most likely token.
        temperature: f64 = number(0.0..)
            .unless(|temperature| (*temperature == 0.0 && grpo.is_some()).then(|| {
                "the answers of a group would all be the same; set it above 0".to_owned()
            }))
            .or(match distill {
                Some(distill) => distill.temperature,
                None if grpo.is_some() => 1.0,
                None => 0.9,
            })
            .shown(
                "0.9; 1 for GRPO, whose log-probabilities are at this temperature too; `distill.temperature` for \
                 distillation",
            ),
        /// Sample from this many of the most likely tokens; 0 is all.
        top_k: Option<usize> = integer(0..=1 << 24).zero_is_none().or(None),
        /// Sample from the most likely tokens that together have this probability.
        top_p: f64 = number((Excluded(0.0), Included(1.0))).or(1.0),
        /// Leave out tokens below this share of the most likely token's probability.
        min_p: f64 = number(0.0..=1.0).or(0.0),
        /// Above 1, tokens of the text so far become less likely.
        repetition_penalty: f64 = number(POSITIVE).or(1.0),
        /// Completions per held-out prompt (`data.eval`).
        eval_answers: usize = integer(1..=64)
            .or(1)
            .only(answers_eval, match distill {
                Some(_) => "held-out completions are given ones; remove it",
                None => "there are no held-out prompts to answer: set `data.eval`, or remove it",
            })
            .free(),
        /// Strings that end a completion.
        stop: Vec<String> = strings().or(Vec::new()),
        /// Steps whose completions are generated together, with the weights before the first of
        /// these steps.
        steps_per_round: u64 = integer(1..=1 << 16).or(1),
        /// Generate and judge completions while the previous step trains.
        overlap: bool = boolean().or(false),
        /// Prompts with pairs that are kept, to be trained on again.
        replay_size: usize = integer(0..=1 << 20)
            .or(0)
            .only(!algorithm.is_of_method(), algorithm.refuse_replay()),
        /// Replayed prompts that join each step; at most `replay_size`.
        replay_per_step: usize = integer(0..=1 << 20)
            .unless(|joining: &usize| (*joining > replay_size).then(|| format!(
                "replay_size keeps only {replay_size} prompts; raise it, or lower this key"
            )))
            .or(0)
            .only(!algorithm.is_of_method(), algorithm.refuse_replay()),
        /// Steps between those whose completions are written to `samples.jsonl`, from the first
        /// step; 0 writes none.
        samples_every: Option<u64> = integer(COUNT).zero_is_none().or(Some(10)).free(),
        /// Server that generates instead of this process.
        server: Option<ServerConfig> = group(|now, keys: &mut Keys| {
            keys.optional_table("server", now, |now, keys| {
                ServerConfig::visit(now, keys, output, grpo, overlap)
            })
        }),
        /// Program that continues completions to conversations of several turns, and rewards them.
        environment: Option<EnvironmentConfig> = group(|now, keys: &mut Keys| {
            environment::visit(now, keys, grpo.is_some())
        }),
        /// Most completions generated at the same time on a rank; not with `[online.server]`.
        max_batch: usize = integer(1..=1 << 16)
            .or(64)
            .only(
                server.is_none(),
                "a server limits its own batch; remove it, or remove [online.server], whose `concurrency` counts \
                 requests",
            )
            .free(),
    }
}

impl OnlineConfig {
    /// Returns the updates on each completion.
    pub fn num_iterations(&self) -> u64 {
        self.algorithm.grpo().map_or(1, |grpo| grpo.num_iterations)
    }

    /// Returns the options of the policy gradient, if the answers are for one.
    pub fn policy_gradient(&self) -> Option<GrpoOptions> {
        let correction = self.server.as_ref().and_then(ServerConfig::correction);
        Some(self.algorithm.grpo()?.options(self.max_new_tokens, correction))
    }

    /// Returns the steps between two rounds of generation.
    pub fn steps_between_rounds(&self) -> u64 {
        self.steps_per_round * self.num_iterations()
    }

    /// Returns the batch of prompts, in their order, that a 0-based step trains on: the batches of a round come
    /// again until each was trained on [`OnlineConfig::num_iterations`] times.
    pub fn batch_of_step(&self, step: u64) -> u64 {
        let (round, within) = (step / self.steps_between_rounds(), step % self.steps_between_rounds());
        round * self.steps_per_round + within % self.steps_per_round
    }
}

/// Use of the completions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Algorithm {
    /// Online DPO: pairs of the policy's own completions.
    Dpo,
    /// Exploratory preference optimisation (arXiv 2405.21046): pairs of a policy completion and a
    /// reference completion, with a term that lowers the likelihood of the latter.
    Xpo {
        /// Strength of that term.
        alpha: f64,
    },
    /// Nash-MD (arXiv 2312.00886): the policy's completion, weighted by its probability of being
    /// preferred to a completion of a mixture of policy and reference.
    NashMd {
        /// Share of the reference in the mixture.
        mixture: f64,
    },
    /// Policy gradients: every completion, weighted by its reward compared with its group's.
    Grpo(GrpoConfig),
    /// Distillation: a teacher's next-token distributions over every completion.
    Distill(DistillConfig),
}

impl Algorithm {
    /// Name in the config.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Dpo => "dpo",
            Self::Xpo { .. } => "xpo",
            Self::NashMd { .. } => "nash_md",
            Self::Grpo(_) => "grpo",
            Self::Distill(_) => "distill",
        }
    }

    /// Returns whether the reference generates too.
    pub const fn asks_reference(self) -> bool {
        matches!(self, Self::Xpo { .. } | Self::NashMd { .. })
    }

    /// Returns the options of policy gradients.
    pub const fn grpo(&self) -> Option<&GrpoConfig> {
        match self {
            Self::Grpo(grpo) => Some(grpo),
            _ => None,
        }
    }

    /// Returns whether a prompt's completions may be in several micro-batches: none is compared with another.
    pub const fn divides_prompts(&self) -> bool {
        matches!(self, Self::Grpo(_) | Self::Distill(_))
    }

    /// Returns the options of distillation.
    pub const fn distill(&self) -> Option<&DistillConfig> {
        match self {
            Self::Distill(distill) => Some(distill),
            _ => None,
        }
    }

    /// Returns whether the method decides it, and not a key.
    const fn is_of_method(self) -> bool {
        matches!(self, Self::Grpo(_) | Self::Distill(_))
    }

    /// Returns the key that chose an algorithm with a loss of its own.
    pub(super) fn own_loss(self) -> Option<&'static str> {
        match self {
            // The objective of a distillation has no losses to choose from anyway.
            Self::Dpo | Self::Xpo { .. } | Self::Distill(_) => None,
            Self::NashMd { .. } => Some("online.algorithm = \"nash_md\""),
            Self::Grpo(_) => Some("method = \"grpo\""),
        }
    }

    fn refuse_more(self) -> Option<String> {
        self.asks_reference().then(|| {
            format!(
                "not supported with algorithm = {:?}, which always pairs one policy completion with one reference \
                 completion; remove it",
                self.name()
            )
        })
    }

    fn refuse_pairs(self) -> String {
        format!("method = {:?} trains on every completion and not on pairs; remove it", self.name())
    }

    fn refuse_replay(self) -> String {
        format!("method = {:?} replays no prompts; remove it", self.name())
    }

    fn visit(
        now: Option<&Self>,
        keys: &mut Keys,
        grpo: Option<GrpoConfig>,
        distill: Option<DistillConfig>,
    ) -> Result<Self> {
        keys! { let keys, now;
            /// `"dpo"`: pairs of the policy's completions. `"xpo"`: XPO. `"nash_md"`: Nash-MD.
            algorithm = choice(["dpo", "xpo", "nash_md"].map(|name| (name, name)))
                .or("dpo")
                .only(grpo.is_none() && distill.is_none(), "it is for method = \"online\"; remove it"),
                now.name();
            /// Only with `"xpo"`: strength of the term against the reference's completions.
            alpha = number(0.0..)
                .or(1e-5)
                .only(algorithm == "xpo", "only algorithm = \"xpo\" has it; remove it"),
                if let Self::Xpo { alpha } = *now { alpha } else { 0.0 };
            /// Only with `"nash_md"`: share of the reference in the mixture.
            mixture = number(0.0..=1.0)
                .or(0.5)
                .only(algorithm == "nash_md", "only algorithm = \"nash_md\" has it; remove it"),
                if let Self::NashMd { mixture } = *now { mixture } else { 0.0 };
        }
        let of_method = grpo.map(Self::Grpo).or(distill.map(Self::Distill));
        Ok(of_method.unwrap_or(match algorithm {
            "xpo" => Self::Xpo { alpha },
            "nash_md" => Self::NashMd { mixture },
            _ => Self::Dpo,
        }))
    }
}

/// Completions of a prompt that become pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairs {
    /// The completions with the highest and the lowest score.
    BestWorst,
    /// Every two with different scores.
    All,
    /// Two at random.
    Random,
}

impl Pairs {
    const NAMES: [(&str, Self); 3] =
        [("best_worst", Self::BestWorst), ("all", Self::All), ("random", Self::Random)];
}

fn strings<'a>() -> Form<'a, Vec<String>> {
    let read = |entry: Entry| {
        let string = |item| (filled("a string that is not empty").read)(item);
        entry.items().into_iter().map(string).collect()
    };
    custom("string or list", read, |texts: &Vec<String>| texts_value(texts))
}

/// Refuses keys that contradict others.
pub(super) fn check(config: &Config, places: &Places) -> Result<()> {
    let Some(online) = &config.online else { return Ok(()) };
    if online.replay_size > 0 && online.replay_per_step == 0 {
        return Err(places.conflict(
            "online.replay_size",
            "it is set but `replay_per_step` is 0, so replayed prompts are never used; set `replay_per_step`, or \
             remove `replay_size`",
        ));
    }
    if online.environment.is_some() {
        environment::check(online, config, places)?;
    }
    if let Some(grpo) = online.algorithm.grpo() {
        if grpo.max_resamples > 0 && online.overlap {
            return Err(places.conflict(
                "grpo.max_resamples",
                "with online.overlap the weights that gave a batch its answers are gone when its groups are compared; \
                 remove one of the two",
            ));
        }
        if !grpo.use_bias_correction_kl && config.objective.betas().all(|beta| beta == 0.0) {
            return Err(places.conflict(
                "grpo.use_bias_correction_kl",
                "with objective.beta = 0 there is no divergence to correct; remove one of the two",
            ));
        }
        if grpo.overlong_tokens.is_some() && grpo.aggregation == Aggregation::NormalizeThenSum {
            return Err(places.conflict(
                "grpo.overlong_tokens",
                "the penalty is subtracted from an answer's sum of scores, and with grpo.aggregation = \
                 \"normalize_then_sum\" each judge's scores are compared before they are added; remove one of the two, or \
                 have a judge subtract it",
            ));
        }
        if grpo.overlong_tokens.is_some_and(|tokens| tokens >= online.max_new_tokens) {
            return Err(places.conflict(
                "grpo.overlong_tokens",
                format!(
                    "the penalty would begin before the first token: online.max_new_tokens is {}; lower this key, or \
                     raise that one",
                    online.max_new_tokens
                ),
            ));
        }
    }
    online.server.as_ref().map_or(Ok(()), |own| server::check(own, online, config, places))
}
