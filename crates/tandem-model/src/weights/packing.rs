//! Layout of a frozen layer's parameters in one buffer of bytes.
//!
//! A *piece* is a parameter, or the rows of one HF tensor in a quantised matrix: blocks and scales
//! are then those that the tensor has by itself. Block matrices are stored in the requested
//! [`Format`], tables and head in bf16 at the least, as QLoRA does
//! (<https://arxiv.org/abs/2305.14314>), norms, biases and learned positions in f32. Matrices
//! stored in another type than the compute type are unpacked into a second buffer before products
//! read them; products of few rows on the CPU, and FP8 products on a GPU, read the matrices of blocks as they
//! are packed.
//!
//! A tensor-parallel shard has codes and scales of the whole tensor, so that its weights are those of one
//! rank: of a matrix divided by rows it keeps the units of its rows; one divided by columns it keeps
//! whole, and products read their columns of it.
//!
//! A piece takes whole units, so one of less than 4256 weights takes more bytes in nf4 than in bf16
//! (8512). Matrices of real models are hundreds of times larger, and a format that depended on the
//! size would make tiny models another computation than the large ones that they test.

use std::ops::Range;

use tandem_kernels::bytes::BytesView;
use tandem_kernels::ops::{PackedRows, PackedWeight, Weight};
use tandem_kernels::{DType, Device, Format, View, ViewMut, ops};

use crate::decoder::{Decoder, Fp8Matmul};
use crate::families::{HfTensor, family_named, pieces};
use crate::layout::{LayerId, LayerLayout, ParamKind, ParamSpec};
use crate::{ModelError, Result};

/// Layout of a frozen layer's buffer.
#[derive(Clone, Debug)]
pub struct Packing {
    params: Vec<Packed>,
    len: usize,
    unpacked_len: usize,
    /// Elements at the front of the unpacked buffer that products need which read packed matrices.
    always_unpacked_len: usize,
    format: Format,
    dtype: DType,
    /// Products that read FP8 matrices as they are packed, even where they are unpacked too.
    fp8_matmul: Fp8Matmul,
}

/// A parameter and its pieces.
#[derive(Clone, Debug)]
struct Packed {
    param: ParamSpec,
    pieces: Vec<PackedMatrix>,
    /// Rows of the pieces, if the parameter is a matrix that can be multiplied by as it is packed.
    in_place: Vec<PackedRows>,
    /// First element in the unpacked buffer, if the parameter is unpacked.
    unpacked: Option<usize>,
    /// Columns that products read, if `param` is the whole parameter of a shard that has some.
    columns: Option<Range<usize>>,
}

/// Rows of a parameter that are quantised together.
#[derive(Clone, Debug)]
pub struct PackedMatrix {
    /// Format of the rows.
    pub format: Format,
    /// Bytes of the buffer.
    pub bytes: Range<usize>,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Elements in the layer's flat f32 buffer; of the whole layer's, if the piece is kept whole.
    pub flat: Range<usize>,
    /// The whole tensor that a tensor-parallel shard's piece is cut from.
    pub whole: Option<WholeMatrix>,
}

/// Whole quantised tensor of which a tensor-parallel shard keeps some units.
#[derive(Clone, Debug)]
pub struct WholeMatrix {
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Elements in the whole layer's flat f32 buffer.
    pub flat: Range<usize>,
    /// Bytes that are kept of the packed tensor, in order.
    pub kept: Vec<Range<usize>>,
}

/// Alignment of unpacked parameters, in elements: whole cache lines.
const ALIGNMENT: usize = 32;

