//! The training side of Tandem: from a config file to a trained model folder.
//!
//! ```no_run
//! use std::path::Path;
//! use std::sync::atomic::AtomicBool;
//! use tandem_train::{Config, events::Silent, run::{run_dir::RunDirPolicy, spawn}};
//!
//! let config = Config::load(Path::new("run.toml"), &["train.steps=100"]).map_err(Box::new)?;
//! let outcome = spawn::train(&config, RunDirPolicy::Fresh, &mut Silent, &AtomicBool::new(false))?;
//! # Ok::<(), tandem_train::TrainError>(())
//! ```
//!
//! | for | see |
//! |---|---|
//! | a configuration | [`Config`], [`config`] |
//! | a run from begin to end, on all ranks | [`run::spawn::train`], [`Options`], [`Outcome`] |
//! | a training loop of your own | [`Trainer`]: [`step`](Trainer::step), [`evaluate`](Trainer::evaluate), [`save`](Trainer::save), [`finish`](Trainer::finish) |
//! | what happens meanwhile | [`Observer`], [`Event`], [`metrics::Record`] |
//! | a loss of your own | [`objective::register`], [`objective::PairLoss`] |
//! | a reward of your own | [`judges::register`] |
//! | a checkpoint as a model | [`checkpoint::export`] |
//! | a run computed again, and compared | [`run::verify::RecordedRun`] |
//! | held-out metrics of a model | [`run::evaluation::evaluate`] |
//! | memory and time beforehand | [`Plan`], [`plan`] |
//! | errors and exit codes | [`TrainError`], [`Fault`] |
//!
//! Modules that this page does not name are public for the command and for tests alone. They are hidden
//! here and change without notice.
//!
//! # Rooms
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
//! 6. `recipe`: SFT, DPO, reward models and Online DPO: rows, micro-batches, loss and metrics.
//! 7. `parallel`: process groups, partitions, pipeline stages. `placement`: devices, memories
//!    and offload.
//! 8. `weights`: replicated, sharded and frozen weights, and the initial ones.
//! 9. `gradients`: sums over micro-batches and ranks. [`judges`]: the panel of judges, and reward
//!    models.
//! 10. `optimizer`: update, learning rates and clipping. `inputs`: model folder, tokenizer and
//!     tokens.
//! 11. `reference`: the reference policy.
//! 12. [`checkpoint`]: atomic, checksummed training state.
//! 13. `step`: the one step of all recipes.
//! 14. `online`: responses of the policy while it trains, their scores, and the pairs made of
//!     them. `samples`: answers to a few prompts, for people to read.
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
#[doc(hidden)]
pub mod inputs;
pub mod judges;
pub mod metrics;
pub mod objective;
#[doc(hidden)]
pub mod online;
mod optimizer;
#[doc(hidden)]
pub mod parallel;
#[doc(hidden)]
pub mod placement;
pub mod plan;
mod pool;
mod profile;
#[doc(hidden)]
pub mod recipe;
mod reference;
pub mod run;
mod samples;
#[doc(hidden)]
pub mod size;
mod step;
mod trackers;
#[doc(hidden)]
pub mod weights;

pub use config::Config;
pub use disk::replace_file;
pub use error::{Fault, Result, TrainError, chain};
pub use events::{Event, Observer};
pub use judges::reward_model::{Answers, RewardModel};
pub use plan::Plan;
pub use run::{Options, Outcome, Trainer};
