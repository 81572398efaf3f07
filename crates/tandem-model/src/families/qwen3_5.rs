//! Qwen 3.5 (dense, text): three of four blocks have linear attention by the gated delta rule; the others
//! have attention with gated heads, of which a quarter rotates. Norms multiply by `w + 1`.

use tandem_kernels::ops::{Activation, DeltaShape};

use super::{Family, Modules, attention_bias, llama};
use crate::Result;
use crate::layout::ParamKind;
use crate::spec::{Config, DecoderSpec, LinearAttentionSpec, NormKind, QkNorm, RotaryKeys};

pub(super) const FAMILY: Family = Family {
    model_type: "qwen3_5_text",
    architecture: "Qwen3_5ForCausalLM",
    read,
    modules: MODULES,
    stem: Some("Qwen3_5Text"),
    ..llama::FAMILY
};

pub(super) const MODULES: &Modules = &[
    (
        ParamKind::DeltaInWeight,
        &[
            "model.layers.{}.linear_attn.in_proj_qkv",
            "model.layers.{}.linear_attn.in_proj_z",
            "model.layers.{}.linear_attn.in_proj_b",
            "model.layers.{}.linear_attn.in_proj_a",
        ],
    ),
    (ParamKind::DeltaOutWeight, &["model.layers.{}.linear_attn.out_proj"]),
    (ParamKind::DeltaConvWeight, &["model.layers.{}.linear_attn.conv1d"]),
    (ParamKind::DeltaDecayLog, &["model.layers.{}.linear_attn"]),
    (ParamKind::DeltaDecayBias, &["model.layers.{}.linear_attn"]),
    (ParamKind::DeltaNormWeight, &["model.layers.{}.linear_attn.norm"]),
];

/// Sizes that a config leaves out where they are those of `Qwen3_5TextConfig`.
const DEFAULTS: &[(&str, u64)] = &[
    ("vocab_size", 248_320),
    ("hidden_size", 4096),
    ("intermediate_size", 12_288),
    ("num_hidden_layers", 32),
    ("num_attention_heads", 16),
    ("num_key_value_heads", 4),
    ("max_position_embeddings", 32_768),
    ("linear_conv_kernel_dim", 4),
    ("linear_key_head_dim", 128),
    ("linear_value_head_dim", 128),
    ("linear_num_key_heads", 16),
    ("linear_num_value_heads", 32),
];

pub(super) fn read(config: &Config) -> Result<DecoderSpec> {
    let config = &config.clone().without_mrope().with_defaults(DEFAULTS);
    let mut spec = llama::unrotated(config, Some(256), 1e-6)?;
    spec.norm.kind = NormKind::Rms { offset: 1.0 };
    attention_bias(config, &mut spec)?;
    spec.attention.qk_norm = Some(QkNorm::PerHead);
    spec.attention.gated = true;
    spec.rotate_all(&config.rotary(spec.attention.head_dim, RotaryKeys::partial(0.25))?);
    spec.linear_attention = linear_attention(config, &spec)?;
    if let Some(linear) = &spec.linear_attention {
        for (rotary, _) in spec.rotary.iter_mut().zip(&linear.blocks).filter(|(_, is_linear)| **is_linear) {
            *rotary = None;
        }
    }
    Ok(spec)
}

fn linear_attention(config: &Config, spec: &DecoderSpec) -> Result<Option<LinearAttentionSpec>> {
    let interval = config.count_if("full_attention_interval")?.unwrap_or(4);
    let blocks = config.linear_blocks(spec.num_layers, |layer| !(layer + 1).is_multiple_of(interval))?;
    let (keys, values) = (config.count("linear_num_key_heads")?, config.count("linear_num_value_heads")?);
    if !values.is_multiple_of(keys) {
        return Err(config.error(format!(
            "linear_num_value_heads is {values}, expected a multiple of linear_num_key_heads, {keys}"
        )));
    }
    if spec.mlp.activation != Activation::Silu {
        return Err(config.error("linear attention has hidden_act \"silu\" only".to_owned()));
    }
    let key_dim = config.count("linear_key_head_dim")?;
    let shape = DeltaShape {
        key_heads: keys,
        value_heads: values,
        key_dim,
        value_dim: config.count("linear_value_head_dim")?,
        scale: (1.0 / (key_dim as f64).sqrt()) as f32,
    };
    let conv_width = config.at_most("linear_conv_kernel_dim", tandem_kernels::ops::WIDEST_CONV)?;
    Ok(blocks.contains(&true).then_some(LinearAttentionSpec { blocks, shape, conv_width }))
}
