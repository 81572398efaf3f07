//! Online runs whose answers a server gives: the same wherever they train, of the right weights, and ended by anything else.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Map, Value, json};
use tandem_train::checkpoint::export;
use tandem_train::events::Silent;
use tandem_train::run::run_dir::RunDirPolicy;
use tandem_train::run::spawn;
use tandem_train::{Outcome, TrainError};

use super::fake::{Fake, Reply, Request};
use super::ranks::log;
use super::vllm::{self, error};
use crate::small::Small;

/// Log, samples and final weights.
pub type Run = (Vec<Map<String, Value>>, String, Vec<u8>);

fn settings(server: &Fake, more: &[&str]) -> Vec<String> {
    let address = format!("online.server.base_url={}", server.address);
    let kind = format!("online.server.kind={}", server.kind);
    let own = [
        &address,
        &kind,
        "online.server.model=base",
        "adapter.rank=4",
        "compute.threads=1",
        "online.samples_every=1",
        "train.batch_size=5",
        "train.warmup_steps=0",
    ];
    own.iter().chain(more).map(|&setting| setting.to_owned()).collect()
}

pub fn run(small: &Small, name: &str, server: &Fake, more: &[&str]) -> Run {
    let settings = settings(server, more);
    let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
    small.finish(name, RunDirPolicy::Overwrite, &settings);
    let samples = fs::read_to_string(small.path(name).join("samples.jsonl")).unwrap();
    (log(small, name), samples, small.weights(name))
}

/// The error that ends a run of one step.
pub fn ended_by(server: &Fake, more: &[&str]) -> String {
    let small = Small::new("online");
    let settings = settings(server, &[&["train.steps=1"], more].concat());
    let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
    let (_, outcome) = small.run("run", RunDirPolicy::Fresh, None, &settings);
    let error = outcome.expect_err("it must end");
    assert_eq!(error.fault(), tandem_train::Fault::User, "{error}");
    let error = match error {
        TrainError::OnRank { rank: 0, error, .. } => *error,
        error => error,
    };
    assert!(matches!(error, TrainError::Server { .. }), "{error:?}");
    assert!(error.to_string().contains(&server.address), "{error}");
    error.to_string()
}

pub fn usual() -> Fake {
    vllm::start(|_, _| Reply::Usual)
}

/// A server with another answer to one path.
fn but(path: &'static str, reply: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Fake {
    vllm::start(move |request, _| if request.path == path { reply(request) } else { Reply::Usual })
}

/// A server with other completions.
fn answering(change: fn(&mut Value)) -> Fake {
    but("completions", move |_| Reply::Changed(change))
}

#[test]
fn a_run_is_the_same_on_any_number_of_ranks_and_each_round_asks_for_its_own_weights() {
    let (small, server) = (Small::new("online"), usual());
    let expected = run(&small, "one", &server, &[]);
    assert_eq!(expected.0.len(), 6);
    // Which answers are drawn depends on the instruction set, and a step may have none that differ.
    let learns = expected.0.iter().filter(|line| line["pairs"].as_u64() > Some(0)).count();
    assert!(learns >= 4, "{learns} of 6 steps have something to learn from");
    let loads = server.requests("load_lora_adapter");
    let names: BTreeSet<&str> = loads.iter().map(|load| load.body["lora_name"].as_str().unwrap()).collect();
    assert_eq!((loads.len(), names.len()), (6, 6), "each round has weights of its own");
    assert_eq!(server.requests("unload_lora_adapter").len(), 6);
    check_requests(&server, &names);
    let adapters = small.path("one").join("adapters");
    let left: Vec<_> = fs::read_dir(&adapters).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["step-000005"], "the last round's alone");
    assert_eq!(loads[5].body["lora_path"], json!(adapters.join("step-000005")));
    for place in [
        &["compute.devices=cpu:2"][..],
        &["compute.devices=cpu:3", "compute.sharding=zero3", "online.server.concurrency=1"],
        &["compute.offload=host"],
    ] {
        let found = run(&small, "other", &usual(), place);
        assert_eq!(found.1, expected.1, "{place:?}: answers and scores");
        assert_eq!(found.0, expected.0, "{place:?}: the log");
        assert!(found.2 == expected.2, "{place:?}: the final weights");
    }
}

