//! Sets of rows, adapters and objectives of other programs keep their meaning, or say where they do not.

use std::fs;
use std::path::Path;

use super::{Answers, Rows, translate};
use crate::config::Draft;

fn read_in(folder: &Path, name: &str, text: &str, answers: &Answers, facts: &Rows) -> Result<Draft, String> {
    let path = folder.join(name);
    fs::write(&path, text).unwrap();
    let answers = Answers { ranks: Some(1), ..answers.clone() };
    translate(&[path], None, &answers, facts).map(|found| found.draft).map_err(|error| error.to_string())
}

/// The translation of a file.
fn read(name: &str, text: &str) -> Result<Draft, String> {
    let folder = tempfile::tempdir().unwrap();
    read_in(folder.path(), name, text, &Answers::default(), &Rows(Some(&[])))
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

fn axolotl(settings: &str) -> Draft {
    let text = format!("base_model: m\nlearning_rate: 1e-5\n{settings}\n");
    read("axolotl.yaml", &text).unwrap_or_else(|error| panic!("{settings}: {error}"))
}

/// Settings that cannot be had or are not known.
fn left_out(draft: &Draft) -> Vec<&str> {
    draft.missing.iter().chain(&draft.unknown).map(|remark| remark.setting.as_str()).collect()
}

/// Every key of a set has a translation or is named.
#[test]
fn keys_of_axolotls_sets_are_read_or_named() {
    let set = |keys: &str| {
        axolotl(&format!(
            "datasets:\n  - path: d.jsonl\n    type: chat_template\n    {}",
            keys.replace("; ", "\n    ")
        ))
    };
    for key in [
        "message_property_mappings: {role: role, content: clean}",
        "message_property_mappings: {role: speaker, content: content}",
        "message_property_mappings: {role: role, content: content, thinking: thoughts}",
        "message_field_content: clean",
        "message_field_training: train",
        "message_field_training_detail: train",
        "chat_template: llama3",
        "field_thinking: thoughts",
        "template_thinking_key: reasoning",
        "drop_system_message: true",
        "split_thinking: true",
        "revision: abc",
        "data_dir: sub",
        "shards_idx: 3",
        "split: train[:10%]",
        "skip: 1",
        "colour: red",
    ] {
        let draft = set(key);
        assert_eq!(left_out(&draft).len(), 1, "{key}: {:?}", left_out(&draft));
    }
    for (key, columns) in [
        ("chat_template: tokenizer_default", ""),
        ("split: train", ""),
        ("drop_system_message: false", ""),
        ("message_property_mappings: {role: role, content: content, name: name}", ""),
        ("field_tools: functions", "{ tools = \"functions\" }"),
        ("message_property_mappings: {role: from, content: value}", "{ conversations = \"messages\" }"),
        ("field_messages: conversations; message_property_mappings: {role: from, content: value}", ""),
        (
            "field_messages: talk; message_field_role: role; message_field_content: content",
            "{ messages = \"talk\" }",
        ),
    ] {
        let draft = set(key);
        assert!(left_out(&draft).is_empty(), "{key}: {:?}", left_out(&draft));
        assert_eq!(value(&draft, "data.columns"), columns, "{key}");
    }
    let draft = axolotl("datasets:\n  - {path: owner/name, split: 'train[:20%]', type: chat_template}");
    assert_eq!(value(&draft, "data.train"), "\"hf://owner/name/train\"");
    assert_eq!(left_out(&draft), ["datasets: owner/name: split = train[:20%]"]);
}

/// One shape and one table of columns hold for all sets.
#[test]
fn sets_of_several_forms_are_told() {
    let texts = "datasets:\n  - {path: a.jsonl, type: completion, field: text}\n  - {path: b.jsonl, type: completion, field: FIELD}";
    let draft = axolotl(&texts.replace("FIELD", "chapter"));
    assert_eq!(value(&draft, "data.columns"), "");
    assert_eq!(left_out(&draft), ["a.jsonl and b.jsonl"]);
    let same = axolotl(&texts.replace("FIELD", "text"));
    assert!(left_out(&same).is_empty());
    let draft =
        axolotl("datasets:\n  - {path: a.jsonl, type: sharegpt}\n  - {path: b.jsonl, type: chat_template}");
    assert_eq!((value(&draft, "data.shape"), left_out(&draft)), (String::new(), vec!["a.jsonl and b.jsonl"]));
    // Held-out rows leave the columns of training rows alone.
    let draft = axolotl(
        "datasets:\n  - {path: a.jsonl, type: chat_template, field_messages: talk}\n\
         test_datasets:\n  - {path: owner/name, type: completion, field: body}",
    );
    assert_eq!(value(&draft, "data.columns"), "{ messages = \"talk\" }");
    assert_eq!(left_out(&draft), ["hf://owner/name/test"]);
}

/// Axolotl looks for held-out rows under "test".
#[test]
fn held_out_sets_of_axolotl_are_test_splits() {
    let sets = "datasets:\n  - {path: owner/name, type: chat_template}\ntest_datasets:\n  - {path: owner/name, type: chat_template";
    let draft = axolotl(&format!("{sets}}}"));
    assert_eq!(value(&draft, "data.train"), "\"hf://owner/name/train\"");
    assert_eq!(value(&draft, "data.eval"), "\"hf://owner/name/test\"");
    let draft = axolotl(&format!("{sets}, split: validation}}"));
    assert_eq!(value(&draft, "data.eval"), "\"hf://owner/name/validation\"");
}

/// A mixture takes shares of its sets, and has no test split.
#[test]
fn mixtures_have_weights_and_no_test_split() {
    let text = "model_name_or_path: m\nbeta: 0.1\neval_strategy: steps\neval_steps: 5\ndataset_mixture:\n  datasets:\n    \
                - {id: a/b, config: Preference, split: one, weight: 0.5, columns: [chosen, rejected]}\n    \
                - {id: c/d, weight: 1.0}\n    - {id: e/f, weight: 0}\n";
    let draft = read("dpo.yaml", text).unwrap();
    let rows =
        "[{ path = \"hf://a/b/Preference/one\", weight = 0.5 }, { path = \"hf://c/d/train\", weight = 1.0 }]";
    assert_eq!(value(&draft, "data.train"), rows);
    assert_eq!(value(&draft, "data.eval"), "");
    assert!(left_out(&draft).iter().any(|setting| setting.contains("columns")), "{:?}", left_out(&draft));
    draft.to_toml().parse::<toml::Table>().unwrap();
    let error = read("dpo.yaml", &text.replace("0.5", "1.5")).unwrap_err();
    assert!(error.contains("weight`: expected a share from 0 to 1, found 1.5"), "{error}");
    let whole = read("dpo.yaml", &text.replace("0.5", "1").replace("weight: 0}", "weight: 1}")).unwrap();
    assert!(value(&whole, "data.train").starts_with("[\"hf://a/b/Preference/one\", "));
    // Another set of one name keeps its test split.
    let single = "model_name_or_path: m\nbeta: 0.1\neval_strategy: epoch\ndataset_name: a/b\n";
    assert_eq!(value(&read("dpo.yaml", single).unwrap(), "data.eval"), "\"hf://a/b/test\"");
}

/// The translation of a run of LLaMA-Factory with sets of this dataset_info.json.
fn of_info(stage: &str, info: &str, settings: &str, columns: &'static [&'static str]) -> Draft {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("dataset_info.json"), info).unwrap();
    let text = format!(
        "model_name_or_path: m\nstage: {stage}\nfinetuning_type: full\ndataset_dir: {}\n{settings}\n",
        folder.path().display()
    );
    let draft = read_in(folder.path(), "lf.yaml", &text, &Answers::default(), &Rows(Some(columns)));
    draft.unwrap_or_else(|error| panic!("{info}: {error}"))
}

