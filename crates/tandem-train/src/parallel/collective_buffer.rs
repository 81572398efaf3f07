//! Device memory in collectives. On a dry-run device only the length counts, so the dry run makes
//! the same calls.

use std::ops::Range;

use tandem_comm::{CollectiveBuffer, DeviceNumbers, ElementKind};
use tandem_kernels::bytes::Bytes;
use tandem_kernels::exact::FixedPointSum;
use tandem_kernels::{DType, Device, Remote, Tensor, ViewMut, bf16};

/// A whole tensor of `device`'s.
pub fn tensor<'a>(device: &'a Device, x: &'a mut Tensor) -> CollectiveBuffer<'a> {
    let all = 0..x.rows();
    rows(device, x, all)
}

/// Neighbouring rows of a tensor of `device`'s.
pub(crate) fn rows<'a>(device: &'a Device, x: &'a mut Tensor, rows: Range<usize>) -> CollectiveBuffer<'a> {
    of_view(device, x.view_mut().row_range(rows))
}

fn of_view<'a>(device: &'a Device, view: ViewMut<'a>) -> CollectiveBuffer<'a> {
    let dtype = view.dtype();
    let kind = match dtype {
        DType::F32 => ElementKind::F32,
        DType::Bf16 => ElementKind::Bf16,
    };
    match (device, dtype) {
        (Device::Cpu(_), DType::F32) => view.into_slice::<f32>().into(),
        (Device::Cpu(_), DType::Bf16) => view.into_slice::<bf16>().into(),
        _ => elsewhere(kind, view.len(), Remote::from_view(device, view)),
    }
}

/// A range of a tensor of one row.
pub(crate) fn range<'a>(device: &'a Device, x: &'a mut Tensor, range: Range<usize>) -> CollectiveBuffer<'a> {
    let view = x.view_mut().col_range(range);
    of_view(device, view)
}

/// A range of sums in fixed point.
pub(crate) fn fixed<'a>(
    device: &'a Device,
    sums: &'a mut FixedPointSum,
    range: Range<usize>,
) -> CollectiveBuffer<'a> {
    let (len, sums) = (range.len(), sums.view_mut().range(range));
    match device {
        Device::Cpu(_) => sums.into_slice().into(),
        _ => elsewhere(ElementKind::I64, len, Remote::from_sums(device, sums)),
    }
}

/// Bytes, all of them.
pub(crate) fn bytes<'a>(device: &'a Device, bytes: &'a mut Bytes) -> CollectiveBuffer<'a> {
    match device {
        Device::Cpu(_) => bytes.as_mut_slice().into(),
        _ => elsewhere(ElementKind::U8, bytes.len(), Remote::from_bytes(device, bytes.view_mut())),
    }
}

/// On a GPU, or nowhere in a dry run.
fn elsewhere<'a>(kind: ElementKind, len: usize, remote: Option<Remote<'a>>) -> CollectiveBuffer<'a> {
    match remote {
        Some(remote) => CollectiveBuffer::on_device(kind, len, OnGpu(remote)),
        None => CollectiveBuffer::dry(kind, len),
    }
}

/// A GPU's memory as collectives know it.
struct OnGpu<'a>(Remote<'a>);

impl DeviceNumbers for OnGpu<'_> {
    fn address(&self) -> (usize, u64) {
        self.0.address()
    }

    fn stream(&self) -> Result<u64, String> {
        self.0.stream().map_err(|error| crate::chain(&error))
    }

    fn synchronize(&mut self) -> Result<(), String> {
        self.0.flush().map_err(|error| crate::chain(&error))
    }

    fn read(&mut self, range: Range<usize>, to: &mut [u8]) -> Result<(), String> {
        self.0.read(range, to).map_err(|error| crate::chain(&error))
    }

    fn write(&mut self, range: Range<usize>, from: &[u8]) -> Result<(), String> {
        self.0.write(range, from).map_err(|error| crate::chain(&error))
    }
}
