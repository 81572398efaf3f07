//! NVIDIA's own libraries, as far as they go without a GPU.

use std::ffi::c_int;
use std::io::Write;
use std::path::Path;

use tandem_dlopen::Library;

use super::super::blas::raw::{BlasFunctions, PREF_REDUCTION_SCHEME_MASK, REDUCTION_COMPUTE_TYPE, status};
use crate::cuda::SOURCES;
use crate::cuda::driver::Source;
use crate::cuda::nvidia::{Compiled, Compiler, Usage};

/// The library that the environment names for tests, or a word that there is none.
pub(super) fn named(variable: &str, test: &str) -> Option<String> {
    let path = std::env::var(variable).ok();
    if path.is_none() {
        // Past the capture of what tests print: in a log, a skipped test must not look like one
        // that passed.
        let _ = writeln!(std::io::stderr(), "SKIPPED: {test}: {variable} names none");
    }
    path
}

/// `TANDEM_TEST_NVRTC=/path/to/libnvrtc.so.13`; the one of PyPI needs no GPU.
#[test]
fn a_real_nvrtc_compiles_kernels() {
    let Some(path) = named("TANDEM_TEST_NVRTC", "a_real_nvrtc_compiles_kernels") else { return };
    let compiler = Compiler::open(Some(Path::new(&path))).unwrap();
    assert!(((11, 2)..(14, 0)).contains(&compiler.version()), "{:?}", compiler.version());
    let source = SOURCES.iter().find(|source| !source.text.is_empty()).unwrap();
    for capability in [(8, 0), (8, 6)] {
        let target = compiler.target(capability).unwrap();
        assert_eq!(target, format!("sm_{}{}", capability.0, capability.1));
        let Compiled { image, log } = compiler.compile(source, &target, &["--ptxas-options=-v"]).unwrap();
        assert_eq!(&image[..4], b"\x7fELF");
        let used = Usage::from_log(&log);
        assert!(!used.is_empty() && used.iter().all(|kernel| kernel.registers > 0), "{log}");
    }
    let text = compiler.compile(source, "compute_80", &[]).unwrap().image;
    assert!(String::from_utf8(text).unwrap().contains(".target sm_80"));
    let broken = Source { name: "broken.cu", text: "KERNEL(one) { none(); }", fused: true, only: None };
    let error = compiler.compile(&broken, "sm_80", &[]).err().unwrap().to_string();
    assert!(error.starts_with("broken.cu for sm_80: NVRTC ") && error.contains("none"), "{error}");
}

/// Returns whether a compiler may join products and sums shows in the code.
#[test]
fn a_real_nvrtc_rounds_as_it_is_told() {
    let Some(path) = named("TANDEM_TEST_NVRTC", "a_real_nvrtc_rounds_as_it_is_told") else { return };
    let compiler = Compiler::open(Some(Path::new(&path))).unwrap();
    let text = "extern \"C\" __global__ void one(float *x) { x[0] = x[1] * x[2] + x[3]; }";
    let code = |fused| {
        let image = compiler
            .compile(&Source { name: "one.cu", text, fused, only: None }, "compute_80", &[])
            .unwrap()
            .image;
        String::from_utf8(image).unwrap().contains("fma.rn.f32")
    };
    assert_eq!([true, false].map(code), [true, false]);
}

/// `TANDEM_TEST_CUBLASLT=/path/to/libcublasLt.so.13`; the one of PyPI describes products without a
/// GPU.
#[test]
fn a_real_cublaslt_takes_our_descriptions() {
    let test = "a_real_cublaslt_takes_our_descriptions";
    let Some(path) = named("TANDEM_TEST_CUBLASLT", test) else { return };
    let blas = BlasFunctions::load(&Library::open(&path).unwrap()).unwrap();
    // SAFETY: descriptions are made, told attributes of the sizes that we use, and given back.
    unsafe {
        assert!((110_000..140_000).contains(&(blas.version)()));
        let (mut desc, mut layout, mut preference) = (0, 0, 0);
        assert_eq!((blas.create_desc)(&raw mut desc, 68, 0), 0);
        assert_eq!((blas.create_layout)(&raw mut layout, 14, 3, 5, 8), 0);
        assert_eq!((blas.create_preference)(&raw mut preference), 0);
        for attribute in [3, 4] {
            let value: c_int = 1;
            let set = |size| (blas.set_desc)(desc, attribute, (&raw const value).cast(), size);
            assert_eq!((set(4), status(set(3))), (0, status(7)));
        }
        let (mask, room) = (REDUCTION_COMPUTE_TYPE, 32u64 << 20);
        for (attribute, value, size) in
            [(1, (&raw const room).cast(), 8), (PREF_REDUCTION_SCHEME_MASK, (&raw const mask).cast(), 4)]
                .into_iter()
                .chain([5, 6, 7, 8].map(|attribute| (attribute, (&raw const mask).cast(), 4)))
        {
            assert_eq!((blas.set_preference)(preference, attribute, value, size), 0, "{attribute}");
            assert_ne!((blas.set_preference)(preference, attribute, value, size - 1), 0, "{attribute}");
        }
        assert_eq!((blas.destroy_preference)(preference), 0);
        assert_eq!((blas.destroy_layout)(layout), 0);
        assert_eq!((blas.destroy_desc)(desc), 0);
    }
}
