//! Hunyuan (dense): Llama with a norm on each query and key head, after they have rotated.

use super::{Family, SEPARATE_QKV, llama};
use crate::Result;
use crate::layout::ParamKind::*;
use crate::spec::{Config, DecoderSpec, QkNorm, RotaryKeys};

pub(super) const FAMILY: Family = Family {
    model_type: "hunyuan_v1_dense",
    architecture: "HunYuanDenseV1ForCausalLM",
    read,
    modules: &[
        (TokenTable, &["model.embed_tokens"]),
        (Norm1Weight, &["model.layers.{}.input_layernorm"]),
        (QkvWeight, SEPARATE_QKV),
        (OutWeight, &["model.layers.{}.self_attn.o_proj"]),
        (QNormWeight, &["model.layers.{}.self_attn.query_layernorm"]),
        (KNormWeight, &["model.layers.{}.self_attn.key_layernorm"]),
        (Norm2Weight, &["model.layers.{}.post_attention_layernorm"]),
        (UpWeight, &["model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj"]),
        (DownWeight, &["model.layers.{}.mlp.down_proj"]),
        (FinalNormWeight, &["model.norm"]),
        (HeadWeight, &["lm_head"]),
    ],
    ..llama::FAMILY
};

fn read(config: &Config) -> Result<DecoderSpec> {
    let mut spec = llama::unrotated(config, None, 1e-5)?;
    let bias = config.flag("attention_bias", false)?;
    (spec.attention.qkv_bias, spec.attention.out_bias) = (bias, bias);
    spec.attention.qk_norm = Some(QkNorm::PerHeadRotated);
    let keys = RotaryKeys { alpha_stretches: true, ..RotaryKeys::whole(10_000.0) };
    spec.rotate_all(&config.rotary(spec.attention.head_dim, keys)?);
    Ok(spec)
}
