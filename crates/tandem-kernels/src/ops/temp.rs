//! TEMP
use crate::cpu::{Operand, Product};
use crate::{Device, Result, View, ViewMut};
pub fn linear_add(device: &Device, x: View, w: View, y: ViewMut) -> Result<()> {
    let product = Product {
        a: Operand::rows_of(x),
        b: Operand::rows_of(w),
        c: y,
        accumulate: true,
        bias: None,
        residual: None,
    };
    if let Device::Cpu(cpu) = device {
        product.run(cpu)
    }
    Ok(())
}
pub fn linear_backward_input_add(device: &Device, dy: View, w: View, dx: ViewMut) -> Result<()> {
    super::linear_backward_input(device, dy, w, dx, true)
}
pub fn scale_columns(_: &Device, _: ViewMut, _: View, _: Option<View>) -> Result<()> {
    todo!()
}
pub fn column_dots(_: &Device, _: View, _: View, _: ViewMut, _: bool) -> Result<()> {
    todo!()
}
pub fn divide(_: &Device, _: View, _: View, _: ViewMut, _: bool) -> Result<()> {
    todo!()
}
pub fn fill(_: &Device, _: ViewMut, _: f32) -> Result<()> {
    todo!()
}
pub fn low_rank_row_norms(_: &Device, _: View, _: View, _: View, _: f32, _: ViewMut) -> Result<()> {
    todo!()
}
pub fn dropout(_: &Device, _: View, _: ViewMut, _: u64, _: f32) -> Result<()> {
    todo!()
}
pub fn dropout_backward_add(_: &Device, _: View, _: ViewMut, _: u64, _: f32) -> Result<()> {
    todo!()
}
