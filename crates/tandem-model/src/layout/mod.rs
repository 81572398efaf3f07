//! Layout of a layer's parameters in its flat buffer, and the shards of a decoder.

pub(crate) mod blocks;
pub(crate) mod slice;
mod stage;

pub(crate) use slice::Block;
pub use slice::{Run, TensorParallelShard};
pub use stage::PipelineStage;

use tandem_kernels::STATE_BLOCK;

use crate::spec::{DecoderSpec, NormKind, QkNorm, Residual};

/// Layer: the unit in which weights are fetched and gradients are emitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LayerId {
    /// Token and position tables.
    Embedding,
    /// A transformer block.
    Block(usize),
    /// The final norm and, if it has weights of its own, the head.
    Head,
}

impl std::fmt::Display for LayerId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Embedding => f.write_str("embedding"),
            Self::Block(i) => write!(f, "block {i}"),
            Self::Head => f.write_str("head"),
        }
    }
}

/// Parameter of a layer in our layout: weights are `[out, in]`, fused where one product computes
/// several.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum ParamKind {
    /// `[V, D]`.
    TokenTable,
    /// `[positions, D]`.
    PositionTable,
    /// `[1, D]`: the norm before attention.
    Norm1Weight,
    /// `[1, D]`.
    Norm1Bias,
    /// `[(H+2K)·d, D]`: rows of the queries, the keys, the values.
    QkvWeight,
    /// `[1, (H+2K)·d]`.
    QkvBias,
    /// `[D, H·d]`.
    OutWeight,
    /// `[1, D]`.
    OutBias,
    /// `[1, d]`: one norm for every query head; `[1, H·d]` if they are normalised together.
    QNormWeight,
    /// `[1, d]`: one norm for every key head; `[1, K·d]` if they are normalised together.
    KNormWeight,
    /// `[1, D]`: the norm before the feed-forward.
    Norm2Weight,
    /// `[1, D]`.
    Norm2Bias,
    /// `[2F, D]`: rows of the gate, then rows of up; `[F, D]` if not gated.
    UpWeight,
    /// `[1, 2F]` or `[1, F]`.
    UpBias,
    /// `[D, F]`.
    DownWeight,
    /// `[1, D]`.
    DownBias,
    /// `[1, D]`: the norm before the head.
    FinalNormWeight,
    /// `[1, D]`.
    FinalNormBias,
    /// `[V, D]`; absent if tied to the token table.
    HeadWeight,
    /// `[1, V]`.
    HeadBias,
    /// `[S·r, D]`: first factor of the low-rank terms of [`ParamKind::QkvWeight`]; S modules of it have
    /// a term.
    QkvLoraA,
    /// `[Σ rows of modules, r]`: second factor, one module's rows after another's.
    QkvLoraB,
    /// `[1, Σ rows of modules]`: magnitudes of DoRA.
    QkvMagnitude,
    /// `[r, H·d]`.
    OutLoraA,
    /// `[D, r]`.
    OutLoraB,
    /// `[1, D]`.
    OutMagnitude,
    /// `[S·r, D]`.
    UpLoraA,
    /// `[Σ rows of modules, r]`.
    UpLoraB,
    /// `[1, Σ rows of modules]`.
    UpMagnitude,
    /// `[r, F]`.
    DownLoraA,
    /// `[D, r]`.
    DownLoraB,
    /// `[1, D]`.
    DownMagnitude,
    /// `[V, r]`: looked up by token.
    TokenLoraA,
    /// `[D, r]`.
    TokenLoraB,
    /// `[r, D]`.
    HeadLoraA,
    /// `[V, r]`.
    HeadLoraB,
    /// `[1, D]`: weight of a score head, in f32.
    ScoreWeight,
    /// `[1, D]`: the norm after attention.
    PostNorm1Weight,
    /// `[1, D]`: the norm after the feed-forward.
    PostNorm2Weight,
    /// Projection into linear attention `[2K·dk + 2H·dv + 2H, D]`: rows of the queries, the keys, the
    /// values, the output's gates, β, the decay.
    DeltaInWeight,
    /// `[D, H·dv]`: projection back from linear attention.
    DeltaOutWeight,
    /// `[2K·dk + H·dv, W]`: the convolution over queries, keys and values.
    DeltaConvWeight,
    /// `[1, H]`: logarithm of the rate of decay (`A_log`).
    DeltaDecayLog,
    /// `[1, H]`: added to the decay's input (`dt_bias`).
    DeltaDecayBias,
    /// `[1, dv]`: one norm for the output of every value head.
    DeltaNormWeight,
    /// `[S·r, D]`.
    DeltaInLoraA,
    /// `[Σ rows of modules, r]`.
    DeltaInLoraB,
    /// `[1, Σ rows of modules]`.
    DeltaInMagnitude,
    /// `[r, H·dv]`.
    DeltaOutLoraA,
    /// `[D, r]`.
    DeltaOutLoraB,
    /// `[1, D]`.
    DeltaOutMagnitude,
}

