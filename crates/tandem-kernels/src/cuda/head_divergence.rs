//! Two heads at once: strips of both models' logits from cuBLASLt, one pass over each row's strips for
//! its divergences or their gradient, and the GEMMs around it. Sums stay on the device until the last
//! strip.

use super::driver::{Arg, Grid};
use super::head::{add_gradients, strip_width};
use super::{Cuda, args, driver, gemm, source};
use crate::ops::{DivergenceSide, HeadDivergence, HeadGradients, HeadWeights, RowDivergence, Strip, strips};
use crate::{DType, Result, ViewMut};

pub(super) static SOURCE: driver::Source = source!("head_divergence.cu");

/// Threads of a block, as in `head_divergence.cu`.
const THREADS: u32 = 256;

/// Numbers of a row, f64.
pub(crate) const NUMBERS: usize = 4;

/// Both models on the device.
struct Pair<'a> {
    call: HeadDivergence<'a>,
    /// Tables of log Σ exp.
    log_sum_exp: [u64; 2],
    /// Logarithms of 1 − β, of β and of their ratio.
    logs: [f32; 3],
}

impl<'a> Pair<'a> {
    fn new(cuda: &Cuda, call: HeadDivergence<'a>) -> Result<Self> {
        let (own, other) = ((1.0 - f64::from(call.beta)).ln(), f64::from(call.beta).ln());
        let log_sum_exp = [cuda.table(call.student.log_sum_exp)?, cuda.table(call.teacher.log_sum_exp)?];
        Ok(Self { call, log_sum_exp, logs: [own as f32, other as f32, (own - other) as f32] })
    }

    /// Computes both models' raw logits of a strip.
    fn logits<'m>(
        &self,
        cuda: &Cuda,
        strip: &Strip,
        [student, teacher]: &'m mut [ViewMut; 2],
    ) -> Result<[ViewMut<'m>; 2]> {
        let compute = |side: &DivergenceSide, memory: &'m mut ViewMut| -> Result<ViewMut<'m>> {
            let mut logits =
                memory.reborrow().row_range(0..strip.rows.len()).col_range(0..strip.tokens.len());
            let unbiased = HeadWeights { bias: None, ..side.weights };
            gemm::run(cuda, strip.logits(side.hidden, &unbiased, logits.reborrow()), None)?;
            Ok(logits)
        };
        Ok([compute(&self.call.student, student)?, compute(&self.call.teacher, teacher)?])
    }

    /// Runs a kernel with one block per row; `rest` are its own arguments behind the common ones.
    ///
    /// # Safety
    /// As [`Cuda::launch`].
    unsafe fn launch(
        &self,
        cuda: &Cuda,
        name: &'static str,
        strip: &Strip,
        [student, teacher]: [&ViewMut; 2],
        rest: &[Arg],
    ) -> Result<()> {
        let sides = [&self.call.student, &self.call.teacher];
        let [bias, teacher_bias] =
            sides.map(|side| side.weights.bias.map(|bias| bias.col_range(strip.tokens.clone())));
        let shapes = sides.map(|side| {
            let cap = side.shape.softcap.unwrap_or(0.0);
            let inverse = if cap > 0.0 { 1.0 / cap } else { 0.0 };
            [side.shape.logit_scale.unwrap_or(1.0), cap, inverse].map(Arg::from)
        });
        let [count, first_row] = [strip.tokens.len(), strip.rows.start].map(|n| n as i32);
        let logits = args![student, student.stride(), teacher, teacher.stride(), count, bias, teacher_bias];
        let sums = self.log_sum_exp.map(Arg::address);
        let all = [logits, &shapes[0], &shapes[1], args![first_row], &sums, rest].concat();
        // SAFETY: the caller's promise.
        unsafe { cuda.launch(&SOURCE, name, Grid::new(strip.rows.len(), THREADS), &all) }
    }
}

/// Sums the divergences of each row, in chunks. `numbers` has room for [`NUMBERS`] of each row.
pub(crate) fn forward(
    cuda: &Cuda,
    call: HeadDivergence,
    chunk: usize,
    out: &mut [RowDivergence],
    mut memory: [ViewMut; 2],
    numbers: ViewMut,
) -> Result<()> {
    let mut found = vec![0.0f64; NUMBERS * out.len()];
    assert!(numbers.num_bytes() >= size_of_val(&found[..]), "room for the numbers of rows");
    if out.is_empty() {
        return Ok(());
    }
    let (pair, vocabulary) = (Pair::new(cuda, call)?, call.student.weights.weight.rows());
    let mixes = call.beta != 0.0 && call.beta != 1.0;
    for strip in strips(out.len(), chunk, vocabulary, strip_width(vocabulary)) {
        let [student, teacher] = pair.logits(cuda, &strip, &mut memory)?;
        let is_first = strip.tokens.start == 0;
        let [own, other, both] = pair.logs;
        // Without a mixture the logarithms may be infinite, and are not used.
        let rest = args![own, other, both, i32::from(mixes), i32::from(is_first), &numbers];
        // SAFETY: the kernel's arguments, of rows and tokens that the operation has checked.
        unsafe { pair.launch(cuda, "head_divergence_sums", &strip, [&student, &teacher], rest)? };
    }
    // SAFETY: the kernel has written as many.
    unsafe { cuda.read(numbers.address(), &mut found)? };
    for (row, &[forward_kl, reverse_kl, teacher, student]) in out.iter_mut().zip(found.as_chunks().0) {
        *row = RowDivergence { forward_kl, reverse_kl, to_mixture: [teacher, student] };
    }
    Ok(())
}

/// Computes gradients in chunks. `partial` has room for the column sums of a chunk's gradient, if the
/// bias has one.
pub(crate) fn backward(
    cuda: &Cuda,
    call: HeadDivergence,
    chunk: usize,
    (rows, d): (&[RowDivergence], &[f32]),
    mut gradients: HeadGradients,
    mut memory: [ViewMut; 2],
    mut partial: Option<ViewMut>,
) -> Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    let DivergenceSide { hidden, weights, .. } = call.student;
    let (pair, vocabulary, dtype) = (Pair::new(cuda, call)?, weights.weight.rows(), weights.weight.dtype());
    let centres: Vec<f32> = rows.iter().map(|row| row.centre(call.beta)).collect();
    let [own, _, both] = pair.logs;
    let (centres, d) = (Arg::address(cuda.table(&centres)?), Arg::address(cuda.table(d)?));
    let name = match dtype {
        DType::F32 => "head_divergence_gradient_f32",
        DType::Bf16 => "head_divergence_gradient_bf16",
    };
    for strip in strips(rows.len(), chunk, vocabulary, strip_width(vocabulary)) {
        let [student, teacher] = pair.logits(cuda, &strip, &mut memory)?;
        let rest = args![call.beta, own, both, centres, d];
        // SAFETY: the kernel's arguments, of rows and tokens that the operation has checked.
        unsafe { pair.launch(cuda, name, &strip, [&student, &teacher], rest)? };
        let partial = partial.as_mut().map(ViewMut::reborrow);
        add_gradients(cuda, &strip, &student, hidden, &weights, &mut gradients, partial)?;
    }
    Ok(())
}
