//! Inventory of NVIDIA's libraries on this machine, with or without a GPU.

use std::ffi::c_int;
use std::sync::Arc;

use tandem_dlopen::{Folders, Found, Library};

use super::compiler::Compiler;
use super::context::{Cuda, version_text};
use super::libraries::{BLAS, NVRTC, load_blas, load_nvrtc, open_driver};
use super::nvml::Nvml;
use crate::Result;
use crate::cuda::failed;

/// Each library as a run would open it: version and file, or what is missing and where it comes
/// from.
pub struct Inventory {
    /// CUDA's driver, `libcuda.so.1`, with the latest CUDA version that it supports.
    pub driver: Result<Found>,
    /// NVML, with the driver's version. Only this inventory and [`super::links()`] need it.
    pub nvml: Result<Found>,
    /// The kernel compiler, with its built-ins library.
    pub nvrtc: Result<Found>,
    /// The GEMM library.
    pub cublaslt: Result<Found>,
}

impl Inventory {
    /// Looks for all libraries. Without a driver, the latest of each counts.
    pub fn take() -> Self {
        Self::from_folders(&Folders::from_environment())
    }

    /// [`Inventory::take`] in given directories.
    pub(super) fn from_folders(folders: &Folders) -> Self {
        let driver = open_driver().and_then(|(library, functions)| {
            // Works without initialisation, which fails without a GPU.
            let version = Cuda { functions: Arc::new(functions), load: None, graphs: None }.version()?;
            Ok((version, library.found(version_text(version), c"cuDriverGetVersion")))
        });
        let major = driver.as_ref().map_or(c_int::MAX, |(version, _)| version / 1000);
        Self {
            driver: driver.map(|(_, found)| found),
            nvml: Nvml::open().and_then(|(library, nvml)| nvml.found(&library)),
            nvrtc: NVRTC.open(folders, major).and_then(|library| nvrtc(&library)),
            cublaslt: BLAS.open(folders, major).and_then(|library| {
                Ok(library.found(load_blas(&library)?.version_text(), c"cublasLtGetVersion"))
            }),
        }
    }
}

/// NVRTC needs its built-ins, which it opens when it compiles.
fn nvrtc(library: &Library) -> Result<Found> {
    let (major, minor) = Compiler::new(load_nvrtc(library)?)?.version();
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
