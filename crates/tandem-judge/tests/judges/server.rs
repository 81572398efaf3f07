//! Chat endpoint for tests: minimal HTTP/1.1, one connection per request.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

/// A client's request.
#[derive(Clone)]
pub struct Request {
    /// `POST /v1/chat/completions`.
    pub line: String,
    /// In lower case.
    pub headers: Vec<(String, String)>,
    pub body: Value,
}

/// Reply to a client.
pub enum Answer {
    /// A model's text.
    Says(&'static str),
    /// Status, further headers, and body.
    Http(u16, &'static str, String),
    /// No reply, until the client gives up.
    Nothing,
}

/// Server that runs as long as the tests.
pub struct Server {
    pub base_url: String,
    requests: Arc<Mutex<Vec<Request>>>,
}

impl Request {
    /// Returns the text that the model receives.
    pub fn text(&self) -> &str {
        self.body["messages"][0]["content"].as_str().unwrap()
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    fn read(stream: &TcpStream) -> Option<Self> {
        let mut stream = BufReader::new(stream);
        let mut line = String::new();
        stream.read_line(&mut line).ok().filter(|length| *length > 0)?;
        let mut headers = Vec::new();
        loop {
            let mut header = String::new();
            stream.read_line(&mut header).ok()?;
            let Some((key, value)) = header.split_once(':') else { break };
            headers.push((key.to_lowercase(), value.trim().to_owned()));
        }
        let mut request = Self { line: line.trim().to_owned(), headers, body: Value::Null };
        let mut body = vec![0; request.header("content-length")?.parse().ok()?];
        stream.read_exact(&mut body).ok()?;
        request.body = serde_json::from_slice(&body).ok()?;
        Some(request)
    }
}

impl Server {
    /// Starts a server; `answer` receives each request and the number of earlier ones.
    pub fn start(answer: impl Fn(&Request, usize) -> Answer + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let base_url = format!("http://{}/v1", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (seen, answer) = (Arc::clone(&requests), Arc::new(answer));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (seen, answer) = (Arc::clone(&seen), Arc::clone(&answer));
                std::thread::spawn(move || serve(&stream.unwrap(), &seen, &*answer));
            }
        });
        Self { base_url, requests }
    }

    pub fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }
}

fn serve(mut stream: &TcpStream, seen: &Mutex<Vec<Request>>, answer: &dyn Fn(&Request, usize) -> Answer) {
    let Some(request) = Request::read(stream) else { return };
    let before = {
        let mut seen = seen.lock().unwrap();
        seen.push(request.clone());
        seen.len() - 1
    };
    let (status, headers, body) = match answer(&request, before) {
        Answer::Says(text) => (
            200,
            "",
            json!({ "choices": [{ "message": { "role": "assistant", "content": text } }] }).to_string(),
        ),
        Answer::Http(status, headers, body) => (status, headers, body),
        Answer::Nothing => {
            let _ = stream.read_to_end(&mut Vec::new());
            return;
        }
    };
    let length = body.len();
    let reply = format!(
        "HTTP/1.1 {status} X\r\nContent-Length: {length}\r\nConnection: close\r\n{headers}\r\n{body}"
    );
    // The client may have left.
    let _ = stream.write_all(reply.as_bytes());
    let _ = stream.shutdown(Shutdown::Write);
}
