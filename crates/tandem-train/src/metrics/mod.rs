//! What a run reports: TRL's metric names, as means over the whole batch, and the file they go to.

mod accumulator;
mod record;
mod writer;

pub use accumulator::{MetricSums, Sides};
pub use record::{Record, Split};
pub use writer::MetricsFile;
