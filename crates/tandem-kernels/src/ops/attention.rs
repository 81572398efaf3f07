//! Grouped-query attention over a forest, flash-style: no T×T matrix is ever stored.

use crate::cpu::attention as kernel;
use crate::device::on;
use crate::ops::check::{self, Operand};
use crate::{
    Backend, DType, Device, Forest, KernelError, MemoryKind, OpCost, Result, Tensor, View, ViewMut, cuda,
};

/// Heads, scale and mask of an attention layer.
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
                format!(
                    "{} heads of {} do not divide among {} key/value heads",
                    self.heads, self.head_dim, self.kv_heads
                ),
            ));
        }
        if self.window == Some(0) || self.softcap.is_some_and(|cap| cap <= 0.0) {
            return Err(KernelError::invalid(op, "window and softcap must be positive"));
        }
        Ok(())
    }

    /// Returns the number of query/key pairs over all heads, of the queries from one on.
    pub fn pairs(&self, forest: &Forest, first_query: usize) -> f64 {
        let window = self.window.unwrap_or(u32::MAX);
        let queries = &forest.positions[first_query..];
        let seen: f64 = queries.iter().map(|&p| f64::from(window.min(p + 1))).sum();
        seen * self.heads as f64
    }

    /// Returns the number of queries that a CPU takes together. At its multiples a segment may be divided, and attention
    /// of the parts has the bits of attention of all of it.
    pub fn query_block(&self) -> usize {
        kernel::block_queries(self)
    }
}

/// Checks shapes and types of `q`, `k` and `v`.
fn check_operands(
    op: &'static str,
    q: &impl Operand,
    k: &impl Operand,
    v: &impl Operand,
    [queries, tokens]: [usize; 2],
    shape: &AttentionShape,
) -> Result<()> {
    check::shape(op, "q", q, queries, shape.heads * shape.head_dim)?;
    for (name, operand) in [("k", k as &dyn Operand), ("v", v)] {
        check::shape(op, name, operand, tokens, shape.kv_heads * shape.head_dim)?;
        check::same_type(op, name, operand, q)?;
    }
    Ok(())
}

/// Number of trees that keeps every thread busy in backward. The queries of fewer trees are divided
/// into parts, and each part allocates its own sums.
pub const MANY_TREES: usize = 16;

/// Returns the number of parts that each tree's queries are divided into, so that a few long trees
/// keep many threads busy. It is a function of the batch alone, since it decides the order of the
/// sum.
fn num_parts(forest: &Forest, shape: &AttentionShape, model_kv_heads: usize) -> usize {
    let tasks = forest.groups().len() * model_kv_heads;
    // A part of fewer than some hundred rows would spend its time on its sums.
    let worthwhile = forest.num_tokens() * shape.heads / shape.kv_heads / 256;
    MANY_TREES.div_ceil(tasks.max(1)).min(worthwhile).max(1)
}

/// Cache rows that each query of [`attention_decode`] sees: row ranges in order of position.
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
            let ranges = self.ranges(query);
            if ranges.iter().all(std::ops::Range::is_empty) {
                return Err(KernelError::invalid(op, format!("query {query} has no visible cache rows")));
            }
            if let Some(range) = ranges.iter().find(|r| r.end as usize > cache_rows) {
                return Err(KernelError::invalid(
                    op,
                    format!("cache rows {range:?} of query {query} exceed the cache of {cache_rows} rows"),
                ));
            }
        }
        Ok(())
    }

    /// Returns the cache rows of a query.
    pub(crate) fn ranges(&self, query: usize) -> &[std::ops::Range<u32>] {
        &self.ranges[self.offsets[query] as usize..self.offsets[query + 1] as usize]
    }
}

