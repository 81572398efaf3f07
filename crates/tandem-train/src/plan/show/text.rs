//! A plan in words and tables.

use std::fmt::{self, Display, Formatter, Write};

use tandem_kernels::MemoryKind;

use crate::plan::advise::advice::Advice;
use crate::plan::advise::change::{as_flags, as_toml};
use crate::plan::advise::search::Found;
use crate::plan::work::Topology;
use crate::plan::{Plan, RunPlan};
use crate::size::in_words;

impl Display for Plan {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.headline())?;
        f.write_str(&self.table())
    }
}

impl Plan {
    /// The model, the data and the ranks.
    pub fn headline(&self) -> String {
        let Self { data, .. } = self;
        let trained = match (self.num_frozen, grouped(self.num_trained)) {
            (0, all) => format!("{all} parameters train, none are frozen"),
            (frozen, adapter) => format!("{adapter} parameters train, {} are frozen", grouped(frozen)),
        };
        let mut text = format!("{}: {trained}; compute in {}\n", self.model, self.dtype);
        let (tokens, scored) = (grouped(data.max_micro_batch_tokens), grouped(data.max_scored_rows));
        text += &match data.assumed {
            Some(_) => format!(
                "{} in a step; no data yet: micro-batches of {tokens} tokens, {scored} of them scored, are assumed",
                counted(self.batch_size, "row")
            ),
            None => format!(
                "{} of {}; {}, {} held out; micro-batches of up to {tokens} tokens, {scored} of them scored",
                counted(self.steps as usize, "step"),
                counted(self.batch_size, "row"),
                counted(data.train_rows, "training row"),
                grouped(data.eval_rows),
            ),
        };
        if self.ranks > 1 {
            let sent = in_words(self.bytes_sent(None));
            let _ = write!(
                text,
                "\n{} ranks, of which each sends {sent} in a step in which it has one micro-batch; a rank needs:",
                self.ranks
            );
        }
        if self.tensor > 1 {
            let _ = write!(
                text,
                "\n(each {} ranks hold {} in slices; {} of that go between them)",
                self.tensor,
                if self.stage.count > 1 { "one stage" } else { "one model" },
                in_words(self.bytes_sent(Some(Topology::Slices)))
            );
        }
        if self.stage.count > 1 {
            let _ = write!(
                text,
                "\n(stage {} of {}, with blocks {} to {}; {} go to other stages; up to {} under way at once)",
                self.stage.index + 1,
                self.stage.count,
                self.blocks.start,
                self.blocks.end - 1,
                in_words(self.bytes_sent(Some(Topology::Stages))),
                match self.under_way {
                    1 => "1 micro-batch is".to_owned(),
                    n => format!("{n} micro-batches are"),
                }
            );
        }
        text
    }

    /// Bytes by kind and phase, and when each phase is fullest.
    pub fn table(&self) -> String {
        let unit = Unit::new(self.arena_bytes());
        let mut text = String::new();
        let mut row = |name: &str, value: &dyn Fn(&crate::plan::PhasePlan) -> String| {
            let cells = self.phases.iter().map(|phase| format!("{:>12}", value(phase))).collect::<String>();
            let _ = write!(text, "\n{}", format!("{name:<17}{cells}").trim_end());
        };
        row(&format!("{} at the peak", unit.name), &|phase| phase.name.to_owned());
        for kind in self.kinds() {
            row(kind.name(), &|phase| unit.show(phase.memory.at_peak[kind as usize]));
        }
        row("together", &|phase| unit.show(phase.memory.peak));
        row("arena", &|phase| unit.show(phase.high_water));
        for (place, offloaded) in PLACES {
            if self.phases.iter().all(|phase| offloaded(phase).memory.peak == 0) {
                continue;
            }
            row(place, &|_| String::new());
            let is_used = |kind: &MemoryKind| {
                self.phases.iter().any(|phase| offloaded(phase).memory.at_peak[*kind as usize] > 0)
            };
            for kind in MemoryKind::ALL.into_iter().filter(is_used) {
                row(kind.name(), &|phase| unit.show(offloaded(phase).memory.at_peak[kind as usize]));
            }
            row("together", &|phase| unit.show(offloaded(phase).high_water));
        }
        row("GFLOP", &|phase| format!("{:.1}", phase.flops / 1e9));
        text += "\n(arena: with the gaps between tensors, from the run's beginning; GFLOP: of the largest micro-batch)";
        for phase in &self.phases {
            let _ = write!(text, "\n{} is fullest in: {}", phase.name, phase.in_words());
        }
        text
    }

    /// Kinds of memory present at a peak.
    pub fn kinds(&self) -> Vec<MemoryKind> {
        let is_used = |&kind: &MemoryKind| self.phases.iter().any(|p| p.memory.at_peak[kind as usize] > 0);
        MemoryKind::ALL.into_iter().filter(is_used).collect()
    }
}

