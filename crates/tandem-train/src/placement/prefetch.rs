//! Layers that are brought from elsewhere before they run.
//!
//! Two are in memory at a time: the one that runs, and the one that the walk has announced, which travels meanwhile. The one that
//! has run stays until another is fetched, so that the head, which is fetched several times in a row, is brought once. What
//! is brought when depends on the walk's calls alone, so it is the same on every rank. Where nothing travels there is one
//! layer at a time.

use tandem_comm::ProcessGroup;
use tandem_model::{LayerId, Result as ModelResult};

use crate::error::lost;
use crate::placement::async_transfer::AsyncTransfer;

/// Who knows what a layer is made of.
pub(crate) trait LayerLoader<C> {
    /// Tells where this rank keeps its part of a layer that it will be read.
    fn announce(&self, layer: LayerId);

    /// A layer as it sets out: room for it.
    fn begin(&self, layer: LayerId) -> ModelResult<C>;

    /// Completes a layer that has arrived.
    fn arrive(&self, layer: LayerId, cargo: &mut C) -> ModelResult<()>;
}

/// The layers that are here, and the one on its way.
pub(crate) struct LayerPrefetcher<C> {
    courier: AsyncTransfer<C>,
    /// Whether a layer is brought before it is asked for.
    runs_ahead: bool,
    /// The layer that was fetched last.
    current: Option<(LayerId, C)>,
    /// One that has come before it was asked for.
    ahead: Option<(LayerId, C)>,
    /// The one that is under way.
    under_way: Option<LayerId>,
    /// What is to be brought as soon as there is room for it.
    announced: Option<LayerId>,
}

impl<C: Send + 'static> LayerPrefetcher<C> {
    pub(crate) fn new(courier: AsyncTransfer<C>, runs_ahead: bool) -> Self {
        Self { courier, runs_ahead, current: None, ahead: None, under_way: None, announced: None }
    }

    /// The group, for calls on this thread; what is under way arrives before.
    pub(crate) fn group(&mut self, bring: &impl LayerLoader<C>) -> ModelResult<&mut ProcessGroup> {
        self.arrive(bring)?;
        Ok(self.courier.group())
    }

    /// Forgets every layer: what they were made of changes, or the memory is for others. What is left then lies where it lay
    /// before, whatever the size of the micro-batch that layers were brought for: else its gaps would be those of the batches
    /// that came before, and the arena would grow beyond its plan.
    pub(crate) fn forget(&mut self) {
        // If a layer is under way and fails, the next one says so too.
        drop(self.courier.end());
        (self.current, self.ahead, self.under_way, self.announced) = (None, None, None, None);
    }

    /// Announces a layer.
    pub(crate) fn prefetch(&mut self, layer: LayerId, bring: &impl LayerLoader<C>) -> ModelResult<()> {
        if !self.runs_ahead {
            return Ok(());
        }
        self.announced = Some(layer);
        bring.announce(layer);
        self.go_ahead(bring)
    }

    /// A layer.
    pub(crate) fn fetch(&mut self, layer: LayerId, bring: &impl LayerLoader<C>) -> ModelResult<&C> {
        if !self.is_here(layer) {
            self.bring(layer, bring)?;
        }
        self.go_ahead(bring)?;
        let Some((_, cargo)) = &self.current else { unreachable!("brought above") };
        Ok(cargo)
    }

    fn is_here(&self, layer: LayerId) -> bool {
        self.current.as_ref().is_some_and(|(current, _)| *current == layer)
    }

    fn begin(&mut self, layer: LayerId, bring: &impl LayerLoader<C>) -> ModelResult<()> {
        let cargo = bring.begin(layer)?;
        self.under_way = Some(layer);
        self.courier.begin(cargo);
        Ok(())
    }

    /// Waits for the layer that is under way, if there is one.
    fn arrive(&mut self, bring: &impl LayerLoader<C>) -> ModelResult<()> {
        let Some((mut cargo, outcome)) = self.courier.end() else { return Ok(()) };
        let layer = self.under_way.take().expect("something was under way");
        outcome.map_err(lost)?;
        bring.arrive(layer, &mut cargo)?;
        self.ahead = Some((layer, cargo));
        Ok(())
    }

    /// Makes this layer the current one.
    fn bring(&mut self, layer: LayerId, bring: &impl LayerLoader<C>) -> ModelResult<()> {
        // The old one is freed before there is a new one.
        self.current = None;
        self.arrive(bring)?;
        if self.ahead.as_ref().is_none_or(|(ahead, _)| *ahead != layer) {
            let other = self.ahead.take();
            self.begin(layer, bring)?;
            self.arrive(bring)?;
            self.current = std::mem::replace(&mut self.ahead, other);
        } else {
            self.current = self.ahead.take();
        }
        Ok(())
    }

    /// Begins to bring what was announced, if there is room for it.
    fn go_ahead(&mut self, bring: &impl LayerLoader<C>) -> ModelResult<()> {
        if self.ahead.is_some() || self.courier.is_under_way() {
            return Ok(());
        }
        match self.announced.take() {
            Some(layer) if !self.is_here(layer) => self.begin(layer, bring),
            _ => Ok(()),
        }
    }
}
