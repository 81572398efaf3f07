//! Models to sample from: a policy, or the geometric mixture of a policy and a reference.

use tandem_kernels::ops::HeadShape;
use tandem_kernels::{Tensor, ops};

use super::Sources;
use super::cache::CacheSize;
use super::model::{Model, PassRoom};
use crate::layers::{LayerExecutor, PolicyAndReferenceScores};
use crate::weights::WeightSource;
use crate::{ModelError, Result};

/// A policy, and the reference of a mixture.
pub(super) struct Models<'a> {
    pub(super) policy: Model<'a>,
    reference: Option<Reference<'a>>,
}

/// Reference of a mixture.
struct Reference<'a> {
    model: Model<'a>,
    /// Weight in the mixture, 0 to 1.
    part: f32,
}

impl<'a> Models<'a> {
    /// Allocates caches of this size, for passes with this room.
    pub(super) fn new(
        policy: LayerExecutor<'a>,
        reference: Option<(LayerExecutor<'a>, f32)>,
        size: CacheSize,
        room: PassRoom,
    ) -> Result<Self> {
        let policy = Model::new(policy, size, room)?;
        let Some((walk, part)) = reference else { return Ok(Self { policy, reference: None }) };
        if !(0.0..=1.0).contains(&part) {
            return Err(ModelError::Invalid(format!(
                "the reference's part of a mixture is {part}, expected 0 to 1"
            )));
        }
        let model = Model::new(walk, size, room)?;
        let (own, others) = (policy.vocabulary(), model.vocabulary());
        if own != others {
            return Err(ModelError::Invalid(format!(
                "the policy has a vocabulary of {own} tokens and the reference one of {others}; a mixture needs the same tokens"
            )));
        }
        Ok(Self { policy, reference: Some(Reference { model, part }) })
    }

    /// Returns whether texts have slots: a model has linear attention.
    pub(super) fn has_slots(&self) -> bool {
        let has = |model: &Model| model.walk.decoder.spec().linear_attention.is_some();
        has(&self.policy) || self.reference.as_ref().is_some_and(|reference| has(&reference.model))
    }

    pub(super) fn vocabulary(&self) -> usize {
        self.policy.vocabulary()
    }

    /// Returns the number of tokens at whose multiples a prompt may be divided, with the same bits.
    pub(super) fn query_block(&self) -> usize {
        let of = |model: &Model| model.walk.decoder.spec().attention.shape(0).query_block();
        let own = of(&self.policy);
        let other = self.reference.as_ref().map_or(own, |reference| of(&reference.model));
        if own == other { own } else { own * other }
    }

    /// Returns the longest sequence, in tokens.
    pub(super) fn positions(&self) -> usize {
        let of = |model: &Model| model.walk.decoder.positions();
        let own = of(&self.policy);
        self.reference.as_ref().map_or(own, |reference| own.min(of(&reference.model)))
    }

    /// Runs a pass of each model, the policy's first. `None` on all stages but the last.
    pub(super) fn each<T>(
        &mut self,
        sources: &mut dyn Sources,
        mut walk: impl FnMut(&mut Model<'a>, &mut dyn WeightSource) -> Result<Option<T>>,
    ) -> Result<Option<PolicyAndReferenceScores<T>>> {
        let policy = walk(&mut self.policy, sources.policy())?;
        let Some(Reference { model, .. }) = &mut self.reference else {
            return Ok(policy.map(PolicyAndReferenceScores::one));
        };
        let missing = || ModelError::Invalid("a mixture needs the reference's weights too".to_owned());
        let reference = walk(model, sources.reference().ok_or_else(missing)?)?;
        Ok(policy.map(|policy| PolicyAndReferenceScores { policy, reference }))
    }

    /// Reads the logits to sample from into `values`, and returns the scale and softcap still to be
    /// applied.
    pub(super) fn drawn_from(
        &self,
        logits: &PolicyAndReferenceScores<Tensor>,
        values: &mut Vec<f32>,
    ) -> Result<HeadShape> {
        let mut raw = |model: &Model, logits| -> Result<HeadShape> {
            model.read_into(logits, values)?;
            Ok(model.walk.decoder.spec().head.shape)
        };
        let Some((Reference { model, part }, of_reference)) =
            self.reference.as_ref().zip(logits.reference.as_ref())
        else {
            return raw(&self.policy, &logits.policy);
        };
        // At both ends exactly the logits of one model.
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
