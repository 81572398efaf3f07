//! JSON schema of the configuration file, for editors.

use std::ops::Bound::{Excluded, Included};

use serde_json::{Map, Value, json};

use super::Config;
use super::form::ValueKind;
use super::judges::KINDS;
use super::keys::KeyRow;
use super::page::{judge_keys, keys_of_judge, list};

/// Returns the JSON schema (draft 2020-12) of the configuration file.
///
/// It holds names, types and ranges. Rules between keys are checked when the file is read.
pub fn json_schema() -> Value {
    let mut tables = list(|keys| Config::visit(None, keys).map(drop));
    // A nested table is a property of the table around it, which comes before it.
    tables.sort_by_key(|table| {
        std::cmp::Reverse(table.name.matches('.').count() + usize::from(!table.name.is_empty()))
    });
    let mut root = json!({});
    let mut inner: Vec<(String, Value)> = Vec::new();
    for table in tables {
        let mut schema = object(&table.keys);
        let prefix = if table.name.is_empty() { String::new() } else { format!("{}.", table.name) };
        let (own, others) = inner
            .into_iter()
            .partition(|(name, _)| name.strip_prefix(&prefix).is_some_and(|rest| !rest.contains('.')));
        inner = others;
        let own: Vec<(String, Value)> = own;
        for (name, nested) in own {
            schema["properties"][&name[prefix.len()..]] = nested;
        }
        if table.name.is_empty() {
            root = schema;
        } else {
            inner.push((table.name, schema));
        }
    }
    root["properties"]["judges"] = judges();
    for table in ["data", "train"] {
        root["required"].as_array_mut().expect("as written").push(table.into());
    }
    let mut schema = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A run of Tandem",
    });
    let entries = schema.as_object_mut().expect("as written");
    entries.extend(root.as_object_mut().map(std::mem::take).expect("a table"));
    schema
}

/// The list of judges: each kind has keys of its own.
fn judges() -> Value {
    let kinds = KINDS.map(|kind| {
        let mut schema = object(&[judge_keys(), keys_of_judge(kind)].concat());
        schema["properties"]["kind"] = json!({ "const": kind });
        schema
    });
    json!({ "type": "array", "minItems": 1, "items": { "oneOf": kinds } })
}

fn object(keys: &[KeyRow]) -> Value {
    let properties: Map<String, Value> =
        keys.iter().map(|row| (row.name.to_owned(), property(row))).collect();
    let required: Vec<&str> = keys.iter().filter(|row| row.default.is_none()).map(|row| row.name).collect();
    json!({ "type": "object", "additionalProperties": false, "properties": properties, "required": required })
}

fn property(row: &KeyRow) -> Value {
    let mut schema = value(&row.value);
    let default = row.default.as_ref().map_or(String::new(), |default| format!(" Default: {default}."));
    schema["description"] = format!("{}{default}", row.doc).into();
    schema
}

fn value(kind: &ValueKind) -> Value {
    match kind {
        ValueKind::Integer(range) => {
            let mut schema = json!({ "type": "integer", "minimum": range.start() });
            if *range.end() < i64::MAX as u64 {
                schema["maximum"] = (*range.end()).into();
            }
            schema
        }
        ValueKind::Number(low, high) => {
            let mut schema = json!({ "type": "number" });
            match low {
                Included(low) => schema["minimum"] = (*low).into(),
                Excluded(low) => schema["exclusiveMinimum"] = (*low).into(),
                _ => {}
            }
            match high {
                Included(high) => schema["maximum"] = (*high).into(),
                Excluded(high) => schema["exclusiveMaximum"] = (*high).into(),
                _ => {}
            }
            schema
        }
        ValueKind::Choice(names) => json!({ "enum": names }),
        ValueKind::Other(words) => in_words(words),
    }
}

