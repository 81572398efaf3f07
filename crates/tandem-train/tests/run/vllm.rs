//! A server for tests that says what vLLM says: its adapters come and go, and its answers are drawn from what it is asked.

use std::collections::BTreeMap;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};

use safetensors::SafeTensors;
use serde_json::{Value, json};

/// What a client sent.
#[derive(Clone)]
pub struct Request {
    /// `POST`, or `GET`.
    pub method: String,
    /// Behind `/v1/`.
    pub path: String,
    pub authorization: Option<String>,
    pub body: Value,
}

/// What it is told.
pub enum Reply {
    /// As vLLM would.
    Usual,
    /// The same, with something changed.
    Changed(fn(&mut Value)),
    /// Status and body.
    Http(u16, String),
    /// Nothing, until the client gives up.
    Nothing,
}

/// A server that runs as long as the tests.
pub struct Vllm {
    pub address: String,
    seen: Arc<Mutex<Vec<Request>>>,
}

impl Vllm {
    /// `how` is given each request and how many came before it with its path.
    pub fn start(how: impl Fn(&Request, usize) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}/v1", listener.local_addr().unwrap());
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (requests, how) = (Arc::clone(&seen), Arc::new(how));
        let loaded = Arc::new(Mutex::new(BTreeMap::new()));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (requests, how, loaded) = (Arc::clone(&requests), Arc::clone(&how), Arc::clone(&loaded));
                std::thread::spawn(move || serve(&stream.unwrap(), &requests, &loaded, &*how));
            }
        });
        Self { address, seen }
    }

    /// Requests to a path, in their order.
    pub fn requests(&self, path: &str) -> Vec<Request> {
        self.seen.lock().unwrap().iter().filter(|request| request.path == path).cloned().collect()
    }

    /// All paths, in the order of the requests.
    pub fn paths(&self) -> Vec<String> {
        self.seen.lock().unwrap().iter().map(|request| request.path.clone()).collect()
    }
}

fn read(stream: &TcpStream) -> Option<Request> {
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    stream.read_line(&mut line).ok().filter(|length| *length > 0)?;
    let mut words = line.split(' ');
    let (method, path) = (words.next()?.to_owned(), words.next()?.strip_prefix("/v1/")?.to_owned());
    let (mut length, mut authorization) = (0, None);
    loop {
        let mut header = String::new();
        stream.read_line(&mut header).ok()?;
        let Some((key, value)) = header.split_once(':') else { break };
        match key.to_lowercase().as_str() {
            "content-length" => length = value.trim().parse().ok()?,
            "authorization" => authorization = Some(value.trim().to_owned()),
            _ => {}
        }
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).ok()?;
    Some(Request { method, path, authorization, body: serde_json::from_slice(&body).unwrap_or_default() })
}

type Loaded = Mutex<BTreeMap<String, String>>;

fn serve(
    mut stream: &TcpStream,
    seen: &Mutex<Vec<Request>>,
    loaded: &Loaded,
    how: &dyn Fn(&Request, usize) -> Reply,
) {
    let Some(request) = read(stream) else { return };
    let before = {
        let mut seen = seen.lock().unwrap();
        seen.push(request.clone());
        seen.iter().filter(|other| other.path == request.path).count() - 1
    };
    let (status, body) = match how(&request, before) {
        Reply::Usual => usual(&request, loaded),
        Reply::Changed(change) => {
            let (status, body) = usual(&request, loaded);
            let mut body = serde_json::from_str(&body).unwrap();
            change(&mut body);
            (status, body.to_string())
        }
        Reply::Http(status, body) => (status, body),
        Reply::Nothing => {
            let _ = stream.read_to_end(&mut Vec::new());
            return;
        }
    };
    let head = format!("HTTP/1.1 {status} X\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
    // The client may have left.
    let _ = stream.write_all((head + &body).as_bytes());
    let _ = stream.shutdown(Shutdown::Write);
}

pub fn error(status: u16, kind: &str, message: &str) -> (u16, String) {
    let error = json!({ "message": message, "type": kind, "param": null, "code": status });
    (status, json!({ "error": error }).to_string())
}

fn usual(request: &Request, loaded: &Loaded) -> (u16, String) {
    let mut loaded = loaded.lock().unwrap();
    let text = |key: &str| request.body[key].as_str().unwrap_or_default().to_owned();
    let name = text("lora_name");
    match (request.method.as_str(), request.path.as_str()) {
        ("GET", "models") => {
            let base = json!({ "id": "base", "object": "model", "root": "/base", "parent": null });
            let card =
                |(name, path)| json!({ "id": name, "object": "model", "root": path, "parent": "base" });
            let data: Vec<Value> = std::iter::once(base).chain(loaded.iter().map(card)).collect();
            (200, json!({ "object": "list", "data": data }).to_string())
        }
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

/// What vLLM needs of an adapter's folder.
fn check_adapter(folder: &Path) {
    let config = fs::read(folder.join("adapter_config.json")).unwrap();
    let config: Value = serde_json::from_slice(&config).unwrap();
    assert_eq!((&config["peft_type"], &config["r"]), (&json!("LORA"), &json!(4)));
    assert!(
        config["use_dora"] != true && config["modules_to_save"].is_null() && config["lora_alpha"].is_number()
    );
    let bytes = fs::read(folder.join("adapter_model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let [a, b] = ["lora_A", "lora_B"].map(|of| {
        let name = format!("base_model.model.model.layers.0.self_attn.q_proj.{of}.weight");
        tensors.tensor(&name).unwrap().shape().to_vec()
    });
    assert_eq!((a[0], b[1]), (4, 4));
}

/// Answers that depend on the model's name, which is its content's, and on the seed.
fn complete(body: &Value) -> String {
    let (n, most) = (body["n"].as_u64().unwrap(), body["max_tokens"].as_u64().unwrap());
    let choice = |index: u64| {
        let draw = |what: u64| {
            let mut hash = DefaultHasher::new();
            (body["model"].as_str(), body["seed"].as_u64(), index, what).hash(&mut hash);
            hash.finish()
        };
        let is_ended = draw(0).is_multiple_of(2);
        let length = if is_ended { 1 + draw(1) % (most - 1) } else { most };
        let mut tokens: Vec<u64> = (0..length).map(|place| 20 + draw(2 + place) % 200).collect();
        let mut log_probs: Vec<f64> = tokens.iter().map(|token| -0.125 * *token as f64).collect();
        if is_ended {
            tokens.push(body["stop_token_ids"][0].as_u64().unwrap());
            log_probs.push(0.0);
        }
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
