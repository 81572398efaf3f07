//! Teachers that a distillation refuses before anything is loaded.

use std::fs;

use serde_json::Value;
use tandem_train::Config;
use tandem_train::events::Silent;
use tandem_train::inputs::RunInputs;

use crate::small::Small;

/// Changes a JSON file of the teacher, and returns what opening the run says.
fn refused(file: &str, change: impl FnOnce(&mut Value)) -> String {
    let small = Small::new("distill");
    let config: Config = small.config("run", &[]);
    let path = small.path("teacher").join(file);
    let mut json: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    change(&mut json);
    fs::write(&path, json.to_string()).unwrap();
    let opened = RunInputs::open(&config, &mut Silent).map(drop);
    opened.expect_err("the teacher does not fit").to_string()
}

#[test]
fn a_padded_vocabulary_is_refused_as_in_trl() {
    let error = refused("config.json", |config| config["vocab_size"] = 520.into());
    assert!(error.contains("has vocab_size 520, the policy") && error.contains("has 512;"), "{error}");
}

#[test]
fn another_tokenizer_is_refused_with_the_first_token_that_differs() {
    let error = refused("tokenizer.json", |tokenizer| {
        let tokens = tokenizer["model"]["vocab"].as_object_mut().unwrap();
        let id = |tokens: &serde_json::Map<String, Value>, id: u64| {
            tokens.iter().find(|(_, of)| **of == id).map(|(token, _)| token.clone()).unwrap()
        };
        let [first, second] = [id(tokens, 300), id(tokens, 400)];
        tokens[&first] = 400.into();
        tokens[&second] = 300.into();
    });
    assert!(
        error.contains("token 300 is ") && error.contains("take a teacher with the policy's tokenizer"),
        "{error}"
    );
}
