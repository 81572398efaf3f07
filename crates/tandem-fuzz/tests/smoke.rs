//! Every target over its seeds and mutations of them. Its own binary, because its allocator counts
//! the memory of the process.
//!
//! `TANDEM_TEST_ROUNDS` and `TANDEM_TEST_SEED` draw more, or other, mutations. An input that fails is
//! kept in a file that the message names.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, Once, PoisonError};

use tandem_fuzz::mutate::Mutator;
use tandem_fuzz::target;

/// Most bytes that an input may add to the process. A chat template alone may copy 256 MiB.
const CEILING: usize = 512 << 20;

/// Bytes of the process, the most since an input began, and the most that it may have.
static BYTES: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
static LIMIT: AtomicUsize = AtomicUsize::new(usize::MAX);
/// Panics of all threads.
static PANICS: AtomicUsize = AtomicUsize::new(0);

struct Counting;

/// Counts bytes. Returns false where an input has gone beyond its limit, which the caller refuses.
fn take(bytes: usize) -> bool {
    let now = BYTES.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
    if now > LIMIT.load(Ordering::Relaxed) {
        BYTES.fetch_sub(bytes, Ordering::Relaxed);
        // Nothing here may allocate. The process ends after this unless the reader handles the refusal.
        let _ = std::io::stderr().write_all(b"an input asks for more memory than the ceiling\n");
        return false;
    }
    PEAK.fetch_max(now, Ordering::Relaxed);
    true
}

// SAFETY: every call is passed on to the system's allocator, or refused with a null pointer.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !take(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !take(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: as the caller promises.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, len: usize) -> *mut u8 {
        if len > layout.size() && !take(len - layout.size()) {
            return std::ptr::null_mut();
        }
        if len < layout.size() {
            BYTES.fetch_sub(layout.size() - len, Ordering::Relaxed);
        }
        // SAFETY: as the caller promises.
        unsafe { System.realloc(at, layout, len) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Number in an environment variable.
fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is {text}")))
}

fn seeds(name: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(name);
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    assert!(!paths.is_empty(), "{} is empty", folder.display());
    paths.into_iter().map(|path| (path.clone(), std::fs::read(&path).unwrap())).collect()
}

/// Runs a target over its seeds and as many mutations as it asks for.
fn smoke(name: &str) {
    // Memory and panics are those of the process.
    static ALONE: Mutex<()> = Mutex::new(());
    static HOOK: Once = Once::new();
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    HOOK.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            PANICS.fetch_add(1, Ordering::SeqCst);
            usual(info);
        }));
    });
    let target = target(name);
    let seeds = seeds(name);
    let rounds = variable("TANDEM_TEST_ROUNDS").map_or(target.rounds, |rounds| rounds as usize);
    let seed = variable("TANDEM_TEST_SEED").unwrap_or(0);
    let mut mutator = Mutator::new(seed);
    let inputs: Vec<Vec<u8>> = seeds.iter().map(|(_, bytes)| bytes.clone()).collect();
    for (path, bytes) in &seeds {
        run(target.run, name, bytes, &path.display().to_string());
    }
    for round in 0..rounds {
        let bytes = mutator.mutate(&inputs);
        run(target.run, name, &bytes, &format!("mutation {round} of TANDEM_TEST_SEED={seed}"));
    }
    println!("{name}: {} seeds, {rounds} mutations", seeds.len());
}

fn run(target: fn(&[u8]), name: &str, bytes: &[u8], what: &str) {
    // An abort leaves the file behind.
    let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("fuzz-{name}"));
    std::fs::write(&kept, bytes).unwrap();
    let before = BYTES.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    LIMIT.store(before + CEILING, Ordering::Relaxed);
    let panics = PANICS.load(Ordering::SeqCst);
    let ended = catch_unwind(AssertUnwindSafe(|| target(bytes)));
    LIMIT.store(usize::MAX, Ordering::Relaxed);
    let panics = PANICS.load(Ordering::SeqCst) - panics;
    let added = PEAK.load(Ordering::Relaxed) - before;
    assert!(ended.is_ok() && panics == 0, "{name}: {what} panics; the input is {}", kept.display());
    assert!(added < CEILING, "{name}: {what} takes {added} bytes; the input is {}", kept.display());
    std::fs::remove_file(&kept).unwrap();
}

macro_rules! targets {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            smoke(stringify!($name));
        })*

        #[test]
        fn every_target_is_run_here_and_by_cargo_fuzz() {
            let mut here = vec![$(stringify!($name)),*];
            let mut listed: Vec<&str> = tandem_fuzz::TARGETS.iter().map(|target| target.name).collect();
            here.sort_unstable();
            listed.sort_unstable();
            assert_eq!(here, listed);
            let manifest = include_str!("../../../fuzz/Cargo.toml");
            for name in listed {
                assert!(manifest.contains(&format!("name = \"{name}\"")), "fuzz/Cargo.toml lacks {name}");
            }
        }
    };
}

targets! {
    safetensors
    policy_pt
    gguf
    model_config
    run_toml
    peft_config
    peft_weights
    rows_text
    rows_columns
    tokenizer
    chat_template
    request
    store_server
    store_client
}
