//! Counters of the server, in Prometheus' text format.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::error::Rejection;

/// Upper bounds of the histograms' buckets, seconds.
const BUCKETS: [f64; 14] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];

/// Counts since the start.
#[derive(Default)]
pub(crate) struct Metrics {
    /// Responses by path and status.
    responses: Mutex<BTreeMap<(&'static str, u16), u64>>,
    rejected: Mutex<BTreeMap<Rejection, u64>>,
    pub connections: Gauge,
    /// Requests that wait for their first token.
    pub queued: Gauge,
    /// Requests after their first token.
    pub running: Gauge,
    /// Bytes of bodies that are being read, beyond the allowance of each.
    pub body_bytes: Gauge,
    pub prompt_tokens: AtomicU64,
    pub completion_tokens: AtomicU64,
    pub first_token: Histogram,
    pub request: Histogram,
}

/// A number that rises and falls.
#[derive(Default)]
pub(crate) struct Gauge(AtomicI64);

impl Gauge {
    pub(crate) fn add(&self, count: i64) {
        self.0.fetch_add(count, Relaxed);
    }
}

/// Counts of durations by bucket.
#[derive(Default)]
pub(crate) struct Histogram {
    /// One for each of [`BUCKETS`], and one for all above.
    counts: [AtomicU64; BUCKETS.len() + 1],
    microseconds: AtomicU64,
}

impl Histogram {
    pub(crate) fn observe(&self, time: Duration) {
        let seconds = time.as_secs_f64();
        let bucket = BUCKETS.iter().position(|&bound| seconds <= bound).unwrap_or(BUCKETS.len());
        self.counts[bucket].fetch_add(1, Relaxed);
        self.microseconds.fetch_add(u64::try_from(time.as_micros()).unwrap_or(u64::MAX), Relaxed);
    }

    fn write(&self, text: &mut String, name: &str, help: &str) {
        head(text, name, "histogram", help);
        let mut sum = 0;
        for (bound, count) in BUCKETS.iter().map(f64::to_string).chain(["+Inf".to_owned()]).zip(&self.counts)
        {
            sum += count.load(Relaxed);
            line(text, format_args!("{name}_bucket{{le=\"{bound}\"}} {sum}"));
        }
        let seconds = self.microseconds.load(Relaxed) as f64 / 1e6;
        line(text, format_args!("{name}_sum {seconds}"));
        line(text, format_args!("{name}_count {sum}"));
    }
}

impl Metrics {
    /// Counts a response.
    pub(crate) fn responded(&self, path: &'static str, status: u16) {
        let mut responses = self.responses.lock().unwrap_or_else(PoisonError::into_inner);
        *responses.entry((path, status)).or_default() += 1;
    }

    /// Counts a refused request or connection.
    pub(crate) fn rejected(&self, reason: Rejection) {
        *self.rejected.lock().unwrap_or_else(PoisonError::into_inner).entry(reason).or_default() += 1;
    }

    /// Returns the number of requests that wait or run.
    pub(crate) fn under_way(&self) -> i64 {
        self.queued.0.load(Relaxed) + self.running.0.load(Relaxed)
    }

    /// Returns everything in Prometheus' text format.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        head(&mut text, "tandem_requests_total", "counter", "Responses by path and status.");
        for ((path, status), count) in &*self.responses.lock().unwrap_or_else(PoisonError::into_inner) {
            line(
                &mut text,
                format_args!("tandem_requests_total{{path=\"{path}\",status=\"{status}\"}} {count}"),
            );
        }
        head(&mut text, "tandem_rejected_total", "counter", "Refused requests and connections by reason.");
        for (reason, count) in &*self.rejected.lock().unwrap_or_else(PoisonError::into_inner) {
            line(&mut text, format_args!("tandem_rejected_total{{reason=\"{}\"}} {count}", reason.name()));
        }
        for (name, help, gauge) in [
            ("tandem_connections", "Open connections.", &self.connections),
            ("tandem_requests_queued", "Requests that wait for their first token.", &self.queued),
            ("tandem_requests_running", "Requests after their first token.", &self.running),
            ("tandem_body_bytes", "Bytes of large bodies that are being read.", &self.body_bytes),
        ] {
            head(&mut text, name, "gauge", help);
            line(&mut text, format_args!("{name} {}", gauge.0.load(Relaxed)));
        }
        for (name, help, counter) in [
            ("tandem_prompt_tokens_total", "Tokens of prompts that were accepted.", &self.prompt_tokens),
            ("tandem_completion_tokens_total", "Generated tokens.", &self.completion_tokens),
        ] {
            head(&mut text, name, "counter", help);
            line(&mut text, format_args!("{name} {}", counter.load(Relaxed)));
        }
        let help = "Time from the header of a request to its first token.";
        self.first_token.write(&mut text, "tandem_time_to_first_token_seconds", help);
        let help = "Time from the header of a completion request to its end.";
        self.request.write(&mut text, "tandem_request_duration_seconds", help);
        text
    }
}

fn head(text: &mut String, name: &str, kind: &str, help: &str) {
    line(text, format_args!("# HELP {name} {help}\n# TYPE {name} {kind}"));
}

fn line(text: &mut String, line: std::fmt::Arguments) {
    writeln!(text, "{line}").expect("a string takes everything");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_prometheus_format() {
        let metrics = Metrics::default();
        metrics.responded("/v1/completions", 200);
        metrics.responded("/v1/completions", 200);
        metrics.responded("other", 404);
        metrics.rejected(Rejection::Queue);
        metrics.queued.add(3);
        metrics.queued.add(-1);
        metrics.first_token.observe(Duration::from_millis(20));
        metrics.first_token.observe(Duration::from_millis(25));
        metrics.first_token.observe(Duration::from_secs(1000));
        let text = metrics.text();
        for line in [
            "# TYPE tandem_requests_total counter",
            "tandem_requests_total{path=\"/v1/completions\",status=\"200\"} 2",
            "tandem_requests_total{path=\"other\",status=\"404\"} 1",
            "tandem_rejected_total{reason=\"queue\"} 1",
            "tandem_requests_queued 2",
            "# TYPE tandem_time_to_first_token_seconds histogram",
            "tandem_time_to_first_token_seconds_bucket{le=\"0.01\"} 0",
            "tandem_time_to_first_token_seconds_bucket{le=\"0.025\"} 2",
            "tandem_time_to_first_token_seconds_bucket{le=\"300\"} 2",
            "tandem_time_to_first_token_seconds_bucket{le=\"+Inf\"} 3",
            "tandem_time_to_first_token_seconds_sum 1000.045",
            "tandem_time_to_first_token_seconds_count 3",
            "tandem_request_duration_seconds_count 0",
        ] {
            assert!(text.lines().any(|found| found == line), "no {line:?} in:\n{text}");
        }
        assert!(text.ends_with('\n'));
    }
}
