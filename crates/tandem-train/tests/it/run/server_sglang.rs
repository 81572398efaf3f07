//! Online runs over SGLang: the runs that they are over vLLM, and never with weights of another round.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use tandem_train::run::run_dir::RunDirPolicy;

use super::fake::{Fake, Reply, Request, Said};
use super::server::{self, ended, ended_by, run};
use super::sglang::{self, error};
use crate::small::Small;

pub fn usual() -> Fake {
    sglang::start(|_, _| Reply::Usual)
}

/// A server with another answer to one path.
fn but(path: &'static str, reply: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Fake {
    sglang::start(move |request, _| if request.path == path { reply(request) } else { Reply::Usual })
}

/// A server with other answers to prompts.
fn answering(change: fn(&mut Value)) -> Fake {
    but("generate", move |request| match is_probe(request) {
        true => Reply::Usual,
        false => Reply::Changed(change),
    })
}

/// Returns whether the request names an adapter that does not exist.
fn is_probe(request: &Request) -> bool {
    request.body["lora_path"].as_str().unwrap().ends_with("-that-is-never-loaded")
}

#[test]
fn a_run_is_that_of_vllm_on_any_number_of_ranks() {
    let small = Small::new("online");
    let expected = run(&small, "vllm", &server::usual(), &[]);
    let server = usual();
    assert!(run(&small, "sglang", &server, &[]) == expected, "answers, log and weights");
    check_requests(&server);
    let adapters = small.path("sglang").join("adapters");
    assert_eq!(
        server.requests("load_lora_adapter")[5].body["lora_path"],
        json!(adapters.join("step-000005"))
    );
    for place in [&["compute.devices=cpu:2"][..], &["compute.offload=host"]] {
        assert!(run(&small, "other", &usual(), place) == expected, "{place:?}");
    }
    // On the same server, which has known all these names.
    assert!(run(&small, "sglang", &server, &[]) == expected, "again");
}

/// Checks the completion requests: each round first names an adapter that does not exist, and then
/// completes prompts between load and unload of its own.
fn check_requests(server: &Fake) {
    let loads = server.requests("load_lora_adapter");
    let names: BTreeSet<&str> = loads.iter().map(|load| load.body["lora_name"].as_str().unwrap()).collect();
    assert_eq!((loads.len(), names.len()), (6, 6), "each round has weights of its own");
    let (probes, asked): (Vec<_>, Vec<_>) = server.requests("generate").into_iter().partition(is_probe);
    assert_eq!((probes.len(), asked.len()), (6, 5 + 5 + 2 + 5 + 5 + 2), "12 prompts in batches of 5");
    for Request { body, .. } in &asked {
        assert!(names.contains(body["lora_path"].as_str().unwrap()));
        assert_eq!((&body["return_logprob"], &body["return_prompt_token_ids"]), (&json!(true), &json!(true)));
        let [prompts, params] = ["input_ids", "sampling_params"].map(|key| body[key].as_array().unwrap());
        assert!(prompts.len() == 2 && prompts[0] == prompts[1], "a prompt for each answer");
        assert!(prompts[0].as_array().is_some_and(|ids| ids.iter().all(Value::is_u64)));
        let seeds: Vec<u64> = params.iter().map(|params| params["sampling_seed"].as_u64().unwrap()).collect();
        assert_eq!(seeds[1], seeds[0] + 1);
        let expected = json!({
            "max_new_tokens": 12, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
            "stop": [],
        });
        for (key, value) in expected.as_object().unwrap() {
            assert!(params.iter().all(|params| &params[key] == value), "{key}");
        }
    }
    server.was_asked_in_rounds(&["v1/models", "generate", "load_lora_adapter", "v1/models"], "generate");
}

