//! Phases of a step, as the watchdog, the profile and a dry run know them.

use tandem_comm::{Phase, Progress};
use tandem_kernels::Device;

/// A phase of a step.
#[derive(Clone, Copy)]
pub(super) enum StepPhase {
    Begin,
    Data,
    Forward,
    Loss,
    Backward,
    /// Backward of a rank that has nothing to compute.
    IdleBackward,
    Reduce,
    Update,
}

impl StepPhase {
    /// Tells all of them that the phase begins.
    pub(super) fn enter(self, progress: &Progress, device: &Device) {
        let (watched, profiled, noted) = match self {
            Self::Begin => (Some(Phase::Forward), None, Some("beginning of a step")),
            Self::Data => (Some(Phase::Forward), Some("data"), None),
            Self::Forward => (None, Some("forward"), None),
            Self::Loss => (None, Some("loss"), None),
            Self::Backward => (Some(Phase::Backward), Some("backward"), None),
            Self::IdleBackward => (None, Some("backward"), None),
            Self::Reduce => (Some(Phase::Reduce), Some("reduction"), Some("reduction of gradients")),
            Self::Update => (Some(Phase::Update), Some("update"), Some("update")),
        };
        if let Some(phase) = watched {
            progress.begin_phase(phase);
        }
        if let Some(name) = profiled {
            device.begin_phase(name);
        }
        if let Some(text) = noted {
            device.set_place(format_args!("{text}"));
        }
    }
}
