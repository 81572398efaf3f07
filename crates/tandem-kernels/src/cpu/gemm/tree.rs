//! Sums along k in a binary tree of blocks ([`DepthTree`]).
//!
//! A step multiplies one piece of k. The kernel adds the partial sums that the piece completes while
//! its tile is in registers, so a block costs one pass over the result. Partial sums lie in scratch
//! memory for some rows and columns at a time, in a cache.

use super::Product;
use super::blocked::Depth;
use super::level::Level;
use crate::cpu::{Cpu, scratch};
use crate::ops::DepthTree;
use crate::ops::gemm::Addends;
use crate::{DType, ViewMut};

/// Rows and columns whose partial sums exist at a time: as many as share a packed factor.
const ROWS: usize = 1024;
const COLUMNS: usize = 1024;

/// Computes `product`, whose sum has the order of `tree`.
pub(super) fn run<L: Level>(cpu: &Cpu, product: &Product, tree: &DepthTree) {
    let (m, n) = product.c.shape();
    for row in (0..m).step_by(ROWS) {
        for column in (0..n).step_by(COLUMNS) {
            let (height, width) = (ROWS.min(m - row), COLUMNS.min(n - column));
            scratch::with_f32(tree.levels() * height * width, |sums| {
                let part = Part { product, row, column, height, width, sums: sums.as_mut_ptr() };
                part.run::<L>(cpu, tree);
            });
        }
    }
}

/// Rows and columns of the result.
struct Part<'a> {
    product: &'a Product<'a>,
    row: usize,
    column: usize,
    height: usize,
    width: usize,
    /// Partial sums of each position but the lowest, whose sums are in the result.
    sums: *mut f32,
}

impl Part<'_> {
    fn run<L: Level>(&self, cpu: &Cpu, tree: &DepthTree) {
        let a = self.product.a.row_range(self.row..self.row + self.height);
        let b = self.product.b.row_range(self.column..self.column + self.width);
        let steps = tree.steps(Depth::pieces::<L::Kernel>);
        let last = steps.len() - 1;
        for (index, step) in steps.into_iter().enumerate() {
            let mut addends = Addends::NONE;
            // The block's earlier pieces, then the sums that its last piece completes.
            let target = step.position - step.merges;
            let end = step.position + usize::from(step.adds_block);
            for position in (target..end).rev() {
                let (address, stride) = self.sums_at(position);
                addends.push(address, stride);
            }
            let (address, stride) = self.sums_at(target);
            // SAFETY: the result and the sums hold the part's shape and are used by this call alone; an
            // element that is added to is read before it is written.
            let c = unsafe { ViewMut::strided(address.cast(), self.height, self.width, stride, DType::F32) };
            let (a, b) = (a.depth_range(step.piece.clone()), b.depth_range(step.piece));
            let mut product = Product { addends, ..Product::plain(a, b, c, false) };
            if index == last {
                self.finish(&mut product);
            }
            product.run_undivided::<L>(cpu);
        }
    }

    /// Adds residual and bias to the last product.
    fn finish<'p>(&'p self, product: &mut Product<'p>) {
        let columns = self.column..self.column + self.width;
        if let Some(residual) = self.product.residual {
            let residual = residual.row_range(self.row..self.row + self.height).col_range(columns.clone());
            product.addends.push(residual.pointer_of::<f32>(), residual.stride());
        }
        product.bias = self.product.bias.map(|bias| bias.col_range(columns));
    }

    /// Returns address and row stride of the sums of a position.
    fn sums_at(&self, position: usize) -> (*mut f32, usize) {
        if position == 0 {
            let c = &self.product.c;
            let offset = self.row * c.stride() + self.column;
            return (c.pointer_of::<f32>().wrapping_add(offset), c.stride());
        }
        (self.sums.wrapping_add((position - 1) * self.height * self.width), self.width)
    }
}
