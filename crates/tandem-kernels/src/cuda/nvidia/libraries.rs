//! Finding NVIDIA's libraries, and saying what is missing.
//!
//! The driver comes with the kernel's module and lies where the loader looks. NVRTC and cuBLASLt come with a toolkit, or from PyPI,
//! and may lie anywhere; there may be several versions. One is taken that the driver can run: of its major version or an earlier one.

use std::ffi::c_int;
use std::sync::Arc;

use tandem_dynamic::{FOLDERS, Folders, Library};

use super::blas::raw::BlasFunctions;
use super::compiler::NvrtcFunctions;
use super::context::{Cuda, version_text};
use super::raw::DriverFunctions;
use crate::Result;
use crate::cuda::failed;

const DRIVER: &str = "libcuda.so.1";
/// Where what belongs to the driver comes from.
pub(super) const OF_DRIVER: &str = "comes with NVIDIA's driver for its GPUs: Debian has it in libcuda1 and libnvidia-ml1, Ubuntu in \
                                    libnvidia-compute of the driver's number; a container is given its host's";

/// A library of the toolkit.
pub(super) struct Wanted {
    what: &'static str,
    /// File names, latest first, each with the major version of the CUDA that it belongs to; 0 is not known.
    names: &'static [(&'static str, c_int)],
    pub(super) packages: &'static str,
}

pub(super) const NVRTC: Wanted = Wanted {
    what: "NVRTC, the compiler of kernels",
    names: &[("libnvrtc.so.13", 13), ("libnvrtc.so.12", 12), ("libnvrtc.so.11.2", 11), ("libnvrtc.so", 0)],
    packages: "NVIDIA's repository for Debian and Ubuntu has it as cuda-nvrtc-12-9 and cuda-nvrtc-13-0, PyPI as \
               nvidia-cuda-nvrtc-cu12 (CUDA 12) and nvidia-cuda-nvrtc (CUDA 13)",
};

pub(super) const BLAS: Wanted = Wanted {
    what: "cuBLASLt, which multiplies matrices",
    names: &[("libcublasLt.so.13", 13), ("libcublasLt.so.12", 12), ("libcublasLt.so.11", 11)],
    packages: "NVIDIA's repository for Debian and Ubuntu has it in libcublas-12-9 and libcublas-13-0, PyPI in \
               nvidia-cublas-cu12 (CUDA 12) and nvidia-cublas (CUDA 13)",
};

impl Wanted {
    /// Opens the latest that is not later than the driver's `major` version.
    pub(super) fn open(&self, folders: &Folders, major: c_int) -> Result<Library> {
        let names: Vec<&str> =
            self.names.iter().filter(|(_, of)| *of <= major).map(|(name, _)| *name).collect();
        folders.open(&names).map_err(|reasons| {
            failed(
                self.what,
                format!(
                    "there is no {} ({reasons}); {}; {FOLDERS}=/folder:/folder says where it is if the loader does not know",
                    names.join(" or "),
                    self.packages
                ),
            )
        })
    }
}

/// Opens NVIDIA's driver.
pub(super) fn driver() -> Result<Cuda> {
    Cuda::start(Arc::new(open_driver()?.1))
}

/// NVIDIA's driver, not yet initialised.
pub(super) fn open_driver() -> Result<(Library, DriverFunctions)> {
    let library = Library::open(DRIVER)
        .map_err(|why| failed("CUDA", format!("there is no {DRIVER}, which {OF_DRIVER} ({why})")))?;
    let functions = DriverFunctions::of(&library).map_err(|why| {
        failed(
            "CUDA",
            format!("NVIDIA's driver is older than CUDA {}: {why}", version_text(super::raw::OLDEST)),
        )
    })?;
    Ok((library, functions))
}

/// Opens NVRTC, of a driver's major version at most.
pub(super) fn nvrtc(major: c_int) -> Result<NvrtcFunctions> {
    of_nvrtc(&NVRTC.open(&Folders::of_environment(), major)?)
}

/// The functions of an open NVRTC, which finds the part of it that it opens by itself.
pub(super) fn of_nvrtc(library: &Library) -> Result<NvrtcFunctions> {
    let functions = NvrtcFunctions::of(library)
        .map_err(|why| failed(NVRTC.what, format!("older than 11.2: {why}; {}", NVRTC.packages)))?;
    // The loader need not know the folder: what is open already is found by its name.
    let folder = library.file_of(c"nvrtcVersion").and_then(|file| Some(file.parent()?.to_owned()));
    let entries = folder.and_then(|folder| std::fs::read_dir(folder).ok());
    for entry in entries.into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with("libnvrtc-builtins.so.") {
            // Its own absence is told when something is compiled.
            let _ = Library::open(&entry.path().to_string_lossy());
        }
    }
    Ok(functions)
}

/// Opens cuBLASLt, of a driver's major version at most.
pub(super) fn blas(major: c_int) -> Result<BlasFunctions> {
    of_blas(&BLAS.open(&Folders::of_environment(), major)?)
}

/// The functions of an open cuBLASLt.
pub(super) fn of_blas(library: &Library) -> Result<BlasFunctions> {
    BlasFunctions::of(library)
        .map_err(|why| failed(BLAS.what, format!("older than CUDA 11.2: {why}; {}", BLAS.packages)))
}
