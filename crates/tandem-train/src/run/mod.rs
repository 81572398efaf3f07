//! A run: its folder, its trainer, and the ranks that carry it out.

mod agreement;
mod attention;
pub mod evaluation;
mod matmuls;
mod model_card;
mod provenance;
mod resume;
pub mod run_dir;
pub mod spawn;
mod trainer;
pub mod verify;

pub use trainer::{Options, Outcome, Trainer};
