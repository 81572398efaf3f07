//! Parts of a decoder.

mod config;
mod rope;
mod rotary;

use tandem_kernels::ops::{Activation, AttentionShape, DeltaShape, HeadShape};

pub use config::Config;
pub(crate) use config::RotaryKeys;
pub(crate) use rope::{Rope, Rotation, TokenPlaces};
pub use rotary::{QueryScale, RotaryScaling, RotarySpec};

/// Causal decoder, described by its parts. [`crate::families`] makes one from a `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderSpec {
    /// `model_type` of the family.
    pub family: &'static str,
    /// Number of tokens in the vocabulary, `V`.
    pub vocab_size: usize,
    /// Width of the residual stream, `D`.
    pub hidden_size: usize,
    /// Number of blocks.
    pub num_layers: usize,
    /// Positions that the model was trained for (`max_position_embeddings`).
    pub max_positions: usize,
    /// Every norm of the model.
    pub norm: NormSpec,
    /// Join of attention and feed-forward with the residual stream.
    pub residual: Residual,
    /// Attention.
    pub attention: AttentionSpec,
    /// Linear attention of some blocks, in place of attention.
    pub linear_attention: Option<LinearAttentionSpec>,
    /// Rotary embedding of each block's queries and keys; `None` where a block has none, or positions
    /// are learned.
    pub rotary: Vec<Option<RotarySpec>>,
    /// Feed-forward.
    pub mlp: MlpSpec,
    /// Token and position tables.
    pub embedding: EmbeddingSpec,
    /// The language-model head.
    pub head: HeadSpec,
    /// Distribution of fresh weights.
    pub init: InitSpec,
    /// Tokens that end a text (`eos_token_id`).
    pub eos_token_ids: Vec<u32>,
}

impl DecoderSpec {
    /// Rotates every block's queries and keys in the same way.
    pub(crate) fn rotate_all(&mut self, rotary: &RotarySpec) {
        self.rotary = vec![Some(rotary.clone()); self.num_layers];
    }

    /// Returns the number of tokens of the longest text that the model is made for: more than it was trained
    /// for where rotations stretch with a text.
    pub fn context(&self) -> usize {
        let stretch = |rotary: &RotarySpec| match rotary.scaling {
            RotaryScaling::Dynamic { factor, .. } => factor.max(1.0),
            _ => 1.0,
        };
        let stretches = self.rotary.iter().flatten().map(stretch);
        (self.max_positions as f64 * stretches.fold(1.0, f64::max)) as usize
    }

    /// Returns the number of parameters, all but small ones. Its sizes may be absurd, and their products
    /// beyond any integer.
    pub(crate) fn approximate_parameters(&self) -> f64 {
        let product = |a: usize, b: usize| a as f64 * b as f64;
        let AttentionSpec { heads, kv_heads, head_dim, .. } = self.attention;
        let matrices = if self.mlp.gated { 3.0 } else { 2.0 };
        let hidden = self.hidden_size as f64;
        let mut block = 2.0 * hidden * (product(heads, head_dim) + product(kv_heads, head_dim));
        block += matrices * product(self.hidden_size, self.mlp.width);
        if let Some(LinearAttentionSpec { shape, .. }) = &self.linear_attention {
            let keys = product(shape.key_heads, shape.key_dim);
            let values = product(shape.value_heads, shape.value_dim);
            block += hidden * (2.0 * keys + 3.0 * values);
        }
        block * self.num_layers as f64 + 2.0 * product(self.vocab_size, self.hidden_size)
    }

    /// Returns the linear attention of block `layer`, if it has this in place of attention.
    pub(crate) fn linear_attention(&self, layer: usize) -> Option<&LinearAttentionSpec> {
        self.linear_attention.as_ref().filter(|spec| spec.blocks[layer])
    }

    /// Returns whether a half's output, before it joins the residual stream, is normalised.
    pub(crate) fn norms_after(&self) -> bool {
        matches!(
            self.residual,
            Residual::Sequential { norms: NormPlacement::After | NormPlacement::Both, .. }
        )
    }

