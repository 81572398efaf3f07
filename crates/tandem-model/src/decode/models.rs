//! The models that text is drawn from: a policy, or the geometric mixture of a policy and a reference.

use tandem_kernels::ops::HeadShape;
use tandem_kernels::{Tensor, ops};

use super::Sources;
use super::model::Model;
use crate::layers::{Streams, Walk};
use crate::weights::WeightSource;
use crate::{ModelError, Result};

/// A policy, and what else there is to draw from.
pub(super) struct Models<'a> {
    pub(super) policy: Model<'a>,
    reference: Option<Reference<'a>>,
}

/// The other model of a mixture.
struct Reference<'a> {
    model: Model<'a>,
    /// Its part, 0 to 1.
    part: f32,
}

impl<'a> Models<'a> {
    /// Reserves caches of so many rows.
    pub(super) fn new(policy: Walk<'a>, reference: Option<(Walk<'a>, f32)>, rows: usize) -> Result<Self> {
        let policy = Model::new(policy, rows)?;
        let Some((walk, part)) = reference else { return Ok(Self { policy, reference: None }) };
        if !(0.0..=1.0).contains(&part) {
            return Err(ModelError::Invalid(format!(
                "the reference's part of a mixture is {part}, expected 0 to 1"
            )));
        }
        let model = Model::new(walk, rows)?;
        let (own, others) = (policy.vocabulary(), model.vocabulary());
        if own != others {
            return Err(ModelError::Invalid(format!(
                "the policy has a vocabulary of {own} tokens and the reference one of {others}; a mixture needs the same tokens"
            )));
        }
        Ok(Self { policy, reference: Some(Reference { model, part }) })
    }

    /// Tokens that there are.
    pub(super) fn vocabulary(&self) -> usize {
        self.policy.vocabulary()
    }

    /// Tokens that a sequence may have.
    pub(super) fn positions(&self) -> usize {
        let of = |model: &Model| model.walk.decoder.positions();
        let own = of(&self.policy);
        self.reference.as_ref().map_or(own, |reference| own.min(of(&reference.model)))
    }

    /// What a walk of each model gives, the policy's first.
    pub(super) fn each<T>(
        &mut self,
        sources: &mut dyn Sources,
        mut walk: impl FnMut(&mut Model<'a>, &mut dyn WeightSource) -> Result<T>,
    ) -> Result<Streams<T>> {
        let policy = walk(&mut self.policy, sources.policy())?;
        let Some(Reference { model, .. }) = &mut self.reference else { return Ok(Streams::one(policy)) };
        let missing = || ModelError::Invalid("a mixture needs the reference's weights too".to_owned());
        let reference = walk(model, sources.reference().ok_or_else(missing)?)?;
        Ok(Streams { policy, reference: Some(reference) })
    }

    /// Puts the logits that tokens are drawn from in place of other numbers, and tells what is still to be done to them.
    pub(super) fn drawn_from(&self, logits: &Streams<Tensor>, values: &mut Vec<f32>) -> Result<HeadShape> {
        let mut raw = |model: &Model, logits| -> Result<HeadShape> {
            model.read_into(logits, values)?;
            Ok(model.walk.decoder.spec().head.shape)
        };
        let Some((Reference { model, part }, of_reference)) =
            self.reference.as_ref().zip(logits.reference.as_ref())
        else {
            return raw(&self.policy, &logits.policy);
        };
        // At the ends to the bit what one of them gives by itself.
        if *part == 0.0 {
            return raw(&self.policy, &logits.policy);
        }
        if *part == 1.0 {
            return raw(model, of_reference);
        }
        let mut reference = model.read(of_reference)?;
        ops::shape_logits(model.walk.device, &mut reference, &model.walk.decoder.spec().head.shape)?;
        let shape = raw(&self.policy, &logits.policy)?;
        ops::shape_logits(self.policy.walk.device, values, &shape)?;
        for (own, theirs) in values.iter_mut().zip(reference) {
            *own = (1.0 - part) * *own + part * theirs;
        }
        Ok(HeadShape::default())
    }
}
