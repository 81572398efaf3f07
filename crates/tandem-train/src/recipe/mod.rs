//! Micro-batches and what a recipe makes of them.

mod log_probs;
mod micro_batch;

pub(crate) use log_probs::Compared;
pub(crate) use micro_batch::deal;
pub use micro_batch::{MicroBatch, MicroBatcher, Ranked, Rows, Share};
