//! Listing and opening NVIDIA GPUs.

use std::sync::Arc;

use super::blas::Blas;
use super::blas::raw::BlasFunctions;
use super::cache::Cache;
use super::compiler::{Compiler, NvrtcFunctions};
use super::context::{Context, Cuda, NO_GPU};
use super::driver::Nvidia;
use super::libraries;
use super::modules::Modules;
use super::raw::attribute;
use crate::Result;
use crate::cuda::driver::{Drivers, Properties};
use crate::cuda::failed;

/// Oldest supported compute capability, Ampere: earlier GPUs do not multiply bf16.
const OLDEST: (u32, u32) = (8, 0);

/// Lists the GPUs that this process may use, in the order of their numbers.
///
/// # Errors
/// If there is no usable GPU, or a library is missing: the message says which, and where it comes
/// from.
pub fn list() -> Result<Vec<Properties>> {
    let cuda = libraries::driver()?;
    let all = list_of(&cuda)?;
    let major = cuda.version()? / 1000;
    libraries::nvrtc(major)?;
    libraries::blas(major)?;
    Ok(all)
}

/// [`list`] with an open driver.
pub(super) fn list_of(cuda: &Cuda) -> Result<Vec<Properties>> {
    let all = (0..cuda.count()?).map(|ordinal| cuda.properties(ordinal)).collect::<Result<Vec<_>>>()?;
    let refused = all.iter().map(|gpu| look(cuda, gpu).err()).collect::<Option<Vec<_>>>();
    match refused.map(|refused| refused.into_iter().next()) {
        // At least one is usable.
        None => Ok(all),
        Some(None) => Err(failed("CUDA", NO_GPU)),
        Some(Some(first)) => Err(first),
    }
}

/// Opens the GPU of that number.
///
/// # Errors
/// If a library is missing or too old, or the GPU does not exist or is older than Ampere.
pub fn open(ordinal: usize) -> Result<Drivers> {
    let cuda = libraries::driver()?;
    let major = cuda.version()? / 1000;
    find(&cuda, ordinal)?;
    let (nvrtc, blas) = (libraries::nvrtc(major)?, libraries::blas(major)?);
    open_with(&cuda, ordinal, nvrtc, blas, Cache::from_environment())
}

/// Opens a GPU with open libraries.
pub(super) fn open_with(
    cuda: &Cuda,
    ordinal: usize,
    nvrtc: NvrtcFunctions,
    blas: BlasFunctions,
    cache: Cache,
) -> Result<Drivers> {
    find(cuda, ordinal)?;
    let context = Context::open(cuda, ordinal)?;
    let blas = Blas::new(&context, blas, cache.clone())?;
    let modules = Modules::new(&context, Compiler::new(nvrtc)?, cache)?;
    Ok(Arc::new(Nvidia::new(context, modules, blas)?))
}

/// Checks that the GPU exists and is supported.
fn find(cuda: &Cuda, ordinal: usize) -> Result<()> {
    let count = cuda.count()?;
    let missing = |reason: String| Err(failed(format!("GPU {ordinal}"), reason));
    match count {
        0 => return Err(failed("CUDA", NO_GPU)),
        1 if ordinal > 0 => return missing("there is one GPU, GPU 0".to_owned()),
        _ if ordinal >= count => {
            return missing(format!("there are {count} GPUs, GPU 0 to GPU {}", count - 1));
        }
        _ => {}
    }
    look(cuda, &cuda.properties(ordinal)?)
}

/// Checks that a GPU is supported.
fn look(cuda: &Cuda, gpu: &Properties) -> Result<()> {
    let Properties { ordinal, name, capability, .. } = gpu;
    let refused = |reason: String| Err(failed(format!("GPU {ordinal}"), reason));
    if *capability < OLDEST {
        let ((major, minor), (oldest, of_oldest)) = (capability, OLDEST);
        return refused(format!(
            "{name} has compute capability {major}.{minor}; products of bf16 need {oldest}.{of_oldest} (Ampere) or later"
        ));
    }
    let support = attribute::VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
    if cuda.attribute(cuda.handle(*ordinal)?, support)? == 0 {
        let reason = "or its driver cannot put memory behind addresses that were reserved before";
        return refused(format!("{name} {reason}"));
    }
    Ok(())
}
