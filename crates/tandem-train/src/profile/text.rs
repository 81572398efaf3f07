//! A profile as a table.

use std::fmt::{Display, Formatter, Result};

use super::report::{Memory, Phase, Report, Row};
use crate::plan::estimate::Machine;
use crate::size;

/// Columns: names, then numbers.
const HEADER: &str = "                                        calls         ms   share            rate        roofline  reached";

impl Display for Report {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let Self { rank, machine, steps, ms, .. } = self;
        let Machine { num_ranks, threads, instructions, f32_peak, bf16_peak, copy_rate, .. } = machine;
        let (first, last) = (steps.first().map_or(0, |step| step.0), steps.last().map_or(0, |step| step.0));
        let times = steps.iter().map(|step| step.1);
        let (least, most) = (times.clone().fold(f64::MAX, f64::min), times.fold(0.0, f64::max));
        writeln!(
            f,
            "rank {rank} of {num_ranks}, steps {first} to {last}: {ms:.2} ms a step ({least:.2} to {most:.2}); all numbers are means over \
             these steps"
        )?;
        writeln!(
            f,
            "{threads} {}, {instructions}: products up to {} f32 and {} bf16, copies {}",
            if *threads == 1 { "thread" } else { "threads" },
            arithmetic(*f32_peak),
            arithmetic(*bf16_peak),
            memory(*copy_rate)
        )?;
        writeln!(f, "\n{HEADER}")?;
        for Phase { name, ms, rows, outside_ms } in &self.phases {
            self.line(f, name, *ms)?;
            self.rows(f, rows)?;
            if !rows.is_empty() {
                self.line(f, "  outside operations", *outside_ms)?;
            }
        }
        self.line(f, "the step", self.ms)?;
        self.rows(f, &self.operations)?;
        self.line(f, "  outside operations", self.outside_ms)?;
        for thread in &self.beside {
            writeln!(f, "beside it, on thread {:?}", thread.thread)?;
            self.rows(f, &thread.rows)?;
        }
        writeln!(
            f,
            "\nat the peak of its types the arithmetic of a step takes {:.2} ms, {:.1} % of it",
            self.arithmetic_ms,
            100.0 * self.arithmetic_ms / self.ms
        )?;
        let launches: f64 = self.operations.iter().map(|row| row.launches).sum();
        if launches > 0.0 {
            writeln!(f, "a step puts {launches:.0} kernels, matmuls and copies into the GPU's stream")?;
        }
        let Memory { allocations, bytes, high_water, rise } = self.memory;
        writeln!(
            f,
            "arena: {allocations} allocations a step of {} in all, given back again; high water {}, which rose by {} in these \
             steps",
            size::in_words(bytes),
            size::in_words(high_water),
            size::in_words(rise)
        )?;
        if self.lost > 0 {
            writeln!(f, "there was no room to record {} events: what they took is missing above", self.lost)?;
        }
        Ok(())
    }
}

impl Report {
    fn line(&self, f: &mut Formatter<'_>, name: &str, ms: f64) -> Result {
        writeln!(f, "{name:<36}{:>20.2}{:>6.1} %", ms, 100.0 * ms / self.ms)
    }

    fn rows(&self, f: &mut Formatter<'_>, rows: &[Row]) -> Result {
        for row in rows {
            let Row { name, calls, ms, .. } = row;
            write!(f, "  {name:<34}{calls:>9.1}{ms:>11.2}{:>6.1} %", 100.0 * ms / self.ms)?;
            match row.rates() {
                Some((rate, Some(roofline))) => {
                    let reached = format!("{:.0} %", 100.0 * rate.0 / roofline.0);
                    writeln!(f, "{:>16}{:>16}{reached:>9}", rate.to_string(), roofline.to_string())?;
                }
                Some((rate, None)) => writeln!(f, "{:>16}", rate.to_string())?,
                None => writeln!(f)?,
            }
        }
        Ok(())
    }
}

/// Formats operations or bytes per second.
struct Rate(f64, bool);

impl Display for Rate {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.pad(&if self.1 { arithmetic(self.0) } else { memory(self.0) })
    }
}

impl Row {
    /// Achieved rate and peak of the bounding resource; nothing without arithmetic or traffic.
    fn rates(&self) -> Option<(Rate, Option<Rate>)> {
        let amount = if self.is_arithmetic { self.flops } else { self.bytes };
        let rate = |ms: f64| Rate(amount / ms * 1e3, self.is_arithmetic);
        (amount > 0.0 && self.ms > 0.0).then(|| (rate(self.ms), self.best_ms.map(rate)))
    }
}

fn arithmetic(rate: f64) -> String {
    format!("{:.1} GFLOP/s", rate / 1e9)
}

fn memory(rate: f64) -> String {
    format!("{:.2} GB/s", rate / 1e9)
}
