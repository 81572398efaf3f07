//! A model that answers: what `generate`, `chat` and `serve` share.

pub mod answers;
pub mod engine;
pub mod loaded;

pub use answers::{Answered, Wanted};
pub use loaded::{Loaded, Room};

/// Something else each time.
pub fn new_seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |since| since.as_nanos() as u64)
}
