//! Writer of `policy.pt`, the checkpoint of eric-mitchell/direct-preference-optimization.
//!
//! The file is `torch.save({"step_idx": 0, "state": state_dict, "metrics": {}})`: a zip of a pickle
//! (protocol 2, opcodes of CPython's `pickletools`) and one storage per tensor.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use tandem_kernels::DType;

use super::zip_writer::ZipWriter;
use crate::decoder::Decoder;
use crate::families::{Family, family_named};
use crate::io::new_folder::write_new_file;
use crate::io::order;
use crate::io::save::stored;
use crate::io::tensor_file::{LayerReader, LayerTensor, ReadLayer, write_values};
use crate::layout::ParamKind;
use crate::{ModelError, Result};

/// Writes the weights of a language model as a `policy.pt`, replacing a file of that name. `read`
/// fills the flat f32 buffer of each layer, in the order of [`Decoder::layers`]. One layer at a time
/// is in memory.
///
/// A tied head is named too, and shares the table's storage, as in the state dict of torch.
///
/// # Errors
/// If the model is the text model of a vision–language model, the disk refuses (nothing is left
/// behind, and an older file stays whole) or `read` fails.
pub fn write_policy(destination: &Path, decoder: &Decoder, dtype: DType, read: ReadLayer) -> Result<()> {
    if family_named(decoder.spec().family).is_some_and(Family::sees) {
        let reason =
            "policy.pt holds language models; a vision–language model has further parts: export a folder";
        return Err(ModelError::Invalid(reason.to_owned()));
    }
    let tensors = stored(decoder);
    let heads = decoder.spec().attention.heads;
    let pickle = pickle(&entries(decoder, &tensors), dtype);
    write_new_file(destination, &mut |path, file| {
        let failed = |e| ModelError::io(path, e);
        let mut layers = LayerReader::new(&mut *read);
        let mut zip = ZipWriter::new(BufWriter::with_capacity(1 << 20, file));
        let small = |zip: &mut ZipWriter<BufWriter<File>>, name: &str, bytes: &[u8]| {
            zip.begin(member(name), bytes.len() as u64)?;
            zip.write_all(bytes)
        };
        small(&mut zip, "data.pkl", &pickle).map_err(failed)?;
        small(&mut zip, "byteorder", b"little").map_err(failed)?;
        for (index, tensor) in tensors.iter().enumerate() {
            let flat = layers.get(tensor.layer, tensor.len)?;
            let values = order::to_hf(&tensor.piece, heads, &flat[tensor.piece.range.clone()]);
            zip.begin(member(&format!("data/{index}")), tensor.bytes(dtype)).map_err(failed)?;
            write_values(&mut zip, &values, dtype).map_err(failed)?;
        }
        small(&mut zip, "version", b"3\n").map_err(failed)?;
        zip.finish()
            .and_then(|file| file.into_inner().map_err(std::io::IntoInnerError::into_error))
            .map_err(failed)
    })
}

/// Returns the name of a member in the zip's one folder.
fn member(name: &str) -> String {
    format!("policy/{name}")
}

/// Name of a tensor in the state dict, its storage and its shape.
struct StateEntry {
    name: String,
    storage: usize,
    shape: Vec<usize>,
}

fn entries(decoder: &Decoder, tensors: &[LayerTensor]) -> Vec<StateEntry> {
    let spec = decoder.spec();
    let entry = |(storage, tensor): (usize, &LayerTensor)| StateEntry {
        name: tensor.piece.name.clone(),
        storage,
        shape: tensor.piece.shape.clone(),
    };
    let mut entries: Vec<_> = tensors.iter().enumerate().map(entry).collect();
    let table = tensors.iter().position(|tensor| tensor.piece.part == ParamKind::TokenTable);
    if let Some(table) = table.filter(|_| spec.head.tied) {
        let family = family_named(spec.family).expect("specs come from families");
        let shape = tensors[table].piece.shape.clone();
        let names = family.names(ParamKind::HeadWeight);
        entries.extend(names.map(|name| StateEntry { name, storage: table, shape: shape.clone() }));
    }
    entries
}

/// Makes the pickle of the file's dictionary.
fn pickle(entries: &[StateEntry], dtype: DType) -> Vec<u8> {
    let mut out = b"\x80\x02}(".to_vec();
    push_text(&mut out, "step_idx");
    push_integer(&mut out, 0);
    push_text(&mut out, "state");
    out.extend(ORDERED_DICT);
    out.push(b'(');
    for entry in entries {
        push_text(&mut out, &entry.name);
        push_tensor(&mut out, entry, dtype);
    }
    out.push(b'u');
    push_text(&mut out, "metrics");
    out.extend(b"}u.");
    out
}

/// Opcodes that make an empty `OrderedDict`.
const ORDERED_DICT: &[u8] = b"ccollections\nOrderedDict\n)R";

/// Appends `_rebuild_tensor_v2(storage, 0, shape, stride, False, OrderedDict())`.
fn push_tensor(out: &mut Vec<u8>, entry: &StateEntry, dtype: DType) {
    let storage_type: &[u8] = match dtype {
        DType::F32 => b"ctorch\nFloatStorage\n",
        DType::Bf16 => b"ctorch\nBFloat16Storage\n",
    };
    out.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
    push_text(out, "storage");
    out.extend(storage_type);
    push_text(out, &entry.storage.to_string());
    push_text(out, "cpu");
    push_integer(out, entry.shape.iter().product());
    out.extend(b"tQ");
    push_integer(out, 0);
    let stride = |axis: usize| entry.shape[axis + 1..].iter().product();
    let strides: Vec<usize> = (0..entry.shape.len()).map(stride).collect();
    for sizes in [&entry.shape, &strides] {
        out.push(b'(');
        sizes.iter().for_each(|&size| push_integer(out, size));
        out.push(b't');
    }
    // No gradient, no hooks.
    out.push(0x89);
    out.extend(ORDERED_DICT);
    out.extend(b"tR");
}

fn push_text(out: &mut Vec<u8>, text: &str) {
    out.push(b'X');
    out.extend((text.len() as u32).to_le_bytes());
    out.extend(text.as_bytes());
}

fn push_integer(out: &mut Vec<u8>, integer: usize) {
    if let Ok(short) = i32::try_from(integer) {
        out.push(b'J');
        out.extend(short.to_le_bytes());
    } else {
        out.extend([0x8a, 8]);
        out.extend((integer as u64).to_le_bytes());
    }
}
