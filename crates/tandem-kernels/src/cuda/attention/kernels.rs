//! The kernels of each width and their launch sizes, as in `attention_forward.cu`,
//! `attention_backward.cu` and `attention_f32.cu`.

use crate::cuda::driver::Source;
use crate::{DType, KernelError, Result};

/// Threads of a block, but for those that multiply by warpgroups.
pub(super) const THREADS: u32 = 128;

/// Compute capability of GPUs that multiply by warpgroups.
pub const WGMMA: (u32, u32) = (9, 0);

/// A position that no token reaches.
pub(super) const NO_WINDOW: u32 = i32::MAX as u32;

/// A kernel: its file, the packed rows of a tile of queries, and threads and shared memory of a block.
pub(super) struct Kernel {
    pub source: &'static Source,
    pub name: &'static str,
    pub rows: usize,
    pub threads: u32,
    pub shared: usize,
}

/// Kernels of a type and width.
pub(super) struct Kernels {
    width: usize,
    pub forward: Kernel,
    /// Gradient of queries.
    pub of_queries: Kernel,
    /// Gradients of keys and values.
    pub of_keys: Kernel,
    /// Keys per tile of keys.
    pub keys: usize,
}

macro_rules! text {
    ($file:literal) => {
        include_str!(concat!("../cu/", $file, ".cu"))
    };
}

/// Sources, each compiled for one width.
macro_rules! of_widths {
    ($file:literal, $only:expr, [$($width:literal),*]) => {
        [$(Source {
            name: concat!($file, "_", $width, ".cu"),
            text: concat!("#define ONLY_WIDTH ", $width, "\n", text!($file)),
            fused: true,
            only: $only,
        }),*]
    };
}

pub(in crate::cuda) static DELTA: Source =
    Source { name: "attention_delta.cu", text: text!("attention_delta"), fused: true, only: None };
pub(in crate::cuda) static DECODE: Source =
    Source { name: "attention_decode.cu", text: text!("attention_decode"), fused: true, only: None };
pub(in crate::cuda) static FORWARD: [Source; 7] =
    of_widths!("attention_forward", None, [16, 32, 64, 80, 96, 128, 256]);
pub(in crate::cuda) static BACKWARD: [Source; 7] =
    of_widths!("attention_backward", None, [16, 32, 64, 80, 96, 128, 256]);
pub(in crate::cuda) static BOTH_F32: [Source; 4] = of_widths!("attention_f32", None, [32, 64, 128, 256]);
pub(in crate::cuda) static FORWARD_WGMMA: [Source; 2] =
    of_widths!("attention_forward_wgmma", Some(WGMMA), [64, 128]);
pub(in crate::cuda) static BACKWARD_WGMMA: [Source; 2] =
    of_widths!("attention_backward_wgmma", Some(WGMMA), [64, 128]);

/// Creates a kernel with `tiles` rows of the width in shared memory, and 4-byte words beside them.
const fn bf16(
    source: &'static Source,
    name: &'static str,
    rows: usize,
    [width, tiles, words]: [usize; 3],
) -> Kernel {
    Kernel { source, name, rows, threads: THREADS, shared: 2 * width * tiles + 4 * words }
}

macro_rules! kernels_bf16 {
    ($index:literal, $width:literal) => {
        Kernels {
            width: $width,
            forward: bf16(
                &FORWARD[$index],
                concat!("attention_forward_", $width),
                128,
                [$width, 128 + 2 * 64, 2 * 64],
            ),
            of_queries: bf16(
                &BACKWARD[$index],
                concat!("attention_backward_queries_", $width),
                128,
                [$width, 2 * 128 + 4 * 32, 2 * 32],
            ),
            of_keys: bf16(
                &BACKWARD[$index],
                concat!("attention_backward_keys_", $width),
                64,
                [$width, 2 * 64 + 3 * 64, 64 * 64 / 2 + 8 * 64],
            ),
            keys: 64,
        }
    };
}

static BF16: [Kernels; 7] = [
    kernels_bf16!(0, 16),
    kernels_bf16!(1, 32),
    kernels_bf16!(2, 64),
    kernels_bf16!(3, 80),
    kernels_bf16!(4, 96),
    kernels_bf16!(5, 128),
    // Smaller tiles, to fit shared memory and registers.
    Kernels {
        width: 256,
        forward: bf16(&FORWARD[6], "attention_forward_256", 64, [256, 64 + 2 * 64, 2 * 64]),
        of_queries: bf16(&BACKWARD[6], "attention_backward_queries_256", 64, [256, 2 * 64 + 2 * 32, 2 * 32]),
        of_keys: bf16(
            &BACKWARD[6],
            "attention_backward_keys_256",
            32,
            [256, 2 * 32 + 3 * 32, 32 * 32 / 2 + 8 * 32],
        ),
        keys: 32,
    },
];

