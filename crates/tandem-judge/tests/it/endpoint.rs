//! Endpoints that work, and that fail in every way.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Map, json};
use tandem_judge::{EndpointConfig, EndpointJudge, Judge};

use crate::server::{Answer, Request, Server};
use crate::support::{GO, group, judge, scores};

/// A variable of every test process, with a value that appears in no other text of a judge.
const KEY: &str = "PATH";

pub fn config(base_url: &str) -> EndpointConfig {
    EndpointConfig {
        base_url: base_url.to_owned(),
        model: "big".to_owned(),
        prompt: "{prompt}|{a}|{b}".to_owned(),
        // Longer than anything takes on a busy machine.
        timeout_s: 120.0,
        retries: 2,
        first_pause_s: 0.001,
        longest_pause_s: 0.01,
        ..EndpointConfig::default()
    }
}

pub fn start(config: EndpointConfig) -> EndpointJudge {
    EndpointJudge::new("endpoint", config).unwrap()
}

fn places(request: &Request) -> [&str; 2] {
    let parts: Vec<_> = request.text().split('|').collect();
    [parts[1], parts[2]]
}

/// Prefers the response that is later in the alphabet.
pub fn fair(request: &Request, _: usize) -> Answer {
    let [a, b] = places(request);
    Answer::Says(if a > b { "A" } else { "B" })
}

pub fn error(status: u16) -> Answer {
    Answer::Http(status, "", json!({ "error": { "message": "not like this" } }).to_string())
}

#[test]
fn each_pair_is_asked_in_both_orders_and_wins_are_averaged() {
    let server = Server::start(fair);
    let mut endpoint =
        start(EndpointConfig { api_key_env: Some(KEY.to_owned()), ..config(&server.base_url) });
    let verdicts = judge(&mut endpoint, "which?", &["m", "z", "a"]).unwrap();
    assert_eq!(scores(&verdicts), [Some(0.5), Some(1.0), Some(0.0)]);
    let expected = json!([
        { "other": 1, "pair": [0, 1], "said": ["B", "A"] },
        { "other": 2, "pair": [0, 2], "said": ["A", "B"] },
    ]);
    assert_eq!(verdicts[0].said, expected);
    let requests = server.requests();
    let mut texts: Vec<_> = requests.iter().map(Request::text).collect();
    texts.sort_unstable();
    assert_eq!(texts, ["which?|a|m", "which?|a|z", "which?|m|a", "which?|m|z", "which?|z|a", "which?|z|m"]);
    for request in &requests {
        assert_eq!(request.line, "POST /v1/chat/completions HTTP/1.1");
        assert_eq!(
            request.header("authorization"),
            Some(format!("Bearer {}", std::env::var(KEY).unwrap()).as_str())
        );
        assert_eq!(request.body["model"], "big");
        assert_eq!(request.body["temperature"], 0);
        assert_eq!(request.body["max_tokens"], 16);
    }
    let counts = endpoint.counts();
    assert_eq!((counts.judged, counts.unscored, counts.spent, counts.retries), (3, 0, 6, 0));
}

#[test]
fn a_model_that_prefers_a_place_decides_nothing() {
    let server = Server::start(|_, _| Answer::Says("A"));
    let verdicts = judge(&mut start(config(&server.base_url)), "?", &["m", "z", "a"]).unwrap();
    assert_eq!(scores(&verdicts), [Some(0.5); 3]);
}

#[test]
fn disagreement_and_ties_are_halves_in_the_mean() {
    // m beats z, m and a tie, and of z and a the first wins.
    let server = Server::start(|request, _| {
        Answer::Says(match places(request) {
            ["m", "z"] => "A",
            ["z", "m"] => "B",
            ["m", "a"] | ["a", "m"] => "tie",
            _ => "A",
        })
    });
    let verdicts = judge(&mut start(config(&server.base_url)), "?", &["m", "z", "a"]).unwrap();
    assert_eq!(scores(&verdicts), [Some(0.75), Some(0.25), Some(0.5)]);
}

#[test]
fn what_needs_no_question_is_not_asked() {
    let server = Server::start(fair);
    let mut endpoint = start(config(&server.base_url));
    let row = Map::new();
    let groups = [group("?", &row, &["alone"]), group("?", &row, &["same", "same"]), group("?", &row, &[])];
    let verdicts = endpoint.judge(&groups, &GO).unwrap();
    assert_eq!(scores(&verdicts[0]), [None]);
    assert_eq!(verdicts[0][0].said, "there is no other answer to compare it with");
    assert_eq!(scores(&verdicts[1]), [Some(0.5), Some(0.5)]);
    assert_eq!(verdicts[2], []);
    assert_eq!(server.requests().len(), 0);
}