/// Parts of a matrix's low-rank terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LowRankParts {
    /// Factor that reads the input.
    pub a: ParamKind,
    /// Factor that gives the output.
    pub b: ParamKind,
    /// Magnitudes of DoRA, where they are possible.
    pub magnitude: Option<ParamKind>,
}

const BIASES: [(ParamKind, ParamKind); 8] = [
    (ParamKind::Norm1Weight, ParamKind::Norm1Bias),
    (ParamKind::QkvWeight, ParamKind::QkvBias),
    (ParamKind::OutWeight, ParamKind::OutBias),
    (ParamKind::Norm2Weight, ParamKind::Norm2Bias),
    (ParamKind::UpWeight, ParamKind::UpBias),
    (ParamKind::DownWeight, ParamKind::DownBias),
    (ParamKind::FinalNormWeight, ParamKind::FinalNormBias),
    (ParamKind::HeadWeight, ParamKind::HeadBias),
];

impl ParamKind {
    /// Returns whether only products of whole matrices are added to this part's gradient, so that
    /// the first may write it.
    pub const fn is_written_by_product(self) -> bool {
        matches!(
            self,
            Self::QkvWeight
                | Self::OutWeight
                | Self::UpWeight
                | Self::DownWeight
                | Self::HeadWeight
                | Self::DeltaInWeight
                | Self::DeltaOutWeight
        )
    }

    /// Returns the parts of the low-rank terms of this matrix; `None` if it can have none.
    pub const fn low_rank(self) -> Option<LowRankParts> {
        let (a, b, magnitude) = match self {
            Self::QkvWeight => (Self::QkvLoraA, Self::QkvLoraB, Some(Self::QkvMagnitude)),
            Self::OutWeight => (Self::OutLoraA, Self::OutLoraB, Some(Self::OutMagnitude)),
            Self::UpWeight => (Self::UpLoraA, Self::UpLoraB, Some(Self::UpMagnitude)),
            Self::DownWeight => (Self::DownLoraA, Self::DownLoraB, Some(Self::DownMagnitude)),
            Self::DeltaInWeight => (Self::DeltaInLoraA, Self::DeltaInLoraB, Some(Self::DeltaInMagnitude)),
            Self::DeltaOutWeight => (Self::DeltaOutLoraA, Self::DeltaOutLoraB, Some(Self::DeltaOutMagnitude)),
            Self::TokenTable => (Self::TokenLoraA, Self::TokenLoraB, None),
            Self::HeadWeight => (Self::HeadLoraA, Self::HeadLoraB, None),
            _ => return None,
        };
        Some(LowRankParts { a, b, magnitude })
    }

    /// Returns the bias beside this weight, in families that have one.
    pub(crate) fn bias(self) -> Option<Self> {
        BIASES.iter().find(|(weight, _)| *weight == self).map(|(_, bias)| *bias)
    }

    /// Returns the weight beside this bias; `None` if this is no bias.
    pub(crate) fn weight_of_bias(self) -> Option<Self> {
        BIASES.iter().find(|(_, bias)| *bias == self).map(|(weight, _)| *weight)
    }

