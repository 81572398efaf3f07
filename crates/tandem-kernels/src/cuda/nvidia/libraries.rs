//! Finding NVIDIA's libraries, and saying what is missing.
//!
//! The driver comes with the kernel's module and lies where the loader looks. NVRTC and cuBLASLt come with a toolkit, or from PyPI,
//! and may lie anywhere; there may be several versions. One is taken that the driver can run: of its major version or an earlier one.

use std::ffi::c_int;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tandem_dynamic::Library;

use super::blas::raw::BlasFunctions;
use super::compiler::NvrtcFunctions;
use super::context::{Cuda, version_text};
use super::raw::DriverFunctions;
use crate::Result;
use crate::cuda::failed;

/// Names folders that are looked into first, with colons in between.
const FOLDERS: &str = "TANDEM_CUDA_LIBRARIES";
const DRIVER: &str = "libcuda.so.1";

/// A library of the toolkit.
pub(super) struct Wanted {
    what: &'static str,
    /// File names, latest first, each with the major version of the CUDA that it belongs to; 0 is not known.
    names: &'static [(&'static str, c_int)],
    packages: &'static str,
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

/// Where libraries are looked for: in the first folders, where the loader looks, in the last ones.
pub(super) struct Search {
    pub(super) first: Vec<PathBuf>,
    pub(super) last: Vec<PathBuf>,
}

impl Search {
    /// What the environment names, and where toolkits and Python's packages are put.
    pub(super) fn of_environment() -> Self {
        let folders = |name| std::env::var_os(name).map(|list| std::env::split_paths(&list).collect());
        let given = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let first: Vec<PathBuf> = folders(FOLDERS).unwrap_or_default();
        let first = first.into_iter().filter(|folder| !folder.as_os_str().is_empty()).collect();
        let toolkits = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(given);
        let mut last: Vec<PathBuf> =
            toolkits.chain(["/usr/local/cuda".into()]).map(|home| home.join("lib64")).collect();
        let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(given);
        let home = given("HOME").map(|home| home.join(".local"));
        let prefixes = environments.chain(home).chain(["/usr/local".into(), "/usr".into()]);
        for prefix in prefixes {
            last.extend(of_python(&prefix.join("lib")));
            last.push(prefix.join("lib"));
        }
        Self { first, last }
    }

    /// Opens the latest of a library that is not later than the driver's `major` version.
    pub(super) fn open(&self, wanted: &Wanted, major: c_int) -> Result<Library> {
        let names = wanted.names.iter().filter(|(_, of)| *of <= major).map(|(name, _)| *name);
        let names: Vec<&str> = names.collect();
        let mut reasons = Vec::new();
        let mut there = |folders: &[PathBuf]| {
            let paths = folders.iter().flat_map(|folder| names.iter().map(|name| folder.join(name)));
            paths.filter(|path| path.exists()).find_map(|path| {
                let path = path.to_string_lossy().into_owned();
                Library::open(&path).map_err(|why| reasons.push(why)).ok()
            })
        };
        if let Some(library) = there(&self.first) {
            return Ok(library);
        }
        let mut unknown = Vec::new();
        let known = names.iter().find_map(|name| Library::open(name).map_err(|why| unknown.push(why)).ok());
        if let Some(library) = known.or_else(|| there(&self.last)) {
            return Ok(library);
        }
        let reasons: Vec<String> = reasons.into_iter().chain(unknown.into_iter().take(1)).collect();
        Err(failed(
            wanted.what,
            format!(
                "there is no {} ({}); {}; {FOLDERS}=/folder:/folder says where it is if the loader does not know",
                names.join(" or "),
                reasons.join("; "),
                wanted.packages
            ),
        ))
    }
}

/// Where packages of PyPI have NVIDIA's libraries, of each Python below a `lib` folder.
fn of_python(lib: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(lib) else { return Vec::new() };
    let is_python = |name: &std::ffi::OsStr| name.to_string_lossy().starts_with("python3");
    let mut pythons: Vec<PathBuf> = entries
        .filter_map(|entry| entry.ok().filter(|entry| is_python(&entry.file_name())))
        .map(|entry| entry.path())
        .collect();
    pythons.sort();
    let packages =
        pythons.iter().flat_map(|python| ["site-packages", "dist-packages"].map(|p| python.join(p)));
    let folders = ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib", "nvidia/cublas/lib"];
    packages.flat_map(|package| folders.map(|folder| package.join(folder))).collect()
}

/// Opens NVIDIA's driver.
pub(super) fn driver() -> Result<Cuda> {
    let library = Library::open(DRIVER).map_err(|why| {
        failed("CUDA", format!("there is no {DRIVER}, which comes with NVIDIA's driver for its GPUs ({why})"))
    })?;
    let functions = DriverFunctions::of(&library).map_err(|why| {
        failed(
            "CUDA",
            format!("NVIDIA's driver is older than CUDA {}: {why}", version_text(super::raw::OLDEST)),
        )
    })?;
    Cuda::start(Arc::new(functions))
}

/// Opens NVRTC, of a driver's major version at most.
pub(super) fn nvrtc(major: c_int) -> Result<NvrtcFunctions> {
    of_nvrtc(&Search::of_environment().open(&NVRTC, major)?)
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
    let library = Search::of_environment().open(&BLAS, major)?;
    BlasFunctions::of(&library)
        .map_err(|why| failed(BLAS.what, format!("older than CUDA 11.2: {why}; {}", BLAS.packages)))
}
