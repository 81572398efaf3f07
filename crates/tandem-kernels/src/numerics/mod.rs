//! Number formats: element types, packed weights, optimiser states, fixed-point sums and random
//! bits.

pub mod dtype;
pub mod e4m3;
pub mod exact;
pub mod format;
pub mod random;
pub mod squares;
pub mod states;
