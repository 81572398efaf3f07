//! Exponential backoff.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use crate::{JudgeError, Result};

/// Interval at which a waiting thread checks `stop`.
pub(crate) const LOOK: Duration = Duration::from_millis(20);

/// Pauses that double.
#[derive(Clone, Copy, Debug)]
pub struct Backoff {
    /// The first pause.
    pub first: Duration,
    /// The maximum pause.
    pub longest: Duration,
}

impl Backoff {
    /// Creates pauses from seconds that are above 0 and below a year.
    pub fn from_seconds(first: f64, longest: f64) -> Self {
        let [first, longest] = [first, longest].map(Duration::from_secs_f64);
        Self { first, longest }
    }

    /// Returns the pause after the `failures`-th failure in a row, from 1.
    pub fn pause(&self, failures: usize) -> Duration {
        let doublings = u32::try_from(failures.saturating_sub(1)).unwrap_or(u32::MAX).min(30);
        self.first.saturating_mul(1 << doublings).min(self.longest)
    }

    /// Returns the pause, shortened at random by up to a half, so that simultaneous failures are
    /// not repeated simultaneously.
    pub fn jittered(&self, failures: usize) -> Duration {
        // The standard library's random keys are its only source of random bits.
        let random = RandomState::new().hash_one(failures) >> 40;
        self.pause(failures).mul_f64(0.5 + 0.5 * random as f64 / (1u64 << 24) as f64)
    }
}

/// Sleeps, unless `stop` is set.
///
/// # Errors
/// It is, or was meanwhile.
pub fn sleep(pause: Duration, stop: &AtomicBool) -> Result<()> {
    let until = Instant::now() + pause;
    loop {
        if stop.load(Ordering::Relaxed) {
            return Err(JudgeError::Stopped);
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        std::thread::sleep(left.min(LOOK));
    }
}

/// Receives a message, unless `stop` is set; nothing if no sender is left.
///
/// # Errors
/// It is set, or was meanwhile.
pub fn receive<T>(messages: &Receiver<T>, stop: &AtomicBool) -> Result<Option<T>> {
    loop {
        if stop.load(Ordering::Relaxed) {
            return Err(JudgeError::Stopped);
        }
        match messages.recv_timeout(LOOK) {
            Ok(message) => return Ok(Some(message)),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Ok(None),
        }
    }
}

/// Returns whether a number of seconds is above 0 and below a year.
pub(crate) fn is_waitable(seconds: f64) -> bool {
    seconds > 0.0 && seconds <= 3e7
}

/// Refuses options that are not above 0 and below a year.
pub(crate) fn check_seconds(judge: &str, options: &[(&'static str, f64)]) -> Result<()> {
    match options.iter().find(|(_, seconds)| !is_waitable(*seconds)) {
        None => Ok(()),
        Some((key, seconds)) => {
            let reason = format!("is {seconds}; it should be a number of seconds above 0");
            Err(JudgeError::option(judge, key, reason))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest() {
        let backoff = Backoff { first: Duration::from_millis(100), longest: Duration::from_secs(1) };
        let pauses: Vec<_> = (1..7).map(|failures| backoff.pause(failures).as_millis()).collect();
        assert_eq!(pauses, [100, 200, 400, 800, 1000, 1000]);
        assert_eq!(backoff.pause(usize::MAX).as_secs(), 1);
    }

    #[test]
    fn jitter_takes_up_to_a_half() {
        let backoff = Backoff { first: Duration::from_secs(1), longest: Duration::from_secs(1) };
        let pauses: Vec<_> = (0..100).map(|_| backoff.jittered(1)).collect();
        assert!(
            pauses.iter().all(|pause| (Duration::from_millis(500)..=Duration::from_secs(1)).contains(pause))
        );
        assert!(pauses.iter().any(|pause| *pause != pauses[0]));
    }
}
