//! GEMM: cuBLASLt, and additions that it lacks.

use super::columns::elementwise_grid;
use super::driver::{Factor, Matmul};
use super::graph::Work;
use super::{Cuda, args, by_type, driver, source};
use crate::ops::DepthTree;
use crate::ops::gemm::{Operand, Product, Term};
use crate::{DType, Result, View, ViewMut};

pub(super) static SOURCE: driver::Source = source!("gemm.cu");

/// f32 sums before rounding: 16 MiB, to fit a GPU's cache.
const WIDE: usize = 1 << 22;

/// Returns how many of `rows` output rows need an f32 scratch accumulator; 0 if cuBLASLt can write
/// the final type. The library rounds to bf16 before any addition, and does not produce bf16 from f32. A
/// residual of bf16 is one that may be added so.
pub(crate) fn wide_rows(product: &Product, rows: usize) -> usize {
    let is_wide = |residual: &View| residual.dtype() == DType::F32;
    let is_added_to =
        product.accumulate || product.bias.is_some() || product.residual.as_ref().is_some_and(is_wide);
    if product.c.dtype() == DType::F32 || !(is_added_to || product.a.dtype() == DType::F32) {
        return 0;
    }
    // A multiple of the library's tiles.
    let fitting = WIDE / product.c.cols().max(1) / 128 * 128;
    rows.min(fitting.max(128))
}

/// Bytes of the partial sums of a tree beside the result, for [`tree_rows`].
const TREE: usize = 64 << 20;

/// Returns how many of `rows` output rows of `cols` columns a tree of blocks of k sums at a time.
pub(crate) fn tree_rows(cols: usize, rows: usize) -> usize {
    // A multiple of the library's tiles, and enough rows to fill a GPU.
    let fitting = TREE / (size_of::<f32>() * cols.max(1)) / 128 * 128;
    rows.min(fitting.max(1024))
}

/// Runs a GEMM. `wide` has room for [`wide_rows`] rows in f32, if there are any; for each level of a
/// tree, it has room for [`tree_rows`].
pub(crate) fn run(cuda: &Cuda, product: Product, wide: Option<ViewMut>) -> Result<()> {
    product.check();
    if product.c.is_empty() {
        return Ok(());
    }
    if let Some(tree) = product.divided() {
        return in_tree(cuda, product, tree, wide.expect("room for partial sums"));
    }
    if wide_rows(&product, 1) == 0 {
        return direct(cuda, product);
    }
    rounded_once(cuda, product, wide.expect("room for sums in f32"))
}

/// Lets the library write the final result.
fn direct(cuda: &Cuda, product: Product) -> Result<()> {
    let Product { a, b, term, mut c, accumulate, bias, residual, .. } = product;
    let itself = (c.address(), c.stride());
    let residual_at = residual.map(|residual| (residual.address(), residual.stride()));
    // Addends that the library lacks, and the result of an empty product, are written beforehand.
    let is_prepared = bias.is_some() || (a.depth() == 0 && !accumulate);
    if is_prepared {
        add(cuda, [residual, None], bias, accumulate, c.reborrow())?;
    }
    let mut added = if is_prepared || accumulate { Some(itself) } else { residual_at };
    // First: the other product, bound by arithmetic, then reads it at next to no cost.
    if let Some(Term { a, b }) = term {
        multiply(cuda, a, b, added, &mut c)?;
        added = Some(itself);
    }
    multiply(cuda, a, b, added, &mut c)
}

