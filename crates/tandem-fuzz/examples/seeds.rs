//! Writes the seeds of the fuzz targets into `fuzz/corpus`, from goldens, test data and examples:
//! `cargo run --release -p tandem-fuzz --example seeds`. Inputs that a fuzzer found stay as they are.

use std::path::{Path, PathBuf};

use serde_json::Value;
use tandem_fuzz::tiny;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn write(target: &str, name: &str, bytes: &[u8]) {
    let folder = root().join("fuzz/corpus").join(target);
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join(name), bytes).unwrap();
}

fn read(path: &str) -> Vec<u8> {
    std::fs::read(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

fn copy(target: &str, paths: &[&str]) {
    for path in paths {
        let name = Path::new(path).file_name().unwrap().to_str().unwrap();
        write(target, name, &read(path));
    }
}

/// Copies the value of `key` of every JSON file of a folder whose name begins so.
fn values(target: &str, folder: &str, key: &str) {
    let mut files: Vec<_> =
        std::fs::read_dir(root().join(folder)).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    for file in files.iter().filter(|file| file.extension().is_some_and(|end| end == "json")) {
        let golden: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
        let name = file.file_name().unwrap().to_str().unwrap();
        if let Some(value) = golden.get(key) {
            write(target, name, serde_json::to_string(value).unwrap().as_bytes());
        }
    }
}

fn weights() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    tiny::write_weights(&model).unwrap();
    let written = |name: &str| std::fs::read(model.join(name)).unwrap();
    write("safetensors", "tiny", &written("model.safetensors"));
    write("policy_pt", "tiny", &written("policy.pt"));
    write("peft_weights", "tiny", &written("adapter/adapter_model.safetensors"));
    write("peft_config", "tiny", tiny::ADAPTER.as_bytes());
    write("model_config", "tiny", tiny::CONFIG.as_bytes());
}

/// Message of the store's protocol: numbers and keys after an opcode.
fn request(opcode: u8, parts: &[&[u8]]) -> Vec<u8> {
    let mut bytes = vec![opcode];
    for part in parts {
        bytes.extend((part.len() as u64).to_le_bytes());
        bytes.extend(*part);
    }
    bytes
}

fn stores() {
    let hello = [&[0][..], &0x3C85_F7CE_u32.to_le_bytes()].concat();
    let counted = |opcode: u8, keys: &[&[u8]]| {
        let rest = request(opcode, keys)[1..].to_vec();
        [&[opcode][..], &(keys.len() as u64).to_le_bytes(), &rest].concat()
    };
    let add = [request(3 + 1, &[b"/n"]), 3_i64.to_le_bytes().to_vec()].concat();
    let values = [
        hello.clone(),
        request(1, &[b"/a", b"1"]),
        request(2, &[b"/a", b"1", b"2"]),
        request(3, &[b"/a"]),
        add,
        request(9, &[b"/a", b"more"]),
        request(8, &[b"/a"]),
        vec![7],
    ];
    write("store_server", "values", &values.concat());
    let counts = [
        hello.clone(),
        [&[11][..], &1_u64.to_le_bytes(), &request(0, &[b"/a", b"1"])[1..]].concat(),
        counted(10, &[b"/a"]),
        counted(5, &[b"/a", b"/b"]),
        counted(6, &[b"/a"]),
        counted(6, &[b"/b"]),
        vec![12],
        [&[13][..], &7_u32.to_le_bytes()].concat(),
    ];
    write("store_server", "counts", &counts.concat());
    let replies = [
        vec![0],
        request(0, &[b"1"])[1..].to_vec(),
        1_i64.to_le_bytes().to_vec(),
        vec![0],
        request(0, &[b"2"])[1..].to_vec(),
        1_i64.to_le_bytes().to_vec(),
        vec![0],
    ];
    write("store_client", "replies", &replies.concat());
    write("store_client", "not-there", &[1]);
}

fn main() {
    weights();
    stores();
    copy("gguf", &["goldens/gguf/families/starcoder2.gguf", "goldens/gguf/sentencepiece/gemma.gguf"]);
    copy("gguf", &["goldens/gguf/sentencepiece/llama.gguf", "goldens/gguf/families/arcee.gguf"]);
    values("model_config", "goldens/models", "config");
    values("peft_config", "goldens/adapters", "adapter_config");
    copy("rows_text", &["goldens/small/sft_completion.jsonl"]);
    let data = "crates/tandem-data/tests/data";
    for name in
        ["edge_cases", "pref_conv", "sft_messages", "sft_text", "sft_completion_conv", "conversations"]
    {
        copy("rows_text", &[&format!("{data}/{name}.jsonl")]);
    }
    write("rows_text", "table.csv", b"prompt,completion\n\"one, two\",three\na,\"b \"\"c\"\"\"\n");
    write("rows_text", "array.json", br#"[{"prompt": "a", "chosen": "b", "rejected": "c"}, {"text": "d"}]"#);
    for name in ["brotli.parquet", "gzip.parquet", "large.parquet", "lz4.parquet", "none.parquet"] {
        copy("rows_columns", &[&format!("{data}/formats/chat_{name}")]);
    }
    for name in ["chat_snappy.parquet", "chat_large.feather", "chat_stream.arrow", "rows.jsonl.gz"] {
        copy("rows_columns", &[&format!("{data}/formats/{name}")]);
    }
    copy("tokenizer", &["goldens/small/model/tokenizer.json"]);
    for name in ["markers", "tools"] {
        copy("chat_template", &[&format!("{data}/templates/{name}.jinja")]);
    }
    copy("chat_template", &["goldens/small/model/chat_template.jinja"]);
    for run in
        ["online/run", "grpo/run", "environment/run", "smollm2/dpo", "smollm2/sft", "smollm2/dpo-qlora"]
    {
        write("run_toml", &run.replace('/', "-"), &read(&format!("examples/{run}.toml")));
    }
    for run in ["llama-70b/full-8xh100", "phi2-two-a10/two-adapters-qlora"] {
        write("run_toml", &run.replace('/', "-"), &read(&format!("examples/{run}.toml")));
    }
}
