//! Meeting of a job's ranks: the wait before a run, which says whom it waits for and ends at a
//! deadline of its own.
//!
//! Ranks start one after another, and names of pods appear late, so a rank waits for minutes. A wrong
//! address looks the same. So a rank that waits says after a few seconds, and then twice a minute,
//! what it waits for.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::error::{CommError, Result};

/// Time after which a wait is first reported.
const FIRST_REPORT: Duration = Duration::from_secs(5);
/// Interval of later reports.
const REPORTS: Duration = Duration::from_secs(30);
/// Longest time without a look at the stop flag.
const LOOK: Duration = Duration::from_millis(200);

/// A rank's wait for the others.
pub struct Meeting<'a> {
    began: Instant,
    deadline: Duration,
    stop: Option<&'a AtomicBool>,
    report: Option<&'a mut dyn FnMut(&str)>,
    next_report: Duration,
}

impl Meeting<'static> {
    /// Begins a meeting that says nothing and ends at its deadline alone.
    pub fn silent(deadline: Duration) -> Self {
        Self { began: Instant::now(), deadline, stop: None, report: None, next_report: FIRST_REPORT }
    }
}

impl<'a> Meeting<'a> {
    /// Begins a meeting that fails after `deadline`, or when `stop` is set. `report` receives what the
    /// rank waits for.
    pub fn begin(deadline: Duration, stop: &'a AtomicBool, report: &'a mut dyn FnMut(&str)) -> Self {
        Self { stop: Some(stop), report: Some(report), ..Meeting::silent(deadline) }
    }

    /// Returns the time that the meeting may take.
    pub(crate) fn deadline(&self) -> Duration {
        self.deadline
    }

    pub(crate) fn is_overdue(&self) -> bool {
        self.began.elapsed() >= self.deadline
    }

    /// Returns the time to wait before the next [`Meeting::look`].
    pub(crate) fn pause(&self) -> Duration {
        LOOK.min(self.deadline.saturating_sub(self.began.elapsed())).max(Duration::from_millis(1))
    }

    /// Reports what is awaited when it is time to.
    ///
    /// # Errors
    /// If the run was told to stop.
    pub(crate) fn look(&mut self, awaited: impl FnOnce() -> String) -> Result<()> {
        if self.stop.is_some_and(|stop| stop.load(Ordering::Relaxed)) {
            return Err(CommError::Stopped { awaited: awaited() });
        }
        let waited = self.began.elapsed();
        if waited >= self.next_report
            && let Some(report) = &mut self.report
        {
            report(&format!(
                "waiting for {} ({} s of at most {} s)",
                awaited(),
                waited.as_secs(),
                self.deadline.as_secs()
            ));
            self.next_report = waited + REPORTS;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_meeting_ends_at_a_signal_and_says_what_it_waited_for() {
        let (stop, mut lines) = (AtomicBool::new(false), Vec::new());
        let mut report = |line: &str| lines.push(line.to_owned());
        let mut meeting = Meeting::begin(Duration::from_secs(60), &stop, &mut report);
        assert_eq!(meeting.look(|| unreachable!("nothing is reported at once")), Ok(()));
        meeting.next_report = Duration::ZERO;
        meeting.look(|| "rank 3".to_owned()).unwrap();
        meeting.look(|| unreachable!("it was just reported")).unwrap();
        stop.store(true, Ordering::Relaxed);
        let stopped = CommError::Stopped { awaited: "rank 3".to_owned() };
        assert_eq!(meeting.look(|| "rank 3".to_owned()), Err(stopped));
        assert_eq!(lines, ["waiting for rank 3 (0 s of at most 60 s)"]);
    }
}
