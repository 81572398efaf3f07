//! Exchange of what each rank has updated, where all hold the weights whole.

use std::ops::Range;

use tandem_comm::ProcessGroup;
use tandem_kernels::{DType, Device, MemoryKind, Tensor, ops};

use crate::Result;
use crate::parallel::{Partition, collective_buffer};

/// Brings every rank the parts of `masters`, one per layer, that the others have updated. The layers of
/// a bucket travel together, through a buffer.
pub(super) fn gather_updated(
    device: &Device,
    masters: &mut [Tensor],
    updated: &Partition,
    group: &mut ProcessGroup,
) -> Result<()> {
    let joined = |layers: &Range<usize>| layers.len() > 1;
    let buckets = updated.buckets().iter().enumerate();
    let longest =
        buckets.clone().filter(|(_, layers)| joined(layers)).map(|(bucket, _)| updated.bucket_len(bucket));
    let mut room = match longest.max() {
        Some(len) => Some(device.alloc(MemoryKind::Gathered, 1, len, DType::F32)?),
        None => None,
    };
    for (bucket, layers) in buckets {
        let counts = updated.bucket_counts(bucket);
        match &mut room {
            _ if updated.bucket_len(bucket) == 0 => {}
            Some(room) if joined(layers) => {
                for layer in layers.clone() {
                    let (place, owned) = (updated.place(layer).start, updated.owned(layer));
                    let to = room.view_mut().col_range(place + owned.start..place + owned.end);
                    ops::cast(device, masters[layer].view().col_range(owned), to)?;
                }
                let all = 0..updated.bucket_len(bucket);
                group.all_gather_numbers(collective_buffer::range(device, room, all), counts)?;
                for layer in layers.clone() {
                    ops::cast(
                        device,
                        room.view().col_range(updated.place(layer)),
                        masters[layer].view_mut(),
                    )?;
                }
            }
            _ => group
                .all_gather_numbers(collective_buffer::tensor(device, &mut masters[layers.start]), counts)?,
        }
        masters[layers.clone()].iter().for_each(Tensor::evict_pages);
    }
    Ok(())
}
