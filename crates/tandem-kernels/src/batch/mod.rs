//! The shape of a batch.

pub mod forest;
pub mod runs;
