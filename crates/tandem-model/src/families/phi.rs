//! Phi 1, 1.5 and 2: both halves of a block read one LayerNorm; partial rotary embedding; biases everywhere.

use tandem_kernels::ops::HeadShape;

use super::Family;
use crate::Result;
use crate::layout::Part;
use crate::spec::Config;
use crate::spec::{
    AttentionSpec, DecoderSpec, EmbeddingSpec, HeadKind, HeadSpec, InitSpec, MlpSpec, NormKind, NormSpec,
    Residual,
};

/// `PhiForCausalLM`.
pub struct Phi;

impl Family for Phi {
    fn model_type(&self) -> &'static str {
        "phi"
    }

    fn architecture(&self) -> &'static str {
        "PhiForCausalLM"
    }

    fn base_prefix(&self) -> &'static str {
        "model."
    }

    fn spec(&self, config: &Config) -> Result<DecoderSpec> {
        config.refuse_flag("qk_layernorm")?;
        // The head's bias would have to lie in another layer than its weight.
        config.refuse_flag("tie_word_embeddings")?;
        let (heads, kv_heads, head_dim) = config.heads(None)?;
        let num_layers = config.count("num_hidden_layers")?;
        let std = config.number("initializer_range", 0.02)? as f32;
        Ok(DecoderSpec {
            family: self.model_type(),
            vocab_size: config.count("vocab_size")?,
            hidden_size: config.count("hidden_size")?,
            num_layers,
            max_positions: config.count_if("max_position_embeddings")?.unwrap_or(2048),
            norm: NormSpec { kind: NormKind::Layer, eps: config.number("layer_norm_eps", 1e-5)? as f32 },
            residual: Residual::Parallel { shared_norm: true },
            attention: AttentionSpec {
                heads,
                kv_heads,
                head_dim,
                scale: (1.0 / (head_dim as f64).sqrt()) as f32,
                qkv_bias: true,
                out_bias: true,
                qk_norm: false,
                windows: vec![None; num_layers],
                softcap: None,
            },
            rotary: Some(config.rotary(head_dim, 0.5)?),
            mlp: MlpSpec {
                width: config.count("intermediate_size")?,
                gated: false,
                activation: config.activation("hidden_act", "gelu_new")?,
                up_bias: true,
                down_bias: true,
            },
            embedding: EmbeddingSpec { scale: 1.0, learned_positions: None },
            head: HeadSpec { kind: HeadKind::Language, tied: false, bias: true, shape: HeadShape::default() },
            init: InitSpec { std, residual_std: std },
            eos_token_ids: config.eos_token_ids()?,
        })
    }

    fn names(&self, part: Part) -> &'static [&'static str] {
        match part {
            Part::TokenTable => &["model.embed_tokens.weight"],
            Part::Norm1Weight => &["model.layers.{}.input_layernorm.weight"],
            Part::Norm1Bias => &["model.layers.{}.input_layernorm.bias"],
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
            Part::OutWeight => &["model.layers.{}.self_attn.dense.weight"],
            Part::OutBias => &["model.layers.{}.self_attn.dense.bias"],
            Part::UpWeight => &["model.layers.{}.mlp.fc1.weight"],
            Part::UpBias => &["model.layers.{}.mlp.fc1.bias"],
            Part::DownWeight => &["model.layers.{}.mlp.fc2.weight"],
            Part::DownBias => &["model.layers.{}.mlp.fc2.bias"],
            Part::FinalNormWeight => &["model.final_layernorm.weight"],
            Part::FinalNormBias => &["model.final_layernorm.bias"],
            Part::HeadWeight => &["lm_head.weight"],
            Part::HeadBias => &["lm_head.bias"],
            _ => &[],
        }
    }
}
