//! `[distill]`: the divergence from a teacher.

use super::error::Result;
use super::form::{POSITIVE, number};
use super::keys::{Keys, keys};
use super::tree::Places;
use super::{Config, Method, ReferenceKind};

keys! {
    /// On-policy distillation: the policy learns the next-token distributions of a teacher, the model
    /// that `reference.model` names.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct DistillConfig() {
        /// Interpolation of the divergence: 0 is the forward KL, from the teacher to the policy, 1 the
        /// reverse KL. Between them the generalised Jensen–Shannon divergence, through a mixture with this
        /// share of the teacher: see [distillation](distill.md#loss).
        beta: f64 = number(0.0..=1.0).or(0.5),
        /// Divisor of the logits of both models.
        temperature: f64 = number(POSITIVE).or(1.0),
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
