//! Storage formats of frozen weights.
//!
//! A *piece* is one matrix in a format. It consists of *units* of one length that hold their own
//! scales, so a buffer of pieces is sharded between units. Pieces and units begin at multiples of
//! 64 bytes.
//!
//! * f32 and bf16 are plain. A unit is 64 bytes.
//! * int8: a unit is a row, its codes followed by the row's largest magnitude (f32). A weight is
//!   `code·absmax / 127`.
//! * fp8: a unit is a row, as of int8: codes in [E4M3](super::e4m3), then the row's scale (f32). A
//!   weight is the code's number times the scale, which is the row's largest magnitude / 448.
//! * nf4 (arXiv 2305.14314): the matrix as one row, in blocks of 64 weights. A weight is one of
//!   sixteen numbers times the block's scale. The scales, less their mean over the matrix, are
//!   bytes into a table of 256 numbers, times the largest of 256 neighbours. A unit is such 256
//!   blocks: 8192 bytes of codes (the first weight of a pair in the high half), 256 bytes of
//!   scales, then the scales' factor and mean (f32). The last unit may be partly used.
//!
//! Unused bytes of a unit are zero. int8 and nf4 match bitsandbytes (`int8_vectorwise_quant`, and
//! `quantize_4bit` with `compress_statistics`).

use crate::DType;
use crate::memory::bytes::ALIGNMENT;

/// Storage format of a frozen matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// Plain f32.
    F32,
    /// Plain bf16.
    Bf16,
    /// One byte per weight and one scale per row.
    Int8,
    /// One FP8 number (E4M3) per weight and one scale per row.
    Fp8,
    /// Four bits per weight, with scales that are quantised too.
    Nf4,
}

/// Weights per nf4 scale.
pub const NF4_BLOCK: usize = 64;

/// Blocks per nf4 unit.
pub const NF4_BLOCKS: usize = 256;

/// Weights per nf4 unit.
pub const NF4_UNIT: usize = NF4_BLOCK * NF4_BLOCKS;

/// Bytes per nf4 unit.
pub const NF4_UNIT_LEN: usize =
    (NF4_UNIT / 2 + NF4_BLOCKS + 2 * size_of::<f32>()).next_multiple_of(ALIGNMENT);

impl Format {
    /// Every format.
    pub const ALL: [Self; 5] = [Self::F32, Self::Bf16, Self::Int8, Self::Fp8, Self::Nf4];

    /// Names of the formats.
    pub const NAMES: [&'static str; 5] = ["f32", "bf16", "int8", "fp8", "nf4"];

    /// Returns the name used in configs and messages.
    pub const fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }

    /// Finds a format by name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.name() == name)
    }

    /// Returns the element type of a plain format.
    pub const fn dtype(self) -> Option<DType> {
        match self {
            Self::F32 => Some(DType::F32),
            Self::Bf16 => Some(DType::Bf16),
            Self::Int8 | Self::Fp8 | Self::Nf4 => None,
        }
    }

    /// Returns the bytes of a unit of a matrix of `cols` columns.
    pub const fn unit_len(self, cols: usize) -> usize {
        match self {
            Self::F32 | Self::Bf16 => ALIGNMENT,
            Self::Int8 | Self::Fp8 => (cols + size_of::<f32>()).next_multiple_of(ALIGNMENT),
            Self::Nf4 => NF4_UNIT_LEN,
        }
    }

    /// Returns the weights of a unit of a matrix of `cols` columns.
    pub const fn unit_weights(self, cols: usize) -> usize {
        match self {
            Self::F32 => ALIGNMENT / size_of::<f32>(),
            Self::Bf16 => ALIGNMENT / 2,
            Self::Int8 | Self::Fp8 => cols,
            Self::Nf4 => NF4_UNIT,
        }
    }

    /// Returns the units of a `rows × cols` matrix.
    pub const fn num_units(self, rows: usize, cols: usize) -> usize {
        if cols == 0 { 0 } else { (rows * cols).div_ceil(self.unit_weights(cols)) }
    }

    /// Returns the bytes of a `rows × cols` matrix.
    pub const fn packed_len(self, rows: usize, cols: usize) -> usize {
        self.num_units(rows, cols) * self.unit_len(cols)
    }
}

impl std::fmt::Display for Format {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_to_formats_and_back() {
        for (format, name) in Format::ALL.into_iter().zip(Format::NAMES) {
            assert_eq!((format.name(), Format::from_name(name)), (name, Some(format)));
        }
        assert_eq!(Format::from_name("fp4"), None);
    }

    #[test]
    fn lengths_are_whole_units() {
        assert_eq!(NF4_UNIT_LEN, 8512);
        assert_eq!(Format::Nf4.packed_len(128, 128), 8512);
        assert_eq!(Format::Nf4.packed_len(1, 16_385), 2 * 8512);
        assert_eq!(Format::Int8.packed_len(3, 60), 3 * 64);
        assert_eq!(Format::Int8.packed_len(3, 61), 3 * 128);
        assert_eq!(Format::Fp8.packed_len(3, 61), 3 * 128);
        assert_eq!(Format::Bf16.packed_len(3, 11), 128);
        assert_eq!(Format::F32.packed_len(4, 4), 64);
        for format in Format::ALL {
            assert_eq!((format.packed_len(0, 7), format.packed_len(7, 0)), (0, 0));
        }
        let weights = (4096 * 11_008) as f64;
        assert!(Format::Nf4.packed_len(4096, 11_008) as f64 / weights <= 0.53);
        assert!(Format::Int8.packed_len(4096, 11_008) as f64 / weights <= 1.01);
    }
}
