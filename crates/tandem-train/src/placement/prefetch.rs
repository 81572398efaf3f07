//! Layers that are brought from elsewhere before they run.
//!
//! Two layers are in memory at a time: the running one and the prefetched next one. A layer stays
//! until another is fetched, so the head, fetched several times in a row, is loaded once. Loads
//! depend only on the executor's calls and are therefore the same on every rank. Without transfers
//! there is one layer at a time.

use std::sync::MutexGuard;

use tandem_comm::ProcessGroup;
use tandem_model::{LayerId, Result as ModelResult};

use crate::error::lost;
use crate::placement::async_transfer::AsyncTransfer;

/// Loader of a layer's parts.
pub(crate) trait LayerLoader<C> {
    /// Tells where this rank keeps its part of a layer that it will be read.
    fn prefetch_pages(&self, layer: LayerId);

    /// A layer as it sets out: room for it.
    fn begin(&self, layer: LayerId) -> ModelResult<C>;

    /// Completes a layer that has arrived.
    fn on_loaded(&self, layer: LayerId, payload: &mut C) -> ModelResult<()>;
}

/// The layers that are here, and the one on its way.
pub(crate) struct LayerPrefetcher<C> {
    transfer: AsyncTransfer<C>,
    /// Whether layers are prefetched.
    runs_ahead: bool,
    /// The layer that was fetched last.
    current: Option<(LayerId, C)>,
    /// One that has come before it was asked for.
    ahead: Option<(LayerId, C)>,
    /// Layer in transfer.
    under_way: Option<LayerId>,
    /// Layer to load as soon as a slot is free.
    announced: Option<LayerId>,
}

impl<C: Send + 'static> LayerPrefetcher<C> {
    pub(crate) fn new(transfer: AsyncTransfer<C>, runs_ahead: bool) -> Self {
        Self { transfer, runs_ahead, current: None, ahead: None, under_way: None, announced: None }
    }

    /// The group, for calls on this thread; waits for a transfer in progress.
    pub(crate) fn group(&mut self, bring: &impl LayerLoader<C>) -> ModelResult<MutexGuard<'_, ProcessGroup>> {
        self.on_loaded(bring)?;
        Ok(self.transfer.group())
    }

    /// Drops every layer, since its contents change or its memory is needed. The remaining layout
    /// does not depend on the micro-batch size; otherwise gaps of earlier batches would grow the
    /// arena beyond its plan.
    pub(crate) fn forget(&mut self) {
        // A failing transfer is reported again by the next one.
        drop(self.transfer.end());
        (self.current, self.ahead, self.under_way, self.announced) = (None, None, None, None);
    }

    pub(crate) fn prefetch(&mut self, layer: LayerId, bring: &impl LayerLoader<C>) -> ModelResult<()> {
        if !self.runs_ahead {
            return Ok(());
        }
        self.announced = Some(layer);
        bring.prefetch_pages(layer);
        self.go_ahead(bring)
    }

    pub(crate) fn fetch(&mut self, layer: LayerId, bring: &impl LayerLoader<C>) -> ModelResult<&mut C> {
        if !self.is_here(layer) {
            self.bring(layer, bring)?;
        }
        self.go_ahead(bring)?;
        let Some((_, payload)) = &mut self.current else { unreachable!("brought above") };
        Ok(payload)
    }

    fn is_here(&self, layer: LayerId) -> bool {
        self.current.as_ref().is_some_and(|(current, _)| *current == layer)
    }

    fn begin(&mut self, layer: LayerId, bring: &impl LayerLoader<C>) -> ModelResult<()> {
        let payload = bring.begin(layer)?;
        self.under_way = Some(layer);
        self.transfer.begin(payload);
        Ok(())
    }

    /// Waits for the layer in transfer, if any.
    fn on_loaded(&mut self, bring: &impl LayerLoader<C>) -> ModelResult<()> {
        let Some((mut payload, outcome)) = self.transfer.end() else { return Ok(()) };
        let layer = self.under_way.take().expect("something was under way");
        outcome.map_err(lost)?;
        bring.on_loaded(layer, &mut payload)?;
        self.ahead = Some((layer, payload));
        Ok(())
    }

    /// Makes this layer the current one.
    fn bring(&mut self, layer: LayerId, bring: &impl LayerLoader<C>) -> ModelResult<()> {
        // The old one is freed before there is a new one.
        self.current = None;
        self.on_loaded(bring)?;
        if self.ahead.as_ref().is_none_or(|(ahead, _)| *ahead != layer) {
            let other = self.ahead.take();
            self.begin(layer, bring)?;
            self.on_loaded(bring)?;
            self.current = std::mem::replace(&mut self.ahead, other);
        } else {
            self.current = self.ahead.take();
        }
        Ok(())
    }

    /// Starts loading the announced layer, if a slot is free.
    fn go_ahead(&mut self, bring: &impl LayerLoader<C>) -> ModelResult<()> {
        if self.ahead.is_some() || self.transfer.is_under_way() {
            return Ok(());
        }
        match self.announced.take() {
            Some(layer) if !self.is_here(layer) => self.begin(layer, bring),
            _ => Ok(()),
        }
    }
}
