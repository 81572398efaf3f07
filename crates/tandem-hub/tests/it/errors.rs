//! Messages of what a user can mend, and hostile servers.

use std::fs;

use tandem_hub::{Hub, ModelFiles};

use crate::server::{COMMIT, Server};
use crate::{Log, message, model, name, settings};

fn server() -> Server {
    Server::start("models/o/m", &[("config.json", "{}", false), ("model.gguf", "x", true)])
}

fn message_of(server: &Server, text: &str) -> String {
    let cache = tempfile::tempdir().expect("a folder");
    let result = model(settings(&server.endpoint, cache.path()), text);
    assert!(result.as_ref().is_err_and(tandem_hub::HubError::is_mistake), "{result:?}");
    message(result)
}

#[test]
fn each_refusal_names_its_remedy() {
    let server = server();
    let text = message_of(&server, "o/other");
    assert!(text.contains("no model o/other (HTTP 404)") && text.contains("HF_TOKEN"), "{text}");
    let text = message_of(&server, "o/m@nope");
    assert!(text.contains("o/m has no revision \"nope\""), "{text}");
    let text = message_of(&server, "o/m");
    assert!(
        text.contains(COMMIT) && text.contains("no weights") && text.contains("hf://o/m/model.gguf"),
        "{text}"
    );
    let text = message_of(&server, "o/m/other.gguf");
    assert!(text.contains("no file other.gguf") && text.contains("model.gguf"), "{text}");
    server.set(|state| state.statuses = vec![(403, "GatedRepo", "")]);
    let text = message_of(&server, "o/m");
    assert!(
        text.contains("gated (HTTP 403)") && text.contains(&format!("{}/o/m", server.endpoint)),
        "{text}"
    );
    server.set(|state| state.statuses = vec![(401, "GatedRepo", "")]);
    assert!(message_of(&server, "o/m").contains("accept its licence"));
    server.set(|state| state.token = Some("t"));
    let text = message_of(&server, "o/m");
    assert!(text.contains("(HTTP 401)") && text.contains("private"), "{text}");
}

#[test]
fn an_adapter_needs_its_files() {
    let (server, cache) = (server(), tempfile::tempdir().expect("a folder"));
    let hub = Hub::new(settings(&server.endpoint, cache.path()));
    let text = message(hub.model(&name("o/m"), ModelFiles::Adapter, &mut Log::default()));
    assert!(text.contains("no adapter_config.json"), "{text}");
}

#[test]
fn offline_and_unreachable_say_so() {
    let cache = tempfile::tempdir().expect("a folder");
    let text = message(model(settings("http://127.0.0.1:9", cache.path()).offline(), "o/m"));
    assert!(text.contains("not in the cache") && text.contains("HF_HUB_OFFLINE forbids"), "{text}");
    let result = model(settings("http://127.0.0.1:9", cache.path()), "o/m");
    assert!(result.as_ref().is_err_and(|error| !error.is_mistake()));
    let text = message(result);
    assert!(text.contains("after 5 attempts"), "{text}");
}

#[test]
fn hostile_names_are_refused() {
    for file in ["../x", "/etc/x", "a/../../x", "a\\b", "a//b", "./x", ""] {
        let (server, cache) = (server(), tempfile::tempdir().expect("a folder"));
        server.set(|state| state.listed = vec![file]);
        let text = message(model(settings(&server.endpoint, cache.path()), "o/m"));
        assert!(text.contains("the file name"), "{file}: {text}");
        assert_eq!(fs::read_dir(cache.path()).expect("a folder").count(), 0, "{file}");
    }
    for etag in ["../x", "a/b", "", "..", "a b"] {
        let (server, cache) = (server(), tempfile::tempdir().expect("a folder"));
        server.set(|state| state.etag = Some(etag));
        let text = message(model(settings(&server.endpoint, cache.path()), "o/m/config.json"));
        assert!(text.contains("cannot name a file"), "{etag}: {text}");
    }
}

#[test]
fn hostile_shards_are_refused() {
    let index = "{\"weight_map\": {\"a\": \"../../x.safetensors\"}}";
    let files = [("config.json", "{}", false), ("model.safetensors.index.json", index, false)];
    let text = message_of(&Server::start("models/o/m", &files), "o/m");
    assert!(text.contains("names \"../../x.safetensors\", which is missing"), "{text}");
}

#[test]
fn the_token_is_never_shown() {
    let (server, cache) = (server(), tempfile::tempdir().expect("a folder"));
    server.set(|state| state.statuses = vec![(400, "", "X-Error-Message: bad token hf_secret\r\n")]);
    let settings = settings(&server.endpoint, cache.path()).with_token("hf_secret");
    assert!(!format!("{settings:?}").contains("hf_secret"));
    let text = message(model(settings, "o/m"));
    assert!(text.contains("bad token …") && !text.contains("hf_secret"), "{text}");
}
