//! Names of parameters as Hugging Face and `peft` write them.

use crate::adapter;
use crate::decoder::Decoder;
use crate::families::{family_named, pieces};
use crate::layout::{LayerId, ParamKind};

/// Returns the tensors that train in a layer, with the parameter that holds each. A parameter may
/// hold several: `qkv_weight` has those of `q_proj`, `k_proj` and `v_proj`.
///
/// # Panics
/// If the decoder is of no known family.
pub fn trained_names(decoder: &Decoder, layer: LayerId) -> Vec<(ParamKind, String)> {
    let spec = decoder.spec();
    let family = family_named(spec.family).expect("a decoder of a known family");
    let tensors = match decoder.adapter() {
        Some(_) => adapter::pieces(family, decoder, layer),
        None => pieces(family, spec, layer, decoder.trained(layer)),
    };
    tensors.into_iter().map(|tensor| (tensor.part, tensor.name)).collect()
}
