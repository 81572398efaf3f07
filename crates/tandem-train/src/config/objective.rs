//! `[objective]`: losses and their strength.

use tandem_data::record::RowKind;
use tandem_data::row::LossMask;
use toml::{Table, Value};

use super::error::Result;
use super::form::{AT_LEAST_ONE, Form, POSITIVE, boolean, choice, custom, integer, number};
use super::keys::{Keys, keys};
use super::reader::{Entry, nearest};
use super::tree::Places;
use super::{Algorithm, Config, Method};
use crate::objective::losses::{LOSSES, find, names};
use crate::objective::{Divergence, GrpoOptions, ObjectiveConfig, PairLoss, Smoothing, Term};

const DIVERGENCES: [(&str, Divergence); 4] = [
    (Divergence::ReverseKl.name(), Divergence::ReverseKl),
    (Divergence::ForwardKl.name(), Divergence::ForwardKl),
    (Divergence::JensenShannon.name(), Divergence::JensenShannon),
    (ALPHA.name(), ALPHA),
];
/// The α-divergence, as the choice that its name stands for.
const ALPHA: Divergence = Divergence::Alpha(0.5);

pub(super) fn visit(
    now: Option<&ObjectiveConfig>,
    keys: &mut Keys,
    method: Method,
    algorithm: Algorithm,
    grpo: Option<GrpoOptions>,
) -> Result<ObjectiveConfig> {
    let own = algorithm.own_loss();
    let by = own.unwrap_or_default();
    let is_grpo = algorithm.grpo().is_some();
    let no_effect = format!("it has no effect with {by}; remove it");
    let single = match is_grpo {
        true => "the losses of method = \"grpo\" are those of grpo.loss; use that key".to_owned(),
        false => format!("{by} has a single loss; remove it"),
    };
    let default = method.default_loss().filter(|_| own.is_none()).and_then(find);
    keys! { let keys, now;
        /// A loss by TRL's name, or a table of `loss = weight`: `sigmoid`, `sigmoid_norm`, `robust`,
        /// `hinge`, `ipo`, `exo_pair`, `nca_pair`, `bco_pair`, `sppo_hard`, `apo_zero`, `apo_down`,
        /// `discopop`, `dpop`, `cpo`, `simpo`, `orpo`, `aot`, `aot_unpaired`, `sft`; with method = "kto" `kto`, `bco`, `apo_zero_unpaired`. See [losses](losses.md). In online runs `ipo` is `ipo_sum`, which is not divided by lengths.
        loss = terms(method)
            .or(default.map(|loss| Term { loss, weight: 1.0 }).into_iter().collect())
            .shown("`\"sigmoid\"`; `\"sft\"` for SFT")
            .methods_because(
                method,
                |method| method.default_loss().is_some(),
                if is_grpo { single.clone() } else { format!("method = \"{method}\" has a single loss; remove it") },
            )
            .only(own.is_none(), single),
            now.terms.clone();
        /// Strength of the reference: a larger value keeps the policy closer. A list, for online
        /// runs: each value lasts an epoch or `beta_every` steps, the last until the end. With GRPO 0
        /// is without a reference.
        beta = betas(method)
            .or(vec![if is_grpo { 0.0 } else { 0.1 }])
            .shown("0.1; 0 for GRPO")
            .methods(method, Method::has_reference)
            .only(
                method != Method::Distill,
                "the divergence of method = \"distill\" is chosen by distill.beta; use that key",
            ),
            now.betas().collect();
        /// Steps that each value of a list of betas lasts.
        beta_every = integer(AT_LEAST_ONE)
            .optional()
            .shown("an epoch")
            .methods(method, Method::generates)
            .only(
                beta.len() > 1,
                "it has no effect with a single `beta`; remove it, or set `beta` to a list",
            ),
            now.beta_every;
        /// Probability that a label is wrong: cDPO with `sigmoid`; `robust` needs less than 0.5,
        /// `exo_pair` more than 0.
        label_smoothing = number(0.0..=1.0)
            .unless(|smoothing| refuse_smoothing(*smoothing, &loss))
            .or(0.0)
            .required_if(
                loss.iter().any(|term| term.loss.smoothing == Smoothing::Positive),
                "a number in (0, 1), for example 0.001: \"exo_pair\" takes its logarithm",
            )
            .methods(method, Method::compares_pairs)
            .only(own.is_none(), &no_effect)
            .written_if(loss.iter().any(|term| term.loss.smoothing != Smoothing::Unused)),
            now.label_smoothing;
        /// Leave the reference out of the loss. `cpo`, `simpo` and `orpo` have none anyway.
        reference_free = boolean()
            .or(false)
            .only(
                loss.iter().any(|term| term.loss.of_ratios) || loss.iter().all(|term| term.loss.name == "sft"),
                "the losses have no reference already; remove it",
            )
            .methods(method, Method::compares_with_reference)
            .only(own.is_none(), &no_effect)
            .only(
                !algorithm.asks_reference(),
                format!("online.algorithm = \"{}\" needs a reference; remove it", algorithm.name()),
            ),
            now.reference_free;
        /// Divergence to the reference behind the loss. All but the first need `sigmoid`,
        /// `sigmoid_norm`, `robust`, `hinge`, `ipo`, `exo_pair`, `discopop` or `sft`.
        f_divergence_type = choice(DIVERGENCES)
            .unless(|divergence| refuse_divergence(*divergence, &loss))
            .or(Divergence::ReverseKl)
            .methods(method, Method::compares_pairs)
            .only(own.is_none(), &no_effect),
            if is_alpha(now.divergence) { ALPHA } else { now.divergence };
        /// α of `"alpha_divergence"`; 1 is the reverse KL.
        f_alpha_divergence_coef = number(..)
            .or(0.5)
            .methods(method, Method::compares_pairs)
            .only(
                is_alpha(f_divergence_type),
                "only f_divergence_type = \"alpha_divergence\" has it; remove it",
            ),
            if let Divergence::Alpha(alpha) = now.divergence { alpha } else { 0.0 };
        /// Temperature of the `discopop` loss.
        discopop_tau = number(POSITIVE)
            .or(0.05)
            .methods(method, Method::compares_pairs)
            .only(own.is_none(), &no_effect)
            .only(
                loss.iter().any(|term| term.loss.name == "discopop"),
                "only the loss \"discopop\" has it; remove it",
            ),
            now.discopop_tau;
        /// Target margin of the `simpo` loss.
        simpo_gamma = number(0.0..)
            .or(0.5)
            .methods(method, Method::compares_pairs)
            .only(loss.iter().any(|term| term.loss.name == "simpo"), "only the loss \"simpo\" has it; remove it"),
            now.simpo_gamma;
        /// λ of the `dpop` loss: weight of the penalty on chosen completions that are less likely than
        /// under the reference.
        dpop_lambda = number(0.0..)
            .or(50.0)
            .methods(method, Method::compares_pairs)
            .only(loss.iter().any(|term| term.loss.name == "dpop"), "only the loss \"dpop\" has it; remove it"),
            now.dpop_lambda;
        /// Weight of completions whose label is true. If few are, KTO's paper wants this weight times
        /// their number between 1 and 4/3 of the same product of the others.
        desirable_weight = number(POSITIVE).or(1.0).methods_because(
            method,
            |method| method == Method::Kto,
            "only method = \"kto\" has labels; remove it",
        ), now.desirable_weight;
        /// Weight of completions whose label is false.
        undesirable_weight = number(POSITIVE).or(1.0).methods_because(
            method,
            |method| method == Method::Kto,
            "only method = \"kto\" has labels; remove it",
        ), now.undesirable_weight;
        /// LD-DPO's weight of the tokens of a completion beyond the length of the other: 1 is DPO, 0
        /// leaves them out. An `sft` term counts every token.
        ld_alpha = number(0.0..=1.0).optional().methods_because(
            method,
            |method| method == Method::Dpo,
            "only method = \"dpo\" has it; remove it",
        )
        .only(
            loss.iter().any(|term| term.loss.name != "sft"),
            "the loss \"sft\" counts every token; remove it",
        ), now.ld_alpha;
        /// Weight pairs by the policy's likelihood of their completions (WPO).
        use_weighting = boolean()
            .or(false)
            .methods_because(
                method,
                |method| method == Method::Dpo,
                "only method = \"dpo\" has it; remove it",
            )
            .only(
                loss.iter().all(|term| term.loss.partners.is_none()),
                "\"aot\" and \"aot_unpaired\" compare completions of different pairs, which have no weight; remove \
                 it, or choose another loss",
            ),
            now.use_weighting;
        /// Strength of the pull of the sum of a pair's two rewards towards zero.
        center_rewards_coefficient = number(POSITIVE).optional().methods_because(
            method,
            |method| method.rows() == RowKind::Reward,
            "only method = \"reward\" has rewards to centre; remove it",
        ), now.center_rewards_coefficient;
    }
    Ok(ObjectiveConfig {
        terms: loss,
        beta: beta[0],
        next_betas: beta[1..].to_vec(),
        beta_every,
        label_smoothing,
        reference_free,
        discopop_tau,
        simpo_gamma,
        dpop_lambda,
        desirable_weight,
        undesirable_weight,
        ld_alpha,
        use_weighting,
        divergence: match f_divergence_type {
            Divergence::Alpha(_) => Divergence::Alpha(f_alpha_divergence_coef),
            other => other,
        },
        exploration: match algorithm {
            Algorithm::Xpo { alpha } => alpha,
            _ => 0.0,
        },
        center_rewards_coefficient,
        grpo,
        distill: None,
    })
}

