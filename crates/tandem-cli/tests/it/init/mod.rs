//! `tandem init`: the first run.toml, from answers or from another program's settings.

mod fresh;
mod refused;
mod translated;

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;

use crate::workshop::Workshop;

fn files() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/init/files")
}

/// A workshop with the files and the rows that they name.
fn shop() -> Workshop {
    let shop = Workshop::new();
    for folder in ["", "data"] {
        fs::create_dir_all(shop.path(folder)).unwrap();
        for file in fs::read_dir(files().join(folder)).unwrap().map(|file| file.unwrap()) {
            if file.file_type().unwrap().is_file() {
                fs::copy(file.path(), shop.path(folder).join(file.file_name())).unwrap();
            }
        }
    }
    let text = |word: &str, i: usize| format!("{} and then stop", format!("{word} ").repeat(1 + i % 5));
    shop.write_rows(
        "demonstrations.jsonl",
        24,
        |i| json!({ "prompt": format!("Count to {i}:"), "completion": text(" one", i) }),
    );
    shop.write_rows("pairs.jsonl", 24, |i| {
        json!({
            "conversation": [{ "role": "user", "content": format!("Count to {i}") }],
            "better": [{ "role": "assistant", "content": text("one", i) }],
            "worse": [{ "role": "assistant", "content": text("two", i) }],
        })
    });
    shop.write_rows(
        "instructions.jsonl",
        24,
        |i| json!({ "instruction": format!("Count to {i}"), "input": "", "output": text("one", i) }),
    );
    shop.write_rows("data/pairs_small.jsonl", 24, |i| {
        json!({
            "conversations": [{ "from": "human", "value": format!("Count to {i}") }],
            "good": { "from": "gpt", "value": text("one", i) },
            "bad": { "from": "gpt", "value": text("two", i) },
        })
    });
    shop.write_rows(
        "data/chores.jsonl",
        24,
        |i| json!({ "task": format!("Count to {i}"), "answer": text("one", i) }),
    );
    shop
}
