//! Files that are none: pipes, devices, folders, loops of links, and files without an end.

use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::Path;

use super::GENERATE;
use crate::workshop::Workshop;

/// Puts something in the place of a file, and what the message says of it.
type Trap = (&'static str, fn(&Path), &'static str);

const TRAPS: [Trap; 7] = [
    ("pipe", |path| fifo(path), "a named pipe, expected a regular file"),
    ("zeroes", |path| symlink("/dev/zero", path).unwrap(), "a device, expected a regular file"),
    ("noise", |path| symlink("/dev/urandom", path).unwrap(), "a device, expected a regular file"),
    ("terminal", |path| symlink("/dev/tty", path).unwrap(), ""),
    ("folder", |path| fs::create_dir(path).unwrap(), "a folder, expected a regular file"),
    ("loop", |path| symlink(path.file_name().unwrap(), path).unwrap(), "Too many levels of symbolic links"),
    ("endless", |path| fs::File::create(path).unwrap().set_len(3 << 30).unwrap(), ""),
];

fn fifo(path: &Path) {
    let mode = rustix::fs::Mode::RWXU;
    rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
}

fn remove(path: &Path) {
    if fs::remove_file(path).is_err() {
        let _ = fs::remove_dir(path);
    }
}

#[test]
fn a_model_folder_has_regular_files() {
    let shop = Workshop::new();
    for file in [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
    ] {
        let (name, path) = (format!("model/{file}"), shop.path(&format!("model/{file}")));
        let before = fs::read(&path).ok();
        for (trap, make, says) in TRAPS {
            remove(&path);
            make(&path);
            for command in [&GENERATE[..], &["train", "dpo.toml"]] {
                shop.refuses(&format!("{trap} {file}"), command, &[&name, says]);
            }
            remove(&path);
        }
        if let Some(bytes) = before {
            fs::write(&path, bytes).unwrap();
        }
    }
}

#[test]
fn weights_are_regular_files() {
    let shop = Workshop::new();
    let weights = shop.path("model/model.safetensors");
    fs::remove_file(&weights).unwrap();
    for file in ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "policy.pt"] {
        let path = shop.path(&format!("model/{file}"));
        for (trap, make, _) in TRAPS {
            make(&path);
            for command in [&GENERATE[..], &["train", "dpo.toml"]] {
                shop.refuses(&format!("{trap} {file}"), command, &["model"]);
            }
            remove(&path);
        }
    }
}

/// They are copied after the last step.
#[test]
fn files_that_a_trained_model_gets_are_looked_at_before_the_first_step() {
    let shop = Workshop::new();
    let path = shop.path("model/preprocessor_config.json");
    for (trap, make, says) in TRAPS.iter().filter(|(trap, ..)| *trap != "loop") {
        make(&path);
        shop.refuses(trap, &["train", "dpo.toml"], &["model/preprocessor_config.json", says]);
        assert!(!shop.path("run/metrics.jsonl").exists());
        remove(&path);
    }
}

#[test]
fn rows_and_settings_are_regular_files() {
    let shop = Workshop::new();
    for (file, command) in [
        ("preferences.jsonl", &["train", "dpo.toml"][..]),
        ("preferences.jsonl", &["data", "dpo.toml"]),
        ("dpo.toml", &["train", "dpo.toml"]),
        ("dpo.toml", &["plan", "dpo.toml"]),
        ("trl.yaml", &["init", "new.toml", "--from", "trl.yaml", "--yes"]),
        ("model.gguf", &["generate", "model.gguf", "the quick"]),
    ] {
        let path = shop.path(file);
        let before = fs::read(&path).ok();
        for (trap, make, _) in TRAPS {
            remove(&path);
            make(&path);
            shop.refuses(&format!("{trap} {file}"), command, &[file]);
            remove(&path);
        }
        if let Some(bytes) = before {
            fs::write(&path, bytes).unwrap();
        }
    }
}

#[test]
fn a_row_has_a_length() {
    let shop = Workshop::new();
    for (case, beginning, letter) in [
        ("text", r#"{"prompt":""#, b'a'),
        ("no JSON", "", b'a'),
        ("lists in lists", r#"{"prompt":"#, b'['),
        ("numbers", r#"{"prompt":[0"#, b','),
    ] {
        let mut file = fs::File::create(shop.path("preferences.jsonl")).unwrap();
        file.write_all(beginning.as_bytes()).unwrap();
        let block = if letter == b',' { b",0".repeat(1 << 19) } else { vec![letter; 1 << 20] };
        for _ in 0..200 {
            file.write_all(&block).unwrap();
        }
        shop.refuses(case, &["train", "dpo.toml"], &["preferences.jsonl:1", "longer than 16 MiB"]);
    }
}

/// Names come from files too.
#[test]
fn nothing_moves_the_cursor() {
    let shop = Workshop::new();
    let escape = "a\u{1b}[2J\u{7}\u{9b}b";
    let index = serde_json::json!({ "weight_map": { "x": escape } }).to_string();
    fs::rename(shop.path("model/model.safetensors"), shop.path("weights")).unwrap();
    shop.refuses_with(
        "a shard's name",
        "model/model.safetensors.index.json",
        index.as_bytes(),
        &GENERATE,
        &[r"a\u{1b}[2J\u{7}\u{9b}b"],
    );
    fs::rename(shop.path("weights"), shop.path("model/model.safetensors")).unwrap();
    let row = serde_json::json!({ escape: "x" }).to_string();
    shop.refuses_with(
        "a column",
        "preferences.jsonl",
        row.as_bytes(),
        &["train", "dpo.toml"],
        &["preferences.jsonl:1"],
    );
    shop.refuses_json(
        "a value",
        "model/config.json",
        |config| config["architectures"] = [escape].into(),
        &GENERATE,
        &["config.json"],
    );
    let key = format!("\"{}\" = 1\n", r"\u001b[2J");
    shop.refuses_with("a key", "dpo.toml", key.as_bytes(), &["train", "dpo.toml"], &["dpo.toml"]);
    let template = r#"{{ raise_exception("\x1b[2J") }}"#.replace(r"\x1b", "\u{1b}");
    shop.refuses_with(
        "a template",
        "model/chat_template.jinja",
        template.as_bytes(),
        &GENERATE,
        &["chat template"],
    );
    shop.write(
        "preferences.jsonl",
        &format!("{}\n", serde_json::json!({ "prompt": escape, "chosen": "a", "rejected": "b" })),
    );
    let shown = shop.run_bounded("data", &["data", "dpo.toml"]).expect(0).stdout;
    assert!(shown.contains("‹1b›") && !shown.contains(['\u{1b}', '\u{7}', '\u{9b}']), "{shown:?}");
}

/// A file that is cut while a run reads it is an error, and the process lives to say so.
#[test]
fn a_file_that_becomes_shorter_is_told() {
    let shop = Workshop::new();
    let weights = shop.path("model/model.safetensors");
    let whole = fs::read(&weights).unwrap();
    for length in [0, 7, 8, 100, whole.len() / 2, whole.len() - 1] {
        fs::write(&weights, &whole[..length]).unwrap();
        shop.refuses("cut", &GENERATE, &["model.safetensors"]);
    }
}
