//! Memory use by purpose.

/// Purpose of memory; the plan reports bytes by purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum MemoryKind {
    /// Master weights (f32).
    Master,
    /// Compute copies of the weights.
    Weights,
    /// Whole layers in transit: gathered from ranks, fetched from an offload target, or unpacked.
    Gathered,
    /// Gradient accumulators.
    Gradients,
    /// Optimiser states.
    Optimizer,
    /// Activations, saved and transient.
    Activations,
    /// The head's chunk of logits and its buffers.
    Head,
    /// Reference weights.
    Reference,
    /// Keys and values kept for generation.
    Cache,
    /// Copy of the state from which a checkpoint is written while training continues.
    Checkpoint,
    /// Anything else, short-lived.
    Scratch,
}

impl MemoryKind {
    /// Every kind, in display order.
    pub const ALL: [Self; 11] = [
        Self::Master,
        Self::Weights,
        Self::Gathered,
        Self::Gradients,
        Self::Optimizer,
        Self::Activations,
        Self::Head,
        Self::Reference,
        Self::Cache,
        Self::Checkpoint,
        Self::Scratch,
    ];

    /// Returns the name used in plans and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Master => "master weights",
            Self::Weights => "compute weights",
            Self::Gathered => "gathered layers",
            Self::Gradients => "gradients",
            Self::Optimizer => "optimizer",
            Self::Activations => "activations",
            Self::Head => "head chunk",
            Self::Reference => "reference",
            Self::Cache => "kv cache",
            Self::Checkpoint => "checkpoint copy",
            Self::Scratch => "buffers",
        }
    }
}

/// Bytes in use by kind, and the moment of the peak.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Bytes now, by [`MemoryKind`] in the order of [`MemoryKind::ALL`].
    pub current: [usize; MemoryKind::ALL.len()],
    /// Bytes by kind at the moment when the total was largest.
    pub at_peak: [usize; MemoryKind::ALL.len()],
    /// The largest total.
    pub peak: usize,
}

impl MemoryUse {
    /// Returns the total bytes now.
    pub fn total(&self) -> usize {
        self.current.iter().sum()
    }

    /// Adds another memory's use, assuming that both peaks coincide.
    #[must_use]
    pub fn beside(&self, other: &Self) -> Self {
        let both = |own: &[usize; MemoryKind::ALL.len()], other: &[usize; MemoryKind::ALL.len()]| {
            std::array::from_fn(|kind| own[kind] + other[kind])
        };
        Self {
            current: both(&self.current, &other.current),
            at_peak: both(&self.at_peak, &other.at_peak),
            peak: self.peak + other.peak,
        }
    }

    /// Restarts the peak from the memory in use.
    pub(crate) fn begin(&mut self) {
        (self.peak, self.at_peak) = (self.total(), self.current);
    }

    pub(crate) fn add(&mut self, kind: MemoryKind, bytes: usize) {
        self.current[kind as usize] += bytes;
        let total = self.total();
        if total > self.peak {
            self.peak = total;
            self.at_peak = self.current;
        }
    }

    pub(crate) fn remove(&mut self, kind: MemoryKind, bytes: usize) {
        self.current[kind as usize] -= bytes;
    }
}

impl std::fmt::Display for MemoryUse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let parts: Vec<String> = MemoryKind::ALL
            .iter()
            .filter(|k| self.current[**k as usize] > 0)
            .map(|k| format!("{} {}", k.name(), self.current[*k as usize]))
            .collect();
        f.write_str(&if parts.is_empty() { "nothing".to_owned() } else { parts.join(", ") })
    }
}
