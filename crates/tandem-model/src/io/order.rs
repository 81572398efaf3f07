//! Conversion between the order of elements in HF tensors and ours.

use rayon::prelude::*;
use tandem_gguf::{Quant, Transform};

use super::archive::StoredType;
use crate::families::{HfLayout, HfTensor};
use crate::layout::Block;

/// Elements per parallel task.
const BLOCK: usize = 1 << 17;

/// Widens a stored tensor, or a block of it, to f32 in its place in a layer's flat buffer. `heads`
/// are the model's query heads.
///
/// # Panics
/// If sizes differ or the type is not one of weights: both are checked when a folder is opened.
pub(crate) fn read(
    piece: &HfTensor,
    heads: usize,
    block: Option<&Block>,
    dtype: &StoredType,
    bytes: &[u8],
    out: &mut [f32],
) {
    let single = f32::from_le_bytes;
    let half = |b| half::f16::from_le_bytes(b).to_f32();
    let brain = |b| half::bf16::from_le_bytes(b).to_f32();
    match (dtype, block) {
        (StoredType::F32, None) => read_as::<4>(piece, heads, bytes, out, single),
        (StoredType::F16, None) => read_as::<2>(piece, heads, bytes, out, half),
        (StoredType::Bf16, None) => read_as::<2>(piece, heads, bytes, out, brain),
        (StoredType::F32, Some(block)) => read_block::<4>(piece, heads, block, bytes, out, single),
        (StoredType::F16, Some(block)) => read_block::<2>(piece, heads, block, bytes, out, half),
        (StoredType::Bf16, Some(block)) => read_block::<2>(piece, heads, block, bytes, out, brain),
        (StoredType::Gguf(quant, transform), block) => {
            read_gguf(piece, block, *quant, *transform, bytes, out);
        }
        (StoredType::Other(name), _) => unreachable!("{} of type {name} passed the check", piece.name),
    }
}

/// Returns a range of a stored tensor's elements as f32.
///
/// # Panics
/// If the range is out of bounds, or the type is not one of weights.
pub(crate) fn widened(dtype: &StoredType, bytes: &[u8], range: std::ops::Range<usize>) -> Vec<f32> {
    match dtype {
        StoredType::F32 => bytes.as_chunks::<4>().0[range].iter().map(|b| f32::from_le_bytes(*b)).collect(),
        StoredType::F16 => {
            bytes.as_chunks::<2>().0[range].iter().map(|b| half::f16::from_le_bytes(*b).to_f32()).collect()
        }
        StoredType::Bf16 => {
            bytes.as_chunks::<2>().0[range].iter().map(|b| half::bf16::from_le_bytes(*b).to_f32()).collect()
        }
        StoredType::Gguf(quant, _) => unreachable!("no adapter is {quant}"),
        StoredType::Other(name) => unreachable!("type {name} passed the check"),
    }
}

fn read_as<const W: usize>(
    piece: &HfTensor,
    heads: usize,
    bytes: &[u8],
    out: &mut [f32],
    widen: impl Fn([u8; W]) -> f32 + Sync,
) {
    assert_eq!(bytes.len(), out.len() * W, "{}", piece.name);
    let (elements, _) = bytes.as_chunks::<W>();
    let copy = |source: &[[u8; W]], out: &mut [f32]| {
        for (to, from) in out.iter_mut().zip(source) {
            *to = widen(*from);
        }
    };
    match piece.order {
        HfLayout::Rows => {
            out.par_chunks_mut(BLOCK).zip(elements.par_chunks(BLOCK)).for_each(|(to, from)| copy(from, to));
        }
        HfLayout::Transposed => {
            let (rows, cols) = (piece.rows, piece.cols);
            // Sixteen of our rows are sixteen neighbours in each of theirs: each cache line is read
            // once.
            out.par_chunks_mut(16 * cols).enumerate().for_each(|(block, to)| {
                let first = 16 * block;
                for col in 0..cols {
                    for row in 0..to.len() / cols {
                        to[row * cols + col] = widen(elements[col * rows + first + row]);
                    }
                }
            });
        }
        HfLayout::HeadInterleaved => {
            let run = out.len() / (3 * heads);
            out.par_chunks_mut(run).enumerate().for_each(|(ours, to)| {
                let theirs = interleaved(ours, heads);
                copy(&elements[theirs * run..(theirs + 1) * run], to);
            });
        }
    }
}

/// Reads a block of the tensor, as [`read_as`]. A contiguous run in ours is contiguous in theirs,
/// or has one stride.
fn read_block<const W: usize>(
    piece: &HfTensor,
    heads: usize,
    block: &Block,
    bytes: &[u8],
    out: &mut [f32],
    widen: impl Fn([u8; W]) -> f32 + Sync,
) {
    assert_eq!((bytes.len(), block.len()), (piece.range.len() * W, out.len()), "{}", piece.name);
    let (elements, _) = bytes.as_chunks::<W>();
    let (rows, cols) = (piece.rows, piece.cols);
    let place = |ours: usize| match piece.order {
        HfLayout::Rows => ours,
        HfLayout::Transposed => (ours % cols) * rows + ours / cols,
        HfLayout::HeadInterleaved => {
            let run = rows * cols / (3 * heads);
            interleaved(ours / run, heads) * run + ours % run
        }
    };
    let mut jobs = Vec::new();
    let mut rest = out;
    for run in block.runs(cols) {
        let mut run = run;
        while !run.is_empty() {
            let piece = run.start..run.end.min(run.start + BLOCK);
            let (to, after) = rest.split_at_mut(piece.len());
            run.start = piece.end;
            rest = after;
            jobs.push((piece.start, to));
        }
    }
    jobs.into_par_iter().for_each(|(start, to)| match piece.order {
        HfLayout::Rows => to.iter_mut().zip(&elements[start..]).for_each(|(to, from)| *to = widen(*from)),
        _ => to.iter_mut().zip(start..).for_each(|(to, ours)| *to = widen(elements[place(ours)])),
    });
}

