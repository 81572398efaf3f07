//! `tandem serve` and `tandem chat`: over HTTP, with OpenAI's client where there is one, and through a pipe.

mod crowd;
mod draining;
mod fields;
mod limits;
mod server;

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::processes::pty::Terminal;
use crate::workshop::{Workshop, skip};
use serde_json::{Value, json};
use server::{Reply, Server};

fn chat(extra: Value) -> Value {
    let messages = json!([{ "role": "user", "content": "the quick" }]);
    let mut body = json!({ "model": "model", "messages": messages, "max_tokens": 8, "seed": 3 });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

const CHAT: &str = "/v1/chat/completions";

#[test]
fn a_conversation_is_answered_whole_or_in_parts() {
    let shop = Workshop::new();
    let server = Server::start(&shop, &[]);
    let models = server.get("/v1/models");
    assert_eq!((models.0, &models.1["data"][0]["id"]), (200, &json!("model")));
    assert_eq!(server.get("/v1/models/model"), (200, models.1["data"][0].clone()));
    let (status, unknown) = server.get("/v1/models/o/other");
    assert_eq!((status, &unknown["error"]["param"]), (404, &json!("model")), "{unknown}");
    let (status, whole) = server.post(CHAT, &chat(json!({ "n": 2, "logprobs": true })));
    assert_eq!(status, 200, "{whole}");
    assert_eq!(whole["object"], "chat.completion");
    let choices = whole["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 2);
    assert_ne!(choices[0]["message"]["content"], choices[1]["message"]["content"], "two answers are drawn");
    let mut tokens = 0;
    for choice in choices {
        let log_probs = choice["logprobs"]["content"].as_array().unwrap();
        assert!(log_probs.iter().all(|token| token["logprob"].as_f64().unwrap() < 0.0));
        tokens += log_probs.len();
        let reason = if log_probs.len() == 8 { "length" } else { "stop" };
        assert_eq!(choice["finish_reason"], reason);
    }
    assert_eq!(whole["usage"]["completion_tokens"], tokens);
    let parts = server
        .stream(CHAT, &chat(json!({ "n": 2, "stream": true, "stream_options": { "include_usage": true } })));
    let text = |index: usize| -> String {
        let choices = parts.iter().filter_map(|part| part["choices"].get(0));
        let own = choices.filter(|choice| choice["index"] == index);
        own.filter_map(|choice| choice["delta"]["content"].as_str()).collect()
    };
    for (index, choice) in choices.iter().enumerate() {
        assert_eq!(choice["message"]["content"], text(index), "the same seed gives the same text");
    }
    assert_eq!(parts.last().unwrap()["usage"], whole["usage"]);
    assert_eq!(parts[0]["choices"][0]["delta"]["role"], "assistant");
}

#[test]
fn a_text_is_continued_up_to_a_stop_string() {
    let shop = Workshop::new();
    let server = Server::start(&shop, &[]);
    let ask = |extra: Value| {
        let mut body =
            json!({ "prompt": ["the quick", "over the"], "max_tokens": 24, "seed": 5, "logprobs": 1 });
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let (status, found) = server.post("/v1/completions", &body);
        assert_eq!(status, 200, "{found}");
        found
    };
    let free = ask(json!({}));
    let text = free["choices"][1]["text"].as_str().unwrap().to_owned();
    let shown = free["choices"][1]["logprobs"]["tokens"].as_array().unwrap();
    assert!(shown.len() > 2 && text.chars().count() > 4, "{free}");
    let middle: String = text.chars().skip(text.chars().count() / 2).take(2).collect();
    let stopped = ask(json!({ "stop": middle }));
    let expected = &text[..text.find(&middle).unwrap()];
    assert_eq!(stopped["choices"][1]["text"], expected);
    assert_eq!(stopped["choices"][1]["finish_reason"], "stop");
}

#[test]
fn tokens_lie_at_the_same_places_whole_or_in_parts() {
    let shop = Workshop::new();
    let server = Server::start(&shop, &[]);
    let body = |is_stream: bool| {
        json!({
            "prompt": ["the quick", "over the"], "max_tokens": 12, "n": 2, "seed": 5, "logprobs": 1, "stream": is_stream
        })
    };
    let offsets = |choice: &Value| choice["logprobs"]["text_offset"].as_array().cloned().unwrap_or_default();
    let (_, whole) = server.post("/v1/completions", &body(false));
    let parts = server.stream("/v1/completions", &body(true));
    for choice in whole["choices"].as_array().unwrap() {
        let of_parts = parts.iter().map(|part| &part["choices"][0]).filter(|c| c["index"] == choice["index"]);
        assert_eq!(of_parts.flat_map(offsets).collect::<Vec<_>>(), offsets(choice));
        let text = choice["text"].as_str().unwrap().chars().count() as u64;
        let places: Vec<u64> = offsets(choice).iter().filter_map(Value::as_u64).collect();
        assert!(places[0] == 0 && places.is_sorted(), "{places:?}");
        assert!(places.last().is_some_and(|last| (1..=text).contains(last)), "{places:?} of {text}");
    }
}

#[test]
fn requests_that_cannot_be_answered_are_refused() {
    let shop = Workshop::new();
    let server = Server::start(&shop, &["--context", "64"]);
    let refused = |body: Value, status: u16, says: &str| {
        let (found, answer) = server.post(CHAT, &body);
        let message = answer["error"]["message"].as_str().unwrap_or_else(|| panic!("{answer}"));
        assert!(found == status && message.contains(says), "{found}: {message}, expected {status}: {says}");
    };
    refused(chat(json!({ "model": "gpt-4" })), 404, "the model \"gpt-4\" is not served here; \"model\" is");
    refused(chat(json!({ "temperature": -1 })), 400, "`temperature` is -1, expected a number from 0");
    refused(chat(json!({ "frequency_penalty": 1 })), 400, "`frequency_penalty` is not supported");
    refused(chat(json!({ "tempurature": 1 })), 400, "`tempurature` is not supported");
    refused(chat(json!({ "messages": [] })), 400, "`messages` is empty");
    refused(chat(json!({ "messages": [{ "role": "user" }] })), 400, "message 0 has no text");
    refused(chat(json!({ "max_tokens": 65 })), 400, "this server has room for 64 together");
    let options = |options: Value| chat(json!({ "stream": true, "stream_options": options }));
    refused(
        options(json!({ "include_usge": true })),
        400,
        "`stream_options.include_usge` = true is not supported",
    );
    refused(
        options(json!({ "include_usage": 1 })),
        400,
        "`stream_options.include_usage` = 1 is not supported",
    );
    refused(options(json!(true)), 400, "`stream_options` is true, expected an object");
    refused(json!([]), 400, "the request body is not a JSON object");
    // The least number takes the likeliest token.
    let [likeliest, greedy] = [json!({ "top_p": 0 }), json!({ "temperature": 0 })]
        .map(|extra| server.post(CHAT, &chat(extra)).1["choices"][0]["message"]["content"].clone());
    assert!(likeliest.is_string() && likeliest == greedy, "{likeliest} and {greedy}");
    // No inverse of such a temperature is finite.
    assert_eq!(server.post(CHAT, &chat(json!({ "temperature": 1e-40 }))).0, 200);
    // What is the default may be said.
    let polite =
        json!({ "frequency_penalty": 0, "user": "me", "response_format": { "type": "text" }, "tools": [] });
    assert_eq!(server.post(CHAT, &chat(polite)).0, 200);
}

/// The server stays, and says the same to the next.
#[test]
fn a_model_that_gives_no_numbers_ends_requests_alone() {
    let shop = Workshop::new();
    shop.fill_tensor("model/model.safetensors", "model.norm.weight", 3e38);
    let server = Server::start(&shop, &[]);
    for extra in [json!({}), json!({ "n": 3 }), json!({ "temperature": 0 })] {
        let (status, answer) = server.post(CHAT, &chat(extra));
        let message = answer["error"]["message"].as_str().unwrap_or_else(|| panic!("{answer}"));
        assert!(status == 500 && message.contains("are not finite"), "{status}: {message}");
    }
    assert_eq!(server.get("/v1/models").0, 200);
}

#[test]
fn whoever_leaves_does_not_hold_others_up() {
    let shop = Workshop::new();
    let server = Server::start(&shop, &["--max-batch", "1"]);
    let long = chat(json!({ "stream": true, "max_tokens": 200, "n": 64 }));
    server.leave(CHAT, &long);
    let body = chat(json!({}));
    let answers = std::thread::scope(|scope| {
        let ask = || server.post(CHAT, &body);
        let others: Vec<_> = (0..4).map(|_| scope.spawn(ask)).collect();
        others.into_iter().map(|other| other.join().unwrap()).collect::<Vec<_>>()
    });
    assert!(answers.iter().all(|(status, answer)| *status == 200
        && answer["choices"][0]["message"] == answers[0].1["choices"][0]["message"]));
}

#[test]
fn a_key_is_asked_for_if_there_is_one() {
    let shop = Workshop::new();
    let outcome = shop.run(&["serve", "model", "--key-env", "NO_SUCH_KEY"]).expect(2);
    assert!(outcome.stderr.contains("the environment has no variable NO_SUCH_KEY"), "{}", outcome.stderr);
    let outcome = shop.run(&["serve", "model", "--cache-tokens", "3"]).expect(2);
    assert!(outcome.stderr.contains("--cache-tokens 3 holds no text of"), "{}", outcome.stderr);
    let server = Server::with_key(&shop, "a key");
    assert_eq!(server.get("/v1/models").0, 200);
    let stranger = server.seen_with("another");
    let (status, answer) = stranger.get("/v1/models");
    assert_eq!((status, &answer["error"]["type"]), (401, &json!("authentication_error")));
    let asks = |header: &str| {
        let text = format!("GET /v1/models HTTP/1.1\r\nHost: me\r\n{header}Connection: close\r\n\r\n");
        server.send_bytes(text.as_bytes()).expect("an answer")
    };
    for right in ["bearer a key", "BEARER  a key"] {
        assert_eq!(asks(&format!("Authorization: {right}\r\n")).status, 200, "{right}");
    }
    for wrong in ["Bearer a ke", "Bearer a keyy", "Basic a key", "Bearer", "a key", "Bearer \u{fe}"] {
        let reply = asks(&format!("Authorization: {wrong}\r\n"));
        reply.refused(401, "a key is needed");
        assert!(reply.head.contains("www-authenticate: bearer"), "{reply:?}");
    }
    asks("").refused(401, "a key is needed");
    // Nothing is asked of whoever looks whether it lives.
    assert_eq!(Reply::read(stranger.send("GET", "/health", "")).map(|reply| reply.status), Some(200));
    assert_eq!(stranger.metric("tandem_rejected_total{reason=\"key\"}"), 8.0);
}

/// A stranger who announces a body and sends none gets no time for it.
#[test]
fn the_key_is_checked_before_the_body() {
    let shop = Workshop::new();
    let server = Server::with_key(&shop, "a key");
    let head =
        "POST /v1/completions HTTP/1.1\r\nHost: me\r\nContent-Length: 1000000\r\nConnection: close\r\n\r\n";
    server.send_bytes(head.as_bytes()).expect("an answer").refused(401, "a key is needed");
    assert_eq!(server.metric("tandem_rejected_total{reason=\"slow_body\"}"), 0.0);
}

#[test]
fn paths_and_methods_that_are_not_there_are_named() {
    let shop = Workshop::new();
    let server = Server::start(&shop, &[]);
    let ask = |method: &str, path: &str| Reply::read(server.send(method, path, "")).expect("an answer");
    for path in
        ["/", "/v2", "/v1", "/v1/models/", "/v1/completion", "/%00", "/v1/../v1/models", "/../../etc/passwd"]
    {
        ask("GET", path).refused(404, "/v1/chat/completions");
    }
    for (method, path) in
        [("GET", "/v1/completions"), ("DELETE", "/v1/models"), ("POST", "/metrics"), ("X", "/health")]
    {
        let reply = ask(method, path);
        reply.refused(405, &format!("{method} is not allowed for {path}"));
        assert!(reply.head.contains("\r\nallow: "), "{reply:?}");
    }
    let long = ask("GET", &format!("/{}", "x".repeat(5000)));
    long.refused(404, "…");
    assert!(long.body.len() < 1000, "{long:?}");
    assert_eq!(server.metric("tandem_requests_total{path=\"other\",status=\"404\"}"), 9.0);
}

#[test]
fn metrics_count_what_happens() {
    let shop = Workshop::new();
    let server = Server::start(&shop, &[]);
    let (_, whole) = server.post(CHAT, &chat(json!({ "n": 2 })));
    server.stream(CHAT, &chat(json!({ "stream": true })));
    server.post(CHAT, &chat(json!({ "n": 0 })));
    let usage = &whole["usage"];
    let prompt = usage["prompt_tokens"].as_f64().unwrap();
    assert_eq!(server.metric("tandem_prompt_tokens_total"), 2.0 * prompt);
    let completion = usage["completion_tokens"].as_f64().unwrap();
    let counted = server.metric("tandem_completion_tokens_total");
    assert!(counted > completion && counted <= completion + 8.0, "{counted}: {usage}");
    let responses =
        |status: u16| server.metric(&format!("tandem_requests_total{{path=\"{CHAT}\",status=\"{status}\"}}"));
    assert_eq!((responses(200), responses(400)), (2.0, 1.0));
    assert_eq!(server.metric("tandem_rejected_total{reason=\"invalid\"}"), 1.0);
    assert_eq!(server.metric("tandem_time_to_first_token_seconds_count"), 2.0);
    server.wait_for_metric("tandem_request_duration_seconds_count", 3.0);
    server.wait_for_metric("tandem_requests_running", 0.0);
    assert_eq!(server.metric("tandem_requests_queued"), 0.0);
    // This one's.
    server.wait_for_metric("tandem_connections", 1.0);
}

/// With room for one completion at a time, a client with many must not keep another's single one waiting until
/// all of its own are done.
#[test]
fn clients_take_turns() {
    let shop = Workshop::new();
    let server = Server::start(&shop, &["--max-batch", "1"]);
    let many =
        server.send("POST", CHAT, &chat(json!({ "stream": true, "max_tokens": 200, "n": 128 })).to_string());
    let mut many = BufReader::new(many).lines();
    // The first of its completions has begun, and the others wait.
    while !many.next().expect("a part").unwrap().contains("\"delta\":{\"content\"") {}
    assert_eq!(server.post(CHAT, &chat(json!({}))).0, 200);
    let ended = many.by_ref().map_while(Result::ok).take_while(|line| !line.contains("[DONE]"));
    // What is printed after the answer would be behind it in the stream.
    assert_eq!(server.metric("tandem_requests_running"), 1.0, "the client with many is served still");
    assert!(ended.count() > 0);
}

#[test]
fn openais_own_client_talks_to_it() {
    let Some(python) = std::env::var_os("TANDEM_TEST_OPENAI") else {
        return skip("TANDEM_TEST_OPENAI names no Python with the package openai");
    };
    let shop = Workshop::new();
    let server = Server::start(&shop, &[]);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/serve/client.py");
    let output = Command::new(python).args([script, &server.url()]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "all is well");
}

#[test]
fn a_chat_goes_on_from_what_was_said() {
    let shop = Workshop::new();
    let talk = |lines: &str| {
        let arguments = [
            "chat",
            "model",
            "--max-new-tokens",
            "16",
            "--temperature",
            "0.02",
            "--context",
            "200",
            "--seed",
            "1",
        ];
        let mut child = shop
            .command(&arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        let [out, said] =
            [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
        assert!(output.status.success(), "{said}");
        (out, said)
    };
    let (once, _) = talk("the quick\n");
    let (twice, _) = talk("the quick\nbrown fox\n");
    assert!(
        !once.trim().is_empty() && twice.starts_with(&once) && twice.len() > once.len(),
        "{once}\n{twice}"
    );
    let (reset, said) = talk("the quick\n/reset\nbrown fox\n");
    assert!(said.contains("A new conversation."), "{said}");
    assert_ne!(reset, twice, "what was said before has an effect");
    let (undone, _) = talk("the quick\n/undo\nbrown fox\n");
    assert_eq!(undone, reset);
    let (_, said) = talk("/rest\n/help\n");
    assert!(said.contains("unknown command /rest.") && said.contains("/undo"), "{said}");
    let (_, said) = talk(&format!("{}\n", "the quick ".repeat(200)));
    assert!(said.contains("but only 200 fit: /reset starts a new one, --context raises the limit"), "{said}");
    let mut child =
        shop.command(&["chat", "model"]).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all("the quick ".repeat(300).as_bytes()).unwrap();
    let said = String::from_utf8(child.wait_with_output().unwrap().stderr).unwrap();
    assert!(
        said.contains("but only 256 fit: /reset starts a new one, the limit is the model's context"),
        "{said}"
    );
}

/// Typed at a terminal. The model never ends a reply by itself.
#[test]
fn ctrl_c_stops_a_reply_and_the_conversation_goes_on() {
    let shop = Workshop::new();
    let change = |file: &str, change: &dyn Fn(&mut serde_json::Map<String, Value>)| {
        let Value::Object(mut object) = serde_json::from_str(&shop.read(file)).unwrap() else {
            panic!("{file}")
        };
        change(&mut object);
        shop.write(file, &Value::Object(object).to_string());
    };
    change("model/config.json", &|config| {
        // An absent one would be the class's.
        config.insert("eos_token_id".to_owned(), Value::Null);
        config.insert("max_position_embeddings".to_owned(), json!(60_000));
    });
    change("model/tokenizer_config.json", &|config| drop(config.remove("eos_token")));
    let _ = std::fs::remove_file(shop.path("model/generation_config.json"));
    let arguments = ["chat", "model", "--max-new-tokens", "50000", "--context", "60000"];
    let (mut terminal, mut job) = Terminal::start(&shop.command(&arguments));
    terminal.wait_for("> ");
    terminal.enter("the quick\r");
    let (asked, began) = (terminal.shown().len(), Instant::now());
    while terminal.shown().len() < asked + 200 {
        assert!(began.elapsed() < Duration::from_secs(60), "{}", terminal.shown());
        std::thread::sleep(Duration::from_millis(5));
    }
    terminal.press_ctrl_c();
    terminal.wait_for(" a second]");
    let shown = terminal.shown();
    let count = shown.rsplit_once(" tokens, ").unwrap().0.rsplit_once('[').unwrap().1;
    assert!(count.parse::<usize>().unwrap() < 50_000, "{count}");
    terminal.enter("half a line");
    terminal.press_ctrl_c();
    terminal.wait_for("/exit or Ctrl-D ends.");
    terminal.enter("/exit\r");
    assert!(job.launcher.wait().unwrap().success(), "{}", terminal.shown());
}
