//! The gradient of the whole model, summed over the micro-batches of a step and over ranks.
//!
//! In `exact` form a layer's gradient of one micro-batch is computed in f32 in a buffer that all layers share, then added
//! to 64-bit fixed-point sums ([`tandem_kernels::exact`]). Integer addition has no order, so neither the cut into ranks nor
//! the engine that adds their sums changes a bit. In `fast` form gradients are added in f32 where they lie: half the memory
//! and half the bytes between ranks, but the last bits depend on which rank computed what.

use std::ops::Range;
use std::sync::Arc;

use tandem_comm::{Group, Reduction};
use tandem_kernels::exact::{ExactSum, limit};
use tandem_kernels::ops::{Gradient, SQUARES_BLOCK};
use tandem_kernels::{DType, Device, Kind, Tensor, ops};
use tandem_model::{Decoder, FlatWeights, GradientSink, LayerGradients, LayerId, Result as ModelResult};

use super::Partition;
use crate::Result;

/// How gradients are added up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SumForm {
    /// In fixed point: the same bits on any number of ranks.
    #[default]
    Exact,
    /// In f32.
    Fast,
}

impl SumForm {
    /// Every choice with its name in the config.
    pub const NAMES: [(&'static str, Self); 2] = [("exact", Self::Exact), ("fast", Self::Fast)];
}

/// Gradient sums, laid out like the weights.
pub struct Accumulator {
    device: Device,
    decoder: Arc<Decoder>,
    partition: Arc<Partition>,
    sums: Sums,
    /// The layer whose gradient is forming in the shared buffer.
    open: Option<LayerId>,
    /// By layer: whether its sums hold something of this step.
    begun: Vec<bool>,
    /// The largest magnitude that one micro-batch's gradient may have (exact form).
    limit: f32,
    in_range: bool,
    /// Sums of squares of every block of every layer.
    squares: Vec<f64>,
}

enum Sums {
    Exact {
        /// A layer's gradient of one micro-batch `[1, longest layer]`.
        layer: Tensor,
        sums: Vec<ExactSum>,
    },
    Fast(FlatWeights),
}

impl Accumulator {
    /// Memory for the sums. Once they are reduced, this rank holds those of its part.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn new(
        device: &Device,
        decoder: Arc<Decoder>,
        partition: Arc<Partition>,
        form: SumForm,
    ) -> Result<Self> {
        let lengths = (0..partition.num_layers()).map(|layer| partition.len(layer));
        let sums = match form {
            SumForm::Fast => Sums::Fast(FlatWeights::zeros(&decoder, device, Kind::Gradients)?),
            SumForm::Exact => Sums::Exact {
                layer: device.alloc(Kind::Gradients, 1, lengths.clone().max().unwrap_or(0), DType::F32)?,
                sums: lengths
                    .clone()
                    .map(|len| ExactSum::new(device, Kind::Gradients, len))
                    .collect::<Result<_, _>>()?,
            },
        };
        let begun = vec![false; partition.num_layers()];
        let squares = vec![0.0; lengths.map(|len| len.div_ceil(SQUARES_BLOCK)).sum()];
        let device = device.clone();
        Ok(Self { device, decoder, partition, sums, open: None, begun, limit: 0.0, in_range: true, squares })
    }

    /// Forgets the last step. `num_micro_batches` counts those of all ranks.
    ///
    /// # Errors
    /// None on the CPU.
    pub fn begin(&mut self, num_micro_batches: usize) -> Result<()> {
        self.begun.fill(false);
        self.open = None;
        // A tied table is emitted twice.
        self.limit = limit(2 * num_micro_batches);
        self.in_range = true;
        if let Sums::Fast(sums) = &mut self.sums {
            for layer in &mut sums.layers {
                ops::fill_zero(&self.device, layer.view_mut())?;
            }
        }
        Ok(())
    }

    /// Whether every gradient so far was finite and in the range of the sums.
    pub fn in_range(&self) -> bool {
        self.in_range
    }

    /// Adds up the sums of all ranks: afterwards every rank holds those of its part.
    ///
    /// # Errors
    /// If a rank is lost.
    pub fn reduce(&mut self, group: &mut Group) -> Result<()> {
        if matches!(self.device, Device::Meta(_)) {
            return Ok(());
        }
        for index in 0..self.begun.len() {
            match &mut self.sums {
                Sums::Exact { sums, .. } => {
                    let sums = sums[index].as_mut_slice();
                    if !self.begun[index] {
                        sums.fill(0);
                    }
                    reduce(group, &self.partition, index, sums)?;
                }
                Sums::Fast(sums) => {
                    let sums = sums.layers[index].view_mut().into_slice::<f32>();
                    reduce(group, &self.partition, index, sums)?;
                }
            }
        }
        Ok(())
    }

    /// The gradient of this rank's part of a layer, by the layer's place in walk order.
    pub fn owned(&self, index: usize) -> Gradient<'_> {
        let whole: Gradient = match &self.sums {
            Sums::Exact { sums, .. } => sums[index].view().into(),
            Sums::Fast(sums) => sums.layers[index].view().into(),
        };
        whole.range(self.partition.owned(index))
    }

