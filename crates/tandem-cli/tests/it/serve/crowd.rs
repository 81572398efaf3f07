//! Clients that misbehave in many ways at once, next to others that get their answers.

use std::fs::read_dir;
use std::io::{Read, Write};
use std::net::Shutdown;

use serde_json::json;

use super::server::Server;
use super::{CHAT, chat};
use crate::workshop::Workshop;

/// Number of clients that misbehave, some in each way.
const CROWD: usize = 60;
/// Threads for work that blocks stay for a while.
const SPARE_THREADS: usize = 4;

/// One client misbehaves in its way, and leaves.
fn misbehave(server: &Server, way: usize) {
    let head = "POST /v1/chat/completions HTTP/1.1\r\nHost: me\r\n";
    let mut stream = server.connect();
    let mut send = |bytes: &[u8]| drop(stream.write_all(bytes));
    let long = chat(json!({ "stream": true, "n": 128, "max_tokens": 200, "logprobs": true })).to_string();
    let ask = |body: &str| format!("{head}Content-Length: {}\r\n\r\n{body}", body.len());
    match way % 12 {
        // Slow header, slow body, nothing at all: until it is let go.
        0 => send(head.as_bytes()),
        1 => send(format!("{head}Content-Length: 100\r\n\r\n{{\"messages\"").as_bytes()),
        2 => {}
        3 => send(&[0x80; 5000]),
        4 => send(ask(&format!("{{\"stop\": {}", "[".repeat(100_000))).as_bytes()),
        5 => send(format!("{head}Content-Length: 99999999999\r\n\r\n").as_bytes()),
        6 => send(ask(&chat(json!({ "n": 1_000_000_000u64 })).to_string()).as_bytes()),
        7 => {
            let messages = json!([{ "role": "user", "content": "the ".repeat(500_000) }]);
            send(ask(&chat(json!({ "messages": messages })).to_string()).as_bytes());
        }
        8 => send(ask(&chat(json!({ "temperature": [] })).to_string()).as_bytes()),
        // Leaves after the beginning of its answer.
        9 => {
            send(ask(&long).as_bytes());
            let _ = stream.read(&mut [0; 100]);
            return;
        }
        // Leaves at once.
        10 => return send(ask(&long).as_bytes()),
        // Sends its request and says that it sends no more.
        _ => {
            send(ask(&long).as_bytes());
            let _ = stream.shutdown(Shutdown::Write);
        }
    }
    let _ = stream.read_to_end(&mut Vec::new());
}

fn count(server: &Server, folder: &str) -> usize {
    read_dir(format!("/proc/{}/{folder}", server.id())).expect("it runs").count()
}

#[test]
fn a_crowd_that_misbehaves_spoils_no_answer() {
    let shop = Workshop::new();
    let server =
        Server::start(&shop, &["--header-timeout", "1", "--body-timeout", "1", "--idle-timeout", "1"]);
    let ask = |seed: usize| server.post(CHAT, &chat(json!({ "seed": seed })));
    let expected: Vec<_> = (0..4).map(|seed| ask(seed).1["choices"].clone()).collect();
    server.wait_for_metric("tandem_connections", 1.0);
    let [files, threads] = ["fd", "task"].map(|folder| count(&server, folder));
    std::thread::scope(|scope| {
        let server = &server;
        let bad: Vec<_> = (0..CROWD).map(|way| scope.spawn(move || misbehave(server, way))).collect();
        for (seed, expected) in expected.iter().enumerate().cycle().take(40) {
            let (status, answer) = ask(seed);
            assert_eq!((status, &answer["choices"]), (200, expected), "{answer}");
        }
        bad.into_iter().for_each(|client| client.join().unwrap());
    });
    server.wait_for_metric("tandem_connections", 1.0);
    for name in ["tandem_requests_queued", "tandem_requests_running", "tandem_body_bytes"] {
        server.wait_for_metric(name, 0.0);
    }
    server.wait_until("the descriptors from before", || count(&server, "fd") <= files);
    let now = count(&server, "task");
    assert!(now <= threads + SPARE_THREADS, "{threads} threads before, {now} after");
    assert_eq!(ask(0).1["choices"], expected[0]);
}
