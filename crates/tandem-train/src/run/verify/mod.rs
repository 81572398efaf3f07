//! Verification: a stretch of a finished run is computed again, and its bits are compared.
//!
//! ```text
//! open        provenance.json, checkpoints, states.jsonl, metrics.jsonl
//! stretch     from the start or a checkpoint to a checkpoint, within one program, config and arithmetic
//! check       config, arithmetic, tokens and files: what differs is named before anything is computed
//! recompute   in a folder of its own, from a link to the first checkpoint
//! compare     each record of metrics.jsonl as it comes, each checkpoint as it is saved, the weights in final/
//! ```
//!
//! Nothing is written into the run's folder, and its lock is not taken.

mod check;
mod model;
mod placed;
mod replay;
mod verdict;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use crate::checkpoint::{Checkpoint, Checkpoints, STATES, read_states};
use crate::config::Config;
use crate::events::Observer;
use crate::metrics::{Record, read_records};
use crate::run::provenance::{PROVENANCE, Provenance};
use crate::run::run_dir::{METRICS, RunDirPolicy};
use crate::run::{Options, spawn};
use crate::{Result, TrainError};

pub use crate::run::provenance::{ConfigRecord, HashedInput, MatmulRecord, Program, Start};
pub use verdict::{CheckpointVerdict, MetricDifference, ModelVerdict, Verdict};

use replay::Replay;

/// A run's folder, opened to be read.
#[derive(Debug)]
pub struct RecordedRun {
    folder: PathBuf,
    provenance: Provenance,
    checkpoints: Checkpoints,
    /// Steps of the checkpoints that are there.
    present: BTreeSet<u64>,
    /// Hash of all state at each checkpoint, those that were deleted included.
    states: BTreeMap<u64, blake3::Hash>,
    records: Vec<Record>,
}

/// Steps to compute again: those after `from`, up to `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// Steps done before it; 0 is the start of the run.
    pub from: u64,
    /// Steps done after it.
    pub to: u64,
}

/// Choices where a run cannot simply be repeated.
#[derive(Clone, Debug)]
pub struct Request {
    /// New folder for the recomputed run.
    pub scratch: PathBuf,
    /// Whether its checkpoints stay there after they were compared.
    pub keeps_checkpoints: bool,
    /// Keys that were overridden: a machine's own resources follow them, else this machine.
    pub overridden: Vec<String>,
    /// Whether to compute although other bits are expected.
    pub force: bool,
    /// Whether the programs that the run started may run here.
    pub runs_commands: bool,
}

fn mismatch(reason: String) -> TrainError {
    TrainError::Mismatch { reason }
}

