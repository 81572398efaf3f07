//! Scores of existing logits, for generation.

use std::ops::Range;

use super::head_blocks::Blocks;
use crate::cpu::head as kernel;
use crate::device::on;
use crate::ops::head::running_numbers;
use crate::ops::{HeadParts, HeadScores, HeadShape, Targets, check};
use crate::{Device, Extent, KernelError, OpCost, Result, Tensor, ViewMut, cuda};

/// Scores existing `logits` `[R,V]` f32 as [`head`](crate::ops::head) does with these
/// [`blocks`](crate::ops::Head::blocks); on a CPU with the same bits, since the strips are the same.
/// Overwrites `logits`.
pub fn score_logits(
    device: &Device,
    mut logits: ViewMut,
    targets: Targets,
    shape: &HeadShape,
    blocks: &[Range<usize>],
    scores: &mut HeadScores,
) -> Result<()> {
    const OP: &str = "score_logits";
    let (rows, vocabulary) = logits.shape();
    check::f32_shape(OP, "logits", &logits, rows, vocabulary)?;
    targets.check(OP, rows, vocabulary)?;
    if let Some(target) = targets.targets.iter().find(|&&target| target as usize >= vocabulary) {
        return Err(KernelError::invalid(
            OP,
            format!("target {target} is outside the vocabulary of {vocabulary}"),
        ));
    }
    let blocks = Blocks::from_ranges(blocks, vocabulary);
    blocks.check(OP, vocabulary)?;
    let mut parts = HeadParts::new(0, blocks.len(), rows, targets.rows.len());
    let mut numbers = running_numbers(device, Extent::exact(rows), targets.rows.len())?;
    let work = OpCost::new(OP, (rows, vocabulary, logits.dtype()), 0.0, check::bytes(&[&logits]));
    let of_parts = &mut parts;
    device.launch(
        work,
        on!(
            cpu => blocks.score(logits.reborrow(), targets, of_parts, |logits, targets, parts| {
                kernel::score(cpu, logits, targets, shape, parts);
                Ok(())
            })?,
            cuda => blocks.score(logits.reborrow(), targets, of_parts, |logits, targets, parts| {
                let numbers = numbers.as_mut().map(Tensor::view_mut);
                cuda::head::score(cuda, logits, targets, shape, parts, numbers)
            })
        ),
    )?;
    parts.join(targets.rows, vocabulary, scores);
    Ok(())
}
