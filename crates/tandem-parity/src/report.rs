//! Result of each check, printed as it comes.

use std::fmt::Display;

/// Counts and prints results.
#[derive(Debug, Default)]
pub(crate) struct Report {
    passed: usize,
    failed: Vec<String>,
    not_implemented: usize,
}

impl Report {
    /// Records a measured error against its tolerance. NaN fails.
    pub(crate) fn within(&mut self, name: impl Display, error: f64, allowed: f64) {
        self.outcome(&name, error <= allowed, format_args!("error {error:.2e}, allowed {allowed:.0e}"));
    }

    /// Records an exact comparison; `found` states the difference.
    pub(crate) fn same(&mut self, name: impl Display, found: Result<(), String>) {
        match found {
            Ok(()) => self.outcome(&name, true, "identical"),
            Err(difference) => self.outcome(&name, false, difference),
        }
    }

    /// Records a check that stopped with an error.
    pub(crate) fn broken(&mut self, name: impl Display, error: impl Display) {
        self.outcome(&name, false, error);
    }

    /// Prints a number without judging it.
    pub(crate) fn note(&self, name: impl Display, text: impl Display) {
        println!("note  {name}: {text}");
    }

    /// Records numbers of a feature that Tandem lacks.
    pub(crate) fn not_implemented(&mut self, name: impl Display, why: impl Display) {
        self.not_implemented += 1;
        println!("todo  {name}: not implemented: {why}");
    }

    fn outcome(&mut self, name: &dyn Display, passed: bool, detail: impl Display) {
        if passed {
            self.passed += 1;
            println!("ok    {name}: {detail}");
        } else {
            self.failed.push(name.to_string());
            println!("FAIL  {name}: {detail}");
        }
    }

    /// Prints the totals and returns whether nothing failed.
    pub(crate) fn finish(self) -> bool {
        for name in &self.failed {
            println!("failed: {name}");
        }
        println!(
            "{} passed, {} failed, {} not implemented",
            self.passed,
            self.failed.len(),
            self.not_implemented
        );
        self.failed.is_empty()
    }
}

/// √Σx².
pub(crate) fn length(values: impl IntoIterator<Item = f64>) -> f64 {
    values.into_iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// Largest |a − b| over two lists, relative to `scale`; infinite if lengths differ or a value is
/// not a number.
pub(crate) fn largest_error(ours: &[f64], theirs: &[f64], scale: f64) -> f64 {
    if ours.len() != theirs.len() {
        return f64::INFINITY;
    }
    let error = |(a, b): (&f64, &f64)| {
        let e = (a - b).abs() / scale;
        if e.is_nan() { f64::INFINITY } else { e }
    };
    ours.iter().zip(theirs).map(error).fold(0.0, f64::max)
}