    /// Returns whether this is a factor of a low-rank term.
    pub const fn is_factor(self) -> bool {
        matches!(
            self,
            Self::QkvLoraA
                | Self::QkvLoraB
                | Self::OutLoraA
                | Self::OutLoraB
                | Self::UpLoraA
                | Self::UpLoraB
                | Self::DownLoraA
                | Self::DownLoraB
                | Self::TokenLoraA
                | Self::TokenLoraB
                | Self::HeadLoraA
                | Self::HeadLoraB
                | Self::DeltaInLoraA
                | Self::DeltaInLoraB
                | Self::DeltaOutLoraA
                | Self::DeltaOutLoraB
        )
    }

    /// Returns whether this is a row of magnitudes.
    pub const fn is_magnitude(self) -> bool {
        matches!(
            self,
            Self::QkvMagnitude
                | Self::OutMagnitude
                | Self::UpMagnitude
                | Self::DownMagnitude
                | Self::DeltaInMagnitude
                | Self::DeltaOutMagnitude
        )
    }

    /// Returns the name in checkpoints.
    pub const fn name(self) -> &'static str {
        match self {
            Self::TokenTable => "token_table",
            Self::PositionTable => "position_table",
            Self::Norm1Weight => "norm1_weight",
            Self::Norm1Bias => "norm1_bias",
            Self::QkvWeight => "qkv_weight",
            Self::QkvBias => "qkv_bias",
            Self::OutWeight => "out_weight",
            Self::OutBias => "out_bias",
            Self::QNormWeight => "q_norm_weight",
            Self::KNormWeight => "k_norm_weight",
            Self::Norm2Weight => "norm2_weight",
            Self::Norm2Bias => "norm2_bias",
            Self::UpWeight => "up_weight",
            Self::UpBias => "up_bias",
            Self::DownWeight => "down_weight",
            Self::DownBias => "down_bias",
            Self::FinalNormWeight => "final_norm_weight",
            Self::FinalNormBias => "final_norm_bias",
            Self::HeadWeight => "head_weight",
            Self::HeadBias => "head_bias",
            Self::QkvLoraA => "qkv_lora_a",
            Self::QkvLoraB => "qkv_lora_b",
            Self::QkvMagnitude => "qkv_magnitude",
            Self::OutLoraA => "out_lora_a",
            Self::OutLoraB => "out_lora_b",
            Self::OutMagnitude => "out_magnitude",
            Self::UpLoraA => "up_lora_a",
            Self::UpLoraB => "up_lora_b",
            Self::UpMagnitude => "up_magnitude",
            Self::DownLoraA => "down_lora_a",
            Self::DownLoraB => "down_lora_b",
            Self::DownMagnitude => "down_magnitude",
            Self::TokenLoraA => "token_lora_a",
            Self::TokenLoraB => "token_lora_b",
            Self::HeadLoraA => "head_lora_a",
            Self::HeadLoraB => "head_lora_b",
            Self::ScoreWeight => "score_weight",
            Self::PostNorm1Weight => "post_norm1_weight",
            Self::PostNorm2Weight => "post_norm2_weight",
            Self::DeltaInWeight => "delta_in_weight",
            Self::DeltaOutWeight => "delta_out_weight",
            Self::DeltaConvWeight => "delta_conv_weight",
            Self::DeltaDecayLog => "delta_decay_log",
            Self::DeltaDecayBias => "delta_decay_bias",
            Self::DeltaNormWeight => "delta_norm_weight",
            Self::DeltaInLoraA => "delta_in_lora_a",
            Self::DeltaInLoraB => "delta_in_lora_b",
            Self::DeltaInMagnitude => "delta_in_magnitude",
            Self::DeltaOutLoraA => "delta_out_lora_a",
            Self::DeltaOutLoraB => "delta_out_lora_b",
            Self::DeltaOutMagnitude => "delta_out_magnitude",
        }
    }

    /// Returns whether tensor parallelism divides a matrix by columns: a projection back to the residual
    /// stream.
    pub(crate) fn is_divided_by_columns(self) -> bool {
        matches!(self, Self::OutWeight | Self::DownWeight | Self::DeltaOutWeight)
    }

    /// Returns whether this is an operand of a product (or the token table) and so has a copy in
    /// the compute type. Norms, biases, the position table and a score head stay f32.
    pub const fn is_matrix(self) -> bool {
        matches!(
            self,
            Self::TokenTable
                | Self::QkvWeight
                | Self::OutWeight
                | Self::UpWeight
                | Self::DownWeight
                | Self::HeadWeight
                | Self::DeltaInWeight
                | Self::DeltaOutWeight
        ) || self.is_factor()
    }

    /// Returns whether weight decay applies: not to norms and biases.
    pub const fn decays(self) -> bool {
        self.is_matrix()
            || self.is_magnitude()
            || matches!(
                self,
                Self::PositionTable | Self::ScoreWeight | Self::DeltaConvWeight | Self::DeltaDecayLog
            )
    }

    /// Returns whether this is the weight of a norm.
    pub const fn is_norm_weight(self) -> bool {
        matches!(
            self,
            Self::Norm1Weight
                | Self::Norm2Weight
                | Self::FinalNormWeight
                | Self::QNormWeight
                | Self::KNormWeight
                | Self::PostNorm1Weight
                | Self::PostNorm2Weight
        )
    }
}

