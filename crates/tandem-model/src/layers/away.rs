//! Inputs of blocks that wait in host memory for backward.
//!
//! An input is copied out while its block computes, which reads it too, and leaves the device with the block's end. On a GPU it is
//! brought back while the block that comes before it in backward computes, so that two are there at a time. The copies are put
//! into the stream of the host memory's device, which waits for the walk's where a copy begins, and the walk's for it where one is
//! needed. On a processor a copy is done when its call returns, and nothing runs ahead.

use tandem_kernels::cuda::Mark;
use tandem_kernels::{Device, Extent, Kind, Tensor, ops};

use super::Walk;
use super::block::SavedBlock;
use crate::Result;

/// A block's input in host memory.
pub(super) struct AwayInput {
    there: Tensor,
    /// Where it will be, if it is on its way back.
    here: Option<Tensor>,
    /// When the last copy that was begun is done.
    copied: Mark,
}

/// A copy of the same shape, begun in the order of `by`'s work and after all of `other`'s so far.
fn copy(by: &Device, other: &Device, home: &Device, from: &Tensor) -> Result<(Tensor, Mark)> {
    let (rows, cols) = (from.extent(), Extent::exact(from.cols()));
    let mut to = home.alloc_in(Kind::Activations, rows, cols, from.dtype())?;
    by.after(&other.mark()?)?;
    ops::cast(by, from.view(), to.view_mut())?;
    Ok((to, by.mark()?))
}

impl Walk<'_> {
    /// Begins to copy a block's input to where it will wait, if it does not stay.
    pub(super) fn send_away(&self, input: &Tensor) -> Result<Option<AwayInput>> {
        let Some(host) = self.host else { return Ok(None) };
        let (there, copied) = copy(host, self.device, host, input)?;
        Ok(Some(AwayInput { there, here: None, copied }))
    }
}

impl SavedBlock {
    /// Gives the input's memory back, if it has been copied. What takes that memory next waits for the copy.
    pub(super) fn leave(mut self, device: &Device, away: Option<AwayInput>) -> Result<Self> {
        if let Some(away) = away {
            device.after(&away.copied)?;
            (self.input, self.away) = (None, Some(away));
        }
        Ok(self)
    }

    /// Begins to bring the input back, if it is away and not on its way already.
    pub(super) fn begin_return(&mut self, walk: &Walk<'_>) -> Result<()> {
        if let (Some(host), Some(AwayInput { there, here: here @ None, copied })) =
            (walk.host, &mut self.away)
        {
            let (tensor, done) = copy(host, walk.device, walk.device, there)?;
            (*here, *copied) = (Some(tensor), done);
        }
        Ok(())
    }

    /// With the input on the device.
    pub(super) fn come_back(mut self, walk: &Walk<'_>) -> Result<Self> {
        self.begin_return(walk)?;
        // The memory that it waited in is given back after the walk has begun to wait for the copy out of it.
        if let Some(AwayInput { here, copied, there }) = self.away.take() {
            walk.device.after(&copied)?;
            self.input = here;
            drop(there);
        }
        Ok(self)
    }
}
