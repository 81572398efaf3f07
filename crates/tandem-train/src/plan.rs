//! What a run will hold in memory, when, and how much it computes: known before a byte is allocated.
//!
//! The plan is a dry run of the very code that trains, on [`Device::Meta`]: the same stores, the same walk, the same
//! step, over the largest micro-batch of the run. Nothing is estimated that can be counted.

use std::fmt;
use std::sync::Arc;

use serde_json::{Value, json};
use tandem_comm::Group;
use tandem_data::token_cache::TokenCache;
use tandem_kernels::meta::Ledger;
use tandem_kernels::{DType, Device, Kind, MemoryUse};
use tandem_model::{FlatWeights, WeightSource};

use crate::Result;
use crate::config::{Config, ReferenceKind};
use crate::micro_batch::{MicroBatch, Share};
use crate::objective::BatchTotals;
use crate::optimizer::Optimizer;
use crate::prepare::{Prepared, compute_type, partition, threads, to_walk};
use crate::reference::{Reference, RowScores};
use crate::step::{Learner, Scorer};
use crate::store::{
    Accumulator, FrozenWeights, Partition, Policy, ReplicatedWeights, ShardedWeights, Sharding,
};

/// Everything known before a run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// What is trained, in words.
    pub model: String,
    /// Parameters of the model; a tied table counts once.
    pub num_parameters: usize,
    /// Compute type.
    pub dtype: DType,
    /// Threads.
    pub threads: usize,
    /// Optimiser steps.
    pub steps: u64,
    /// Rows in a step.
    pub batch_size: usize,
    /// Training rows.
    pub train_rows: usize,
    /// Evaluation rows.
    pub eval_rows: usize,
    /// Tokens of the largest micro-batch.
    pub max_micro_batch_tokens: usize,
    /// Rows that the head scores in the micro-batch that scores most.
    pub max_scored_rows: usize,
    /// The phases in order.
    pub phases: Vec<Phase>,
}

/// A part of a run during which one set of things is in memory.
#[derive(Clone, Debug)]
pub struct Phase {
    /// Its name.
    pub name: &'static str,
    /// Bytes by kind at its peak.
    pub memory: MemoryUse,
    /// One past the highest address used: what becomes resident.
    pub high_water: usize,
    /// Floating-point operations of the micro-batch that was dry-run.
    pub flops: f64,
}

impl Plan {
    /// Plans a run.
    ///
    /// # Errors
    /// If the model does not fit its config, or the data does not fit the model.
    pub fn make(config: &Config, prepared: &Prepared) -> Result<Self> {
        let candidates = largest(config, prepared)?;
        let dtype = compute_type(config);
        let mut phases = Vec::new();
        if config.reference.kind == ReferenceKind::Precompute {
            phases.push(dry_run("reference", &candidates, |device, batch| {
                reference_pass(config, prepared, device, batch)
            })?);
        }
        phases.push(dry_run("train", &candidates, |device, batch| {
            train(config, prepared, device, batch, true)
        })?);
        if prepared.eval.is_some() {
            phases.push(dry_run("evaluate", &candidates, |device, batch| {
                train(config, prepared, device, batch, false)
            })?);
        }
        let train_rows = prepared.train.num_rows();
        Ok(Self {
            model: config.model.display().to_string(),
            num_parameters: prepared.decoder.num_parameters(),
            dtype,
            threads: threads(config),
            steps: config.train.length.total_steps(train_rows, config.train.batch_size),
            batch_size: config.train.batch_size,
            train_rows,
            eval_rows: prepared.eval.as_ref().map_or(0, TokenCache::num_rows),
            max_micro_batch_tokens: candidates.iter().map(|b| b.forest.num_tokens()).max().unwrap_or(0),
            max_scored_rows: candidates.iter().map(|b| b.forest.scored_rows().0.len()).max().unwrap_or(0),
            phases,
        })
    }

    /// Bytes of the device's arena that the run will touch.
    pub fn arena_bytes(&self) -> usize {
        self.phases.iter().map(|p| p.high_water).max().unwrap_or(0)
    }