#[test]
fn a_server_that_may_answer_with_other_weights_ends_the_run() {
    // Without --enable-lora some versions look at no name.
    let ignoring = but("generate", |_| Reply::Http(200, json!([{ "output_ids": [5] }]).to_string()));
    let error = ended_by(&ignoring, &[]);
    assert!(
        error.contains("which does not exist") && error.contains("start it with --enable-lora"),
        "{error}"
    );
    assert!(ignoring.requests("load_lora_adapter").is_empty(), "nothing is loaded");
    // An error about something else.
    let other = but("generate", |_| Reply::from(sglang::error("input_ids cannot be empty.")));
    let error = ended_by(&other, &[]);
    assert!(
        error.contains("it does not refuse the adapter") && error.contains("input_ids cannot be empty"),
        "{error}"
    );
    let none = but("generate", |_| Reply::Http(404, json!({ "detail": "Not Found" }).to_string()));
    let error = ended_by(&none, &[]);
    assert!(error.contains("it has no /generate") && error.contains("online.server.kind"), "{error}");
    // It starts anew while it answers, and has no adapter any more.
    let forgetful = but("generate", |request| match is_probe(request) {
        true => Reply::Usual,
        false => Reply::from(sglang::error("Got LoRA adapter that has never been loaded: it")),
    });
    assert!(ended_by(&forgetful, &[]).contains("never been loaded"));
}

#[test]
fn an_adapter_that_is_not_loaded_ends_the_run() {
    let no_path =
        but("load_lora_adapter", |_| Reply::Http(404, json!({ "detail": "Not Found" }).to_string()));
    let error = ended_by(&no_path, &[]);
    assert!(error.contains("it has no /load_lora_adapter") && error.contains("without /v1"), "{error}");
    let told = |status, success: bool, message: &str, adapters: Value| {
        let body = json!({ "success": success, "error_message": message, "loaded_adapters": adapters });
        let said: Said = (status, body.to_string());
        but("load_lora_adapter", move |_| Reply::from(said.clone()))
    };
    let error = ended_by(&told(400, false, "its rank is too high", json!({})), &[]);
    assert!(
        error.contains("--lora-target-modules") && error.contains("400: its rank is too high"),
        "{error}"
    );
    for (success, adapters) in [(false, json!({ "a": "/a" })), (true, json!({ "a": "/a" }))] {
        let error = ended_by(&told(200, success, "", adapters), &[]);
        assert!(error.contains("it reports the adapter \"tandem-"), "{error}");
    }
    let error = ended_by(&told(200, true, "", Value::Null), &[]);
    assert!(error.contains("the adapter \"tandem-") && error.contains("serves \"base\""), "{error}");
    let garbage = but("load_lora_adapter", |_| Reply::Http(200, "<html>".to_owned()));
    let error = ended_by(&garbage, &[]);
    assert!(error.contains("not a reply of SGLang") && error.contains("<html>"), "{error}");
    let error = ended_by(&usual(), &["online.server.model=other"]);
    assert!(error.contains("it serves \"base\", not \"other\""), "{error}");
}

/// SGLang does not load adapters of this kind as they are, wherever they come from.
#[test]
fn an_adapter_that_is_scaled_otherwise_is_refused() {
    let small = Small::new("online");
    small.finish("own", RunDirPolicy::Fresh, &["adapter.rank=4", "adapter.rslora=true", "train.steps=1"]);
    let start = format!("adapter.start={}", small.path("own").join("final").display());
    let server = usual();
    let address = format!("online.server.base_url={}", server.address);
    let settings = [&start, &address, "online.server.model=base", "train.steps=1"];
    let (_, outcome) = small.run(
        "run",
        RunDirPolicy::Fresh,
        None,
        &[&settings[..], &["online.server.kind=sglang"]].concat(),
    );
    let error = outcome.expect_err("it must end").to_string();
    assert!(error.contains("alpha / rank") && server.paths().is_empty(), "{error}");
}