macro_rules! kernels_wgmma {
    ($index:literal, $width:literal, $groups:literal, $keys:literal) => {
        Kernels {
            width: $width,
            forward: Kernel {
                threads: 128 * $groups,
                ..bf16(
                    &FORWARD_WGMMA[$index],
                    concat!("attention_forward_wgmma_", $width),
                    64 * $groups,
                    [$width, 64 * $groups + 4 * $keys, 4 * $keys],
                )
            },
            of_queries: Kernel {
                threads: 128 * $groups,
                ..bf16(
                    &BACKWARD_WGMMA[$index],
                    concat!("attention_backward_queries_wgmma_", $width),
                    64 * $groups,
                    [$width, 2 * 64 * $groups + 6 * 64, 4 * 64],
                )
            },
            of_keys: Kernel {
                threads: 256,
                ..bf16(
                    &BACKWARD_WGMMA[$index],
                    concat!("attention_backward_keys_wgmma_", $width),
                    64,
                    [$width, 2 * 128 + 6 * 64, 3 * 4 * 64],
                )
            },
            keys: 128,
        }
    };
}

/// Kernels that multiply by warpgroups. Other widths have none: what they pad is more than what they gain.
static WGMMA_BF16: [Kernels; 2] = [kernels_wgmma!(0, 64, 3, 64), kernels_wgmma!(1, 128, 2, 128)];

/// Returns the shared memory of an f32 block: `own` rows of its side and `other` rows of the other
/// side at a time, with the numbers of tiles of each and of tiles of scores.
const fn shared_f32(width: usize, [own, other]: [usize; 2], tiles: [usize; 3]) -> usize {
    let rows_of_tiles = tiles[0] * own + tiles[1] * other;
    4 * (rows_of_tiles * (width + 4) + tiles[2] * own * (other + 4) + 4 * other)
}

macro_rules! kernels_f32 {
    ($index:literal, $width:literal, $own:literal, $other:literal) => {
        Kernels {
            width: $width,
            forward: Kernel {
                source: &BOTH_F32[$index],
                name: concat!("attention_f32_forward_", $width),
                rows: $own,
                threads: THREADS,
                shared: shared_f32($width, [$own, $other], [1, 1, 1]),
            },
            of_queries: Kernel {
                source: &BOTH_F32[$index],
                name: concat!("attention_f32_backward_queries_", $width),
                rows: $own,
                threads: THREADS,
                shared: shared_f32($width, [$own, $other], [2, 1, 1]),
            },
            of_keys: Kernel {
                source: &BOTH_F32[$index],
                name: concat!("attention_f32_backward_keys_", $width),
                rows: $other,
                threads: THREADS,
                shared: shared_f32($width, [$own, $other], [2, 2, 2]),
            },
            keys: $own,
        }
    };
}

static F32: [Kernels; 4] = [
    kernels_f32!(0, 32, 32, 32),
    kernels_f32!(1, 64, 32, 32),
    kernels_f32!(2, 128, 32, 32),
    kernels_f32!(3, 256, 16, 16),
];

/// Most numbers of a head, in attention and in linear attention.
pub const WIDEST_HEAD: usize = 256;

/// Returns the kernels of the narrowest width that fits a head; with `wgmma` those that multiply by
/// warpgroups, if they have this width.
pub(super) fn kernels(dtype: DType, head_dim: usize, wgmma: bool) -> Result<&'static Kernels> {
    let found = narrowest(dtype, head_dim)?;
    let same = |kernels: &&Kernels| kernels.width == found.width;
    Ok(WGMMA_BF16.iter().filter(|_| wgmma && dtype == DType::Bf16).find(same).unwrap_or(found))
}

/// Returns whether kernels for heads of this size multiply by warpgroups, where the device is to.
pub fn has_wgmma(head_dim: usize) -> bool {
    kernels(DType::Bf16, head_dim, true).is_ok_and(|kernels| kernels.forward.source.only.is_some())
}

