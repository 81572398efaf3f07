//! Names of parameters as Hugging Face and `peft` write them.

use std::ops::Range;

use crate::adapter;
use crate::decoder::Decoder;
use crate::families::{HfTensor, family_named, pieces};
use crate::layout::{LayerId, ParamKind};

/// A tensor that trains, as Hugging Face and `peft` have it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrainedTensor {
    /// Parameter that holds it.
    pub part: ParamKind,
    /// Name.
    pub name: String,
    /// Shape.
    pub shape: Vec<usize>,
    /// Elements in the layer's flat buffer.
    pub range: Range<usize>,
    /// Rows and columns there; the columns and rows of `shape` where a family stores it transposed.
    pub matrix: (usize, usize),
}

/// Returns the tensors that train in a layer. A parameter may hold several: `qkv_weight` has those of
/// `q_proj`, `k_proj` and `v_proj`.
///
/// # Panics
/// If the decoder is of no known family.
pub fn trained_tensors(decoder: &Decoder, layer: LayerId) -> Vec<TrainedTensor> {
    let spec = decoder.spec();
    let family = family_named(spec.family).expect("a decoder of a known family");
    let tensors = match decoder.adapter() {
        Some(_) => adapter::pieces(family, decoder, layer),
        None => pieces(family, spec, layer, decoder.trained(layer)),
    };
    let of = |HfTensor { name, shape, part, range, rows, cols, .. }| TrainedTensor {
        part,
        name,
        shape,
        range,
        matrix: (rows, cols),
    };
    tensors.into_iter().map(of).collect()
}

/// Returns the names of [`trained_tensors`], with the parameter that holds each.
///
/// # Panics
/// As that.
pub fn trained_names(decoder: &Decoder, layer: LayerId) -> Vec<(ParamKind, String)> {
    trained_tensors(decoder, layer).into_iter().map(|tensor| (tensor.part, tensor.name)).collect()
}