#[test]
fn what_passes_is_asked_again() {
    for (first, headers) in
        [(429, "Retry-After: 0\r\n"), (429, ""), (500, ""), (502, ""), (503, ""), (408, "")]
    {
        let server = Server::start(move |request, before| match before {
            0 => Answer::Http(first, headers, "busy".to_owned()),
            _ => fair(request, before),
        });
        let mut endpoint = start(config(&server.base_url));
        assert_eq!(
            scores(&judge(&mut endpoint, "?", &["a", "b"]).unwrap()),
            [Some(0.0), Some(1.0)],
            "{first}"
        );
        assert_eq!((endpoint.counts().spent, endpoint.counts().retries), (3, 1));
    }
}

#[test]
fn who_wants_to_be_left_alone_for_long_is_not_asked_again() {
    let busy = || Answer::Http(429, "Retry-After: 3600\r\n", String::new());
    let server = Server::start(move |_, _| busy());
    let error = judge(&mut start(config(&server.base_url)), "?", &["a", "b"]).unwrap_err().to_string();
    assert!(
        error.contains(
            "HTTP 429: (no message) (the server asks for a pause of 3600s, longer than `longest_pause_s`)"
        ),
        "{error}"
    );
    assert_eq!(server.requests().len(), 2);
}

#[test]
fn a_server_that_never_works_is_an_error() {
    let server = Server::start(|_, _| error(500));
    let mut endpoint = start(config(&server.base_url));
    let error = judge(&mut endpoint, "?", &["a", "b", "c"]).unwrap_err().to_string();
    assert!(
        error.starts_with("judge `endpoint`: none of 3 pairs could be compared by http://127.0.0.1:"),
        "{error}"
    );
    assert!(error.ends_with("the last reason: HTTP 500: not like this"), "{error}");
    assert_eq!((server.requests().len(), endpoint.counts().retries), (18, 12));
}

#[test]
fn nobody_there_is_an_error() {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut endpoint = start(config(&format!("http://{address}")));
    let error = judge(&mut endpoint, "?", &["a", "b"]).unwrap_err().to_string();
    assert!(error.contains("none of 1 pairs") && error.contains("refused"), "{error}");
    assert_eq!(endpoint.counts().retries, 4);
}

#[test]
fn an_answer_that_cannot_be_compared_costs_only_its_own_score() {
    let server = Server::start(|request, before| match request.text().contains("poison") {
        true => error(500),
        false => fair(request, before),
    });
    let verdicts = judge(&mut start(config(&server.base_url)), "?", &["a", "poison", "z"]).unwrap();
    assert_eq!(scores(&verdicts), [Some(0.0), None, Some(1.0)]);
    let failed = json!({ "failed": "HTTP 500: not like this" });
    assert_eq!(verdicts[0].said[0], json!({ "other": 1, "pair": [0, 1], "said": failed }));
}