/// Operands of [`attention`]. `q`, `k`, `v` and `out` share one type. Q is T without the tokens before `first_query`.
pub struct Attention<'a> {
    /// `[Q, H·d]`.
    pub q: View<'a>,
    /// `[T, K·d]`.
    pub k: View<'a>,
    /// `[T, K·d]`.
    pub v: View<'a>,
    /// The segments of the T tokens.
    pub forest: &'a Forest,
    /// The first token that is a query; those before it are only seen.
    pub first_query: usize,
    /// Heads, scale and mask.
    pub shape: &'a AttentionShape,
    /// `[Q, H·d]`.
    pub out: ViewMut<'a>,
    /// `[Q, H]` f32, saved for backward.
    pub log_sum_exp: ViewMut<'a>,
}

/// Operands of [`attention_backward`]; all but `log_sum_exp` share one type.
pub struct AttentionBackward<'a> {
    /// `[T, H·d]`.
    pub q: View<'a>,
    /// `[T, K·d]`.
    pub k: View<'a>,
    /// `[T, K·d]`.
    pub v: View<'a>,
    /// The output of the forward pass.
    pub out: View<'a>,
    /// `[T, H]` f32, from the forward pass.
    pub log_sum_exp: View<'a>,
    /// `[T, H·d]`.
    pub d_out: View<'a>,
    /// The segments of the T tokens.
    pub forest: &'a Forest,
    /// Heads, scale and mask.
    pub shape: &'a AttentionShape,
    /// Key/value heads of the model, of which a tensor-parallel rank has some: they decide the order of
    /// sums on a CPU.
    pub model_kv_heads: usize,
    /// `[T, H·d]`, overwritten.
    pub dq: ViewMut<'a>,
    /// `[T, K·d]`, overwritten.
    pub dk: ViewMut<'a>,
    /// `[T, K·d]`, overwritten.
    pub dv: ViewMut<'a>,
}

/// Operands of [`attention_decode`], of one type.
pub struct AttentionDecode<'a> {
    /// `[B, H·d]`: one token per row.
    pub q: View<'a>,
    /// `[C, K·d]`: the whole key cache.
    pub k: View<'a>,
    /// `[C, K·d]`: the whole value cache.
    pub v: View<'a>,
    /// The cache rows that each row of `q` sees, its own included.
    pub visible: &'a Visible,
    /// Heads, scale and mask; the window counts from the end of the visible rows.
    pub shape: &'a AttentionShape,
    /// `[B, H·d]`.
    pub out: ViewMut<'a>,
}

/// Computes `out = softmax(mask(scale · q kᵀ)) v` per head. A token sees its own segment up to
/// itself, and all of its ancestors. Query head `h` uses key/value head `h / (heads/kv_heads)`.
pub fn attention(device: &Device, call: Attention) -> Result<()> {
    const OP: &str = "attention";
    let Attention { q, k, v, forest, first_query, shape, out, log_sum_exp } = &call;
    shape.check(OP)?;
    let (tokens, first_query) = (forest.num_tokens(), *first_query);
    if first_query > tokens {
        return Err(KernelError::invalid(OP, format!("the first query is token {first_query} of {tokens}")));
    }
    check_operands(OP, q, k, v, [tokens - first_query, tokens], shape)?;
    check::shape(OP, "out", out, q.rows(), q.cols())?;
    check::same_type(OP, "out", out, q)?;
    check::f32_shape(OP, "log_sum_exp", log_sum_exp, q.rows(), shape.heads)?;
    let bytes = check::bytes(&[q, k, v, out, log_sum_exp]);
    let (q, forest, shape) = (*q, *forest, *shape);
    let work = || forest_work(OP, &q, (4.0, shape), (forest, first_query), bytes);
    let run = on!(cpu => kernel::forward(cpu, call), cuda => cuda::attention::forward(cuda, call));
    device.launch_counting(work, run).map(drop)
}

