//! `[objective]`: the losses and their strength.

use super::error::ConfigError;
use super::reader::{Entry, Section, nearest};
use super::{Algorithm, Method};
use crate::objective::registry::{LOSSES, NOT_YET, find};
use crate::objective::{Divergence, ObjectiveConfig, Smoothing, Term};

pub(super) fn parse(
    mut section: Section,
    method: Method,
    algorithm: Algorithm,
) -> Result<ObjectiveConfig, ConfigError> {
    let is_nash = matches!(algorithm, Algorithm::NashMd { .. });
    let center_rewards_coefficient = centring(section.take("center_rewards_coefficient"), method)?;
    let terms = match section.take("loss") {
        Some(entry) if method == Method::Reward => {
            return Err(entry.conflict("method = \"reward\" has one loss; remove it"));
        }
        Some(entry) if is_nash => {
            return Err(entry.conflict("online.algorithm = \"nash_md\" has one loss; remove it"));
        }
        None if method == Method::Reward || is_nash => Vec::new(),
        Some(entry) => terms(entry, method)?,
        None => {
            let name = if method == Method::Sft { "sft" } else { "sigmoid" };
            vec![Term { loss: find(name).expect("registered"), weight: 1.0 }]
        }
    };
    let beta = section.take("beta");
    let smoothing = section.take("label_smoothing");
    let reference_free = section.take("reference_free");
    let tau = section.take("discopop_tau");
    let divergence = section.take("f_divergence_type");
    let alpha = section.take("f_alpha_divergence_coef");
    for entry in [&beta, &smoothing, &reference_free, &tau, &divergence, &alpha].into_iter().flatten() {
        if !method.has_reference() {
            return Err(entry.conflict(format!("it has no meaning under method = \"{method}\"; remove it")));
        }
    }
    for entry in [&smoothing, &reference_free, &tau, &divergence, &alpha].into_iter().flatten() {
        if is_nash {
            return Err(entry.conflict("it has no meaning under online.algorithm = \"nash_md\"; remove it"));
        }
    }
    if let Some(entry) = reference_free.as_ref().filter(|_| algorithm.asks_reference()) {
        let name = algorithm.name();
        return Err(entry.conflict(format!("online.algorithm = \"{name}\" needs its reference; remove it")));
    }
    if let Some(entry) = tau.as_ref().filter(|_| terms.iter().all(|t| t.loss.name != "discopop")) {
        return Err(entry.conflict("only the loss \"discopop\" has it; remove it"));
    }
    let beta_every = section.take("beta_every");
    let betas = match beta {
        Some(entry) => betas(entry, method)?,
        None => vec![0.1],
    };
    if let Some(entry) = beta_every.as_ref().filter(|_| betas.len() == 1) {
        return Err(entry.conflict("one beta stays what it is; give `beta` a list, or remove this"));
    }
    let config = ObjectiveConfig {
        divergence: self::divergence(divergence, alpha, &terms)?,
        beta: betas[0],
        next_betas: betas[1..].to_vec(),
        beta_every: beta_every.map(|e| e.integer(1..=i64::MAX as u64)).transpose()?,
        label_smoothing: label_smoothing(&section, smoothing, &terms)?,
        reference_free: reference_free.map_or(Ok(false), |e| e.boolean())?,
        discopop_tau: tau.map_or(Ok(0.05), |e| e.number("a positive number", |t| t > 0.0))?,
        terms,
        center_rewards_coefficient,
        exploration: match algorithm {
            Algorithm::Xpo { alpha } => alpha,
            _ => 0.0,
        },
    };
    section.finish()?;
    Ok(config)
}

/// One, or a list of which each lasts an epoch, or `beta_every` steps, and the last for ever.
fn betas(entry: Entry, method: Method) -> Result<Vec<f64>, ConfigError> {
    let is_list = entry.is_list();
    if is_list && method != Method::Online {
        return Err(entry.conflict("only method = \"online\" takes a list; give one number"));
    }
    let empty = entry.wrong("a positive number, or a list of them");
    let betas: Vec<f64> = entry
        .items()
        .iter()
        .map(|item| item.number("a positive number", |b| b > 0.0))
        .collect::<Result<_, _>>()?;
    if betas.is_empty() { Err(empty) } else { Ok(betas) }
}

fn centring(entry: Option<Entry>, method: Method) -> Result<Option<f64>, ConfigError> {
    match entry {
        Some(entry) if method != Method::Reward => {
            Err(entry.conflict("only method = \"reward\" has rewards to centre; remove it"))
        }
        entry => entry.map(|e| e.number("a positive number", |c| c > 0.0)).transpose(),
    }
}

