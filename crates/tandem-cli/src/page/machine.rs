//! Memory of this machine over the last minutes.

use std::collections::VecDeque;
use std::fs;
use std::time::Instant;

use tandem_train::size::{self, in_words};

use super::chart::{Line, draw};
use super::curve::Point;
use super::figure;
use super::metric::Unit;

/// Most measurements that are kept: ten minutes, at one in two seconds.
const KEPT: usize = 300;

/// Measurements of this machine's memory.
pub(crate) struct Machine {
    began: Instant,
    /// Seconds and used bytes.
    used: VecDeque<Point>,
    total: f64,
}

impl Machine {
    /// Starts without measurements.
    pub(crate) fn new() -> Self {
        Self { began: Instant::now(), used: VecDeque::new(), total: 0.0 }
    }

    /// Measures once. Other systems than Linux have no such file, and no picture.
    pub(crate) fn measure(&mut self) {
        let Some([total, available]) = fs::read_to_string("/proc/meminfo").ok().as_deref().and_then(read)
        else {
            return;
        };
        self.total = total;
        self.used.push_back((self.began.elapsed().as_secs_f64(), total - available));
        if self.used.len() > KEPT {
            self.used.pop_front();
        }
    }

    /// Draws the measurements over the minutes before now.
    pub(super) fn picture(&self) -> Option<String> {
        let (now, used) = *self.used.back()?;
        let minutes: Vec<Point> = self.used.iter().map(|(at, used)| ((at - now) / 60.0, *used)).collect();
        let picture = draw(&[Line { run: None, is_eval: false, points: &minutes }], Unit::Bytes)?;
        let meaning =
            format!("{} of {} used, by minutes", in_words(used as u64), in_words(self.total as u64));
        Some(figure("this machine", &meaning, &picture))
    }
}

/// Reads total and available bytes.
fn read(text: &str) -> Option<[f64; 2]> {
    let field = |name| size::of_proc_line(text, name).map(|bytes| bytes as f64);
    Some([field("MemTotal")?, field("MemAvailable")?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_in_bytes() {
        let text = "MemTotal:       16384 kB\nMemFree:  1 kB\nMemAvailable:    1024 kB\n";
        assert_eq!(read(text), Some([16384.0 * 1024.0, 1024.0 * 1024.0]));
        assert_eq!(read("MemTotal: 5 kB"), None);
    }
}