fn narrowest(dtype: DType, head_dim: usize) -> Result<&'static Kernels> {
    let all: &'static [Kernels] = match dtype {
        DType::F32 => &F32,
        DType::Bf16 => &BF16,
    };
    all.iter().find(|kernels| head_dim <= kernels.width).ok_or_else(|| too_wide(head_dim))
}

/// Returns whether a file has kernels that a head of this size needs, or none for heads of one size.
pub(in crate::cuda) fn serves(source: &Source, head_dim: usize, wgmma: bool) -> bool {
    let is_it = |other: &Source| std::ptr::eq(source, other);
    let needed = |kernels: &Kernels| {
        [&kernels.forward, &kernels.of_queries, &kernels.of_keys].iter().any(|kernel| is_it(kernel.source))
    };
    !of_sizes().any(is_it)
        || [DType::F32, DType::Bf16]
            .into_iter()
            .filter_map(|dtype| kernels(dtype, head_dim, wgmma).ok())
            .any(needed)
}

/// Files that are compiled for one width.
fn of_sizes() -> impl Iterator<Item = &'static Source> {
    FORWARD.iter().chain(&BACKWARD).chain(&BOTH_F32).chain(&FORWARD_WGMMA).chain(&BACKWARD_WGMMA)
}

/// Creates the error for a head that no kernel has registers for.
pub(super) fn too_wide(head_dim: usize) -> KernelError {
    KernelError::invalid(
        "attention",
        format!("head size {head_dim}; GPU kernels support at most {WIDEST_HEAD}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shared memory of a block on GPUs of capability 8.6 and 8.9.
    const LIMIT: usize = 99 << 10;

    #[test]
    fn a_block_has_room() {
        for kernels in &WGMMA_BF16 {
            for kernel in [&kernels.forward, &kernels.of_queries, &kernels.of_keys] {
                assert!(kernel.shared <= 227 << 10, "{}: {} bytes", kernel.name, kernel.shared);
            }
        }
        for kernels in BF16.iter().chain(&F32) {
            for kernel in [&kernels.forward, &kernels.of_queries, &kernels.of_keys] {
                assert!(kernel.shared <= LIMIT, "{}: {} bytes", kernel.name, kernel.shared);
            }
        }
    }

    #[test]
    fn a_head_needs_the_files_of_one_width() {
        let needed = |head_dim, wgmma| -> Vec<&str> {
            of_sizes().filter(|source| serves(source, head_dim, wgmma)).map(|source| source.name).collect()
        };
        let of_80 = ["attention_forward_80.cu", "attention_backward_80.cu", "attention_f32_128.cu"];
        assert_eq!(needed(80, false), of_80);
        assert_eq!(needed(80, true), of_80);
        assert_eq!(
            needed(64, true),
            ["attention_f32_64.cu", "attention_forward_wgmma_64.cu", "attention_backward_wgmma_64.cu"]
        );
        assert_eq!(needed(257, true), [""; 0]);
        assert!(serves(&DELTA, 80, false) && serves(&DECODE, 257, false));
    }

    #[test]
    fn products_by_warpgroups_are_of_their_widths_alone() {
        let name = |dtype, head_dim| kernels(dtype, head_dim, true).unwrap().forward.name;
        assert_eq!(name(DType::Bf16, 33), "attention_forward_wgmma_64");
        assert_eq!(name(DType::Bf16, 128), "attention_forward_wgmma_128");
        let sizes = (1..300).filter(|&head_dim| has_wgmma(head_dim)).collect::<Vec<_>>();
        assert_eq!(sizes, (33..=64).chain(97..=128).collect::<Vec<_>>());
        for (dtype, head_dim) in [(DType::Bf16, 32), (DType::Bf16, 80), (DType::Bf16, 256), (DType::F32, 64)]
        {
            assert_eq!(name(dtype, head_dim), kernels(dtype, head_dim, false).unwrap().forward.name);
        }
    }

    #[test]
    fn heads_are_padded_to_the_next_width() {
        let width = |dtype, head_dim| kernels(dtype, head_dim, false).map(|kernels| kernels.width);
        assert_eq!(width(DType::Bf16, 1).unwrap(), 16);
        assert_eq!(width(DType::Bf16, 64).unwrap(), 64);
        assert_eq!(width(DType::Bf16, 72).unwrap(), 80);
        assert_eq!(width(DType::Bf16, 192).unwrap(), 256);
        assert_eq!(width(DType::F32, 80).unwrap(), 128);
        let error = width(DType::F32, 257).unwrap_err().to_string();
        assert_eq!(error, "attention: head size 257; GPU kernels support at most 256");
    }
}
