//! Number formats: element types, packed weights, optimiser states and fixed-point sums.

pub mod dtype;
pub mod exact;
pub mod format;
pub mod states;