/// Checks the completion requests, and that each is between load and unload of its adapter.
fn check_requests(server: &Fake, names: &BTreeSet<&str>) {
    let asked = server.requests("completions");
    assert_eq!(asked.len(), 5 + 5 + 2 + 5 + 5 + 2, "12 prompts in batches of 5");
    let seeds: BTreeSet<u64> = asked.iter().map(|request| request.body["seed"].as_u64().unwrap()).collect();
    assert_eq!(seeds.len(), asked.len());
    assert!(*seeds.last().unwrap() < 1 << 62);
    for Request { body, .. } in &asked {
        assert!(names.contains(body["model"].as_str().unwrap()));
        assert!(body["prompt"].as_array().is_some_and(|ids| ids.iter().all(Value::is_u64)));
        let expected = json!({
            "n": 2, "max_tokens": 12, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
            "stop": [], "logprobs": 0, "return_token_ids": true,
        });
        for (key, value) in expected.as_object().unwrap() {
            assert_eq!(&body[key], value, "{key}");
        }
    }
    server.was_asked_in_rounds(&["models", "load_lora_adapter", "models"], "completions");
}

/// Removes the end tokens from a reply.
fn without_end(reply: &mut Value) {
    for choice in reply["choices"].as_array_mut().unwrap() {
        if choice["finish_reason"] == "stop" {
            choice["token_ids"].as_array_mut().unwrap().pop();
            choice["logprobs"]["token_logprobs"].as_array_mut().unwrap().pop();
        }
    }
}

/// Ended completions of the first step, which the same weights sample in each run.
pub fn ended(run: &Run) -> usize {
    run.1.lines().take(5).map(|line| line.matches("\"ended\":true").count()).sum()
}

/// A server that leaves the end token out and one that gives it come to the same; an answer that a string ended has none.
#[test]
fn an_answer_ends_with_the_end_token_whether_the_server_gives_it_or_not() {
    let small = Small::new("online");
    let expected = run(&small, "with", &usual(), &["train.steps=3"]);
    assert!(run(&small, "without", &answering(without_end), &["train.steps=3"]) == expected);
    // Ended by a string, it has none.
    let by_string = answering(|reply| {
        without_end(reply);
        for choice in reply["choices"].as_array_mut().unwrap() {
            if choice["finish_reason"] == "stop" {
                choice["stop_reason"] = json!("###");
            }
        }
    });
    let found = run(&small, "string", &by_string, &["train.steps=3"]);
    assert!(found.0[0]["loss"].is_number() && found.2 != expected.2, "other tokens train");
    assert!(ended(&found) > 0 && ended(&found) == ended(&expected));
}

#[test]
fn a_stopped_run_goes_on_as_if_it_had_not_been() {
    let small = Small::new("online");
    let more = ["online.overlap=true", "online.steps_per_round=2"];
    let whole = run(&small, "whole", &usual(), &more);
    let server = usual();
    let settings = settings(&server, &more);
    let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
    small.run("parts", RunDirPolicy::Fresh, Some(3), &settings).1.unwrap();
    small.run("parts", RunDirPolicy::Resume, None, &settings).1.unwrap();
    assert_eq!(log(&small, "parts"), whole.0);
    assert!(small.weights("parts") == whole.2, "the final weights");
}

/// While a request has no answer, or is repeated: the step before is kept, and the run goes on later.
#[test]
fn a_stop_is_heard_whatever_the_server_does() {
    let replies: [fn() -> Reply; 2] = [|| Reply::Nothing, || error(500, "a", "b").into()];
    for (path, reply) in
        [("completions", replies[0]), ("completions", replies[1]), ("load_lora_adapter", replies[0])]
    {
        let small = Small::new("online");
        let whole = run(&small, "whole", &usual(), &[]);
        // From the second round on.
        let server = vllm::start(move |request, before| match request.path == path && before >= 5 {
            true => reply(),
            false => Reply::Usual,
        });
        let more = ["online.server.timeout_s=300", "online.server.retries=1000"];
        let settings = settings(&server, &more);
        let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
        let (config, stop) = (small.config("parts", &settings), AtomicBool::new(false));
        let outcome = std::thread::scope(|scope| {
            scope.spawn(|| {
                while server.requests(path).len() <= 5 {
                    std::thread::sleep(Duration::from_millis(10));
                }
                stop.store(true, Ordering::Relaxed);
            });
            spawn::train(&config, RunDirPolicy::Overwrite, &mut Silent, &stop)
        });
        let outcome = outcome.unwrap_or_else(|e| panic!("{e}"));
        assert!(matches!(outcome, Outcome::Stopped(Some(_))), "{path}: {outcome:?}");
        let again = self::settings(&usual(), &[]);
        let again: Vec<&str> = again.iter().map(String::as_str).collect();
        small.finish("parts", RunDirPolicy::Resume, &again);
        assert!(small.weights("parts") == whole.2, "{path}: the final weights");
    }
}

