//! Some rows of a matrix, or all of them.

use tandem_kernels::{Tensor, View};

/// Rows that a block computes after attention.
pub(super) enum SelectedRows<'a> {
    /// The matrix itself.
    All(View<'a>),
    /// A copy of some rows.
    Some(Tensor),
}

impl SelectedRows<'_> {
    pub(super) fn view(&self) -> View<'_> {
        match self {
            Self::All(view) => *view,
            Self::Some(tensor) => tensor.view(),
        }
    }
}
