//! Offloaded tensors of a rank and their way to the device.
//!
//! A device copies from memory that it can read. A GPU reads no file: the transfer thread copies
//! parts into pinned slots that the GPU reads, and fills the next slot meanwhile.

use std::ops::Range;

use tandem_kernels::bytes::{Bytes, BytesMut, BytesView};
use tandem_kernels::cuda::StreamEvent;
use tandem_kernels::{DType, Device, MemoryKind, Result as KernelResult, View, ViewMut, ops};

use crate::Result;
use crate::placement::MemoryPlacement;

/// Bytes of a slot: large enough to saturate a bus, small beside a layer.
const SLOT: usize = 4 << 20;

/// The memory that a store keeps its layers in, which is not the device's.
pub struct OffloadedStorage {
    home: Device,
    staging: Option<Staging>,
}

/// Pinned memory between a file and a GPU.
struct Staging {
    /// Reads the file, on the calling thread.
    reader: Device,
    slots: [Slot; 2],
    /// Bytes of each.
    len: usize,
    /// The one that is filled next.
    turn: usize,
}

struct Slot {
    room: Bytes,
    /// Event: the GPU has read the slot.
    read: StreamEvent,
}

impl Drop for Slot {
    fn drop(&mut self) {
        // The memory is reused next. An error surfaces where the layer is awaited.
        let _ = self.read.finish();
    }
}

impl OffloadedStorage {
    /// Memory that the device reads.
    pub fn new(home: Device) -> Self {
        Self { home, staging: None }
    }

    /// Storage of offloaded masters and frozen weights, with pinned slots if the device cannot read
    /// it.
    pub fn from_placement(placement: &MemoryPlacement) -> Result<Option<Self>> {
        if !placement.is_offloaded() {
            return Ok(None);
        }
        let staging =
            placement.staging_pair().map(|(file, host)| Staging::new(file, host, SLOT)).transpose()?;
        Ok(Some(Self { home: placement.state().clone(), staging }))
    }

    /// Device that holds and updates the layers.
    pub fn home(&self) -> &Device {
        &self.home
    }
}

impl Staging {
    fn new(file: &Device, host: &Device, len: usize) -> KernelResult<Self> {
        let slot =
            || Ok(Slot { room: Bytes::new(host, MemoryKind::Gathered, len)?, read: StreamEvent::default() });
        Ok(Self { reader: file.on_one_thread()?, slots: [slot()?, slot()?], len, turn: 0 })
    }

    /// Fills a slot with each part by `put`, then starts its copy to the device.
    fn in_parts(
        &mut self,
        by: &Device,
        bytes: usize,
        mut put: impl FnMut(&Device, Range<usize>, &mut Bytes) -> KernelResult<()>,
    ) -> KernelResult<()> {
        for start in (0..bytes).step_by(self.len) {
            let slot = &mut self.slots[self.turn];
            slot.read.finish()?;
            put(&self.reader, start..bytes.min(start + self.len), &mut slot.room)?;
            slot.read = by.mark()?;
            self.turn = 1 - self.turn;
        }
        Ok(())
    }
}

/// Brings f32 `[1,N]` to `[1,N]` of the device's, converted to its type: from `away`, or from the
/// device itself.
pub(crate) fn bring(
    away: &mut Option<OffloadedStorage>,
    by: &Device,
    from: View,
    mut to: ViewMut,
) -> KernelResult<()> {
    let Some(OffloadedStorage { staging: Some(staging), .. }) = away else { return ops::cast(by, from, to) };
    staging.in_parts(by, from.num_bytes(), |reader, bytes, room| {
        let columns = bytes.start / size_of::<f32>()..bytes.end / size_of::<f32>();
        let (part, len) = (0..bytes.len(), columns.len());
        let filled = room.view_mut().into_tensor(part.clone(), 1, len, DType::F32);
        ops::cast(reader, from.col_range(columns.clone()), filled)?;
        // Rounded by the device, like tensors that it reads itself.
        ops::cast(by, room.view().as_tensor(part, 1, len, DType::F32), to.reborrow().col_range(columns))
    })
}