/// Sums blocks of k in a tree, some rows at a time. Every partial sum is added by a kernel of its own,
/// so that a sum has the same bits where another rank holds one side of it.
fn in_tree(cuda: &Cuda, product: Product, tree: &DepthTree, mut sums: ViewMut) -> Result<()> {
    let Product { a, b, mut c, bias, residual, .. } = product;
    let (m, height) = (c.rows(), sums.rows() / tree.levels().max(1));
    let height = if tree.levels() == 0 { m } else { height };
    for start in (0..m).step_by(height.max(1)) {
        let rows = start..m.min(start + height);
        let mut c = c.reborrow().row_range(rows.clone());
        let a = a.row_range(rows.clone());
        let room = |position: usize| (position - 1) * height..(position - 1) * height + rows.len();
        for step in tree.steps(std::iter::once) {
            let (a, b) = (a.depth_range(step.piece.clone()), b.depth_range(step.piece));
            let mut own = match step.position {
                0 => c.reborrow(),
                position => sums.reborrow().row_range(room(position)),
            };
            let added = step.adds_block.then(|| (own.address(), own.stride()));
            multiply(cuda, a, b, added, &mut own)?;
            for position in (step.position - step.merges..step.position).rev() {
                // The position above was summed last.
                let above = sums.reborrow().row_range(room(position + 1));
                match position {
                    0 => add(cuda, [Some(above.view()), None], None, true, c.reborrow())?,
                    _ => {
                        let [below, rest] = sums.reborrow().split_rows(position * height);
                        let below = below.row_range(room(position));
                        let above = rest.row_range(0..rows.len());
                        add(cuda, [Some(above.view()), None], None, true, below)?;
                    }
                }
            }
        }
        if let Some(residual) = residual {
            add(cuda, [Some(residual.row_range(rows.clone())), None], None, true, c.reborrow())?;
        }
        if bias.is_some() {
            add(cuda, [None, None], bias, true, c.reborrow())?;
        }
    }
    Ok(())
}

/// Accumulates in f32, some rows at a time, and rounds once.
fn rounded_once(cuda: &Cuda, product: Product, mut wide: ViewMut) -> Result<()> {
    let Product { a, b, term, mut c, accumulate, bias, residual, .. } = product;
    let m = c.rows();
    for start in (0..m).step_by(wide.rows()) {
        let rows = start..m.min(start + wide.rows());
        let mut sums = wide.reborrow().row_range(0..rows.len());
        let term = term.map(|term| Term { a: term.a.row_range(rows.clone()), ..term });
        let part = Product::plain(a.row_range(rows.clone()), b, sums.reborrow(), false);
        direct(cuda, Product { term, ..part })?;
        let residual = residual.map(|residual| residual.row_range(rows.clone()));
        add(cuda, [Some(sums.view()), residual], bias, accumulate, c.reborrow().row_range(rows))?;
    }
    Ok(())
}

/// Computes `c = a · bᵀ (+ added)`. An empty product leaves `c` as it is.
pub(super) fn multiply(
    cuda: &Cuda,
    a: Operand,
    b: Operand,
    added: Option<(u64, usize)>,
    c: &mut ViewMut,
) -> Result<()> {
    if a.depth() == 0 {
        return Ok(());
    }
    let factor = |operand: &Operand| Factor {
        address: operand.view().address(),
        stride: operand.stride(),
        along_depth: !operand.is_transposed(),
    };
    let product = Matmul {
        size: [c.rows(), c.cols(), a.depth()],
        dtype: a.dtype().into(),
        a: factor(&a),
        b: factor(&b),
        c: added,
        d: (c.address(), c.stride()),
        d_type: c.dtype(),
        tf32: cuda.tf32(),
    };
    // SAFETY: views vouch for factors and result, whose shapes fit; the addend is the result, or of
    // its shape and type.
    unsafe { cuda.put(Work::Matmul(product)) }
}

/// Computes `c = Σ terms + bias`, added to `c` if `accumulate` and rounded once. Terms and bias are
/// f32.
fn add(
    cuda: &Cuda,
    terms: [Option<View>; 2],
    bias: Option<View>,
    accumulate: bool,
    c: ViewMut,
) -> Result<()> {
    let [x, y] = terms;
    let strides = terms.map(|term| term.map_or(0, |term| term.stride() as i32));
    let (c_stride, rows, cols) = (c.stride() as i32, c.rows() as i32, c.cols() as i32);
    let args = args![x, strides[0], y, strides[1], bias, accumulate, &c, c_stride, rows, cols];
    // SAFETY: all operands have the result's shape, the bias its columns.
    unsafe { cuda.launch(&SOURCE, by_type!("product_add", c.dtype()), elementwise_grid(c.shape()), args) }
}