/// Settings of LLaMA-Factory that cannot be had, without that of its limit.
fn left_out_of_info(draft: &Draft) -> Vec<&str> {
    left_out(draft).into_iter().filter(|setting| !setting.starts_with("cutoff_len")).collect()
}

#[test]
fn keys_of_dataset_info_are_read_or_named() {
    let entry = |more: &str| format!(r#"{{"a": {{"file_name": "a.jsonl", {more}}}}}"#);
    for (more, named) in [
        (r#""num_samples": 5"#, "a of dataset_info.json: num_samples = 5"),
        (r#""folder": "x""#, "a of dataset_info.json: folder = x"),
        (
            r#""columns": {"prompt": "instruction", "history": "old"}"#,
            "a of dataset_info.json: columns.history = old",
        ),
        (r#""columns": {"prompt": "instruction", "images": "pictures"}"#, "columns.images = pictures"),
        (
            r#""formatting": "sharegpt", "tags": {"role_tag": "role", "content_tag": "text"}"#,
            "tags.content_tag = text",
        ),
        (
            r#""formatting": "sharegpt", "tags": {"role_tag": "from", "content_tag": "value", "user_tag": "me"}"#,
            "tags.user_tag = me",
        ),
        (r#""colour": "red""#, "colour = red"),
    ] {
        let draft = of_info("sft", &entry(more), "dataset: a", &[]);
        let found = left_out_of_info(&draft);
        assert!(found.len() == 1 && found[0].ends_with(named), "{more}: {found:?}");
    }
    let usual = r#""formatting": "openai", "ranking": true, "columns": {"messages": "talk", "tools": "functions"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}"#;
    let draft = of_info("sft", &entry(usual), "dataset: a", &[]);
    assert!(left_out_of_info(&draft).is_empty(), "{:?}", left_out(&draft));
    assert_eq!(
        (value(&draft, "data.shape"), value(&draft, "data.columns")),
        (String::new(), "{ messages = \"talk\", tools = \"functions\" }".to_owned())
    );
}

/// An empty name is no column, and a column that no entry names is not read there.
#[test]
fn columns_that_an_entry_does_not_name_are_left_out() {
    let info = r#"{"a": {"file_name": "a.jsonl", "columns": {"prompt": "instruction", "query": "", "response": "answer"}}}"#;
    let draft = of_info("sft", info, "dataset: a", &["instruction", "input", "answer"]);
    assert_eq!(value(&draft, "data.columns"), "{ output = \"answer\" }");
    assert_eq!(value(&draft, "data.ignore_columns"), "[\"input\"]");
    let draft = of_info("sft", info, "dataset: a", &["instruction", "answer"]);
    assert_eq!(value(&draft, "data.ignore_columns"), "");
    let bare = r#"{"a": {"file_name": "a.jsonl"}}"#;
    let draft = of_info("sft", bare, "dataset: a", &["instruction", "input", "output", "system"]);
    assert_eq!(value(&draft, "data.ignore_columns"), "[\"system\"]");
}

/// Pairs and labelled rows are not read from `messages`.
#[test]
fn turns_with_roles_are_read_for_each_method() {
    let tags = r#""tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}"#;
    let entry = |columns: &str| {
        format!(
            r#"{{"a": {{"file_name": "a.jsonl", "formatting": "sharegpt", "columns": {columns}, {tags}}}}}"#
        )
    };
    let pairs = entry(r#"{"messages": "messages", "chosen": "good", "rejected": "bad"}"#);
    let draft = of_info("dpo", &pairs, "dataset: a", &[]);
    assert_eq!(value(&draft, "data.shape"), "\"sharegpt\"");
    let columns = "{ chosen = \"good\", conversations = \"messages\", rejected = \"bad\" }";
    assert_eq!(value(&draft, "data.columns"), columns);
    let labelled = entry(r#"{"messages": "messages", "kto_tag": "good"}"#);
    let draft = of_info("kto", &labelled, "dataset: a", &[]);
    assert_eq!(
        (value(&draft, "data.shape"), value(&draft, "data.columns")),
        (String::new(), "{ label = \"good\" }".to_owned())
    );
    assert_eq!(left_out_of_info(&draft), ["a of dataset_info.json: kto_tag"]);
}

#[test]
fn sets_of_llama_factory_are_limited_and_found_together() {
    let info = r#"{"a": {"file_name": "a.jsonl"}, "b": {"file_name": "b.jsonl"}, "s": {"file_name": "s.jsonl", "formatting": "sharegpt"}}"#;
    let draft = of_info("sft", info, "dataset: a\neval_dataset: b\nmax_samples: 20", &[]);
    assert!(value(&draft, "data.eval").ends_with("b.jsonl\""), "found beside the training rows");
    assert_eq!(
        (value(&draft, "data.train_rows"), value(&draft, "data.eval_rows")),
        ("20".to_owned(), "20".to_owned())
    );
    let draft = of_info("sft", info, "dataset: a,b\nmax_samples: 20", &[]);
    assert_eq!(value(&draft, "data.train_rows"), "");
    assert_eq!(left_out_of_info(&draft), ["max_samples = 20"]);
    assert_eq!(value(&draft, "data.shape"), "\"alpaca\"");
    let draft = of_info("sft", info, "dataset: b,s", &[]);
    assert_eq!(value(&draft, "data.shape"), "");
    assert!(left_out_of_info(&draft)[0].ends_with("s.jsonl"), "{:?}", left_out(&draft));
}

#[test]
fn rows_beyond_the_limit_are_told() {
    let data = "datasets:\n  - {path: d.jsonl, type: TYPE}\n";
    let comment = |settings: &str| {
        let draft = axolotl(settings);
        let key = draft.keys.iter().find(|key| key.key == "data.truncation").expect("written");
        key.comment.clone()
    };
    let chat = data.replace("TYPE", "chat_template");
    assert!(comment(&chat).starts_with("Axolotl leaves out longer rows"));
    assert!(comment(&format!("{chat}rl: dpo")).starts_with("Axolotl leaves out longer rows"));
    assert_eq!(
        comment(&format!("{chat}excess_length_strategy: truncate")),
        "excess_length_strategy = truncate"
    );
    let texts = data.replace("TYPE", "completion");
    assert_eq!(comment(&texts), "of a longer completion Axolotl trains on every piece, here on the first");
    assert!(
        comment(&format!("{texts}excess_length_strategy: truncate")).starts_with("of a longer completion")
    );
    let kto = axolotl(&format!("{chat}rl: kto"));
    assert!(left_out(&kto).contains(&"excess_length_strategy"));
    for (stage, said) in [
        ("sft", "a row whose prompt alone fills"),
        ("dpo", "a row whose prompt alone"),
        ("rm", "here its row is dropped"),
    ] {
        let draft = llama_factory(stage, "finetuning_type: full\ncutoff_len: 128").unwrap();
        assert!(words(&draft).contains("cutoff_len = 128: ") && words(&draft).contains(said), "{stage}");
    }
}

/// `stage: pt` packs texts unless the file says otherwise.
#[test]
fn pretraining_of_llama_factory_packs_texts() {
    for (more, said) in [
        ("", Some("packing, the default of stage = pt: texts are joined there")),
        ("packing: true", Some("packing = true: texts are joined there")),
        ("packing: false", None),
    ] {
        let draft = llama_factory("pt", &format!("finetuning_type: full\ncutoff_len: 128\n{more}")).unwrap();
        let words = words(&draft);
        assert_eq!(words.contains("texts are joined there"), said.is_some(), "{words}");
        assert!(said.is_none_or(|said| words.contains(said)), "{words}");
    }
}

#[test]
fn the_mean_of_pref_ftx_is_told() {
    let draft = llama_factory("dpo", "finetuning_type: full\npref_ftx: 0.5").unwrap();
    assert!(draft.to_toml().contains("a mean over pairs of means over tokens there"), "{}", draft.to_toml());
}

/// A single mark of many programs' files makes none of Axolotl's.
#[test]
fn files_without_base_model_are_not_axolotls() {
    let text = "model_name_or_path: m\ndataset_name: a/b\nper_device_train_batch_size: 1\nlearning_rate: 5e-7\nnum_epochs: 3\n\
                beta: 0.1\n";
    let draft = read("dpo.yaml", text).unwrap();
    assert_eq!(
        (value(&draft, "method"), value(&draft, "train.epochs")),
        ("\"dpo\"".to_owned(), "3.0".to_owned())
    );
}

#[test]
fn yaml_has_merge_keys_and_a_byte_order_mark() {
    let text = "\u{feff}model_name_or_path: m\ndataset_name: d.jsonl\nbeta: 0.1\ncommon: &c {learning_rate: 3e-5, max_length: 64}\n\
                more: &d {learning_rate: 1, seed: 7}\n<<: [*c, *d]\nmax_length: 128\n";
    let draft = read("dpo.yaml", text).unwrap();
    assert_eq!(value(&draft, "model"), "\"m\"");
    assert_eq!(value(&draft, "train.learning_rate"), "0.00003");
    assert_eq!((value(&draft, "data.max_length"), value(&draft, "seed")), ("128".to_owned(), "7".to_owned()));
    let one = text.replace("[*c, *d]", "*c");
    assert_eq!(value(&read("dpo.yaml", &one).unwrap(), "train.learning_rate"), "0.00003");
    assert!(!words(&draft).contains("<<"));
}

#[test]
fn references_that_no_file_resolves_are_an_error() {
    let text = "model_name_or_path: m\nbeta: 0.1\ndataset_name: d.jsonl\n";
    for (line, named) in [
        (
            "output_dir: ${oc.env:HOME}/runs",
            "dpo.yaml:4: `output_dir`: no file says what ${oc.env:HOME} stands for",
        ),
        ("report_to: [\"${T}\"]", "dpo.yaml:4: `report_to`: no file says what ${T} stands for"),
    ] {
        let error = read("dpo.yaml", &format!("{text}{line}\n")).unwrap_err();
        assert!(error.contains(named), "{error}");
    }
    read("dpo.yaml", &format!("{text}chat_template_path: '{{{{ \"${{x}}\" }}}}'\nrun_name: a$b\n")).unwrap();
}

/// The chosen completions of several sets are learnt, too.
#[test]
fn several_sets_of_mitchells_code_keep_their_meaning() {
    let read = |sets: &str, loss: &str| {
        read("run.sh", &format!("python -u train.py model=gpt2-xl datasets=[{sets}] loss={loss}\n")).unwrap()
    };
    let draft = read("hh,shp", "sft");
    assert_eq!(
        (value(&draft, "data.take"), value(&draft, "data.shape")),
        ("\"chosen\"".to_owned(), String::new())
    );
    assert_eq!(value(&draft, "data.truncation"), "");
    assert!(words(&draft).contains("long rows of hh keep their end there"), "{}", words(&draft));
    let draft = read("shp,se", "dpo");
    assert_eq!(
        (value(&draft, "data.take"), value(&draft, "data.truncation")),
        (String::new(), "\"keep_start\"".to_owned())
    );
}
