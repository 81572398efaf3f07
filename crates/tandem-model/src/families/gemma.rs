//! Gemma 1: Llama with norms around 1, an embedding scaled by √D and a tied head.

use tandem_kernels::ops::Activation;

use super::{Family, Padding, attention_bias, llama};
use crate::Result;
use crate::spec::{Config, DecoderSpec, NormKind};

pub(super) const FAMILY: Family = Family {
    model_type: "gemma",
    architecture: "GemmaForCausalLM",
    read,
    padding: Padding::Default(0),
    ..llama::FAMILY
};

fn read(config: &Config) -> Result<DecoderSpec> {
    let mut spec = llama::descendant(config, Some(256))?;
    common(config, &mut spec, "hidden_act")?;
    // Old folders of Gemma 1 say "gelu" and mean the tanh approximation, which it was trained with, and which
    // transformers took before its version 5. In Gemma 2 and 3 the word means what it says.
    if spec.mlp.activation == Activation::Gelu {
        spec.mlp.activation = Activation::GeluTanh;
    }
    Ok(spec)
}

/// Reads what all Gemmas share, into a description of Llama.
pub(super) fn common(config: &Config, spec: &mut DecoderSpec, activation: &str) -> Result<()> {
    config.refuse_flag("use_bidirectional_attention")?;
    spec.norm.kind = NormKind::Rms { offset: 1.0 };
    spec.embedding.scale = (spec.hidden_size as f32).sqrt();
    spec.head.tied = config.flag("tie_word_embeddings", true)?;
    spec.mlp.activation = config.activation(activation, "gelu_pytorch_tanh")?;
    attention_bias(config, spec)
}
