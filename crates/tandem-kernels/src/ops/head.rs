//! The language-model head: log-probabilities and their gradient without holding all logits.
//!
//! Rows are processed in chunks, and each chunk in strips of the vocabulary, both of fixed size.
//! Memory is O(chunk × strip), and logits are still in a cache when they are read. [`head_keeping`]
//! may keep logits within a budget for backward, which then recomputes only the others: one GEMM
//! less, the same bits. Logits are f32, computed from operands of the compute type.

use std::ops::Range;

use super::head_blocks::{Blocks, PartialSums};
use crate::cpu::head as kernel;
use crate::device::{launch_matmuls, on};
use crate::ops::columns::partial_sums;
use crate::ops::{ELSEWHERE, HeadParts, LowRank, PASSED_OVER, check};
use crate::{
    Backend, DType, Device, Extent, KernelError, MemoryKind, OpCost, Result, Tensor, View, ViewMut, cuda,
};

/// Returns the rows per chunk. Every chunk reads all weights and passes over their gradient: more
/// rows pay on a GPU, while a strip of them fits a CPU's cache only if they are few.
pub(super) fn chunk_rows(device: &Device) -> usize {
    match device.backend() {
        Backend::Cpu => 1024,
        Backend::Cuda => 4096,
    }
}

/// Returns the number of rows whose logits are kept if `fitting` rows fit the budget.
fn kept_rows(rows: usize, fitting: usize, chunk: usize) -> usize {
    // Whole chunks only, so that a chunk is contiguous.
    if fitting >= rows { rows } else { fitting / chunk * chunk }
}

/// Returns the width of the buffer for logits of the longest block that are not kept.
fn strip_width(device: &Device, blocks: &Blocks) -> usize {
    strip_of(device, blocks.longest())
}

/// Returns the width of a strip of so many tokens.
pub(super) fn strip_of(device: &Device, vocabulary: usize) -> usize {
    match device.backend() {
        Backend::Cpu => kernel::strip_width(vocabulary),
        Backend::Cuda => cuda::head::strip_width(vocabulary),
    }
}

/// Allocates the statistics of rows and predictions that a GPU updates strip by strip: 72 bytes per
/// row.
pub(super) fn running_numbers(device: &Device, rows: Extent, predictions: usize) -> Result<Option<Tensor>> {
    // The statistics are f64, twice an f32.
    let numbers = |rows, predictions| 2 * HeadParts::num_numbers(rows, predictions);
    // Most rows have one prediction, those before a fork two or more.
    let numbers = Extent::new(numbers(rows.len(), predictions), numbers(rows.room(), 2 * rows.room()));
    let is_gpu = device.backend() == Backend::Cuda;
    is_gpu.then(|| device.alloc_in(MemoryKind::Head, Extent::exact(1), numbers, DType::F32)).transpose()
}

pub(super) fn check_operands(op: &'static str, head: &Head) -> Result<()> {
    let Head { hidden, weights: HeadWeights { weight, bias, low_rank }, targets, .. } = head;
    let (rows, vocabulary) = (hidden.rows(), weight.rows());
    check::shape(op, "weight", weight, vocabulary, hidden.cols())?;
    check::same_type(op, "weight", weight, hidden)?;
    if let Some(bias) = bias {
        check::f32_shape(op, "bias", bias, 1, vocabulary)?;
    }
    if let Some(LowRank { h, b }) = low_rank {
        check::shape(op, "h", h, rows, b.cols())?;
        check::same_type(op, "h", h, hidden)?;
        check::shape(op, "b", b, vocabulary, b.cols())?;
        check::same_type(op, "b", b, hidden)?;
    }
    Blocks::new(head).check(op, vocabulary)?;
    targets.check(op, rows, vocabulary)
}

/// Operands of every pass of the head.
#[derive(Clone, Copy)]
pub struct Head<'a> {
    /// `[R,D]`, f32 or bf16.
    pub hidden: View<'a>,
    /// The weights of V tokens.
    pub weights: HeadWeights<'a>,
    /// The P predictions to score.
    pub targets: Targets<'a>,
    /// Scale and softcap.
    pub shape: HeadShape,
    /// Blocks of the vocabulary, a power of two: each gives a part of the statistics, and the gradient of
    /// the hidden rows is summed over them as in a [`DepthTree`](crate::ops::DepthTree). Empty for one.
    pub blocks: &'a [Range<usize>],
}

