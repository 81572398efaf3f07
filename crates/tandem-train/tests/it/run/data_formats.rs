//! The format of the rows: the same rows train the same weights.

use std::path::{Path, PathBuf};

use tandem_train::run::run_dir::RunDirPolicy;

use crate::small::Small;

/// The 1,000 rows that `tests/data/formats/make.py` of `tandem-data` wrote in several formats.
fn rows(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tandem-data/tests/data/formats").join(name)
}

#[test]
fn the_same_rows_in_every_format_train_the_same_weights() {
    let small = Small::new("dpo");
    let train = |run: &str, file: &Path| {
        let data = format!("data.train={}", file.display());
        // Each run tokenises for itself.
        let cache = format!("data.cache={}", small.path(&format!("cache-{run}")).display());
        small.finish(run, RunDirPolicy::Fresh, &["train.steps=6", "train.batch_size=16", &data, &cache]).steps
    };
    let expected = train("zst", &rows("rows.jsonl.zst"));
    let lines = zstd::stream::read::Decoder::new(std::fs::File::open(rows("rows.jsonl.zst")).unwrap());
    let plain = small.path("rows.jsonl");
    std::io::copy(&mut lines.unwrap(), &mut std::fs::File::create(&plain).unwrap()).unwrap();
    for (run, file) in [
        ("jsonl", plain),
        ("gz", rows("rows.jsonl.gz")),
        ("parquet", rows("rows.parquet")),
        ("arrow", rows("rows.feather")),
        ("csv", rows("rows.csv.gz")),
    ] {
        assert_eq!(train(run, &file), expected, "{run}");
        assert!(small.weights(run) == small.weights("zst"), "{run}");
    }
    small.finish("other", RunDirPolicy::Fresh, &["train.steps=6", "train.batch_size=16"]);
    assert!(small.weights("other") != small.weights("zst"), "other rows train other weights");
}