impl Packing {
    /// Lays out a layer whose matrices are stored in `format` and computed with in `dtype`.
    pub fn new(decoder: &Decoder, layer: LayerId, format: Format, dtype: DType) -> Self {
        let (spec, layout) = (decoder.spec(), decoder.layout(layer));
        let family = family_named(spec.family).expect("specs come from families");
        let mut packing = Self {
            params: Vec::new(),
            len: 0,
            unpacked_len: 0,
            always_unpacked_len: 0,
            format,
            dtype,
            fp8_matmul: decoder.fp8_matmul(),
        };
        let tensors = pieces(family, spec, layer, layout);
        let is_shared = decoder.adapter().is_some();
        for &param in &layout.params {
            let format = match format_of(param.part, format) {
                // Beside a fully trained policy the table is looked up in f32, as the policy's
                // masters are.
                Format::Bf16 if !is_shared && looks_up(param.part, layout) => Format::F32,
                format => format,
            };
            let is_multiplied = param.offset < layout.compute_len;
            let add = |packing: &mut Self, rows: usize, flat: Range<usize>| {
                let len = format.packed_len(rows, param.cols);
                let bytes = packing.len..packing.len + len;
                packing.len = bytes.end;
                PackedMatrix { format, bytes, rows, cols: param.cols, flat, whole: None }
            };
            if format.dtype().is_none() && decoder.slice().count > 1 {
                packing.add_cut(decoder, layer, param, format, is_multiplied);
                continue;
            }
            let pieces = if format.dtype().is_some() {
                vec![add(&mut packing, param.rows, param.range())]
            } else {
                let own = tensors.iter().filter(|tensor| tensor.part == param.part);
                own.map(|tensor| add(&mut packing, tensor.rows, tensor.range.clone())).collect()
            };
            packing.add(param, pieces, is_multiplied && format.dtype() != Some(dtype), None);
        }
        packing.place_unpacked();
        packing
    }

    /// Adds a parameter, which has a place in the unpacked buffer later if it `unpacks`.
    fn add(
        &mut self,
        param: ParamSpec,
        pieces: Vec<PackedMatrix>,
        unpacks: bool,
        columns: Option<Range<usize>>,
    ) {
        let mut end = param.offset;
        let mut follows = |piece: &PackedMatrix| {
            let follows = piece.flat.start == end && piece.cols == param.cols;
            end = piece.flat.end;
            follows
        };
        let is_whole = is_block_matrix(param.part) && pieces.iter().all(&mut follows);
        let rows = |piece: &PackedMatrix| PackedRows { rows: piece.rows, bytes: piece.bytes.clone() };
        let in_place = if unpacks && is_whole { pieces.iter().map(rows).collect() } else { Vec::new() };
        self.params.push(Packed { param, pieces, in_place, unpacked: unpacks.then_some(0), columns });
    }

    /// Gives parameters that are unpacked their places, those first that every product needs unpacked.
    fn place_unpacked(&mut self) {
        for is_in_place in [false, true] {
            for packed in self.params.iter_mut().filter(|packed| packed.in_place.is_empty() != is_in_place) {
                let Some(place) = &mut packed.unpacked else { continue };
                *place = self.unpacked_len;
                self.unpacked_len += packed.param.len().next_multiple_of(ALIGNMENT);
            }
            if !is_in_place {
                self.always_unpacked_len = self.unpacked_len;
            }
        }
    }

