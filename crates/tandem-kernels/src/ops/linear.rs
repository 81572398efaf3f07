//! The linear layer: `y = x wᵀ + b + r`, its gradient to the input and to the weights.
//!
//! Weights are `[out, in]` as in HF folders. Accumulation is f32 for all operand types. The bits of
//! the result do not depend on the number of threads.

use super::check;
use super::columns::partial_sums;
use super::depth_tree::DepthTree;
use super::low_rank::LowRank;
use crate::device::{launch, launch_matmuls};
use crate::memory::bytes::BytesView;
use crate::ops::Weight;
use crate::ops::gemm::{Operand, Product, Sharded, Term};
use crate::{
    Backend, DType, Device, Extent, KernelError, MemoryKind, OpCost, Result, Tensor, View, ViewMut, cuda,
};

/// Computes `y[T,N] = x[T,K] · w[N,K]ᵀ (+ bias[1,N]) (+ residual[T,N])`.
///
/// `x` and `w` share one type (f32 or bf16); `bias` is f32, `y` either type, and `residual` f32 or, on a GPU,
/// if all are, bf16.
///
/// `w` may be packed. On the CPU the bits are those of the unpacked matrix. On a GPU that passes
/// [`Driver::check_fp8`](cuda::Driver::check_fp8) it is in [`Format::Fp8`](crate::Format::Fp8), with multiples of
/// [`FP8_MULTIPLE`](super::FP8_MULTIPLE) as N and K: each row of `x` is rounded to E4M3 under a scale of its own,
/// its largest magnitude / 448; codes are multiplied with f32 sums, which both scales are applied to.
///
/// # Errors
/// If shapes or types do not fit.
pub fn linear<'a>(
    device: &Device,
    x: View,
    w: impl Into<Weight<'a>>,
    bias: Option<View>,
    residual: Option<View>,
    y: ViewMut,
) -> Result<()> {
    forward(device, "linear", x, w.into(), None, bias, residual, y, Order::WHOLE)
}

/// Order of sums in a product.
#[derive(Clone, Copy)]
struct Order<'a> {
    tree: Option<&'a DepthTree>,
    sharded: Sharded,
}

impl<'a> Order<'a> {
    const WHOLE: Self = Self { tree: None, sharded: Sharded::No };

    fn sharded(tree: Option<&'a DepthTree>) -> Self {
        Self { tree, sharded: Sharded::Any }
    }

    fn check(&self, op: &'static str, depth: usize, is_f32: bool, accumulate: bool) -> Result<()> {
        match self.tree {
            Some(tree) if tree.depth() != depth => Err(KernelError::invalid(
                op,
                format!("blocks of {} elements along k, expected {depth}", tree.depth()),
            )),
            Some(tree) if tree.is_divided() && (!is_f32 || accumulate) => {
                Err(KernelError::invalid(op, "a sum in blocks needs an f32 result that is overwritten"))
            }
            _ => Ok(()),
        }
    }
}

/// Computes [`linear`] with a weight that tensor parallelism may shard: an element's bits depend on
/// its row of `x`, its row of `w`, and `tree` alone. With a tree, `y` is f32.
pub fn sharded_linear<'a>(
    device: &Device,
    x: View,
    w: impl Into<Weight<'a>>,
    tree: Option<&DepthTree>,
    bias: Option<View>,
    residual: Option<View>,
    y: ViewMut,
) -> Result<()> {
    forward(device, "linear", x, w.into(), None, bias, residual, y, Order::sharded(tree))
}

/// Computes [`linear_low_rank`] with a weight that tensor parallelism may shard by rows.
pub fn sharded_linear_low_rank<'a>(
    device: &Device,
    x: View,
    w: impl Into<Weight<'a>>,
    low_rank: LowRank,
    bias: Option<View>,
    y: ViewMut,
) -> Result<()> {
    forward(device, "linear_low_rank", x, w.into(), Some(low_rank), bias, None, y, Order::sharded(None))
}

/// Computes [`linear_backward_input`] of a weight that tensor parallelism may shard, overwriting `dx`.
/// The sum over the rows of `w` has the order of `tree`; `dx` is f32 if that has several blocks.
pub fn sharded_linear_backward_input<'a>(
    device: &Device,
    dy: View,
    w: impl Into<Weight<'a>>,
    low_rank: Option<(View, View)>,
    tree: Option<&DepthTree>,
    dx: ViewMut,
) -> Result<()> {
    let op = match low_rank {
        None => "linear_backward_input",
        Some(_) => "linear_low_rank_backward_input",
    };
    backward_input(device, op, dy, w.into(), low_rank, dx, false, Order::sharded(tree))
}

