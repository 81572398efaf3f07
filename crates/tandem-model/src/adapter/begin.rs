//! Initial values of an adapter that come from the base.

use tandem_kernels::{DType, Device, MemoryKind, Tensor, ops};

use crate::decoder::Decoder;
use crate::layout::LayerId;
use crate::weights::LayerWeights;
use crate::{ModelError, Result};

/// Fills the parts of an adapter's flat buffer that begin with the base's values: modules that
/// train whole, and the magnitudes of DoRA.
pub fn copy_base(
    decoder: &Decoder,
    device: &Device,
    base: &LayerWeights,
    layer: LayerId,
    flat: &mut Tensor,
) -> Result<()> {
    let Some(adapter) = decoder.adapter() else { return Ok(()) };
    let layout = decoder.trained(layer);
    for param in layout.params.iter().filter(|param| adapter.saved().contains(&param.part)) {
        let missing = || ModelError::Invalid(format!("the weight source gave no {:?}", param.part));
        let own = base.precise(param.part).ok_or_else(missing)?;
        let place = flat.view_mut().col_range(param.range()).reshape(param.rows, param.cols);
        ops::cast(device, own, place)?;
    }
    for adapted in adapter.matrices() {
        let magnitude = adapted.part.low_rank().and_then(|parts| parts.magnitude);
        let Some(param) = magnitude.and_then(|part| layout.param(part)) else { continue };
        let w = base.require(adapted.part)?;
        let a = device.zeros(MemoryKind::Scratch, 1, w.cols(), w.dtype())?;
        for site in &adapted.sites {
            let b = device.zeros(MemoryKind::Scratch, site.rows.len(), 1, w.dtype())?;
            let place = param.offset + site.b_rows.start..param.offset + site.b_rows.end;
            let (w, norms) = (w.row_range(site.rows.clone()), flat.view_mut().col_range(place));
            ops::low_rank_row_norms(device, w, a.view(), b.view(), 0.0, norms)?;
        }
    }
    debug_assert_eq!(flat.dtype(), DType::F32, "masters are f32");
    Ok(())
}
