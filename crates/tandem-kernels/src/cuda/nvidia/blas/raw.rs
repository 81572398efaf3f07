//! The C interface of cuBLASLt: types, constants and functions as in `cublasLt.h` from CUDA 11.2 to
//! 13. The library allocates descriptions itself, since their sizes differ between versions; the
//! size of an algorithm never changed.

use std::ffi::{c_int, c_void};

use tandem_dlopen::functions;

use crate::cuda::driver::{Algorithm, FactorType};
use crate::cuda::nvidia::raw::Opaque;

/// `cublasStatus_t`: done.
pub(in crate::cuda::nvidia) const SUCCESS: c_int = 0;
/// `CUBLAS_STATUS_NOT_SUPPORTED`.
pub(in crate::cuda::nvidia) const NOT_SUPPORTED: c_int = 15;

/// `cublasComputeType_t`: `CUBLAS_COMPUTE_32F`.
pub(in crate::cuda::nvidia) const COMPUTE_32F: c_int = 68;
/// `CUBLAS_COMPUTE_32F_FAST_TF32`.
pub(in crate::cuda::nvidia) const COMPUTE_32F_FAST_TF32: c_int = 77;
/// `cublasOperation_t`: `CUBLAS_OP_N`, as it lies.
pub(in crate::cuda::nvidia) const OP_N: c_int = 0;
/// `CUBLAS_OP_T`, rows and columns exchanged.
pub(in crate::cuda::nvidia) const OP_T: c_int = 1;
/// `CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE`: partial sums over the depth stay in f32.
pub(in crate::cuda::nvidia) const REDUCTION_COMPUTE_TYPE: u32 = 2;

/// `cublasLtMatmulDescAttributes_t`: `CUBLASLT_MATMUL_DESC_TRANSA`, an `int32_t`.
pub(in crate::cuda::nvidia) const DESC_TRANSA: c_int = 3;
/// `CUBLASLT_MATMUL_DESC_TRANSB`, an `int32_t`.
pub(in crate::cuda::nvidia) const DESC_TRANSB: c_int = 4;

/// `cublasLtMatmulPreferenceAttributes_t`: `CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES`, a
/// `uint64_t`.
pub(in crate::cuda::nvidia) const PREF_MAX_WORKSPACE_BYTES: c_int = 1;
/// `CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK`, a `uint32_t`.
pub(in crate::cuda::nvidia) const PREF_REDUCTION_SCHEME_MASK: c_int = 3;
/// `CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES`, `…B…`, `…C…` and `…D…`, `uint32_t`s.
pub(in crate::cuda::nvidia) const PREF_MIN_ALIGNMENT_BYTES: [c_int; 4] = [5, 6, 7, 8];

/// `cudaDataType_t`: `CUDA_R_32F`, `CUDA_R_16BF` and `CUDA_R_8F_E4M3`.
pub(in crate::cuda::nvidia) const fn data_type(dtype: FactorType) -> c_int {
    match dtype {
        FactorType::F32 => 0,
        FactorType::Bf16 => 14,
        FactorType::E4m3 => 28,
    }
}

/// Least version of the library with FP8 products on every GPU that has them: CUDA 12.
pub(in crate::cuda::nvidia) const FP8_VERSION: usize = 120_000;

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(in crate::cuda::nvidia) struct Heuristic {
    pub(in crate::cuda::nvidia) algorithm: Algorithm,
    pub(in crate::cuda::nvidia) workspace: usize,
    pub(in crate::cuda::nvidia) state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<Algorithm>() == 64 && align_of::<Algorithm>() == 8);
    assert!(size_of::<Heuristic>() == 96 && offset_of!(Heuristic, workspace) == 64);
    assert!(offset_of!(Heuristic, state) == 72 && offset_of!(Heuristic, waves) == 76);
};

functions! {
    /// cuBLASLt.
    pub(in crate::cuda::nvidia) struct BlasFunctions {
        version = c"cublasLtGetVersion" () -> usize;
        create = c"cublasLtCreate" (*mut Opaque) -> c_int;
        destroy = c"cublasLtDestroy" (Opaque) -> c_int;
        create_desc = c"cublasLtMatmulDescCreate" (*mut Opaque, c_int, c_int) -> c_int;
        destroy_desc = c"cublasLtMatmulDescDestroy" (Opaque) -> c_int;
        set_desc = c"cublasLtMatmulDescSetAttribute" (Opaque, c_int, *const c_void, usize) -> c_int;
        create_layout = c"cublasLtMatrixLayoutCreate" (*mut Opaque, c_int, u64, u64, i64) -> c_int;
        destroy_layout = c"cublasLtMatrixLayoutDestroy" (Opaque) -> c_int;
        create_preference = c"cublasLtMatmulPreferenceCreate" (*mut Opaque) -> c_int;
        destroy_preference = c"cublasLtMatmulPreferenceDestroy" (Opaque) -> c_int;
        set_preference = c"cublasLtMatmulPreferenceSetAttribute" (Opaque, c_int, *const c_void, usize) -> c_int;
        heuristic = c"cublasLtMatmulAlgoGetHeuristic"
            (Opaque, Opaque, Opaque, Opaque, Opaque, Opaque, Opaque, c_int, *mut Heuristic, *mut c_int) -> c_int;
        check = c"cublasLtMatmulAlgoCheck"
            (Opaque, Opaque, Opaque, Opaque, Opaque, Opaque, *const Algorithm, *mut Heuristic) -> c_int;
        matmul = c"cublasLtMatmul"
            (
                Opaque, Opaque, *const c_void, u64, Opaque, u64, Opaque, *const c_void, u64, Opaque, u64, Opaque,
                *const Algorithm, u64, usize, Opaque
            ) -> c_int;
    }
}

impl BlasFunctions {
    /// Returns the library's version in NVIDIA's format.
    pub(in crate::cuda::nvidia) fn version_text(&self) -> String {
        // SAFETY: takes nothing.
        let version = unsafe { (self.version)() };
        format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
    }
}

/// Describes a `cublasStatus_t`.
pub(in crate::cuda::nvidia) fn status(status: c_int) -> String {
    let name = match status {
        1 => "CUBLAS_STATUS_NOT_INITIALIZED: it was not initialised, or the driver is too old for it",
        3 => "CUBLAS_STATUS_ALLOC_FAILED: it found no memory",
        7 => "CUBLAS_STATUS_INVALID_VALUE: an argument is wrong",
        8 => "CUBLAS_STATUS_ARCH_MISMATCH: this GPU cannot do it",
        11 => "CUBLAS_STATUS_MAPPING_ERROR: it could not use the GPU's memory",
        13 => "CUBLAS_STATUS_EXECUTION_FAILED: the GPU failed",
        14 => "CUBLAS_STATUS_INTERNAL_ERROR: it failed",
        15 => "CUBLAS_STATUS_NOT_SUPPORTED: it cannot do this",
        16 => "CUBLAS_STATUS_LICENSE_ERROR: there is no licence",
        _ => return format!("cuBLAS error {status}"),
    };
    name.to_owned()
}
