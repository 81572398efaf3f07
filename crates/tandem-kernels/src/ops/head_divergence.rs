//! Divergence between the next-token distributions of two models, a student p and a teacher q, over
//! the whole vocabulary and without holding all logits (generalised JSD of arXiv 2306.13649).
//!
//! Three passes over the same strips. [`head_part`](crate::ops::head_part) of each model gives log Σ
//! exp of a row's logits. With both, [`head_divergence`] sums the divergences of a row.
//! [`head_divergence_backward`] needs a row's sum: the derivative by a logit of p is centred on it.
//! For the mixture m the sums of the second pass depend on the results of the first in no linear
//! way, so there is no exact way with two.

use crate::cpu::head_divergence as kernel;
use crate::device::launch_matmuls;
use crate::ops::columns::partial_sums;
use crate::ops::head::{backward_cost, check_operands, chunk_rows, strip_of};
use crate::ops::{Head, HeadGradients, HeadShape, HeadWeights, Targets, check};
use crate::{Backend, DType, Device, Extent, KernelError, MemoryKind, OpCost, Result, Tensor, View, cuda};

/// One of the two models.
#[derive(Clone, Copy)]
pub struct DivergenceSide<'a> {
    /// `[R,D]`, f32 or bf16; each model has its own D.
    pub hidden: View<'a>,
    /// The weights of V tokens, the same tokens for both.
    pub weights: HeadWeights<'a>,
    /// Scale and softcap.
    pub shape: HeadShape,
    /// log Σ exp of each row's logits `[R]`: [`HeadScores::log_sum_exp`](crate::ops::HeadScores).
    pub log_sum_exp: &'a [f32],
}

/// Operands of both passes over two heads.
#[derive(Clone, Copy)]
pub struct HeadDivergence<'a> {
    /// The model p that trains.
    pub student: DivergenceSide<'a>,
    /// The model q that it learns from.
    pub teacher: DivergenceSide<'a>,
    /// 0 is KL(q‖p), 1 is KL(p‖q). Between them β KL(q‖m) + (1 − β) KL(p‖m), m = βq + (1 − β)p.
    pub beta: f32,
}

/// Divergences of a row's two distributions, in nats.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RowDivergence {
    /// KL(q‖p): from the teacher to the student.
    pub forward_kl: f64,
    /// KL(p‖q): from the student to the teacher.
    pub reverse_kl: f64,
    /// KL(q‖m) and KL(p‖m), where β has a mixture; else 0.
    pub to_mixture: [f64; 2],
}

impl RowDivergence {
    /// The generalised Jensen–Shannon divergence.
    pub fn jsd(&self, beta: f64) -> f64 {
        let [teacher, student] = self.to_mixture;
        match beta {
            0.0 => self.forward_kl,
            1.0 => self.reverse_kl,
            _ => beta * teacher + (1.0 - beta) * student,
        }
    }

    /// Returns the centre of the derivative by the student's logits.
    pub(crate) fn centre(&self, beta: f32) -> f32 {
        if beta == 1.0 { self.reverse_kl as f32 } else { self.to_mixture[1] as f32 }
    }
}

