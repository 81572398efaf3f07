//! Ranks that generate in lockstep, each its own completions.

use crate::Result;

/// Lockstep of ranks with sharded weights. Every rank must fetch the same layers at the same time,
/// so before each pass the ranks vote on whether any of them needs it; a rank without tokens takes
/// part without computing.
pub trait Lockstep {
    /// Returns whether any rank has work; `mine` is this rank's vote. All ranks call it at the same
    /// time.
    fn any(&mut self, mine: bool) -> Result<bool>;

    /// Returns whether [`Generator::generate_with`](super::Generator::generate_with) continues; it
    /// asks after each step. If not, running completions are cancelled. Ranks in lockstep ask at
    /// the same time, and must get the same result.
    fn any_rank_active(&mut self) -> Result<bool> {
        Ok(true)
    }
}

/// Lockstep of one rank.
pub struct SingleRank;

impl Lockstep for SingleRank {
    fn any(&mut self, mine: bool) -> Result<bool> {
        Ok(mine)
    }
}
