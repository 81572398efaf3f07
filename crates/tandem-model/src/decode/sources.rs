//! Where the weights of the models come from that text is generated from.

use crate::weights::WeightSource;

/// The weights of a policy, and of a reference that text is drawn from as well: one walk borrows them at a time, so both may be views
/// of one source.
pub trait Sources {
    /// The policy's.
    fn policy(&mut self) -> &mut dyn WeightSource;

    /// The reference's, if there is one.
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
