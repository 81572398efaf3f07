//! Granite (dense): Llama with factors on embeddings, scores, halves and logits.

use super::{Family, llama};
use crate::Result;
use crate::spec::{Config, DecoderSpec, NormPlacement, Residual};

pub(super) const FAMILY: Family = Family {
    model_type: "granite",
    architecture: "GraniteForCausalLM",
    read,
    has_scorer: false,
    ..llama::FAMILY
};

fn read(config: &Config) -> Result<DecoderSpec> {
    let mut spec = llama::with_biases(config)?;
    spec.embedding.scale = config.number("embedding_multiplier", 1.0)? as f32;
    spec.attention.scale = config.positive("attention_multiplier", 1.0)? as f32;
    let scale = config.number("residual_multiplier", 1.0)? as f32;
    spec.residual = Residual::Sequential { norms: NormPlacement::Before, scale };
    spec.head.shape.logit_scale = Some((1.0 / config.positive("logits_scaling", 1.0)?) as f32);
    Ok(spec)
}
