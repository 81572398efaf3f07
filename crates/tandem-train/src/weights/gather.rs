//! Exchange of what each rank has updated, where all hold the weights whole.

use tandem_comm::ProcessGroup;
use tandem_kernels::{DType, Device, MemoryKind, Tensor, ops};

use crate::Result;
use crate::parallel::{Partition, collective_buffer};

/// Brings every rank the parts of `masters`, one per layer, that the others have updated. The layers of
/// a bucket travel together, through a buffer; neighbours that are buckets by themselves make one exchange.
pub(super) fn gather_updated(
    device: &Device,
    masters: &mut [Tensor],
    updated: &Partition,
    group: &mut ProcessGroup,
) -> Result<()> {
    let is_joined = |bucket: usize| updated.buckets()[bucket].len() > 1;
    let num_buckets = updated.buckets().len();
    let longest =
        (0..num_buckets).filter(|&bucket| is_joined(bucket)).map(|bucket| updated.bucket_len(bucket));
    let mut room = match longest.max() {
        Some(len) => Some(device.alloc(MemoryKind::Gathered, 1, len, DType::F32)?),
        None => None,
    };
    let mut next = 0;
    while next < num_buckets {
        let first = next;
        match &mut room {
            Some(room) if is_joined(first) => {
                gather_joined(device, masters, updated, first, room, group)?;
                next += 1;
            }
            _ => {
                next += (first..num_buckets).take_while(|&bucket| !is_joined(bucket)).count();
                group.together(|group| {
                    (first..next).filter(|&bucket| updated.bucket_len(bucket) > 0).try_for_each(|bucket| {
                        let master = &mut masters[updated.buckets()[bucket].start];
                        let counts = updated.bucket_counts(bucket);
                        group.all_gather_numbers(collective_buffer::tensor(device, master), counts)?;
                        master.evict_pages();
                        Ok(())
                    })
                })?;
            }
        }
    }
    Ok(())
}

/// Gathers the layers of a bucket through `room`.
fn gather_joined(
    device: &Device,
    masters: &mut [Tensor],
    updated: &Partition,
    bucket: usize,
    room: &mut Tensor,
    group: &mut ProcessGroup,
) -> Result<()> {
    let layers = updated.buckets()[bucket].clone();
    if updated.bucket_len(bucket) == 0 {
        return Ok(());
    }
    for layer in layers.clone() {
        let (place, owned) = (updated.place(layer).start, updated.owned(layer));
        let to = room.view_mut().col_range(place + owned.start..place + owned.end);
        ops::cast(device, masters[layer].view().col_range(owned), to)?;
    }
    let all = 0..updated.bucket_len(bucket);
    let counts = updated.bucket_counts(bucket);
    group.all_gather_numbers(collective_buffer::range(device, room, all), counts)?;
    for layer in layers.clone() {
        ops::cast(device, room.view().col_range(updated.place(layer)), masters[layer].view_mut())?;
    }
    masters[layers].iter().for_each(Tensor::evict_pages);
    Ok(())
}
