//! Gradients, summed over the micro-batches of a step and over ranks.

mod accumulator;
mod reducer;
mod tied;

pub use accumulator::Accumulator;
