//! The head: strips of logits from cuBLASLt, one pass over each row's strip for its statistics or
//! its gradient, and the GEMMs around it. Statistics stay on the device until the last strip.

use super::driver::{Arg, Grid};
use super::{Cuda, args, columns, driver, gemm, source};
use crate::ops::{
    Head, HeadGradients, HeadParts, HeadShape, HeadWeights, LogitMemory, Strip, Targets, strips,
};
use crate::{DType, Result, View, ViewMut};

pub(super) static SOURCE: driver::Source = source!("head.cu");

/// Logits per thread, as in `head.cu`.
const OF_THREAD: usize = 32;

/// Threads of a block for a narrow strip, and for the widest.
const THREADS: [u32; 2] = [128, 256];

/// Widest strip, in columns.
const STRIP: usize = OF_THREAD * THREADS[1] as usize;

/// Returns the width of a strip and of the buffer for logits that are not kept. All strips but the
/// last have the same width, a multiple of the library's tiles.
pub(crate) fn strip_width(vocabulary: usize) -> usize {
    let strips = vocabulary.div_ceil(STRIP).max(1);
    vocabulary.div_ceil(strips).next_multiple_of(256).min(vocabulary)
}

/// Predictions on the device.
struct HeadInputs {
    /// First prediction of each row, and one more entry.
    starts: u64,
    targets: u64,
}

impl HeadInputs {
    fn new(cuda: &Cuda, targets: &Targets, rows: usize) -> Result<Self> {
        let mut starts = vec![0u32; rows + 1];
        targets.rows.iter().for_each(|&row| starts[row as usize + 1] += 1);
        (0..rows).for_each(|row| starts[row + 1] += starts[row]);
        Ok(Self { starts: cuda.table(&starts)?, targets: cuda.table(targets.targets)? })
    }
}

/// Logits of a strip, with their first row and token.
struct Logits<'a> {
    logits: ViewMut<'a>,
    bias: Option<View<'a>>,
    first_row: usize,
    first_token: usize,
}

impl Logits<'_> {
    /// Runs a kernel with one block per row; `rest` are its own arguments behind the common ones.
    ///
    /// # Safety
    /// As [`Cuda::launch`].
    unsafe fn launch(
        &self,
        cuda: &Cuda,
        names: [&'static str; 2],
        shape: &HeadShape,
        asked: &HeadInputs,
        rest: &[Arg],
    ) -> Result<()> {
        let (rows, cols) = self.logits.shape();
        let is_wide = cols > OF_THREAD * THREADS[0] as usize;
        let (name, threads) = (names[usize::from(is_wide)], THREADS[usize::from(is_wide)]);
        let (scale, cap) = (shape.logit_scale.unwrap_or(1.0), shape.softcap.unwrap_or(0.0));
        let inverse_cap = if cap > 0.0 { 1.0 / cap } else { 0.0 };
        let bias = self.bias.map(|bias| bias.col_range(self.first_token..self.first_token + cols));
        let [count, first_row, first] = [cols, self.first_row, self.first_token].map(|n| n as i32);
        let (starts, targets) = (Arg::address(asked.starts), Arg::address(asked.targets));
        let (logits, stride) = (&self.logits, self.logits.stride());
        let shared =
            args![logits, stride, count, bias, scale, cap, inverse_cap, first_row, first, starts, targets];
        // SAFETY: the caller's promise.
        unsafe { cuda.launch(&SOURCE, name, Grid::new(rows, threads), &[shared, rest].concat()) }
    }
}

/// Scores rows in chunks. Kept logits are raw, without the bias. `numbers` has room for the numbers
/// of `parts`.
pub(crate) fn forward(
    cuda: &Cuda,
    call: Head,
    parts: &mut HeadParts,
    mut memory: LogitMemory,
    numbers: Option<ViewMut>,
) -> Result<()> {
    let Head { hidden, weights, targets, ref shape, .. } = call;
    let (rows, vocabulary) = (hidden.rows(), weights.weight.rows());
    let running = Running::new(cuda, &targets, rows, parts, numbers)?;
    let unbiased = HeadWeights { bias: None, ..weights };
    for strip in strips(rows, memory.chunk, vocabulary, strip_width(vocabulary)) {
        let mut logits = strip.place(&mut memory);
        gemm::run(cuda, strip.logits(hidden, &unbiased, logits.reborrow()), None)?;
        let (first_row, first_token) = (strip.rows.start, strip.tokens.start);
        let logits = Logits { logits, bias: weights.bias, first_row, first_token };
        // SAFETY: the numbers of all rows and predictions have room.
        unsafe { running.see(cuda, logits, shape)? };
    }
    running.finish(cuda, parts)
}

