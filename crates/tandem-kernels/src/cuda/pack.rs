//! TODO.

use super::{Cuda, driver, failed, source};
use crate::bytes::{BytesMut, BytesView};
use crate::{Format, Result, View, ViewMut};

pub(super) static SOURCE: driver::Source = source!("pack.cu", not fused);

pub(crate) fn pack(cuda: &Cuda, values: View, format: Format, packed: BytesMut) -> Result<Result<()>> {
    let _ = (cuda, values, format, packed);
    Err(failed("pack", "not written"))
}

pub(crate) fn unpack(cuda: &Cuda, packed: BytesView, format: Format, values: ViewMut) -> Result<()> {
    let _ = (cuda, packed, format, values);
    Err(failed("pack", "not written"))
}
