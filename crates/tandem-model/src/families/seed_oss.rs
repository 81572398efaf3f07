//! Seed-OSS: Llama with biases on queries, keys and values, and perhaps elsewhere.

use super::{Family, Padding, llama, mlp_bias};
use crate::Result;
use crate::spec::{Config, DecoderSpec};

pub(super) const FAMILY: Family = Family {
    model_type: "seed_oss",
    architecture: "SeedOssForCausalLM",
    read,
    padding: Padding::Default(1),
    ..llama::FAMILY
};

fn read(config: &Config) -> Result<DecoderSpec> {
    let mut spec = llama::descendant(config, Some(128))?;
    spec.attention.qkv_bias = config.flag("attention_bias", true)?;
    spec.attention.out_bias = config.flag("attention_out_bias", false)?;
    mlp_bias(config, &mut spec)?;
    Ok(spec)
}