    /// Returns whether a half's input is normalised.
    pub(crate) fn norms_before(&self) -> bool {
        !matches!(self.residual, Residual::Sequential { norms: NormPlacement::After, .. })
    }

    /// Gives every projection of attention and feed-forward a bias.
    pub(crate) fn with_biases(mut self) -> Self {
        (self.attention.qkv_bias, self.attention.out_bias) = (true, true);
        (self.mlp.up_bias, self.mlp.down_bias) = (true, true);
        self
    }
}

/// Kind of norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum NormKind {
    /// `x / rms(x) · (w + offset)`; the offset is 1 for Gemma, else 0.
    Rms {
        /// Added to the weight.
        offset: f32,
    },
    /// LayerNorm with a weight, and perhaps a bias.
    Layer {
        /// True if it has a bias.
        bias: bool,
    },
}

impl NormKind {
    /// LayerNorm with weight and bias.
    pub const LAYER: Self = Self::Layer { bias: true };
}

/// A norm over the hidden dimension.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormSpec {
    /// Kind of norm.
    pub kind: NormKind,
    /// Added under the root.
    pub eps: f32,
}

/// Place of the norms of a sequential block's halves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormPlacement {
    /// On a half's input: `x + f(norm(x))`.
    Before,
    /// On a half's output: `x + norm(f(x))` (OLMo 2).
    After,
    /// On both, with weights of their own: `x + norm′(f(norm(x)))` (Gemma 2, GLM-4).
    Both,
}

/// Join of a block's two halves with the residual stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Residual {
    /// `y = x + scale · attention(norm1(x))`, then `y + scale · mlp(norm2(y))`.
    Sequential {
        /// Place of the norms.
        norms: NormPlacement,
        /// Factor on what a half adds (Granite's `residual_multiplier`, else 1).
        scale: f32,
    },
    /// `x + attention(norm1(x)) + mlp(norm2(x))`.
    Parallel {
        /// True if one norm serves both halves (Phi).
        shared_norm: bool,
    },
}

impl Residual {
    /// Norms before both halves of a sequential block, no factor.
    pub const PRE_NORM: Self = Self::Sequential { norms: NormPlacement::Before, scale: 1.0 };
}

/// Norm of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// Each head by its own rms, one weight for all query heads and one for all key heads (Qwen 3).
    PerHead,
    /// As [`QkNorm::PerHead`], after the heads have rotated: the others come before (Hunyuan).
    PerHeadRotated,
    /// All query heads together, and all key heads (OLMo 2). The widths are those of the whole model,
    /// also in a tensor-parallel shard.
    Full {
        /// Columns of all query heads.
        queries: usize,
        /// Columns of all key heads.
        keys: usize,
    },
}

/// Attention.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionSpec {
    /// Query heads, `H`.
    pub heads: usize,
    /// Key/value heads, `K`; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head, `d`.
    pub head_dim: usize,
    /// Factor on the scores.
    pub scale: f32,
    /// True if q, k and v have a bias.
    pub qkv_bias: bool,
    /// True if the output projection has a bias.
    pub out_bias: bool,
    /// True if each query head has a gate beside it, whose sigmoid scales the head's output (Qwen 3.5).
    pub gated: bool,
    /// Norm of queries and keys.
    pub qk_norm: Option<QkNorm>,
    /// Sliding window of each block; `None` is full attention.
    pub windows: Vec<Option<u32>>,
    /// `s ← cap · tanh(s / cap)` on the scores.
    pub softcap: Option<f32>,
}

impl AttentionSpec {
    /// Returns the columns of the queries, `H·d`.
    pub fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Returns the columns of the keys, which are those of the values, `K·d`.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Returns the columns that the queries are projected to: their own, `H·d`, or `2·H·d` with a gate
    /// after each head.
    pub fn projected_query_width(&self) -> usize {
        self.query_width() * if self.gated { 2 } else { 1 }
    }

