//! `data.chat_template`: the rows' text, and the saved model's template.

use serde_json::Value;
use tandem_model::PeftFolder;
use tandem_train::events::Silent;
use tandem_train::run::run_dir::RunDirPolicy;
use tandem_train::run::spawn;
use tandem_train::{Config, chain};

use crate::small::Small;

const TEMPLATE: &str = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}\
     {% if add_generation_prompt %}<|assistant|>{% endif %}";

#[test]
fn a_runs_chat_template_makes_its_text_and_is_saved() {
    let small = Small::new("dpo");
    let path = small.path("own.jinja");
    std::fs::write(&path, TEMPLATE).unwrap();
    let by_path = format!("data.chat_template={}", path.display());
    let by_text = format!("data.chat_template='''{TEMPLATE}'''");
    let steps = "train.steps=2";
    small.finish("folders", RunDirPolicy::Fresh, &[steps]);
    small.finish("path", RunDirPolicy::Fresh, &[steps, &by_path]);
    small.finish("text", RunDirPolicy::Fresh, &[steps, &by_text]);
    assert!(small.weights("path") == small.weights("text"));
    assert!(small.weights("path") != small.weights("folders"));
    small.finish("adapter", RunDirPolicy::Fresh, &[steps, &by_text, "adapter.rank=4"]);
    for name in ["path", "text", "adapter"] {
        let saved = small.path(name).join("final/chat_template.jinja");
        assert_eq!(std::fs::read_to_string(saved).unwrap(), TEMPLATE, "{name}");
    }
}

/// Rows of a run that starts from an adapter are made by the template that the adapter was trained under.
#[test]
fn an_adapter_keeps_the_template_and_the_dropout_that_it_was_trained_with() {
    let small = Small::new("dpo");
    let by_text = format!("data.chat_template='''{TEMPLATE}'''");
    let steps = "train.steps=2";
    let dropout = "adapter.dropout=0.25";
    small.finish("first", RunDirPolicy::Fresh, &[steps, &by_text, "adapter.rank=4", dropout]);
    let start = format!("adapter.start={}", small.path("first/final").display());
    small.finish("kept", RunDirPolicy::Fresh, &[steps, &start]);
    small.finish("named", RunDirPolicy::Fresh, &[steps, &start, &by_text, dropout]);
    small.finish("plain", RunDirPolicy::Fresh, &[steps, &start, "adapter.dropout=0"]);
    assert!(small.weights("kept") == small.weights("named"));
    assert!(small.weights("kept") != small.weights("plain"));
    let read =
        |name: &str, file: &str| std::fs::read_to_string(small.path(name).join("final").join(file)).unwrap();
    assert_eq!(read("kept", "chat_template.jinja"), TEMPLATE);
    let dropout = |name: &str| -> Value {
        let config: Value = serde_json::from_str(&read(name, "adapter_config.json")).unwrap();
        config["lora_dropout"].clone()
    };
    assert_eq!((dropout("kept"), dropout("plain")), (0.25.into(), 0.0.into()));
    // A template of the run's own comes before the adapter's.
    let other = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}";
    let by_text = format!("data.chat_template='''{other}'''");
    small.finish("other", RunDirPolicy::Fresh, &[steps, &start, &by_text]);
    assert_eq!(read("other", "chat_template.jinja"), other);
}

#[test]
fn an_adapter_on_random_weights_names_no_base() {
    let small = Small::new("dpo");
    let heard = small.finish("first", RunDirPolicy::Fresh, &["train.steps=1", "adapter.rank=4"]);
    let warnings = heard.warnings;
    assert!(warnings.iter().any(|text| text.contains("trains on random weights")), "{warnings:?}");
    let folder = small.path("first/final");
    let config = std::fs::read_to_string(folder.join("adapter_config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    assert_eq!(config["base_model_name_or_path"], Value::Null);
    let error = PeftFolder::open(&folder).unwrap().base_folder().unwrap_err().to_string();
    assert!(error.contains("was trained on random weights"), "{error}");
    // A run on other weights does not start from it.
    small.finish("whole", RunDirPolicy::Fresh, &["train.steps=1"]);
    let file = std::fs::read_to_string(small.file("second")).unwrap();
    let path = small.path("second.toml");
    std::fs::write(&path, file.replace("weights = \"random\"\n", "")).unwrap();
    let model = format!("model={}", small.path("whole/final").display());
    let config = Config::load(&path, &[model, format!("adapter.start={}", folder.display())]).unwrap();
    let outcome = spawn::train(&config, RunDirPolicy::Fresh, &mut Silent, &false.into());
    let error = chain(&outcome.unwrap_err());
    assert!(error.contains("was trained on random weights"), "{error}");
}
