//! Names of an adapter's tensors in the `peft` library, and their places in our buffers.

use crate::decoder::Decoder;
use crate::families::{self, Family, HfLayout, HfTensor};
use crate::layout::{LayerId, LayerLayout, ParamKind, ParamSpec};
use crate::lora::{Adapted, Adapter, LoraTarget};

/// Prefix of every module's name.
pub(super) const PREFIX: &str = "base_model.model.";

/// Returns the name in an adapter of a model's module or tensor.
pub(super) fn adapter_name(family: &Family, name: &str) -> String {
    format!("{PREFIX}{}", family.name_in_memory(name).as_deref().unwrap_or(name))
}

/// Lists every trained tensor of a layer, by its place in the layer's flat buffer.
///
/// # Panics
/// If the decoder has no adapter.
pub(crate) fn pieces(family: &Family, decoder: &Decoder, layer: LayerId) -> Vec<HfTensor> {
    let adapter = decoder.adapter().expect("a decoder with an adapter");
    let layout = decoder.trained(layer);
    let mut all = Vec::new();
    for param in &layout.params {
        match term_of(adapter, param.part) {
            Some((adapted, role)) => {
                all.extend(factors(family, adapter.config().rank, adapted, role, param, layer));
            }
            None => {
                let one = LayerLayout { params: vec![*param], ..layout.clone() };
                let mut whole = families::pieces(family, decoder.spec(), layer, &one);
                for piece in &mut whole {
                    piece.name = adapter_name(family, &piece.name);
                }
                all.extend(whole);
            }
        }
    }
    all
}

/// Returns the copy of a token table that trains whole, under the head's name, if the two are tied:
/// `peft` stores both.
pub(super) fn tied_copy(family: &Family, decoder: &Decoder) -> Option<HfTensor> {
    let adapter = decoder.adapter()?;
    let is_copied = decoder.spec().head.tied && adapter.saved().contains(&ParamKind::TokenTable);
    let table =
        pieces(family, decoder, LayerId::Embedding).into_iter().find(|p| p.part == ParamKind::TokenTable);
    let mut copy = table.filter(|_| is_copied)?;
    copy.name = adapter_name(family, &family.names(ParamKind::HeadWeight).next()?);
    Some(copy)
}

/// Role of a parameter in a low-rank term.
#[derive(Clone, Copy)]
enum Role {
    A,
    B,
    Magnitude,
}

fn term_of(adapter: &Adapter, part: ParamKind) -> Option<(&Adapted, Role)> {
    adapter.matrices().iter().find_map(|adapted| {
        let parts = adapted.part.low_rank()?;
        let role = match part {
            _ if part == parts.a => Role::A,
            _ if part == parts.b => Role::B,
            _ if parts.magnitude == Some(part) => Role::Magnitude,
            _ => return None,
        };
        Some((adapted, role))
    })
}

/// Lists the tensors of a parameter that stacks one factor of all modules of a matrix.
fn factors(
    family: &Family,
    rank: usize,
    adapted: &Adapted,
    role: Role,
    param: &ParamSpec,
    layer: LayerId,
) -> Vec<HfTensor> {
    // Outputs come in the order of the matrix's rows.
    let outputs = match family.order(adapted.part) {
        HfLayout::HeadInterleaved => HfLayout::HeadInterleaved,
        HfLayout::Rows | HfLayout::Transposed => HfLayout::Rows,
    };
    let is_table = adapted.part == ParamKind::TokenTable;
    let piece = |(index, site): (usize, &LoraTarget)| {
        let module = match layer {
            LayerId::Block(index) => site.module.replace("{}", &index.to_string()),
            _ => site.module.clone(),
        };
        let (outs, cols) = (site.b_rows.clone(), param.cols);
        let (end, start, rows, cols, order) = match role {
            _ if is_table && matches!(role, Role::A) => {
                ("lora_embedding_A", 0, param.rows, cols, HfLayout::Transposed)
            }
            _ if is_table => ("lora_embedding_B", 0, param.rows, cols, HfLayout::Rows),
            Role::A => ("lora_A.weight", index * rank * cols, rank, cols, HfLayout::Rows),
            Role::B => ("lora_B.weight", outs.start * cols, outs.len(), cols, outputs),
            Role::Magnitude => ("lora_magnitude_vector", outs.start, 1, outs.len(), outputs),
        };
        let shape = match (role, order) {
            (Role::Magnitude, _) => vec![cols],
            (_, HfLayout::Transposed) => vec![cols, rows],
            _ => vec![rows, cols],
        };
        let name = format!("{}.{end}", adapter_name(family, &module));
        let start = param.offset + start;
        HfTensor { name, shape, part: param.part, range: start..start + rows * cols, rows, cols, order }
    };
    adapted.sites.iter().enumerate().map(piece).collect()
}