    /// The plan as it is written to `plan.json`.
    pub fn to_json(&self) -> Value {
        let phases = self.phases.iter().map(|phase| {
            let kinds =
                Kind::ALL.iter().map(|&k| (k.name().to_owned(), json!(phase.memory.at_peak[k as usize])));
            json!({
                "name": phase.name,
                "peak_bytes": phase.memory.peak,
                "bytes_at_peak": Value::Object(kinds.collect()),
                "flops_of_largest_micro_batch": phase.flops,
            })
        });
        json!({
            "model": self.model,
            "num_parameters": self.num_parameters,
            "dtype": self.dtype.name(),
            "threads": self.threads,
            "steps": self.steps,
            "batch_size": self.batch_size,
            "train_rows": self.train_rows,
            "eval_rows": self.eval_rows,
            "max_micro_batch_tokens": self.max_micro_batch_tokens,
            "max_scored_rows": self.max_scored_rows,
            "arena_bytes": self.arena_bytes(),
            "phases": phases.collect::<Vec<_>>(),
        })
    }
}

/// The micro-batches that decide the peak: most tokens, and most scored rows.
fn largest(config: &Config, prepared: &Prepared) -> Result<Vec<MicroBatch>> {
    let mut batcher = prepared.batcher(config);
    let mut by_tokens: Option<MicroBatch> = None;
    let mut by_scored: Option<MicroBatch> = None;
    let mut consider = |batch: MicroBatch| {
        let scored = |b: &MicroBatch| b.forest.scored_rows().0.len();
        if by_scored.as_ref().is_none_or(|best| scored(&batch) > scored(best)) {
            by_scored = Some(batch.clone());
        }
        if by_tokens.as_ref().is_none_or(|best| batch.forest.num_tokens() > best.forest.num_tokens()) {
            by_tokens = Some(batch);
        }
    };
    let mut batches = prepared.batches(config);
    let steps = config.train.length.total_steps(prepared.train.num_rows(), config.train.batch_size);
    // Shuffled epochs are cut differently; looking at every step of a long run would cost more than it tells.
    for step in 0..steps.min(batches.steps_per_epoch().max(LOOK_AHEAD)) {
        let rows = batches.rows(step);
        for cut in batcher.cut(&prepared.train, rows) {
            consider(batcher.build(&prepared.train, &rows[cut])?);
        }
    }
    if let Some(eval) = &prepared.eval {
        let rows: Vec<u32> = (0..eval.num_rows() as u32).collect();
        for range in batcher.cut(eval, &rows) {
            consider(batcher.build(eval, &rows[range])?);
        }
    }
    Ok(by_tokens.into_iter().chain(by_scored).collect())
}

/// Steps whose micro-batches are looked at, at least.
const LOOK_AHEAD: u64 = 1000;

/// Runs `phase` over each candidate on a device of its own and keeps the larger record.
fn dry_run(
    name: &'static str,
    candidates: &[MicroBatch],
    phase: impl Fn(&Device, &MicroBatch) -> Result<()>,
) -> Result<Phase> {
    let mut worst: Option<Phase> = None;
    for batch in candidates {
        let device = Device::meta();
        phase(&device, batch)?;
        let Device::Meta(ledger) = &device else { unreachable!("made by Device::meta") };
        let found =
            Phase { name, memory: ledger.usage(), high_water: ledger.high_water(), flops: flops(ledger) };
        if worst.as_ref().is_none_or(|w| found.high_water > w.high_water) {
            worst = Some(found);
        }
    }
    Ok(worst.expect("a data set has at least one micro-batch"))
}

fn flops(ledger: &Ledger) -> f64 {
    ledger.costs().values().map(|cost| cost.flops).sum()
}

fn frozen(
    config: &Config,
    prepared: &Prepared,
    device: &Device,
    dtype: DType,
) -> Result<Box<dyn WeightSource + Send>> {
    let decoder = prepared.decoder.clone();
    if config.compute.sharding == Sharding::Zero3 {
        let partition = Arc::new(Partition::new(&decoder, 0, config.compute.devices.num_ranks()));
        let parts = empty_parts(device, &partition, Kind::Reference)?;
        let weights = ShardedWeights::frozen(device, decoder, partition, Group::alone(), parts, dtype)?;
        return Ok(Box::new(weights));
    }
    let weights = prepared.empty_weights(device, Kind::Reference)?;
    Ok(Box::new(FrozenWeights::new(device, decoder, weights, dtype)?))
}

/// Memory for one rank's part of every layer.
fn empty_parts(device: &Device, partition: &Partition, kind: Kind) -> Result<FlatWeights> {
    let owned = (0..partition.num_layers()).map(|layer| partition.owned(layer).len());
    let parts = owned.map(|len| device.alloc(kind, 1, len, DType::F32));
    Ok(FlatWeights { layers: parts.collect::<Result<_, _>>()? })
}

