//! How far a rank has come, for whoever asks why it does not come further.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! phases {
    ($($(#[$doc:meta])* $name:ident = $text:literal),* $(,)?) => {
        /// What a rank is busy with.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub enum Phase {
            #[default]
            $($(#[$doc])* $name),*
        }

        impl Phase {
            const ALL: &[Self] = &[$(Self::$name),*];

            /// One word or two.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $text),*
                }
            }
        }
    };
}

phases! {
    /// It has not said anything yet.
    Start = "start",
    /// Makes tokens of the data, or opens those that are there.
    Tokenize = "tokenise",
    /// Waits for the rank that tokenises.
    Wait = "wait for tokens",
    /// Reads weights, or a checkpoint.
    Load = "load",
    /// Computes the reference's log-probabilities, once before training.
    Reference = "reference pass",
    /// Asks the others whether to go on with the next step.
    Agree = "agree on the next step",
    /// Lets the policy answer prompts.
    Generate = "generate",
    /// Waits for what judges say of the answers.
    Judge = "judge",
    /// Computes a micro-batch forward.
    Forward = "forward",
    /// Computes a micro-batch backward.
    Backward = "backward",
    /// Exchanges gradients.
    Reduce = "reduce",
    /// Changes the weights.
    Update = "update",
    /// Scores held-out rows.
    Evaluate = "evaluate",
    /// Writes a checkpoint, or hands over its part of one.
    Save = "save",
    /// Writes the final model, or hands over its part of it.
    Finish = "finish",
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A rank's place in its work: written by the thread that works, read by any. Saying it costs two stores, and nobody waits.
#[derive(Clone, Debug, Default)]
pub struct Progress(Arc<Cells>);

#[derive(Debug, Default)]
struct Cells {
    /// The step, and the phase in the lowest byte.
    place: AtomicU64,
    /// How often something was said: the same phase may come again and again.
    reports: AtomicU64,
}

/// Where a rank is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// The 1-based step that it takes; 0 before the first.
    pub step: u64,
    /// What of it.
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
    /// The 1-based `step` begins, or the rank is about to begin with it.
    pub fn step(&self, step: u64) {
        self.say(Place { step, phase: self.place().phase });
    }

    /// A phase of the step begins.
    pub fn enter(&self, phase: Phase) {
        self.say(Place { phase, ..self.place() });
    }

    fn say(&self, Place { step, phase }: Place) {
        let Cells { place, reports } = &*self.0;
        place.store(step << 8 | phase as u64, Ordering::Relaxed);
        // One thread writes, so this loses nothing.
        reports.store(reports.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    /// Where the rank is.
    pub fn place(&self) -> Place {
        let packed = self.0.place.load(Ordering::Relaxed);
        let phase = Phase::ALL.get((packed & 0xff) as usize).copied().unwrap_or_default();
        Place { step: packed >> 8, phase }
    }

    /// A number that changes whenever the rank says something.
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
            progress.enter(*phase);
            assert_eq!((watched.place().phase, watched.place().step), (*phase, 0));
            assert_ne!(watched.reports(), before);
        }
        progress.step(1 << 40);
        progress.enter(Phase::Reduce);
        assert_eq!(watched.place(), Place { step: 1 << 40, phase: Phase::Reduce });
        assert_eq!(watched.place().to_string(), "at step 1099511627776, in reduce");
        let before = watched.reports();
        progress.enter(Phase::Reduce);
        assert_ne!(watched.reports(), before, "the same phase again is progress too");
    }
}
