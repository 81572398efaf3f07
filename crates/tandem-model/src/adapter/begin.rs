//! Initial values of an adapter that come from the base.

use tandem_kernels::{DType, Device, MemoryKind, Tensor, ops};

use crate::decoder::Decoder;
use crate::layers::{Checkpointing, LayerExecutor, TensorParallelOps};
use crate::layout::LayerId;
use crate::weights::{LayerWeights, LowRank};
use crate::{ModelError, Result};

/// Fills the parts of an adapter's flat buffer that begin with the base's values: modules that
/// train whole, and the magnitudes of DoRA. The ranks of a tensor-parallel group call this together.
pub fn copy_base(
    decoder: &Decoder,
    device: &Device,
    split: Option<&dyn TensorParallelOps>,
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
        let zeros = |rows, cols| device.zeros(MemoryKind::Scratch, rows, cols, w.dtype());
        let (a, b) = (zeros(adapted.sites.len(), w.cols())?, zeros(param.cols, 1)?);
        let nothing = LowRank {
            sites: &adapted.sites,
            rank: 1,
            scale: 0.0,
            dropout: 0.0,
            place: 0,
            columns: None,
            a: a.view(),
            b: b.view(),
            magnitude: None,
        };
        let executor = LayerExecutor::new(decoder, device, w.dtype(), Checkpointing::None);
        let norms = LayerExecutor { split, ..executor }.norms(adapted.part, &nothing, w)?;
        ops::cast(device, norms.view(), flat.view_mut().col_range(param.range()))?;
    }
    debug_assert_eq!(flat.dtype(), DType::F32, "masters are f32");
    Ok(())
}
