//! Phi 1, 1.5 and 2: both halves of a block read one LayerNorm; partial rotary embedding; biases
//! everywhere.

use super::{Family, Sizes, decoder, llama};
use crate::Result;
use crate::layout::ParamKind::*;
use crate::spec::{Config, DecoderSpec, NormKind, NormSpec, Residual, RotaryKeys};

pub(super) const FAMILY: Family = Family {
    model_type: "phi",
    architecture: "PhiForCausalLM",
    read,
    modules: &[
        (OutWeight, &["model.layers.{}.self_attn.dense"]),
        (UpWeight, &["model.layers.{}.mlp.fc1"]),
        (DownWeight, &["model.layers.{}.mlp.fc2"]),
        (FinalNormWeight, &["model.final_layernorm"]),
    ],
    ..llama::FAMILY
};

fn read(config: &Config) -> Result<DecoderSpec> {
    config.refuse_flag("qk_layernorm")?;
    // The head's bias would have to lie in another layer than its weight.
    config.refuse_flag("tie_word_embeddings")?;
    let norm = NormSpec { kind: NormKind::LAYER, eps: config.epsilon("layer_norm_eps", 1e-5)? as f32 };
    let activation = config.activation("hidden_act", "gelu_new")?;
    let mut spec = decoder(config, Sizes::read(config, None)?, norm, activation)?.with_biases();
    spec.residual = Residual::Parallel { shared_norm: true };
    spec.rotate_all(&config.rotary(spec.attention.head_dim, RotaryKeys::partial(0.5))?);
    spec.head.bias = true;
    Ok(spec)
}
