//! Tokenizers and chat templates.

use serde_json::{Value, json};
use tandem_data::chat_template::{ChatTemplate, RenderOptions};
use tandem_data::record::Message;
use tandem_data::tokenizer::Tokenizer;

use crate::tiny;

/// Text of several scripts.
const TEXT: &str = "The cat is 7 years old.\n  Größe 日本 😀 <s> </s>";

fn message(role: &str, content: Value) -> Message {
    [("role".to_owned(), Value::from(role)), ("content".to_owned(), content)].into_iter().collect()
}

/// Reads a `tokenizer.json`, and encodes and decodes with it.
pub(crate) fn tokenizer(bytes: &[u8]) {
    let folder = tiny::tokenizer_folder("tokenizer");
    std::fs::write(folder.join("tokenizer.json"), bytes).expect("a file in a temporary folder");
    let Ok(tokenizer) = Tokenizer::from_folder(&folder) else { return };
    if let Ok(ids) = tokenizer.encode(TEXT) {
        let _ = tokenizer.decode(&ids, true);
    }
    let _ = tokenizer.decode(&[0, 1, 300, u32::MAX], false);
}

/// Compiles a chat template, and renders conversations with it.
pub(crate) fn template(bytes: &[u8]) {
    let Ok(source) = std::str::from_utf8(bytes) else { return };
    let special = [("bos_token", "<s>"), ("eos_token", "</s>")].map(|(a, b)| (a.to_owned(), b.to_owned()));
    let Ok(template) = ChatTemplate::new(vec![("default".to_owned(), source.to_owned())], special.to_vec())
    else {
        return;
    };
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]);
    let messages = [
        message("system", json!("Be brief.")),
        message("user", json!(TEXT)),
        message("assistant", json!("An answer.")),
        message("user", json!([{"type": "text", "text": "And?"}])),
    ];
    let options = RenderOptions { tools: Some(&tools), kwargs: None, add_generation_prompt: true };
    let _ = template.render(&messages, options);
    let _ = template.render_with_turns(&messages[..3], RenderOptions::default(), &["</s>".to_owned()]);
}