    /// The gradient's global L2 norm; not finite if an element is not. The blocks are added in one order on every rank.
    ///
    /// # Errors
    /// If a rank is lost.
    pub fn norm(&mut self, group: &mut Group) -> Result<f64> {
        let mut squares = std::mem::take(&mut self.squares);
        squares.fill(0.0);
        let mut rest = &mut squares[..];
        for index in 0..self.begun.len() {
            let (blocks, after) = rest.split_at_mut(self.partition.len(index).div_ceil(SQUARES_BLOCK));
            let Range { start, end } = self.partition.owned(index);
            let owned = start.div_ceil(SQUARES_BLOCK)..end.div_ceil(SQUARES_BLOCK);
            ops::block_squares(&self.device, self.owned(index), &mut blocks[owned])?;
            rest = after;
        }
        if self.partition.is_divided() {
            group.all_reduce(&mut squares, Reduction::Sum)?;
        }
        let sum: f64 = squares.iter().sum();
        self.squares = squares;
        Ok(sum.sqrt())
    }
}

/// Every rank gets the sum of its part; of the whole, where nothing is divided.
fn reduce<T: tandem_comm::Element>(
    group: &mut Group,
    partition: &Partition,
    layer: usize,
    sums: &mut [T],
) -> Result<()> {
    if group.size() == 1 {
        return Ok(());
    }
    if partition.is_divided() {
        group.reduce_scatter(sums, partition.counts(layer), Reduction::Sum)?;
    } else {
        group.all_reduce(sums, Reduction::Sum)?;
    }
    Ok(())
}

impl GradientSink for Accumulator {
    fn open(&mut self, layer: LayerId) -> ModelResult<LayerGradients<'_>> {
        let layout = self.decoder.layout(layer);
        let flat = match &mut self.sums {
            Sums::Fast(sums) => sums.layers[self.decoder.index(layer)].view_mut(),
            Sums::Exact { layer: buffer, .. } => {
                // A layer may be opened again before it is emitted, to be added to.
                if self.open != Some(layer) {
                    ops::fill_zero(&self.device, buffer.view_mut().col_range(0..layout.len))?;
                }
                buffer.view_mut().col_range(0..layout.len)
            }
        };
        self.open = Some(layer);
        Ok(LayerGradients::new(layout, flat))
    }

    fn emit(&mut self, layer: LayerId) -> ModelResult<()> {
        let index = self.decoder.index(layer);
        if let Sums::Exact { layer: buffer, sums } = &mut self.sums {
            let terms = buffer.view().col_range(0..sums[index].len());
            self.in_range &=
                ops::exact_sum(&self.device, terms, &mut sums[index], self.begun[index], self.limit)?;
        }
        self.begun[index] = true;
        self.open = None;
        Ok(())
    }
}
