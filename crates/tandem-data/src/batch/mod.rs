//! Batches: the order of rows, micro-batches, and forests of rows.

pub mod forest;
mod mersenne;
pub mod order;
