//! Reduces a layer's gradient over ranks while backward computes the next layer's.

use std::sync::Arc;

use tandem_comm::{Call, ElementKind, Group, Operation, Reduction};
use tandem_kernels::exact::ExactSum;
use tandem_kernels::{Device, Tensor};
use tandem_model::Result as ModelResult;

use super::Partition;
use super::courier::{Courier, Outcome};
use super::sharded::lost;
use crate::Result;

/// A group that reduces one layer at a time, and the room for it.
pub(super) struct Reducer {
    courier: Courier<Terms>,
    /// `None` while a layer is under way.
    room: Option<Numbers>,
}

/// What a layer's gradient came to in one micro-batch: of this rank before the reduction, of all ranks after it, and then for
/// this rank's part only.
pub(super) struct Terms {
    /// The layer's place in walk order.
    pub(super) index: usize,
    /// As long as the longest layer.
    pub(super) numbers: Numbers,
}

/// Gradients as they travel.
pub(super) enum Numbers {
    Fixed(ExactSum),
    Floats(Tensor),
}

impl Reducer {
    /// # Errors
    /// If the system refuses a thread.
    pub(super) fn new(
        device: &Device,
        partition: Arc<Partition>,
        group: Group,
        room: Numbers,
    ) -> Result<Self> {
        let (name, is_dry) = (format!("rank {} reduce", group.rank()), device.is_meta());
        let courier = Courier::new(device, &name, group, move |group, terms: &mut Terms| {
            terms.reduce(group, partition.counts(terms.index), is_dry)
        })?;
        Ok(Self { courier, room: Some(room) })
    }

    /// Room for the terms of the next layer.
    ///
    /// # Panics
    /// Unless [`Reducer::end`] was called since the last layer began.
    pub(super) fn room(&mut self) -> &mut Numbers {
        self.room.as_mut().expect(UNDER_WAY)
    }

    /// Begins to reduce what has been put into the room, layer `index`.
    ///
    /// # Panics
    /// As [`Reducer::room`].
    pub(super) fn begin(&mut self, index: usize) {
        let numbers = self.room.take().expect(UNDER_WAY);
        self.courier.begin(Terms { index, numbers });
    }

    /// Waits for the layer that is under way, if there is one, and hands it to `take`.
    ///
    /// # Errors
    /// If a rank is lost, or as `take` does.
    pub(super) fn end(&mut self, take: impl FnOnce(&Terms) -> ModelResult<()>) -> ModelResult<()> {
        let Some((terms, outcome)) = self.courier.end() else { return Ok(()) };
        let taken = outcome.map_err(lost).and_then(|()| take(&terms));
        self.room = Some(terms.numbers);
        taken
    }
}

const UNDER_WAY: &str = "a layer begins when the one before it has been taken";

impl Terms {
    fn reduce(&mut self, group: &mut Group, counts: &[usize], is_dry: bool) -> Outcome {
        let (sum, len) = (Reduction::Sum, counts.iter().sum());
        let dry = |kind| Call::parted(Operation::ReduceScatter(sum), kind, counts);
        match &mut self.numbers {
            Numbers::Fixed(_) if is_dry => group.dry(dry(ElementKind::I64)),
            Numbers::Floats(_) if is_dry => group.dry(dry(ElementKind::F32)),
            Numbers::Fixed(terms) => group.reduce_scatter(&mut terms.as_mut_slice()[..len], counts, sum),
            Numbers::Floats(terms) => {
                let terms = terms.view_mut().col_range(0..len).into_slice::<f32>();
                group.reduce_scatter(terms, counts, sum)
            }
        }
    }
}
