//! A server for tests that says what SGLang says: it answers in tokens, and remembers the adapters that it had.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Mutex;

use serde_json::{Value, json};

use super::fake::{Drawn, Fake, Reply, Request, Said, check_adapter, draw, models};

/// Adapters by name, with their paths.
#[derive(Default)]
struct Adapters {
    loaded: BTreeSet<String>,
    /// All that were ever loaded.
    known: BTreeMap<String, String>,
}

/// Says what SGLang says, but for `how`.
pub fn start(how: impl Fn(&Request, usize) -> Reply + Send + Sync + 'static) -> Fake {
    let adapters = Mutex::new(Adapters::default());
    Fake::start("sglang", "", move |request| usual(request, &mut adapters.lock().unwrap()), how)
}

pub fn error(message: &str) -> Said {
    (400, json!({ "error": { "message": message } }).to_string())
}

fn usual(request: &Request, adapters: &mut Adapters) -> Said {
    let text = |key: &str| request.body[key].as_str().unwrap_or_default().to_owned();
    let name = text("lora_name");
    match (request.method.as_str(), request.path.as_str()) {
        ("GET", "v1/models") => {
            models(adapters.known.iter().filter(|(name, _)| adapters.loaded.contains(*name)))
        }
        ("POST", "load_lora_adapter") => adapters.load(&name, &text("lora_path")),
        ("POST", "unload_lora_adapter") => adapters.unload(&name),
        ("POST", "generate") => adapters.generate(&request.body),
        _ => (404, json!({ "detail": "Not Found" }).to_string()),
    }
}

impl Adapters {
    fn load(&mut self, name: &str, path: &str) -> Said {
        if self.loaded.contains(name) {
            let message = format!("Failed to load LoRA adapter {name} because it is already loaded");
            return self.updated(Some(message));
        }
        if !Path::new(path).exists() {
            return self.updated(Some(format!("{path} is not there")));
        }
        check_adapter(Path::new(path));
        self.loaded.insert(name.to_owned());
        self.known.insert(name.to_owned(), path.to_owned());
        self.updated(None)
    }

    fn unload(&mut self, name: &str) -> Said {
        let is_there = self.loaded.remove(name);
        self.updated((!is_there).then(|| format!("LoRA with name {name} does not exist. Loaded LoRAs: []")))
    }

    fn updated(&self, error: Option<String>) -> Said {
        let loaded: BTreeMap<_, _> =
            self.known.iter().filter(|(name, _)| self.loaded.contains(*name)).collect();
        let body = json!({
            "rid": null, "success": error.is_none(), "error_message": error, "loaded_adapters": loaded,
        });
        (if error.is_none() { 200 } else { 400 }, body.to_string())
    }

    fn generate(&mut self, body: &Value) -> Said {
        let name = body["lora_path"].as_str().unwrap_or_default();
        if !self.loaded.contains(name) {
            let Some(path) = self.known.get(name).cloned() else {
                return error(&format!(
                    "Got LoRA adapter that has never been loaded: {name}\nAll loaded adapters: []."
                ));
            };
            // One that it had it loads again.
            let (status, _) = self.load(name, &path);
            if status != 200 {
                return error(&format!("Failed to implicitly load LoRA adapter {name}"));
            }
        }
        let (prompts, params) =
            (body["input_ids"].as_array().unwrap(), body["sampling_params"].as_array().unwrap());
        assert_eq!(prompts.len(), params.len());
        let outputs: Vec<Value> =
            prompts.iter().zip(params).map(|(prompt, params)| output(name, prompt, params)).collect();
        (200, Value::from(outputs).to_string())
    }
}

fn output(name: &str, prompt: &Value, params: &Value) -> Value {
    let number = |value: &Value| value.as_u64().unwrap();
    let [most, seed, end] =
        [&params["max_new_tokens"], &params["sampling_seed"], &params["stop_token_ids"][0]].map(number);
    let Drawn { tokens, log_probs, is_ended } = draw(name, seed, most, end);
    let entries: Vec<Value> =
        log_probs.iter().zip(&tokens).map(|(log_prob, token)| json!([log_prob, token, null])).collect();
    let finish = match is_ended {
        true => json!({ "type": "stop", "matched": end }),
        false => json!({ "type": "length", "length": most }),
    };
    json!({
        "text": "not looked at",
        "output_ids": tokens,
        "prompt_token_ids": prompt,
        "meta_info": {
            "id": "1", "finish_reason": finish, "prompt_tokens": prompt.as_array().unwrap().len(), "weight_version": "default",
            "completion_tokens": tokens.len(), "cached_tokens": 0, "output_token_logprobs": entries,
            "output_token_logprobs_length": tokens.len(),
        },
    })
}
