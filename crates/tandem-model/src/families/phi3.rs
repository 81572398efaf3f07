//! Phi 3, 3.5, 4 and their minis: Llama with fused matrices and LongRoPE.

use super::{Family, Padding, llama};
use crate::Result;
use crate::layout::ParamKind::*;
use crate::spec::{Config, DecoderSpec, RotaryKeys};

pub(super) const FAMILY: Family = Family {
    model_type: "phi3",
    architecture: "Phi3ForCausalLM",
    read,
    modules: &[
        (QkvWeight, &["model.layers.{}.self_attn.qkv_proj"]),
        (UpWeight, &["model.layers.{}.mlp.gate_up_proj"]),
    ],
    padding: Padding::Default(32_000),
    ..llama::FAMILY
};

fn read(config: &Config) -> Result<DecoderSpec> {
    // Before the table's own number, as in transformers.
    let config = &config.clone().with_defaults(&[("original_max_position_embeddings", 4096)]);
    let mut spec = llama::unrotated(config, None, 1e-5)?;
    let keys = RotaryKeys { old_names_mean_longrope: true, ..RotaryKeys::partial(1.0) };
    spec.rotate_all(&config.rotary(spec.attention.head_dim, keys)?);
    spec.attention.windows = vec![config.sliding_window(None)?; spec.num_layers];
    Ok(spec)
}