/// With policy gradients: the ratios of later steps are to the trainer's own log-probabilities, which a checkpoint keeps.
#[test]
fn policy_gradients_of_a_server_go_on_after_a_stop() {
    let small = Small::new("online");
    for more in [
        &["method=grpo", "online.steps_per_round=2", "grpo.num_iterations=2"][..],
        // The log-probabilities are nothing like the policy's.
        &["method=grpo", "online.overlap=true", "grpo.num_iterations=2", "grpo.delta=2"],
        &["method=grpo", "grpo.max_resamples=2", "judges=[{ kind = \"missing_eos\" }]"],
    ] {
        let more = [more, &["online.answers=2"]].concat();
        let whole = run(&small, "whole", &usual(), &more);
        let key = if more.contains(&"online.overlap=true") {
            "sampling/ratio"
        } else {
            "sampling/importance_sampling_ratio/mean"
        };
        assert!(whole.0.iter().all(|line| line[key].is_number()), "{more:?}: {:?}", whole.0);
        let server = usual();
        for (devices, start, until) in
            [("cpu:1", RunDirPolicy::Overwrite, Some(3)), ("cpu:2", RunDirPolicy::Resume, None)]
        {
            let devices = format!("compute.devices={devices}");
            let settings = settings(&server, &[&more[..], &[&devices]].concat());
            let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
            small.run("parts", start, until, &settings).1.unwrap();
        }
        assert_eq!(log(&small, "parts"), whole.0, "{more:?}");
        assert!(small.weights("parts") == whole.2, "{more:?}: the final weights");
    }
    let without = answering(|reply| {
        reply["choices"][0].as_object_mut().unwrap().remove("logprobs");
    });
    let error = ended_by(&without, &["method=grpo", "online.answers=2"]);
    assert!(error.contains("no log-probabilities"), "{error}");
    // Ended at once: nothing but the end token, whose log-probability is not known.
    let empty = answering(|reply| {
        let choice = &mut reply["choices"][0];
        (choice["token_ids"], choice["logprobs"]["token_logprobs"]) = (json!([]), json!([]));
        (choice["finish_reason"], choice["stop_reason"]) = (json!("stop"), Value::Null);
    });
    let found = run(&small, "empty", &empty, &["method=grpo", "online.answers=2", "train.steps=1"]);
    assert!(found.0[0]["loss"].is_number(), "{:?}", found.0);
}

#[test]
fn answers_without_tokens_or_of_another_model_end_the_run() {
    for (change, expected) in [
        (
            (|reply| {
                reply["choices"][0].as_object_mut().unwrap().remove("token_ids");
            }) as fn(&mut Value),
            &["`token_ids`", "0.10.2"][..],
        ),
        (|reply| reply["model"] = json!("base"), &["the model \"base\", expected \"tandem-"]),
        (
            |reply| reply["choices"][1]["prompt_token_ids"] = json!([1, 2]),
            &["differs from the prompt in the request"],
        ),
        (|reply| reply["choices"] = json!([]), &["0 completions of a prompt, expected 2"]),
        (|reply| reply["choices"][1]["token_ids"][0] = json!(1_000_000), &["the server has another base"]),
        (
            |reply| {
                let choice = reply["choices"][1].as_object_mut().unwrap();
                choice.remove("logprobs");
                choice.insert("token_ids".into(), json!([30, 31]));
                choice.insert("finish_reason".into(), "length".into());
            },
            &["cut a completion at 2 tokens", "--max-model-len", "--override-generation-config"],
        ),
        (
            |reply| reply["choices"][0]["finish_reason"] = json!("abort"),
            &["ended by abort, not by \"stop\" or \"length\""],
        ),
    ] {
        let error = ended_by(&answering(change), &[]);
        assert!(expected.iter().all(|part| error.contains(part)), "{error}");
    }
    let garbage = but("completions", |_| Reply::Http(200, "<html>".to_owned()));
    assert!(ended_by(&garbage, &["compute.devices=cpu:2"]).contains("<html>"));
}