impl RecordedRun {
    /// Opens the folder of a run.
    ///
    /// # Errors
    /// The folder holds no run, a run without a record, or a config that was changed after the run.
    pub fn open(folder: &Path) -> Result<Self> {
        if !folder.join("config.toml").is_file() {
            let reason = "it has no config.toml; give the folder `output` of a run";
            return Err(mismatch(format!("no run in {}: {reason}", folder.display())));
        }
        let Some(provenance) = Provenance::read(folder)? else {
            return Err(mismatch(format!(
                "{} has no {PROVENANCE}: a version of Tandem made the run that records no hashes of its program, config \
                 and inputs",
                folder.display()
            )));
        };
        let checkpoints = Checkpoints::for_run(folder);
        let present = checkpoints.steps()?.into_iter().collect();
        let states = read_states(&folder.join(STATES))?;
        let records = read_records(&folder.join(METRICS))?;
        let run = Self { folder: folder.to_owned(), provenance, checkpoints, present, states, records };
        run.check_config()?;
        Ok(run)
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the steps to compute again: as given, else from the start to the newest checkpoint.
    ///
    /// # Errors
    /// One of the two ends has no checkpoint, or the run was resumed between them with another program,
    /// config or input.
    pub fn stretch(&self, from: Option<u64>, to: Option<u64>) -> Result<Stretch> {
        let first = self.provenance.starts[0].step;
        let default =
            if first == 0 { 0 } else { self.present.range(first..).next().copied().unwrap_or(first) };
        let from = from.unwrap_or(default);
        let ends: BTreeSet<u64> = self.present.iter().chain(self.states.keys()).copied().collect();
        let list = |steps: &BTreeSet<u64>| {
            let steps: Vec<String> = steps.iter().map(u64::to_string).collect();
            if steps.is_empty() { "none".to_owned() } else { steps.join(", ") }
        };
        let place = self.folder.display();
        let Some(to) = to.or_else(|| ends.last().copied()) else {
            return Err(mismatch(format!(
                "{place} has no checkpoint yet: there is no state to compare with"
            )));
        };
        if from != 0 && !self.present.contains(&from) {
            return Err(mismatch(format!(
                "--steps {from}..{to}: {place} has no checkpoint of step {from} to compute from; there are: {}. The start is \
                 0. `train.keep` says how many a run keeps",
                list(&self.present)
            )));
        }
        if from >= to {
            return Err(mismatch(format!(
                "--steps {from}..{to}: there is no step between; the states to compare with are those after the steps {}",
                list(&ends)
            )));
        }
        if !ends.contains(&to) {
            return Err(mismatch(format!(
                "--steps {from}..{to}: {place} has neither a checkpoint of step {to} nor the hash of one; there are: {}",
                list(&ends)
            )));
        }
        if from < first {
            return Err(mismatch(format!(
                "{place}/{PROVENANCE} begins after step {first}, for an earlier version began the run: only later stretches \
                 can be verified"
            )));
        }
        if let Some(start) = self.provenance.starts.iter().find(|start| (from + 1..to).contains(&start.step))
        {
            let step = start.step;
            return Err(mismatch(format!(
                "--steps {from}..{to}: the run was resumed after step {step} with another program, config, arithmetic or \
                 input: verify --steps {from}..{step} and --steps {step}..{to}"
            )));
        }
        Ok(Stretch { from, to })
    }

    /// Returns the record of the start that a stretch belongs to.
    pub fn start(&self, stretch: Stretch) -> &Start {
        let starts = &self.provenance.starts;
        starts.iter().rfind(|start| start.step <= stretch.from).unwrap_or(&starts[0])
    }

    /// Computes a stretch again and compares it. `config` is that of its start with overrides. `None` if
    /// `stop` was set before the end.
    ///
    /// # Errors
    /// The run cannot be compared: another config, other inputs or another arithmetic, a checkpoint that is
    /// damaged, or parts outside this program. Or the recomputation fails.
    pub fn recompute(
        &self,
        stretch: Stretch,
        config: Config,
        request: &Request,
        observer: &mut dyn Observer,
        stop: &AtomicBool,
    ) -> Result<Option<Verdict>> {
        let start = self.start(stretch);
        let recorded = self.config_of(start)?;
        check::external(&recorded, request.runs_commands)?;
        check::overrides(&recorded, &config)?;
        let config = placed::placed(config, &recorded, start, request)?;
        let notes = check::arithmetic(&config, start, request.force)?;
        self.check_ends(stretch)?;
        let notes = notes.into_iter().chain(check::inputs(&config, start, observer)?).collect();
        fs::create_dir_all(&request.scratch).map_err(TrainError::io("create", &request.scratch))?;
        let policy = self.link_first(stretch, &request.scratch)?;
        let matmuls = Some(start.matmul_choices());
        let options = Options { start: policy, profile: false, until: Some(stretch.to), matmuls };
        let mut replay = Replay::new(self, stretch, &config, request.keeps_checkpoints, observer, stop)?;
        spawn::train(&config, options, &mut replay, stop)?;
        replay.verdict(config.compute.devices.num_ranks(), notes)
    }

    /// Refuses a config that was changed after the run, and a record that was.
    fn check_config(&self) -> Result<()> {
        let path = self.folder.join("config.toml");
        let last = self.provenance.starts.last().expect("a record has a start");
        let (recorded, found) = (self.config_of(last)?, Config::load::<&str>(&path, &[])?);
        check::unchanged(&recorded, &found, &path)
    }

    fn config_of(&self, start: &Start) -> Result<Config> {
        let path = self.folder.join(PROVENANCE);
        let config = Config::from_text(&start.config.file_text(), &path)?;
        check::config_hash_is(&config, start, &path)?;
        Ok(config)
    }

    /// Checks the state at the beginning, which must be whole, and that no training loop of another program
    /// has changed the learning rate on the way.
    fn check_ends(&self, stretch: Stretch) -> Result<()> {
        let factor = |step: u64| -> Result<Option<Option<f64>>> {
            if !self.present.contains(&step) {
                return Ok(None);
            }
            let checkpoint = Checkpoint::open_checked(&self.checkpoints.folder_of(step))?;
            Ok(Some(checkpoint.cursor().learning_rate_factor))
        };
        let first = if stretch.from == 0 { None } else { factor(stretch.from)?.flatten() };
        if let Some(last) = factor(stretch.to)?.filter(|last| *last != first) {
            let shown = |factor: Option<f64>| factor.unwrap_or(1.0);
            return Err(mismatch(format!(
                "between steps {} and {} a program of its own has changed the learning rate's factor from {} to {}: what \
                 such a program does is not part of the record",
                stretch.from,
                stretch.to,
                shown(first),
                shown(last)
            )));
        }
        if stretch.from == 0 {
            return Ok(());
        }
        let folder = self.checkpoints.folder_of(stretch.from);
        let checkpoint = Checkpoint::open(&folder)?;
        let found = checkpoint.state_hash(&AtomicBool::new(false))?;
        match (self.states.get(&stretch.from), found) {
            (Some(recorded), Some(found)) if *recorded != found => Err(mismatch(format!(
                "{} is not the checkpoint that the run has saved: the hash of its state is {found}, and {STATES} has {recorded}; \
                 verify the steps before it to see which elements differ",
                folder.display()
            ))),
            _ => Ok(()),
        }
    }

    /// Makes the first checkpoint the newest one of the new folder.
    fn link_first(&self, stretch: Stretch, scratch: &Path) -> Result<RunDirPolicy> {
        if stretch.from == 0 {
            return Ok(RunDirPolicy::Fresh);
        }
        let link = Checkpoints::for_run(scratch).folder_of(stretch.from);
        let folder = link.parent().expect("a checkpoint lies in a folder");
        fs::create_dir_all(folder).map_err(TrainError::io("create", folder))?;
        let first = self.checkpoints.folder_of(stretch.from);
        let first = fs::canonicalize(&first).map_err(TrainError::io("open", &first))?;
        std::os::unix::fs::symlink(first, &link).map_err(TrainError::io("create", &link))?;
        Ok(RunDirPolicy::Resume)
    }
}
