//! Weight sources of the models to sample from.

use crate::weights::WeightSource;

/// Weight sources of a policy, and of the reference of a mixture. One pass borrows one at a time,
/// so both may be views of one source.
pub trait Sources {
    /// Returns the policy's source.
    fn policy(&mut self) -> &mut dyn WeightSource;

    /// Returns the reference's source, if there is one.
    fn reference(&mut self) -> Option<&mut dyn WeightSource>;
}

impl<W: WeightSource> Sources for W {
    fn policy(&mut self) -> &mut dyn WeightSource {
        self
    }

    fn reference(&mut self) -> Option<&mut dyn WeightSource> {
        None
    }
}

impl Sources for &mut dyn WeightSource {
    fn policy(&mut self) -> &mut dyn WeightSource {
        *self
    }

    fn reference(&mut self) -> Option<&mut dyn WeightSource> {
        None
    }
}