    /// Returns the columns of projected queries, keys and values together, `(H+2K)·d` without gates.
    pub fn qkv_width(&self) -> usize {
        self.projected_query_width() + 2 * self.kv_width()
    }

    /// Returns the kernel's description of the attention of block `layer`.
    pub fn shape(&self, layer: usize) -> AttentionShape {
        AttentionShape {
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            scale: self.scale,
            window: self.windows[layer],
            softcap: self.softcap,
        }
    }
}

/// Linear attention by the gated delta rule: the projections to queries, keys and values pass through a
/// causal convolution and SiLU, each query and key head is normalised, and the output's heads are
/// normalised and gated.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearAttentionSpec {
    /// True for each block that has it.
    pub blocks: Vec<bool>,
    /// Heads.
    pub shape: DeltaShape,
    /// Tokens that the convolution reaches, the current one included.
    pub conv_width: usize,
}

impl LinearAttentionSpec {
    /// Returns the channels of the convolution: queries, keys and values.
    pub fn conv_channels(&self) -> usize {
        2 * self.shape.key_width() + self.shape.value_width()
    }

    /// Returns the widths of what a token is projected to: queries, keys and values, the gates of the
    /// output, β's input, the decay's input.
    pub fn projected_widths(&self) -> [usize; 4] {
        let heads = self.shape.value_heads;
        [self.conv_channels(), self.shape.value_width(), heads, heads]
    }
}

/// Feed-forward.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MlpSpec {
    /// Width inside, `F`.
    pub width: usize,
    /// `down(f(gate(x)) · up(x))` rather than `down(f(up(x)))`.
    pub gated: bool,
    /// The function `f`.
    pub activation: Activation,
    /// True if gate and up have a bias.
    pub up_bias: bool,
    /// True if down has a bias.
    pub down_bias: bool,
}

impl MlpSpec {
    /// Returns the columns of the first projection: `2F` if gated, else `F`.
    pub fn up_width(&self) -> usize {
        self.width * if self.gated { 2 } else { 1 }
    }
}

/// Token and position tables.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EmbeddingSpec {
    /// Factor on the token's row (`√D` for Gemma, else 1).
    pub scale: f32,
    /// Rows of a learned position table.
    pub learned_positions: Option<usize>,
    /// Padding token, of which no look-up trains the table's row (`padding_idx` of `torch.nn.Embedding`). A tied
    /// head trains it.
    pub padding: Option<u32>,
}

/// Kind of head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadKind {
    /// Logits over the vocabulary, and a log-probability for each prediction.
    Language,
    /// A reward model's: one score per prediction, that of the sequence which ends there.
    Score {
        /// Padding token (`pad_token_id`): a sequence ends before it.
        pad: Option<u32>,
    },
}

/// The head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadSpec {
    /// Kind of head.
    pub kind: HeadKind,
    /// True if the token table is the head's weight.
    pub tied: bool,
    /// True if the logits have a bias.
    pub bias: bool,
    /// Scale and softcap of the logits.
    pub shape: HeadShape,
}

impl HeadSpec {
    /// Makes a score head as every `ForSequenceClassification` of `transformers` has it: one row of
    /// weights, no bias.
    pub fn score(pad: Option<u32>) -> Self {
        Self { kind: HeadKind::Score { pad }, tied: false, bias: false, shape: HeadShape::default() }
    }

    /// Returns whether the head scores sequences rather than tokens.
    pub fn is_score(&self) -> bool {
        matches!(self.kind, HeadKind::Score { .. })
    }

    /// Returns the padding token of a score head.
    pub fn pad(&self) -> Option<u32> {
        match self.kind {
            HeadKind::Language => None,
            HeadKind::Score { pad } => pad,
        }
    }
}

/// Distribution of fresh weights: matrices normal with mean 0, norms 1, biases 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InitSpec {
    /// Standard deviation of matrices and tables (`initializer_range`).
    pub std: f32,
    /// Standard deviation of matrices that write to the residual stream (GPT-2 divides by
    /// `√(2·layers)`).
    pub residual_std: f32,
}