/// Dequantises a tensor of a GGUF file, or a block of it.
fn read_gguf(
    piece: &HfTensor,
    block: Option<&Block>,
    quant: Quant,
    transform: Transform,
    bytes: &[u8],
    out: &mut [f32],
) {
    assert_eq!(piece.order, HfLayout::Rows, "{}: no architecture of GGUF has another order", piece.name);
    // A vector has one element in a row.
    let (rows, cols) = match piece.shape.as_slice() {
        [rows, cols] => (*rows, *cols),
        _ => (piece.range.len(), 1),
    };
    let read = |start: usize, out: &mut [f32]| match transform {
        Transform::None => quant.read(bytes, start, out),
        Transform::MinusOne => {
            quant.read(bytes, start, out);
            out.iter_mut().for_each(|value| *value -= 1.0);
        }
        Transform::RotaryPairs { .. } => {
            let (mut at, mut rest) = (start, out);
            while !rest.is_empty() {
                let (row, col) = (at / cols, at % cols);
                let (to, after) = rest.split_at_mut((cols - col).min(rest.len()));
                at += to.len();
                rest = after;
                quant.read(bytes, transform.stored_row(row, rows) * cols + col, to);
            }
        }
    };
    let whole = || std::iter::once(0..out.len()).collect();
    let runs: Vec<_> = block.map_or_else(whole, |block| block.runs(piece.cols).collect());
    let mut rest = out;
    let mut jobs = Vec::new();
    for run in runs {
        let (to, after) = rest.split_at_mut(run.len());
        rest = after;
        jobs.extend(to.chunks_mut(BLOCK).enumerate().map(|(i, to)| (run.start + i * BLOCK, to)));
    }
    jobs.into_par_iter().for_each(|(start, to)| read(start, to));
}

/// Returns a tensor in HF's order, from its values in a layer's flat buffer.
pub(crate) fn to_hf(piece: &HfTensor, heads: usize, values: &[f32]) -> Vec<f32> {
    match piece.order {
        HfLayout::Rows => values.to_vec(),
        HfLayout::Transposed => {
            let (rows, cols) = (piece.rows, piece.cols);
            (0..rows * cols).map(|i| values[(i % rows) * cols + i / rows]).collect()
        }
        HfLayout::HeadInterleaved => {
            let run = values.len() / (3 * heads);
            let mut out = vec![0.0; values.len()];
            for (ours, from) in values.chunks(run).enumerate() {
                let theirs = interleaved(ours, heads);
                out[theirs * run..(theirs + 1) * run].copy_from_slice(from);
            }
            out
        }
    }
}

/// Returns the index in `[head, (q, k, v)]` of index `ours` in `[(q, k, v), head]`.
fn interleaved(ours: usize, heads: usize) -> usize {
    let (which, head) = (ours / heads, ours % heads);
    head * 3 + which
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::ParamKind;

    fn piece(order: HfLayout, rows: usize, cols: usize) -> HfTensor {
        let shape = vec![rows, cols];
        HfTensor {
            name: "w".into(),
            shape,
            part: ParamKind::QkvWeight,
            range: 0..rows * cols,
            rows,
            cols,
            order,
        }
    }

    fn read_f32(piece: &HfTensor, heads: usize, stored: &[f32]) -> Vec<f32> {
        let bytes: Vec<u8> = stored.iter().flat_map(|v| v.to_le_bytes()).collect();
        let mut out = vec![f32::NAN; stored.len()];
        read(piece, heads, None, &StoredType::F32, &bytes, &mut out);
        out
    }

    #[test]
    fn conv1d_is_transposed() {
        // HF holds [in = 2, out = 3].
        assert_eq!(
            read_f32(&piece(HfLayout::Transposed, 3, 2), 1, &[0., 1., 2., 10., 11., 12.]),
            [0., 10., 1., 11., 2., 12.]
        );
    }

    #[test]
    fn neox_heads_are_gathered_into_queries_keys_values() {
        // Two heads of width 1, rows named by tens for the head and units for q, k, v.
        let ours = read_f32(&piece(HfLayout::HeadInterleaved, 6, 1), 2, &[0., 1., 2., 10., 11., 12.]);
        assert_eq!(ours, [0., 10., 1., 11., 2., 12.]);
    }

    #[test]
    fn every_order_comes_back() {
        let stored: Vec<f32> = (0..36 * 35).map(|i| i as f32).collect();
        for order in [HfLayout::Rows, HfLayout::Transposed, HfLayout::HeadInterleaved] {
            let piece = piece(order, 36, 35);
            assert_eq!(to_hf(&piece, 4, &read_f32(&piece, 4, &stored)), stored, "{order:?}");
        }
    }
}
