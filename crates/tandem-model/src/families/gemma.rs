//! Gemma 1: Llama with norms around 1, an embedding scaled by √D and a tied head.

use tandem_kernels::ops::Activation;

use super::{Family, llama};
use crate::Result;
use crate::layout::Part;
use crate::spec::Config;
use crate::spec::{DecoderSpec, NormKind};

/// `GemmaForCausalLM`.
pub struct Gemma;

impl Family for Gemma {
    fn model_type(&self) -> &'static str {
        "gemma"
    }

    fn architecture(&self) -> &'static str {
        "GemmaForCausalLM"
    }

    fn base_prefix(&self) -> &'static str {
        "model."
    }

    fn spec(&self, config: &Config) -> Result<DecoderSpec> {
        config.refuse_flag("use_bidirectional_attention")?;
        let mut spec = llama::spec(config, self.model_type(), Some(256))?;
        spec.norm.kind = NormKind::Rms { offset: 1.0 };
        spec.embedding.scale = (spec.hidden_size as f32).sqrt();
        spec.head.tied = config.flag("tie_word_embeddings", true)?;
        // The official folders say "gelu" and mean the tanh approximation, as transformers takes it too.
        spec.mlp.activation = match config.activation("hidden_act", "gelu_pytorch_tanh")? {
            Activation::Gelu => Activation::GeluTanh,
            other => other,
        };
        let bias = config.flag("attention_bias", false)?;
        (spec.attention.qkv_bias, spec.attention.out_bias) = (bias, bias);
        Ok(spec)
    }

    fn names(&self, part: Part) -> &'static [&'static str] {
        llama::names(part)
    }
}
