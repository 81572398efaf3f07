//! Rotary position embedding (RoFormer, arXiv 2104.09864), in the half-split layout of most HF models
//! or over interleaved pairs.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::cpu::rope as kernel;
use crate::device::launch;
use crate::ops::check;
use crate::{Device, KernelError, Result, ViewMut, cuda};

/// Which dimensions of a head rotate together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RopePairs {
    /// Dimension `i` pairs with `i + rotary/2`, as in Llama's HF folders.
    #[default]
    Halves,
    /// Dimension `2i` pairs with `2i + 1` (GLM-4, Ernie 4.5).
    Interleaved,
}

/// Cosines and sines, a row for each position. RoPE scaling (linear, llama3, yarn, …) is applied when
/// the table is created. Where frequencies depend on the text, the rows are of several sets of them.
#[derive(Clone, Debug)]
pub struct RopeTable {
    cos: Vec<f32>,
    sin: Vec<f32>,
    rotary: usize,
    pairs: RopePairs,
    /// Identifies the contents, which never change; copies share it.
    name: u64,
}

impl RopeTable {
    /// Creates a table for `positions` positions from inverse frequencies (one per rotated pair).
    pub fn new(inverse_frequencies: &[f32], positions: usize) -> Self {
        let rows = (0..positions as u32).map(|position| (position, inverse_frequencies));
        Self::from_rows(2 * inverse_frequencies.len(), rows)
    }

    /// Creates a table for heads with `rotary` rotated dimensions from the position and the inverse
    /// frequencies of each row. As in transformers, angle = position · frequency in f32.
    pub fn from_rows<'f>(rotary: usize, rows: impl IntoIterator<Item = (u32, &'f [f32])>) -> Self {
        let angles = rows.into_iter().flat_map(|(position, inverse_frequencies)| {
            debug_assert_eq!(2 * inverse_frequencies.len(), rotary, "a frequency for each pair");
            inverse_frequencies.iter().map(move |frequency| position as f32 * frequency)
        });
        let (sin, cos) = angles.map(f32::sin_cos).unzip();
        Self { cos, sin, rotary, pairs: RopePairs::Halves, name: next_name() }
    }

    /// Returns the table for heads whose dimensions pair in this way.
    #[must_use]
    pub fn with_pairs(self, pairs: RopePairs) -> Self {
        Self { pairs, ..self }
    }

    /// Multiplies cosines and sines of each row by `factor(row)`: the rotated dimensions are scaled
    /// (yarn's and longrope's attention factor, Llama 4's scale of queries).
    #[must_use]
    pub fn scaled(mut self, factor: impl Fn(usize) -> f32) -> Self {
        let half = (self.rotary / 2).max(1);
        for angles in [&mut self.cos, &mut self.sin] {
            for (index, row) in angles.chunks_mut(half).enumerate() {
                let factor = factor(index);
                row.iter_mut().for_each(|value| *value *= factor);
            }
        }
        Self { name: next_name(), ..self }
    }

    /// Returns the table `[rows, rotary/2]`.
    pub fn cos(&self) -> &[f32] {
        &self.cos
    }

    /// Returns the table `[rows, rotary/2]`.
    pub fn sin(&self) -> &[f32] {
        &self.sin
    }

    /// Returns the number of rotated dimensions of each head; even. The rest passes unchanged.
    pub fn rotary(&self) -> usize {
        self.rotary
    }

    /// Returns which dimensions rotate together.
    pub fn pairs(&self) -> RopePairs {
        self.pairs
    }

    /// Returns the number of rows: positions, or rows of [`RopeTable::from_rows`].
    pub fn rows(&self) -> usize {
        self.cos.len() / (self.rotary / 2).max(1)
    }

    /// Returns the table's identity for device caches.
    pub(crate) fn name(&self) -> u64 {
        self.name
    }
}

/// Returns a name that no table has.
fn next_name() -> u64 {
    static NAMES: AtomicU64 = AtomicU64::new(0);
    NAMES.fetch_add(1, Ordering::Relaxed)
}

/// Rotates `x` `[T, heads·head_dim]` in place; [`RopePairs`] says which dimensions of a head rotate
/// together. `rows` has the table's row of each token: its position, where the table is of positions.
/// `inverse` rotates back, for backward. A row beyond the table is an error.
pub fn rope(
    device: &Device,
    x: ViewMut,
    head_dim: usize,
    rows: &[u32],
    table: &RopeTable,
    inverse: bool,
) -> Result<()> {
    const OP: &str = "rope";
    if head_dim == 0 || !x.cols().is_multiple_of(head_dim) || table.rotary > head_dim {
        return Err(KernelError::invalid(
            OP,
            format!(
                "{} columns do not divide into heads of {head_dim} with {} rotated dimensions",
                x.cols(),
                table.rotary
            ),
        ));
    }
    check::shape(OP, "x", &x, rows.len(), x.cols())?;
    if let Some(&row) = rows.iter().max()
        && row as usize >= table.rows()
    {
        return Err(KernelError::invalid(
            OP,
            format!("row {row} is beyond the table's {} rows", table.rows()),
        ));
    }
    let work = check::work(OP, &x, 3.0 * x.len() as f64, check::bytes(&[&x, &x]));
    launch!(device, work, {
        cpu => kernel::rope(cpu, x, head_dim, rows, table, inverse),
        cuda => cuda::rope::rope(cuda, x, head_dim, rows, table, inverse)
    })
}