/// Contents of one memory outside the device in a phase.
type At = fn(&crate::plan::PhasePlan) -> &crate::plan::Offloaded;

/// These memories, as a table calls them.
const PLACES: [(&str, At); 2] =
    [("in host memory:", |phase| &phase.host), ("in the file:", |phase| &phase.file)];

impl crate::plan::PhasePlan {
    /// When it is fullest.
    pub fn in_words(&self) -> String {
        match (&self.moment.place[..], self.moment.operation) {
            ("", operation) => operation.to_owned(),
            (place, "") => place.to_owned(),
            (place, operation) => format!("{place}, {operation}"),
        }
    }
}

impl RunPlan {
    /// Time, messages and whether it fits.
    pub fn verdict(&self) -> String {
        let (plan, estimate, fit) = (self.fullest(), &self.estimate, self.fit());
        let rows = if plan.pairs { "pairs" } else { "rows" };
        let mut text = format!(
            "about {} a step on {} x {}: {} tokens/s, {} {rows}/s, {:.0} % of the product rate that is counted with",
            seconds(estimate.step_seconds),
            plan.ranks,
            self.device.name,
            significant(estimate.tokens_per_second),
            significant(estimate.rows_per_second),
            100.0 * estimate.utilisation
        );
        if plan.phases.iter().any(|phase| phase.name == "generate") {
            text.push_str(
                "\n(training alone, on answers of full length; generating and judging come on top)",
            );
        }
        if plan.ranks > 1 {
            let _ = write!(
                text,
                "\n({} computing, {} waiting for messages, {} for other stages; a rank sends {} in a step)",
                seconds(estimate.compute_seconds),
                seconds(estimate.exchange_seconds),
                seconds(estimate.bubble_seconds),
                in_words(estimate.bytes_sent as u64)
            );
        }
        if let Some(idle) = plan.idle_ranks() {
            let _ = write!(text, "\n{idle}");
        }
        if self.device.is_processor() {
            let outside = in_words(plan.outside as u64);
            let _ = write!(
                text,
                "\nbeside the arena about {outside} a rank: the program, and what products of {} threads pack their factors into",
                plan.threads
            );
            if plan.exchange_buffers > 0 {
                let _ = write!(
                    text,
                    "; {} of it are buffers between processes",
                    in_words(plan.exchange_buffers as u64)
                );
            }
        }
        let needed = in_words(fit.needed);
        let _ = match fit.limit {
            None => write!(text, "\nit needs {needed} a rank; how much there is, is not known"),
            Some(limit) if fit.fits() => {
                let fits = if self.fits() { "it fits" } else { "it would fit the device" };
                write!(text, "\n{fits}: {needed} of {} a rank{}", in_words(limit), self.limited_by())
            }
            Some(limit) => {
                let missing = in_words(fit.needed - limit);
                let limit = in_words(limit);
                write!(
                    text,
                    "\nit does not fit: {needed} of {limit} a rank{}; {missing} are missing",
                    self.limited_by()
                )
            }
        };
        text.extend(self.host_verdict());
        text
    }

    /// A line about host memory, where it matters.
    fn host_verdict(&self) -> Option<String> {
        let host = self.host_fit()?;
        let needed = in_words(host.needed);
        let ranks = match self.ranks_of_box() {
            1 => "of one rank".to_owned(),
            ranks => format!("of {ranks} ranks on a machine"),
        };
        Some(match host.limit {
            None => format!("\nhost memory {ranks}: {needed}; --host-memory says how much there is"),
            Some(limit) if host.fits() => format!("\nhost memory {ranks}: {needed} of {}", in_words(limit)),
            Some(limit) => format!(
                "\nit does not fit: host memory {ranks}: {needed} of {}; {} are missing",
                in_words(limit),
                in_words(host.needed - limit)
            ),
        })
    }

    fn limited_by(&self) -> &'static str {
        if self.cap.is_some() && self.cap == self.fit().limit { " (compute.memory)" } else { "" }
    }
}

impl Display for Advice {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.changes.iter().map(|change| change.name).collect();
        let mut effects: Vec<_> = self.changes.iter().map(|c| c.effect).filter(|e| !e.is_empty()).collect();
        effects.dedup();
        writeln!(f, "the cheapest change with which it fits: {}", names.join("; "))?;
        if !effects.is_empty() {
            writeln!(f, "(this changes the run: {})", effects.join("; "))?;
        }
        let host = match self.plan.fullest().host_bytes() {
            0 => String::new(),
            bytes => format!(", {} of host memory for each", in_words(bytes as u64)),
        };
        writeln!(
            f,
            "it then needs {} a rank{host}, and about {} a step",
            in_words(self.plan.fit().needed),
            seconds(self.plan.estimate.step_seconds)
        )?;
        writeln!(f, "\n{}", as_toml(&self.overrides))?;
        write!(f, "or on the command line: {}", as_flags(&self.overrides))
    }
}

