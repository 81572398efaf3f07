//! Ranks that generate side by side, each its own texts.

use crate::Result;

/// The ranks that walk together, as one of them sees them. Where their weights are gathered from all of them, every rank has to
/// fetch the same layers at the same time: so before each walk they ask each other whether any of them needs it, and who does not
/// goes along with nothing to compute.
pub trait Meet {
    /// Whether any rank, of all that call this at the same time, has something: `mine` is whether this one has.
    ///
    /// # Errors
    /// If a rank is lost.
    fn any(&mut self, mine: bool) -> Result<bool>;

    /// Whether [`Generator::generate_with`](super::Generator::generate_with), which asks this after each step, goes on: if not, what is
    /// under way is broken off. Ranks that walk together ask at the same time, and are to be told the same.
    ///
    /// # Errors
    /// If a rank is lost.
    fn goes_on(&mut self) -> Result<bool> {
        Ok(true)
    }
}

/// A rank that waits for no other.
pub struct Alone;

impl Meet for Alone {
    fn any(&mut self, mine: bool) -> Result<bool> {
        Ok(mine)
    }
}
