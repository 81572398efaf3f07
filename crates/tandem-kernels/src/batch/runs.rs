//! Rows as layers with a state read them: runs of consecutive tokens, each after another run, a kept
//! state, or nothing.

use std::ops::Range;

use crate::{Forest, KernelError, Result};

/// Predecessor of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    /// A text begins.
    Nothing,
    /// An earlier run of the same call.
    Run(u32),
    /// The text whose state is kept in this slot.
    Slot(u32),
}

/// Consecutive tokens of one text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// Rows of the token axis; not empty.
    pub rows: Range<u32>,
    /// Predecessor.
    pub after: After,
    /// Slot in which the state after the last token is kept. No two runs keep in one slot.
    pub keep: Option<u32>,
}

/// All runs of a call; they cover the rows in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Runs {
    runs: Vec<Run>,
}

/// Row of a tap where there is no token.
pub(crate) const NO_TAP: u32 = u32::MAX;

impl Runs {
    /// Checks that runs cover rows without gaps, and continue earlier ones.
    ///
    /// # Errors
    /// If a run is empty or starts elsewhere than the one before ends, continues itself or a later
    /// one, or a run keeps its state in a slot that another run keeps or continues.
    pub fn new(runs: Vec<Run>) -> Result<Self> {
        let invalid = |reason: String| Err(KernelError::invalid("runs", reason));
        let mut next = 0;
        for (index, Run { rows, after, .. }) in runs.iter().enumerate() {
            if rows.start != next || rows.is_empty() {
                return invalid(format!("run {index} covers {rows:?}; the next row is {next}"));
            }
            if matches!(after, After::Run(run) if *run as usize >= index) {
                return invalid(format!("run {index} continues {after:?}, which does not precede it"));
            }
            next = rows.end;
        }
        let mut kept: Vec<u32> = runs.iter().filter_map(|run| run.keep).collect();
        kept.sort_unstable();
        if let Some(pair) = kept.windows(2).find(|pair| pair[0] == pair[1]) {
            return invalid(format!("two runs keep their states in slot {}", pair[0]));
        }
        for (index, run) in runs.iter().enumerate() {
            let After::Slot(slot) = run.after else { continue };
            if kept.binary_search(&slot).is_ok() && run.keep != Some(slot) {
                return invalid(format!(
                    "run {index} continues slot {slot}, in which another run keeps its state"
                ));
            }
        }
        Ok(Self { runs })
    }

    /// Makes the runs of a forest: its segments.
    pub fn of_forest(forest: &Forest) -> Self {
        let run = |segment: &crate::Segment| Run {
            rows: segment.range.clone(),
            after: segment.parent.map_or(After::Nothing, After::Run),
            keep: None,
        };
        Self { runs: forest.segments.iter().map(run).collect() }
    }

    /// Returns the runs, in the order of rows.
    pub fn as_slice(&self) -> &[Run] {
        &self.runs
    }

    /// Returns the number of rows.
    pub fn num_rows(&self) -> usize {
        self.runs.last().map_or(0, |run| run.rows.end as usize)
    }

    /// Returns the slots that the runs need: one more than the largest.
    pub(crate) fn num_slots(&self) -> usize {
        let read = self.runs.iter().filter_map(|run| match run.after {
            After::Slot(slot) => Some(slot),
            _ => None,
        });
        let kept = self.runs.iter().filter_map(|run| run.keep);
        read.chain(kept).max().map_or(0, |slot| slot as usize + 1)
    }

    /// Lists the runs that continue one another, by the first of each list; lists and their runs are in
    /// order.
    pub(crate) fn groups(&self) -> Vec<Vec<usize>> {
        let mut groups: Vec<Vec<usize>> = Vec::new();
        let mut group_of = Vec::with_capacity(self.runs.len());
        for (index, run) in self.runs.iter().enumerate() {
            let group = match run.after {
                After::Run(before) => group_of[before as usize],
                After::Nothing | After::Slot(_) => {
                    groups.push(Vec::new());
                    groups.len() - 1
                }
            };
            groups[group].push(index);
            group_of.push(group);
        }
        groups
    }

