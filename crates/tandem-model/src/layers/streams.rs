//! Policy and reference in one pass over the layers.

use crate::Result;
use crate::layout::LayerId;
use crate::weights::{LayerWeights, WeightSource};

/// A value of the policy, and of a reference that shares its base: both go through a layer that is
/// fetched once.
#[derive(Clone, Copy, Debug, Default)]
pub struct PolicyAndReferenceScores<T> {
    /// The policy's value.
    pub policy: T,
    /// The reference's value, if it goes along.
    pub reference: Option<T>,
}

impl<T> PolicyAndReferenceScores<T> {
    /// Holds the policy's value alone.
    pub fn one(policy: T) -> Self {
        Self { policy, reference: None }
    }

    /// Maps each value, the reference's first: it keeps nothing, and frees its memory before the
    /// policy's.
    pub(super) fn try_map<U>(
        self,
        mut f: impl FnMut(T, bool) -> Result<U>,
    ) -> Result<PolicyAndReferenceScores<U>> {
        let reference = self.reference.map(|reference| f(reference, true)).transpose()?;
        Ok(PolicyAndReferenceScores { policy: f(self.policy, false)?, reference })
    }
}

/// Weights of a layer for each stream.
pub(super) struct StreamWeights<'w> {
    policy: LayerWeights<'w>,
    reference: Option<LayerWeights<'w>>,
}

impl<'w> StreamWeights<'w> {
    /// Fetches a layer, for the reference too if `both`; as [`WeightSource::fetch_packed`] if `may_be_packed`.
    pub(super) fn fetch(
        weights: &'w mut dyn WeightSource,
        layer: LayerId,
        both: bool,
        may_be_packed: bool,
    ) -> Result<Self> {
        if both {
            let (policy, reference) = weights.fetch_both(layer, may_be_packed)?;
            return Ok(Self { policy, reference: Some(reference) });
        }
        let policy = weights.fetch_for(layer, may_be_packed)?;
        Ok(Self { policy, reference: None })
    }

    pub(super) fn stream(&self, reference: bool) -> &LayerWeights<'w> {
        if reference { self.reference.as_ref().expect("fetched for both") } else { &self.policy }
    }
}
