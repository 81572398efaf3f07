//! Products of packed FP8 weights on GPUs.

use super::gemm::Product;
use super::packed::PackedWeight;
use crate::memory::bytes::BytesView;
use crate::{DType, Device, Extent, Format, KernelError, MemoryKind, OpCost, Result, Tensor, cuda};

/// Name in [`OpCost`] of a linear layer's product with an FP8 weight, with and without a low-rank term.
pub const LINEAR_FP8: &str = "linear_fp8";

/// Name in [`OpCost`] of the gradient of such a layer's input, where it is an FP8 product.
pub const LINEAR_FP8_BACKWARD_INPUT: &str = "linear_fp8_backward_input";

/// Returns whether an operation of this name multiplies FP8 codes.
pub fn is_fp8_matmul(op: &str) -> bool {
    [LINEAR_FP8, LINEAR_FP8_BACKWARD_INPUT].contains(&op)
}

/// Number of which the rows and columns of an FP8 product's weight are multiples.
pub const FP8_MULTIPLE: usize = 16;

/// Returns the codes and scales of a weight that a GPU multiplies as FP8.
///
/// # Errors
/// If it is in another format, has been cut, or its shape is no multiple of [`FP8_MULTIPLE`].
pub(super) fn codes<'a>(op: &'static str, weight: &PackedWeight<'a>) -> Result<BytesView<'a>> {
    let (rows, cols, format) = (weight.rows(), weight.cols(), weight.format());
    if format != Format::Fp8 {
        return Err(KernelError::invalid(op, format!("a GPU multiplies no {format} weights: unpack them")));
    }
    if [rows, cols].iter().any(|n| *n == 0 || n % FP8_MULTIPLE != 0) {
        let reason = format!("w is {rows}x{cols}, expected multiples of {FP8_MULTIPLE}");
        return Err(KernelError::invalid(op, reason));
    }
    let all = weight.whole();
    all.ok_or_else(|| {
        KernelError::invalid(op, "a GPU multiplies whole FP8 weights, whose rows lie side by side")
    })
}

/// Runs or records a checked product with the weight `w`, of this cost but for the traffic of the rounded factor.
/// It is the gradient of an input if the second factor is transposed.
pub(super) fn run(device: &Device, mut work: OpCost, product: Product, w: BytesView) -> Result<()> {
    let (extent, n, k) = (product.a.extent(), product.c.cols(), product.a.depth());
    let is_transposed = product.b.is_transposed();
    work.op = if is_transposed { LINEAR_FP8_BACKWARD_INPUT } else { LINEAR_FP8 };
    work.bytes += 2.0 * (extent.len() * (k + size_of::<f32>())) as f64;
    let alloc = |rows: Extent, cols: usize| -> Result<Tensor> {
        device.alloc_in(MemoryKind::Scratch, rows, Extent::exact(cols), DType::F32)
    };
    // A byte per element.
    let codes_of = |rows: Extent| alloc(rows, k / size_of::<f32>());
    let mut transposed = None;
    if is_transposed {
        work.bytes += 2.0 * (n * k) as f64;
        transposed = Some((codes_of(Extent::exact(n))?, alloc(Extent::exact(1), k)?));
    }
    let mut codes = codes_of(extent)?;
    let mut scales = alloc(extent, 1)?;
    let [len, room] = [extent.len(), extent.room()].map(|rows| cuda::fp8::sums_shape(rows, n).0);
    let mut sums = alloc(Extent::new(len, room), cuda::fp8::sums_shape(len, n).1)?;
    let launched = device.launch_matmuls(work, |on| match on {
        crate::device::On::Cpu(_) => unreachable!("a CPU's products unpack their weights"),
        crate::device::On::Cuda(cuda) => {
            let scratch = cuda::fp8::Scratch {
                codes: codes.view_mut(),
                scales: scales.view_mut(),
                sums: sums.view_mut(),
                transposed: transposed.as_mut().map(|(codes, scales)| cuda::fp8::Transposed {
                    codes: codes.view_mut(),
                    scales: scales.view_mut(),
                }),
            };
            cuda::fp8::run(cuda, product, w, scratch)
        }
    });
    launched.map(drop)
}
