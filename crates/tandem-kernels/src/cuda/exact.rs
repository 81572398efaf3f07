//! TODO.

use super::{Cuda, driver, failed, source};
use crate::Result;
use crate::View;
use crate::exact::{ExactSum, ExactView};

pub(super) static SOURCE: driver::Source = source!("exact.cu", not fused);

pub(crate) fn exact_merge(cuda: &Cuda, other: ExactView, sums: &mut ExactSum, add: bool) -> Result<()> {
    let _ = (cuda, other, sums, add);
    Err(failed("exact", "not written"))
}

pub(crate) fn exact_sum(cuda: &Cuda, terms: View, sums: &mut ExactSum, add: bool, limit: f32) -> Result<()> {
    let _ = (cuda, terms, sums, add, limit);
    Err(failed("exact", "not written"))
}
