//! Launching kernels by name.

use super::Cuda;
use super::driver::{Arg, Grid, Source};
use super::graph::Work;
use crate::memory::bytes::{BytesMut, BytesView};
use crate::numerics::exact::ExactView;
use crate::{KernelError, Result, View, ViewMut};

/// Embeds a source file of kernels; `not fused` rounds products and sums separately.
macro_rules! source {
    ($name:literal) => {
        $crate::cuda::source!($name, true)
    };
    ($name:literal, not fused) => {
        $crate::cuda::source!($name, false)
    };
    ($name:literal, $fused:literal) => {
        $crate::cuda::driver::Source {
            name: $name,
            text: include_str!(concat!("cu/", $name)),
            fused: $fused,
            only: None,
        }
    };
}
pub(crate) use source;

/// All source files of kernels.
pub static SOURCES: &[&Source] = &[
    &super::activation::SOURCE,
    &super::attention::DECODE,
    &super::attention::DELTA,
    &super::attention::FORWARD[0],
    &super::attention::FORWARD[1],
    &super::attention::FORWARD[2],
    &super::attention::FORWARD[3],
    &super::attention::FORWARD[4],
    &super::attention::FORWARD[5],
    &super::attention::FORWARD[6],
    &super::attention::BACKWARD[0],
    &super::attention::BACKWARD[1],
    &super::attention::BACKWARD[2],
    &super::attention::BACKWARD[3],
    &super::attention::BACKWARD[4],
    &super::attention::BACKWARD[5],
    &super::attention::BACKWARD[6],
    &super::attention::FORWARD_WGMMA[0],
    &super::attention::FORWARD_WGMMA[1],
    &super::attention::BACKWARD_WGMMA[0],
    &super::attention::BACKWARD_WGMMA[1],
    &super::attention::BOTH_F32[0],
    &super::attention::BOTH_F32[1],
    &super::attention::BOTH_F32[2],
    &super::attention::BOTH_F32[3],
    &super::causal_conv::SOURCE,
    &super::columns::SOURCE,
    &super::convert::SOURCE,
    &super::delta_rule::SOURCE,
    &super::dropout::SOURCE,
    &super::elementwise::SOURCE,
    &super::embedding::SOURCE,
    &super::exact::SOURCE,
    &super::fp8::SOURCE,
    &super::head::SOURCE,
    &super::head_divergence::SOURCE,
    &super::head_gate::SOURCE,
    &super::low_rank::SOURCE,
    &super::norm::LAYER_NORM,
    &super::norm::RMS_NORM,
    &super::norm::SUMS,
    &super::optimizer::SOURCE,
    &super::pack::SOURCE,
    &super::gemm::SOURCE,
    &super::rope::SOURCE,
    &super::sampling::SOURCE,
];

/// Headers of the source files.
pub static HEADERS: &[Source] = &[
    source!("attention.cuh"),
    source!("attention_f32_tiles.cuh"),
    source!("attention_tiles.cuh"),
    source!("attention_wgmma.cuh"),
    source!("columns.cuh"),
    source!("common.cuh"),
    source!("e4m3.cuh"),
    source!("elements.cuh"),
    source!("exact.cuh"),
    source!("mma.cuh"),
    source!("rows.cuh"),
    source!("sigmoid.cuh"),
    source!("states.cuh"),
    source!("vectors.cuh"),
    source!("wgmma.cuh"),
];

/// Collects kernel arguments.
macro_rules! args {
    ($($arg:expr),* $(,)?) => { &[$($crate::cuda::driver::Arg::from($arg)),*] as &[$crate::cuda::driver::Arg] };
}
pub(crate) use args;

/// Selects a kernel's name by types: `by_type!("norm", x.dtype(), y.dtype())` is one of
/// `norm_f32_f32`, `norm_f32_bf16` and so on.
macro_rules! by_type {
    ($name:literal, $a:expr) => {
        match $a {
            $crate::DType::F32 => concat!($name, "_f32"),
            $crate::DType::Bf16 => concat!($name, "_bf16"),
        }
    };
    ($name:literal, $a:expr, $b:expr) => {
        match ($a, $b) {
            ($crate::DType::F32, $crate::DType::F32) => concat!($name, "_f32_f32"),
            ($crate::DType::F32, $crate::DType::Bf16) => concat!($name, "_f32_bf16"),
            ($crate::DType::Bf16, $crate::DType::F32) => concat!($name, "_bf16_f32"),
            ($crate::DType::Bf16, $crate::DType::Bf16) => concat!($name, "_bf16_bf16"),
        }
    };
}
pub(crate) use by_type;

impl Cuda {
    /// Puts a kernel into the stream, unless the grid is empty.
    ///
    /// # Safety
    /// The arguments are those of the kernel, and their addresses hold as much as it accesses.
    pub(crate) unsafe fn launch(
        &self,
        source: &'static Source,
        name: &'static str,
        grid: Grid,
        args: &[Arg],
    ) -> Result<()> {
        if grid.blocks.contains(&0) {
            return Ok(());
        }
        let known = {
            self.shared.functions.lock().unwrap_or_else(std::sync::PoisonError::into_inner).get(name).copied()
        };
        let function = match known {
            Some(function) => function,
            None => {
                let function = self.driver().function(source, name)?;
                let mut functions =
                    self.shared.functions.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                functions.insert(name, function);
                function
            }
        };
        // SAFETY: the caller's promise.
        let launched = unsafe { self.put_with(Work::Launch { function, grid, num_args: args.len() }, args) };
        launched.map_err(|error| match error {
            KernelError::Cuda { what, reason } => {
                let Grid { blocks: [x, y, z], threads, shared } = grid;
                let of =
                    format!("{what}: {name}, {x} x {y} x {z} blocks of {threads} threads, {shared} bytes");
                KernelError::Cuda { what: of, reason }
            }
            other => other,
        })
    }
}

impl From<View<'_>> for Arg {
    fn from(view: View<'_>) -> Self {
        Self::address(view.address())
    }
}

impl From<&View<'_>> for Arg {
    fn from(view: &View<'_>) -> Self {
        Self::address(view.address())
    }
}

impl From<&ViewMut<'_>> for Arg {
    fn from(view: &ViewMut<'_>) -> Self {
        Self::address(view.address())
    }
}

/// None is a null pointer.
impl From<Option<View<'_>>> for Arg {
    fn from(view: Option<View<'_>>) -> Self {
        Self::address(view.map_or(0, |view| view.address()))
    }
}

/// None is a null pointer.
impl From<Option<&ViewMut<'_>>> for Arg {
    fn from(view: Option<&ViewMut<'_>>) -> Self {
        Self::address(view.map_or(0, ViewMut::address))
    }
}

impl From<BytesView<'_>> for Arg {
    fn from(bytes: BytesView<'_>) -> Self {
        Self::address(bytes.address())
    }
}

impl From<&BytesMut<'_>> for Arg {
    fn from(bytes: &BytesMut<'_>) -> Self {
        Self::address(bytes.view().address())
    }
}

impl From<ExactView<'_>> for Arg {
    fn from(sums: ExactView<'_>) -> Self {
        Self::address(sums.address())
    }
}
