//! Changes that make a run fit, and the fastest plans.

pub mod advice;
pub mod change;
pub mod search;