/// Names what leaves the reference out of the loss, if anything does.
pub(super) fn without_reference(objective: &ObjectiveConfig, method: Method) -> Option<String> {
    if objective.grpo.is_some() {
        return objective.betas().all(|beta| beta == 0.0).then(|| "objective.beta = 0".to_owned());
    }
    if objective.reference_free {
        return Some("objective.reference_free = true".to_owned());
    }
    let name = objective.loss_without_reference().filter(|_| !method.generates());
    name.map(|name| format!("the loss {name:?}"))
}

/// Refuses prompts in a likelihood that is no term, and an estimate over one completion.
pub(super) fn check(config: &Config, places: &Places) -> Result<()> {
    if config.train.batch_size == 1 && config.objective.needs_mismatched() {
        let reason = "the loss \"kto\" estimates the divergence to the reference from other rows of the batch; set it to 2 \
                      or more";
        return Err(places.conflict("train.batch_size", reason));
    }
    if config.method != Method::Dpo || config.data.loss_on == LossMask::Answer || config.objective.has("sft")
    {
        return Ok(());
    }
    let reason = "a preference loss is always on the completions; remove `loss_on`, or add an `sft` term to `objective.loss`";
    Err(places.conflict("data.loss_on", reason))
}

fn is_alpha(divergence: Divergence) -> bool {
    matches!(divergence, Divergence::Alpha(_))
}

