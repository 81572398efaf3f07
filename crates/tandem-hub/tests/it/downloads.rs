//! Downloads into the cache: files, their places, and resumption after an interruption.

use std::fs;
use std::path::{Path, PathBuf};

use tandem_hub::{Hub, ModelFiles};

use crate::server::{COMMIT, Server};
use crate::{Log, message, model, name, settings};

/// Weights of 40,000 bytes.
fn weights() -> String {
    (0..10_000).map(|number| format!("{number:04}")).collect()
}

fn small_model() -> Server {
    let weights = weights();
    let files = [
        ("config.json", "{}", false),
        ("tokenizer.json", "{\"model\": 1}", false),
        ("model.safetensors", weights.as_str(), true),
        ("additional_chat_templates/tools.jinja", "{{ x }}", false),
        ("original/consolidated.00.pth", "x", true),
        ("onnx/model.onnx", "x", true),
        ("pytorch_model.bin", "x", true),
        ("model.gguf", "x", true),
        ("README.md", "# a", false),
    ];
    Server::start("models/o/m", &files)
}

fn blob(cache: &Path, pointer: &str) -> PathBuf {
    let pointer = cache.join(format!("models--o--m/snapshots/{COMMIT}")).join(pointer);
    pointer.parent().expect("a folder").join(fs::read_link(&pointer).expect("a link"))
}

#[test]
fn only_needed_files_lie_in_the_layout_of_huggingface_hub() {
    let (server, cache) = (small_model(), tempfile::tempdir().expect("a folder"));
    let folder = model(settings(&server.endpoint, cache.path()), "o/m").expect("a model");
    let repo = cache.path().join("models--o--m");
    assert_eq!(folder, repo.join("snapshots").join(COMMIT));
    assert_eq!(fs::read_to_string(repo.join("refs/main")).expect("a ref"), COMMIT);
    let mut names: Vec<_> =
        fs::read_dir(&folder).expect("a folder").map(|e| e.expect("e").file_name()).collect();
    names.sort();
    assert_eq!(names, ["additional_chat_templates", "config.json", "model.safetensors", "tokenizer.json"]);
    let link = fs::read_link(folder.join("additional_chat_templates/tools.jinja")).expect("a link");
    assert!(link.starts_with("../../../blobs"), "{link:?}");
    let link = fs::read_link(folder.join("model.safetensors")).expect("a link");
    assert!(link.starts_with("../../blobs"), "{link:?}");
    assert_eq!(fs::read_to_string(folder.join("model.safetensors")).expect("a file"), weights());
    assert_eq!(blob(cache.path(), "model.safetensors").file_name().expect("a name").len(), 64);
    assert_eq!(blob(cache.path(), "config.json").file_name().expect("a name").len(), 40);
    let is_partial = |entry: fs::DirEntry| entry.path().extension().is_some();
    assert!(!fs::read_dir(repo.join("blobs")).expect("blobs").any(|entry| is_partial(entry.expect("e"))));
}

#[test]
fn the_token_stays_with_the_hub() {
    let (server, cache) = (small_model(), tempfile::tempdir().expect("a folder"));
    server.set(|state| state.token = Some("hf_secret"));
    model(settings(&server.endpoint, cache.path()).with_token("hf_secret"), "o/m").expect("a model");
    let requests = server.requests();
    assert!(requests.iter().any(|request| request.is_storage));
    for request in requests {
        assert_eq!(request.authorization.is_some(), !request.is_storage, "{request:?}");
    }
}

#[test]
fn a_cut_download_goes_on_where_it_was_cut() {
    let (server, cache) = (small_model(), tempfile::tempdir().expect("a folder"));
    server.set(|state| state.cuts = vec![10_000, 0, 7, 12_000]);
    let folder = model(settings(&server.endpoint, cache.path()), "o/m").expect("a model");
    assert_eq!(fs::read_to_string(folder.join("model.safetensors")).expect("a file"), weights());
    let ranges: Vec<_> = server
        .requests()
        .into_iter()
        .filter(|request| request.is_storage)
        .map(|request| request.range)
        .collect();
    let range = |from: usize| Some(format!("bytes={from}-"));
    assert_eq!(ranges, [None, range(10_000), range(10_000), range(10_007), range(22_007)]);
}

#[test]
fn a_second_command_goes_on_with_the_incomplete_file() {
    let (server, cache) = (small_model(), tempfile::tempdir().expect("a folder"));
    server.set(|state| state.cuts = [vec![15_000], vec![0; 8]].concat());
    let text = message(model(settings(&server.endpoint, cache.path()), "o/m"));
    assert!(text.contains("model.safetensors") && text.contains("run the command again"), "{text}");
    assert!(!cache.path().join(format!("models--o--m/snapshots/{COMMIT}/model.safetensors")).exists());
    assert!(!cache.path().join("models--o--m/refs/main").exists());
    server.set(|state| state.cuts.clear());
    let mut log = Log::default();
    let hub = Hub::new(settings(&server.endpoint, cache.path()));
    let folder = hub.model(&name("o/m"), ModelFiles::Whole, &mut log).expect("a model");
    assert_eq!(log.starts, [("model.safetensors".to_owned(), 15_000)]);
    assert_eq!(fs::read_to_string(folder.join("model.safetensors")).expect("a file"), weights());
}

