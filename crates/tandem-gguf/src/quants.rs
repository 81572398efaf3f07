//! Storage types of GGUF and their values in f32.
//!
//! Layouts: `ggml-common.h` of ggml. The order of the f32 operations is that of `gguf.quants` of
//! PyPI, so values are equal bit for bit.

use half::{bf16, f16};

/// Elements of a superblock of the K-quants.
const SUPER: usize = 256;

/// Storage type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are ggml's")]
pub enum Quant {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
}

/// Names of ggml's types by id; gaps are types that ggml removed.
const NAMES: [&str; 40] = [
    "f32",
    "f16",
    "q4_0",
    "q4_1",
    "q4_2",
    "q4_3",
    "q5_0",
    "q5_1",
    "q8_0",
    "q8_1",
    "q2_K",
    "q3_K",
    "q4_K",
    "q5_K",
    "q6_K",
    "q8_K",
    "iq2_xxs",
    "iq2_xs",
    "iq3_xxs",
    "iq1_s",
    "iq4_nl",
    "iq3_s",
    "iq2_s",
    "iq4_xs",
    "i8",
    "i16",
    "i32",
    "i64",
    "f64",
    "iq1_m",
    "bf16",
    "q4_0_4_4",
    "q4_0_4_8",
    "q4_0_8_8",
    "tq1_0",
    "tq2_0",
    "iq4_nl_4_4",
    "iq4_nl_4_8",
    "iq4_nl_8_8",
    "mxfp4",
];

impl std::fmt::Display for Quant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(NAMES[self.id()])
    }
}

impl Quant {
    const ALL: [Self; 13] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2K,
        Self::Q3K,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
    ];

    fn id(self) -> usize {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q4_1 => 3,
            Self::Q5_0 => 6,
            Self::Q5_1 => 7,
            Self::Q8_0 => 8,
            Self::Q2K => 10,
            Self::Q3K => 11,
            Self::Q4K => 12,
            Self::Q5K => 13,
            Self::Q6K => 14,
            Self::Bf16 => 30,
        }
    }

    /// Finds the type with ggml's id; the error names another type.
    pub(crate) fn from_id(id: u32) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|quant| quant.id() == id as usize);
        found.ok_or_else(|| {
            let name = NAMES.get(id as usize).map_or_else(|| format!("type {id}"), |name| (*name).to_owned());
            let known = Self::ALL.map(|quant| quant.to_string()).join(", ");
            format!("{name}, which is not supported; known: {known}")
        })
    }

    /// Returns the elements of a block.
    pub fn block(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 => 32,
            Self::Q2K | Self::Q3K | Self::Q4K | Self::Q5K | Self::Q6K => SUPER,
        }
    }

    /// Returns the bytes of a block.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q2K => 84,
            Self::Q3K => 110,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
        }
    }

    /// Dequantises the elements from `start` on into `out`; `bytes` are those of the whole tensor.
    ///
    /// # Panics
    /// If the elements are out of bounds.
    pub fn read(self, bytes: &[u8], start: usize, out: &mut [f32]) {
        let (block, size) = (self.block(), self.block_bytes());
        let mut whole = [0.0; SUPER];
        let whole = &mut whole[..block];
        let (mut at, mut rest) = (start, out);
        while !rest.is_empty() {
            let (index, skip) = (at / block, at % block);
            let take = (block - skip).min(rest.len());
            let (to, after) = rest.split_at_mut(take);
            let stored = &bytes[index * size..(index + 1) * size];
            if take == block {
                self.block_into(stored, to);
            } else {
                self.block_into(stored, whole);
                to.copy_from_slice(&whole[skip..skip + take]);
            }
            (at, rest) = (at + take, after);
        }
    }

    /// Dequantises one block.
    fn block_into(self, b: &[u8], out: &mut [f32]) {
        match self {
            Self::F32 => out[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
            Self::F16 => out[0] = half_at(b, 0),
            Self::Bf16 => out[0] = bf16::from_le_bytes([b[0], b[1]]).to_f32(),
            Self::Q4_0 => nibbles(&b[2..], &[0; 4], |i, q| out[i] = half_at(b, 0) * (f32::from(q) - 8.0)),
            Self::Q4_1 => {
                nibbles(&b[4..], &[0; 4], |i, q| out[i] = half_at(b, 0) * f32::from(q) + half_at(b, 2));
            }
            Self::Q5_0 => nibbles(&b[6..], &b[2..6], |i, q| out[i] = half_at(b, 0) * (f32::from(q) - 16.0)),
            Self::Q5_1 => {
                nibbles(&b[8..], &b[4..8], |i, q| out[i] = half_at(b, 0) * f32::from(q) + half_at(b, 2));
            }
            Self::Q8_0 => {
                let d = half_at(b, 0);
                out.iter_mut().zip(&b[2..]).for_each(|(to, &q)| *to = f32::from(q as i8) * d);
            }
            Self::Q2K => q2_k(b, out),
            Self::Q3K => q3_k(b, out),
            Self::Q4K => q45_k(b, &[], &b[16..], out),
            Self::Q5K => q45_k(b, &b[16..48], &b[48..], out),
            Self::Q6K => q6_k(b, out),
        }
    }
}

fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// Visits the 32 codes of a block: low nibbles, then high ones, each with a fifth bit of `high`.
fn nibbles(low: &[u8], high: &[u8], mut visit: impl FnMut(usize, u8)) {
    for i in 0..32 {
        let nibble = if i < 16 { low[i] & 15 } else { low[i - 16] >> 4 };
        visit(i, nibble | (high[i / 8] >> (i % 8) & 1) << 4);
    }
}

fn q2_k(b: &[u8], out: &mut [f32]) {
    let (scales, codes, d, dmin) = (&b[..16], &b[16..80], half_at(b, 80), half_at(b, 82));
    for (i, to) in out.iter_mut().enumerate() {
        let scale = scales[i / 16];
        let q = codes[i / 128 * 32 + i % 32] >> (2 * (i / 32 % 4)) & 3;
        *to = d * f32::from(scale & 15) * f32::from(q) - dmin * f32::from(scale >> 4);
    }
}

fn q3_k(b: &[u8], out: &mut [f32]) {
    let (mask, codes, scales, d) = (&b[..32], &b[32..96], &b[96..108], half_at(b, 108));
    for (i, to) in out.iter_mut().enumerate() {
        let group = i / 16;
        let low = scales[group % 8] >> (4 * (group / 8)) & 15;
        let high = scales[8 + group % 4] >> (2 * (group / 4)) & 3;
        let scale = f32::from((low | high << 4) as i8 - 32);
        let q = (codes[i / 128 * 32 + i % 32] >> (2 * (i / 32 % 4)) & 3) as i8;
        // A mask bit that is not set takes four off.
        let off = if mask[i % 32] >> (i / 32) & 1 == 1 { 0 } else { 4 };
        *to = d * scale * f32::from(q - off);
    }
}

/// Dequantises q4_K (`high` is empty) and q5_K.
fn q45_k(b: &[u8], high: &[u8], codes: &[u8], out: &mut [f32]) {
    let (d, dmin, scales) = (half_at(b, 0), half_at(b, 2), &b[4..16]);
    for (group, out) in out.chunks_mut(32).enumerate() {
        let (scale, min) = if group < 4 {
            (scales[group] & 63, scales[group + 4] & 63)
        } else {
            let packed = scales[group + 4];
            (packed & 15 | scales[group - 4] >> 2 & 48, packed >> 4 | scales[group] >> 2 & 48)
        };
        let (d, m) = (d * f32::from(scale), dmin * f32::from(min));
        for (i, to) in out.iter_mut().enumerate() {
            let nibble = codes[group / 2 * 32 + i] >> (4 * (group % 2)) & 15;
            let fifth = high.get(i).map_or(0, |bits| bits >> group & 1);
            *to = d * f32::from(nibble | fifth << 4) - m;
        }
    }
}

fn q6_k(b: &[u8], out: &mut [f32]) {
    let (low, high, scales, d) = (&b[..128], &b[128..192], &b[192..208], half_at(b, 208));
    for (i, to) in out.iter_mut().enumerate() {
        let half = i / 128;
        let nibble = low[half * 64 + i % 64] >> (4 * (i / 64 % 2)) & 15;
        let top = high[half * 32 + i % 32] >> (2 * (i / 32 % 4)) & 3;
        let q = (nibble | top << 4) as i8 - 32;
        *to = d * f32::from(scales[i / 16] as i8) * f32::from(q);
    }
}