impl<'a> Head<'a> {
    /// Collects the operands.
    pub fn new(hidden: View<'a>, weights: HeadWeights<'a>, targets: Targets<'a>, shape: &HeadShape) -> Self {
        Self { hidden, weights, targets, shape: *shape, blocks: &[] }
    }

    /// Cuts the vocabulary into blocks.
    #[must_use]
    pub fn in_blocks(self, blocks: &'a [Range<usize>]) -> Self {
        Self { blocks, ..self }
    }
}

/// Weights of the head: `logits = hidden · weightᵀ (+ bias) (+ h · bᵀ)`.
#[derive(Clone, Copy)]
pub struct HeadWeights<'a> {
    /// `[V,D]`, of the type of the hidden rows.
    pub weight: View<'a>,
    /// `[1,V]` f32.
    pub bias: Option<View<'a>>,
    /// An adapter's term.
    pub low_rank: Option<LowRank<'a>>,
}

impl<'a> HeadWeights<'a> {
    /// Creates weights without a low-rank term.
    pub fn new(weight: View<'a>, bias: Option<View<'a>>) -> Self {
        Self { weight, bias, low_rank: None }
    }

    /// Returns multiply-adds and bytes of the low-rank term, for one GEMM.
    pub(super) fn low_rank_cost(&self) -> (f64, f64) {
        self.low_rank.map_or((0.0, 0.0), |term| {
            (term.h.rows() as f64 * term.b.len() as f64, check::bytes(&[&term.h, &term.b]))
        })
    }
}

/// Outputs of [`head_backward`]. All but `hidden` are skipped if `None`.
pub struct HeadGradients<'a> {
    /// `[R,D]` f32, overwritten.
    pub hidden: ViewMut<'a>,
    /// `[V,D]` f32.
    pub weight: Option<ViewMut<'a>>,
    /// Adds to `weight` instead of overwriting it.
    pub adds_to_weight: bool,
    /// `[1,V]` f32, added to.
    pub bias: Option<ViewMut<'a>>,
    /// Gradient of [`LowRank::h`]: `[R,r]` f32, overwritten.
    pub h: Option<ViewMut<'a>>,
    /// Gradient of [`LowRank::b`]: `[V,r]` f32, added to.
    pub b: Option<ViewMut<'a>>,
}

impl<'a> HeadGradients<'a> {
    /// Requests the gradient of the hidden rows alone.
    pub fn from_hidden(hidden: ViewMut<'a>) -> Self {
        Self { hidden, weight: None, adds_to_weight: true, bias: None, h: None, b: None }
    }

    pub(super) fn check(&self, op: &'static str, hidden: &View, weights: &HeadWeights) -> Result<()> {
        let (rows, vocabulary) = (hidden.rows(), weights.weight.rows());
        check::f32_shape(op, "dhidden", &self.hidden, rows, hidden.cols())?;
        if let Some(weight) = &self.weight {
            check::f32_shape(op, "dweight", weight, vocabulary, hidden.cols())?;
        }
        if let Some(bias) = &self.bias {
            check::f32_shape(op, "dbias", bias, 1, vocabulary)?;
        }
        let Some(LowRank { b, .. }) = weights.low_rank else {
            if self.h.is_some() || self.b.is_some() {
                return Err(KernelError::invalid(op, "gradients of a low-rank term that the head lacks"));
            }
            return Ok(());
        };
        if let Some(dh) = &self.h {
            check::f32_shape(op, "dh", dh, rows, b.cols())?;
        }
        if let Some(db) = &self.b {
            check::f32_shape(op, "db", db, vocabulary, b.cols())?;
        }
        Ok(())
    }
}

/// Functions applied to the logits.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HeadShape {
    /// `l ← cap · tanh(l / cap)` (Gemma 2).
    pub softcap: Option<f32>,
    /// Factor on the logits before the softcap; `None` is 1.
    pub logit_scale: Option<f32>,
}