#[test]
fn servers_without_ranges_or_lengths_are_understood() {
    let (server, cache) = (small_model(), tempfile::tempdir().expect("a folder"));
    server.set(|state| (state.ignores_ranges, state.is_chunked, state.cuts) = (true, true, vec![10_000]));
    let folder = model(settings(&server.endpoint, cache.path()), "o/m").expect("a model");
    assert_eq!(fs::read_to_string(folder.join("model.safetensors")).expect("a file"), weights());
}

#[test]
fn a_wrong_byte_is_downloaded_again() {
    let (server, cache) = (small_model(), tempfile::tempdir().expect("a folder"));
    server.set(|state| state.is_corrupt = true);
    let folder = model(settings(&server.endpoint, cache.path()), "o/m").expect("a model");
    assert_eq!(fs::read_to_string(folder.join("model.safetensors")).expect("a file"), weights());
}

#[test]
fn a_hash_that_never_agrees_leaves_no_blob() {
    let (server, cache) = (small_model(), tempfile::tempdir().expect("a folder"));
    server.set(|state| state.etag = Some("ab3f9ab3f9ab3f9ab3f9ab3f9ab3f9ab3f9ab3f9"));
    let text = message(model(settings(&server.endpoint, cache.path()), "o/m"));
    assert!(text.contains("its hash is") && text.contains("ab3f9"), "{text}");
    assert_eq!(fs::read_dir(cache.path().join("models--o--m/blobs")).expect("blobs").count(), 0);
}

#[test]
fn busy_servers_are_asked_again() {
    let (server, cache) = (small_model(), tempfile::tempdir().expect("a folder"));
    server.set(|state| state.statuses = vec![(429, "", "Retry-After: 0\r\n"), (503, "", ""), (500, "", "")]);
    model(settings(&server.endpoint, cache.path()), "o/m").expect("a model");
}

#[test]
fn what_is_cached_needs_no_network() {
    let (server, cache) = (small_model(), tempfile::tempdir().expect("a folder"));
    let folder = model(settings(&server.endpoint, cache.path()), "o/m").expect("a model");
    server.requests();
    // A commit is never asked for again.
    assert_eq!(
        model(settings(&server.endpoint, cache.path()), &format!("o/m@{COMMIT}")).expect("a model"),
        folder
    );
    assert_eq!(server.requests().len(), 0);
    // A branch is, and the cache serves where nobody answers, or the hub has a fault.
    assert_eq!(model(settings(&server.endpoint, cache.path()), "o/m").expect("a model"), folder);
    assert_eq!(server.requests().len(), 1);
    server.set(|state| state.statuses = vec![(503, "", ""); 5]);
    for endpoint in ["http://127.0.0.1:9", &server.endpoint] {
        let mut log = Log::default();
        let hub = Hub::new(settings(endpoint, cache.path()));
        assert_eq!(hub.model(&name("o/m"), ModelFiles::Whole, &mut log).expect("a model"), folder);
        assert!(log.notices[0].contains("from the cache"), "{:?}", log.notices);
    }
    let offline = settings(&server.endpoint, cache.path()).offline();
    server.requests();
    assert_eq!(model(offline.clone(), "o/m").expect("a model"), folder);
    // A blob that is gone is missing.
    fs::remove_file(blob(cache.path(), "model.safetensors")).expect("a blob");
    let text = message(model(offline, "o/m"));
    assert!(text.contains("weights") && text.contains("HF_HUB_OFFLINE"), "{text}");
    assert_eq!(server.requests().len(), 0);
}

#[test]
fn several_at_once_download_once() {
    let (server, cache) = (small_model(), tempfile::tempdir().expect("a folder"));
    std::thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| model(settings(&server.endpoint, cache.path()), "o/m").expect("a model"));
        }
    });
    let downloads = server.requests().into_iter().filter(|request| request.is_storage).count();
    assert_eq!(downloads, 1);
}

#[test]
fn shards_follow_their_index() {
    let index = "{\"weight_map\": {\"a\": \"model-2.safetensors\", \"b\": \"model-1.safetensors\", \"c\": \"model-1.safetensors\"}}";
    let files = [
        ("config.json", "{}", false),
        ("model.safetensors.index.json", index, false),
        ("model-1.safetensors", "1", true),
        ("model-2.safetensors", "2", true),
        ("model-3.safetensors", "3", true),
    ];
    let (server, cache) = (Server::start("models/o/m", &files), tempfile::tempdir().expect("a folder"));
    let folder = model(settings(&server.endpoint, cache.path()), "o/m@v1").expect("a model");
    assert!(folder.join("model-1.safetensors").exists() && folder.join("model-2.safetensors").exists());
    assert!(!folder.join("model-3.safetensors").exists());
    assert_eq!(fs::read_to_string(cache.path().join("models--o--m/refs/v1")).expect("a ref"), COMMIT);
}

#[test]
fn parts_of_models_and_former_names() {
    let (server, cache) = (small_model(), tempfile::tempdir().expect("a folder"));
    let hub = Hub::new(settings(&server.endpoint, cache.path()));
    let folder = hub.model(&name("o/m"), ModelFiles::WithoutWeights, &mut Log::default()).expect("a model");
    assert!(folder.join("config.json").exists() && !folder.join("model.safetensors").exists());
    let file = hub.model(&name("o/m/model.gguf"), ModelFiles::Whole, &mut Log::default()).expect("a file");
    assert_eq!(fs::read_to_string(file).expect("a file"), "x");
    server.set(|state| state.former = Some(("old/m", "o/m")));
    model(settings(&server.endpoint, cache.path()), "old/m@refs/pr/1").expect("a model");
    assert!(cache.path().join("models--old--m/refs/refs/pr/1").exists());
}