/// Computes [`linear_backward_weight`] of a weight that tensor parallelism may shard.
pub fn sharded_linear_backward_weight(
    device: &Device,
    dy: View,
    x: View,
    dw: ViewMut,
    accumulate: bool,
) -> Result<()> {
    backward_weight(device, dy, x, dw, accumulate, Sharded::Any)
}

/// Factor of a low-rank term.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LowRankFactor {
    /// `[R, K]`, which is multiplied by the input.
    A,
    /// `[N, R]`, whose product is the output.
    B,
}

/// Adds [`linear_backward_weight`] of a factor of which tensor parallelism may shard the dimension other than R.
pub fn low_rank_backward_weight(
    device: &Device,
    factor: LowRankFactor,
    dy: View,
    x: View,
    dw: ViewMut,
) -> Result<()> {
    let sharded = match factor {
        LowRankFactor::A => Sharded::Columns,
        LowRankFactor::B => Sharded::Rows,
    };
    backward_weight(device, dy, x, dw, true, sharded)
}

/// Computes `y[T,N] = x[T,K] · w[N,K]ᵀ + h[T,R] · b[N,R]ᵀ (+ bias[1,N]) (+ residual[T,N])`. A term
/// of zeros leaves the bits of [`linear`]. For a bf16 result a GPU rounds term and product before it adds
/// them, and again after.
///
/// `x`, `w`, `h` and `b` share one type; `bias` is f32, `y` f32 or bf16, and `residual` f32 or, on a GPU, if
/// all others are, bf16.
pub fn linear_low_rank<'a>(
    device: &Device,
    x: View,
    w: impl Into<Weight<'a>>,
    low_rank: LowRank,
    bias: Option<View>,
    residual: Option<View>,
    y: ViewMut,
) -> Result<()> {
    forward(device, "linear_low_rank", x, w.into(), Some(low_rank), bias, residual, y, Order::WHOLE)
}

fn forward(
    device: &Device,
    op: &'static str,
    x: View,
    w: Weight,
    low_rank: Option<LowRank>,
    bias: Option<View>,
    residual: Option<View>,
    y: ViewMut,
    order: Order,
) -> Result<()> {
    let ((t, k), n) = (x.shape(), w.rows());
    let fp8 = packed_codes(device, op, &w, order)?;
    check::shape(op, "w", &w, n, k)?;
    check::shape(op, "y", &y, t, n)?;
    check::same_type(op, "w", &w, &x)?;
    order.check(op, k, y.dtype() == DType::F32, false)?;
    if let Some(LowRank { h, b }) = &low_rank {
        check::shape(op, "h", h, t, b.cols())?;
        check::shape(op, "b", b, n, h.cols())?;
        check::same_type(op, "h", h, &x)?;
        check::same_type(op, "b", b, &x)?;
    }
    if let Some(bias) = bias {
        check::shape(op, "bias", &bias, 1, n)?;
        check::is_f32(op, "bias", &bias)?;
    }
    if let Some(residual) = residual {
        check::shape(op, "residual", &residual, t, n)?;
        let all = [x.dtype(), y.dtype(), residual.dtype()];
        if residual.dtype() != DType::F32 && (device.backend() == Backend::Cpu || all.contains(&DType::F32)) {
            return Err(KernelError::invalid(
                op,
                "a residual of bf16 is for a GPU, factors and a result of bf16",
            ));
        }
    }
    // Bias and product are added to it in f32.
    let mut y = y;
    let is_added = bias.is_some() || fp8.is_some();
    let comes_first = residual.filter(|residual| is_added && residual.dtype() != DType::F32);
    if let Some(residual) = comes_first {
        super::cast(device, residual, y.reborrow())?;
    }
    let (residual, accumulate) = (residual.filter(|_| comes_first.is_none()), comes_first.is_some());
    let extra = bias.map_or(0, |b| b.num_bytes()) + residual.map_or(0, |r| r.num_bytes());
    let (a, b) = (Operand::rows_of(x), Operand::rows_of(w));
    let term = low_rank.map(|LowRank { h, b }| Term { a: Operand::rows_of(h), b: Operand::rows_of(b) });
    let Order { tree, sharded } = order;
    let product = Product { term, bias, residual, tree, sharded, ..Product::plain(a, b, y, accumulate) };
    let work = cost(device, op, &product, (t, n, k), w.num_bytes(), extra);
    match fp8 {
        Some(w) => super::fp8::run(device, work, product, w),
        None => launch_product(device, work, product),
    }
}