/// The fastest plan of a search, as advice for a config that does not fit.
pub fn best_of(found: &[Found]) -> Option<String> {
    let Found { overrides, plan } = found.first()?;
    let host = plan
        .host_fit()
        .map_or(String::new(), |host| format!(", {} of host memory on a machine", in_words(host.needed)));
    let overrides: Vec<&str> = overrides.iter().map(String::as_str).collect();
    Some(format!(
        "the fastest plan of the search that fits needs {} a rank{host}, and about {} a step\n\n{}\nor on the command line: {}",
        in_words(plan.fit().needed),
        seconds(plan.estimate.step_seconds),
        as_toml(&overrides),
        as_flags(&overrides)
    ))
}

/// The plans of a search, one a line.
pub fn ranking(found: &[Found]) -> String {
    let mut text = format!("{:>12} {:>10} {:>12}  {}", "a step", "tokens/s", "a rank", "what to set");
    for Found { overrides, plan } in found {
        let patch = if overrides.is_empty() { "nothing".to_owned() } else { as_flags(overrides) };
        let _ = write!(
            text,
            "\n{:>12} {:>10} {:>12}  {patch}",
            seconds(plan.estimate.step_seconds),
            significant(plan.estimate.tokens_per_second),
            in_words(plan.fit().needed)
        );
    }
    text
}

struct Unit {
    name: &'static str,
    bytes: f64,
    digits: usize,
}

impl Unit {
    fn new(largest: usize) -> Self {
        if largest >= 16 << 30 {
            Self { name: "GiB", bytes: (1u64 << 30) as f64, digits: 2 }
        } else {
            Self { name: "MiB", bytes: f64::from(1 << 20), digits: 1 }
        }
    }

    fn show(&self, bytes: usize) -> String {
        format!("{:.*}", self.digits, bytes as f64 / self.bytes)
    }
}

/// Runs of ranks that are named one by one.
const NAMED_RUNS: usize = 8;

/// Ranks as people write them: "rank 0", "ranks 0–3, 8"; of very many the first.
pub fn rank_names(ranks: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &rank in ranks {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            _ => runs.push((rank, rank)),
        }
    }
    let run = |(first, last): &(usize, usize)| match last - first {
        0 => first.to_string(),
        1 => format!("{first}, {last}"),
        _ => format!("{first}–{last}"),
    };
    let mut names: Vec<_> = runs.iter().take(NAMED_RUNS).map(run).collect();
    let others: usize = runs.iter().skip(NAMED_RUNS).map(|(first, last)| last - first + 1).sum();
    if others > 0 {
        names.push(format!("and {} others", grouped(others)));
    }
    format!("{} {}", if ranks.len() == 1 { "rank" } else { "ranks" }, names.join(", "))
}

/// "85 ms", "3.2 s", "4 min 10 s".
pub fn seconds(seconds: f64) -> String {
    match seconds {
        s if s < 0.000_05 => "0 s".to_owned(),
        s if s < 0.9995 => format!("{} ms", significant(s * 1000.0)),
        s if s < 120.0 => format!("{s:.1} s"),
        s => format!("{:.0} min {:02.0} s", (s / 60.0).floor(), s % 60.0),
    }
}

/// Three digits.
fn significant(number: f64) -> String {
    match number {
        n if n >= 100.0 => grouped(n.round() as usize),
        n if n >= 10.0 => format!("{n:.1}"),
        n => format!("{n:.2}"),
    }
}

/// A number with its thousands apart.
pub fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A number of things, with the plural's ending if there is not just one.
pub(crate) fn counted(number: usize, thing: &str) -> String {
    let ending = match (number, thing) {
        (1, _) => "",
        (_, "micro-batch") => "es",
        _ => "s",
    };
    format!("{} {thing}{ending}", grouped(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thing_has_no_plural() {
        let words =
            [counted(1, "row"), counted(1200, "row"), counted(1, "micro-batch"), counted(2, "micro-batch")];
        assert_eq!(words, ["1 row", "1,200 rows", "1 micro-batch", "2 micro-batches"]);
    }

    #[test]
    fn ranks_are_named_in_runs() {
        assert_eq!(rank_names(&[3]), "rank 3");
        assert_eq!(rank_names(&[0, 1, 2, 3, 6, 8, 9]), "ranks 0–3, 6, 8, 9");
        let odd: Vec<usize> = (0..1500).map(|rank| 2 * rank + 1).collect();
        assert_eq!(rank_names(&odd), "ranks 1, 3, 5, 7, 9, 11, 13, 15, and 1,492 others");
    }

    #[test]
    fn times_are_told_with_the_digits_that_mean_something() {
        let told = [0.0, 0.0123, 0.5, 3.25, 130.0].map(seconds);
        assert_eq!(told, ["0 s", "12.3 ms", "500 ms", "3.2 s", "2 min 10 s"]);
    }
}
