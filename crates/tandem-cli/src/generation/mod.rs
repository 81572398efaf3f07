//! Text generation shared by `generate`, `chat` and `serve`.

pub(crate) mod answers;
pub(crate) mod engine;
pub(crate) mod loaded;

pub(crate) use answers::{CompletionText, Wanted};
pub(crate) use loaded::{GenerationLimits, Loaded};

/// A seed that differs from call to call.
pub(crate) fn new_seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |since| since.as_nanos() as u64)
}
