//! Reduces a layer's gradient over ranks while backward computes the next layer's.

use std::sync::Arc;

use tandem_comm::{ProcessGroup, Reduction};
use tandem_kernels::exact::FixedPointSum;
use tandem_kernels::{Device, Tensor};
use tandem_model::Result as ModelResult;

use crate::Result;
use crate::error::lost;
use crate::parallel::{Partition, collective_buffer};
use crate::placement::async_transfer::{AsyncTransfer, Outcome};

/// A group that reduces one layer at a time, and the room for it.
pub(super) struct Reducer {
    transfer: AsyncTransfer<Terms>,
    /// `None` while a layer is in progress.
    room: Option<Buffer>,
}

/// A layer's gradient of one micro-batch: this rank's before the reduction, all ranks' after it,
/// for this rank's shard only.
pub(super) struct Terms {
    /// The layer's place in walk order.
    pub(super) index: usize,
    /// As long as the longest layer.
    pub(super) buffer: Buffer,
}

/// Gradients as they travel.
pub(super) enum Buffer {
    Fixed(FixedPointSum),
    Floats(Tensor),
}

impl Reducer {
    pub(super) fn new(
        device: &Device,
        partition: Arc<Partition>,
        group: ProcessGroup,
        room: Buffer,
    ) -> Result<Self> {
        let name = format!("rank {} reduce", group.rank());
        let has_peers = group.size() > 1;
        let transfer =
            AsyncTransfer::new(device, &name, group, has_peers, move |by, group, terms: &mut Terms| {
                terms.reduce(by, group, partition.counts(terms.index))
            })?;
        Ok(Self { transfer, room: Some(room) })
    }

    /// Room for the terms of the next layer.
    ///
    /// # Panics
    /// Unless [`Reducer::end`] was called since the last layer began.
    pub(super) fn room(&mut self) -> &mut Buffer {
        self.room.as_mut().expect(UNDER_WAY)
    }

    /// Starts reducing the buffer as layer `index`.
    ///
    /// # Panics
    /// As [`Reducer::room`].
    pub(super) fn begin(&mut self, index: usize) {
        let buffer = self.room.take().expect(UNDER_WAY);
        self.transfer.begin(Terms { index, buffer });
    }

    /// Waits for the layer in progress, if any, and hands it to `take`.
    pub(super) fn end(&mut self, take: impl FnOnce(&Terms) -> ModelResult<()>) -> ModelResult<()> {
        let Some((terms, outcome)) = self.transfer.end() else { return Ok(()) };
        let taken = outcome.map_err(lost).and_then(|()| take(&terms));
        self.room = Some(terms.buffer);
        taken
    }
}

const UNDER_WAY: &str = "a layer begins when the one before it has been taken";

impl Terms {
    fn reduce(&mut self, device: &Device, group: &mut ProcessGroup, counts: &[usize]) -> Outcome {
        let all = 0..counts.iter().sum();
        let terms = match &mut self.buffer {
            Buffer::Fixed(terms) => collective_buffer::fixed(device, terms, all),
            Buffer::Floats(terms) => collective_buffer::floats(device, terms, all),
        };
        group.reduce_scatter_numbers(terms, counts, Reduction::Sum)
    }
}
