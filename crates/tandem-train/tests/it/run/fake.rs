//! A server for tests: what servers that answer have in common. How each speaks is in a file of its own.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};

use safetensors::SafeTensors;
use serde_json::{Value, json};

/// A client's request.
#[derive(Clone)]
pub struct Request {
    /// `POST`, or `GET`.
    pub method: String,
    /// Behind the address.
    pub path: String,
    pub authorization: Option<String>,
    pub body: Value,
}

/// The server's reaction to a request.
pub enum Reply {
    /// The usual reply.
    Usual,
    /// The same, with something changed.
    Changed(fn(&mut Value)),
    /// Status and body.
    Http(u16, String),
    /// The request is carried out, but the reply is this one.
    Done(u16, String),
    /// Nothing, until the client gives up.
    Nothing,
}

/// Status and body.
pub type Said = (u16, String);

impl From<Said> for Reply {
    fn from((status, body): Said) -> Self {
        Self::Http(status, body)
    }
}

/// A server that runs as long as the tests.
pub struct Fake {
    pub address: String,
    /// `online.server.kind`.
    pub kind: &'static str,
    seen: Arc<Mutex<Vec<Request>>>,
}

impl Fake {
    /// Checks the order of requests: rounds of 5, 5 and 2 of 12 prompts, twice. A round sends
    /// `before`, its completion requests, and the unload.
    pub fn was_asked_in_rounds(&self, before: &[&str], answers: &str) {
        let paths = self.paths();
        let of_round = |num_prompts| {
            let before = before.iter().copied();
            before.chain(vec![answers; num_prompts]).chain(["unload_lora_adapter"])
        };
        assert!(
            paths.iter().map(String::as_str).eq([5, 5, 2, 5, 5, 2].into_iter().flat_map(of_round)),
            "{paths:?}"
        );
    }

    /// Starts a server at an address that ends in `prefix`. `usual` is its protocol; `how` gets each
    /// request and the number of earlier ones of the same path.
    pub fn start(
        kind: &'static str,
        prefix: &'static str,
        usual: impl Fn(&Request) -> Said + Send + Sync + 'static,
        how: impl Fn(&Request, usize) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}{prefix}", listener.local_addr().unwrap());
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (requests, usual, how) = (Arc::clone(&seen), Arc::new(usual), Arc::new(how));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (requests, usual, how) = (Arc::clone(&requests), Arc::clone(&usual), Arc::clone(&how));
                std::thread::spawn(move || serve(&stream.unwrap(), prefix, &requests, &*usual, &*how));
            }
        });
        Self { address, kind, seen }
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

fn read(stream: &TcpStream, prefix: &str) -> Option<Request> {
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    stream.read_line(&mut line).ok().filter(|length| *length > 0)?;
    let mut words = line.split(' ');
    let method = words.next()?.to_owned();
    let path = words.next()?.strip_prefix(prefix)?.strip_prefix('/')?.to_owned();
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

fn serve(
    mut stream: &TcpStream,
    prefix: &str,
    seen: &Mutex<Vec<Request>>,
    usual: &dyn Fn(&Request) -> Said,
    how: &dyn Fn(&Request, usize) -> Reply,
) {
    let Some(request) = read(stream, prefix) else { return };
    let before = {
        let mut seen = seen.lock().unwrap();
        seen.push(request.clone());
        seen.iter().filter(|other| other.path == request.path).count() - 1
    };
    let (status, body) = match how(&request, before) {
        Reply::Usual => usual(&request),
        Reply::Changed(change) => {
            let (status, body) = usual(&request);
            let mut body = serde_json::from_str(&body).unwrap();
            change(&mut body);
            (status, body.to_string())
        }
        Reply::Http(status, body) => (status, body),
        Reply::Done(status, body) => {
            usual(&request);
            (status, body)
        }
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

/// The list of what it serves.
pub fn models<'a>(loaded: impl Iterator<Item = (&'a String, &'a String)>) -> Said {
    let base = json!({ "id": "base", "object": "model", "root": "/base", "parent": null });
    let card = |(name, path)| json!({ "id": name, "object": "model", "root": path, "parent": "base" });
    let data: Vec<Value> = std::iter::once(base).chain(loaded.map(card)).collect();
    (200, json!({ "object": "list", "data": data }).to_string())
}

/// Checks the parts of an adapter's folder that a server needs.
pub fn check_adapter(folder: &Path) {
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

/// An answer.
pub struct Drawn {
    pub tokens: Vec<u64>,
    pub log_probs: Vec<f64>,
    /// Whether the last token is the end token.
    pub is_ended: bool,
}

/// An answer that depends on the adapter's name, which is its content's, and on the answer's seed.
pub fn draw(name: &str, seed: u64, most: u64, end: u64) -> Drawn {
    let draw = |what: u64| {
        let mut hash = DefaultHasher::new();
        (name, seed, what).hash(&mut hash);
        hash.finish()
    };
    let is_ended = draw(0).is_multiple_of(2);
    let length = if is_ended { 1 + draw(1) % (most - 1) } else { most };
    let mut tokens: Vec<u64> = (0..length).map(|place| 20 + draw(2 + place) % 200).collect();
    let mut log_probs: Vec<f64> = tokens.iter().map(|token| -0.125 * *token as f64).collect();
    if is_ended {
        tokens.push(end);
        log_probs.push(0.0);
    }
    Drawn { tokens, log_probs, is_ended }
}
