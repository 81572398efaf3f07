//! Reductions over ranks while backward goes on.

use std::sync::Arc;

use tandem_comm::ProcessGroup;
use tandem_kernels::Device;
use tandem_model::Result as ModelResult;

use super::buffer::{Buffer, Wire};
use crate::Result;
use crate::error::lost;
use crate::parallel::Partition;
use crate::placement::async_transfer::AsyncTransfer;

/// A bucket's sums, before or after the reduction.
pub(super) struct Bucket {
    /// Its place in walk order.
    pub(super) index: usize,
    pub(super) sums: Buffer,
}

/// Reduces the gradient of every micro-batch, one bucket at a time, where ranks hold parts of the sums.
pub(super) struct MicroBatchReducer {
    transfer: AsyncTransfer<Bucket>,
    /// As long as the longest bucket; `None` while one is in progress.
    room: Option<Buffer>,
}

impl MicroBatchReducer {
    /// `group` is used for nothing else.
    pub(super) fn new(
        device: &Device,
        partition: Arc<Partition>,
        group: ProcessGroup,
        mut wire: Wire,
        room: Buffer,
    ) -> Result<Self> {
        let name = format!("rank {} reduce", group.rank());
        let has_peers = group.size() > 1;
        let reduce = move |by: &Device, group: &mut ProcessGroup, bucket: &mut Bucket| {
            wire.reduce_scatter(by, group, &mut bucket.sums, partition.bucket_counts(bucket.index))
        };
        let transfer = AsyncTransfer::new(device, &name, group, 1, has_peers, reduce)?;
        Ok(Self { transfer, room: Some(room) })
    }

    /// Room for the terms of the next bucket.
    ///
    /// # Panics
    /// Unless [`MicroBatchReducer::end`] was called since the last bucket began.
    pub(super) fn room(&mut self) -> &mut Buffer {
        self.room.as_mut().expect(UNDER_WAY)
    }

    /// Starts reducing the room as bucket `index`.
    ///
    /// # Panics
    /// As [`MicroBatchReducer::room`].
    pub(super) fn begin(&mut self, index: usize) {
        let sums = self.room.take().expect(UNDER_WAY);
        self.transfer.begin(Bucket { index, sums });
    }

    /// Waits for the bucket in progress, if any, and hands it to `take`.
    pub(super) fn end(&mut self, take: impl FnOnce(&Bucket) -> ModelResult<()>) -> ModelResult<()> {
        let Some((bucket, outcome)) = self.transfer.end() else { return Ok(()) };
        let taken = outcome.map_err(lost).and_then(|()| take(&bucket));
        self.room = Some(bucket.sums);
        taken
    }
}

const UNDER_WAY: &str = "a bucket begins when the one before it has been taken";

/// Reduces the sums of all micro-batches, each bucket once a step.
pub(super) struct SumReducer {
    transfer: AsyncTransfer<Bucket>,
}

impl SumReducer {
    /// Over the ranks of `shard` if sums are held whole, then over `replicas`, which hold the same part.
    /// The groups are used for nothing else.
    pub(super) fn new(
        device: &Device,
        partition: Arc<Partition>,
        shard: Option<ProcessGroup>,
        mut replicas: Option<ProcessGroup>,
        mut wire: Wire,
    ) -> Result<Self> {
        let holds_all = shard.is_some();
        let group = shard.unwrap_or_else(ProcessGroup::alone);
        let rank = if holds_all { group.rank() } else { replicas.as_ref().map_or(0, ProcessGroup::rank) };
        let (name, capacity) = (format!("rank {rank} sum"), partition.buckets().len());
        let reduce = move |by: &Device, group: &mut ProcessGroup, Bucket { index, sums }: &mut Bucket| {
            let mut own = 0..partition.bucket_owned(*index).len();
            if holds_all && partition.is_divided() {
                wire.reduce_scatter(by, group, sums, partition.bucket_counts(*index))?;
                own = partition.bucket_owned(*index);
            } else if holds_all {
                wire.all_reduce(by, group, sums, own.clone())?;
            }
            replicas.as_mut().map_or(Ok(()), |replicas| wire.all_reduce(by, replicas, sums, own))
        };
        Ok(Self { transfer: AsyncTransfer::new(device, &name, group, capacity, true, reduce)? })
    }

    /// Starts reducing a bucket. All ranks begin the same ones in the same order.
    pub(super) fn begin(&mut self, bucket: Bucket) {
        self.transfer.begin(bucket);
    }

    /// Waits for all buckets in progress and hands each to `take`.
    ///
    /// # Errors
    /// The first that a reduction ended with; all buckets are taken nevertheless.
    pub(super) fn end(&mut self, mut take: impl FnMut(Bucket)) -> ModelResult<()> {
        let mut all = Ok(());
        while let Some((bucket, outcome)) = self.transfer.end() {
            take(bucket);
            all = all.and(outcome);
        }
        all.map_err(lost)
    }
}
