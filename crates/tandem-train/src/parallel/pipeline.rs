//! Pipeline schedule: one forward, one backward (1F1B).
//!
//! A stage starts with one forward pass per later stage, then alternates forward and backward of
//! the oldest micro-batch. Saved activations are therefore bounded by the number of stages. With
//! `m` micro-batches and `p` stages, a stage idles for `(p − 1) / (m + p − 1)` of the time.

use tandem_model::PipelineStage;

/// Next action of a stage and its micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PipelineAction {
    /// Takes the stream from the stage before, if there is one, and gives the next one its own.
    Forward(usize),
    /// Takes the gradient from the stage after, if there is one, and gives the one before its own.
    Backward(usize),
}

/// Schedule of a stage for one step. A single stage computes micro-batches one after another.
pub(crate) fn schedule_1f1b(
    stage: PipelineStage,
    num_micro_batches: usize,
) -> impl Iterator<Item = PipelineAction> {
    let ahead = most_under_way(stage, num_micro_batches);
    (0..2 * num_micro_batches).map(move |turn| {
        // The first `ahead` turns go forward, the last `ahead` back; between them back and forth,
        // beginning with back.
        let Some(after) = turn.checked_sub(ahead) else { return PipelineAction::Forward(turn) };
        if after >= 2 * (num_micro_batches - ahead) {
            PipelineAction::Backward(turn - num_micro_batches)
        } else if after.is_multiple_of(2) {
            PipelineAction::Backward(after / 2)
        } else {
            PipelineAction::Forward(ahead + after / 2)
        }
    })
}

/// Most micro-batches with saved activations at a time.
pub(crate) fn most_under_way(stage: PipelineStage, num_micro_batches: usize) -> usize {
    (stage.count - stage.index).min(num_micro_batches)
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    #[test]
    fn one_stage_goes_back_with_each_micro_batch_at_once() {
        let found: Vec<_> = schedule_1f1b(PipelineStage::WHOLE, 2).collect();
        assert_eq!(
            found,
            [
                PipelineAction::Forward(0),
                PipelineAction::Backward(0),
                PipelineAction::Forward(1),
                PipelineAction::Backward(1)
            ]
        );
        let found: Vec<_> = schedule_1f1b(PipelineStage { index: 1, count: 3 }, 3).collect();
        let (f, b) = (PipelineAction::Forward, PipelineAction::Backward);
        assert_eq!(found, [f(0), f(1), b(0), f(2), b(1), b(2)]);
    }

    #[test]
    fn each_micro_batch_goes_forward_and_back_once_in_order_and_few_are_under_way() {
        for count in 1..=6 {
            for index in 0..count {
                for num in 0..=9 {
                    let stage = PipelineStage { index, count };
                    let (mut forward, mut backward, mut most) = (0, 0, 0);
                    for turn in schedule_1f1b(stage, num) {
                        let (found, expected) = match turn {
                            PipelineAction::Forward(n) => (n, &mut forward),
                            PipelineAction::Backward(n) => (n, &mut backward),
                        };
                        assert_eq!(found, *expected, "{turn:?} is out of order");
                        *expected += 1;
                        assert!(backward <= forward, "nothing goes back before it went forward");
                        most = most.max(forward - backward);
                    }
                    assert_eq!((forward, backward), (num, num));
                    assert_eq!(most, most_under_way(stage, num), "{stage:?}, {num} micro-batches");
                }
            }
        }
    }

    /// Simulated time of a schedule; `None` if it deadlocks. A message waits until the previous one
    /// of its sender is received, the least that engines allow. Computing takes one unit; its
    /// output can be received in the next. A forward action computes and sends `models` times.
    fn simulate(
        count: usize,
        num: usize,
        models: usize,
        computes: impl Fn(PipelineAction) -> bool,
    ) -> Option<usize> {
        #[derive(Clone, Copy, PartialEq)]
        enum Do {
            Recv(usize),
            Compute,
            Send(usize),
        }
        let program = |index: usize| {
            let mut program = VecDeque::new();
            for turn in schedule_1f1b(PipelineStage { index, count }, num).filter(|&turn| computes(turn)) {
                let (below, above) = (index.checked_sub(1), Some(index + 1).filter(|&n| n < count));
                let (from, to, times) = match turn {
                    PipelineAction::Forward(_) => (below, above, models),
                    PipelineAction::Backward(_) => (above, below, 1),
                };
                for _ in 0..times {
                    program.extend(from.map(Do::Recv));
                    program.push_back(Do::Compute);
                    program.extend(to.map(Do::Send));
                }
            }
            program
        };
        let mut programs: Vec<_> = (0..count).map(program).collect();
        // Messages in flight with their start, and stages that computed in this unit.
        let mut under_way: Vec<Option<(usize, usize)>> = vec![None; count];
        let mut busy = vec![false; count];
        let mut time = 0;
        while programs.iter().any(|program| !program.is_empty()) {
            let mut moved = false;
            for index in 0..count {
                let can = match programs[index].front() {
                    None => false,
                    Some(&Do::Recv(from)) => {
                        under_way[from].is_some_and(|(to, since)| to == index && since < time)
                    }
                    Some(&Do::Compute) => !busy[index],
                    Some(&Do::Send(_)) => under_way[index].is_none(),
                };
                if !can {
                    continue;
                }
                moved = true;
                match programs[index].pop_front() {
                    Some(Do::Recv(from)) => under_way[from] = None,
                    Some(Do::Send(to)) => under_way[index] = Some((to, time)),
                    _ => busy[index] = true,
                }
            }
            if !moved {
                let is_new = under_way.iter().flatten().any(|&(_, since)| since == time);
                if !busy.contains(&true) && !is_new {
                    return None;
                }
                busy.fill(false);
                time += 1;
            }
        }
        Some(time + 1)
    }

    #[test]
    fn stages_never_wait_for_each_other_in_a_circle() {
        for count in 1..=8 {
            for num in 1..=12 {
                // The policy alone, or after a reference model; evaluation goes forward alone.
                for models in [1, 2] {
                    let is_forward = |turn| matches!(turn, PipelineAction::Forward(_));
                    for time in
                        [simulate(count, num, models, |_| true), simulate(count, num, models, is_forward)]
                    {
                        assert!(time.is_some(), "{num} micro-batches over {count} stages are stuck");
                    }
                }
            }
        }
    }

    #[test]
    fn two_stages_are_idle_for_the_bubble_alone() {
        for num in 1..=6 {
            // Forward and backward of each micro-batch, and those of one more on the other stage.
            assert_eq!(simulate(2, num, 1, |_| true), Some(2 * (num + 1)), "{num} micro-batches");
        }
    }
}