/// The same for bytes.
pub(crate) fn bring_bytes(
    away: &mut Option<OffloadedStorage>,
    by: &Device,
    from: BytesView,
    mut to: BytesMut,
) -> KernelResult<()> {
    let Some(OffloadedStorage { staging: Some(staging), .. }) = away else { return by.copy_bytes(from, to) };
    staging.in_parts(by, from.len(), |reader, bytes, room| {
        let part = 0..bytes.len();
        reader.copy_bytes(from.range(bytes.clone()), room.range_mut(part.clone()))?;
        by.copy_bytes(room.range(part), to.reborrow().range(bytes))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Several parts and a remainder, so that slots are refilled while a copy may be pending: the
    /// emulated GPU reads as late as possible.
    const LEN: usize = 5000;
    const SLOT: usize = 4096;

    fn from_a_file(file: &Device, host: &Device) -> Option<OffloadedStorage> {
        Some(OffloadedStorage { home: file.clone(), staging: Some(Staging::new(file, host, SLOT).unwrap()) })
    }

    fn file() -> Device {
        let file = tempfile::tempfile().unwrap();
        Device::cpu(1, 1).unwrap().in_file(&file, 1 << 20).unwrap()
    }

    #[test]
    fn numbers_come_from_a_file_to_a_gpu_in_parts() {
        let (file, gpu) = (file(), tandem_cuda_emulator::device(1 << 20).unwrap());
        let mut away = from_a_file(&file, &gpu.with_memory(1 << 20).unwrap());
        let mut masters = file.alloc(MemoryKind::Master, 1, LEN, DType::F32).unwrap();
        let numbers: Vec<f32> = (0..LEN).map(|i| i as f32 / 7.0).collect();
        masters.view_mut().into_slice::<f32>().copy_from_slice(&numbers);
        for dtype in [DType::F32, DType::Bf16] {
            // Twice at once, as two pieces of a layer are.
            let mut layers = [0; 2].map(|_| gpu.alloc(MemoryKind::Gathered, 1, LEN, dtype).unwrap());
            for layer in &mut layers {
                bring(&mut away, &gpu, masters.view(), layer.view_mut()).unwrap();
            }
            for layer in &layers {
                let found = ops::read_f32(&gpu, layer.view()).unwrap();
                let rounded = |x: f32| match dtype {
                    DType::F32 => x,
                    DType::Bf16 => tandem_kernels::bf16::from_f32(x).to_f32(),
                };
                assert!(found.iter().zip(&numbers).all(|(found, &x)| *found == rounded(x)), "{dtype}");
            }
        }
    }

    #[test]
    fn bytes_come_from_a_file_to_a_gpu_in_parts() {
        let (file, gpu) = (file(), tandem_cuda_emulator::device(1 << 20).unwrap());
        let host = gpu.with_memory(1 << 20).unwrap();
        let mut away = from_a_file(&file, &host);
        let mut kept = Bytes::new(&file, MemoryKind::Weights, 4 * LEN).unwrap();
        let numbers: Vec<u8> = (0..4 * LEN).map(|i| (i % 251) as u8).collect();
        kept.as_mut_slice().copy_from_slice(&numbers);
        let mut layer = Bytes::new(&gpu, MemoryKind::Gathered, 4 * LEN).unwrap();
        bring_bytes(&mut away, &gpu, kept.view(), layer.view_mut()).unwrap();
        // The slots are reused before a copy was awaited.
        drop(away);
        let mut other = host.alloc(MemoryKind::Scratch, 1, 2 * SLOT / size_of::<f32>(), DType::F32).unwrap();
        other.view_mut().into_slice::<f32>().fill(f32::NAN);
        assert!(layer.read(&gpu).unwrap() == numbers);
    }
}
