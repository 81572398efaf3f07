//! What this machine has of NVIDIA's libraries, whether or not it has a GPU.

use std::ffi::c_int;
use std::sync::Arc;

use tandem_dynamic::{Folders, Found, Library};

use super::compiler::Compiler;
use super::context::{Cuda, version_text};
use super::libraries::{BLAS, NVRTC, of_blas, of_nvrtc, open_driver};
use super::nvml::Nvml;
use crate::Result;
use crate::cuda::failed;

/// Each library as a run would open it: its version and its file, or what is missing and who has it.
pub struct Inventory {
    /// CUDA's driver, `libcuda.so.1`. Its version is that of the latest CUDA that it is made for.
    pub driver: Result<Found>,
    /// NVML, by which GPUs are managed. Its version is the driver's own. Nothing but this inventory and [`super::links()`] needs it.
    pub nvml: Result<Found>,
    /// The compiler of kernels, with the part of it that is a library of its own.
    pub nvrtc: Result<Found>,
    /// What multiplies matrices.
    pub cublaslt: Result<Found>,
}

impl Inventory {
    /// Looks for all of them. Where there is no driver, the latest of each counts.
    pub fn take() -> Self {
        Self::of(&Folders::of_environment())
    }

    /// [`Inventory::take`], of these folders.
    pub(super) fn of(folders: &Folders) -> Self {
        let driver = open_driver().and_then(|(library, functions)| {
            // It tells that without being initialised, which fails where there is no GPU.
            let version = Cuda(Arc::new(functions)).version()?;
            Ok((version, library.found(version_text(version), c"cuDriverGetVersion")))
        });
        let major = driver.as_ref().map_or(c_int::MAX, |(version, _)| version / 1000);
        Self {
            driver: driver.map(|(_, found)| found),
            nvml: Nvml::open().and_then(|(library, nvml)| nvml.found(&library)),
            nvrtc: NVRTC.open(folders, major).and_then(|library| nvrtc(&library)),
            cublaslt: BLAS.open(folders, major).and_then(|library| {
                Ok(library.found(of_blas(&library)?.version_text(), c"cublasLtGetVersion"))
            }),
        }
    }
}

/// NVRTC is of use only with its builtins, which it opens by itself when it compiles.
fn nvrtc(library: &Library) -> Result<Found> {
    let (major, minor) = Compiler::new(of_nvrtc(library)?)?.version();
    let found = library.found(format!("{major}.{minor}"), c"nvrtcVersion");
    let builtins = format!("libnvrtc-builtins.so.{major}.{minor}");
    match Library::open(&builtins) {
        Ok(_) => Ok(found),
        Err(why) => {
            let place = found.file.display();
            let reason = format!(
                "there is no {builtins}, which belongs beside {place} ({why}); it is in the same package: {}",
                NVRTC.packages
            );
            Err(failed("NVRTC", reason))
        }
    }
}
