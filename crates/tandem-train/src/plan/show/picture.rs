//! A plan as bars for a terminal: a bar a phase, cut into the kinds of memory at its fullest
//! moment.

use std::fmt::Write;

use tandem_kernels::MemoryKind;

use crate::plan::show::text::rank_names;
use crate::plan::{Plan, RunPlan};
use crate::size::in_words;

/// Columns of the longest bar.
const WIDTH: usize = 60;

/// How a kind is filled where there are no colours, and its colour among a terminal's 256; in the
/// order of [`MemoryKind::ALL`], and from the beginning again if there are more.
const FILLS: [(char, u8); 11] = [
    ('█', 25),
    ('▓', 39),
    ('◧', 45),
    ('▒', 208),
    ('▚', 129),
    ('░', 71),
    ('▤', 226),
    ('▥', 197),
    ('▨', 244),
    ('▦', 94),
    ('·', 250),
];

/// The fill of a kind, and its colour.
pub(crate) fn fill(kind: MemoryKind) -> (char, u8) {
    FILLS[kind as usize % FILLS.len()]
}

impl RunPlan {
    /// Draws the bars of all ranks with a legend. Memory beyond the limit follows a `│`.
    pub fn picture(&self, colour: bool) -> String {
        let limit = self.fit().limit.map(|limit| limit as usize);
        let largest = self.fullest().phases.iter().map(|phase| phase.memory.peak).max().unwrap_or(0);
        // A limit that is far away would leave no room for the bars.
        let shown = limit.filter(|&limit| limit < 3 * largest);
        let scale = shown.unwrap_or(0).max(largest).max(1);
        let mut text = String::new();
        for (ranks, plan) in &self.ranks {
            if self.ranks.len() > 1 {
                let _ = writeln!(text, "{}", rank_names(ranks));
            }
            text += &bars(plan, scale, shown, colour);
        }
        let mut kinds: Vec<_> = self.ranks.iter().flat_map(|(_, plan)| plan.kinds()).collect();
        kinds.sort();
        kinds.dedup();
        text += "          ";
        for kind in kinds {
            let _ = write!(text, " {} {} ", painted(kind, 1, colour), kind.name());
        }
        if let Some(limit) = shown {
            let _ = write!(text, " │ {}", in_words(limit as u64));
        }
        text.truncate(text.trim_end().len());
        text
    }
}

fn bars(plan: &Plan, scale: usize, limit: Option<usize>, colour: bool) -> String {
    let mut text = String::new();
    let place = |bytes: usize| (bytes * WIDTH + scale / 2) / scale;
    for phase in &plan.phases {
        let _ = write!(text, "{:<10}", phase.name);
        let (mut sum, mut drawn) = (0, 0);
        for kind in MemoryKind::ALL {
            sum += phase.memory.at_peak[kind as usize];
            // The limit takes a column of its own.
            let end = place(sum);
            if let Some(limit) = limit.map(place).filter(|limit| (drawn..end).contains(limit)) {
                text += &painted(kind, limit - drawn, colour);
                text.push('│');
                text += &painted(kind, end - limit, colour);
            } else {
                text += &painted(kind, end - drawn, colour);
            }
            drawn = end;
        }
        let after = match limit.map(place) {
            Some(limit) if limit >= drawn => format!("{}│", " ".repeat(limit - drawn)),
            _ => String::new(),
        };
        let rest = WIDTH.saturating_sub(drawn + after.chars().count());
        let _ = writeln!(
            text,
            "{after}{} {:>10}  {}",
            " ".repeat(rest),
            in_words(phase.memory.peak as u64),
            phase.in_words()
        );
    }
    text
}

fn painted(kind: MemoryKind, columns: usize, colour: bool) -> String {
    let (character, number) = fill(kind);
    if columns == 0 {
        String::new()
    } else if colour {
        format!("\x1b[38;5;{number}m{}\x1b[0m", "█".repeat(columns))
    } else {
        character.to_string().repeat(columns)
    }
}
