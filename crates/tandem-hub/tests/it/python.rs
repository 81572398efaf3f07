//! The cache as `huggingface_hub` reads and writes it. `TANDEM_TEST_HUB` names a Python that has it.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Command;

use crate::server::Server;
use crate::{model, settings};

/// Files of a cache's repository, links with their targets.
fn tree(folder: &Path, prefix: &str, found: &mut BTreeMap<String, String>) {
    for entry in fs::read_dir(folder).expect("a folder").flatten() {
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        let path = entry.path();
        if path.is_symlink() {
            let target = fs::read_link(&path).expect("a link");
            found.insert(name, format!("-> {}", target.display()));
        } else if path.is_dir() {
            tree(&path, &format!("{name}/"), found);
        } else {
            found.insert(name, fs::read_to_string(&path).expect("a text"));
        }
    }
}

fn python(script: &str, endpoint: &str, cache: &Path, is_offline: bool) -> String {
    let python = std::env::var("TANDEM_TEST_HUB").expect("the caller looked");
    let mut command = Command::new(python);
    command.args(["-c", script]).env("HF_ENDPOINT", endpoint).env("HF_HUB_CACHE", cache);
    command.env("HF_HUB_DISABLE_XET", "1").env("HF_HUB_OFFLINE", if is_offline { "1" } else { "0" });
    command.env("HF_HOME", cache.join("home")).env_remove("HTTP_PROXY").env_remove("http_proxy");
    let output = command.output().expect("python");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

const SNAPSHOT: &str = "from huggingface_hub import snapshot_download; print(snapshot_download('o/m'))";

#[test]
fn both_write_the_same_and_read_each_other() {
    if std::env::var_os("TANDEM_TEST_HUB").is_none() {
        // Past the capture of what tests print; a log that cannot be written cannot be complained to.
        let reason =
            "SKIPPED: python::both_write_the_same: TANDEM_TEST_HUB names no Python with huggingface_hub";
        let _ = writeln!(std::io::stderr(), "{reason}");
        return;
    }
    let files = [
        ("config.json", "{}", false),
        ("tokenizer.json", "{\"model\": 1}", false),
        ("additional_chat_templates/tools.jinja", "{{ x }}", false),
        ("model.safetensors", "weights", true),
    ];
    let server = Server::start("models/o/m", &files);
    let [ours, theirs] = [(); 2].map(|()| tempfile::tempdir().expect("a folder"));
    let folder = model(settings(&server.endpoint, ours.path()), "o/m").expect("a model");
    let other = python(SNAPSHOT, &server.endpoint, theirs.path(), false);
    let read = |cache: &Path| {
        let mut found = BTreeMap::new();
        for part in ["refs", "blobs", "snapshots"] {
            tree(&cache.join("models--o--m").join(part), &format!("{part}/"), &mut found);
        }
        found
    };
    assert_eq!(read(ours.path()), read(theirs.path()));
    // Each reads the other's cache without a server.
    assert_eq!(python(SNAPSHOT, "http://127.0.0.1:9", ours.path(), true), folder.display().to_string());
    let offline = settings("http://127.0.0.1:9", theirs.path()).offline();
    assert_eq!(model(offline, "o/m").expect("a model").display().to_string(), other);
}
