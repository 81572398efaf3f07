//! Finding NVIDIA's libraries, and reporting missing ones.
//!
//! The driver comes with the kernel module and is in the loader's path. NVRTC and cuBLASLt come
//! with a toolkit or from PyPI, may be anywhere, and in several versions. The latest that the
//! driver can run is opened: of its major version or an earlier one.

use std::ffi::c_int;

use tandem_dlopen::{FOLDERS, Folders, Library};

use super::blas::raw::BlasFunctions;
use super::compiler::NvrtcFunctions;
use super::context::{Cuda, version_text};
use super::raw::{DriverFunctions, GraphFunctions, LoadFunctions};
use crate::Result;
use crate::cuda::failed;

const DRIVER: &str = "libcuda.so.1";
/// Origin of the driver's libraries.
pub(super) const OF_DRIVER: &str = "comes with NVIDIA's driver for its GPUs: Debian has it in libcuda1 and libnvidia-ml1, Ubuntu in \
                                    libnvidia-compute of the driver's number; a container is given its host's";

/// A library of the toolkit.
pub(super) struct Wanted {
    what: &'static str,
    /// File names, latest first, with the major CUDA version of each; 0 if unknown.
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
    /// Opens the latest library up to the driver's `major` version.
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
    let (library, functions) = open_driver()?;
    Cuda::start(functions, LoadFunctions::load(&library).ok(), GraphFunctions::load(&library).ok())
}

/// Opens NVIDIA's driver without initialising it.
pub(super) fn open_driver() -> Result<(Library, DriverFunctions)> {
    let library = Library::open(DRIVER)
        .map_err(|why| failed("CUDA", format!("there is no {DRIVER}, which {OF_DRIVER} ({why})")))?;
    let functions = DriverFunctions::load(&library).map_err(|why| {
        failed(
            "CUDA",
            format!("NVIDIA's driver is older than CUDA {}: {why}", version_text(super::raw::OLDEST)),
        )
    })?;
    Ok((library, functions))
}

/// Opens NVRTC, up to the driver's major version.
pub(super) fn nvrtc(major: c_int) -> Result<NvrtcFunctions> {
    load_nvrtc(&NVRTC.open(&Folders::from_environment(), major)?)
}

/// Looks up the functions of NVRTC, and opens its built-ins.
pub(super) fn load_nvrtc(library: &Library) -> Result<NvrtcFunctions> {
    let functions = NvrtcFunctions::load(library)
        .map_err(|why| failed(NVRTC.what, format!("older than 11.2: {why}; {}", NVRTC.packages)))?;
    // The directory may be unknown to the loader; an open library is found by name.
    let folder = library.file_of(c"nvrtcVersion").and_then(|file| Some(file.parent()?.to_owned()));
    let entries = folder.and_then(|folder| std::fs::read_dir(folder).ok());
    for entry in entries.into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with("libnvrtc-builtins.so.") {
            // A missing file is reported at compilation.
            let _ = Library::open(&entry.path().to_string_lossy());
        }
    }
    Ok(functions)
}

/// Opens cuBLASLt, up to the driver's major version.
pub(super) fn blas(major: c_int) -> Result<BlasFunctions> {
    load_blas(&BLAS.open(&Folders::from_environment(), major)?)
}

/// Looks up the functions of cuBLASLt.
pub(super) fn load_blas(library: &Library) -> Result<BlasFunctions> {
    BlasFunctions::load(library)
        .map_err(|why| failed(BLAS.what, format!("older than CUDA 11.2: {why}; {}", BLAS.packages)))
}
