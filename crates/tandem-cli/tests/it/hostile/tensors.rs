//! Files of safetensors whose headers lie.

use std::fs;

use serde_json::{Value, json};

use super::GENERATE;
use crate::workshop::Workshop;

const FILE: &str = "model/model.safetensors";

/// A file with this header and these data.
fn file(header: &[u8], data: usize) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header, &vec![0; data]].concat()
}

fn header(of_tensor: Value) -> Vec<u8> {
    json!({ "model.embed_tokens.weight": of_tensor }).to_string().into_bytes()
}

#[test]
fn headers_that_lie() {
    let shop = Workshop::new();
    let tensor = |dtype: Value, shape: Value, offsets: Value| {
        file(&header(json!({ "dtype": dtype, "shape": shape, "data_offsets": offsets })), 4)
    };
    let mut cases = vec![
        ("empty", Vec::new()),
        ("no length", vec![1, 2]),
        ("length 0", file(b"", 0)),
        ("length of everything", [&u64::MAX.to_le_bytes()[..], b"{}"].concat()),
        ("half of everything", [&(1u64 << 63).to_le_bytes()[..], b"{}"].concat()),
        ("no tensors", file(b"{}", 0)),
        ("a list", file(b"[]", 0)),
        ("deep lists", file(&b"[".repeat(100_000), 0)),
        ("deep objects", file(&br#"{"a":"#.repeat(100_000), 0)),
        ("no UTF-8", file(b"{\"\xff\":1}", 0)),
    ];
    for shape in [
        "[-1]",
        "[4611686018427387904, 4]",
        "[18446744073709551616]",
        "[1.5]",
        "[\"a\"]",
        "[[1]]",
        "[0]",
        "1",
        "null",
    ] {
        cases.push(("shape", tensor(json!("F32"), serde_json::from_str(shape).unwrap(), json!([0, 4]))));
    }
    for offsets in [
        "[4, 0]",
        "[0, 9223372036854775808]",
        "[-1, 4]",
        "[0, 5]",
        "[2, 6]",
        "[0]",
        "[0, 4, 8]",
        "[18446744073709551612, 18446744073709551615]",
    ] {
        cases.push(("offsets", tensor(json!("F32"), json!([1]), serde_json::from_str(offsets).unwrap())));
    }
    for dtype in [json!("F64"), json!("I8"), json!("BOOL"), json!("X"), json!(""), Value::Null, json!(1)] {
        cases.push(("type", tensor(dtype, json!([1]), json!([0, 4]))));
    }
    for (case, bytes) in cases {
        shop.refuses_with(case, FILE, &bytes, &GENERATE, &["model"]);
    }
}

/// A message says some of the names, and how many there are.
#[test]
fn names_without_end() {
    let shop = Workshop::new();
    let many = (0..50_000).map(|i| {
        (format!("t{i}"), json!({ "dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4] }))
    });
    let many = Value::Object(many.collect()).to_string();
    shop.refuses_with("many", FILE, &file(many.as_bytes(), 200_000), &GENERATE, &["of the tensors", "more"]);
    let long =
        json!({ "a".repeat(1 << 20): { "dtype": "F32", "shape": [1], "data_offsets": [0, 4] } }).to_string();
    shop.refuses_with("long", FILE, &file(long.as_bytes(), 4), &GENERATE, &["of the tensors", "bytes"]);
}

#[test]
fn indices_that_lead_elsewhere() {
    let shop = Workshop::new();
    fs::remove_file(shop.path(FILE)).unwrap();
    for index in [
        json!({ "weight_map": { "a": "../../../etc/passwd" } }),
        json!({ "weight_map": { "a": "/etc/passwd" } }),
        json!({ "weight_map": { "a": "/dev/zero" } }),
        json!({ "weight_map": { "a": "model.safetensors/../../dpo.toml" } }),
        json!({ "weight_map": { "a": "" } }),
        json!({ "weight_map": { "a": "." } }),
        json!({ "weight_map": { "a": 5 } }),
        json!({ "weight_map": { "a": "n\0ul" } }),
        json!({ "weight_map": [] }),
        json!({ "weight_map": {} }),
        json!([]),
        json!(null),
    ] {
        let text = index.to_string();
        shop.refuses_with(
            &text,
            "model/model.safetensors.index.json",
            text.as_bytes(),
            &GENERATE,
            &["model"],
        );
    }
}