/// Alignment of parameters in elements. Every parameter starts on a 64-byte line in f32 and bf16,
/// and no block of optimiser states spans two parameters: what all tensor-parallel ranks hold whole
/// then has the same states on each.
const ALIGNMENT: usize = STATE_BLOCK;

/// Parameter and its place in the layer's flat buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParamSpec {
    /// The parameter.
    pub part: ParamKind,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// First element in the layer's flat buffer.
    pub offset: usize,
    /// True if weight decay applies.
    pub decay: bool,
}

impl ParamSpec {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.rows * self.cols
    }

    /// Returns whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the elements in the layer's flat buffer.
    pub fn range(&self) -> std::ops::Range<usize> {
        self.offset..self.offset + self.len()
    }
}

/// Layout of a layer's flat buffer. Parameters with a copy in the compute type come first, then the
/// others that decay, then norms and biases: the copy and each decay group are contiguous.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerLayout {
    /// Parameters, by offset.
    pub params: Vec<ParamSpec>,
    /// Elements of the flat buffer, padding included. Padding holds zeros.
    pub len: usize,
    /// Elements from the start that have a copy in the compute type: the matrices, without an
    /// untied token table, which is only looked up.
    pub compute_len: usize,
    /// Elements from the start that decay.
    pub decay_len: usize,
}

impl LayerLayout {
    /// Lays out parts of the given sizes. `looked_up` names a matrix that needs no copy in the
    /// compute type.
    pub fn new(parts: &[(ParamKind, usize, usize)], looked_up: Option<ParamKind>) -> Self {
        let group = |part: ParamKind| match part {
            _ if part.is_matrix() && Some(part) != looked_up => 0,
            _ if part.decays() => 1,
            _ => 2,
        };
        let mut sorted = parts.to_vec();
        sorted.sort_by_key(|&(part, ..)| (group(part), part));
        let mut layout =
            Self { params: Vec::with_capacity(parts.len()), len: 0, compute_len: 0, decay_len: 0 };
        for (part, rows, cols) in sorted {
            layout.params.push(ParamSpec { part, rows, cols, offset: layout.len, decay: part.decays() });
            layout.len += (rows * cols).next_multiple_of(ALIGNMENT);
            match group(part) {
                0 => (layout.compute_len, layout.decay_len) = (layout.len, layout.len),
                1 => layout.decay_len = layout.len,
                _ => {}
            }
        }
        layout
    }

    /// Returns the layer's parameter of this part, if it has one.
    pub fn param(&self, part: ParamKind) -> Option<&ParamSpec> {
        self.params.iter().find(|p| p.part == part)
    }

    /// Returns the number of parameters, without padding.
    pub fn num_parameters(&self) -> usize {
        self.params.iter().map(ParamSpec::len).sum()
    }

    /// Lays out a layer of a model.
    pub(crate) fn from_spec(spec: &DecoderSpec, layer: LayerId) -> Self {
        match layer {
            LayerId::Embedding => Self::embedding(spec),
            LayerId::Block(index) => Self::block(spec, index),
            LayerId::Head => Self::head(spec),
        }
    }