    /// Adds the quantised parameter of a tensor-parallel shard.
    fn add_cut(
        &mut self,
        decoder: &Decoder,
        layer: LayerId,
        own: ParamSpec,
        format: Format,
        is_multiplied: bool,
    ) {
        let mut pieces = Vec::new();
        let mut first = own.offset;
        let columns = own.part.is_divided_by_columns();
        let whole_param = *decoder.whole().layout(layer).param(own.part).expect("every shard has it");
        for (tensor, rows) in cut_tensors(decoder, layer, own.part) {
            let (unit, unit_len) = (format.unit_weights(tensor.cols), format.unit_len(tensor.cols));
            let (kept, rows, flat) = if columns {
                let all = std::iter::once(0..format.packed_len(tensor.rows, tensor.cols)).collect();
                (all, tensor.rows, tensor.range.clone())
            } else {
                let units = |rows: &Range<usize>| {
                    let end = (rows.end * tensor.cols).div_ceil(unit);
                    rows.start * tensor.cols / unit * unit_len..end * unit_len
                };
                let num_rows: usize = rows.iter().map(Range::len).sum();
                let flat = first..first + num_rows * tensor.cols;
                first = flat.end;
                (rows.iter().map(units).collect::<Vec<_>>(), num_rows, flat)
            };
            let bytes = self.len..self.len + kept.iter().map(Range::len).sum::<usize>();
            self.len = bytes.end;
            let (cols, whole) = (tensor.cols, (tensor.rows, tensor.range));
            let whole = Some(WholeMatrix { rows: whole.0, cols, flat: whole.1, kept });
            pieces.push(PackedMatrix { format, bytes, rows, cols, flat, whole });
        }
        let param = if columns { whole_param } else { own };
        let columns = columns.then(|| decoder.columns(&whole_param));
        self.add(param, pieces, is_multiplied, columns);
    }

    /// Checks that a tensor-parallel shard's rows of every quantised matrix are whole units of its
    /// format.
    ///
    /// # Errors
    /// If a unit would be cut.
    pub fn check_cut(decoder: &Decoder, format: Format) -> Result<()> {
        if decoder.slice().count == 1 || format.dtype().is_some() {
            return Ok(());
        }
        for layer in decoder.layers() {
            let params = decoder.layout(layer).params.iter();
            for param in params.filter(|param| format_of(param.part, format) == format) {
                if param.part.is_divided_by_columns() {
                    continue;
                }
                for (tensor, rows) in cut_tensors(decoder, layer, param.part) {
                    let unit = format.unit_weights(tensor.cols);
                    let is_cut = |row: usize| row < tensor.rows && !(row * tensor.cols).is_multiple_of(unit);
                    if rows.iter().any(|rows| is_cut(rows.start) || is_cut(rows.end)) {
                        return Err(ModelError::Invalid(format!(
                            "{} {:?} in {format} cannot be divided among {} ranks: {unit} weights share their \
                             scales, and a boundary between ranks would lie within them; set compute.format \
                             to \"bf16\", \"int8\" or \"fp8\", or use compute.sharding or compute.pipeline",
                            tensor.name,
                            [tensor.rows, tensor.cols],
                            decoder.slice().count
                        )));
                    }
                }
            }
        }
        Ok(())
    }

    /// Checks that FP8 products can have every matrix of the blocks.
    ///
    /// # Errors
    /// If one has rows or columns that are no multiple of [`ops::FP8_MULTIPLE`], or is not stored in the order
    /// that products read.
    pub fn check_fp8(decoder: &Decoder, dtype: DType) -> Result<()> {
        let family = family_named(decoder.spec().family).expect("specs come from families");
        for layer in decoder.layers() {
            let packing = Self::new(decoder, layer, Format::Fp8, dtype);
            for Packed { param, in_place, .. } in &packing.params {
                let fits = [param.rows, param.cols].iter().all(|n| n.is_multiple_of(ops::FP8_MULTIPLE));
                if !is_block_matrix(param.part) || (fits && !in_place.is_empty()) {
                    continue;
                }
                let tensors = pieces(family, decoder.spec(), layer, decoder.layout(layer));
                let own = tensors.iter().find(|tensor| tensor.part == param.part);
                let name = own.map_or("", |tensor| tensor.name.as_str());
                let (shape, needed) = ([param.rows, param.cols], ops::FP8_MULTIPLE);
                let why = match fits {
                    false => format!("both must be multiples of {needed}"),
                    true => "its rows do not lie side by side".to_owned(),
                };
                return Err(ModelError::Invalid(format!(
                    "{name} is of a matrix {shape:?}, which FP8 products cannot have: {why}; remove compute.fp8_matmul"
                )));
            }
        }
        Ok(())
    }

