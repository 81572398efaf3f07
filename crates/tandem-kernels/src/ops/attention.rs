//! Grouped-query attention over a forest, flash-style: no T×T matrix is ever stored.

use crate::cpu::attention as kernel;
use crate::device::on;
use crate::ops::check::{self, Operand};
use crate::{Backend, DType, Device, Forest, KernelError, Kind, Result, Tensor, View, ViewMut, cuda};

/// What kind of attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Factor on the scores, usually `1/sqrt(head_dim)`.
    pub scale: f32,
    /// A query at position p sees keys at positions `> p - window`.
    pub window: Option<u32>,
    /// `s ← cap · tanh(s / cap)` after scaling (Gemma 2).
    pub softcap: Option<f32>,
}

impl AttentionShape {
    fn check(&self, op: &'static str) -> Result<()> {
        if self.head_dim == 0 || self.kv_heads == 0 || !self.heads.is_multiple_of(self.kv_heads) {
            return Err(KernelError::invalid(
                op,
                format!("{} heads over {} key/value heads of {}", self.heads, self.kv_heads, self.head_dim),
            ));
        }
        if self.window == Some(0) || self.softcap.is_some_and(|cap| cap <= 0.0) {
            return Err(KernelError::invalid(op, "window and softcap must be positive"));
        }
        Ok(())
    }

    /// Query/key pairs that are looked at, over all heads.
    fn pairs(&self, forest: &Forest) -> f64 {
        let window = self.window.unwrap_or(u32::MAX);
        let seen: f64 = forest.positions.iter().map(|&p| f64::from(window.min(p + 1))).sum();
        seen * self.heads as f64
    }
}

/// `q`, `k`, `v` must be those of `forest`'s tokens.
fn check_operands(
    op: &'static str,
    q: &impl Operand,
    k: &impl Operand,
    v: &impl Operand,
    tokens: usize,
    shape: &AttentionShape,
) -> Result<()> {
    check::shape(op, "q", q, tokens, shape.heads * shape.head_dim)?;
    for (name, operand) in [("k", k as &dyn Operand), ("v", v)] {
        check::shape(op, name, operand, tokens, shape.kv_heads * shape.head_dim)?;
        check::same_type(op, name, operand, q)?;
    }
    Ok(())
}

/// A forest of so many trees or more keeps every thread busy in backward. The queries of fewer are dealt out, and take memory for
/// each part.
pub const MANY_TREES: usize = 16;

/// Sums of the gradient of keys and values that each tree's queries are dealt out to, so that a few long trees keep
/// many threads busy. A function of the batch alone, since it decides the order of the sum.
fn num_parts(forest: &Forest, shape: &AttentionShape) -> usize {
    let tasks = forest.groups().len() * shape.kv_heads;
    // A part of less than some hundred rows would spend its time on its sums.
    let worthwhile = forest.num_tokens() * shape.heads / shape.kv_heads / 256;
    MANY_TREES.div_ceil(tasks.max(1)).min(worthwhile).max(1)
}

/// Which rows of a cache each query sees, for [`attention_decode`]: row ranges in order of position.
#[derive(Clone, Debug, Default)]
pub struct Visible {
    /// Query `i` sees `ranges[offsets[i]..offsets[i+1]]`; one more entry than queries.
    pub offsets: Vec<u32>,
    /// Cache rows.
    pub ranges: Vec<std::ops::Range<u32>>,
}

impl Visible {
    fn check(&self, op: &'static str, queries: usize, cache_rows: usize) -> Result<()> {
        if self.offsets.len() != queries + 1
            || !self.offsets.is_sorted()
            || self.offsets[queries] as usize > self.ranges.len()
        {
            return Err(KernelError::invalid(
                op,
                format!(
                    "{queries} queries with {} offsets into {} ranges",
                    self.offsets.len(),
                    self.ranges.len()
                ),
            ));
        }
        for query in 0..queries {
            let ranges = self.of(query);
            if ranges.iter().all(std::ops::Range::is_empty) {
                return Err(KernelError::invalid(op, format!("query {query} sees nothing")));
            }
            if let Some(range) = ranges.iter().find(|r| r.end as usize > cache_rows) {
                return Err(KernelError::invalid(
                    op,
                    format!("query {query} sees cache rows {range:?} of {cache_rows}"),
                ));
            }
        }
        Ok(())
    }

    /// What query `query` sees.
    pub(crate) fn of(&self, query: usize) -> &[std::ops::Range<u32>] {
        &self.ranges[self.offsets[query] as usize..self.offsets[query + 1] as usize]
    }
}

