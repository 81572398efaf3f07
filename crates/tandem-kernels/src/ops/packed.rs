//! Weights of linear layers: plain matrices, or packed ones that a product reads as they are.
//!
//! A CPU's product unpacks what fits a cache and has the bits of the unpacked matrix. A GPU's product
//! multiplies FP8 codes, and rounds its input to such codes.

use std::ops::Range;

use super::check::Operand;
use crate::cpu::Isa;
use crate::memory::bytes::BytesView;
use crate::{Backend, DType, Device, Format, KernelError, Result, View};

/// Rows of the input up to which [`reads_packed`].
const FEW_ROWS: usize = 32;

/// Rows of bf16 above which AVX2 gains in nf4.
const MORE_ROWS: usize = 8;

/// Returns whether a product of so many rows is faster if it reads packed weights as they are, than if they are
/// unpacked into memory: on CPUs with AVX2 or AVX-512, in int8 and, but for bf16 with AVX2, in nf4. With AMX nothing was
/// measured. A dry run answers for this machine's CPU.
pub fn reads_packed(device: &Device, rows: usize, format: Format, dtype: DType) -> bool {
    let isa = match device {
        Device::Cpu(cpu) => Some(cpu.isa()),
        Device::Meta(_) if device.backend() == Backend::Cpu => Isa::detect().ok(),
        _ => None,
    };
    let pays = match (format, isa) {
        (Format::Int8, Some(Isa::Avx2 | Isa::Avx512 | Isa::Avx512Bf16)) => true,
        (Format::Nf4, Some(Isa::Avx512 | Isa::Avx512Bf16)) => true,
        (Format::Nf4, Some(Isa::Avx2)) => dtype == DType::F32 || rows > MORE_ROWS,
        _ => false,
    };
    rows <= FEW_ROWS && pays
}

/// Rows of a matrix that were packed together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedRows {
    /// Number of rows.
    pub rows: usize,
    /// Bytes of the buffer.
    pub bytes: Range<usize>,
}

/// Packed matrix `[rows, cols]` that stands for the unpacked one in a product. A CPU's product unpacks what fits
/// a cache, for all rows of its input, so it is made for few of them. A GPU multiplies whole matrices in
/// [`Format::Fp8`].
#[derive(Clone, Copy)]
pub struct PackedWeight<'a> {
    bytes: BytesView<'a>,
    pieces: &'a [PackedRows],
    format: Format,
    dtype: DType,
    /// Columns of the packed rows.
    width: usize,
    /// First row and column.
    first: (usize, usize),
    shape: (usize, usize),
}

impl<'a> PackedWeight<'a> {
    /// Views all rows of `pieces`, which follow one another, as numbers of type `dtype`. `width` is the number
    /// of columns.
    ///
    /// # Errors
    /// If a piece has not the bytes of its rows.
    pub fn new(
        bytes: BytesView<'a>,
        pieces: &'a [PackedRows],
        format: Format,
        width: usize,
        dtype: DType,
    ) -> Result<Self> {
        for piece in pieces {
            super::pack::length("packed weight", piece.bytes.len(), format, piece.rows, width)?;
            if piece.bytes.end > bytes.len() {
                let reason = format!("bytes {:?} of a buffer of {}", piece.bytes, bytes.len());
                return Err(KernelError::invalid("packed weight", reason));
            }
        }
        let rows = pieces.iter().map(|piece| piece.rows).sum();
        Ok(Self { bytes, pieces, format, dtype, width, first: (0, 0), shape: (rows, width) })
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.shape.0
    }

    /// Returns the number of columns.
    pub fn cols(&self) -> usize {
        self.shape.1
    }

    /// Returns the type of the unpacked numbers.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns a range of the rows.
    ///
    /// # Panics
    /// If it is not inside.
    #[must_use]
    pub fn row_range(self, rows: Range<usize>) -> Self {
        assert!(rows.start <= rows.end && rows.end <= self.rows(), "rows {rows:?} of {}", self.rows());
        let (row, col) = self.first;
        Self { first: (row + rows.start, col), shape: (rows.len(), self.cols()), ..self }
    }

    /// Returns a range of the columns.
    ///
    /// # Panics
    /// If it is not inside.
    #[must_use]
    pub fn col_range(self, cols: Range<usize>) -> Self {
        assert!(cols.start <= cols.end && cols.end <= self.cols(), "columns {cols:?} of {}", self.cols());
        let (row, col) = self.first;
        Self { first: (row, col + cols.start), shape: (self.rows(), cols.len()), ..self }
    }

