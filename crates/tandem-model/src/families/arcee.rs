//! Arcee: Llama with a plain feed-forward of squared ReLU.

use super::{Family, attention_bias, llama, mlp_bias};
use crate::Result;
use crate::layout::ParamKind::*;
use crate::spec::{Config, DecoderSpec, RotaryKeys};

pub(super) const FAMILY: Family = Family {
    model_type: "arcee",
    architecture: "ArceeForCausalLM",
    read,
    modules: &[(UpWeight, &["model.layers.{}.mlp.up_proj"])],
    ..llama::FAMILY
};

fn read(config: &Config) -> Result<DecoderSpec> {
    let mut spec = llama::unrotated(config, None, 1e-5)?;
    spec.mlp.gated = false;
    spec.mlp.activation = config.activation("hidden_act", "relu2")?;
    attention_bias(config, &mut spec)?;
    mlp_bias(config, &mut spec)?;
    spec.rotate_all(&config.rotary(spec.attention.head_dim, RotaryKeys::whole(10_000.0))?);
    Ok(spec)
}