#[test]
fn an_answer_ends_with_the_end_token_whether_the_server_gives_it_or_not() {
    fn without(reply: &mut Value) {
        for output in reply.as_array_mut().unwrap() {
            if output["meta_info"]["finish_reason"]["type"] == "stop" {
                output["output_ids"].as_array_mut().unwrap().pop();
                output["meta_info"]["output_token_logprobs"].as_array_mut().unwrap().pop();
            }
        }
    }
    fn by_string(reply: &mut Value) {
        without(reply);
        for output in reply.as_array_mut().unwrap() {
            let reason = &mut output["meta_info"]["finish_reason"];
            if reason["type"] == "stop" {
                reason["matched"] = json!("###");
            }
        }
    }
    let small = Small::new("online");
    let more = ["train.steps=3", "online.stop=[\"###\"]"];
    let expected = run(&small, "with", &usual(), &more);
    assert!(run(&small, "without", &answering(without), &more) == expected);
    // Ended by a string, it has none.
    let found = run(&small, "string", &answering(by_string), &more);
    assert!(found.0[0]["loss"].is_number() && found.2 != expected.2, "other tokens train");
    assert!(ended(&found) > 0 && ended(&found) == ended(&expected));
    // It ends answers so whose numbers are none.
    let error = ended_by(&answering(by_string), &[]);
    assert!(error.contains("ended by \"###\", which is not in online.stop"), "{error}");
}

#[test]
fn answers_that_are_not_as_asked_end_the_run() {
    for (change, expected) in [
        (
            (|reply| {
                reply[0].as_object_mut().unwrap().remove("output_ids");
            }) as fn(&mut Value),
            "SGLang 0.5.5",
        ),
        (|reply| reply[1]["prompt_token_ids"] = json!([1, 2]), "differs from the prompt in the request"),
        (|reply| reply[1]["meta_info"]["prompt_tokens"] = json!(1), "--allow-auto-truncate"),
        (|reply| *reply = json!([]), "0 completions of a prompt, expected 2"),
        (|reply| *reply = reply[0].take(), "to /generate is not a reply of SGLang"),
        (
            |reply| reply[0]["meta_info"]["output_token_logprobs"][0][1] = json!(3),
            "log-probabilities of other tokens",
        ),
        (
            |reply| {
                reply[1]["output_ids"][0] = json!(1_000_000);
                reply[1]["meta_info"]["output_token_logprobs"] = Value::Null;
            },
            "the server has another base",
        ),
        (
            |reply| {
                reply[1]["output_ids"] = json!([30, 31]);
                reply[1]["meta_info"]["output_token_logprobs"] = Value::Null;
                reply[1]["meta_info"]["finish_reason"] = json!({ "type": "length", "length": 2 });
            },
            "cut a completion at 2 tokens",
        ),
        (
            |reply| {
                reply[0]["meta_info"]["finish_reason"] = json!({ "type": "abort", "message": "Aborted" });
            },
            "ended by \"abort\" (Aborted)",
        ),
    ] {
        let error = ended_by(&answering(change), &[]);
        assert!(error.contains(expected), "{error}");
    }
    let garbage = but("v1/models", |_| Reply::Http(200, "<html>".to_owned()));
    let error = ended_by(&garbage, &["compute.devices=cpu:2"]);
    assert!(error.contains("<html>") && error.contains("online.server.kind"), "{error}");
}

/// A request whose reply was lost is sent again.
#[test]
fn replies_that_are_lost_do_no_harm() {
    let small = Small::new("online");
    let expected = run(&small, "run", &usual(), &["train.steps=1"]);
    fn lossy(request: &Request, before: usize) -> Reply {
        match (request.path.as_str(), before) {
            ("load_lora_adapter" | "unload_lora_adapter", 0) => Reply::Done(503, "lost".to_owned()),
            _ => Reply::Usual,
        }
    }
    for server in [sglang::start(lossy), super::vllm::start(lossy)] {
        assert!(run(&small, "run", &server, &["train.steps=1"]) == expected, "{}", server.kind);
        assert_eq!(server.requests("load_lora_adapter").len(), 2, "{}", server.kind);
        assert_eq!(server.requests("unload_lora_adapter").len(), 2, "{}", server.kind);
    }
    // Of a request for answers.
    let troubled = sglang::start(|request, before| match before {
        1 if request.path == "generate" => Reply::Http(503, error("not now").1),
        _ => Reply::Usual,
    });
    assert!(run(&small, "run", &troubled, &["train.steps=1"]) == expected);
    assert_eq!(troubled.requests("generate").len(), 1 + 5 + 1);
}
