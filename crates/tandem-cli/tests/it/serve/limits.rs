//! Limits of what a client sends, holds and waits for.

use std::io::{BufReader, Read, Write};

use serde_json::{Value, json};

use super::server::{Reply, Server};
use super::{CHAT, chat};
use crate::workshop::Workshop;

const TEXT: &str = "/v1/completions";

#[test]
fn a_request_over_a_limit_is_told_which() {
    let shop = Workshop::new();
    let limits = [
        ["--max-prompts", "2"],
        ["--max-n", "3"],
        ["--max-request-tokens", "40"],
        ["--max-prompt-bytes", "100"],
        ["--max-stop-strings", "2"],
        ["--max-stop-bytes", "4"],
        ["--max-body", "4KiB"],
    ];
    let server = Server::start(&shop, &limits.concat());
    let text = |extra: Value| {
        let mut body = json!({ "prompt": "the", "max_tokens": 8 });
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        body.to_string()
    };
    for (extra, flag) in [
        (json!({ "prompt": ["a", "b", "c"] }), "--max-prompts"),
        (json!({ "n": 4 }), "from 1 to 3"),
        (json!({ "n": 3, "prompt": ["a", "b"] }), "are 48 tokens, more than 40 (--max-request-tokens)"),
        (json!({ "max_tokens": 41 }), "--max-request-tokens"),
        (json!({ "max_tokens": null }), "--max-request-tokens"),
        (json!({ "prompt": "x".repeat(101) }), "`prompt` has 101 bytes, more than 100 (--max-prompt-bytes)"),
        (json!({ "prompt": ["a", "x".repeat(101)] }), "--max-prompt-bytes"),
        (json!({ "stop": ["a", "b", "c"] }), "--max-stop-strings"),
        (json!({ "stop": "abcde" }), "has 5 bytes, expected 1 to 4 (--max-stop-bytes)"),
        (json!({ "stop": ["a", ""] }), "string 1 of `stop` has 0 bytes"),
    ] {
        server.post_text(TEXT, &text(extra)).refused(400, flag);
    }
    let long =
        json!([{ "role": "user", "content": "x".repeat(60) }, { "role": "user", "content": "x".repeat(60) }]);
    server.post_text(CHAT, &chat(json!({ "messages": long })).to_string()).refused(400, "--max-prompt-bytes");
    // The template adds to what was sent.
    let long = json!([{ "role": "user", "content": "x".repeat(90) }]);
    server.post_text(CHAT, &chat(json!({ "messages": long })).to_string()).refused(400, "--max-prompt-bytes");
    server
        .post_text(TEXT, &text(json!({ "user": "x".repeat(5000) })))
        .refused(413, "4096 bytes (--max-body)");
    let fits = json!({ "prompt": ["a", "b"], "n": 2, "stop": ["abcd", "b"] });
    assert_eq!(server.post_text(TEXT, &text(fits)).status, 200);
}

#[test]
fn a_body_is_too_large_however_it_is_announced() {
    let shop = Workshop::new();
    let server = Server::start(&shop, &["--max-body", "64KiB"]);
    let head = "POST /v1/completions HTTP/1.1\r\nHost: me\r\nConnection: close\r\n";
    for length in ["65537", "9223372036854775807"] {
        // By its header alone.
        let reply = server.send_bytes(format!("{head}Content-Length: {length}\r\n\r\n").as_bytes());
        reply.expect("an answer").refused(413, "--max-body");
    }
    let chunk = format!("{:x}\r\n{}\r\n", 10_000, " ".repeat(10_000));
    let chunked = format!("{head}Transfer-Encoding: chunked\r\n\r\n{}0\r\n\r\n", chunk.repeat(400));
    server.send_bytes(chunked.as_bytes()).expect("an answer").refused(413, "--max-body");
    assert_eq!(server.metric("tandem_rejected_total{reason=\"large_body\"}"), 3.0);
    assert_eq!(server.metric("tandem_body_bytes"), 0.0);
}

