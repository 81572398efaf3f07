//! Metrics of a run: TRL's names, means over the whole batch, and their file.

mod accumulator;
mod record;
mod writer;

pub use accumulator::{MetricSums, Sides};
pub use record::{Record, Split};
pub use writer::MetricsFile;