/// A number, or a list of them.
fn betas<'a>(method: Method) -> Form<'a, Vec<f64>> {
    let read = move |entry: Entry| {
        if entry.is_list() && !method.generates() {
            return Err(entry.conflict("only an online run takes a list; set one number"));
        }
        if method == Method::Grpo && !entry.is_list() {
            return Ok(vec![(number(0.0..).read)(entry)?]);
        }
        let empty = entry.wrong("a positive number, or a list of them");
        let betas = entry
            .items()
            .into_iter()
            .map(|item| (number(POSITIVE).read)(item))
            .collect::<Result<Vec<_>>>()?;
        if betas.is_empty() { Err(empty) } else { Ok(betas) }
    };
    custom("number or list, ≥ 0", read, |betas: &Vec<f64>| match betas[..] {
        [only] => Value::from(only),
        _ => Value::from(betas.clone()),
    })
}

fn terms<'a>(method: Method) -> Form<'a, Vec<Term>> {
    let read = move |entry: Entry| {
        if let Ok(name) = entry.string() {
            return Ok(vec![Term { loss: loss(&entry, name, method)?, weight: 1.0 }]);
        }
        let wrong = entry.wrong("a loss's name, or a table of loss = weight");
        let empty = entry.wrong("at least one loss");
        let mut terms = Vec::new();
        for entry in entry.section().map_err(|_| wrong)?.drain() {
            let weight = entry.number("a positive weight", |weight| *weight > 0.0)?;
            if method == Method::Sft && weight != 1.0 {
                return Err(
                    entry.conflict("method = \"sft\" has one loss, which no weight changes; remove it")
                );
            }
            terms.push(Term { loss: loss(&entry, entry.name(), method)?, weight });
        }
        if terms.is_empty() { Err(empty) } else { Ok(terms) }
    };
    custom("string or table", read, |terms: &Vec<Term>| match &terms[..] {
        [only] if only.weight == 1.0 => Value::from(only.loss.name),
        terms => Value::Table(Table::from_iter(
            terms.iter().map(|term| (term.loss.name.to_owned(), term.weight.into())),
        )),
    })
}

