//! Text generation shared by `generate`, `chat` and `serve`.

pub mod answers;
pub mod engine;
pub mod loaded;

pub use answers::{CompletionText, Wanted};
pub use loaded::{GenerationLimits, Loaded};

/// A seed that differs from call to call.
pub fn new_seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |since| since.as_nanos() as u64)
}
