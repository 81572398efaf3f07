//! Tokens and rendered templates equal TRL's and transformers', as written by `data/generate.py`.

use crate::fixture::{self, data_path, read_records, tokenizer_with};
use serde_json::Value;
use tandem_data::chat_template::{ChatTemplate, RenderOptions};
use tandem_data::record::RowKind;
use tandem_data::row::{RowOptions, TokenRow, Truncation, tokenise};

fn expected() -> Value {
    serde_json::from_slice(&std::fs::read(data_path("expected.json")).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
}

fn options(kind: RowKind, case: &Value) -> RowOptions {
    let truncation =
        if case["truncation"] == "keep_end" { Truncation::KeepEnd } else { Truncation::KeepStart };
    let max_length = case["max_length"].as_u64().map(|n| n as usize);
    RowOptions { max_length, truncation, ..RowOptions::new(kind) }
}

#[test]
fn preferences_become_trls_tokens() {
    let mut rows = 0;
    for case in expected()["preference"].as_array().unwrap() {
        let (_folder, tokenizer) = tokenizer_with(case["tokenizer"] == "bos", None);
        let file = format!("{}.jsonl", case["file"].as_str().unwrap());
        let records = read_records(&file, RowKind::Preference);
        for (i, (record, expected)) in records.iter().zip(case["rows"].as_array().unwrap()).enumerate() {
            let found = tokenise(record, &tokenizer, &options(RowKind::Preference, case)).unwrap().row;
            let found = found.as_ref().and_then(TokenRow::as_pair).map(|pair| {
                let [first, second] = pair.prompts();
                [first, pair.chosen, second, pair.rejected].map(<[u32]>::to_vec)
            });
            let expected = expected.as_array().map(|row| [0, 1, 2, 3].map(|part| ids(&row[part])));
            assert_eq!(found, expected, "{file} row {i}, {} at {}", case["tokenizer"], case["max_length"]);
            rows += 1;
        }
    }
    assert_eq!(rows, 4 * (4 * 8 + 15) + 2 * 15, "every case of the file was looked at");
}

#[test]
fn demonstrations_become_trls_tokens_and_marks() {
    for case in expected()["supervised"].as_array().unwrap() {
        let template = case["template"].as_str();
        let (_folder, tokenizer) = tokenizer_with(case["tokenizer"] == "bos", template);
        let file = format!("{}.jsonl", case["file"].as_str().unwrap());
        let records = read_records(&file, RowKind::Supervised);
        let expected = case["rows"].as_array().unwrap();
        assert_eq!(records.len(), expected.len());
        for (i, (record, expected)) in records.iter().zip(expected).enumerate() {
            let found = tokenise(record, &tokenizer, &options(RowKind::Supervised, case)).unwrap().row;
            let expected = expected.as_array().map(|row| TokenRow::Scored {
                tokens: ids(&row[0]),
                scored: ids(&row[1]).into_iter().map(|s| s as u8).collect(),
            });
            // TRL keeps rows whose only scored token is the first, which nothing predicts; these
            // are dropped here.
            let expected = expected.filter(
                |row| matches!(row, TokenRow::Scored { scored, .. } if scored.iter().skip(1).any(|&s| s == 1)),
            );
            assert_eq!(found, expected, "{file} row {i}, {} at {}", case["tokenizer"], case["max_length"]);
        }
    }
}

#[test]
fn templates_render_as_in_transformers() {
    let special = vec![("bos_token".to_string(), "<s>".to_string())];
    for (name, expected) in expected()["rendered"].as_object().unwrap() {
        let source = std::fs::read_to_string(data_path(&format!("templates/{name}.jinja"))).unwrap();
        let template = ChatTemplate::new(vec![("default".into(), source)], special.clone()).unwrap();
        let mut expected = expected.as_array().unwrap().iter();
        for line in std::fs::read_to_string(data_path("conversations.jsonl")).unwrap().lines() {
            let row: Value = serde_json::from_str(line).unwrap();
            let messages: Vec<_> =
                row["messages"].as_array().unwrap().iter().map(fixture::message_of).collect();
            for add_generation_prompt in [false, true] {
                let found = template.render(
                    &messages,
                    RenderOptions {
                        tools: row.get("tools"),
                        kwargs: row["chat_template_kwargs"].as_object(),
                        add_generation_prompt,
                    },
                );
                match expected.next().unwrap().as_str() {
                    Some(text) => assert_eq!(found.unwrap(), text, "{name}: {line}"),
                    None => assert!(found.is_err(), "{name}: {line} should fail"),
                }
            }
        }
    }
}
