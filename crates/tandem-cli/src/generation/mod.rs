//! A model that answers: what `generate`, `chat` and `serve` share.

pub mod engine;
pub mod loaded;
pub mod text;

pub use loaded::{Loaded, Room, Weights};
pub use text::Text;