    fn embedding(spec: &DecoderSpec) -> Self {
        let mut parts = vec![(ParamKind::TokenTable, spec.vocab_size, spec.hidden_size)];
        if let Some(positions) = spec.embedding.learned_positions {
            parts.push((ParamKind::PositionTable, positions, spec.hidden_size));
        }
        Self::new(&parts, (!spec.head.tied).then_some(ParamKind::TokenTable))
    }

    fn block(spec: &DecoderSpec, index: usize) -> Self {
        let (hidden, attention, mlp) = (spec.hidden_size, &spec.attention, &spec.mlp);
        let linear = spec.linear_attention(index);
        let attends = linear.is_none();
        let norm_bias = spec.norm.kind == NormKind::LAYER;
        let (before, after) = (spec.norms_before(), spec.norms_after());
        let second_norm = before && spec.residual != Residual::Parallel { shared_norm: true };
        let (qk_norm, [q_norm, k_norm]) = match attention.qk_norm {
            Some(QkNorm::Full { queries, keys }) => (true, [queries, keys]),
            Some(QkNorm::PerHead | QkNorm::PerHeadRotated) => (true, [attention.head_dim; 2]),
            None => (false, [0; 2]),
        };
        let mut parts = vec![
            (before, ParamKind::Norm1Weight, 1, hidden),
            (before && norm_bias, ParamKind::Norm1Bias, 1, hidden),
            (attends, ParamKind::QkvWeight, attention.qkv_width(), hidden),
            (attends && attention.qkv_bias, ParamKind::QkvBias, 1, attention.qkv_width()),
            (attends, ParamKind::OutWeight, hidden, attention.query_width()),
            (attends && attention.out_bias, ParamKind::OutBias, 1, hidden),
            (attends && qk_norm, ParamKind::QNormWeight, 1, q_norm),
            (attends && qk_norm, ParamKind::KNormWeight, 1, k_norm),
            (after, ParamKind::PostNorm1Weight, 1, hidden),
            (second_norm, ParamKind::Norm2Weight, 1, hidden),
            (second_norm && norm_bias, ParamKind::Norm2Bias, 1, hidden),
            (true, ParamKind::UpWeight, mlp.up_width(), hidden),
            (mlp.up_bias, ParamKind::UpBias, 1, mlp.up_width()),
            (true, ParamKind::DownWeight, hidden, mlp.width),
            (mlp.down_bias, ParamKind::DownBias, 1, hidden),
            (after, ParamKind::PostNorm2Weight, 1, hidden),
        ];
        if let Some(linear) = linear {
            let (shape, channels) = (&linear.shape, linear.conv_channels());
            parts.extend([
                (true, ParamKind::DeltaInWeight, linear.projected_widths().iter().sum(), hidden),
                (true, ParamKind::DeltaOutWeight, hidden, shape.value_width()),
                (true, ParamKind::DeltaConvWeight, channels, linear.conv_width),
                (true, ParamKind::DeltaDecayLog, 1, shape.value_heads),
                (true, ParamKind::DeltaDecayBias, 1, shape.value_heads),
                (true, ParamKind::DeltaNormWeight, 1, shape.value_dim),
            ]);
        }
        let present: Vec<_> = parts.into_iter().filter(|p| p.0).map(|(_, part, r, c)| (part, r, c)).collect();
        Self::new(&present, None)
    }

    fn head(spec: &DecoderSpec) -> Self {
        let (hidden, vocab, is_score) = (spec.hidden_size, spec.vocab_size, spec.head.is_score());
        let parts = [
            (true, ParamKind::FinalNormWeight, 1, hidden),
            (spec.norm.kind == NormKind::LAYER, ParamKind::FinalNormBias, 1, hidden),
            (!spec.head.tied && !is_score, ParamKind::HeadWeight, vocab, hidden),
            (is_score, ParamKind::ScoreWeight, 1, hidden),
            (spec.head.bias, ParamKind::HeadBias, 1, vocab),
        ];
        let present: Vec<_> = parts.into_iter().filter(|p| p.0).map(|(_, part, r, c)| (part, r, c)).collect();
        Self::new(&present, None)
    }
}
