//! Elementwise operations.

use super::elements::Elements;
use super::{Cuda, args, by_type, driver, source};
use crate::{Result, View, ViewMut};

pub(super) static SOURCE: driver::Source = source!("elementwise.cu", not fused);

/// Fills a matrix of either type, contiguous or not.
pub(crate) fn fill(cuda: &Cuda, x: ViewMut, value: f32) -> Result<()> {
    let way = Elements::new(&[x.view()]);
    let args = args![&x, x.stride(), value, way.rows, way.cols, way.wide];
    // SAFETY: the view borrows these elements.
    unsafe { cuda.launch(&SOURCE, by_type!("fill", x.dtype()), way.grid(), args) }
}

pub(crate) fn divide(cuda: &Cuda, a: View, b: View, y: ViewMut, add: bool) -> Result<()> {
    let way = Elements::new(&[a, b, y.view()]);
    // SAFETY: rows of one length, as the operation has checked.
    unsafe { cuda.launch(&SOURCE, "divide_f32", way.grid(), args![a, b, &y, add, way.cols, way.wide]) }
}

pub(crate) fn square_root(cuda: &Cuda, x: ViewMut) -> Result<()> {
    let way = Elements::new(&[x.view()]);
    // SAFETY: the view borrows these elements.
    unsafe { cuda.launch(&SOURCE, "square_root_f32", way.grid(), args![&x, way.cols, way.wide]) }
}

pub(crate) fn weighted_sum(cuda: &Cuda, x: View, of_x: f32, y: ViewMut, of_y: f32) -> Result<()> {
    let way = Elements::new(&[x, y.view()]);
    let args = args![x, of_x, of_y, &y, way.cols, way.wide];
    // SAFETY: as above.
    unsafe { cuda.launch(&SOURCE, "weighted_sum_f32", way.grid(), args) }
}

pub(crate) fn lerp(cuda: &Cuda, end: View, weight: f32, y: ViewMut) -> Result<()> {
    let way = Elements::new(&[end, y.view()]);
    let args = args![end, weight, 1.0 - weight, &y, way.cols, way.wide];
    // SAFETY: as above.
    unsafe { cuda.launch(&SOURCE, "lerp_f32", way.grid(), args) }
}

pub(crate) fn swap(cuda: &Cuda, a: ViewMut, b: ViewMut) -> Result<()> {
    let way = Elements::new(&[a.view(), b.view()]);
    // SAFETY: as above.
    unsafe { cuda.launch(&SOURCE, "swap_f32", way.grid(), args![&a, &b, way.cols, way.wide]) }
}
