//! The end of a server: requests in progress have a time, new ones none.

use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::net::TcpStream;
use std::os::unix::process::ExitStatusExt;

use serde_json::json;

use super::server::{Reply, Server};
use super::{CHAT, chat};
use crate::workshop::Workshop;

/// A stream that has begun.
fn begin(server: &Server, n: usize) -> Lines<BufReader<TcpStream>> {
    let body = chat(json!({ "stream": true, "max_tokens": 200, "n": n })).to_string();
    let mut lines = BufReader::new(server.send("POST", CHAT, &body)).lines();
    while !lines.next().expect("a part").unwrap().starts_with("data: ") {}
    lines
}

#[test]
fn requests_in_progress_are_answered_to_their_end() {
    for signal in ["-TERM", "-INT"] {
        let shop = Workshop::new();
        let times = ["--max-batch", "1", "--header-timeout", "600", "--drain-timeout", "600"];
        let server = Server::start(&shop, &times);
        let mut idle = server.connect();
        idle.write_all(b"GET /health HTTP/1.1\r\nHost: me\r\n\r\n").unwrap();
        idle.read_exact(&mut [0; 15]).unwrap();
        // A request whose header comes too late.
        let mut late = server.connect();
        late.write_all(b"GET /v1/models HTTP/1.1\r\nHost: me\r\n").unwrap();
        let stream = begin(&server, 32);
        server.signal(signal);
        server.wait_for_line("stopping: 1 in progress may take 600 s more; a second signal ends at once");
        server.wait_until("a closed door", || !server.listens());
        idle.read_to_end(&mut Vec::new()).expect("it is closed");
        late.write_all(b"\r\n").unwrap();
        let reply = Reply::read(late).expect("an answer");
        reply.refused(503, "this server is stopping");
        assert!(reply.head.contains("\r\nretry-after: 1\r\n"), "{reply:?}");
        let last = stream.map_while(Result::ok).filter(|line| line.starts_with("data: ")).last();
        assert_eq!(last.as_deref(), Some("data: [DONE]"));
        assert_eq!(server.wait().code(), Some(0));
    }
}

#[test]
fn requests_that_take_too_long_are_cut_off() {
    let shop = Workshop::new();
    let server = Server::start(&shop, &["--max-batch", "1", "--drain-timeout", "0"]);
    let stream = begin(&server, 128);
    server.signal("-TERM");
    server.wait_for_line("1 requests were cut off (--drain-timeout)");
    let last = stream.map_while(Result::ok).filter(|line| line.starts_with("data: ")).last();
    assert_ne!(last.as_deref(), Some("data: [DONE]"));
    assert_eq!(server.wait().code(), Some(0));
}

#[test]
fn a_second_signal_ends_at_once() {
    let shop = Workshop::new();
    let server = Server::start(&shop, &["--max-batch", "1"]);
    let stream = begin(&server, 128);
    server.signal("-TERM");
    server.wait_for_line("stopping: 1 in progress may take 30 s more");
    server.signal("-TERM");
    assert_eq!(server.wait().signal(), Some(15));
    drop(stream);
}

#[test]
fn an_idle_server_ends_at_once() {
    let shop = Workshop::new();
    // Longer than a test may last.
    let server = Server::start(&shop, &["--drain-timeout", "86400"]);
    let idle = server.connect();
    assert_eq!(server.post(CHAT, &chat(json!({}))).0, 200);
    server.signal("-TERM");
    assert_eq!(server.wait().code(), Some(0));
    drop(idle);
}
