//! StarCoder 2: LayerNorm, plain feed-forward, biases, and perhaps one window in every layer.

use super::{Family, Sizes, decoder, llama};
use crate::Result;
use crate::layout::ParamKind::*;
use crate::spec::{Config, DecoderSpec, NormKind, NormSpec, RotaryKeys};

pub(super) const FAMILY: Family = Family {
    model_type: "starcoder2",
    architecture: "Starcoder2ForCausalLM",
    read,
    modules: &[(UpWeight, &["model.layers.{}.mlp.c_fc"]), (DownWeight, &["model.layers.{}.mlp.c_proj"])],
    ..llama::FAMILY
};

fn read(config: &Config) -> Result<DecoderSpec> {
    let norm = NormSpec { kind: NormKind::LAYER, eps: config.epsilon("norm_epsilon", 1e-5)? as f32 };
    let activation = config.activation("hidden_act", "gelu_pytorch_tanh")?;
    let mut spec = decoder(config, Sizes::read(config, None)?, norm, activation)?;
    if config.flag("use_bias", true)? {
        spec = spec.with_biases();
    }
    spec.rotate_all(&config.rotary(spec.attention.head_dim, RotaryKeys::whole(10_000.0))?);
    spec.attention.windows = vec![config.sliding_window(None)?; spec.num_layers];
    spec.head.tied = config.flag("tie_word_embeddings", true)?;
    Ok(spec)
}
