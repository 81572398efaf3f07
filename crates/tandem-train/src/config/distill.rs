//! `[distill]`: the divergence from a teacher.

use tandem_data::row::{LossMask, Truncation};

use super::error::Result;
use super::form::{POSITIVE, choice, number};
use super::keys::{Keys, keys};
use super::tree::Places;
use super::{Config, Method, ReferenceKind, SampleCount};
use crate::objective::{Average, DistillOptions};

keys! {
    /// On-policy distillation: the policy learns the next-token distributions of a teacher, the model
    /// that `reference.model` names.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct DistillConfig() {
        /// Share of the rows whose completions are the policy's own answers, which it gives while it trains;
        /// the others keep those of the data. 1 reads prompts alone. See
        /// [distillation](distill.md#answers-of-the-student).
        lmbda: f64 = number(0.0..=1.0).or(0.0),
        /// Interpolation of the divergence: 0 is the forward KL, from the teacher to the policy, 1 the
        /// reverse KL. Between them the generalised Jensen–Shannon divergence, through a mixture with this
        /// share of the teacher: see [distillation](distill.md#loss).
        beta: f64 = number(0.0..=1.0).or(0.5),
        /// Divisor of the logits of both models.
        temperature: f64 = number(POSITIVE).or(1.0),
        /// Mean over the batch. `"token"`: every token weighs the same. `"sequence"`: every completion does, with
        /// the mean over its tokens.
        average: Average = choice(Average::NAMES).or(Average::Token),
    }
}

impl DistillConfig {
    /// Returns the options of the loss.
    pub fn options(&self) -> DistillOptions {
        DistillOptions { beta: self.beta, average: self.average }
    }

    /// Returns whether the policy answers prompts while it trains.
    pub fn generates(&self) -> bool {
        self.lmbda > 0.0
    }

    /// Returns whether it answers all, so that training rows are prompts alone.
    pub fn reads_prompts(&self) -> bool {
        self.lmbda == 1.0
    }
}

/// Visits the table if the method has it.
pub(super) fn visit(
    now: Option<&DistillConfig>,
    keys: &mut Keys,
    method: Method,
) -> Result<Option<DistillConfig>> {
    // The reference page lists every table.
    if method == Method::Distill || matches!(keys, Keys::List(_)) {
        let distill = keys.table("distill", now, DistillConfig::visit)?;
        return Ok((method == Method::Distill).then_some(distill));
    }
    keys.refuse(
        "distill",
        &format!("method = \"{method}\" has no [distill] table; remove it, or set method = \"distill\""),
    )?;
    Ok(None)
}

/// Refuses a run without a teacher, and model parts that the divergence does not go over.
pub(super) fn check(config: &Config, places: &Places) -> Result<()> {
    if config.method != Method::Distill {
        return Ok(());
    }
    if config.reference.kind == ReferenceKind::Model && config.reference.model.is_none() {
        let reason = "method = \"distill\" has no teacher; set reference.model to the folder or hub name of a model with \
                      the policy's tokenizer";
        return Err(places.conflict("reference.model", reason));
    }
    if let Some(distill) = config.distill.filter(DistillConfig::generates) {
        check_own_answers(config, &distill, places)?;
    }
    let compute = &config.compute;
    for (key, parts) in [("compute.tensor", compute.tensor), ("compute.pipeline", compute.pipeline)] {
        if parts > 1 {
            let reason = "method = \"distill\" compares whole vocabularies of two models, which is not supported with parts \
                          of a model yet; set it to 1, and compute.sharding = \"zero3\" divides the weights";
            return Err(places.conflict(key, reason));
        }
    }
    Ok(())
}

/// Refuses options of given completions where the policy gives its own.
fn check_own_answers(config: &Config, distill: &DistillConfig, places: &Places) -> Result<()> {
    let data = &config.data;
    let (reads_prompts, has_eval) = (distill.reads_prompts(), !data.eval.is_empty());
    let refused = [
        (
            data.loss_on == LossMask::All && (!reads_prompts || has_eval),
            "data.loss_on",
            "the policy answers prompts, and a text that is learned whole has none; remove it, or set distill.lmbda = 0",
        ),
        (
            reads_prompts && data.shape.is_some(),
            "data.shape",
            "with distill.lmbda = 1 prompts alone are read; map their column with data.columns = { prompt = \"…\" }",
        ),
        (
            reads_prompts && data.take.is_some(),
            "data.take",
            "with distill.lmbda = 1 prompts alone are read; remove it, or lower distill.lmbda",
        ),
        (
            reads_prompts && !has_eval && data.truncation == Truncation::KeepEnd,
            "data.truncation",
            "with distill.lmbda = 1 prompts alone are read, which are never cut; remove it, or lower distill.lmbda",
        ),
        (
            matches!(config.train.evaluation.samples, SampleCount::Count(1..)),
            "train.samples",
            "the policy's own answers are kept: online.samples_every; remove it",
        ),
    ];
    match refused.into_iter().find(|(is_set, ..)| *is_set) {
        Some((_, key, reason)) => Err(places.conflict(key, reason)),
        None => Ok(()),
    }
}