    /// Returns the bytes of all rows, if the matrix is whole and its pieces follow one another.
    pub(super) fn whole(&self) -> Option<BytesView<'a>> {
        let (first, last) = self.pieces.first().zip(self.pieces.last())?;
        let rows: usize = self.pieces.iter().map(|piece| piece.rows).sum();
        let follows = self.pieces.windows(2).all(|pair| pair[0].bytes.end == pair[1].bytes.start);
        let is_whole = follows && self.first == (0, 0) && self.shape == (rows, self.width);
        is_whole.then(|| self.bytes.range(first.bytes.start..last.bytes.end))
    }

    pub(crate) fn format(&self) -> Format {
        self.format
    }

    /// Returns the place of a row.
    ///
    /// # Panics
    /// If there is no such row.
    pub(crate) fn place(&self, row: usize) -> PackedPlace<'a> {
        let mut row = self.first.0 + row;
        for piece in self.pieces {
            if row < piece.rows {
                let bytes = self.bytes.range(piece.bytes.clone()).as_slice();
                return PackedPlace { bytes, rows: piece.rows, width: self.width, row, col: self.first.1 };
            }
            row -= piece.rows;
        }
        panic!("row {row} beyond the last of a packed matrix");
    }

    /// Lists the places of rows.
    pub(crate) fn places(&self, rows: Range<usize>) -> impl Iterator<Item = PackedPlace<'a>> {
        let mut last: Option<PackedPlace> = None;
        rows.map(move |row| {
            let place = match last {
                Some(place) if place.row + 1 < place.rows => PackedPlace { row: place.row + 1, ..place },
                _ => self.place(row),
            };
            last = Some(place);
            place
        })
    }

    /// Returns the bytes that hold the numbers, about: scales of other columns are counted in proportion.
    fn num_bytes(&self) -> usize {
        let (all, rows) =
            self.pieces.iter().fold((0, 0), |(bytes, rows), p| (bytes + p.bytes.len(), rows + p.rows));
        let (part, whole) = (self.rows() * self.cols(), rows * self.width);
        if whole == 0 { 0 } else { (all as u128 * part as u128 / whole as u128) as usize }
    }
}

/// Place of a row of a [`PackedWeight`].
#[derive(Clone, Copy)]
pub(crate) struct PackedPlace<'a> {
    /// Bytes of the piece.
    pub bytes: &'a [u8],
    /// Rows and columns of the piece.
    pub rows: usize,
    pub width: usize,
    /// Row in the piece.
    pub row: usize,
    /// First column of the weight.
    pub col: usize,
}

/// Weight `[N, K]` of a linear layer.
#[derive(Clone, Copy)]
pub enum Weight<'a> {
    /// Numbers in the type of the layer's input.
    Plain(View<'a>),
    /// Packed numbers.
    Packed(PackedWeight<'a>),
}

impl<'a> From<View<'a>> for Weight<'a> {
    fn from(view: View<'a>) -> Self {
        Self::Plain(view)
    }
}

impl Weight<'_> {
    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.describe().0
    }

    /// Returns the number of columns.
    pub fn cols(&self) -> usize {
        self.describe().1
    }

    /// Returns a range of the rows.
    pub(super) fn row_range(self, rows: Range<usize>) -> Self {
        match self {
            Self::Plain(view) => Self::Plain(view.row_range(rows)),
            Self::Packed(packed) => Self::Packed(packed.row_range(rows)),
        }
    }

    /// Returns a range of the columns.
    pub(super) fn col_range(self, cols: Range<usize>) -> Self {
        match self {
            Self::Plain(view) => Self::Plain(view.col_range(cols)),
            Self::Packed(packed) => Self::Packed(packed.col_range(cols)),
        }
    }

    /// Returns the bytes that a product reads.
    pub(super) fn num_bytes(&self) -> usize {
        match self {
            Self::Plain(view) => view.num_bytes(),
            Self::Packed(packed) => packed.num_bytes(),
        }
    }
}

impl Operand for Weight<'_> {
    fn describe(&self) -> (usize, usize, DType) {
        match self {
            Self::Plain(view) => view.describe(),
            Self::Packed(packed) => (packed.rows(), packed.cols(), packed.dtype()),
        }
    }
}
