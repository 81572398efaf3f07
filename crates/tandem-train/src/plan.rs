//! What a run will hold in memory, when, and how much it computes: known before a byte is allocated.
//!
//! The plan is a dry run of the very code that trains, on [`Device::Meta`]: the same stores, the same walk, the same
//! step, over the largest micro-batch of the run. Nothing is estimated that can be counted.

use std::fmt;

use serde_json::{Value, json};
use tandem_comm::{Group, Operation, recorder};
use tandem_data::token_cache::TokenCache;
use tandem_kernels::meta::Ledger;
use tandem_kernels::{DType, Device, Kind, MemoryUse};
use tandem_model::Stage;

use crate::config::{ComputeConfig, Config, ReferenceKind};
use crate::mesh::{self, Mesh};
use crate::micro_batch::{MicroBatch, Share};
use crate::pipeline::most_under_way;
use crate::prepare::{Prepared, compute_type, threads};
use crate::{Result, dry_run};

/// Everything known before a run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// What is trained, in words.
    pub model: String,
    /// Parameters of the model; a tied table counts once.
    pub num_parameters: usize,
    /// Compute type.
    pub dtype: DType,
    /// Ranks; everything below is of one of them.
    pub ranks: usize,
    /// How many of them hold the slices of one stage of a model.
    pub tensor: usize,
    /// Which stage this rank holds, of how many.
    pub stage: Stage,
    /// The blocks of that stage.
    pub blocks: std::ops::Range<usize>,
    /// Micro-batches of which something is kept at a time.
    pub under_way: usize,
    /// Bytes that a rank sends in a step in which each rank has one micro-batch, as [`tandem_comm::Volume`] counts.
    pub bytes_sent: u64,
    /// Those of them that it sends to the ranks that hold the other slices.
    pub bytes_sent_between_slices: u64,
    /// Those that it sends to the ranks that hold the other stages.
    pub bytes_sent_between_stages: u64,
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
    /// Plans a run, as rank `rank` of `num_ranks` sees it.
    ///
    /// # Errors
    /// If the model does not fit its config, the data does not fit the model, or the ranks cannot be divided as the config
    /// asks.
    pub fn make(config: &Config, prepared: &Prepared, rank: usize, num_ranks: usize) -> Result<Self> {
        mesh::check(config, num_ranks)?;
        let ComputeConfig { tensor, pipeline, .. } = config.compute;
        let on_mesh = |group: Group| Mesh::new(group, &config.compute);
        let mesh = on_mesh(recorder::group(rank, num_ranks).0)?;
        let (stage, blocks) = (mesh.stage(), mesh.part(&prepared.decoder)?.blocks());
        let (candidates, rounds) = largest(config, prepared, num_ranks / (tensor * pipeline))?;
        let under_way = most_under_way(stage, rounds);
        let dtype = compute_type(config);
        let mut phases = Vec::new();
        if config.reference.kind == ReferenceKind::Precompute {
            phases.push(phase("reference", &candidates, |device, batch| {
                let mut mesh = on_mesh(recorder::group(rank, num_ranks).0)?;
                dry_run::reference_pass(config, prepared, device, &mut mesh, batch)
            })?);
        }
        let mut sent = [0; 3];
        let mut train = phase("train", &candidates, |device, batch| {
            // One micro-batch after another, as many as are under way at once; what is sent is counted for one.
            let step = |count: usize, device: &Device| -> Result<[u64; 3]> {
                let (group, log) = recorder::group(rank, num_ranks);
                let mut mesh = on_mesh(group)?;
                let (share, build) = (Share::of(batch, count), &mut |_: &[u32]| Ok(batch.clone()));
                let (mut scorer, mut learner) = dry_run::load(config, prepared, device, &mut mesh)?;
                scorer.step(&mut learner, &mut mesh, &share, build, 0.0, None, 1)?;
                let calls = log.take();
                let sent = |is_counted: &dyn Fn(usize, Operation) -> bool| -> u64 {
                    let counted = calls.iter().filter(|(group, call)| is_counted(*group, call.operation));
                    counted.map(|(group, call)| call.bytes_sent(log.size(*group))).sum()
                };
                let in_tensor = |group: usize| tensor > 1 && group == dry_run::TENSOR_GROUP;
                let is_message = |operation| matches!(operation, Operation::Send { .. });
                Ok([sent(&|_, _| true), sent(&|group, _| in_tensor(group)), sent(&|_, op| is_message(op))])
            };
            sent = step(under_way, device)?;
            if under_way > 1 {
                sent = step(1, &Device::meta())?;
            }
            Ok(())
        })?;
        train.flops /= under_way as f64;
        phases.push(train);
        let [bytes_sent, bytes_sent_between_slices, bytes_sent_between_stages] = sent;
        if prepared.eval.is_some() {
            phases.push(phase("evaluate", &candidates, |device, batch| {
                let (share, build) = (Share::of(batch, 1), &mut |_: &[u32]| Ok(batch.clone()));
                let mut mesh = on_mesh(recorder::group(rank, num_ranks).0)?;
                let (mut scorer, _learner) = dry_run::load(config, prepared, device, &mut mesh)?;
                scorer.evaluate(&mut mesh, &share, build)?;
                Ok(())
            })?);
        }
        let train_rows = prepared.train.num_rows();
        Ok(Self {
            model: config.model.display().to_string(),
            num_parameters: prepared.decoder.num_parameters(),
            dtype,
            ranks: num_ranks,
            tensor,
            stage,
            blocks,
            under_way,
            bytes_sent,
            bytes_sent_between_slices,
            bytes_sent_between_stages,
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

    /// Bytes of address space for the arena: what is touched is what the plan says, the rest is room for what it does not foresee.
    pub fn arena_capacity(&self) -> usize {
        2 * self.arena_bytes() + (1 << 30)
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
            "ranks": self.ranks,
            "tensor": self.tensor,
            "pipeline": self.stage.count,
            "stage": self.stage.index,
            "blocks_of_stage": [self.blocks.start, self.blocks.end],
            "micro_batches_under_way": self.under_way,
            "bytes_sent_in_a_step": self.bytes_sent,
            "bytes_sent_between_slices_in_a_step": self.bytes_sent_between_slices,
            "bytes_sent_between_stages_in_a_step": self.bytes_sent_between_stages,
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

/// The micro-batches that decide the peak, most tokens and most scored rows; and how many a rank of `num_data` computes in a
/// step at most.
fn largest(config: &Config, prepared: &Prepared, num_data: usize) -> Result<(Vec<MicroBatch>, usize)> {
    let mut rounds = 1;
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
        let share = batcher.share(&prepared.train, rows, 0, num_data);
        rounds = rounds.max(share.rounds);
        for cut in share.cuts {
            consider(batcher.build(&prepared.train, &rows[cut])?);
        }
    }
    if let Some(eval) = &prepared.eval {
        let rows: Vec<u32> = (0..eval.num_rows() as u32).collect();
        for range in batcher.cut(eval, &rows) {
            consider(batcher.build(eval, &rows[range])?);
        }
    }
    Ok((by_tokens.into_iter().chain(by_scored).collect(), rounds))
}

/// Steps whose micro-batches are looked at, at least.
const LOOK_AHEAD: u64 = 1000;

/// Runs a phase over each candidate on a device of its own and keeps the larger record.
fn phase(
    name: &'static str,
    candidates: &[MicroBatch],
    mut dry_run: impl FnMut(&Device, &MicroBatch) -> Result<()>,
) -> Result<Phase> {
    let mut worst: Option<Phase> = None;
    for batch in candidates {
        let device = Device::meta();
        dry_run(&device, batch)?;
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
        if self.ranks > 1 {
            writeln!(
                f,
                "{} ranks, of which each sends {:.1} MiB in a step in which it has one micro-batch; a rank needs:",
                self.ranks,
                mebibytes(self.bytes_sent as usize)
            )?;
        }
        if self.tensor > 1 {
            writeln!(
                f,
                "(each {} ranks hold {} in slices; {:.1} MiB of that go between them)",
                self.tensor,
                if self.stage.count > 1 { "one stage" } else { "one model" },
                mebibytes(self.bytes_sent_between_slices as usize)
            )?;
        }
        if self.stage.count > 1 {
            writeln!(
                f,
                "(stage {} of {}, with blocks {} to {}; {:.1} MiB go to other stages; up to {} under way at once)",
                self.stage.index + 1,
                self.stage.count,
                self.blocks.start,
                self.blocks.end - 1,
                mebibytes(self.bytes_sent_between_stages as usize),
                match self.under_way {
                    1 => "1 micro-batch is".to_owned(),
                    n => format!("{n} micro-batches are"),
                }
            )?;
        }
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
