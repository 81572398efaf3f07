//! The training side of Tandem: from a config file to a trained model folder.
//!
//! * [`config`]: the typed TOML config. [`prepare`] opens what it names: model, tokenizer, tokens.
//! * [`plan`]: what will be in memory when, from a [`dry_run`] of the code below.
//! * [`step`]: the one step of all recipes. [`store`] holds weights and gradients, [`mod@reference`] what the policy is
//!   compared with, [`objective`] the losses, [`optimizer`] the update, [`micro_batch`] cuts batches into forests.
//! * [`ranks`]: one trainer on each rank; [`mesh`]: which ranks hold the same, and which hold the slices of one model, or
//!   its [`stages`]; [`pipeline`]: in which order a stage computes its micro-batches.
//! * [`trainer`]: the run around the step; [`evaluation`] between steps; [`events`] tell whoever watches.
//! * [`gpus`]: which GPUs there are, and which rank computes on which. [`homes`]: the memories of a rank, and what is offloaded to which.
//! * [`online`]: answers that the policy gives while it trains, their scores, and the pairs made of them.
//! * [`judges`]: the panel that a config describes. [`reward_model`]: texts scored by a model that was trained for it, and
//!   [`reward_judge`], which judges with one.
//! * [`start`]: the weights that a run starts from.
//! * [`schedule`]: learning rates and clipping.
//! * [`profile`]: where the time of some steps went, and how fast each operation was.
//! * [`numbers`]: device memory as ranks exchange it.
//! * [`metrics`]: TRL's metric names over whole batches, and `metrics.jsonl`.
//! * [`checkpoint`]: atomic, checksummed training state; [`state`] is what it holds of a run, [`snapshot`] turns that into it and back,
//!   [`saver`] writes it while training goes on.
//! * [`run_dir`]: the folder a run writes, its lock, and what may be deleted from it.

pub mod checkpoint;
mod compared;
pub mod config;
mod disk;
mod draw;
pub mod dry_run;
pub mod error;
pub mod evaluation;
pub mod events;
pub mod gpus;
pub mod homes;
pub mod judges;
pub mod mesh;
pub mod metrics;
pub mod micro_batch;
pub mod numbers;
pub mod objective;
pub mod online;
pub mod optimizer;
pub mod pipeline;
pub mod plan;
pub mod prepare;
pub mod profile;
pub mod ranks;
pub mod reference;
mod reports;
mod resume;
pub mod reward_judge;
pub mod reward_model;
pub mod run_dir;
pub mod saver;
pub mod schedule;
mod size;
pub mod snapshot;
pub mod stages;
pub mod start;
pub mod state;
pub mod step;
pub mod store;
pub mod trainer;

pub use config::Config;
pub use error::{Fault, Result, TrainError, chain};
pub use events::{Event, Observer};
pub use plan::Plan;
pub use reward_model::{Answers, RewardModel};
pub use trainer::{Options, Outcome, Trainer};