/// Computes `y[T,N] += x[T,K] · w[N,K]ᵀ`: a low-rank term added to a layer's output.
///
/// `x` and `w` share one type; `y` is f32 or bf16, a bf16 sum rounded once.
pub fn linear_add(device: &Device, x: View, w: View, y: ViewMut) -> Result<()> {
    const OP: &str = "linear_add";
    let ((t, k), n) = (x.shape(), w.rows());
    check::shape(OP, "w", &w, n, k)?;
    check::shape(OP, "y", &y, t, n)?;
    check::same_type(OP, "w", &w, &x)?;
    let (a, b) = (Operand::rows_of(x), Operand::rows_of(w));
    run(device, OP, Product::plain(a, b, y, true), (t, n, k), w.num_bytes(), 0)
}

/// Computes `dx[T,K] = dy[T,N] · w[N,K]`, or `+=` if `accumulate`.
///
/// `dy` and `w` share one type; `dx` is either type, a bf16 sum rounded once.
///
/// On a GPU `w` may be packed, as in [`linear`]: each row of `dy`, times the scales of the rows of `w`, is rounded to
/// E4M3 under a scale of its own.
pub fn linear_backward_input<'a>(
    device: &Device,
    dy: View,
    w: impl Into<Weight<'a>>,
    dx: ViewMut,
    accumulate: bool,
) -> Result<()> {
    backward_input(device, "linear_backward_input", dy, w.into(), None, dx, accumulate, Order::WHOLE)
}

/// Computes `dx[T,K] = dy[T,N] · w[N,K] + dh[T,R] · a[R,K]`, or `+=` if `accumulate`.
///
/// All factors share one type; `dx` is either type. `w` may be packed as in [`linear_backward_input`].
pub fn linear_low_rank_backward_input<'a>(
    device: &Device,
    dy: View,
    w: impl Into<Weight<'a>>,
    (dh, a): (View, View),
    dx: ViewMut,
    accumulate: bool,
) -> Result<()> {
    let op = "linear_low_rank_backward_input";
    backward_input(device, op, dy, w.into(), Some((dh, a)), dx, accumulate, Order::WHOLE)
}

fn backward_input(
    device: &Device,
    op: &'static str,
    dy: View,
    w: Weight,
    low_rank: Option<(View, View)>,
    dx: ViewMut,
    accumulate: bool,
    order: Order,
) -> Result<()> {
    let ((t, n), k) = (dy.shape(), w.cols());
    let fp8 = packed_codes(device, op, &w, order)?;
    if matches!(w, Weight::Packed(_)) && fp8.is_none() {
        return Err(KernelError::invalid(op, "a CPU reads no packed weights for the gradient of an input"));
    }
    order.check(op, n, dx.dtype() == DType::F32, accumulate)?;
    check::shape(op, "w", &w, n, k)?;
    check::shape(op, "dx", &dx, t, k)?;
    check::same_type(op, "w", &w, &dy)?;
    if let Some((dh, a)) = &low_rank {
        check::shape(op, "dh", dh, t, a.rows())?;
        check::shape(op, "a", a, dh.cols(), k)?;
        check::same_type(op, "dh", dh, &dy)?;
        check::same_type(op, "a", a, &dy)?;
    }
    let (a, b) = (Operand::rows_of(dy), Operand::columns_of(w));
    let term = low_rank.map(|(dh, a)| Term { a: Operand::rows_of(dh), b: Operand::columns_of(a) });
    let Order { tree, sharded } = order;
    let product = Product { term, tree, sharded, ..Product::plain(a, b, dx, accumulate) };
    let work = cost(device, op, &product, (t, k, n), w.num_bytes(), 0);
    match fp8 {
        Some(w) => super::fp8::run(device, work, product, w),
        None => launch_product(device, work, product),
    }
}

/// Returns the codes of a packed weight on a GPU, which multiplies them as FP8.
fn packed_codes<'a>(
    device: &Device,
    op: &'static str,
    w: &Weight<'a>,
    order: Order,
) -> Result<Option<BytesView<'a>>> {
    let Weight::Packed(packed) = w else { return Ok(None) };
    if device.backend() == Backend::Cpu {
        return Ok(None);
    }
    let codes = super::fp8::codes(op, packed)?;
    if order.tree.is_some_and(DepthTree::is_divided) {
        return Err(KernelError::invalid(op, "FP8 products have no sums in blocks"));
    }
    Ok(Some(codes))
}

