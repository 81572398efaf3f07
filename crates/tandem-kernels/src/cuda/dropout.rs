//! Dropout with a mask hashed on the fly.

use super::elements::Elements;
use super::{Cuda, args, by_type, driver, source};
use crate::ops::{Mask, NoiseRow};
use crate::{Result, View, ViewMut};

pub(super) static SOURCE: driver::Source = source!("dropout.cu", not fused);

pub(crate) fn dropout(cuda: &Cuda, x: View, y: ViewMut, mask: Mask, add: bool) -> Result<()> {
    let way = Elements::new(&[x, y.view()]);
    let name = by_type!("dropout", x.dtype(), y.dtype());
    let operands = args![x, x.stride(), &y, y.stride(), mask.start, mask.bound, mask.factor, add];
    let args = [operands, args![way.rows, way.cols, way.wide]].concat();
    // SAFETY: the operands are those of the kernel, of one shape, as the operation has checked.
    unsafe { cuda.launch(&SOURCE, name, way.grid(), &args) }
}

pub(crate) fn add_noise(cuda: &Cuda, x: ViewMut, rows: &[NoiseRow]) -> Result<()> {
    let way = Elements::by_rows(x.rows(), x.cols(), &[x.view()]);
    let table: Vec<u32> =
        rows.iter().flat_map(|row| [row.key as u32, (row.key >> 32) as u32, row.scale.to_bits()]).collect();
    let args = args![&x, x.stride(), cuda.table(&table)?, way.rows, way.cols, way.wide];
    // SAFETY: the table has three numbers for each row of `x`.
    unsafe { cuda.launch(&SOURCE, "add_noise_f32", way.grid(), args) }
}
