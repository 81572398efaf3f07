//! OLMo 3: OLMo 2 with a window in three of four layers, and YaRN where attention is full.

use super::{Family, olmo2};
use crate::Result;
use crate::spec::{Config, DecoderSpec, RotaryKeys};

pub(super) const FAMILY: Family =
    Family { model_type: "olmo3", architecture: "Olmo3ForCausalLM", read, ..olmo2::FAMILY };

fn read(config: &Config) -> Result<DecoderSpec> {
    let mut spec = olmo2::unrotated(config)?;
    let window = config.sliding_window(Some(4096))?;
    let windows = config.windows(spec.num_layers, window, |layer| !(layer + 1).is_multiple_of(4))?;
    let keys = [RotaryKeys::whole(500_000.0); 2];
    let [full, sliding] = config.rotary_by_type(spec.attention.head_dim, keys, None)?;
    spec.rotary =
        windows.iter().map(|w| Some(if w.is_some() { sliding.clone() } else { full.clone() })).collect();
    spec.attention.windows = windows;
    Ok(spec)
}