/// Predictions to score: prediction `i` asks for token `targets[i]` at scored row `rows[i]`.
#[derive(Clone, Copy, Debug)]
pub struct Targets<'a> {
    /// Index into the rows of `hidden`, ascending; a row may appear several times or not at all.
    pub rows: &'a [u32],
    /// Token ids (rows of the weights), or [`ELSEWHERE`] if another part of the vocabulary holds
    /// the token.
    pub targets: &'a [u32],
}

impl Targets<'_> {
    /// Rejects rows outside the hidden rows and tokens outside the vocabulary.
    pub(super) fn check(&self, op: &'static str, rows: usize, vocabulary: usize) -> Result<()> {
        if vocabulary == 0 || self.rows.len() != self.targets.len() || !self.rows.is_sorted() {
            return Err(KernelError::invalid(
                op,
                format!(
                    "{} rows (which must ascend) and {} targets in a vocabulary of {vocabulary}",
                    self.rows.len(),
                    self.targets.len()
                ),
            ));
        }
        if self.rows.last().is_some_and(|&row| row as usize >= rows) {
            return Err(KernelError::invalid(
                op,
                format!("a prediction points beyond the {rows} hidden rows"),
            ));
        }
        if let Some(target) = self.targets.iter().find(|&&t| t as usize >= vocabulary && t != ELSEWHERE) {
            return Err(KernelError::invalid(
                op,
                format!("target {target} is outside the vocabulary of {vocabulary}"),
            ));
        }
        Ok(())
    }
}

/// Results of the head's forward pass, on the host.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HeadScores {
    /// Log-probability of each prediction's target `[P]`; for a reward model the score, its only
    /// result.
    pub log_prob: Vec<f32>,
    /// True if the target has the largest logit (the first of equals) `[P]`.
    pub hit: Vec<bool>,
    /// Entropy of each row's distribution, in nats `[R]`.
    pub entropy: Vec<f32>,
    /// Mean of each row's logits over the vocabulary `[R]`.
    pub mean_logit: Vec<f32>,
    /// log Σ exp of each row's logits, for backward `[R]`.
    pub log_sum_exp: Vec<f32>,
    /// log Σ p² of each row's probabilities `[R]`.
    pub log_sum_squares: Vec<f32>,
}

impl HeadScores {
    /// Clears all results and keeps their memory.
    pub fn clear(&mut self) {
        let Self { log_prob, hit, entropy, mean_logit, log_sum_exp, log_sum_squares } = self;
        log_prob.clear();
        hit.clear();
        [entropy, mean_logit, log_sum_exp, log_sum_squares].into_iter().for_each(Vec::clear);
    }

    pub(crate) fn resize(&mut self, rows: usize, predictions: usize) {
        self.log_prob.resize(predictions, 0.0);
        self.hit.resize(predictions, false);
        let Self { entropy, mean_logit, log_sum_exp, log_sum_squares, .. } = self;
        for statistic in [entropy, mean_logit, log_sum_exp, log_sum_squares] {
            statistic.resize(rows, 0.0);
        }
    }
}

/// Logits of the first rows that forward kept for backward, `[≤ R, V]` f32.
pub struct KeptLogits(Tensor);

/// Scores hidden rows. `scores` is overwritten; its vectors are reused, so a steady state allocates
/// nothing.
pub fn head(device: &Device, call: Head, scores: &mut HeadScores) -> Result<()> {
    head_keeping(device, call, scores, 0).map(drop)
}

/// Runs [`head`] and keeps up to `budget` bytes of logits for [`head_backward`]. With a scale or
/// softcap nothing is kept: they are applied in place, and backward starts from the raw logits.
pub fn head_keeping(
    device: &Device,
    call: Head,
    scores: &mut HeadScores,
    budget: usize,
) -> Result<KeptLogits> {
    let Head { hidden, weights, targets, .. } = call;
    if targets.targets.contains(&ELSEWHERE) {
        return Err(KernelError::invalid("head", "a target is outside the whole vocabulary".to_owned()));
    }
    let mut parts = HeadParts::new(0, 1, hidden.rows(), targets.rows.len());
    let kept = head_part(device, call, &mut parts, budget)?;
    parts.join(targets.rows, weights.weight.rows(), scores);
    Ok(kept)
}

