//! Some rows of a matrix, or all of them.

use tandem_kernels::{Tensor, View};

/// What a block goes on with after attention.
pub(super) enum Picked<'a> {
    /// The matrix itself.
    All(View<'a>),
    /// A copy of some rows.
    Some(Tensor),
}

impl Picked<'_> {
    pub(super) fn view(&self) -> View<'_> {
        match self {
            Self::All(view) => *view,
            Self::Some(tensor) => tensor.view(),
        }
    }
}
