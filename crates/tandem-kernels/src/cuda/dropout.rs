//! Dropout with a mask hashed on the fly.

use super::elements::Elements;
use super::{Cuda, args, by_type, driver, source};
use crate::ops::Mask;
use crate::{Result, View, ViewMut};

pub(super) static SOURCE: driver::Source = source!("dropout.cu");

pub(crate) fn dropout(cuda: &Cuda, x: View, y: ViewMut, mask: Mask, add: bool) -> Result<()> {
    let way = Elements::new(&[x, y.view()]);
    let name = by_type!("dropout", x.dtype(), y.dtype());
    let operands = args![x, x.stride(), &y, y.stride(), mask.start, mask.bound, mask.factor, add];
    let args = [operands, args![way.rows, way.cols, way.wide]].concat();
    // SAFETY: the operands are those of the kernel, of one shape, as the operation has checked.
    unsafe { cuda.launch(&SOURCE, name, way.grid(), &args) }
}
