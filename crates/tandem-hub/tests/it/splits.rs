//! Splits of data sets.

use std::fs;

use tandem_hub::{Hub, HubError};

use crate::server::{COMMIT, Server};
use crate::{Log, message, name, settings};

const README: &str = "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: data/train-*\n- config_name: extra\n  data_files:\n  - split: train\n    path: extra.jsonl\n---\n";

fn server() -> Server {
    let files = [
        ("README.md", README, false),
        ("data/train-00000-of-00002.parquet", "first", true),
        ("data/train-00001-of-00002.parquet", "second", true),
        ("extra.jsonl", "{}", false),
        ("raw/test.jsonl.gz", "x", false),
    ];
    Server::start("datasets/o/d", &files)
}

/// Contents of the files of a split.
fn rows(server: &Server, cache: &tempfile::TempDir, text: &str) -> Result<Vec<String>, HubError> {
    let paths = Hub::new(settings(&server.endpoint, cache.path())).rows(&name(text), &mut Log::default())?;
    Ok(paths.iter().map(|path| fs::read_to_string(path).expect("a file")).collect())
}

#[test]
fn a_name_gives_the_files_of_a_split() {
    let (server, cache) = (server(), tempfile::tempdir().expect("a folder"));
    assert_eq!(rows(&server, &cache, "o/d/train").expect("rows"), ["first", "second"]);
    assert_eq!(rows(&server, &cache, "o/d@v1/extra/train").expect("rows"), ["{}"]);
    assert_eq!(rows(&server, &cache, "o/d/raw/test").expect("rows"), ["x"]);
    assert_eq!(rows(&server, &cache, "o/d/extra.jsonl").expect("rows"), ["{}"]);
    assert_eq!(rows(&server, &cache, "o/d/data/*-00001-*").expect("rows"), ["second"]);
    assert!(cache.path().join(format!("datasets--o--d/snapshots/{COMMIT}/README.md")).exists());
}

#[test]
fn a_missing_split_names_those_that_exist() {
    let (server, cache) = (server(), tempfile::tempdir().expect("a folder"));
    let text = message(rows(&server, &cache, "o/d/test"));
    assert!(text.contains("no split test; it has train, extra/train"), "{text}");
    let text = message(rows(&server, &cache, "o/d"));
    assert!(text.contains("gives no split") && text.contains("hf://o/d/train"), "{text}");
    let text = message(rows(&server, &cache, "o/other/train"));
    assert!(text.contains("no data set o/other"), "{text}");
}

#[test]
fn a_cache_with_some_shards_is_not_a_split() {
    let (server, cache) = (server(), tempfile::tempdir().expect("a folder"));
    let offline = || Hub::new(settings(&server.endpoint, cache.path()).offline());
    rows(&server, &cache, "o/d/data/train-00000-of-00002.parquet").expect("rows");
    rows(&server, &cache, "o/d/extra/train").expect("rows");
    let text = message(offline().rows(&name("o/d/train"), &mut Log::default()));
    assert!(text.contains("shard 1 of 2"), "{text}");
    rows(&server, &cache, "o/d/train").expect("rows");
    assert_eq!(offline().rows(&name("o/d/train"), &mut Log::default()).expect("rows").len(), 2);
}
