//! Memory while a Parquet file is read; its own binary, because memory is that of the process.
//!
//! `TANDEM_TEST_PARQUET=file` reads another file, with the columns `prompt`, `chosen`, `rejected`.

#![cfg(target_os = "linux")]

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use arrow_array::{ArrayRef, RecordBatch, StringArray};
use parquet::arrow::ArrowWriter;
use tandem_data::prepare::prepare;
use tandem_data::progress::Silent;
use tandem_data::record::RowKind;
use tandem_data::row::RowOptions;
use tandem_data::source::{Source, Sources};
use tandem_data::tokenizer::Tokenizer;

/// Most private memory that reading may add: two portions of 4 MiB as text and as JSON, and of each
/// column a page with its decompressed copy, which are 4 MiB where pyarrow wrote them. Measured: 65
/// MiB for this file, 95 to 112 MiB for files of 1 GiB and of 5 GiB that pyarrow wrote with zstd.
const LIMIT: u64 = 160 << 20;
const ROWS: usize = 120_000;

/// Writes rows of 8 KiB that do not compress into one row group.
fn write_parquet(path: &Path) {
    let mut state = 25u64;
    let mut text = |len: usize| -> String {
        let letter = |_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            char::from(b' ' + (state >> 58) as u8)
        };
        (0..len).map(letter).collect()
    };
    let mut writer = None;
    for _ in 0..ROWS / 1000 {
        let columns = [("prompt", 4096), ("chosen", 2048), ("rejected", 2048)];
        let columns = columns.map(|(name, len)| {
            let texts: Vec<String> = (0..1000).map(|_| text(len)).collect();
            (name, Arc::new(StringArray::from(texts)) as ArrayRef)
        });
        let batch = RecordBatch::try_from_iter(columns).unwrap();
        let writer = writer.get_or_insert_with(|| {
            ArrowWriter::try_new(File::create(path).unwrap(), batch.schema(), None).unwrap()
        });
        writer.write(&batch).unwrap();
    }
    writer.unwrap().close().unwrap();
}

fn private_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn a_large_parquet_file_is_read_in_bounded_memory() {
    let folder = tempfile::tempdir().unwrap();
    let path = match std::env::var_os("TANDEM_TEST_PARQUET") {
        Some(path) => PathBuf::from(path),
        None => {
            let path = folder.path().join("large.parquet");
            // The writer keeps a row group in memory; a process of its own gives it back.
            let program = std::env::current_exe().unwrap();
            let arguments = ["--ignored", "--exact", "write_the_large_file"];
            let status =
                std::process::Command::new(program).args(arguments).env("TANDEM_TEST_WRITE", &path).status();
            assert!(status.unwrap().success());
            path
        }
    };
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokenizer");
    let tokenizer = Tokenizer::from_folder(&data).unwrap();
    // Every row is read, and few are tokenised: the test is of the reader.
    let sources = Sources(vec![Source { path: path.clone(), weight: 1e-3 }]);
    let before = private_memory();
    let (peak, done) = (AtomicU64::new(0), AtomicBool::new(false));
    let cache = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                peak.fetch_max(private_memory(), Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        let options = RowOptions::new(RowKind::Preference);
        let cache = prepare(&sources, &tokenizer, &options, folder.path(), &Silent);
        done.store(true, Ordering::Relaxed);
        cache.unwrap()
    });
    let added = peak.into_inner() - before;
    let size = std::fs::metadata(&path).unwrap().len();
    println!("{} rows of a file of {} MiB: {} MiB added", cache.report().rows_read, size >> 20, added >> 20);
    assert!(size > 5 * LIMIT, "the file is larger than the limit: {size}");
    assert!(added < LIMIT, "{added} bytes");
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn write_the_large_file() {
    if let Some(path) = std::env::var_os("TANDEM_TEST_WRITE") {
        write_parquet(Path::new(&path));
    }
}
