//! Device memory as ranks exchange it: what lies there, or on a device that computes nothing how much that would be. So a dry
//! run makes the calls of the run by the same code.

use std::ops::Range;

use tandem_comm::{ElementKind, Numbers};
use tandem_kernels::bytes::Bytes;
use tandem_kernels::exact::ExactSum;
use tandem_kernels::{DType, Tensor, bf16};

/// A whole tensor.
pub(crate) fn tensor(x: &mut Tensor) -> Numbers<'_> {
    let len = x.view().len();
    match (x.is_meta(), x.dtype()) {
        (false, DType::F32) => x.view_mut().into_slice::<f32>().into(),
        (false, DType::Bf16) => x.view_mut().into_slice::<bf16>().into(),
        (true, DType::F32) => Numbers::dry(ElementKind::F32, len),
        (true, DType::Bf16) => Numbers::dry(ElementKind::Bf16, len),
    }
}

/// A range of a row of f32.
pub(crate) fn floats(x: &mut Tensor, range: Range<usize>) -> Numbers<'_> {
    if x.is_meta() {
        return Numbers::dry(ElementKind::F32, range.len());
    }
    x.view_mut().col_range(range).into_slice::<f32>().into()
}

/// A range of sums in fixed point.
pub(crate) fn fixed(sums: &mut ExactSum, range: Range<usize>) -> Numbers<'_> {
    if sums.is_meta() {
        return Numbers::dry(ElementKind::I64, range.len());
    }
    (&mut sums.as_mut_slice()[range]).into()
}

/// Bytes, all of them.
pub(crate) fn bytes(bytes: &mut Bytes) -> Numbers<'_> {
    if bytes.is_meta() {
        return Numbers::dry(ElementKind::U8, bytes.len());
    }
    bytes.as_mut_slice().into()
}