#[test]
fn garbage_is_asked_again_and_then_costs_the_pair() {
    let bodies = ["<html>", "{}", r#"{"choices":[]}"#, r#"{"choices":[{"message":{"content":null}}]}"#];
    let http = |body: &str| Answer::Http(200, "", body.to_owned());
    let garbage =
        move |kind: usize| bodies.get(kind).map_or(Answer::Says("A is better than B"), |body| http(body));
    for kind in 0..=bodies.len() {
        let server = Server::start(move |request, before| match before {
            0 => garbage(kind),
            _ => fair(request, before),
        });
        let mut endpoint = start(config(&server.base_url));
        assert_eq!(scores(&judge(&mut endpoint, "?", &["a", "b"]).unwrap()), [Some(0.0), Some(1.0)]);
        assert_eq!(endpoint.counts().retries, 1);

        let server = Server::start(move |request, before| match request.text().contains("odd") {
            true => garbage(kind),
            false => fair(request, before),
        });
        let verdicts = judge(&mut start(config(&server.base_url)), "?", &["a", "odd", "z"]).unwrap();
        assert_eq!(scores(&verdicts), [Some(0.0), None, Some(1.0)]);
    }
}

#[test]
fn a_reply_that_does_not_come_is_asked_for_again() {
    let server = Server::start(|request, before| match before {
        0 => Answer::Nothing,
        _ => fair(request, before),
    });
    // Enough retries for even a very slow machine to be in time once.
    let mut endpoint = start(EndpointConfig { timeout_s: 0.3, retries: 100, ..config(&server.base_url) });
    assert_eq!(scores(&judge(&mut endpoint, "?", &["a", "b"]).unwrap()), [Some(0.0), Some(1.0)]);
    assert!(endpoint.counts().retries >= 1);

    let server = Server::start(|_, _| Answer::Nothing);
    let mut endpoint = start(EndpointConfig { timeout_s: 0.02, ..config(&server.base_url) });
    let error = judge(&mut endpoint, "?", &["a", "b"]).unwrap_err().to_string();
    assert!(error.contains("none of 1 pairs") && error.contains("timeout"), "{error}");
}

#[test]
fn what_will_not_pass_is_an_error_at_once() {
    for status in [302, 400, 401, 402, 403, 404, 422] {
        let server = Server::start(move |_, _| error(status));
        let mut endpoint = start(EndpointConfig { concurrency: 1, ..config(&server.base_url) });
        let message = judge(&mut endpoint, "?", &["a", "b", "c"]).unwrap_err().to_string();
        assert!(message.ends_with(&format!("refused with HTTP {status}: not like this")), "{message}");
        assert_eq!(endpoint.counts().retries, 0);
    }
}

#[test]
fn the_key_is_shown_nowhere() {
    let key = std::env::var(KEY).unwrap();
    let body = |kind: &str, key: &str| match kind {
        "words" => {
            json!({ "choices": [{ "message": { "content": format!("Your key is {key}.") } }] }).to_string()
        }
        "error" => json!({ "error": { "message": format!("Your key is {key}.") } }).to_string(),
        // The message is truncated in the middle of it.
        _ => format!("Your key is {}{key}", "-".repeat(470)),
    };
    for (status, kind) in [(200, "words"), (200, "text"), (401, "error"), (401, "text"), (500, "text")] {
        // A server that repeats the key.
        let server = Server::start(move |request, _| {
            Answer::Http(status, "", body(kind, request.header("authorization").unwrap()))
        });
        let with_key = EndpointConfig { api_key_env: Some(KEY.to_owned()), ..config(&server.base_url) };
        let mut endpoint = start(with_key);
        let error = judge(&mut endpoint, "?", &["a", "b"]).unwrap_err();
        assert!(error.to_string().contains("Your key is "), "{error}");
        for text in [error.to_string(), format!("{error:?}"), format!("{endpoint:?}")] {
            assert!(!text.contains(&key[..10]), "{text}");
        }
    }
}

#[test]
fn a_key_that_is_not_there_is_refused() {
    let name = "TANDEM_TEST_NO_SUCH_VARIABLE".to_owned();
    let with_key = EndpointConfig { api_key_env: Some(name), ..config("http://localhost/v1") };
    let error = EndpointJudge::new("mine", with_key).unwrap_err().to_string();
    assert!(
        error.contains("`api_key_env` names the environment variable `TANDEM_TEST_NO_SUCH_VARIABLE`"),
        "{error}"
    );
}

#[test]
fn a_request_under_way_does_not_hold_up_a_stop() {
    let stop = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&stop);
    let server = Server::start(move |_, _| {
        seen.store(true, Ordering::Relaxed);
        Answer::Nothing
    });
    // Waiting for the reply would end with an error about the pairs.
    let mut endpoint = start(EndpointConfig { timeout_s: 20.0, retries: 0, ..config(&server.base_url) });
    let row = Map::new();
    let stopped = endpoint.judge(&[group("?", &row, &["a", "b"])], &stop);
    assert_eq!(stopped.unwrap_err().to_string(), "judging was stopped");
}

#[test]
fn an_encrypted_address_is_spoken_to_encrypted() {
    // A server without TLS sees no request.
    let server = Server::start(fair);
    let mut endpoint = start(config(&server.base_url.replace("http:", "https:")));
    let error = judge(&mut endpoint, "?", &["a", "b"]).unwrap_err().to_string();
    assert!(error.contains("none of 1 pairs"), "{error}");
    assert_eq!(server.requests().len(), 0);
}

#[test]
fn options_that_make_no_sense_are_named() {
    let good = || config("http://localhost:8000/v1");
    let url = |base_url: &str| EndpointConfig { base_url: base_url.to_owned(), ..good() };
    let cases = [
        ("base_url", url("")),
        ("base_url", url("localhost:8000/v1")),
        ("base_url", url("ftp://localhost/v1")),
        ("base_url", url("http://")),
        ("base_url", url("https://user:secret@localhost/v1")),
        ("base_url", url("https://localhost/v1?key=secret")),
        ("base_url", url("http://localhost/v1/chat/completions")),
        ("model", EndpointConfig { model: String::new(), ..good() }),
        ("prompt", EndpointConfig { prompt: "{prompt} {a}".to_owned(), ..good() }),
        ("max_tokens", EndpointConfig { max_tokens: 0, ..good() }),
        ("timeout_s", EndpointConfig { timeout_s: 0.0, ..good() }),
        ("first_pause_s", EndpointConfig { first_pause_s: f64::NAN, ..good() }),
        ("longest_pause_s", EndpointConfig { longest_pause_s: -1.0, ..good() }),
        ("concurrency", EndpointConfig { concurrency: 0, ..good() }),
    ];
    for (key, config) in cases {
        let error = config.check("mine").unwrap_err().to_string();
        assert!(error.starts_with(&format!("judge `mine`: `{key}` ")), "{key}: {error}");
        assert!(!error.contains("secret"), "{error}");
    }
    good().check("mine").unwrap();
    EndpointConfig { prompt: tandem_judge::DEFAULT_TEMPLATE.to_owned(), ..good() }.check("mine").unwrap();
}