/// Scores existing logits. `numbers` has room for the numbers of `parts`.
pub(crate) fn score(
    cuda: &Cuda,
    mut logits: ViewMut,
    targets: Targets,
    shape: &HeadShape,
    parts: &mut HeadParts,
    numbers: Option<ViewMut>,
) -> Result<()> {
    let (rows, vocabulary) = logits.shape();
    let running = Running::new(cuda, &targets, rows, parts, numbers)?;
    let width = strip_width(vocabulary);
    for first_token in (0..vocabulary).step_by(width) {
        let tokens = first_token..vocabulary.min(first_token + width);
        let logits = logits.reborrow().col_range(tokens);
        // SAFETY: the numbers of all rows and predictions have room.
        unsafe { running.see(cuda, Logits { logits, bias: None, first_row: 0, first_token }, shape)? };
    }
    running.finish(cuda, parts)
}

/// Device addresses of the statistics of a head's part.
struct Running {
    asked: HeadInputs,
    of_rows: u64,
    of_predictions: u64,
}

impl Running {
    fn new(
        cuda: &Cuda,
        targets: &Targets,
        rows: usize,
        parts: &mut HeadParts,
        numbers: Option<ViewMut>,
    ) -> Result<Self> {
        let asked = HeadInputs::new(cuda, targets, rows)?;
        let (numbers, own) = (numbers.expect("room for numbers"), parts.own_numbers_mut());
        let of_rows = numbers.address();
        assert!(numbers.num_bytes() >= size_of_val(own), "room for the numbers of rows and predictions");
        let of_predictions = of_rows + (size_of_val(own) - 2 * size_of::<f64>() * targets.rows.len()) as u64;
        Ok(Self { asked, of_rows, of_predictions })
    }

    /// Updates the statistics by a strip.
    ///
    /// # Safety
    /// The strip's rows and tokens are among those of the part.
    unsafe fn see(&self, cuda: &Cuda, logits: Logits, shape: &HeadShape) -> Result<()> {
        let names = ["head_statistics_128", "head_statistics_256"];
        let rest = [self.of_rows, self.of_predictions].map(Arg::address);
        // SAFETY: the kernel's arguments; the caller's promise.
        unsafe { logits.launch(cuda, names, shape, &self.asked, &rest) }
    }

    /// Reads the statistics.
    fn finish(&self, cuda: &Cuda, parts: &mut HeadParts) -> Result<()> {
        // SAFETY: the kernels have written as many.
        unsafe { cuda.read(self.of_rows, parts.own_numbers_mut()) }
    }
}

/// Computes gradients in chunks. The logits of chunks that are not kept are computed again.
/// `partial` has room for the column sums of a chunk's gradient, if the bias has one.
pub(crate) fn backward(
    cuda: &Cuda,
    call: Head,
    log_sum_exp: &[f32],
    d_log_prob: &[f32],
    mut gradients: HeadGradients,
    mut memory: LogitMemory,
    mut partial: Option<ViewMut>,
) -> Result<()> {
    let Head { hidden, weights, targets, ref shape, .. } = call;
    let (rows, vocabulary) = (hidden.rows(), weights.weight.rows());
    let (dtype, kept_rows) = (weights.weight.dtype(), memory.kept.rows());
    let asked = HeadInputs::new(cuda, &targets, rows)?;
    let rest = [cuda.table(d_log_prob)?, cuda.table(log_sum_exp)?].map(Arg::address);
    let unbiased = HeadWeights { bias: None, ..weights };
    for strip in strips(rows, memory.chunk, vocabulary, strip_width(vocabulary)) {
        let mut logits = strip.place(&mut memory);
        if strip.rows.end > kept_rows {
            gemm::run(cuda, strip.logits(hidden, &unbiased, logits.reborrow()), None)?;
        }
        let (first_row, first_token) = (strip.rows.start, strip.tokens.start);
        let of_strip = Logits { logits: logits.reborrow(), bias: weights.bias, first_row, first_token };
        let names = match dtype {
            DType::F32 => ["head_gradient_f32_128", "head_gradient_f32_256"],
            DType::Bf16 => ["head_gradient_bf16_128", "head_gradient_bf16_256"],
        };
        // SAFETY: the kernel's arguments, of as many rows and predictions as the operation has
        // checked.
        unsafe { of_strip.launch(cuda, names, shape, &asked, &rest)? };
        let partial = partial.as_mut().map(ViewMut::reborrow);
        add_gradients(cuda, &strip, &logits, hidden, &weights, &mut gradients, partial)?;
    }
    Ok(())
}

/// Adds the gradients of a strip, whose derivatives have replaced its logits. `partial` has room for the
/// column sums, if the bias has a gradient.
pub(super) fn add_gradients(
    cuda: &Cuda,
    strip: &Strip,
    logits: &ViewMut,
    hidden: View,
    weights: &HeadWeights,
    gradients: &mut HeadGradients,
    partial: Option<ViewMut>,
) -> Result<()> {
    let gradient = match weights.weight.dtype() {
        DType::F32 => logits.view(),
        DType::Bf16 => logits.front_half(),
    };
    if let Some(bias) = &mut gradients.bias {
        let bias = bias.reborrow().col_range(strip.tokens.clone());
        columns::column_sums(cuda, gradient, bias, partial)?;
    }
    for product in strip.back(gradient, hidden, weights, gradients) {
        gemm::run(cuda, product, None)?;
    }
    Ok(())
}
