//! The training side of Tandem: from a config file to a trained model folder.
//!
//! * [`config`]: the typed TOML config.
//! * [`objective`]: losses as pure functions on per-sequence log-probabilities.
//! * [`schedule`]: learning rates and clipping.
//! * [`metrics`]: TRL's metric names over whole batches, and `metrics.jsonl`.
//! * [`checkpoint`]: atomic, checksummed training state.
//! * [`run_dir`]: the folder a run writes, its lock, and what may be deleted from it.

pub mod checkpoint;
pub mod config;
mod disk;
pub mod error;
pub mod metrics;
pub mod objective;
pub mod run_dir;
pub mod schedule;

pub use config::Config;
pub use error::{Fault, Result, TrainError};