fn terms(entry: Entry, method: Method) -> Result<Vec<Term>, ConfigError> {
    if let Ok(name) = entry.string() {
        return Ok(vec![Term { loss: loss(&entry, name, method)?, weight: 1.0 }]);
    }
    let wrong = entry.wrong("a loss's name, or a table of loss = weight");
    let empty = entry.wrong("at least one loss");
    let mut table = entry.section().map_err(|_| wrong)?;
    let mut terms = Vec::new();
    for entry in table.drain() {
        let weight = entry.number("a positive weight", |w| w > 0.0)?;
        terms.push(Term { loss: loss(&entry, entry.name(), method)?, weight });
    }
    if terms.is_empty() { Err(empty) } else { Ok(terms) }
}

fn loss(
    entry: &Entry,
    name: &str,
    method: Method,
) -> Result<&'static crate::objective::PairLoss, ConfigError> {
    if NOT_YET.contains(&name) {
        return Err(entry.conflict(format!(
            "the loss {name:?} sorts the pairs of the whole batch against each other and is not there yet; \
             \"sigmoid\" and {} others are",
            LOSSES.len() - 1
        )));
    }
    // TRL's `OnlineDPOTrainer` does not divide by lengths.
    let name = if method == Method::Online && name == "ipo" { "ipo_sum" } else { name };
    let names: Vec<&str> = LOSSES.iter().map(|l| l.name).collect();
    let Some(loss) = find(name) else {
        let hint = nearest(name, &names).map(|n| format!(" (did you mean {n:?}?)")).unwrap_or_default();
        return Err(entry.wrong(format!("one of {}{hint}", names.join(", "))));
    };
    if method == Method::Sft && loss.name != "sft" {
        return Err(entry.conflict(format!(
            "{name:?} compares two answers; under method = \"sft\" the only loss is \"sft\""
        )));
    }
    Ok(loss)
}

fn divergence(entry: Option<Entry>, alpha: Option<Entry>, terms: &[Term]) -> Result<Divergence, ConfigError> {
    let mut chosen = match &entry {
        None => Divergence::ReverseKl,
        Some(entry) => entry.one_of(
            &[
                Divergence::ReverseKl,
                Divergence::ForwardKl,
                Divergence::JensenShannon,
                Divergence::Alpha(0.5),
            ]
            .map(|d| (d.name(), d)),
        )?,
    };
    if let (Some(entry), Some(term)) = (&entry, terms.iter().find(|t| !t.loss.any_divergence))
        && chosen != Divergence::ReverseKl
    {
        return Err(entry.conflict(format!(
            "the loss {:?} is derived for \"reverse_kl\" alone; remove it or choose \"sigmoid\"",
            term.loss.name
        )));
    }
    match (alpha, &mut chosen) {
        (Some(alpha), Divergence::Alpha(value)) => {
            *value = alpha.number("a finite number", |_| true)?;
        }
        (Some(alpha), _) => {
            return Err(alpha.conflict("only f_divergence_type = \"alpha_divergence\" has it; remove it"));
        }
        (None, _) => {}
    }
    Ok(chosen)
}

fn label_smoothing(section: &Section, entry: Option<Entry>, terms: &[Term]) -> Result<f64, ConfigError> {
    let strictest = |kind| terms.iter().any(|t| t.loss.smoothing == kind);
    let Some(entry) = entry else {
        return if strictest(Smoothing::Positive) {
            Err(section.missing(
                "label_smoothing",
                "a number in (0, 1), for example 0.001: \"exo_pair\" takes its logarithm",
            ))
        } else {
            Ok(0.0)
        };
    };
    let e = entry.number("a number from 0 to 1", |e| (0.0..=1.0).contains(&e))?;
    if strictest(Smoothing::Positive) && !(e > 0.0 && e < 1.0) {
        return Err(entry.wrong("a number in (0, 1), for \"exo_pair\" takes its logarithm"));
    }
    if strictest(Smoothing::BelowHalf) && e >= 0.5 {
        return Err(entry.wrong("a number in [0, 0.5), for \"robust\" divides by 1 - 2 * label_smoothing"));
    }
    if e != 0.0 && terms.iter().all(|t| t.loss.smoothing == Smoothing::Unused) {
        let names: Vec<&str> = terms.iter().map(|t| t.loss.name).collect();
        return Err(entry.conflict(format!(
            "{} does not use it; remove it or choose \"sigmoid\" or \"robust\"",
            names.join(", ")
        )));
    }
    Ok(e)
}
