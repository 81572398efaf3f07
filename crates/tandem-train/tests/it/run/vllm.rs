//! A server for tests that says what vLLM says: its adapters come and go.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;

use serde_json::{Value, json};

use super::fake::{Drawn, Fake, Reply, Request, Said, check_adapter, draw, models};

/// Says what vLLM says, but for `how`.
pub fn start(how: impl Fn(&Request, usize) -> Reply + Send + Sync + 'static) -> Fake {
    let loaded = Mutex::new(BTreeMap::new());
    Fake::start("vllm", "/v1", move |request| usual(request, &loaded), how)
}

pub fn error(status: u16, kind: &str, message: &str) -> Said {
    let error = json!({ "message": message, "type": kind, "param": null, "code": status });
    (status, json!({ "error": error }).to_string())
}

fn usual(request: &Request, loaded: &Mutex<BTreeMap<String, String>>) -> Said {
    let mut loaded = loaded.lock().unwrap();
    let text = |key: &str| request.body[key].as_str().unwrap_or_default().to_owned();
    let name = text("lora_name");
    match (request.method.as_str(), request.path.as_str()) {
        ("GET", "models") => models(loaded.iter()),
        ("POST", "load_lora_adapter") if loaded.contains_key(&name) => {
            let message = format!("The lora adapter '{name}' has already been loaded.");
            error(400, "InvalidUserInput", &message)
        }
        ("POST", "load_lora_adapter") => {
            check_adapter(Path::new(&text("lora_path")));
            loaded.insert(name.clone(), text("lora_path"));
            (200, format!("Success: LoRA adapter '{name}' added successfully."))
        }
        ("POST", "unload_lora_adapter") => match loaded.remove(&name) {
            Some(_) => (200, format!("Success: LoRA adapter '{name}' removed successfully.")),
            None => error(404, "NotFoundError", &format!("The lora adapter '{name}' cannot be found.")),
        },
        ("POST", "completions") if loaded.contains_key(&text("model")) => (200, complete(&request.body)),
        ("POST", "completions") => {
            error(404, "NotFoundError", &format!("The model `{}` does not exist.", text("model")))
        }
        _ => (404, json!({ "detail": "Not Found" }).to_string()),
    }
}

fn complete(body: &Value) -> String {
    let number = |value: &Value| value.as_u64().unwrap();
    let [n, most, seed, end] =
        [&body["n"], &body["max_tokens"], &body["seed"], &body["stop_token_ids"][0]].map(number);
    let choice = |index: u64| {
        let Drawn { tokens, log_probs, is_ended } =
            draw(body["model"].as_str().unwrap(), seed + index, most, end);
        json!({
            "index": index,
            "text": "not looked at",
            "logprobs": {
                "text_offset": [], "tokens": [], "top_logprobs": [], "token_logprobs": log_probs,
            },
            "finish_reason": if is_ended { "stop" } else { "length" },
            "stop_reason": null,
            "prompt_logprobs": null,
            "prompt_token_ids": body["prompt"],
            "token_ids": tokens,
        })
    };
    // Not in their order, which nothing promises.
    let choices: Vec<Value> = (0..n).rev().map(choice).collect();
    let usage = json!({ "prompt_tokens": 1, "total_tokens": 2, "completion_tokens": 1 });
    json!({
        "id": "cmpl-1", "object": "text_completion", "created": 0, "model": body["model"], "choices": choices, "usage": usage,
    })
    .to_string()
}
