//! Profile of some steps: time by phase and operation beside the machine's rates, and arena use.
//! One per rank, in the run folder.
//!
//! The device recorder ([`tandem_kernels::profile`]) and the process groups
//! ([`tandem_comm::CollectiveObserver`]) log events; [`Report`] adds them up, [`trace`] writes a timeline. Only
//! a few steps are recorded, so long runs profile like short ones.

mod report;
#[cfg(test)]
mod tests;
mod text;
pub(crate) mod trace;

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use tandem_comm::{Call, CollectiveObserver, Operation, ProcessGroup, Reduction};
use tandem_kernels::{Device, Profile};

use report::{Memory, Report};

use crate::config::Config;
use crate::disk::replace;
use crate::plan::estimate::{Gpu, Machine, measure};
use crate::{Result, TrainError};

/// Steps that are not profiled because buffers and caches fill in them.
pub(crate) const WARM_UP: u64 = 2;
/// Steps that are.
pub(crate) const STEPS: u64 = 5;

/// Returns the folder where a run in `output` leaves its ranks' profiles.
pub(crate) fn folder_of(output: &Path) -> PathBuf {
    output.join("profile")
}

/// The profile of one rank of a run.
pub(crate) struct Profiler {
    recorder: Arc<Profile>,
    machine: Machine,
    folder: PathBuf,
    rank: usize,
    /// The steps that are profiled, counted from 1; `None` before the first step of this process.
    steps: Option<Range<u64>>,
    /// Arena use and high-water mark at the start.
    before: Memory,
    report: Option<Report>,
}

/// Tells the recorder of calls between ranks.
struct Calls(Arc<Profile>);

impl CollectiveObserver for Calls {
    fn called(&self, call: &Call, num_ranks: usize, began: Instant) {
        let bytes = match call.operation {
            Operation::Recv { .. } => (call.len * call.kind.size()) as u64,
            _ => call.bytes_sent(num_ranks),
        };
        self.0.other(call.operation.name(), bytes, began);
    }
}

impl Profiler {
    /// Creates a recorder for a group and its subgroups, if a profile is `wanted`.
    ///
    /// # Errors
    /// Only some ranks want a profile.
    pub(crate) fn recorder(wanted: bool, group: &mut ProcessGroup) -> Result<Option<Arc<Profile>>> {
        let mut votes = [u8::from(wanted), u8::from(!wanted)];
        if group.size() > 1 {
            group.all_reduce(&mut votes, Reduction::Max)?;
        }
        if votes == [1, 1] {
            let reason = "--profile was given to some ranks and not to others: give it to all, or to none";
            return Err(TrainError::Mismatch { reason: reason.to_owned() });
        }
        if !wanted {
            return Ok(None);
        }
        let recorder = Arc::new(Profile::default());
        group.watched_by(Arc::new(Calls(recorder.clone())));
        Ok(Some(recorder))
    }

    /// Measures this rank's CPU rates, all ranks at once as in training. GPU rates come from the
    /// device table.
    pub(crate) fn new(recorder: Arc<Profile>, config: &Config, group: &mut ProcessGroup) -> Result<Self> {
        let (threads, rank, num_ranks) = (config.compute.num_threads(), group.rank(), group.size());
        group.barrier()?;
        let machine = match Gpu::for_rank(&config.compute, rank)? {
            Some(gpu) => Machine::from_gpu(&gpu.kind.with_tf32(config.compute.tf32)),
            None => measure::machine(threads, config.compute.memory)?,
        };
        group.barrier()?;
        let machine = Machine { num_ranks, ..machine };
        let folder = folder_of(&config.output);
        Ok(Self { recorder, machine, folder, rank, steps: None, before: Memory::default(), report: None })
    }

    pub(crate) fn recording(&self) -> &Arc<Profile> {
        &self.recorder
    }

    /// Step `step` of `total` is about to begin, counted from 1. All ranks call this.
    pub(crate) fn step(
        &mut self,
        step: u64,
        total: u64,
        group: &mut ProcessGroup,
        device: &Device,
    ) -> Result<()> {
        let steps = self.steps.get_or_insert_with(|| {
            // How much there is to record is seen in the steps before.
            self.recorder.begin(0);
            let first = (step + WARM_UP).min(total);
            first..(first + STEPS).min(total + 1)
        });
        let steps = steps.clone();
        if step == steps.start {
            // Events of the last step before, and some more.
            let each = self.recorder.num_events() / (WARM_UP as usize);
            // Aligns the ranks' clocks.
            group.barrier()?;
            self.before = Memory::new(device);
            self.recorder.begin(2 * each * STEPS as usize);
        }
        if step < steps.end {
            self.recorder.step(step);
        } else {
            self.close(step, device)?;
        }
        Ok(())
    }

    /// Ends early: no step after `done` follows.
    pub(crate) fn finish(&mut self, done: u64, device: &Device) -> Result<()> {
        self.close(done + 1, device)
    }

    /// Ends the recording before step `next` and writes its whole steps.
    fn close(&mut self, next: u64, device: &Device) -> Result<()> {
        let Some(steps) = self.steps.clone().filter(|_| self.report.is_none()) else { return Ok(()) };
        let steps = steps.start..next.min(steps.end);
        let recording = self.recorder.end();
        if steps.is_empty() {
            return Ok(());
        }
        let memory = Memory::new(device).since(&self.before, steps.end - steps.start);
        let report = Report::new(&recording, steps.clone(), self.rank, self.machine, memory);
        fs::create_dir_all(&self.folder).map_err(TrainError::io("create", &self.folder))?;
        let path = |name: &str| self.folder.join(format!("rank-{}{name}", self.rank));
        replace(&path(".txt"), report.to_string().as_bytes())?;
        let json = serde_json::to_string_pretty(&report).expect("numbers and names");
        replace(&path(".json"), (json + "\n").as_bytes())?;
        replace(&path(".trace.json"), &trace::bytes(&recording, steps, self.rank))?;
        self.report = Some(report);
        Ok(())
    }

    /// Report and folder; `None` without a whole profiled step.
    pub(crate) fn report(&self) -> Option<(&Report, &Path)> {
        self.report.as_ref().map(|report| (report, &*self.folder))
    }
}
