//! Cohere (Command R, Aya): both halves of a block read one LayerNorm without bias; interleaved rotation;
//! scaled logits.

use tandem_kernels::ops::RopePairs;

use super::{Family, Padding, Sizes, attention_bias, decoder, llama};
use crate::Result;
use crate::spec::{Config, DecoderSpec, NormKind, NormSpec, Residual, RotaryKeys, RotarySpec};

pub(super) const FAMILY: Family = Family {
    model_type: "cohere",
    architecture: "CohereForCausalLM",
    read,
    has_scorer: false,
    padding: Padding::Default(0),
    ..llama::FAMILY
};

fn read(config: &Config) -> Result<DecoderSpec> {
    config.refuse_flag("use_qk_norm")?;
    let mut spec = unrotated(config)?;
    spec.rotate_all(&rotary(config, &spec, 500_000.0)?);
    Ok(spec)
}

/// Reads what Cohere and Cohere 2 share, but the rotary embedding.
pub(super) fn unrotated(config: &Config) -> Result<DecoderSpec> {
    let eps = config.epsilon("layer_norm_eps", 1e-5)? as f32;
    let norm = NormSpec { kind: NormKind::Layer { bias: false }, eps };
    let sizes = Sizes::read(config, None)?;
    // transformers computes the width of heads, whatever the config names.
    if sizes.head_dim * sizes.heads != sizes.hidden {
        return Err(config.error(format!(
            "head_dim is {}, but in this family {} heads are as wide as hidden_size {}",
            sizes.head_dim, sizes.heads, sizes.hidden
        )));
    }
    let mut spec = decoder(config, sizes, norm, config.activation("hidden_act", "silu")?)?;
    spec.residual = Residual::Parallel { shared_norm: true };
    spec.mlp.gated = true;
    attention_bias(config, &mut spec)?;
    spec.head.tied = config.flag("tie_word_embeddings", true)?;
    spec.head.shape.logit_scale = Some(config.positive("logit_scale", 0.0625)? as f32);
    Ok(spec)
}

/// Reads the rotary embedding.
pub(super) fn rotary(config: &Config, spec: &DecoderSpec, theta: f64) -> Result<RotarySpec> {
    let rotary = config.rotary(spec.attention.head_dim, RotaryKeys::whole(theta))?;
    Ok(RotarySpec { pairs: RopePairs::Interleaved, ..rotary })
}
