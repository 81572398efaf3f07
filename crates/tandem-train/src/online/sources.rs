//! The weights that answers come from: the policy's, the reference's, or both.

use tandem_model::WeightSource;
use tandem_model::decode::Sources;

use crate::reference::Reference;
use crate::weights::{Policy, SharedReference};

/// Policy and reference as weight sources.
pub(crate) enum PolicyAndReference<'a> {
    /// Each with weights of its own; the second may be missing.
    Apart(&'a mut Policy, Option<&'a mut dyn WeightSource>),
    /// On one base.
    Shared(SharedReference<'a>),
}

impl<'a> PolicyAndReference<'a> {
    pub(crate) fn new(policy: &'a mut Policy, reference: &'a mut Reference) -> Self {
        match reference {
            Reference::Shared => Self::Shared(SharedReference(policy)),
            Reference::Model(weights) => Self::Apart(policy, Some(weights.as_mut())),
            Reference::Followed(weights) => Self::Apart(policy, Some(weights.as_mut())),
            Reference::None | Reference::Precomputed { .. } | Reference::Teacher(_) => {
                Self::Apart(policy, None)
            }
        }
    }
}

impl Sources for PolicyAndReference<'_> {
    fn policy(&mut self) -> &mut dyn WeightSource {
        match self {
            Self::Apart(policy, _) => *policy,
            Self::Shared(shared) => shared.0,
        }
    }

    fn reference(&mut self) -> Option<&mut dyn WeightSource> {
        match self {
            Self::Apart(_, Some(weights)) => Some(*weights),
            Self::Apart(_, None) => None,
            Self::Shared(shared) => Some(shared),
        }
    }
}

/// The reference alone.
pub(crate) struct ReferenceOnly<'a>(pub &'a mut dyn Sources);

impl Sources for ReferenceOnly<'_> {
    fn policy(&mut self) -> &mut dyn WeightSource {
        self.0.reference().expect("who asks the reference has one")
    }

    fn reference(&mut self) -> Option<&mut dyn WeightSource> {
        None
    }
}