/// Computes `dw[N,K] = dy[T,N]ᵀ · x[T,K]`, or `+=` if `accumulate`. `dw` is f32; `dy` and `x` share
/// one type.
pub fn linear_backward_weight(
    device: &Device,
    dy: View,
    x: View,
    dw: ViewMut,
    accumulate: bool,
) -> Result<()> {
    backward_weight(device, dy, x, dw, accumulate, Sharded::No)
}

fn backward_weight(
    device: &Device,
    dy: View,
    x: View,
    dw: ViewMut,
    accumulate: bool,
    sharded: Sharded,
) -> Result<()> {
    const OP: &str = "linear_backward_weight";
    let ((t, n), k) = (dy.shape(), x.cols());
    check::shape(OP, "x", &x, t, k)?;
    check::shape(OP, "dw", &dw, n, k)?;
    check::same_type(OP, "x", &x, &dy)?;
    check::is_f32(OP, "dw", &dw)?;
    let (a, b) = (Operand::columns_of(dy), Operand::columns_of(x));
    let product = Product { sharded, ..Product::plain(a, b, dw, accumulate) };
    run(device, OP, product, (n, k, t), x.num_bytes(), 0)
}

/// Allocates f32 rows of the result, if a GPU accumulates there before it rounds, or sums blocks of
/// k.
fn wide_sums(device: &Device, product: &Product) -> Result<Option<Tensor>> {
    if device.backend() == Backend::Cpu {
        return Ok(None);
    }
    if let Some(tree) = product.divided() {
        let [len, room] = [product.c.rows(), product.a.extent().room()]
            .map(|m| tree.levels() * cuda::gemm::tree_rows(product.c.cols(), m));
        let cols = Extent::exact(product.c.cols());
        return Ok(Some(device.alloc_in(MemoryKind::Scratch, Extent::new(len, room), cols, DType::F32)?));
    }
    let [len, room] =
        [product.c.rows(), product.a.extent().room()].map(|m| cuda::gemm::wide_rows(product, m));
    let cols = Extent::exact(product.c.cols());
    let is_needed = room > 0;
    is_needed
        .then(|| device.alloc_in(MemoryKind::Scratch, Extent::new(len, room), cols, DType::F32))
        .transpose()
}

/// Runs or records a checked product of `m × k` by `k × n`, whose second factor has so many bytes.
fn run(
    device: &Device,
    op: &'static str,
    product: Product,
    shape: (usize, usize, usize),
    second_bytes: usize,
    extra_bytes: usize,
) -> Result<()> {
    let work = cost(device, op, &product, shape, second_bytes, extra_bytes);
    launch_product(device, work, product)
}

/// Returns the cost of a product as [`run`].
fn cost(
    device: &Device,
    op: &'static str,
    product: &Product,
    (m, n, k): (usize, usize, usize),
    second_bytes: usize,
    extra_bytes: usize,
) -> OpCost {
    let (rank, dtype) = (product.term.map_or(0, |term| term.depth()), product.a.dtype());
    let read = (m * (k + rank) + n * rank) * dtype.size() + second_bytes + extra_bytes;
    let k = k + rank;
    // A GPU writes a low-rank term first, and adds it to the product.
    let again = product.term.is_some() && device.backend() == Backend::Cuda;
    let passes = 1 + usize::from(product.accumulate) + if again { 2 } else { 0 };
    let written = m * n * product.c.dtype().size() * passes;
    let flops = 2.0 * m as f64 * n as f64 * k as f64;
    OpCost::new(op, (m, n, dtype), flops, (read + written) as f64).with_depth(k)
}

fn launch_product(device: &Device, work: OpCost, product: Product) -> Result<()> {
    let mut wide = wide_sums(device, &product)?;
    launch_matmuls!(device, work, {
        cpu => product.run(cpu),
        cuda => cuda::gemm::run(cuda, product, wide.as_mut().map(Tensor::view_mut))
    })
}

/// Computes `db[1,N] += Σ_t dy[t,N]` in f32, in an order that does not depend on the number of
/// threads.
pub fn bias_backward(device: &Device, dy: View, db: ViewMut) -> Result<()> {
    const OP: &str = "bias_backward";
    check::shape(OP, "db", &db, 1, dy.cols())?;
    check::is_f32(OP, "db", &db)?;
    let work = check::work(OP, &dy, dy.len() as f64, (dy.num_bytes() + 2 * db.num_bytes()) as f64);
    let mut partial = partial_sums(device, dy.extent(), dy.cols())?;
    launch!(device, work, {
        cpu => cpu.bias_backward(dy, db),
        cuda => cuda::columns::column_sums(cuda, dy, db, partial.as_mut().map(Tensor::view_mut))
    })
}
