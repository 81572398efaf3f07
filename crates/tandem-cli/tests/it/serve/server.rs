//! A server that is started for a test, and the little HTTP that it takes to talk with it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};

use serde_json::Value;

use crate::workshop::Workshop;

/// A running `tandem serve`; it ends with this.
pub struct Server {
    process: Option<Child>,
    address: String,
    key: Option<String>,
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
        std::thread::spawn(move || lines.for_each(drop));
        Self { process: Some(process), address, key }
    }

    /// The same server, asked with another key; it does not end with this.
    pub fn seen_with(&self, key: &str) -> Self {
        Self { process: None, address: self.address.clone(), key: Some(key.to_owned()) }
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

    fn send(&self, method: &str, path: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).expect("it listens");
        let key = self.key.as_ref().map_or(String::new(), |key| format!("Authorization: Bearer {key}\r\n"));
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\n{key}Content-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            self.address,
            body.len()
        );
        stream
            .write_all(head.as_bytes())
            .and_then(|()| stream.write_all(body.as_bytes()))
            .expect("it takes it");
        stream
    }
}