/// Computes the gradients of [`attention`].
pub fn attention_backward(device: &Device, call: AttentionBackward) -> Result<()> {
    const OP: &str = "attention_backward";
    let AttentionBackward { q, k, v, out, log_sum_exp, d_out, forest, shape, model_kv_heads, dq, dk, dv } =
        &call;
    shape.check(OP)?;
    let tokens = forest.num_tokens();
    check_operands(OP, q, k, v, [tokens; 2], shape)?;
    check_operands(OP, dq, dk, dv, [tokens; 2], shape)?;
    check::same_type(OP, "dq", dq, q)?;
    for (name, operand) in [("out", out), ("d_out", d_out)] {
        check::shape(OP, name, operand, tokens, q.cols())?;
        check::same_type(OP, name, operand, q)?;
    }
    check::f32_shape(OP, "log_sum_exp", log_sum_exp, tokens, shape.heads)?;
    let mut scratch = match device.backend() {
        // The gradients of keys and values are summed over queries and heads in f32.
        Backend::Cpu => {
            let parts = num_parts(forest, shape, *model_kv_heads);
            device.alloc(MemoryKind::Scratch, parts * tokens, 2 * k.cols(), DType::F32)?
        }
        // `Σ out · d_out` per head.
        Backend::Cuda => device.alloc(MemoryKind::Scratch, tokens, shape.heads, DType::F32)?,
    };
    let bytes = check::bytes(&[q, k, v, out, log_sum_exp, d_out, dq, dk, dv]);
    let (q, forest, shape) = (*q, *forest, *shape);
    let work = || forest_work(OP, &q, (10.0, shape), (forest, 0), bytes);
    let scratch = scratch.view_mut();
    let run = on!(
        cpu => kernel::backward(cpu, call, scratch),
        cuda => cuda::attention::backward(cuda, call, scratch)
    );
    device.launch_counting(work, run).map(drop)
}

/// Returns the cost of attention over a forest, with `flops` per element of a visible key and query head. The
/// depth is the mean number of keys that a query sees.
fn forest_work(
    op: &'static str,
    q: &View,
    (flops, shape): (f64, &AttentionShape),
    (forest, first_query): (&Forest, usize),
    bytes: f64,
) -> OpCost {
    let pairs = shape.pairs(forest, first_query);
    let keys = pairs / (shape.heads * q.rows()).max(1) as f64;
    check::work(op, q, flops * shape.head_dim as f64 * pairs, bytes).with_depth(keys.round() as usize)
}

/// Computes attention of single new tokens over a key/value cache.
pub fn attention_decode(device: &Device, call: AttentionDecode) -> Result<()> {
    const OP: &str = "attention_decode";
    let AttentionDecode { q, k, v, visible, shape, out } = &call;
    shape.check(OP)?;
    let rows = q.rows();
    check::shape(OP, "q", q, rows, shape.heads * shape.head_dim)?;
    check::shape(OP, "k", k, k.rows(), shape.kv_heads * shape.head_dim)?;
    check::shape(OP, "v", v, k.rows(), k.cols())?;
    check::shape(OP, "out", out, rows, q.cols())?;
    for (name, operand) in [("k", k as &dyn Operand), ("v", v), ("out", out)] {
        check::same_type(OP, name, operand, q)?;
    }
    visible.check(OP, rows, k.rows())?;
    let bytes = check::bytes(&[q, out]);
    let (q, k, visible, shape) = (*q, *k, *visible, *shape);
    let work = || {
        let seen: f64 = visible.ranges.iter().map(|r| r.len() as f64).sum();
        let flops = 4.0 * seen * q.cols() as f64;
        let cache = 2.0 * seen * (k.cols() * k.dtype().size()) as f64;
        check::work(OP, &q, flops, cache + bytes)
    };
    let mut partial = match device.backend() {
        Backend::Cpu => None,
        // Result of each part of a query's keys, if some query has several parts.
        Backend::Cuda => {
            let (parts, are_several) = cuda::attention::decode_parts(visible, rows, shape);
            let row =
                || device.alloc(MemoryKind::Scratch, parts * shape.heads, shape.head_dim + 2, DType::F32);
            are_several.then(row).transpose()?
        }
    };
    let partial = partial.as_mut().map(Tensor::view_mut);
    let run = on!(
        cpu => kernel::decode(cpu, call),
        cuda => cuda::attention::decode(cuda, call, partial)
    );
    device.launch_counting(work, run).map(drop)
}
