//! The same rows in several formats: the same token cache, the same weights.

use std::fs;
use std::path::{Path, PathBuf};

use tandem_train::events::Silent;
use tandem_train::inputs::RunInputs;
use tandem_train::run::run_dir::RunDirPolicy;

use crate::small::Small;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tandem-data/tests/data/formats").join(name)
}

/// Trains on a file; returns the token cache and the final weights.
fn train(small: &Small, run: usize, file: &str, overrides: &[&str]) -> (Vec<u8>, Vec<u8>) {
    let (name, train) = (format!("run-{run}"), format!("data.train={}", data(file).display()));
    let overrides = [&["train.steps=3", &train], overrides].concat();
    let inputs = RunInputs::open(&small.config(&name, &overrides), &mut Silent).unwrap();
    assert!(inputs.train.was_built(), "{file}");
    small.finish(&name, RunDirPolicy::Fresh, &overrides);
    (fs::read(inputs.train.path()).unwrap(), small.weights(&name))
}

#[test]
fn the_format_of_the_rows_changes_neither_the_token_cache_nor_the_weights() {
    let small = Small::new("dpo");
    let whole = ["rows.jsonl.zst", "rows.jsonl.gz", "rows.parquet", "rows.feather", "rows.csv.gz"];
    // The saved data set has two streams of 30 rows.
    let beginning = ["rows.jsonl.gz", "rows.csv.gz", "saved"];
    let mut run = 0;
    for (files, rows) in [(&whole[..], "data.train_rows=1000"), (&beginning, "data.train_rows=60")] {
        let mut expected = None;
        for file in files {
            let found = train(&small, run, file, &[rows]);
            let expected = expected.get_or_insert_with(|| found.clone());
            assert!(expected.0 == found.0, "the token cache of {file}");
            assert!(expected.1 == found.1, "the weights of {file}");
            run += 1;
        }
    }
}

#[test]
fn an_ignored_column_must_be_in_a_file() {
    let small = Small::new("dpo");
    let error = |overrides: &[&str]| {
        let file = data("chat_snappy.parquet");
        let (train, eval) = (format!("data.train={}", file.display()), "data.ignore_columns=[\"sorce\"]");
        let config = small.config("run", &[&[&*train, eval], overrides].concat());
        RunInputs::open(&config, &mut Silent).err().map(|error| error.to_string())
    };
    let text = error(&[]).expect("an error");
    for part in ["`sorce`", "`prompt`", "`source`"] {
        assert!(text.contains(part), "{text}");
    }
    // One of the files suffices.
    let eval = small.path("eval.jsonl");
    let row = r#"{"prompt": [{"role": "user", "content": "a"}], "chosen": [{"role": "assistant", "content": "b"}],
        "rejected": [{"role": "assistant", "content": "c"}], "sorce": 1}"#;
    fs::write(&eval, row.replace('\n', " ")).unwrap();
    assert_eq!(error(&[&format!("data.eval={}", eval.display())]), None);
}

#[test]
fn a_listed_column_is_missed_before_any_row_is_read() {
    let small = Small::new("dpo");
    let file = small.path("rows.csv");
    fs::write(&file, "prompt,chosen,rejected,source\nbroken\n").unwrap();
    let train = format!("data.train={}", file.display());
    let error = |column: &str| {
        let config = small.config("run", &[&*train, &format!("data.ignore_columns=[\"{column}\"]")]);
        RunInputs::open(&config, &mut Silent).err().expect("an error").to_string()
    };
    assert!(error("source").contains("expected 4 cells"), "{}", error("source"));
    assert!(error("sorce").contains("names `sorce`, and no row has that column"), "{}", error("sorce"));
}
