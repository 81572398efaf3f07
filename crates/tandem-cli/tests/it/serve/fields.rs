//! Fields that no client of good will sends. Each is refused with the field's name, and the server stays as it was.

use serde_json::{Value, json};

use super::server::{Reply, Server};
use super::{CHAT, chat};
use crate::workshop::Workshop;

const TEXT: &str = "/v1/completions";

/// Values that are wrong for most fields.
fn odd() -> Vec<Value> {
    let numbers = [json!(-1), json!(1e308), json!(-1e308), json!(u64::MAX), json!(i64::MIN), json!(0.5)];
    let others = [json!(""), json!("1"), json!([]), json!([1]), json!({}), json!({ "a": 1 }), json!(true)];
    numbers.into_iter().chain(others).collect()
}

/// Fails the test unless a field with any of the odd values, but those in `fine`, is refused by its name.
#[track_caller]
fn only(server: &Server, field: &str, fine: &[Value]) {
    for value in odd() {
        let reply = server.post_text(CHAT, &chat(json!({ field: value })).to_string());
        if fine.contains(&value) {
            assert_eq!(reply.status, 200, "{field} = {value}: {reply:?}");
        } else {
            reply.refused(if field == "model" && value.is_string() { 404 } else { 400 }, "");
            let error: Value = serde_json::from_str(&reply.body).unwrap();
            assert_eq!(error["error"]["param"], field, "{field} = {value}: {reply:?}");
        }
    }
}

#[test]
fn every_field_of_a_wrong_type_or_range_is_named() {
    let shop = Workshop::new();
    let server = Server::start(&shop, &[]);
    only(&server, "model", &[]);
    only(&server, "n", &[]);
    only(&server, "temperature", &[json!(0.5)]);
    only(&server, "top_p", &[json!(0.5)]);
    only(&server, "min_p", &[json!(0.5)]);
    only(&server, "top_k", &[]);
    only(&server, "repetition_penalty", &[json!(0.5)]);
    only(&server, "seed", &[json!(-1), json!(u64::MAX), json!(i64::MIN)]);
    only(&server, "stop", &[json!([]), json!("1")]);
    only(&server, "stream", &[json!(true)]);
    only(&server, "logprobs", &[json!(true)]);
    only(&server, "messages", &[]);
    only(&server, "logit_bias", &[json!({})]);
    only(&server, "top_logprobs", &[]);
    only(&server, "frequency_penalty", &[]);
    only(&server, "response_format", &[]);
    only(&server, "tools", &[json!([])]);
    only(&server, "chat_template_kwargs", &[]);
    only(&server, "prompt", &[]);
    only(&server, "", &[]);
    let both = chat(json!({ "max_tokens": 8, "max_completion_tokens": 9 })).to_string();
    server.post_text(CHAT, &both).refused(400, "`max_tokens` is 8, but `max_completion_tokens` is 9");
    assert_eq!(server.post(CHAT, &chat(json!({ "max_completion_tokens": 8 }))).0, 200);
}

#[test]
fn messages_that_are_none_are_refused() {
    let shop = Workshop::new();
    let server = Server::start(&shop, &[]);
    for (message, says) in [
        (json!(null), "message 1 is null, expected an object"),
        (json!("hello"), "message 1 is \"hello\""),
        (json!({ "content": "x" }), "message 1 has no `role`"),
        (json!({ "role": 5, "content": "x" }), "message 1 has the role 5, expected one of system"),
        (json!({ "role": "root", "content": "x" }), "message 1 has the role \"root\""),
        (json!({ "role": "user", "content": null }), "message 1 has no text"),
        (json!({ "role": "user", "content": 5 }), "message 1 has no text"),
        (json!({ "role": "user", "content": [] }), "message 1 has no text"),
        (json!({ "role": "user", "content": ["x"] }), "message 1 has no text"),
        (
            json!({ "role": "user", "content": [{ "type": "image_url", "text": "x" }] }),
            "message 1 has no text",
        ),
        (json!({ "role": "user", "content": "x", "tool_calls": [1] }), "has a field \"tool_calls\""),
        (json!({ "role": "user", "content": "x", "name": 5 }), "has a field \"name\""),
    ] {
        let messages = json!([{ "role": "user", "content": "the" }, message]);
        server.post_text(CHAT, &chat(json!({ "messages": messages })).to_string()).refused(400, says);
    }
    // As OpenAI's client sends back what it was given.
    let own = json!({ "role": "assistant", "content": "fox", "refusal": null, "annotations": [], "tool_calls": null });
    let parts = json!({ "role": "user", "name": "me", "content": [{ "type": "text", "text": "the" }] });
    assert_eq!(server.post(CHAT, &chat(json!({ "messages": [parts, own] }))).0, 200);
}

