//! Sets of rows, adapters and objectives of other programs keep their meaning, or say where they do not.

use std::fs;
use std::path::Path;

use super::{Answers, Facts, Program, translate};
use crate::config::{Draft, Method};

/// Facts where files have these columns.
struct Columns(&'static [&'static str]);

impl Facts for Columns {
    fn path(&self, given: &str) -> String {
        given.to_owned()
    }
    fn local(&self, given: &str) -> String {
        given.to_owned()
    }
    fn exists(&self, given: &str) -> bool {
        given.ends_with(".jsonl")
    }
    fn model_type(&self, _: &str) -> Option<String> {
        None
    }
    fn columns(&self, _: &str) -> Option<Vec<String>> {
        (!self.0.is_empty()).then(|| self.0.iter().map(|&name| name.to_owned()).collect())
    }
    fn num_rows(&self, _: &[String]) -> Option<u64> {
        Some(100)
    }
}

fn read_in(
    folder: &Path,
    name: &str,
    text: &str,
    answers: &Answers,
    facts: &Columns,
) -> Result<Draft, String> {
    let path = folder.join(name);
    fs::write(&path, text).unwrap();
    let answers = Answers { ranks: Some(1), ..answers.clone() };
    translate(&[path], None, &answers, facts).map(|found| found.draft).map_err(|error| error.to_string())
}

/// The translation of a file.
fn read(name: &str, text: &str) -> Result<Draft, String> {
    let folder = tempfile::tempdir().unwrap();
    read_in(folder.path(), name, text, &Answers::default(), &Columns(&[]))
}

fn llama_factory(stage: &str, settings: &str) -> Result<Draft, String> {
    read("lf.yaml", &format!("model_name_or_path: m\nstage: {stage}\ndataset: d.jsonl\n{settings}\n"))
}

/// Lines of a part of the written file, as one line.
fn words(draft: &Draft) -> String {
    let text = draft.to_toml();
    let words: Vec<_> = text.split_whitespace().filter(|word| *word != "#").collect();
    words.join(" ")
}

/// Value of a key as TOML has it; empty without it.
fn value(draft: &Draft, key: &str) -> String {
    draft.get(key).map_or(String::new(), ToString::to_string)
}

/// LLaMA-Factory switches the adapter off for the reference.
#[test]
fn an_adapter_that_trains_on_has_the_base_as_its_reference() {
    let lora = "finetuning_type: lora\nadapter_name_or_path: old";
    for (stage, more, kind) in [
        ("dpo", "", "\"base\""),
        ("kto", "", "\"base\""),
        ("dpo", "\npref_loss: hinge\npref_ftx: 0.5", "\"base\""),
        ("dpo", "\npref_loss: simpo", ""),
        ("dpo", "\npref_loss: orpo", ""),
        ("dpo", "\nref_model: other", ""),
        ("dpo", "\nref_model_adapters: other", ""),
        ("sft", "", ""),
        ("rm", "", ""),
    ] {
        let draft = llama_factory(stage, &format!("{lora}{more}")).unwrap();
        assert_eq!(value(&draft, "reference.kind"), kind, "{stage}{more}");
        assert_eq!(value(&draft, "adapter.start"), "\"old\"", "{stage}{more}");
    }
    let draft = llama_factory("dpo", "finetuning_type: lora").unwrap();
    assert_eq!(value(&draft, "reference.kind"), "");
}

#[test]
fn a_new_adapter_beside_an_old_one_needs_a_merge() {
    let both = "finetuning_type: lora\nadapter_name_or_path: old\ncreate_new_adapter: true\nlora_rank: 4";
    let draft = llama_factory("dpo", both).unwrap();
    assert_eq!(
        (value(&draft, "adapter.start"), value(&draft, "adapter.rank")),
        (String::new(), "4".to_owned())
    );
    assert_eq!(value(&draft, "reference.kind"), "");
    assert!(
        words(&draft).contains("create_new_adapter = true: merge old (adapter_name_or_path)"),
        "{}",
        words(&draft)
    );
    let draft = llama_factory("dpo", &both.replace("true", "false")).unwrap();
    assert_eq!(value(&draft, "adapter.start"), "\"old\"");
    let error = llama_factory("dpo", &both.replace("old", "first,old")).unwrap_err();
    assert!(error.contains("`adapter_name_or_path`: expected one folder: merge the others"), "{error}");
}
