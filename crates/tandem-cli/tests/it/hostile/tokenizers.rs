//! Tokenizers that multiply text, or take memory by the square of their tokens.

use serde_json::{Value, json};

use super::GENERATE;
use crate::workshop::Workshop;

fn replace(pattern: Value, content: &str) -> Value {
    json!({ "type": "Replace", "pattern": pattern, "content": content })
}

fn added(id: u64, content: &str) -> Value {
    json!({
        "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true,
    })
}

#[test]
fn tokenizers_that_multiply_text() {
    let shop = Workshop::new();
    let letter = || json!({ "String": "e" });
    let any = || json!({ "Regex": "." });
    let template = |single: Value, ids: usize| {
        json!({
            "type": "TemplateProcessing", "single": single, "pair": [],
            "special_tokens": { "s": { "id": "s", "ids": vec![1; ids], "tokens": vec!["s"; ids] } },
        })
    };
    let text = || json!({ "Sequence": { "id": "A", "type_id": 0 } });
    let token = || json!({ "SpecialToken": { "id": "s", "type_id": 0 } });
    for (key, value) in [
        (
            "normalizer",
            json!({ "type": "Sequence", "normalizers": vec![replace(letter(), "eeeeeeeeee"); 12] }),
        ),
        ("normalizer", json!({ "type": "Sequence", "normalizers": vec![replace(any(), "xxxxxxxxxx"); 12] })),
        ("normalizer", replace(letter(), &"e".repeat(1_000_000))),
        ("normalizer", json!({ "type": "Prepend", "prepend": "x".repeat(1_000_000) })),
        ("decoder", json!({ "type": "Sequence", "decoders": vec![replace(letter(), "eeeeeeeeee"); 12] })),
        ("decoder", replace(any(), &"e".repeat(1_000_000))),
        ("post_processor", template(json!(vec![text(); 100_000]), 1)),
        ("post_processor", template(json!([token(), text()]), 1_000_000)),
    ] {
        let case = format!("{key}: {}", &value.to_string()[..60]);
        shop.refuses_json(
            &case,
            "model/tokenizer.json",
            |json| json[key] = value.clone(),
            &GENERATE,
            &["tokenizer.json", key],
        );
    }
}

#[test]
fn tokens_that_are_texts() {
    let shop = Workshop::new();
    let long = "a".repeat(100_000);
    let words = ["the special token \"aaa", "expected at most 1024"];
    let add = |json: &mut Value| json["added_tokens"].as_array_mut().unwrap().push(added(900, &long));
    shop.refuses_json("an added token", "model/tokenizer.json", add, &GENERATE, &words);
    let many = |json: &mut Value| {
        let tokens = json["added_tokens"].as_array_mut().unwrap();
        tokens.extend((0..20_000).map(|i| added(900 + i, &format!("{}{i}", "t".repeat(1000)))));
    };
    shop.refuses_json(
        "many added tokens",
        "model/tokenizer.json",
        many,
        &GENERATE,
        &["the added tokens have"],
    );
    for key in ["bos_token", "eos_token", "unk_token", "pad_token"] {
        let change = |json: &mut Value| json[key] = json!(long);
        shop.refuses_json(key, "model/tokenizer_config.json", change, &GENERATE, &words);
        let change = |json: &mut Value| json[key] = json!({ "content": long });
        shop.refuses_json(key, "model/tokenizer_config.json", change, &GENERATE, &words);
    }
    for (key, value) in [
        ("additional_special_tokens", json!([long])),
        ("extra_special_tokens", json!({ "image": long })),
        ("added_tokens_decoder", json!({ "900": { "content": long } })),
    ] {
        shop.refuses_json(key, "model/tokenizer_config.json", |json| json[key] = value, &GENERATE, &words);
    }
}

#[test]
fn tokenizers_that_are_none() {
    let shop = Workshop::new();
    let split = |pattern: &str| json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false });
    for (case, path, value) in [
        ("an expression", "/pre_tokenizer", split("(((")),
        ("a large expression", "/pre_tokenizer", split("((a{1000}){1000}){1000}")),
        ("an id below 0", "/added_tokens/0/id", json!(-1)),
        ("a large id", "/added_tokens/0/id", json!(u64::MAX)),
        ("a kind", "/model/type", json!("Evil")),
        ("a vocabulary", "/model/vocab", json!([])),
        ("an entry", "/model/vocab", json!({ "a": -1 })),
        ("a large entry", "/model/vocab", json!({ "a": 1u64 << 40 })),
        ("merges", "/model/merges", json!(["zzz yyy"])),
        ("odd merges", "/model/merges", json!(["a b c d"])),
        ("no merges", "/model/merges", json!([[]])),
        ("a version", "/version", json!("9.9")),
        ("a model", "/model", json!(vec![0; 1_000_000])),
        ("a large model", "/model", json!(vec![0; 4_000_000])),
        (
            "a map of characters",
            "/normalizer",
            json!({ "type": "Precompiled", "precompiled_charsmap": "AAAA" }),
        ),
        (
            "a map cut short",
            "/normalizer",
            json!({ "type": "Precompiled", "precompiled_charsmap": "/////w==" }),
        ),
        ("pieces of nothing", "/pre_tokenizer", json!({ "type": "FixedLength", "length": 0 })),
    ] {
        let change = |json: &mut Value| *json.pointer_mut(path).unwrap_or_else(|| panic!("{path}")) = value;
        shop.refuses_json(case, "model/tokenizer.json", change, &GENERATE, &["tokenizer.json"]);
    }
}
