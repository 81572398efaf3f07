//! Progress of a rank, for reports of slow or hanging ranks.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! phases {
    ($($(#[$doc:meta])* $name:ident = $text:literal),* $(,)?) => {
        /// Activity of a rank.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub enum Phase {
            #[default]
            $($(#[$doc])* $name),*
        }

        impl Phase {
            const ALL: &[Self] = &[$(Self::$name),*];

            /// Returns the phase in words.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $text),*
                }
            }
        }
    };
}

phases! {
    /// Before the first report.
    Start = "start",
    /// Tokenising the data, or opening its cache.
    Tokenize = "tokenise",
    /// Waiting for the rank that tokenises.
    Wait = "wait for tokens",
    /// Reading weights or a checkpoint.
    Load = "load",
    /// Computing the reference's log-probabilities, once before training.
    Reference = "reference pass",
    /// Agreeing with other ranks whether to take the next step.
    Agree = "agree on the next step",
    /// Generating completions.
    Generate = "generate",
    /// Waiting for judges.
    Judge = "judge",
    /// Forward pass of a micro-batch.
    Forward = "forward",
    /// Backward pass of a micro-batch.
    Backward = "backward",
    /// Exchanging gradients.
    Reduce = "reduce",
    /// Optimizer step.
    Update = "update",
    /// Evaluating held-out rows.
    Evaluate = "evaluate",
    /// Writing this rank's part of a checkpoint.
    Save = "save",
    /// Writing this rank's part of the final model.
    Finish = "finish",
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A rank's place in its work, written by its working thread and read by any. A report costs two
/// stores and never blocks.
#[derive(Clone, Debug, Default)]
pub struct Progress(Arc<Cells>);

#[derive(Debug, Default)]
struct Cells {
    /// Step and, in the lowest byte, phase.
    place: AtomicU64,
    /// Number of reports; a phase may repeat.
    reports: AtomicU64,
}

/// Place of a rank in its work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// 1-based current step; 0 before the first.
    pub step: u64,
    /// Current phase.
    pub phase: Phase,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.step {
            0 => write!(f, "before the first step, in {}", self.phase),
            step => write!(f, "at step {step}, in {}", self.phase),
        }
    }
}

impl Progress {
    /// Reports the begin of the 1-based `step`.
    pub fn step(&self, step: u64) {
        self.say(Place { step, phase: self.place().phase });
    }

    /// Reports the begin of a phase.
    pub fn begin_phase(&self, phase: Phase) {
        self.say(Place { phase, ..self.place() });
    }

    fn say(&self, Place { step, phase }: Place) {
        let Cells { place, reports } = &*self.0;
        place.store(step << 8 | phase as u64, Ordering::Relaxed);
        // Only one thread writes, so no increment is lost.
        reports.store(reports.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    /// Returns the rank's place.
    pub fn place(&self) -> Place {
        let packed = self.0.place.load(Ordering::Relaxed);
        let phase = Phase::ALL.get((packed & 0xff) as usize).copied().unwrap_or_default();
        Place { step: packed >> 8, phase }
    }

    /// Returns a number that changes with every report.
    pub fn reports(&self) -> u64 {
        self.0.reports.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_read_elsewhere() {
        let progress = Progress::default();
        let watched = progress.clone();
        assert_eq!(watched.place().to_string(), "before the first step, in start");
        for phase in Phase::ALL {
            let before = watched.reports();
            progress.begin_phase(*phase);
            assert_eq!((watched.place().phase, watched.place().step), (*phase, 0));
            assert_ne!(watched.reports(), before);
        }
        progress.step(1 << 40);
        progress.begin_phase(Phase::Reduce);
        assert_eq!(watched.place(), Place { step: 1 << 40, phase: Phase::Reduce });
        assert_eq!(watched.place().to_string(), "at step 1099511627776, in reduce");
        let before = watched.reports();
        progress.begin_phase(Phase::Reduce);
        assert_ne!(watched.reports(), before, "the same phase again is progress too");
    }
}