    /// Returns the format of matrices.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Returns the bytes of the buffer.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the buffer is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the elements of the unpacked buffer.
    pub fn unpacked_len(&self) -> usize {
        self.unpacked_len
    }

    /// Returns the elements at the front of the unpacked buffer that products need which read the other matrices
    /// as they are packed: those of few rows on the CPU, and FP8 products.
    pub fn always_unpacked_len(&self) -> usize {
        self.always_unpacked_len
    }

    /// Returns the pieces, in order.
    pub fn pieces(&self) -> impl Iterator<Item = &PackedMatrix> {
        self.params.iter().flat_map(|param| &param.pieces)
    }

    /// Returns the bytes of each rank's shard of the buffer. Shards are cut between units, so each
    /// has its own scales.
    pub fn counts(&self, num_ranks: usize) -> Vec<usize> {
        let cut = |rank: usize| {
            let at = self.len * rank / num_ranks;
            let Some(piece) = self.pieces().find(|piece| piece.bytes.contains(&at)) else { return at };
            let unit = piece.format.unit_len(piece.cols);
            piece.bytes.start + (at - piece.bytes.start) / unit * unit
        };
        (0..num_ranks)
            .map(|rank| if rank + 1 == num_ranks { self.len - cut(rank) } else { cut(rank + 1) - cut(rank) })
            .collect()
    }

    /// Unpacks the matrices of `bytes` into `unpacked` in the compute type: all into `[1, unpacked_len]`, or
    /// some into `[1, always_unpacked_len]`.
    pub fn unpack(&self, device: &Device, bytes: BytesView, mut unpacked: ViewMut) -> Result<()> {
        for Packed { param, pieces, unpacked: place, .. } in &self.params {
            let Some(start) = place.filter(|start| start + param.len() <= unpacked.cols()) else { continue };
            for piece in pieces {
                let first = start + piece.flat.start - param.offset;
                let out = unpacked.reborrow().col_range(first..first + piece.flat.len());
                let out = out.reshape(piece.rows, piece.cols);
                ops::unpack(device, bytes.range(piece.bytes.clone()), piece.format, out)?;
            }
        }
        Ok(())
    }

    fn find(&self, part: ParamKind) -> Option<&Packed> {
        self.params.iter().find(|packed| packed.param.part == part)
    }
}

/// Lists the whole tensors of a parameter, with the rows of each that a tensor-parallel shard has: all, if
/// the parameter is divided by columns.
fn cut_tensors(decoder: &Decoder, layer: LayerId, part: ParamKind) -> Vec<(HfTensor, Vec<Range<usize>>)> {
    let whole = decoder.whole();
    let family = family_named(whole.spec().family).expect("specs come from families");
    let layout = whole.layout(layer);
    let param = layout.param(part).expect("every shard has the whole's parameters");
    let block = decoder.slice().block(whole.spec(), param);
    let one = LayerLayout { params: vec![*param], ..layout.clone() };
    let tensors = pieces(family, whole.spec(), layer, &one).into_iter();
    let rows_of = |tensor: HfTensor| {
        let first = (tensor.range.start - param.offset) / param.cols;
        let rows = block.within(&(first..first + tensor.rows), &(0..param.cols)).rows;
        (tensor, rows)
    };
    tensors.map(rows_of).collect()
}

/// Returns whether the part is a matrix of a block, which nothing but products reads.
fn is_block_matrix(part: ParamKind) -> bool {
    matches!(
        part,
        ParamKind::QkvWeight
            | ParamKind::OutWeight
            | ParamKind::UpWeight
            | ParamKind::DownWeight
            | ParamKind::DeltaInWeight
            | ParamKind::DeltaOutWeight
    )
}