#[test]
fn prompts_that_are_none_are_refused() {
    let shop = Workshop::new();
    let server = Server::start(&shop, &[]);
    let ask = |prompt: &str| server.post_text(TEXT, &format!("{{\"max_tokens\": 2, \"prompt\": {prompt}}}"));
    for (prompt, says) in [
        ("null", "`prompt` is missing"),
        ("[]", "the list is empty"),
        ("[[]]", "an empty list"),
        ("5", "expected text, token ids"),
        ("[1, \"a\"]", "either token ids or prompts"),
        ("[300]", "token 300 is outside the model's vocabulary of 300"),
        ("[4294967295]", "token 4294967295 is outside"),
        ("[[1], [300]]", "token 300 is outside"),
        ("[99999999999]", "99999999999 is no token id"),
        ("[-1]", "-1"),
        ("[1.5]", "1.5"),
        ("[true]", "true"),
        ("\"\\ud800\"", "is not JSON"),
        ("\"\"", "a prompt has no tokens"),
        ("[\"a\", \"\"]", "a prompt has no tokens"),
    ] {
        ask(prompt).refused(400, says);
    }
    let tokens = vec![5; 256];
    ask(&json!(tokens).to_string()).refused(400, "room for 256 together");
    assert_eq!(ask("[[5, 6], \"a\"]").status, 200);
}

/// Bodies that are no requests, small and of megabytes; memory stays.
#[test]
fn bodies_that_are_no_requests_are_refused() {
    let shop = Workshop::new();
    let server = Server::start(&shop, &[]);
    let million = 1 << 20;
    let wide = format!("{{\"messages\": [{}1]}}", "1,".repeat(2 * million - 20));
    let names: String = (0..100_000).map(|i| format!("\"{i}\":1,")).collect();
    for (body, says) in [
        (String::new(), "is not JSON"),
        ("{".to_owned(), "is not JSON"),
        ("nonsense".to_owned(), "is not JSON"),
        ("\"text\"".to_owned(), "is not a JSON object"),
        ("{} {}".to_owned(), "is not JSON"),
        ("{\"temperature\": NaN}".to_owned(), "is not JSON"),
        ("{\"temperature\": 1e999}".to_owned(), "is not JSON"),
        ("{\"seed\": 1, \"seed\": 2}".to_owned(), "`seed`: it is given twice"),
        ("[".repeat(4 * million), "is not a JSON object"),
        (format!("{{\"stop\": {}", "[".repeat(4 * million - 20)), "recursion limit"),
        (format!("{{\"stop\": {}", "{\"a\":".repeat(million / 2)), "recursion limit"),
        (wide.clone(), "more than 65536 values"),
        (wide.replace("messages", "stop"), "more than 65536 values"),
        (format!("{{{names}\"x\": 1}}"), "more than 65536 values"),
        (format!("{{\"prompt\": [{}1]}}", "1,".repeat(2 * million - 20)), "room for 256 together"),
        (format!("{{\"prompt\": [{}[]]}}", "[],".repeat(million)), "an empty list"),
        (format!("{{\"prompt\": [{}\"\"]}}", "\"\",".repeat(million)), "--max-prompts"),
        (format!("{{\"prompt\": \"{}\"}}", "x".repeat(4 * million - 20)), "--max-prompt-bytes"),
        (format!("{{\"{}\": 1}}", "x".repeat(4 * million - 100)), "is not supported"),
        (format!("{{\"temperature\": \"{}\"}}", "x".repeat(4 * million - 100)), "`temperature` is \"xxx"),
    ] {
        let reply = server.post_text(TEXT, &body);
        let start: String = body.chars().take(40).collect();
        assert!(reply.body.len() < 2000, "{start}: {} bytes", reply.body.len());
        if says == "is not supported" || says.starts_with("`temperature`") {
            let prompt = body.replacen('{', "{\"prompt\": \"a\", ", 1);
            server.post_text(TEXT, &prompt).refused(400, says);
        } else {
            reply.refused(400, says);
        }
    }
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.id())).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a peak");
    let peak: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(peak < 400 << 10, "{peak} kB for bodies of 4 MiB");
    assert_eq!(server.post(CHAT, &chat(json!({}))).0, 200);
}

/// Bytes that are no HTTP end their connection alone.
#[test]
fn bytes_that_are_no_http_are_refused() {
    let shop = Workshop::new();
    let server = Server::start(&shop, &[]);
    let garbage: Vec<u8> = (0..20_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let long = format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(200_000));
    let headers = format!("GET /health HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(1000));
    let large = format!("GET /health HTTP/1.1\r\na: {}\r\n\r\n", "b".repeat(200_000));
    let status = |bytes: &[u8]| server.send_bytes(bytes).map(|reply: Reply| reply.status);
    for (bytes, expected) in [
        (&garbage[..], [400, 400]),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", [400, 400]),
        (b"GET / HTTP/9.9\r\n\r\n", [400, 400]),
        (b"GET /health HTTP/1.1\r\nContent-Length: -1\r\n\r\n", [400, 400]),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n{}", [400, 400]),
        (long.as_bytes(), [414, 431]),
        (headers.as_bytes(), [431, 431]),
        (large.as_bytes(), [431, 431]),
    ] {
        let found = status(bytes).expect("an answer");
        assert!(
            expected.contains(&found),
            "{found}: {:?}",
            String::from_utf8_lossy(&bytes[..bytes.len().min(60)])
        );
    }
    assert_eq!(server.metric("tandem_rejected_total{reason=\"not_http\"}"), 8.0);
    server.wait_for_metric("tandem_connections", 1.0);
}
