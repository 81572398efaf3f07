//! Metrics of a run: TRL's names, means over the whole batch, and their file.

mod accumulator;
mod advice;
mod policy;
mod record;
mod sample;
mod writer;

pub use accumulator::{MetricSums, Sides};
pub use advice::{Advice, Advisor, Trouble};
pub use record::{MACHINE_METRICS, Record, Split};
pub use sample::Sample;
pub(crate) use writer::is_at;
pub use writer::{MetricsFile, read_records, records};
