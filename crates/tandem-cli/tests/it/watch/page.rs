//! A `tandem watch` that is started for a test, and the HTTP that it takes to read it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::workshop::Workshop;

/// A running `tandem watch`; it ends with this.
pub struct Watch {
    process: Child,
    address: String,
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Watch {
    pub fn start(shop: &Workshop, runs: &[&str]) -> Self {
        let mut command = shop.command(&[&["watch", "--port", "0"], runs].concat());
        let mut process = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("it starts");
        let mut lines = BufReader::new(process.stderr.take().expect("piped")).lines();
        let line = lines.next().expect("it says where it listens").expect("text");
        let address = line.split_once("http://").expect(&line).1.split_once(';').expect(&line).0.to_owned();
        let ssh = lines.next().expect("it says how to forward it").expect("text");
        assert!(ssh.contains(&format!(":{address} ")) && ssh.contains("ssh -L"), "{ssh}");
        // Somebody has to read what it says later.
        std::thread::spawn(move || lines.for_each(drop));
        Self { process, address }
    }

    pub fn address(&self) -> &str {
        &self.address
    }

    /// Status, head and body of a page asked for under a host name.
    pub fn get(&self, path: &str, host: &str) -> (u16, String, String) {
        self.send("GET", path, host)
    }

    pub fn send(&self, method: &str, path: &str, host: &str) -> (u16, String, String) {
        let mut answer = String::new();
        self.ask(method, path, host).read_to_string(&mut answer).expect("an answer");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
        (status, head.to_ascii_lowercase(), body.to_owned())
    }

    pub fn events(&self) -> Events {
        Events(BufReader::new(self.ask("GET", "/events", &self.address)))
    }

    fn ask(&self, method: &str, path: &str, host: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).expect("it listens");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a socket");
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).expect("it takes it");
        stream
    }
}

/// Updates of a page as they come.
pub struct Events(BufReader<TcpStream>);

impl Events {
    pub fn next(&mut self) -> Value {
        let mut line = String::new();
        loop {
            line.clear();
            assert_ne!(self.0.read_line(&mut line).expect("a line in time"), 0, "the stream has ended");
            // Chunks of HTTP stand between the lines.
            if let Some(update) = line.strip_prefix("data: ") {
                return serde_json::from_str(update.trim_end()).unwrap_or_else(|e| panic!("{line}: {e}"));
            }
        }
    }

    /// The first update that is as wanted.
    pub fn until(&mut self, is_wanted: impl Fn(&Value) -> bool) -> Value {
        loop {
            let update = self.next();
            if is_wanted(&update) {
                return update;
            }
        }
    }
}
