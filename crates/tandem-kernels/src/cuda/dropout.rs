//! TODO.

use super::{Cuda, driver, failed, source};
use crate::{Result, View, ViewMut};

pub(super) static SOURCE: driver::Source = source!("dropout.cu");

pub(crate) fn dropout(cuda: &Cuda, x: View, y: ViewMut, key: u64, p: f32, add: bool) -> Result<()> {
    let _ = (cuda, x, y, key, p, add);
    Err(failed("dropout", "not written"))
}