#[test]
fn whoever_is_slow_is_told_so_or_let_go() {
    let shop = Workshop::new();
    let server =
        Server::start(&shop, &["--header-timeout", "1", "--body-timeout", "1", "--idle-timeout", "1"]);
    let begin = |bytes: &str| {
        let mut stream = server.connect();
        stream.write_all(bytes.as_bytes()).unwrap();
        stream
    };
    let silent = server.connect();
    let header = begin("GET /health HTTP/1.1\r\nHost:");
    let body = begin("POST /v1/completions HTTP/1.1\r\nHost: me\r\nContent-Length: 100\r\n\r\n{\"prompt\"");
    let mut idle = begin("GET /health HTTP/1.1\r\nHost: me\r\n\r\n");
    Reply::read(silent).expect("an answer").refused(408, "more than 1 s (--header-timeout)");
    Reply::read(header).expect("an answer").refused(408, "more than 1 s (--header-timeout)");
    Reply::read(body).expect("an answer").refused(408, "more than 1 s (--body-timeout)");
    // It was answered, and closed without another word.
    let mut text = String::new();
    idle.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n") && text.ends_with("\r\n\r\nok"), "{text}");
    // Half a second header after a request has its own time.
    let again = begin("GET /health HTTP/1.1\r\nHost: me\r\n\r\nGET /hea");
    let mut text = String::new();
    BufReader::new(again).read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
    server.wait_for_metric("tandem_connections", 1.0);
    assert_eq!(server.metric("tandem_rejected_total{reason=\"slow_header\"}"), 2.0);
}

/// Nothing of the rest is generated, and nothing of it is kept.
#[test]
fn a_stream_that_nobody_reads_is_let_go() {
    let shop = Workshop::new();
    let limits = ["--idle-timeout", "1", "--max-batch", "64", "--max-request-tokens", "200000"];
    let server = Server::start(&shop, &limits);
    // More text than what waits for a client within the system and the server.
    let prompts = ["the", "quick", "brown", "fox", "jumps", "over"];
    let long = json!({ "prompt": prompts, "stream": true, "max_tokens": 200, "n": 128, "logprobs": 1 });
    let unread = server.send("POST", TEXT, &long.to_string());
    server.wait_for_metric("tandem_requests_running", 1.0);
    server.wait_for_metric("tandem_requests_running", 0.0);
    let tokens = server.metric("tandem_completion_tokens_total");
    assert!(tokens < 153_600.0, "all were generated: {tokens}");
    drop(unread);
    assert_eq!(server.post(CHAT, &chat(json!({}))).0, 200);
}

#[test]
fn a_full_server_says_so() {
    let shop = Workshop::new();
    let server = Server::start(&shop, &["--max-connections", "2"]);
    let hold = || {
        let mut stream = server.connect();
        stream.write_all(b"GET /health HTTP/1.1\r\nHost: me\r\n\r\n").unwrap();
        stream.read_exact(&mut [0; 15]).unwrap();
        stream
    };
    let held = [hold(), hold()];
    let reply = Reply::read(server.send("GET", "/health", "")).expect("an answer");
    reply.refused(429, "2 connections are open (--max-connections)");
    assert!(reply.head.contains("\r\nretry-after: 1\r\n"), "{reply:?}");
    drop(held);
    let is_free = || Reply::read(server.send("GET", "/health", "")).is_some_and(|reply| reply.status == 200);
    server.wait_until("a free place", is_free);
    let outcome = shop.run(&["serve", "model", "--max-connections", "4000000000"]).expect(2);
    assert!(
        outcome.stderr.contains("--max-connections 4000000000 needs 4000000128 open files"),
        "{}",
        outcome.stderr
    );
}

#[test]
fn a_full_queue_says_so() {
    let shop = Workshop::new();
    let server = Server::start(&shop, &["--max-batch", "1", "--max-queue", "1"]);
    let long = chat(json!({ "stream": true, "max_tokens": 240, "n": 128 })).to_string();
    // Each waits for a completion of all before it, so that not all can have begun.
    let streams: Vec<_> = (0..32).map(|_| server.send("POST", CHAT, &long)).collect();
    let mut num_refused = 0;
    for mut stream in streams {
        let mut beginning = [0; 12];
        stream.read_exact(&mut beginning).unwrap();
        if &beginning == b"HTTP/1.1 200" {
            continue;
        }
        num_refused += 1;
        let reply = Reply::read((&beginning[..]).chain(stream)).expect("an answer");
        reply.refused(429, "1 requests wait already (--max-queue)");
        assert!(reply.head.contains("\r\nretry-after: 1\r\n"), "{reply:?}");
    }
    assert!(num_refused > 0);
    assert_eq!(server.metric("tandem_rejected_total{reason=\"queue\"}"), f64::from(num_refused));
    server.wait_for_metric("tandem_requests_queued", 0.0);
    server.wait_for_metric("tandem_requests_running", 0.0);
    assert_eq!(server.post(CHAT, &chat(json!({}))).0, 200);
}
