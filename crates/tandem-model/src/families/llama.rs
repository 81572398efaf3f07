//! Llama 1–3: RMSNorm, grouped-query attention, gated feed-forward, Llama-3 rotary scaling.

use tandem_kernels::ops::HeadShape;

use super::Family;
use crate::Result;
use crate::layout::Part;
use crate::spec::Config;
use crate::spec::{
    AttentionSpec, DecoderSpec, EmbeddingSpec, HeadKind, HeadSpec, InitSpec, MlpSpec, NormKind, NormSpec,
    Residual,
};

/// `LlamaForCausalLM`.
pub struct Llama;

impl Family for Llama {
    fn model_type(&self) -> &'static str {
        "llama"
    }

    fn architecture(&self) -> &'static str {
        "LlamaForCausalLM"
    }

    fn base_prefix(&self) -> &'static str {
        "model."
    }

    fn spec(&self, config: &Config) -> Result<DecoderSpec> {
        let mut spec = spec(config, self.model_type(), None)?;
        let attention_bias = config.flag("attention_bias", false)?;
        (spec.attention.qkv_bias, spec.attention.out_bias) = (attention_bias, attention_bias);
        let mlp_bias = config.flag("mlp_bias", false)?;
        (spec.mlp.up_bias, spec.mlp.down_bias) = (mlp_bias, mlp_bias);
        Ok(spec)
    }

    fn names(&self, part: Part) -> &'static [&'static str] {
        names(part)
    }
}

/// What Llama and its descendants have in common; they change the rest. No biases, full attention, untied head.
pub(super) fn spec(config: &Config, family: &'static str, head_dim: Option<usize>) -> Result<DecoderSpec> {
    let (heads, kv_heads, head_dim) = config.heads(head_dim)?;
    let num_layers = config.count("num_hidden_layers")?;
    let std = config.number("initializer_range", 0.02)? as f32;
    Ok(DecoderSpec {
        family,
        vocab_size: config.count("vocab_size")?,
        hidden_size: config.count("hidden_size")?,
        num_layers,
        max_positions: config.count_if("max_position_embeddings")?.unwrap_or(2048),
        norm: NormSpec {
            kind: NormKind::Rms { offset: 0.0 },
            eps: config.number("rms_norm_eps", 1e-6)? as f32,
        },
        residual: Residual::Sequential,
        attention: AttentionSpec {
            heads,
            kv_heads,
            head_dim,
            scale: (1.0 / (head_dim as f64).sqrt()) as f32,
            qkv_bias: false,
            out_bias: false,
            qk_norm: false,
            windows: vec![None; num_layers],
            softcap: None,
        },
        rotary: Some(config.rotary(head_dim, 1.0)?),
        mlp: MlpSpec {
            width: config.count("intermediate_size")?,
            gated: true,
            activation: config.activation("hidden_act", "silu")?,
            up_bias: false,
            down_bias: false,
        },
        embedding: EmbeddingSpec { scale: 1.0, learned_positions: None },
        head: HeadSpec {
            kind: HeadKind::Language,
            tied: config.flag("tie_word_embeddings", false)?,
            bias: false,
            shape: HeadShape::default(),
        },
        init: InitSpec { std, residual_std: std },
        eos_token_ids: config.eos_token_ids()?,
    })
}

/// Llama's tensor names, which its descendants kept.
pub(super) fn names(part: Part) -> &'static [&'static str] {
    match part {
        Part::TokenTable => &["model.embed_tokens.weight"],
        Part::Norm1Weight => &["model.layers.{}.input_layernorm.weight"],
        Part::QkvWeight => &[
            "model.layers.{}.self_attn.q_proj.weight",
            "model.layers.{}.self_attn.k_proj.weight",
            "model.layers.{}.self_attn.v_proj.weight",
        ],
        Part::QkvBias => &[
            "model.layers.{}.self_attn.q_proj.bias",
            "model.layers.{}.self_attn.k_proj.bias",
            "model.layers.{}.self_attn.v_proj.bias",
        ],
        Part::OutWeight => &["model.layers.{}.self_attn.o_proj.weight"],
        Part::OutBias => &["model.layers.{}.self_attn.o_proj.bias"],
        Part::QNormWeight => &["model.layers.{}.self_attn.q_norm.weight"],
        Part::KNormWeight => &["model.layers.{}.self_attn.k_norm.weight"],
        Part::Norm2Weight => &["model.layers.{}.post_attention_layernorm.weight"],
        Part::UpWeight => &["model.layers.{}.mlp.gate_proj.weight", "model.layers.{}.mlp.up_proj.weight"],
        Part::UpBias => &["model.layers.{}.mlp.gate_proj.bias", "model.layers.{}.mlp.up_proj.bias"],
        Part::DownWeight => &["model.layers.{}.mlp.down_proj.weight"],
        Part::DownBias => &["model.layers.{}.mlp.down_proj.bias"],
        Part::FinalNormWeight => &["model.norm.weight"],
        Part::HeadWeight => &["lm_head.weight"],
        _ => &[],
    }
}