#[test]
fn an_adapter_that_is_not_loaded_ends_the_run() {
    let no_path =
        but("load_lora_adapter", |_| Reply::Http(404, json!({ "detail": "Not Found" }).to_string()));
    let error = ended_by(&no_path, &[]);
    assert!(error.contains("VLLM_ALLOW_RUNTIME_LORA_UPDATING=True") && error.contains("404"), "{error}");
    let refused = but("load_lora_adapter", |request| {
        let folder = Path::new(request.body["lora_path"].as_str().unwrap());
        let (status, body) =
            error_404(&format!("Loading lora failed: No adapter found for {}", folder.display()));
        Reply::Http(status, body)
    });
    let error = ended_by(&refused, &[]);
    assert!(error.contains("online.server.adapters") && error.contains("No adapter found"), "{error}");
    // It says that all is well, and goes on serving the base.
    let liar = but("load_lora_adapter", |_| Reply::Http(200, "Success".to_owned()));
    let error = ended_by(&liar, &[]);
    assert!(error.contains("the adapter \"tandem-") && error.contains("serves \"base\""), "{error}");
    let error = ended_by(&usual(), &["online.server.model=other"]);
    assert!(error.contains("it serves \"base\", not \"other\""), "{error}");
}

fn error_404(message: &str) -> (u16, String) {
    error(404, "NotFoundError", message)
}

#[test]
fn a_server_leaves_nothing_to_plan_for_generation() {
    let small = Small::new("online");
    let plan = |name| fs::read_to_string(small.path(name).join("plan.json")).unwrap();
    run(&small, "served", &usual(), &["train.steps=1"]);
    small.finish("own", RunDirPolicy::Fresh, &["adapter.rank=4", "train.steps=1"]);
    assert!(plan("own").contains("\"generate\"") && !plan("served").contains("\"generate\""));
}

#[test]
fn an_adapter_that_a_killed_run_left_loaded_is_loaded_again() {
    for start in [usual, super::server_sglang::usual] {
        let (small, server) = (Small::new("online"), start());
        let expected = run(&small, "first", &server, &["train.steps=1"]);
        // Loaded again as by a run that ended here; the folder is gone.
        let load = &server.requests("load_lora_adapter")[0];
        let address = format!("{}/load_lora_adapter", server.address);
        let http = tandem_judge::http::Http::new(&address, None, Duration::from_secs(60), 1, 1 << 20);
        assert_eq!(http.post(&address, &load.body.to_string()).unwrap().status, 200);
        fs::remove_dir_all(load.body["lora_path"].as_str().unwrap()).unwrap();
        assert!(run(&small, "first", &server, &["train.steps=1"]) == expected, "{}", server.kind);
        assert_eq!(server.requests("unload_lora_adapter").len(), 3, "{}", server.kind);
    }
}

#[test]
fn a_server_in_trouble_is_asked_again_and_one_that_hangs_is_left() {
    let small = Small::new("online");
    let expected = run(&small, "run", &usual(), &["train.steps=1"]);
    let troubled = vllm::start(|_, before| match before {
        0 => Reply::Http(500, error(500, "InternalServerError", "not now").1),
        _ => Reply::Usual,
    });
    assert!(run(&small, "run", &troubled, &["train.steps=1"]) == expected);
    assert_eq!(troubled.requests("completions").len(), 6, "one of five twice");
    let broken = but("completions", |_| Reply::Http(503, "down".to_owned()));
    let error = ended_by(&broken, &["online.server.retries=1"]);
    assert!(error.contains("after 2 tries") && error.contains("HTTP 503: down"), "{error}");
    let hanging = but("completions", |_| Reply::Nothing);
    let error = ended_by(&hanging, &["online.server.retries=0", "online.server.timeout_s=1"]);
    assert!(error.contains("/completions after 1 try of at most 1 s"), "{error}");
}