/// Runs [`head_keeping`] for one part of a vocabulary-parallel head: writes this part's numbers into
/// `parts`. [`HeadParts::join`] makes scores once the numbers of every part are present.
pub fn head_part(device: &Device, call: Head, parts: &mut HeadParts, budget: usize) -> Result<KeptLogits> {
    const OP: &str = "head";
    check_operands(OP, &call)?;
    let Head { hidden, weights, targets, shape, .. } = call;
    let (rows, vocabulary) = (hidden.rows(), weights.weight.rows());
    let blocks = Blocks::new(&call);
    if parts.shape() != (rows, targets.rows.len()) || !parts.has(blocks.len()) {
        return Err(KernelError::invalid(
            OP,
            format!("the parts have {:?} rows and predictions, for {} blocks", parts.shape(), blocks.len()),
        ));
    }
    let changed = shape.softcap.is_some() || shape.logit_scale.is_some_and(|scale| scale != 1.0);
    let fitting = if changed { 0 } else { budget / (vocabulary * DType::F32.size()) };
    let chunk = chunk_rows(device);
    let room = kept_rows(hidden.extent().room(), fitting, chunk);
    let kept_rows = rows.min(room);
    let width = Extent::exact(vocabulary);
    let mut kept = device.alloc_in(MemoryKind::Head, Extent::new(kept_rows, room), width, DType::F32)?;
    let mut spare = device.alloc(
        MemoryKind::Head,
        chunk.min(rows - kept_rows),
        strip_width(device, &blocks),
        DType::F32,
    )?;
    let (multiply_adds, bytes) = weights.low_rank_cost();
    let products = 2.0 * (rows as f64 * weights.weight.len() as f64 + multiply_adds);
    let shape_of = (rows, vocabulary, hidden.dtype());
    let read =
        bytes + check::bytes(&[&hidden, &weights.weight]) + 2.0 * logit_bytes(device, rows, vocabulary);
    let work = OpCost::new(OP, shape_of, products, read);
    let mut numbers = running_numbers(device, hidden.extent(), targets.rows.len())?;
    let (mut kept_view, mut spare) = (kept.view_mut(), spare.view_mut());
    let run = on!(
        cpu => blocks.forward(call, chunk, parts, (&mut kept_view, &mut spare), |call, parts, memory| {
            kernel::forward(cpu, call, parts, memory);
            Ok(())
        })?,
        cuda => blocks.forward(call, chunk, parts, (&mut kept_view, &mut spare), |call, parts, memory| {
            let numbers = numbers.as_mut().map(Tensor::view_mut);
            cuda::head::forward(cuda, call, parts, memory, numbers)
        })
    );
    let ran = device.launch_matmuls(work.with_depth(hidden.cols()), run)?;
    if ran.is_none() {
        // Neutral statistics that scores can be made from.
        for block in 0..blocks.len() {
            parts.work_on(block);
            let (of_rows, of_predictions) = parts.own_mut();
            of_rows.fill([0.0, 1.0, 0.0, 0.0, 1.0]);
            of_predictions.fill([PASSED_OVER, 0.0]);
        }
    }
    Ok(KeptLogits(kept))
}

