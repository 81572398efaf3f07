//! GPT-NeoX and Pythia: parallel residual with two LayerNorms, partial rotary embedding, q, k and v fused by head.

use tandem_kernels::ops::HeadShape;

use super::{Family, Order};
use crate::Result;
use crate::layout::Part;
use crate::spec::Config;
use crate::spec::{
    AttentionSpec, DecoderSpec, EmbeddingSpec, HeadKind, HeadSpec, InitSpec, MlpSpec, NormKind, NormSpec,
    Residual,
};

/// `GPTNeoXForCausalLM`.
pub struct GptNeoX;

impl Family for GptNeoX {
    fn model_type(&self) -> &'static str {
        "gpt_neox"
    }

    fn architecture(&self) -> &'static str {
        "GPTNeoXForCausalLM"
    }

    fn base_prefix(&self) -> &'static str {
        "gpt_neox."
    }

    fn spec(&self, config: &Config) -> Result<DecoderSpec> {
        let (hidden, heads) = (config.count("hidden_size")?, config.count("num_attention_heads")?);
        if !hidden.is_multiple_of(heads) {
            return Err(
                config.error(format!("hidden_size {hidden} is not a multiple of {heads} attention heads"))
            );
        }
        let head_dim = hidden / heads;
        let num_layers = config.count("num_hidden_layers")?;
        let attention_bias = config.flag("attention_bias", true)?;
        let std = config.number("initializer_range", 0.02)? as f32;
        Ok(DecoderSpec {
            family: self.model_type(),
            vocab_size: config.count("vocab_size")?,
            hidden_size: hidden,
            num_layers,
            max_positions: config.count_if("max_position_embeddings")?.unwrap_or(2048),
            norm: NormSpec { kind: NormKind::Layer, eps: config.number("layer_norm_eps", 1e-5)? as f32 },
            residual: if config.flag("use_parallel_residual", true)? {
                Residual::Parallel { shared_norm: false }
            } else {
                Residual::Sequential
            },
            attention: AttentionSpec {
                heads,
                kv_heads: heads,
                head_dim,
                scale: (1.0 / (head_dim as f64).sqrt()) as f32,
                qkv_bias: attention_bias,
                out_bias: attention_bias,
                qk_norm: false,
                windows: vec![None; num_layers],
                softcap: None,
            },
            rotary: Some(config.rotary(head_dim, 0.25)?),
            mlp: MlpSpec {
                width: config.count("intermediate_size")?,
                gated: false,
                activation: config.activation("hidden_act", "gelu")?,
                up_bias: true,
                down_bias: true,
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

    fn names(&self, part: Part) -> &'static [&'static str] {
        match part {
            Part::TokenTable => &["gpt_neox.embed_in.weight"],
            Part::Norm1Weight => &["gpt_neox.layers.{}.input_layernorm.weight"],
            Part::Norm1Bias => &["gpt_neox.layers.{}.input_layernorm.bias"],
            Part::QkvWeight => &["gpt_neox.layers.{}.attention.query_key_value.weight"],
            Part::QkvBias => &["gpt_neox.layers.{}.attention.query_key_value.bias"],
            Part::OutWeight => &["gpt_neox.layers.{}.attention.dense.weight"],
            Part::OutBias => &["gpt_neox.layers.{}.attention.dense.bias"],
            Part::Norm2Weight => &["gpt_neox.layers.{}.post_attention_layernorm.weight"],
            Part::Norm2Bias => &["gpt_neox.layers.{}.post_attention_layernorm.bias"],
            Part::UpWeight => &["gpt_neox.layers.{}.mlp.dense_h_to_4h.weight"],
            Part::UpBias => &["gpt_neox.layers.{}.mlp.dense_h_to_4h.bias"],
            Part::DownWeight => &["gpt_neox.layers.{}.mlp.dense_4h_to_h.weight"],
            Part::DownBias => &["gpt_neox.layers.{}.mlp.dense_4h_to_h.bias"],
            Part::FinalNormWeight => &["gpt_neox.final_layer_norm.weight"],
            Part::FinalNormBias => &["gpt_neox.final_layer_norm.bias"],
            Part::HeadWeight => &["embed_out.weight"],
            _ => &[],
        }
    }

    fn renamed(&self) -> Option<(&'static str, &'static str)> {
        Some(("embed_out", "lm_head"))
    }

    fn order(&self, part: Part) -> Order {
        match part {
            Part::QkvWeight | Part::QkvBias => Order::HeadInterleaved,
            _ => Order::Rows,
        }
    }
}