fn reference_pass(config: &Config, prepared: &Prepared, device: &Device, batch: &MicroBatch) -> Result<()> {
    let mut weights = frozen(config, prepared, device, compute_type(config))?;
    let walk = to_walk(config, &prepared.decoder, device);
    walk.forward(weights.as_mut(), &batch.forest, &mut Default::default())?;
    Ok(())
}

fn train(
    config: &Config,
    prepared: &Prepared,
    device: &Device,
    batch: &MicroBatch,
    learn: bool,
) -> Result<()> {
    let (decoder, dtype) = (&prepared.decoder, compute_type(config));
    let reference = match config.reference.kind {
        ReferenceKind::Model => Reference::Model(frozen(config, prepared, device, dtype)?),
        ReferenceKind::None => Reference::None,
        ReferenceKind::Precompute => {
            let rows = prepared.train.num_rows().max(prepared.eval.as_ref().map_or(0, TokenCache::num_rows));
            let scores = RowScores(vec![[0.0; 2]; rows]);
            Reference::Precomputed { train: Some(scores.clone()), eval: Some(scores) }
        }
    };
    let ranks = config.compute.devices.num_ranks();
    let partition = Arc::new(partition(config, decoder, 0, ranks));
    let (form, sharding) = (config.compute.reduction, config.compute.sharding);
    let policy = if sharding == Sharding::Zero3 {
        let parts = empty_parts(device, &partition, Kind::Master)?;
        let (decoder, group) = (decoder.clone(), Group::alone());
        let weights = ShardedWeights::masters(device, decoder, partition.clone(), group, parts, dtype);
        Policy::Sharded(Box::new(weights))
    } else {
        let masters = prepared.empty_weights(device, Kind::Master)?;
        Policy::Replicated(ReplicatedWeights::new(device, decoder.clone(), masters, dtype)?)
    };
    let own = (sharding >= Sharding::Zero2).then(Group::alone);
    let gradients = Accumulator::new(device, decoder.clone(), partition.clone(), own, form)?;
    let optimizer = Optimizer::new(device, decoder, partition, &config.train)?;
    let mut learner = Learner::new(gradients, optimizer);
    let mut scorer = Scorer::new(config, device.clone(), decoder.clone(), policy, reference);
    let totals = BatchTotals { pairs: batch.rows.len() as u64, chosen_tokens: 1 };
    let whole = 0..batch.rows.len();
    let share = Share {
        rows: batch.rows.clone(),
        cuts: vec![whole],
        totals,
        sequence_tokens: 0,
        mine: vec![0],
        rounds: 1,
    };
    let (group, build) = (&mut Group::alone(), &mut |_: &[u32]| Ok(batch.clone()));
    if learn {
        scorer.step(&mut learner, group, &share, build, 0.0, None, 1)?;
    } else {
        scorer.evaluate(group, &share, build)?;
    }
    Ok(())
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{}: {} parameters, compute in {} on {} threads",
            self.model,
            grouped(self.num_parameters),
            self.dtype,
            self.threads
        )?;
        writeln!(
            f,
            "{} steps of {} rows; {} training rows, {} held out; micro-batches of up to {} tokens, {} of them scored",
            self.steps,
            self.batch_size,
            grouped(self.train_rows),
            grouped(self.eval_rows),
            grouped(self.max_micro_batch_tokens),
            grouped(self.max_scored_rows)
        )?;
        let kinds: Vec<Kind> = Kind::ALL
            .into_iter()
            .filter(|&k| self.phases.iter().any(|p| p.memory.at_peak[k as usize] > 0))
            .collect();
        write!(f, "\n{:<16}", "MiB at the peak")?;
        for phase in &self.phases {
            write!(f, "{:>12}", phase.name)?;
        }
        for kind in kinds {
            write!(f, "\n{:<16}", kind.name())?;
            for phase in &self.phases {
                write!(f, "{:>12.1}", mebibytes(phase.memory.at_peak[kind as usize]))?;
            }
        }
        write!(f, "\n{:<16}", "together")?;
        for phase in &self.phases {
            write!(f, "{:>12.1}", mebibytes(phase.memory.peak))?;
        }
        write!(f, "\n{:<16}", "GFLOP")?;
        for phase in &self.phases {
            write!(f, "{:>12.1}", phase.flops / 1e9)?;
        }
        write!(f, "\n(GFLOP: of the largest micro-batch)")
    }
}

fn mebibytes(bytes: usize) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// A number with its thousands apart.
fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}