/// Adapter of each series of completion requests, in order: its bytes, and the completions that a request asked for.
fn asked_of(server: &Fake, adapters: &BTreeMap<String, Vec<u8>>) -> Vec<(u64, Vec<u8>)> {
    let asked = server.requests("completions").into_iter().map(|Request { body, .. }| {
        (body["n"].as_u64().unwrap(), adapters[body["model"].as_str().unwrap()].clone())
    });
    let mut asked: Vec<_> = asked.collect();
    asked.dedup();
    asked
}

/// Prompts of training are answered by the weights that train, held-out prompts by their average.
#[test]
fn a_server_evaluates_the_average_and_trains_on_answers_of_the_weights() {
    let prompts =
        concat!("data.eval=", env!("CARGO_MANIFEST_DIR"), "/../../goldens/online/prompts_conv.jsonl");
    for average in ["train.ema_decay=0.6", "train.optimizer=schedule_free_adamw"] {
        for place in [
            &["online.overlap=false"][..],
            &["online.overlap=true", "compute.devices=cpu:2"],
            &["compute.devices=cpu:2", "compute.sharding=zero3"],
            &["compute.devices=cpu:2", "compute.pipeline=2"],
        ] {
            let small = Small::new("online");
            let adapters = Arc::new(Mutex::new(BTreeMap::new()));
            let loaded = Arc::clone(&adapters);
            let server = vllm::start(move |request, _| {
                if request.path == "load_lora_adapter" {
                    let text = |key: &str| request.body[key].as_str().unwrap().to_owned();
                    let file = Path::new(&text("lora_path")).join("adapter_model.safetensors");
                    loaded.lock().unwrap().insert(text("lora_name"), fs::read(file).unwrap());
                }
                Reply::Usual
            });
            let own = ["train.steps=4", "train.eval_every=2", "train.save_every=1", "train.keep=0", average];
            let more = [&own[..], place].concat();
            let (lines, ..) = run(&small, "run", &server, &[&more[..], &[prompts]].concat());
            // Nothing of the training depends on it.
            let trained: Vec<_> = lines.into_iter().filter(|line| line["split"] == "train").collect();
            let without = run(&small, "without", &usual(), &more);
            assert_eq!(trained, without.0, "{more:?}");
            assert!(small.weights("run") == without.2, "{more:?}");
            // Of a checkpoint the weights that train are exported by a run without an average.
            let exported = |step: u64, average: &[&str]| {
                let settings = settings(&server, &[&["train.steps=4"], average].concat());
                let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
                let checkpoint = small.path(&format!("run/checkpoints/step-{step:06}"));
                let out = small.path(&format!("exported-{step}-{}", average.len()));
                export(&small.config("run", &settings), &checkpoint, &out).unwrap();
                fs::read(out.join("adapter_model.safetensors")).unwrap()
            };
            let (train, evaluate) = (|step| (2, exported(step, &[])), |step| (1, exported(step, &[average])));
            let asked = asked_of(&server, &adapters.lock().unwrap());
            let start = asked[0].1.clone();
            let mut expected =
                vec![(1, start.clone()), (2, start), train(1), evaluate(2), train(2), train(3), evaluate(4)];
            if more.contains(&"online.overlap=true") {
                expected.remove(5);
            }
            // Step 3 has two prompts. Where all their answers are as good, it changes no weight.
            expected.dedup();
            assert_ne!(expected[3].1, expected[4].1);
            assert!(asked == expected, "{more:?}");
        }
    }
}

#[test]
fn the_key_is_sent_and_not_shown() {
    // A variable that every test process has.
    let key = std::env::var("PATH").unwrap();
    let bearer = format!("Bearer {key}");
    let server = vllm::start(move |request, _| {
        assert_eq!(request.authorization.as_deref(), Some(bearer.as_str()));
        match request.path.as_str() {
            "completions" => Reply::Http(401, format!("no access with {bearer}")),
            _ => Reply::Usual,
        }
    });
    let error = ended_by(&server, &["online.server.api_key_env=PATH"]);
    assert!(error.contains("HTTP 401: no access with Bearer …") && !error.contains(&key), "{error}");
    let error = ended_by(&usual(), &["online.server.api_key_env=TANDEM_NO_SUCH_KEY"]);
    assert!(error.contains("online.server.api_key_env names") && error.contains("not set"), "{error}");
}