    /// Returns for each row the `width` rows that a causal convolution reads, oldest first, itself
    /// last: `[rows, width]`. Number `rows + s·(width − 1) + j` means row j of slot s's history, and
    /// [`NO_TAP`] that the text has not begun.
    pub(crate) fn taps(&self, width: usize) -> Vec<u32> {
        let (rows, history) = (self.num_rows(), width - 1);
        let mut taps = vec![NO_TAP; rows * width];
        for run in &self.runs {
            let mut window = vec![NO_TAP; width];
            match run.after {
                After::Nothing => {}
                After::Run(before) => {
                    let last = self.runs[before as usize].rows.end as usize - 1;
                    window.copy_from_slice(&taps[last * width..(last + 1) * width]);
                }
                After::Slot(slot) => {
                    let first = rows + slot as usize * history;
                    window[1..].iter_mut().zip(first..).for_each(|(tap, row)| *tap = row as u32);
                }
            }
            for row in run.rows.clone() {
                window.rotate_left(1);
                window[history] = row;
                taps[row as usize * width..][..width].copy_from_slice(&window);
            }
        }
        taps
    }
}

/// Lists the readers of each row among the taps `[rows, width]` of [`Runs::taps`], as (row, tap) in the
/// order of readers, and where each row's start; no tap reads a slot.
pub(crate) fn readers(taps: &[u32], rows: usize, width: usize) -> (Vec<u32>, Vec<[u32; 2]>) {
    let mut starts = vec![0u32; rows + 1];
    taps.iter().filter(|&&tap| tap != NO_TAP).for_each(|&tap| starts[tap as usize + 1] += 1);
    for row in 0..rows {
        starts[row + 1] += starts[row];
    }
    let mut readers = vec![[0u32; 2]; starts[rows] as usize];
    let mut next = starts.clone();
    for (index, &tap) in taps.iter().enumerate().filter(|(_, tap)| **tap != NO_TAP) {
        let place = &mut next[tap as usize];
        readers[*place as usize] = [(index / width) as u32, (index % width) as u32];
        *place += 1;
    }
    (starts, readers)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(rows: Range<u32>, after: After) -> Run {
        Run { rows, after, keep: None }
    }

    #[test]
    fn taps_follow_a_text_through_runs_and_slots() {
        let runs = vec![
            run(0..2, After::Nothing),
            run(2..3, After::Run(0)),
            run(3..5, After::Run(0)),
            run(5..6, After::Slot(1)),
        ];
        let runs = Runs::new(runs).unwrap();
        const N: u32 = NO_TAP;
        #[rustfmt::skip]
        assert_eq!(runs.taps(3), [N, N, 0, N, 0, 1, 0, 1, 2, 0, 1, 3, 1, 3, 4, 8, 9, 5]);
        assert_eq!(runs.taps(1), [0, 1, 2, 3, 4, 5]);
        assert_eq!(runs.groups(), [vec![0, 1, 2], vec![3]]);
        assert_eq!((runs.num_rows(), runs.num_slots()), (6, 2));
    }

    #[test]
    fn bad_runs_are_refused() {
        let error = |runs| Runs::new(runs).unwrap_err().to_string();
        assert!(error(vec![run(1..2, After::Nothing)]).contains("the next row is 0"));
        assert!(error(vec![run(0..0, After::Nothing)]).contains("covers 0..0"));
        assert!(error(vec![run(0..1, After::Run(0))]).contains("does not precede"));
        let keep = |rows| Run { keep: Some(3), ..run(rows, After::Nothing) };
        assert!(error(vec![keep(0..1), keep(1..2)]).contains("slot 3"));
        assert!(error(vec![keep(0..1), run(1..2, After::Slot(3))]).contains("run 1 continues slot 3"));
    }
}
