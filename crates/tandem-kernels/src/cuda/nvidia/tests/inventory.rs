//! Inventory of present and missing libraries.

use std::path::{Path, PathBuf};

use tandem_dlopen::{Folders, Found, Library};

use super::Folder;
use super::real::named;
use crate::cuda::nvidia::Inventory;
use crate::cuda::nvidia::fake::nvml;

#[test]
fn what_is_no_such_library_is_named_with_who_has_one() {
    let folder = Folder::new("inventory");
    let other = Library::open("libm.so.6").unwrap().file_of(c"cos").unwrap();
    for name in ["libnvrtc.so.11.2", "libcublasLt.so.11"] {
        std::fs::copy(&other, folder.0.join(name)).unwrap();
    }
    let names = Inventory::from_folders(&Folders { first: vec![folder.0.clone()], last: vec![] });
    for (found, function, package) in [
        (names.nvrtc, "has no nvrtcVersion", "nvidia-cuda-nvrtc-cu12"),
        (names.cublaslt, "has no cublasLtGetVersion", "nvidia-cublas-cu12"),
    ] {
        let error = found.unwrap_err().to_string();
        assert!(error.contains(&*folder.0.to_string_lossy()), "{error}");
        assert!(error.contains(function) && error.contains(package), "{error}");
    }
}

#[test]
fn the_drivers_own_version_is_nvmls() {
    let library = Library::open("libm.so.6").unwrap();
    let found = nvml().unwrap().found(&library).unwrap();
    // The stand-in's functions are in no file.
    assert_eq!(found, Found { version: "570.86.15".to_owned(), file: PathBuf::from("libm.so.6") });
}

/// An inventory that finds the library which the environment names for tests.
fn beside(path: &str) -> Inventory {
    let folder = Path::new(path).parent().unwrap().to_owned();
    Inventory::from_folders(&Folders { first: vec![folder], last: vec![] })
}

#[test]
fn a_real_nvrtc_is_found_with_its_builtins() {
    let test = "a_real_nvrtc_is_found_with_its_builtins";
    let Some(path) = named("TANDEM_TEST_NVRTC", test) else { return };
    let found = beside(&path).nvrtc.unwrap();
    let (major, minor) = found.version.split_once('.').unwrap();
    assert!((11..14).contains(&major.parse::<u32>().unwrap()) && minor.parse::<u32>().is_ok(), "{found:?}");
    assert_eq!(found.file.parent(), Path::new(&path).parent());
}

#[test]
fn a_real_cublaslt_is_found() {
    let Some(path) = named("TANDEM_TEST_CUBLASLT", "a_real_cublaslt_is_found") else { return };
    let found = beside(&path).cublaslt.unwrap();
    assert_eq!(found.version.split('.').count(), 3, "{found:?}");
    assert_eq!(found.file.parent(), Path::new(&path).parent());
}
