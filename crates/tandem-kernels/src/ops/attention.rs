//! Grouped-query attention over a forest, flash-style: no T×T matrix is ever stored.

use crate::{Device, Forest, Result, View, ViewMut};

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

/// Which rows of a cache each query sees, for [`attention_decode`]: row ranges in order of position.
#[derive(Clone, Debug, Default)]
pub struct Visible {
    /// Query `i` sees `ranges[offsets[i]..offsets[i+1]]`; one more entry than queries.
    pub offsets: Vec<u32>,
    /// Cache rows.
    pub ranges: Vec<std::ops::Range<u32>>,
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
    unimplemented!()
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
    unimplemented!()
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
    unimplemented!()
}
