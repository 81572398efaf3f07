//! `data.chat_template`: the rows' text, and the saved model's template.

use tandem_train::run::run_dir::RunDirPolicy;

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