impl<'a> HeadDivergence<'a> {
    /// Returns a side as a head that scores nothing.
    fn head(side: &DivergenceSide<'a>) -> Head<'a> {
        Head::new(side.hidden, side.weights, Targets { rows: &[], targets: &[] }, &side.shape)
    }

    fn check(&self, op: &'static str) -> Result<()> {
        let Self { student, teacher, beta } = self;
        for side in [student, teacher] {
            check_operands(op, &Self::head(side))?;
            if side.log_sum_exp.len() != side.hidden.rows() {
                let (sums, rows) = (side.log_sum_exp.len(), side.hidden.rows());
                return Err(KernelError::invalid(op, format!("{sums} sums of exponentials of {rows} rows")));
            }
        }
        let shapes = [student, teacher].map(|side| (side.hidden.rows(), side.weights.weight.rows()));
        if shapes[0] != shapes[1] {
            let [(rows, tokens), (other_rows, others)] = shapes;
            return Err(KernelError::invalid(
                op,
                format!(
                    "the student has {rows} rows of {tokens} tokens, the teacher {other_rows} of {others}"
                ),
            ));
        }
        if !(0.0..=1.0).contains(beta) {
            return Err(KernelError::invalid(op, format!("beta {beta} is outside 0..=1")));
        }
        Ok(())
    }

    /// Allocates a strip of logits of each model.
    fn strips(&self, device: &Device) -> Result<[Tensor; 2]> {
        let (rows, vocabulary) = (self.student.hidden.rows(), self.student.weights.weight.rows());
        let (rows, width) = (chunk_rows(device).min(rows), strip_of(device, vocabulary));
        let strip = || device.alloc(MemoryKind::Head, rows, width, DType::F32);
        Ok([strip()?, strip()?])
    }
}

/// Allocates the sums of rows that a GPU updates strip by strip: 32 bytes per row.
fn running_numbers(device: &Device, rows: Extent) -> Result<Option<Tensor>> {
    // The sums are f64, twice an f32.
    let of_row = 2 * cuda::head_divergence::NUMBERS;
    let numbers = Extent::new(of_row * rows.len(), of_row * rows.room());
    let is_gpu = device.backend() == Backend::Cuda;
    is_gpu.then(|| device.alloc_in(MemoryKind::Head, Extent::exact(1), numbers, DType::F32)).transpose()
}

/// Computes the divergences of each row into `out` `[R]`, whose memory is reused.
///
/// # Errors
/// Shapes or types differ, `beta` is outside `0..=1`, or memory runs out.
pub fn head_divergence(device: &Device, call: HeadDivergence, out: &mut Vec<RowDivergence>) -> Result<()> {
    const OP: &str = "head_divergence";
    call.check(OP)?;
    let HeadDivergence { student, teacher, .. } = call;
    let (rows, vocabulary) = (student.hidden.rows(), student.weights.weight.rows());
    out.clear();
    out.resize(rows, RowDivergence::default());
    let [mut of_student, mut of_teacher] = call.strips(device)?;
    let mut numbers = running_numbers(device, student.hidden.extent())?;
    let (mut flops, mut bytes) = (0.0, 0.0);
    for side in [&student, &teacher] {
        let (multiply_adds, of_term) = side.weights.low_rank_cost();
        flops += 2.0 * (rows as f64 * side.weights.weight.len() as f64 + multiply_adds);
        bytes += of_term + check::bytes(&[&side.hidden, &side.weights.weight]);
    }
    let work = OpCost::new(OP, (rows, vocabulary, student.hidden.dtype()), flops, bytes);
    let work = work.with_depth(student.hidden.cols());
    let memory = [of_student.view_mut(), of_teacher.view_mut()];
    launch_matmuls!(device, work, {
        cpu => kernel::forward(cpu, call, chunk_rows(device), out, memory),
        cuda => {
            let numbers = numbers.as_mut().expect("a GPU has room for them").view_mut();
            cuda::head_divergence::forward(cuda, call, chunk_rows(device), out, memory, numbers)
        }
    })
}

/// Computes the gradient of `Σ_r d[r] · jsd(rows[r])` by the student. `rows` is the result of
/// [`head_divergence`] for the same operands.
///
/// # Errors
/// As [`head_divergence`].
pub fn head_divergence_backward(
    device: &Device,
    call: HeadDivergence,
    rows: &[RowDivergence],
    d: &[f32],
    gradients: HeadGradients,
) -> Result<()> {
    const OP: &str = "head_divergence_backward";
    call.check(OP)?;
    let HeadDivergence { student, teacher, .. } = call;
    gradients.check(OP, &student.hidden, &student.weights)?;
    let (count, vocabulary) = (student.hidden.rows(), student.weights.weight.rows());
    if (rows.len(), d.len()) != (count, count) {
        let (sums, derivatives) = (rows.len(), d.len());
        let reason = format!("{sums} sums and {derivatives} derivatives of {count} rows");
        return Err(KernelError::invalid(OP, reason));
    }
    let [mut of_student, mut of_teacher] = call.strips(device)?;
    let (flops, bytes) = backward_cost(&student.hidden, &student.weights, &gradients, count);
    let (multiply_adds, of_term) = teacher.weights.low_rank_cost();
    let flops = flops + 2.0 * (count as f64 * teacher.weights.weight.len() as f64 + multiply_adds);
    let bytes = bytes + of_term + check::bytes(&[&teacher.hidden, &teacher.weights.weight]);
    let work = OpCost::new(OP, (count, vocabulary, student.hidden.dtype()), flops, bytes);
    let work = work.with_depth(student.hidden.cols());
    let extent = student.hidden.extent();
    let summed = |rows: usize| if gradients.bias.is_some() { chunk_rows(device).min(rows) } else { 0 };
    let summed = Extent::new(summed(extent.len()), summed(extent.room()));
    let mut partial = partial_sums(device, summed, strip_of(device, vocabulary))?;
    let memory = [of_student.view_mut(), of_teacher.view_mut()];
    launch_matmuls!(device, work, {
        cpu => kernel::backward(cpu, call, chunk_rows(device), (rows, d), gradients, memory),
        cuda => {
            let partial = partial.as_mut().map(Tensor::view_mut);
            let chunk = chunk_rows(device);
            cuda::head_divergence::backward(cuda, call, chunk, (rows, d), gradients, memory, partial)
        }
    })
}
