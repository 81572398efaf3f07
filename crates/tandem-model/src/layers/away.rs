//! Offload of block inputs to host memory, from forward to backward.
//!
//! An input is copied out while its block computes, which reads it too, and leaves the device when
//! the block ends. On a GPU it is copied back while the block before it in backward computes, so
//! that two inputs are on the device at a time. The host device's stream makes the copies: it waits
//! for the compute stream where a copy begins, and the compute stream for it where the copy is
//! needed. On a CPU a copy is complete when its call returns, and nothing is copied back early.

use tandem_kernels::cuda::StreamEvent;
use tandem_kernels::{Device, Extent, MemoryKind, Tensor, ops};

use super::LayerExecutor;
use super::block::SavedBlock;
use crate::Result;

/// Block input in host memory.
pub(super) struct OffloadedActivation {
    there: Tensor,
    /// Tensor on the device, if the copy back has begun.
    here: Option<Tensor>,
    /// Completion of the last copy that was begun.
    copied: StreamEvent,
}

/// Begins a copy into `home`, on the stream of `by` and after all work of `other` so far.
fn copy(by: &Device, other: &Device, home: &Device, from: &Tensor) -> Result<(Tensor, StreamEvent)> {
    let (rows, cols) = (from.extent(), Extent::exact(from.cols()));
    let mut to = home.alloc_in(MemoryKind::Activations, rows, cols, from.dtype())?;
    by.after(&other.mark()?)?;
    ops::cast(by, from.view(), to.view_mut())?;
    Ok((to, by.mark()?))
}

impl LayerExecutor<'_> {
    /// Begins to offload a block's input, if inputs are offloaded.
    pub(super) fn send_away(&self, input: &Tensor) -> Result<Option<OffloadedActivation>> {
        let Some(host) = self.host else { return Ok(None) };
        let (there, copied) = copy(host, self.device, host, input)?;
        Ok(Some(OffloadedActivation { there, here: None, copied }))
    }
}

impl SavedBlock {
    /// Frees the input's device memory, if it is offloaded. The next owner of that memory waits for
    /// the copy.
    pub(super) fn leave(mut self, device: &Device, away: Option<OffloadedActivation>) -> Result<Self> {
        if let Some(away) = away {
            device.after(&away.copied)?;
            (self.input, self.away) = (None, Some(away));
        }
        Ok(self)
    }

    /// Begins to copy the input back, if it is offloaded and not on its way.
    pub(super) fn begin_return(&mut self, walk: &LayerExecutor<'_>) -> Result<()> {
        if let (Some(host), Some(OffloadedActivation { there, here: here @ None, copied })) =
            (walk.host, &mut self.away)
        {
            let (tensor, done) = copy(host, walk.device, walk.device, there)?;
            (*here, *copied) = (Some(tensor), done);
        }
        Ok(())
    }

    /// Returns the block with its input on the device.
    pub(super) fn come_back(mut self, walk: &LayerExecutor<'_>) -> Result<Self> {
        self.begin_return(walk)?;
        // The host memory is freed after the compute stream waits for the copy out of it.
        if let Some(OffloadedActivation { here, copied, there }) = self.away.take() {
            walk.device.after(&copied)?;
            self.input = here;
            drop(there);
        }
        Ok(self)
    }
}