fn loss(entry: &Entry, name: &str, method: Method) -> Result<&'static PairLoss> {
    // TRL's `OnlineDPOTrainer` does not divide by lengths.
    let name = if method.generates() && name == "ipo" { "ipo_sum" } else { name };
    let Some(loss) = find(name) else {
        let names = names();
        let hint = nearest(name, &names).map(|n| format!(" (did you mean {n:?}?)")).unwrap_or_default();
        return Err(entry.wrong(format!("one of {}{hint}", names.join(", "))));
    };
    if loss.unpaired != (method.rows() == RowKind::Unpaired) && method.rows() != RowKind::Supervised {
        return Err(entry.conflict(match loss.unpaired {
            true => format!(
                "{name:?} judges each completion alone; set method = \"kto\", whose rows have `prompt`, `completion` and \
                 `label`"
            ),
            false => format!(
                "{name:?} compares two completions; with method = \"{method}\" losses are {}",
                LOSSES.iter().filter(|loss| loss.unpaired).map(|loss| format!("{:?}", loss.name)).collect::<Vec<_>>().join(" and ")
            ),
        }));
    }
    if method.rows() == RowKind::Supervised && loss.name != "sft" {
        return Err(entry.conflict(format!(
            "{name:?} compares two completions; with method = \"{method}\" the only loss is \"sft\""
        )));
    }
    Ok(loss)
}

fn refuse_divergence(divergence: Divergence, terms: &[Term]) -> Option<String> {
    let term = terms.iter().find(|term| !term.loss.any_divergence && divergence != Divergence::ReverseKl)?;
    Some(format!(
        "the loss {:?} is derived for \"reverse_kl\" only; remove it, or choose \"sigmoid\"",
        term.loss.name
    ))
}

fn refuse_smoothing(smoothing: f64, terms: &[Term]) -> Option<String> {
    let any = |kind| terms.iter().any(|term| term.loss.smoothing == kind);
    if any(Smoothing::Positive) && (smoothing == 0.0 || smoothing == 1.0) {
        return Some("it must be in (0, 1), because \"exo_pair\" takes its logarithm".to_owned());
    }
    if any(Smoothing::BelowHalf) && smoothing >= 0.5 {
        return Some(
            "it must be in [0, 0.5), because \"robust\" divides by 1 - 2 * label_smoothing".to_owned(),
        );
    }
    (smoothing != 0.0 && terms.iter().all(|term| term.loss.smoothing == Smoothing::Unused)).then(|| {
        let names: Vec<&str> = terms.iter().map(|term| term.loss.name).collect();
        format!("{} does not use it; remove it, or choose \"sigmoid\" or \"robust\"", names.join(", "))
    })
}
