//! SmolLM 3: Llama of which every fourth layer does not rotate.

use super::{Family, Padding, attention_bias, llama, mlp_bias};
use crate::Result;
use crate::spec::{Config, DecoderSpec, RotaryKeys};

pub(super) const FAMILY: Family = Family {
    model_type: "smollm3",
    architecture: "SmolLM3ForCausalLM",
    read,
    padding: Padding::Default(128_004),
    ..llama::FAMILY
};

fn read(config: &Config) -> Result<DecoderSpec> {
    let mut spec = llama::unrotated(config, None, 1e-6)?;
    let layers = spec.num_layers;
    let interval = config.count_if("no_rope_layer_interval")?.unwrap_or(4);
    let rotates = match config.flags_by_layer("no_rope_layers", layers)? {
        // The key's name says the opposite of its values: 1 where a layer rotates.
        Some(rotates) => rotates,
        None => (1..=layers).map(|layer| !layer.is_multiple_of(interval)).collect(),
    };
    let rotary = config.rotary(spec.attention.head_dim, RotaryKeys::whole(2_000_000.0))?;
    spec.rotary = rotates.iter().map(|&rotates| rotates.then(|| rotary.clone())).collect();
    let used = config.flag("use_sliding_window", false)?;
    let window = config.sliding_window(None)?;
    spec.attention.windows =
        config.windows(layers, window, |layer| used && window.is_some() && !rotates[layer])?;
    attention_bias(config, &mut spec)?;
    mlp_bias(config, &mut spec)?;
    spec.head.tied = config.flag("tie_word_embeddings", true)?;
    Ok(spec)
}