/// The schema of a type that the reference page describes in words.
///
/// # Panics
/// For words without a schema, which a test would find.
fn in_words(words: &str) -> Value {
    let text = json!({ "type": "string" });
    let texts = json!({ "type": "array", "items": text });
    match words {
        "boolean" => json!({ "type": "boolean" }),
        "boolean or path" => json!({ "anyOf": [{ "type": "boolean" }, text] }),
        "string" | "path" | "path or name of the hub" | "path or text" | "`\"random\"` or path" => text,
        "list" | "list of strings" => json!({ "anyOf": [texts, text] }),
        "string or list" => json!({ "anyOf": [text, texts] }),
        "table" => json!({ "type": "object", "additionalProperties": text }),
        "string or table" => {
            json!({ "anyOf": [text, { "type": "object", "additionalProperties": { "type": "number" } }] })
        }
        "number or list, ≥ 0" => {
            let [first, number] =
                ["minimum", "exclusiveMinimum"].map(|least| json!({ "type": "number", least: 0 }));
            json!({ "anyOf": [first, { "type": "array", "items": number }] })
        }
        "`\"auto\"` or integer, 0 to 1024" => {
            json!({ "anyOf": [{ "const": "auto" }, { "type": "integer", "minimum": 0, "maximum": 1024 }] })
        }
        "two numbers, ≥ 0, < 1" => {
            let number = json!({ "type": "number", "minimum": 0, "exclusiveMaximum": 1 });
            json!({ "type": "array", "items": number, "minItems": 2, "maxItems": 2 })
        }
        "list of groups" => {
            let number = json!({ "type": "number", "minimum": 0 });
            json!({ "type": "array", "items": {
                "type": "object", "additionalProperties": false,
                "properties": {
                    "parameters": text, "learning_rate_factor": number, "weight_decay": number,
                    "frozen": { "type": "boolean" },
                },
                "required": ["parameters"],
            } })
        }
        "path or list" => {
            let weight = json!({ "type": "number", "exclusiveMinimum": 0, "maximum": 10_000 });
            let table = json!({
                "type": "object", "additionalProperties": false,
                "properties": { "path": text, "weight": weight }, "required": ["path"],
            });
            json!({ "anyOf": [text, { "type": "array", "items": { "anyOf": [text, table] } }] })
        }
        other => panic!("no schema for a value of type {other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks a value by the parts of JSON schema that are used here.
    fn accepts(schema: &Value, value: &Value) -> Result<(), String> {
        let number = |key: &str| schema.get(key).and_then(Value::as_f64);
        if let Some(of) = schema.get("anyOf").or(schema.get("oneOf")).and_then(Value::as_array) {
            let fits = of.iter().filter(|schema| accepts(schema, value).is_ok()).count();
            return if fits > 0 { Ok(()) } else { Err(format!("{value} is none of {of:?}")) };
        }
        let is_type = match schema.get("type").and_then(Value::as_str) {
            Some("integer") => value.is_u64() || value.is_i64(),
            Some("number") => value.is_number(),
            Some("string") => value.is_string(),
            Some("boolean") => value.is_boolean(),
            Some("array") => value.is_array(),
            Some("object") => value.is_object(),
            _ => true,
        };
        let is_listed = schema.get("enum").is_none_or(|of| of.as_array().unwrap().contains(value))
            && schema.get("const").is_none_or(|of| of == value);
        let is_in_range = value.as_f64().is_none_or(|x| {
            number("minimum").is_none_or(|low| x >= low)
                && number("exclusiveMinimum").is_none_or(|low| x > low)
                && number("maximum").is_none_or(|high| x <= high)
                && number("exclusiveMaximum").is_none_or(|high| x < high)
        });
        if !(is_type && is_listed && is_in_range) {
            return Err(format!("{value} against {schema}"));
        }
        for item in value.as_array().into_iter().flatten() {
            accepts(&schema["items"], item)?;
        }
        let Some(entries) = value.as_object() else { return Ok(()) };
        for name in schema.get("required").and_then(Value::as_array).into_iter().flatten() {
            entries.get(name.as_str().unwrap()).ok_or(format!("{name} is missing"))?;
        }
        for (name, inner) in entries {
            match (schema.get("properties").and_then(|all| all.get(name)), schema.get("additionalProperties"))
            {
                (Some(of), _) => accepts(of, inner).map_err(|error| format!("{name}: {error}"))?,
                (None, Some(of @ Value::Object(_))) => accepts(of, inner)?,
                (None, _) => return Err(format!("{name} is unknown")),
            }
        }
        Ok(())
    }

    fn read(text: &str) -> Value {
        serde_json::to_value(toml::from_str::<toml::Table>(text).expect("TOML")).expect("JSON")
    }

    /// The schema accepts what the reader accepts: the examples, and a resolved config with judges.
    #[test]
    fn the_examples_fit_the_schema() {
        let schema = json_schema();
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
        let mut seen = 0;
        for folder in std::fs::read_dir(&root).unwrap().map(|entry| entry.unwrap().path()) {
            for file in std::fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().path()) {
                if file.extension().is_some_and(|end| end == "toml") {
                    let text = std::fs::read_to_string(&file).unwrap();
                    accepts(&schema, &read(&text)).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
                    let resolved = Config::load::<&str>(&file, &[]).map(|config| config.to_toml());
                    if let Ok(text) = resolved {
                        accepts(&schema, &read(&text)).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
                    }
                    seen += 1;
                }
            }
        }
        assert!(seen > 10, "{seen}");
    }

    #[test]
    fn mistakes_do_not_fit_the_schema() {
        let schema = json_schema();
        let good = "method = \"sft\"\nmodel = \"m\"\noutput = \"o\"\ndata.train = \"t\"\n\
                    train = { batch_size = 2, steps = 3, learning_rate = 1 }\n";
        accepts(&schema, &read(good)).unwrap();
        for (from, to) in [
            ("batch_size = 2", "batch_size = 0"),
            ("batch_size = 2, ", ""),
            ("batch_size = 2", "per_device_train_batch_size = 2"),
            ("\"sft\"", "\"ppo\""),
            ("data.train = \"t\"\n", ""),
            ("data.train = \"t\"", "data.train = 3"),
            ("steps = 3", "steps = 3, betas = [1.0, 0.5]"),
        ] {
            let bad = good.replacen(from, to, 1);
            assert_ne!(bad, good);
            accepts(&schema, &read(&bad)).expect_err(&bad);
        }
        let judge = |text: &str| read(&format!("{good}[[judges]]\n{text}"));
        accepts(&schema, &judge("kind = \"regex\"\npattern = \"x\"")).unwrap();
        accepts(&schema, &judge("kind = \"regex\"\nfields = \"x\"")).expect_err("no key of that judge");
    }
}
