//! Ministral 3: Mistral whose queries grow with their position, and with YaRN.

use super::{Family, Padding, llama};
use crate::Result;
use crate::spec::{Config, DecoderSpec, QueryScale, RotaryKeys, RotaryScaling, RotarySpec};

pub(super) const FAMILY: Family = Family {
    model_type: "ministral3",
    architecture: "Ministral3ForCausalLM",
    read,
    padding: Padding::Default(11),
    ..llama::FAMILY
};

pub(super) fn read(config: &Config) -> Result<DecoderSpec> {
    config.refuse_key("layer_types")?;
    let mut spec = llama::unrotated(config, Some(128), 1e-5)?;
    let head_dim = spec.attention.head_dim;
    let mut rotary = match config.has_rotary() {
        true => config.rotary(head_dim, RotaryKeys::whole(10_000.0))?,
        false => default_rotary(head_dim),
    };
    if config.has_rotary() {
        rotary.query_scale = config.query_scale()?;
    }
    spec.rotate_all(&rotary);
    spec.attention.windows = vec![config.sliding_window(None)?; spec.num_layers];
    Ok(spec)
}

/// Returns the rotary embedding of a config that names none.
fn default_rotary(head_dim: usize) -> RotarySpec {
    let original_positions = 16_384.0;
    let scaling = RotaryScaling::Yarn {
        factor: 16.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_positions,
        truncate: true,
        attention_factor: 1.0,
    };
    let query_scale = Some(QueryScale { beta: 0.1, original_positions });
    RotarySpec { scaling, query_scale, ..RotarySpec::plain(1_000_000.0, head_dim) }
}