/// Returns whether the part is a table that no product reads.
fn looks_up(part: ParamKind, layout: &LayerLayout) -> bool {
    let is_multiplied = |param: &ParamSpec| param.offset < layout.compute_len;
    part == ParamKind::TokenTable && !layout.param(part).is_some_and(is_multiplied)
}

/// Returns the format of a parameter in a layer whose block matrices are in `format`.
fn format_of(part: ParamKind, format: Format) -> Format {
    match part {
        part if is_block_matrix(part) => format,
        ParamKind::TokenTable | ParamKind::HeadWeight if format != Format::F32 => Format::Bf16,
        _ => Format::F32,
    }
}

/// Parameters of a frozen layer in its buffers.
#[derive(Clone, Copy)]
pub struct PackedLayer<'a> {
    packing: &'a Packing,
    bytes: BytesView<'a>,
    unpacked: Option<View<'a>>,
}

impl<'a> PackedLayer<'a> {
    /// Views a layer's bytes and the buffer of its unpacked matrices, or of those of
    /// [`Packing::always_unpacked_len`]: the layer then serves products alone that read packed matrices.
    pub fn new(packing: &'a Packing, bytes: BytesView<'a>, unpacked: Option<View<'a>>) -> Self {
        debug_assert_eq!(bytes.len(), packing.len, "bytes of another layer");
        debug_assert!(
            [packing.unpacked_len, packing.always_unpacked_len]
                .contains(&unpacked.map_or(0, |view| view.cols())),
            "of another layer"
        );
        Self { packing, bytes, unpacked }
    }

    /// Returns a parameter, in the compute type if products read it.
    ///
    /// # Panics
    /// If it is left packed.
    pub(crate) fn get(&self, part: ParamKind) -> Option<View<'a>> {
        let packed = self.packing.find(part)?;
        let Packed { param, pieces, unpacked, columns, .. } = packed;
        Some(match unpacked {
            Some(start) => {
                let all = self.buffer_of(packed).expect("what is not multiplied by in place was unpacked");
                let all = all.col_range(*start..start + param.len()).reshape(param.rows, param.cols);
                columns.as_ref().map_or(all, |columns| all.col_range(columns.clone()))
            }
            None => {
                let piece = &pieces[0];
                let dtype = piece.format.dtype().unwrap_or(self.packing.dtype);
                let start = piece.bytes.start;
                let range = start..start + param.len() * dtype.size();
                self.bytes.as_tensor(range, param.rows, param.cols, dtype)
            }
        })
    }

    /// Returns a parameter for a forward product, or with [`Fp8Matmul::ForwardAndBackward`] for the gradient of the
    /// input: packed, if it is left so, or FP8 products read it.
    pub(crate) fn weight(&self, part: ParamKind, product: Fp8Matmul) -> Option<Result<Weight<'a>>> {
        let packed = self.packing.find(part)?;
        let format = packed.pieces.first()?.format;
        // A pass that recomputes may have the unpacked matrix for its gradient, and is to have the same bits.
        let is_fp8 =
            self.packing.fp8_matmul >= product && format == Format::Fp8 && !packed.in_place.is_empty();
        let is_left = packed.unpacked.is_some() && self.buffer_of(packed).is_none();
        if !is_fp8 && !is_left {
            return self.get(part).map(|view| Ok(view.into()));
        }
        let (cols, dtype) = (packed.param.cols, self.packing.dtype);
        Some(match PackedWeight::new(self.bytes, &packed.in_place, format, cols, dtype) {
            Ok(weight) => {
                let columns = packed.columns.clone();
                Ok(Weight::Packed(columns.map_or(weight, |columns| weight.col_range(columns))))
            }
            Err(error) => Err(error.into()),
        })
    }

    /// Returns the unpacked buffer, if it has the parameter.
    fn buffer_of(&self, Packed { param, unpacked, .. }: &Packed) -> Option<View<'a>> {
        let end = (*unpacked)? + param.len();
        self.unpacked.filter(|all| end <= all.cols())
    }
}
