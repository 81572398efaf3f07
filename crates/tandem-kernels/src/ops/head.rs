//! The language-model head: log-probabilities and their gradient without ever holding all logits.
//!
//! Rows are walked in chunks of a fixed size (a function of the vocabulary, not of threads), so memory is
//! O(chunk × vocabulary). Logits are computed in f32 from operands of the compute type.

use crate::{Device, Result, View, ViewMut};

/// What the head does to the logits.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HeadShape {
    /// `l ← cap · tanh(l / cap)` (Gemma 2).
    pub softcap: Option<f32>,
    /// Factor on the logits before the softcap; `None` is 1.
    pub logit_scale: Option<f32>,
}

/// What to score: prediction `i` asks for token `targets[i]` at scored row `rows[i]` (ascending).
#[derive(Clone, Copy, Debug)]
pub struct Targets<'a> {
    /// Index into the rows of `hidden`, ascending; a row may appear several times or not at all.
    pub rows: &'a [u32],
    /// Token ids.
    pub targets: &'a [u32],
}

/// What the forward pass of the head yields, on the host.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HeadScores {
    /// Log-probability of each prediction's target `[P]`.
    pub log_prob: Vec<f32>,
    /// Whether the target has the largest logit (the first of equals) `[P]`.
    pub hit: Vec<bool>,
    /// Entropy of each row's distribution, in nats `[R]`.
    pub entropy: Vec<f32>,
    /// Mean of each row's logits over the vocabulary `[R]`.
    pub mean_logit: Vec<f32>,
    /// log Σ exp of each row's logits, for backward `[R]`.
    pub log_sum_exp: Vec<f32>,
}

/// Scores `hidden` `[R,D]` against `w` `[V,D]` (one type) and `bias` `[1,V]` f32.
/// `scores` is overwritten; its vectors are reused, so that a steady state allocates nothing.
///
/// # Errors
/// If a target is outside the vocabulary, or shapes or types do not fit.
pub fn head(
    device: &Device,
    hidden: View,
    w: View,
    bias: Option<View>,
    targets: Targets,
    shape: &HeadShape,
    scores: &mut HeadScores,
) -> Result<()> {
    unimplemented!()
}

/// Gradient of `Σ_i d_log_prob[i] · log_prob[i]`: `dhidden` `[R,D]` is overwritten (either type), `dw` `[V,D]` f32 and
/// `dbias` `[1,V]` f32 are added to (skipped if `None`).
///
/// # Errors
/// If shapes or types do not fit.
pub fn head_backward(
    device: &Device,
    hidden: View,
    w: View,
    bias: Option<View>,
    targets: Targets,
    shape: &HeadShape,
    scores: &HeadScores,
    d_log_prob: &[f32],
    dhidden: ViewMut,
    dw: Option<ViewMut>,
    dbias: Option<ViewMut>,
) -> Result<()> {
    unimplemented!()
}
