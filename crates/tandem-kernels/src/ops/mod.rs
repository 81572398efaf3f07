//! The operations, one file each. An operation checks shapes and types and states its cost, then
//! [`Device::launch`](crate::Device) runs the device's kernel. A dry run records the cost; a
//! profile times the kernel.

mod activation;
mod adafactor;
mod attention;
mod causal_conv;
mod check;
mod columns;
mod convert;
mod delta_rule;
mod depth_tree;
mod dropout;
mod elementwise;
mod embedding;
mod exact;
mod fp8;
pub(crate) mod gemm;
mod head;
mod head_blocks;
mod head_divergence;
mod head_gate;
mod head_parts;
mod head_strips;
mod linear;
mod logits;
mod low_rank;
mod newton_schulz;
mod noise;
mod norm;
pub(crate) mod optimizer;
mod pack;
pub(crate) mod packed;
mod rope;
mod sampling;
mod stored;

pub use activation::{Activation, activate, activate_backward, gated, gated_backward};
pub use adafactor::{factored_direction, factored_moments, whole_moments};
pub use attention::{
    Attention, AttentionBackward, AttentionDecode, AttentionShape, MANY_TREES, Visible, attention,
    attention_backward, attention_decode,
};
pub use causal_conv::{CausalConv, CausalConvBackward, WIDEST_CONV, causal_conv, causal_conv_backward};
pub use columns::{column_dots, scale_columns, scaled_columns};
pub use convert::{
    add, cast, fill_zero, gather_rows, read_f32, read_f32_into, scale, scatter_rows, spread_rows, write_f32,
};
pub use delta_rule::{DeltaRule, DeltaRuleBackward, DeltaShape, delta_rule, delta_rule_backward};
pub use depth_tree::DepthTree;
pub(crate) use dropout::Mask;
pub use dropout::{dropout, dropout_backward_add};
pub use elementwise::{divide, fill, lerp, lerp_of, mix, square_root, swap, weighted_sum};
pub(crate) use embedding::tokens_by_id;
pub use embedding::{embedding, embedding_backward, embedding_backward_exact};
pub use exact::{check_terms, exact_merge, exact_sum, exact_sum_squares};
pub use fp8::{FP8_MULTIPLE, LINEAR_FP8, LINEAR_FP8_BACKWARD_INPUT, is_fp8_matmul};
pub use head::{
    Head, HeadGradients, HeadScores, HeadShape, HeadWeights, KeptLogits, Targets, head, head_backward,
    head_keeping, head_part,
};
pub use head_divergence::{
    DivergenceSide, HeadDivergence, RowDivergence, head_divergence, head_divergence_backward,
};
pub use head_gate::{Gate, HeadGates, head_gate, head_gate_backward};
pub use head_parts::{ELSEWHERE, HeadParts};
pub(crate) use head_parts::{FIRST, NOT_HERE, PASSED_OVER};
pub(crate) use head_strips::{LogitMemory, Strip, strips};
pub use linear::{
    LowRankFactor, bias_backward, linear, linear_add, linear_backward_input, linear_backward_weight,
    linear_low_rank, linear_low_rank_backward_input, low_rank_backward_weight, sharded_linear,
    sharded_linear_backward_input, sharded_linear_backward_weight, sharded_linear_low_rank,
};
pub use logits::score_logits;
pub use low_rank::{LowRank, low_rank_row_norms, low_rank_row_squares};
pub use newton_schulz::orthogonalize;
pub use noise::{NoiseRow, add_noise};
pub(crate) use norm::BLOCK_ROWS;
pub use norm::{
    LayerNorm, LayerNormBackward, RmsNorm, RmsNormBackward, layer_norm, layer_norm_backward, rms_norm,
    rms_norm_backward,
};
pub use optimizer::{
    AdamW, DecayedUpdate, Gradient, Lion, Momentum, MuonMomentum, RmsProp, SQUARES_BLOCK, ScheduleFreeAdamW,
    Sgd, Update, adamw, block_squares, copy_states, decayed_update, lion, muon_momentum, rmsprop,
    scaled_gradient, schedule_free_adamw, sgd, sum_of_squares,
};
pub(crate) use pack::rows_of_block;
pub use pack::{pack, unpack};
pub use packed::{PackedRows, PackedWeight, Weight, reads_packed};
pub use rope::{RopePairs, RopeTable, rope};
pub use sampling::{Draw, relative_weights, sample, shape_logits};
pub use stored::{StoredFp8, StoredInt8, StoredNf4, pack_stored_fp8, pack_stored_int8, pack_stored_nf4};
