//! Messages that follow a turn which a model sampled: the tokens between its turns are those of the whole conversation.

use std::path::PathBuf;

use serde_json::{Value, json};
use tandem_data::chat_template::RenderOptions;
use tandem_data::error::Place;
use tandem_data::prompts::PromptRow;
use tandem_data::record::Message;
use tandem_data::tokenizer::Tokenizer;

use crate::fixture::{message_of, tokenizer_with};

/// The second one writes blanks around contents, trims them, and has the end token after the last turn alone.
const TEMPLATES: [&str; 2] = [
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}\n{% endfor %}\
     {% if add_generation_prompt %}<|assistant|>{% endif %}",
    "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content | trim }} {{ eos_token }}{% else %}[{{ m.role }}] \
     {{ m.content | trim }} [/]{% endif %}{% endfor %}",
];

fn row(prompt: &Value) -> PromptRow {
    let place = Place { path: PathBuf::from("rows"), line: 1 };
    PromptRow::parse(json!({ "prompt": prompt, "answer": 3 }).to_string().as_bytes(), place).unwrap()
}

fn messages(messages: &Value) -> Vec<Message> {
    messages.as_array().unwrap().iter().map(message_of).collect()
}

fn with(template: &str) -> (tempfile::TempDir, Tokenizer) {
    let (folder, tokenizer) = tokenizer_with(false, None);
    (folder, tokenizer.with_chat_template(template).unwrap())
}

#[test]
fn the_text_between_turns_is_the_templates() {
    let prompt = json!([{"role": "system", "content": "Play."}, {"role": "user", "content": "Guess."}]);
    let so_far = messages(&json!([
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "five"},
    ]));
    let reply =
        messages(&json!([{"role": "user", "content": "less"}, {"role": "user", "content": "please"}]));
    for template in TEMPLATES {
        let (_folder, tokenizer) = with(template);
        let end = tokenizer.id(tokenizer.eos_token().unwrap()).unwrap();
        let whole = [messages(&prompt), so_far.clone(), reply.clone()].concat();
        let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
        let text = tokenizer.chat_template().unwrap().render(&whole, options).unwrap();
        let (_, between) = text.rsplit_once("five").unwrap();
        let sampled = tokenizer.encode_rendered("five").unwrap();
        let tokens =
            |sampled: &[u32]| row(&prompt).reply_tokens(&tokenizer, &so_far, sampled, &reply).unwrap();
        // A turn that the limit cut: the end token is the template's.
        assert_eq!(tokens(&sampled), tokenizer.encode_rendered(between).unwrap(), "{template}");
        assert!(tokens(&sampled).contains(&end));
        // One that the model ended: it comes once.
        let ended = tokens(&[sampled.clone(), vec![end]].concat());
        let rest = between.trim_start().strip_prefix(tokenizer.eos_token().unwrap()).unwrap();
        assert_eq!(tokenizer.decode(&ended, false).unwrap(), rest, "{template}");
    }
}

#[test]
fn contents_are_appended_to_a_text() {
    let (_folder, tokenizer) = tokenizer_with(true, None);
    let reply = messages(&json!([{"role": "user", "content": "a hint\n"}, {"role": "tool", "content": "b"}]));
    let so_far = messages(&json!([{"role": "assistant", "content": "x"}]));
    let found = row(&json!("Guess: ")).reply_tokens(&tokenizer, &so_far, &[7], &reply).unwrap();
    assert_eq!(found, tokenizer.encode_rendered("a hint\nb").unwrap());
}

#[test]
fn a_template_that_changes_earlier_turns_is_refused() {
    let prompt = json!([{"role": "user", "content": "Guess."}]);
    let so_far = messages(&json!([{"role": "assistant", "content": "<t>why</t>five"}]));
    let reply = messages(&json!([{"role": "user", "content": "less"}]));
    let last = "{{ m.content if loop.last else m.content.split('</t>')[-1] }}";
    for (content, expected) in [
        (last, "changes earlier turns"),
        ("{{ m.content.split('</t>')[-1] }}", "changes the text of the assistant's last turn"),
        ("{{ m.role }}", "does not write"),
    ] {
        let (_folder, tokenizer) =
            with(&format!("{{% for m in messages %}}[{{{{ m.role }}}}]{content}{{% endfor %}}"));
        let error = row(&prompt).reply_tokens(&tokenizer, &so_far, &[7], &reply).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains("data.chat_template"), "{error}");
    }
}