/// Computes the gradient of `Σ_i d_log_prob[i] · log_prob[i]`. `kept` is the result of
/// [`head_keeping`] for the same operands.
pub fn head_backward(
    device: &Device,
    call: Head,
    scores: &HeadScores,
    d_log_prob: &[f32],
    kept: Option<KeptLogits>,
    gradients: HeadGradients,
) -> Result<()> {
    const OP: &str = "head_backward";
    check_operands(OP, &call)?;
    let Head { hidden, weights, targets, .. } = call;
    gradients.check(OP, &hidden, &weights)?;
    let (rows, vocabulary) = (hidden.rows(), weights.weight.rows());
    let predictions = targets.rows.len();
    if scores.log_sum_exp.len() != rows || d_log_prob.len() != predictions {
        return Err(KernelError::invalid(
            OP,
            format!(
                "scores of {} rows for {rows} rows, {} gradients for {predictions} predictions",
                scores.log_sum_exp.len(),
                d_log_prob.len()
            ),
        ));
    }
    let mut kept = match kept {
        Some(KeptLogits(kept)) => kept,
        None => device.alloc(MemoryKind::Head, 0, vocabulary, DType::F32)?,
    };
    let again = rows.checked_sub(kept.rows()).filter(|_| kept.cols() == vocabulary);
    let Some(again) = again else {
        return Err(KernelError::invalid(
            OP,
            format!("logits {}x{} kept for {rows} rows of {vocabulary}", kept.rows(), kept.cols()),
        ));
    };
    let (blocks, chunk) = (Blocks::new(&call), chunk_rows(device));
    let mut spare =
        device.alloc(MemoryKind::Head, chunk.min(again), strip_width(device, &blocks), DType::F32)?;
    let (flops, mut bytes) = backward_cost(&hidden, &weights, &gradients, again);
    let num_products = 1 + usize::from(gradients.weight.is_some());
    let of_gradient = logit_bytes(device, rows, vocabulary) * hidden.dtype().size() as f64 / 4.0;
    bytes += logit_bytes(device, again, vocabulary)
        + logit_bytes(device, rows, vocabulary)
        + of_gradient * (1 + num_products) as f64;
    let work = OpCost::new(OP, (rows, vocabulary, hidden.dtype()), flops, bytes).with_depth(hidden.cols());
    let extent = hidden.extent();
    let summed = |rows: usize| if gradients.bias.is_some() { chunk.min(rows) } else { 0 };
    let summed = Extent::new(summed(extent.len()), summed(extent.room()));
    let mut partial = partial_sums(device, summed, strip_width(device, &blocks))?;
    let width_of_h = gradients.h.as_ref().map_or(0, ViewMut::cols);
    let levels = |rows: usize| blocks.levels() * chunk.min(rows);
    let levels = Extent::new(levels(extent.len()), levels(extent.room()));
    let allocate = |cols| device.alloc_in(MemoryKind::Head, levels, Extent::exact(cols), DType::F32);
    let (mut of_hidden, mut of_h) = (allocate(hidden.cols())?, allocate(width_of_h)?);
    let sums = PartialSums { hidden: of_hidden.view_mut(), h: of_h.view_mut() };
    let memory = (kept.view_mut(), spare.view_mut());
    let known = (&scores.log_sum_exp[..], d_log_prob);
    launch_matmuls!(device, work, {
        cpu => blocks.backward(call, chunk, known, gradients, memory, sums, |call, lse, d, gradients, memory| {
            kernel::backward(cpu, call, lse, d, gradients, memory);
            Ok(())
        }, |src, dst| {
            cpu.add(src, dst);
            Ok(())
        })?,
        cuda => blocks.backward(call, chunk, known, gradients, memory, sums, |call, lse, d, gradients, memory| {
            let partial = partial.as_mut().map(Tensor::view_mut);
            cuda::head::backward(cuda, call, lse, d, gradients, memory, partial)
        }, |src, dst| cuda::convert::add(cuda, src, dst))
    })
}

/// Returns the bytes of f32 logits that pass through memory once: all of them on a GPU, none on a CPU, whose
/// chunks stay in its caches.
fn logit_bytes(device: &Device, rows: usize, vocabulary: usize) -> f64 {
    match device.backend() {
        Backend::Cpu => 0.0,
        Backend::Cuda => (rows * vocabulary * DType::F32.size()) as f64,
    }
}

/// Returns flops and bytes of the requested gradients, if the logits of `again` rows are
/// recomputed.
pub(super) fn backward_cost(
    hidden: &View,
    weights: &HeadWeights,
    gradients: &HeadGradients,
    again: usize,
) -> (f64, f64) {
    let HeadGradients { hidden: dhidden, weight, h, b, .. } = gradients;
    let rows = hidden.rows();
    let share = again as f64 / rows.max(1) as f64;
    let count =
        |wanted: [bool; 2]| share + wanted.map(|wanted| f64::from(u8::from(wanted))).iter().sum::<f64>();
    let (multiply_adds, bytes) = weights.low_rank_cost();
    let products = 2.0 * rows as f64 * weights.weight.len() as f64 * count([true, weight.is_some()])
        + 2.0 * multiply_adds * count([h.is_some(), b.is_some()]);
    let added = [weight, b].into_iter().flatten().map(|sum| 2.0 * check::bytes(&[sum])).sum::<f64>();
    let written = h.as_ref().map_or(0.0, |h| check::bytes(&[h]));
    let read = bytes + check::bytes(&[hidden, &weights.weight, dhidden]);
    (products, added + written + read)
}
