//! The training side of Tandem: from a config file to a trained model folder.
//!
//! The rooms of this crate stand on floors: a room imports rooms of lower floors only, which a test
//! asserts. From bottom to top:
//!
//! 1. [`objective`]: the losses. `draw`: random numbers as functions of their purpose. `size`:
//!    numbers of bytes in words.
//! 2. [`config`]: the typed TOML config.
//! 3. [`error`]: every error, and its exit code.
//! 4. [`metrics`]: TRL's metric names over whole batches, and `metrics.jsonl`. `disk`: files that
//!    survive a crash.
//! 5. [`events`]: what a run tells its observer. `trackers`: programs and services that receive its
//!    records.
//! 6. [`recipe`]: SFT, DPO, reward models and Online DPO: rows, micro-batches, loss and metrics.
//! 7. [`parallel`]: process groups, partitions, pipeline stages. [`placement`]: devices, memories
//!    and offload.
//! 8. [`weights`]: replicated, sharded and frozen weights, and the initial ones.
//! 9. `gradients`: sums over micro-batches and ranks. [`judges`]: the panel of judges, and reward
//!    models.
//! 10. `optimizer`: update, learning rates and clipping. [`inputs`]: model folder, tokenizer and
//!     tokens.
//! 11. `reference`: the reference policy.
//! 12. [`checkpoint`]: atomic, checksummed training state.
//! 13. `step`: the one step of all recipes.
//! 14. [`online`]: responses of the policy while it trains, their scores, and the pairs made of
//!     them.
//! 15. [`plan`]: memory and time of a run, from a dry run of the code above.
//! 16. `profile`: where the time of some steps went.
//! 17. [`run`]: the run folder, the trainer, and the ranks.

#![warn(unreachable_pub)]

pub mod checkpoint;
pub mod config;
mod disk;
mod draw;
pub mod error;
pub mod events;
#[cfg(test)]
mod floors;
mod gradients;
pub mod inputs;
pub mod judges;
pub mod metrics;
pub mod objective;
pub mod online;
mod optimizer;
pub mod parallel;
pub mod placement;
pub mod plan;
mod profile;
pub mod recipe;
mod reference;
pub mod run;
pub mod size;
mod step;
mod trackers;
pub mod weights;

pub use config::Config;
pub use error::{Fault, Result, TrainError, chain};
pub use events::{Event, Observer};
pub use judges::reward_model::{Answers, RewardModel};
pub use plan::Plan;
pub use run::{Options, Outcome, Trainer};
