//! Ernie 4.5 (dense): Llama whose neighbouring dimensions rotate together.

use tandem_kernels::ops::RopePairs;

use super::{Family, Padding, llama};
use crate::Result;
use crate::spec::{Config, DecoderSpec, RotaryKeys};

pub(super) const FAMILY: Family = Family {
    model_type: "ernie4_5",
    architecture: "Ernie4_5ForCausalLM",
    read,
    has_scorer: false,
    padding: Padding::Default(0),
    ..llama::FAMILY
};

fn read(config: &Config) -> Result<DecoderSpec> {
    let mut spec = llama::unrotated(config, Some(128), 1e-5)?;
    let mut rotary = config.rotary(spec.attention.head_dim, RotaryKeys::whole(500_000.0))?;
    rotary.pairs = RopePairs::Interleaved;
    spec.rotate_all(&rotary);
    if config.flag("use_bias", false)? {
        spec = spec.with_biases();
    }
    spec.head.tied = config.flag("tie_word_embeddings", true)?;
    Ok(spec)
}
