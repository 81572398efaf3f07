//! Messages without a GPU, or with an unusable one.

use std::path::PathBuf;

use tandem_dlopen::Folders;

use super::Folder;
use crate::cuda::nvidia::fake::{ANSWERS, Answers, Fake, Kind, OK, compiler};
use crate::cuda::nvidia::libraries::{BLAS, NVRTC, Wanted};
use crate::cuda::nvidia::{cache::Cache, device};

fn refusal(fake: &Fake) -> String {
    fake.open_with(Cache::none()).err().unwrap().to_string()
}

fn answering(answers: Answers) -> String {
    let before = ANSWERS.replace(answers);
    let error = Fake::cuda().err().map(|error| error.to_string());
    ANSWERS.set(before);
    error.unwrap_or_default()
}

#[test]
fn a_driver_that_cannot_be_used_is_told_why() {
    let usual = ANSWERS.get();
    let error = answering(Answers { version: 11_010, ..usual });
    assert_eq!(
        error,
        "CUDA: NVIDIA's driver is made for CUDA 11.1, and 11.2 is the oldest that is used: install a later driver"
    );
    let error = answering(Answers { init: 100, ..usual });
    assert!(error.contains("finds no GPU") && error.contains("CUDA_VISIBLE_DEVICES"), "{error}");
    let error = answering(Answers { init: 34, ..usual });
    assert!(error.contains("stub") && error.contains("LD_LIBRARY_PATH"), "{error}");
    let error = answering(Answers { init: 2, ..usual });
    assert_eq!(error, "initialising CUDA: CUDA_ERROR_OUT_OF_MEMORY (2), the stand-in's words");
    assert_eq!(answering(Answers { version: 13_000, init: OK, ..usual }), "");
}

#[test]
fn a_gpu_that_is_not_there_or_too_old_is_refused() {
    let old = Fake::new(Kind { capability: (7, 5), ..Kind::default() });
    assert_eq!(
        refusal(&old),
        format!(
            "GPU {}: Stand-in has compute capability 7.5; products of bf16 need 8.0 (Ampere) or later",
            old.ordinal
        )
    );
    // With others, a list has it; alone, or among its like, it is the reason why there is none.
    let old_and_new = [old, Fake::new(Kind::default())];
    let list = |count: usize| {
        let before = ANSWERS.replace(Answers { count: count as i32, ..ANSWERS.get() });
        let list = device::list_of(&Fake::cuda().unwrap());
        ANSWERS.set(before);
        list
    };
    assert_eq!(list(old_and_new[1].ordinal + 1).unwrap().len(), old_and_new[1].ordinal + 1);
    assert!(list(0).unwrap_err().to_string().contains("finds no GPU"));
    let missing = Fake { ordinal: 3 };
    for (count, sentence) in [
        (0, "CUDA: NVIDIA's driver finds no GPU"),
        (1, "GPU 3: there is one GPU, GPU 0"),
        (3, "GPU 3: there are 3 GPUs, GPU 0 to GPU 2"),
    ] {
        let before = ANSWERS.replace(Answers { count, ..ANSWERS.get() });
        let error = refusal(&missing);
        ANSWERS.set(before);
        assert!(error.starts_with(sentence), "{error}");
    }
}

#[test]
fn gpus_are_listed_and_opened_with_what_they_are() {
    let fake = Fake::new(Kind { capability: (9, 0), memory: 80 << 30, ..Kind::default() });
    // The one of this test is the last.
    let before = ANSWERS.replace(Answers { count: fake.ordinal as i32 + 1, ..ANSWERS.get() });
    let all = device::list_of(&Fake::cuda().unwrap());
    ANSWERS.set(before);
    // Other tests' GPUs are there as long as those run; this one is.
    let all = all.unwrap();
    let own = all.last().unwrap();
    assert_eq!((own.ordinal, own.capability, own.total_memory), (fake.ordinal, (9, 0), 80 << 30));
    assert_eq!((own.name.as_str(), own.multiprocessors, own.shared_memory), ("Stand-in", 108, 99 << 10));
    let driver = fake.open();
    assert_eq!(driver.properties(), own);
    assert_eq!(driver.versions(), "driver 12.8 nvrtc 12.9 cublaslt 12.9.4");
}

#[test]
fn code_is_made_for_the_gpu_or_the_nearest_before_it() {
    let compiler = compiler();
    for (capability, target) in [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        // What NVRTC does not know it makes as for an earlier one of the generation.
        ((8, 7), "sm_86"),
        ((9, 0), "sm_90a"),
        ((10, 0), "compute_90"),
        ((12, 0), "compute_90"),
    ] {
        assert_eq!(compiler.target(capability).unwrap(), target);
    }
    let error = compiler.target((7, 0)).unwrap_err().to_string();
    assert_eq!(error, "NVRTC: version 12.9 has no target for sm_70");
}

#[test]
fn a_missing_library_is_named_with_who_has_it() {
    let nowhere = || Folders { first: vec![PathBuf::from("/nowhere")], last: vec![] };
    // Of a version that nobody has.
    let missing = |wanted: Wanted, major| match wanted.open(&nowhere(), major) {
        Ok(library) => library.name().to_owned(),
        Err(error) => error.to_string(),
    };
    let error = missing(NVRTC, 0);
    if error != "libnvrtc.so" {
        for text in [
            "NVRTC, the compiler of kernels: there is no libnvrtc.so",
            "cuda-nvrtc-12-9",
            "nvidia-cuda-nvrtc-cu12",
            "TANDEM_CUDA_LIBRARIES=/folder",
        ] {
            assert!(error.contains(text), "no {text:?} in: {error}");
        }
    }
    let error = missing(BLAS, 0);
    for text in ["cuBLASLt, which multiplies matrices: there is no ", "libcublas-12-9", "nvidia-cublas-cu12"]
    {
        assert!(error.contains(text), "no {text:?} in: {error}");
    }
}

#[test]
fn folders_that_are_named_come_first_and_versions_beyond_the_driver_never() {
    let folder = Folder::new("libraries");
    // A library of any kind will do.
    let library = tandem_dlopen::Library::open("libm.so.6").unwrap().file_of(c"cos").unwrap();
    for name in ["libcublasLt.so.12", "libcublasLt.so.11", "libcublasLt.so.13"] {
        std::fs::copy(&library, folder.0.join(name)).unwrap();
    }
    let folders = Folders { first: vec!["/nowhere".into(), folder.0.clone()], last: vec![] };
    for (major, name) in [
        (11, "libcublasLt.so.11"),
        (12, "libcublasLt.so.12"),
        (13, "libcublasLt.so.13"),
        (14, "libcublasLt.so.13"),
    ] {
        let found = BLAS.open(&folders, major).unwrap();
        assert_eq!(found.name(), folder.0.join(name).to_string_lossy());
    }
    // What cannot be opened is passed, and told if nothing else is there.
    let damaged = Folder::new("damaged");
    std::fs::write(damaged.0.join("libcublasLt.so.13"), "no library").unwrap();
    let both = Folders { first: vec![damaged.0.clone(), folder.0.clone()], last: vec![] };
    assert!(BLAS.open(&both, 13).unwrap().name().starts_with(&*folder.0.to_string_lossy()));
    if let Err(error) = BLAS.open(&Folders { first: vec![damaged.0.clone()], last: vec![] }, 13) {
        assert!(error.to_string().contains(&*damaged.0.to_string_lossy()), "{error}");
    }
}
