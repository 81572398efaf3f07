//! The shape of a batch.

pub mod forest;
