//! Memory of one phase of a run, and a rank's need of each memory.

use tandem_kernels::meta::{Ledger, PeakLocation};
use tandem_kernels::{Device, MemoryUse};

use crate::placement::{MemoryPlacement, MemoryRequirements};

/// A part of a run during which one set of things is in memory.
#[derive(Clone, Debug)]
pub struct PhasePlan {
    /// Name.
    pub name: &'static str,
    /// Bytes by kind at its peak.
    pub memory: MemoryUse,
    /// When that is.
    pub moment: PeakLocation,
    /// Highest address used until the end of the phase, over the device's arenas: resident bytes.
    pub high_water: usize,
    /// How much of that is of the one where answers are generated while a step trains.
    pub beside: usize,
    /// How much of it is of the one where reward models judge.
    pub judges: usize,
    /// Bytes offloaded to host memory.
    pub host: Offloaded,
    /// Bytes offloaded to a file.
    pub file: Offloaded,
    /// Floating-point operations of the largest micro-batch, if it computes any.
    pub flops: f64,
}

/// Contents of a memory outside the device.
#[derive(Clone, Debug, Default)]
pub struct Offloaded {
    /// Bytes by kind at its peak.
    pub memory: MemoryUse,
    /// One past the highest address used until the phase's end.
    pub high_water: usize,
}

impl MemoryRequirements {
    /// The most of any phase.
    pub(super) fn new(phases: &[PhasePlan]) -> Self {
        let most = |bytes: &dyn Fn(&PhasePlan) -> usize| phases.iter().map(bytes).max().unwrap_or(0);
        Self {
            arena: most(&|phase| phase.high_water),
            beside: most(&|phase| phase.beside),
            judges: most(&|phase| phase.judges),
            host: most(&|phase| phase.host.high_water),
            file: most(&|phase| phase.file.high_water),
        }
    }
}

impl PhasePlan {
    /// Reads a phase from a dry run's memories since their records began.
    pub(super) fn new(name: &'static str, placement: &MemoryPlacement, flops: f64) -> Self {
        let [device, host, file] = placement.ledgers();
        let device = device.expect("there is a device");
        let (memory, moment, high_water) = (device.usage(), device.moment(), device.high_water());
        let offloaded = |ledger: Option<&Ledger>| {
            let of = |ledger: &Ledger| Offloaded { memory: ledger.usage(), high_water: ledger.high_water() };
            ledger.map(of).unwrap_or_default()
        };
        let (host, file) = (offloaded(host), offloaded(file));
        Self { name, memory, moment, high_water, beside: 0, judges: 0, host, file, flops }
    }

    /// Adds reward models on their own device, which may peak at the same moment.
    pub(super) fn with_judges(&mut self, device: &Device) {
        self.judges = device.high_water();
        self.high_water += self.judges;
        self.memory = self.memory.beside(&device.memory());
    }

    /// Adds background generation on its own device, which may peak during a training step and
    /// keeps its memory.
    pub(super) fn with_generation(&mut self, device: &Device) {
        self.beside = device.high_water();
        self.high_water += self.beside;
        if self.name == "train" {
            self.memory = self.memory.beside(&device.memory());
        }
    }
}
