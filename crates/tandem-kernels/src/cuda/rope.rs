//! TODO.

use super::{Cuda, driver, failed, source};
use crate::ops::RopeTable;
use crate::{Result, ViewMut};

pub(super) static SOURCE: driver::Source = source!("rope.cu");

pub(crate) fn rope(
    cuda: &Cuda,
    x: ViewMut,
    head_dim: usize,
    positions: &[u32],
    table: &RopeTable,
    inverse: bool,
) -> Result<()> {
    let _ = (cuda, x, head_dim, positions, table, inverse);
    Err(failed("rope", "not written"))
}
