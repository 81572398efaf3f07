//! Rows of f32, element by element.

use super::check;
use crate::cpu::elementwise as kernel;
use crate::device::on;
use crate::{Device, Result, View, ViewMut, cuda};

/// `x = value`; f32, contiguous.
///
/// # Errors
/// If the type does not fit, or rows do not follow one another.
pub fn fill(device: &Device, x: ViewMut, value: f32) -> Result<()> {
    const OP: &str = "fill";
    check::is_f32(OP, "x", &x)?;
    check::contiguous(OP, "x", x.is_contiguous())?;
    let work = check::work(OP, &x, 0.0, x.num_bytes() as f64);
    device.launch(
        work,
        on!(
            _cpu => x.into_slice().fill(value),
            cuda => cuda::elementwise::fill(cuda, x, value)
        ),
    )?;
    Ok(())
}

/// `y = a / b`, or `+=` if `add`; f32 `[1,N]`.
///
/// # Errors
/// If shapes or types do not fit.
pub fn divide(device: &Device, a: View, b: View, y: ViewMut, add: bool) -> Result<()> {
    const OP: &str = "divide";
    check::f32_shape(OP, "a", &a, 1, y.cols())?;
    check::f32_shape(OP, "b", &b, 1, y.cols())?;
    check::f32_shape(OP, "y", &y, 1, y.cols())?;
    let work = check::work(OP, &y, y.len() as f64, 3.0 * y.num_bytes() as f64);
    device.launch(
        work,
        on!(
            _cpu => kernel::divide(a.as_slice(), b.as_slice(), y.into_slice(), add),
            cuda => cuda::elementwise::divide(cuda, a, b, y, add)
        ),
    )?;
    Ok(())
}

/// `y = weight · x + (1 − weight) · y`; f32 `[1,N]`.
///
/// # Errors
/// If shapes or types do not fit.
pub fn mix(device: &Device, x: View, weight: f32, y: ViewMut) -> Result<()> {
    const OP: &str = "mix";
    check::f32_shape(OP, "x", &x, 1, y.cols())?;
    check::f32_shape(OP, "y", &y, 1, y.cols())?;
    let work = check::work(OP, &y, 3.0 * y.len() as f64, 3.0 * y.num_bytes() as f64);
    device.launch(
        work,
        on!(
            cpu => cpu.mix(x.as_slice(), weight, y.into_slice()),
            cuda => cuda::elementwise::mix(cuda, x, weight, y)
        ),
    )?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Kind, Tensor};

    fn row(device: &Device, values: &[f32]) -> Tensor {
        let mut row = device.alloc(Kind::Scratch, 1, values.len(), DType::F32).unwrap();
        row.view_mut().into_slice().copy_from_slice(values);
        row
    }

    #[test]
    fn quotients_replace_or_are_added() {
        let device = Device::cpu(1, 1 << 21).unwrap();
        let (a, b, mut y) = (row(&device, &[1.0, 6.0]), row(&device, &[4.0, -3.0]), row(&device, &[0.5; 2]));
        divide(&device, a.view(), b.view(), y.view_mut(), true).unwrap();
        assert_eq!(y.view().as_slice::<f32>(), [0.75, -1.5]);
        divide(&device, a.view(), b.view(), y.view_mut(), false).unwrap();
        assert_eq!(y.view().as_slice::<f32>(), [0.25, -2.0]);
        fill(&device, y.view_mut(), 3.0).unwrap();
        assert_eq!(y.view().as_slice::<f32>(), [3.0, 3.0]);
        let mut short = row(&device, &[0.0]);
        assert!(divide(&device, a.view(), b.view(), short.view_mut(), false).is_err());
    }

    #[test]
    fn a_mixture_lies_between() {
        for threads in [1, 3] {
            let device = Device::cpu(threads, 1 << 24).unwrap();
            let x: Vec<f32> = (0..100_003).map(|i| i as f32).collect();
            let (x, mut y) = (row(&device, &x), row(&device, &vec![-1.0; 100_003]));
            mix(&device, x.view(), 0.25, y.view_mut()).unwrap();
            let mixed = y.view().as_slice::<f32>();
            assert!(mixed.iter().enumerate().all(|(i, &y)| y == 0.25 * i as f32 - 0.75));
            mix(&device, x.view(), 1.0, y.view_mut()).unwrap();
            assert_eq!(y.view().as_slice::<f32>(), x.view().as_slice::<f32>());
        }
    }
}