/// `out[T, H·d] = softmax(mask(scale · q kᵀ)) v` per head, where a token sees its own segment causally and its
/// ancestors wholly. Queries of head `h` use key/value head `h / (heads/kv_heads)`.
///
/// `q` `[T, H·d]`, `k`, `v` `[T, K·d]` and `out` share one type; `log_sum_exp` `[T, H]` f32 is kept for backward.
///
/// # Errors
/// If shapes or types do not fit.
pub fn attention(
    device: &Device,
    q: View,
    k: View,
    v: View,
    forest: &Forest,
    shape: &AttentionShape,
    out: ViewMut,
    log_sum_exp: ViewMut,
) -> Result<()> {
    const OP: &str = "attention";
    shape.check(OP)?;
    let tokens = forest.num_tokens();
    check_operands(OP, &q, &k, &v, tokens, shape)?;
    check::shape(OP, "out", &out, tokens, q.cols())?;
    check::same_type(OP, "out", &out, &q)?;
    check::f32_shape(OP, "log_sum_exp", &log_sum_exp, tokens, shape.heads)?;
    let bytes = check::bytes(&[&q, &k, &v, &out, &log_sum_exp]);
    let work = || check::work(OP, &q, 4.0 * shape.head_dim as f64 * shape.pairs(forest), bytes);
    device.launch_counting(
        work,
        on!(
            cpu => kernel::forward(cpu, q, k, v, forest, shape, out, log_sum_exp),
            cuda => cuda::attention::forward(cuda, q, k, v, forest, shape, out, log_sum_exp)
        ),
    )?;
    Ok(())
}

/// Gradients of [`attention`]: `dq`, `dk`, `dv` are overwritten; all of one type with `q`.
///
/// # Errors
/// If shapes or types do not fit.
pub fn attention_backward(
    device: &Device,
    q: View,
    k: View,
    v: View,
    out: View,
    log_sum_exp: View,
    d_out: View,
    forest: &Forest,
    shape: &AttentionShape,
    dq: ViewMut,
    dk: ViewMut,
    dv: ViewMut,
) -> Result<()> {
    const OP: &str = "attention_backward";
    shape.check(OP)?;
    let tokens = forest.num_tokens();
    check_operands(OP, &q, &k, &v, tokens, shape)?;
    check_operands(OP, &dq, &dk, &dv, tokens, shape)?;
    check::same_type(OP, "dq", &dq, &q)?;
    for (name, operand) in [("out", &out), ("d_out", &d_out)] {
        check::shape(OP, name, operand, tokens, q.cols())?;
        check::same_type(OP, name, operand, &q)?;
    }
    check::f32_shape(OP, "log_sum_exp", &log_sum_exp, tokens, shape.heads)?;
    let mut scratch = match device.backend() {
        // The gradients of keys and values are sums over queries and heads: they are summed in f32.
        Backend::Cpu => {
            let parts = num_parts(forest, shape);
            device.alloc(Kind::Scratch, parts * tokens, 2 * k.cols(), DType::F32)?
        }
        // `Σ out · d_out` of each head.
        Backend::Cuda => device.alloc(Kind::Scratch, tokens, shape.heads, DType::F32)?,
    };
    let bytes = check::bytes(&[&q, &k, &v, &out, &log_sum_exp, &d_out, &dq, &dk, &dv]);
    let work = || check::work(OP, &q, 10.0 * shape.head_dim as f64 * shape.pairs(forest), bytes);
    let scratch = scratch.view_mut();
    device.launch_counting(
        work,
        on!(
            cpu => kernel::backward(cpu, q, k, v, out, log_sum_exp, d_out, forest, shape, dq, dk, dv, scratch),
            cuda => cuda::attention::backward(cuda, q, k, v, out, log_sum_exp, d_out, forest, shape, dq, dk, dv, scratch)
        ),
    )?;
    Ok(())
}

/// Attention of single new tokens over a key/value cache: row `i` of `q` `[B, H·d]` sees the cache rows that
/// `visible` lists (its own included). `k`, `v` are the whole caches `[C, K·d]`. `window` counts from the row's end.
///
/// # Errors
/// If shapes or types do not fit.
pub fn attention_decode(
    device: &Device,
    q: View,
    k: View,
    v: View,
    visible: &Visible,
    shape: &AttentionShape,
    out: ViewMut,
) -> Result<()> {
    const OP: &str = "attention_decode";
    shape.check(OP)?;
    let rows = q.rows();
    check::shape(OP, "q", &q, rows, shape.heads * shape.head_dim)?;
    check::shape(OP, "k", &k, k.rows(), shape.kv_heads * shape.head_dim)?;
    check::shape(OP, "v", &v, k.rows(), k.cols())?;
    check::shape(OP, "out", &out, rows, q.cols())?;
    for (name, operand) in [("k", &k as &dyn Operand), ("v", &v), ("out", &out)] {
        check::same_type(OP, name, operand, &q)?;
    }
    visible.check(OP, rows, k.rows())?;
    let bytes = check::bytes(&[&q, &out]);
    let work = || {
        let seen: f64 = visible.ranges.iter().map(|r| r.len() as f64).sum();
        let flops = 4.0 * seen * q.cols() as f64;
        let cache = 2.0 * seen * (k.cols() * k.dtype().size()) as f64;
        check::work(OP, &q, flops, cache + bytes)
    };
    let mut partial = match device.backend() {
        Backend::Cpu => None,
        // What each part of a query's keys gives, where some query's are cut into several.
        Backend::Cuda => {
            let parts = cuda::attention::decode_parts(visible, rows, shape);
            let row = || device.alloc(Kind::Scratch, parts * shape.heads, shape.head_dim + 2, DType::F32);
            (parts > rows).then(row).transpose()?
        }
    };
    let partial = partial.as_mut().map(Tensor::view_mut);
    device.launch_counting(
        work,
        on!(
            cpu => kernel::decode(cpu, q, k, v, visible, shape, out),
            cuda => cuda::attention::decode(cuda, q, k, v, visible, shape, out, partial)
        ),
    )?;
    Ok(())
}
