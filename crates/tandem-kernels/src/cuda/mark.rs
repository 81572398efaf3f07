//! Places in a stream that other streams wait for.

use super::Cuda;
use super::driver::{Drivers, Event};
use crate::Result;

/// All work of a device up to a moment. On a processor it is done when the moment comes.
#[derive(Default)]
pub struct Mark(Option<Recorded>);

struct Recorded {
    driver: Drivers,
    event: Event,
}

impl Mark {
    /// Of what was put into the stream so far.
    pub(crate) fn of(cuda: &Cuda) -> Result<Self> {
        let driver = cuda.shared.driver.clone();
        let recorded = Recorded { event: driver.new_event()?, driver };
        recorded.driver.record(recorded.event, cuda.stream())?;
        Ok(Self(Some(recorded)))
    }

    /// Has what is put into the stream from here on wait for it.
    pub(crate) fn before(&self, cuda: &Cuda) -> Result<()> {
        match &self.0 {
            Some(recorded) => cuda.driver().wait(cuda.stream(), recorded.event),
            None => Ok(()),
        }
    }

    /// The caller waits for it.
    ///
    /// # Errors
    /// If something before it failed.
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
