//! GPT-2: learned positions, LayerNorm, weights stored as `Conv1D` (`[in, out]`), tied head.

use tandem_kernels::ops::HeadShape;

use super::{Family, Order};
use crate::Result;
use crate::layout::Part;
use crate::spec::Config;
use crate::spec::{
    AttentionSpec, DecoderSpec, EmbeddingSpec, HeadKind, HeadSpec, InitSpec, MlpSpec, NormKind, NormSpec,
    Residual,
};

/// `GPT2LMHeadModel`.
pub struct Gpt2;

impl Family for Gpt2 {
    fn model_type(&self) -> &'static str {
        "gpt2"
    }

    fn architecture(&self) -> &'static str {
        "GPT2LMHeadModel"
    }

    fn base_prefix(&self) -> &'static str {
        "transformer."
    }

    fn spec(&self, config: &Config) -> Result<DecoderSpec> {
        config.refuse_flag("scale_attn_by_inverse_layer_idx")?;
        config.refuse_flag("add_cross_attention")?;
        let (hidden, heads, num_layers) =
            (config.count("n_embd")?, config.count("n_head")?, config.count("n_layer")?);
        if !hidden.is_multiple_of(heads) {
            return Err(config.error(format!("n_embd {hidden} is not a multiple of n_head {heads}")));
        }
        let head_dim = hidden / heads;
        let scaled = config.flag("scale_attn_weights", true)?;
        let positions = config.count_if("n_positions")?.unwrap_or(1024);
        let std = config.number("initializer_range", 0.02)? as f32;
        Ok(DecoderSpec {
            family: self.model_type(),
            vocab_size: config.count("vocab_size")?,
            hidden_size: hidden,
            num_layers,
            max_positions: positions,
            norm: NormSpec { kind: NormKind::Layer, eps: config.number("layer_norm_epsilon", 1e-5)? as f32 },
            residual: Residual::Sequential,
            attention: AttentionSpec {
                heads,
                kv_heads: heads,
                head_dim,
                scale: if scaled { (1.0 / (head_dim as f64).sqrt()) as f32 } else { 1.0 },
                qkv_bias: true,
                out_bias: true,
                qk_norm: false,
                windows: vec![None; num_layers],
                softcap: None,
            },
            rotary: None,
            mlp: MlpSpec {
                width: config.count_if("n_inner")?.unwrap_or(4 * hidden),
                gated: false,
                activation: config.activation("activation_function", "gelu_new")?,
                up_bias: true,
                down_bias: true,
            },
            embedding: EmbeddingSpec { scale: 1.0, learned_positions: Some(positions) },
            head: HeadSpec {
                kind: HeadKind::Language,
                tied: config.flag("tie_word_embeddings", true)?,
                bias: false,
                shape: HeadShape::default(),
            },
            init: InitSpec { std, residual_std: std / (2.0 * num_layers as f32).sqrt() },
            eos_token_ids: config.eos_token_ids()?,
        })
    }

    fn names(&self, part: Part) -> &'static [&'static str] {
        match part {
            Part::TokenTable => &["transformer.wte.weight"],
            Part::PositionTable => &["transformer.wpe.weight"],
            Part::Norm1Weight => &["transformer.h.{}.ln_1.weight"],
            Part::Norm1Bias => &["transformer.h.{}.ln_1.bias"],
            Part::QkvWeight => &["transformer.h.{}.attn.c_attn.weight"],
            Part::QkvBias => &["transformer.h.{}.attn.c_attn.bias"],
            Part::OutWeight => &["transformer.h.{}.attn.c_proj.weight"],
            Part::OutBias => &["transformer.h.{}.attn.c_proj.bias"],
            Part::Norm2Weight => &["transformer.h.{}.ln_2.weight"],
            Part::Norm2Bias => &["transformer.h.{}.ln_2.bias"],
            Part::UpWeight => &["transformer.h.{}.mlp.c_fc.weight"],
            Part::UpBias => &["transformer.h.{}.mlp.c_fc.bias"],
            Part::DownWeight => &["transformer.h.{}.mlp.c_proj.weight"],
            Part::DownBias => &["transformer.h.{}.mlp.c_proj.bias"],
            Part::FinalNormWeight => &["transformer.ln_f.weight"],
            Part::FinalNormBias => &["transformer.ln_f.bias"],
            Part::HeadWeight => &["lm_head.weight"],
            _ => &[],
        }
    }

    fn order(&self, part: Part) -> Order {
        match part {
            Part::QkvWeight | Part::OutWeight | Part::UpWeight | Part::DownWeight => Order::Transposed,
            _ => Order::Rows,
        }
    }
}
