//! Compiling, keeping, loading and launching kernels.

use super::Folder;
use crate::cuda::driver::{Arg, Drivers, Grid, Source};
use crate::cuda::nvidia::cache::Cache;
use crate::cuda::nvidia::fake::{Fake, Kind, num_compiled};

static SOURCE: Source =
    Source {
        name: "norm.cu", text: "KERNEL(first, …) { }\nKERNEL(second, …) { }", fused: true, only: None
    };
static BROKEN: Source = Source { name: "head.cu", text: "#error", fused: true, only: None };

/// Opens a new GPU with the cache in that folder; gives the driver and what was compiled by `act`.
fn compiled(folder: &Folder, act: impl FnOnce(&Drivers)) -> usize {
    let driver = Fake::new(Kind::default()).open_with(Cache::at(&folder.0)).unwrap();
    let before = num_compiled();
    act(&driver);
    num_compiled() - before
}

fn both(driver: &Drivers) {
    for name in ["first", "second", "first"] {
        driver.function(&SOURCE, name).unwrap();
    }
}

#[test]
fn a_file_is_compiled_once_and_then_found_on_disk() {
    let folder = Folder::new("compiled");
    assert_eq!(compiled(&folder, both), 1, "once for all its kernels");
    assert_eq!(compiled(&folder, both), 0, "the next process has it");
    let file = std::fs::read_dir(&folder.0).unwrap().next().unwrap().unwrap().path();
    assert!(file.file_name().unwrap().to_string_lossy().starts_with("norm-"), "{}", file.display());
    // Damaged, or gone.
    std::fs::write(&file, "tandemk1 and nonsense").unwrap();
    assert_eq!(compiled(&folder, both), 1);
    assert_eq!(compiled(&folder, both), 0, "and mended");
    std::fs::remove_file(&file).unwrap();
    assert_eq!(compiled(&folder, both), 1);
}

#[test]
fn all_kernels_of_a_file_are_loaded_ahead() {
    let (fake, driver, _) = Fake::opened();
    fake.calls();
    driver.load_all(&SOURCE).unwrap();
    assert_eq!(fake.calls(), ["load", "load first", "load second"]);
    both(&driver);
    assert_eq!(fake.calls(), [""; 0], "nothing is loaded later");
}

#[test]
fn code_that_the_driver_refuses_is_compiled_anew() {
    let folder = Folder::new("refused");
    let cache = Cache::at(&folder.0);
    let key = crate::cuda::nvidia::cache::Key::new(&SOURCE, "sm_80", (12, 9));
    cache.put(&SOURCE, key, b"whole, but made for another machine");
    assert_eq!(compiled(&folder, both), 1);
    assert_eq!(compiled(&folder, both), 0);
}

#[test]
fn without_a_place_to_keep_them_kernels_are_compiled_each_time() {
    let folder = Folder::new("no-place");
    std::fs::write(folder.0.join("file"), "").unwrap();
    let inside = Folder(folder.0.join("file/cannot"));
    assert_eq!([compiled(&inside, both), compiled(&inside, both)], [1, 1]);
}

#[test]
fn mistakes_are_told_in_the_compilers_words() {
    let folder = Folder::new("mistakes");
    compiled(&folder, |driver| {
        let error = driver.function(&BROKEN, "first").unwrap_err().to_string();
        assert_eq!(
            error,
            "head.cu for sm_80: NVRTC 12.9: NVRTC_ERROR_COMPILATION\nnorm.cu(1): error: #error directive"
        );
        let error = driver.function(&SOURCE, "third").unwrap_err().to_string();
        assert_eq!(error, "norm.cu: there is no kernel third in this file");
    });
    assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 1, "what does not compile is not kept");
}

#[test]
fn arguments_and_shared_memory_reach_the_kernel() {
    let (fake, driver, stream) = Fake::opened();
    let region = driver.reserve(1 << 20).unwrap();
    region.grow(1 << 20).unwrap();
    let function = driver.function(&SOURCE, "first").unwrap();
    fake.calls();
    let launch = |shared: usize| {
        let grid = Grid::with_dims([7, 5, 3], 256).with_shared(shared);
        let args = [Arg::address(region.base()), Arg::from(-2i32), Arg::from(1.5f64)];
        // SAFETY: the stand-in's kernels take these.
        unsafe { driver.launch(stream, function, grid, &args) }
    };
    launch(0).unwrap();
    // SAFETY: the region is mapped.
    let written = unsafe { *std::ptr::with_exposed_provenance::<[u64; 2]>(region.base() as usize) };
    assert_eq!(written, [u64::from((-2i32).cast_unsigned()), 1.5f64.to_bits()]);
    // All that a block can have beside what the kernel has by itself.
    launch(98 << 10).unwrap();
    let error = launch(99 << 10).unwrap_err().to_string();
    assert!(error.starts_with("launching a kernel: CUDA_ERROR_INVALID_VALUE (1)"), "{error}");
    assert_eq!(
        fake.calls(),
        ["launch first [7, 5, 3] of 256, 0 shared", "launch first [7, 5, 3] of 256, 100352 shared"]
    );
}

#[test]
fn a_gpu_later_than_the_compiler_gets_what_its_driver_compiles() {
    let fake = Fake::new(Kind { capability: (10, 0), ..Kind::default() });
    assert!(fake.open().function(&SOURCE, "second").is_ok());
    assert_eq!(fake.held(), [0; 8], "modules are given back");
}
