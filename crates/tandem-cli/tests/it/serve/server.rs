//! A server that is started for a test, and the little HTTP that it takes to talk with it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::workshop::Workshop;

/// Only a bug waits so long.
const PATIENCE: Duration = Duration::from_secs(120);

/// A running `tandem serve`; it ends with this.
pub struct Server {
    process: Option<Child>,
    address: String,
    key: Option<String>,
    /// Lines that it prints after the first.
    lines: Option<Mutex<Receiver<String>>>,
}

/// A response as it came.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    /// Status line and headers, in lower case.
    pub head: String,
    pub body: String,
}

impl Reply {
    /// Reads all that a connection still gives; `None` if that is nothing.
    pub fn read(mut stream: impl Read) -> Option<Self> {
        let mut bytes = Vec::new();
        // A connection that is reset after the answer has given it.
        let _ = stream.read_to_end(&mut bytes);
        let text = String::from_utf8(bytes).expect("text");
        let (head, body) = text.split_once("\r\n\r\n")?;
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
        Some(Self { status, head: head.to_lowercase(), body: body.to_owned() })
    }

    /// Fails the test unless this is an error in OpenAI's shape, with `status` and `says` in its message.
    #[track_caller]
    pub fn refused(&self, status: u16, says: &str) {
        let body: Value =
            serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"));
        let message = body["error"]["message"].as_str().unwrap_or_else(|| panic!("{self:?}"));
        assert!(self.status == status && message.contains(says), "expected {status} {says:?}: {self:?}");
        assert!(body["error"]["type"].is_string(), "{self:?}");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(process) = &mut self.process {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

impl Server {
    pub fn start(shop: &Workshop, extra: &[&str]) -> Self {
        Self::launch(shop, extra, None)
    }

    pub fn with_key(shop: &Workshop, key: &str) -> Self {
        Self::launch(shop, &["--key-env", "TANDEM_TEST_KEY"], Some(key.to_owned()))
    }

    fn launch(shop: &Workshop, extra: &[&str], key: Option<String>) -> Self {
        let arguments = [&["serve", "model", "--port", "0", "--threads", "1"], extra].concat();
        let mut command = shop.command(&arguments);
        if let Some(key) = &key {
            command.env("TANDEM_TEST_KEY", key);
        }
        let mut process = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("it starts");
        let mut lines = BufReader::new(process.stderr.take().expect("piped")).lines();
        let line = lines.next().expect("it says where it listens").expect("text");
        let address = line.split_once("http://").expect(&line).1.split_once("/v1").expect(&line).0.to_owned();
        // Somebody has to read what it says later.
        let (sender, said) = channel();
        std::thread::spawn(move || lines.map_while(Result::ok).for_each(|line| drop(sender.send(line))));
        Self { process: Some(process), address, key, lines: Some(Mutex::new(said)) }
    }

    /// The same server, asked with another key; it does not end with this.
    pub fn seen_with(&self, key: &str) -> Self {
        Self { process: None, address: self.address.clone(), key: Some(key.to_owned()), lines: None }
    }

    /// A connection without anything sent.
    pub fn connect(&self) -> TcpStream {
        TcpStream::connect(&self.address).expect("it listens")
    }

    /// Returns whether it takes connections.
    pub fn listens(&self) -> bool {
        TcpStream::connect(&self.address).is_ok()
    }

    /// Sends bytes on a connection of their own, and reads all that comes.
    pub fn send_bytes(&self, bytes: &[u8]) -> Option<Reply> {
        let mut stream = self.connect();
        // It may answer, and close, before it has everything.
        let _ = stream.write_all(bytes);
        Reply::read(stream)
    }

    /// Posts text that need not be JSON.
    pub fn post_text(&self, path: &str, body: &str) -> Reply {
        Reply::read(self.send("POST", path, body)).expect("an answer")
    }

    /// Value of a metric, with its labels in the name; 0 if there is none yet.
    pub fn metric(&self, name: &str) -> f64 {
        let reply = Reply::read(self.send("GET", "/metrics", "")).expect("an answer");
        assert_eq!(reply.status, 200, "{reply:?}");
        let mut lines = reply.body.lines().filter_map(|line| line.rsplit_once(' '));
        lines.find(|(found, _)| *found == name).map_or(0.0, |(_, value)| value.parse().expect(name))
    }

    /// Waits until a metric has a value.
    #[track_caller]
    pub fn wait_for_metric(&self, name: &str, value: f64) {
        self.wait_until(name, || self.metric(name) == value);
    }

    #[track_caller]
    pub fn wait_until(&self, what: &str, mut is_so: impl FnMut() -> bool) {
        let start = Instant::now();
        while !is_so() {
            assert!(start.elapsed() < PATIENCE, "{what}: not in two minutes");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Sends it a signal, for example -TERM.
    pub fn signal(&self, name: &str) {
        let id = self.id().to_string();
        assert!(Command::new("kill").args([name, &id]).status().expect("kill runs").success(), "kill {name}");
    }

    pub fn id(&self) -> u32 {
        self.process.as_ref().expect("its own").id()
    }

    /// Waits for a line that it prints.
    #[track_caller]
    pub fn wait_for_line(&self, says: &str) {
        let lines = self.lines.as_ref().expect("its own").lock().unwrap();
        while !lines.recv_timeout(PATIENCE).expect(says).contains(says) {}
    }

    /// Waits for its end.
    pub fn wait(mut self) -> ExitStatus {
        self.process.take().expect("its own").wait().expect("it ends")
    }

    pub fn url(&self) -> String {
        format!("http://{}/v1", self.address)
    }

    pub fn get(&self, path: &str) -> (u16, Value) {
        self.exchange("GET", path, "")
    }

    pub fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        self.exchange("POST", path, &body.to_string())
    }

    fn exchange(&self, method: &str, path: &str, body: &str) -> (u16, Value) {
        let mut answer = String::new();
        self.send(method, path, body).read_to_string(&mut answer).expect("an answer");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
        (status, serde_json::from_str(body).unwrap_or_else(|e| panic!("{body}: {e}")))
    }

    /// The parts of a stream, up to its end.
    pub fn stream(&self, path: &str, body: &Value) -> Vec<Value> {
        let mut parts = Vec::new();
        for line in BufReader::new(self.send("POST", path, &body.to_string())).lines() {
            let line = line.expect("a line");
            match line.strip_prefix("data: ") {
                Some("[DONE]") => return parts,
                Some(part) => {
                    parts.push(serde_json::from_str(part).unwrap_or_else(|e| panic!("{part}: {e}")));
                }
                None => {}
            }
        }
        panic!("the stream broke off after {} parts", parts.len());
    }

    /// Asks, reads the beginning of the answer, and hangs up.
    pub fn leave(&self, path: &str, body: &Value) {
        let mut stream = self.send("POST", path, &body.to_string());
        stream.read_exact(&mut [0; 200]).expect("the beginning of an answer");
    }

    /// Sends a request, and returns the connection that it is answered on.
    pub fn send(&self, method: &str, path: &str, body: &str) -> TcpStream {
        let mut stream = self.connect();
        let key = self.key.as_ref().map_or(String::new(), |key| format!("Authorization: Bearer {key}\r\n"));
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\n{key}Content-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            self.address,
            body.len()
        );
        // It may refuse the request, and close, before it has everything.
        let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body.as_bytes()));
        stream
    }
}
