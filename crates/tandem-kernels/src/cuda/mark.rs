//! Events of a stream that other streams wait for.

use super::Cuda;
use super::driver::{Drivers, Event};
use crate::Result;

/// All work of a device up to a moment. On a CPU that work is already done.
#[derive(Default)]
pub struct StreamEvent(Option<Recorded>);

struct Recorded {
    driver: Drivers,
    event: Event,
}

impl StreamEvent {
    /// Marks all work in the stream so far.
    pub(crate) fn record(cuda: &Cuda) -> Result<Self> {
        let driver = cuda.shared.stream.driver.clone();
        let recorded = Recorded { event: driver.new_event()?, driver };
        recorded.driver.record(recorded.event, cuda.stream()?)?;
        Ok(Self(Some(recorded)))
    }

    /// Makes later work in the stream wait for the mark.
    pub(crate) fn before(&self, cuda: &Cuda) -> Result<()> {
        match &self.0 {
            Some(recorded) => cuda.driver().wait(cuda.stream()?, recorded.event),
            None => Ok(()),
        }
    }

    /// Waits for the mark on the calling thread.
    pub fn finish(&self) -> Result<()> {
        match &self.0 {
            Some(recorded) => recorded.driver.finish(recorded.event),
            None => Ok(()),
        }
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        self.driver.end_event(self.event);
    }
}
