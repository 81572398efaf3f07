//! Rotary position embedding (RoFormer, arXiv 2104.09864) in the half-split layout that HF models
//! use.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::cpu::rope as kernel;
use crate::device::launch;
use crate::ops::check;
use crate::{Device, KernelError, Result, ViewMut, cuda};

/// Cosines and sines by position. RoPE scaling (linear, llama3) is applied when the table is
/// created.
#[derive(Clone, Debug)]
pub struct RopeTable {
    cos: Vec<f32>,
    sin: Vec<f32>,
    rotary: usize,
    /// Identifies the contents, which never change; copies share it.
    name: u64,
}

impl RopeTable {
    /// Creates a table for `positions` positions from inverse frequencies (one per rotated pair).
    /// As in transformers, angle = position · frequency in f32.
    pub fn new(inverse_frequencies: &[f32], positions: usize) -> Self {
        static NAMES: AtomicU64 = AtomicU64::new(0);
        let angles = (0..positions).flat_map(|p| inverse_frequencies.iter().map(move |f| p as f32 * f));
        let (sin, cos) = angles.map(f32::sin_cos).unzip();
        let name = NAMES.fetch_add(1, Ordering::Relaxed);
        Self { cos, sin, rotary: 2 * inverse_frequencies.len(), name }
    }

    /// Returns the table `[positions, rotary/2]`.
    pub fn cos(&self) -> &[f32] {
        &self.cos
    }

    /// Returns the table `[positions, rotary/2]`.
    pub fn sin(&self) -> &[f32] {
        &self.sin
    }

    /// Returns the number of rotated dimensions of each head; even. The rest passes unchanged.
    pub fn rotary(&self) -> usize {
        self.rotary
    }

    /// Returns the number of positions in the table.
    pub fn positions(&self) -> usize {
        self.cos.len() / (self.rotary / 2).max(1)
    }

    /// Returns the table's identity for device caches.
    pub(crate) fn name(&self) -> u64 {
        self.name
    }
}

/// Rotates `x` `[T, heads·head_dim]` in place: dimension `i < rotary/2` of a head pairs with `i +
/// rotary/2`. `inverse` rotates back, for backward. A position beyond the table is an error.
pub fn rope(
    device: &Device,
    x: ViewMut,
    head_dim: usize,
    positions: &[u32],
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
    check::shape(OP, "x", &x, positions.len(), x.cols())?;
    if let Some(&position) = positions.iter().max()
        && position as usize >= table.positions()
    {
        return Err(KernelError::invalid(
            OP,
            format!("position {position} is beyond the table's {} positions", table.positions()),
        ));
    }
    let work = check::work(OP, &x, 3.0 * x.len() as f64, check::bytes(&[&x, &x]));
    launch!(device, work, {
        cpu => kernel::rope(cpu, x, head_dim, positions, table, inverse),
        cuda => cuda::rope::rope(cuda, x, head_dim, positions, table, inverse)
    })
}
