//! The gradient of a table that two stages hold: the first looks tokens up in it, the last scores
//! with it.

use tandem_comm::ElementKind;
use tandem_kernels::exact::FixedPointSum;
use tandem_kernels::{DType, Device, MemoryKind};
use tandem_model::LayerId;

use super::accumulator::Accumulator;
use super::buffer::Buffer;
use crate::Result;
use crate::parallel::PipelineGroup;

/// Numbers that two stages exchange at once.
const PIECE: usize = 1 << 17;

impl Accumulator {
    /// With a head tied to the token table, adds the gradients that first and last stage have of the
    /// layer's gradient, so that both update it alike. All stages call this, after their ranks have
    /// reduced.
    pub(super) fn join_tied(&mut self, stages: Option<&PipelineGroup>) -> Result<()> {
        let stage = self.decoder.stage();
        let Some(stages) = stages.filter(|_| self.decoder.spec().head.tied) else { return Ok(()) };
        let other = match (stage.is_first(), stage.is_last()) {
            (true, false) => stage.count - 1,
            (false, true) => 0,
            _ => return Ok(()),
        };
        let index = self.decoder.index(LayerId::Embedding);
        let held = self.owned_place(index);
        let piece = PIECE.min(held.len());
        if piece == 0 {
            return Ok(());
        }
        let is_dry = matches!(self.device, Device::Meta(_));
        let home = self.home.clone();
        let is_on_gpu = matches!(self.device, Device::Cuda(_));
        match self.bucket_of(index) {
            Buffer::Fixed(sums) => {
                let mut room = FixedPointSum::new(&home, MemoryKind::Gradients, piece)?;
                if is_dry {
                    return stages.dry_add_up(other, ElementKind::I64, held.len(), piece);
                }
                if !is_on_gpu {
                    return stages.add_up(other, &mut sums.as_mut_slice()[held], room.as_mut_slice());
                }
                let mut own = sums.read(&home)?;
                stages.add_up(other, &mut own[held], &mut vec![0; piece])?;
                Ok(sums.write(&home, &own)?)
            }
            Buffer::Floats(sums) => {
                let mut room = home.alloc(MemoryKind::Gradients, 1, piece, DType::F32)?;
                if is_dry {
                    return stages.dry_add_up(other, ElementKind::F32, held.len(), piece);
                }
                let sums = sums.view_mut().col_range(held);
                let add = |sums: &mut [f32]| {
                    home.host_write(room.view_mut(), |room| stages.add_up(other, sums, room))
                };
                home.host_update(sums, add)?.unwrap_or(Ok(None))?.unwrap_or(Ok(()))
            }
        }
    }
}
