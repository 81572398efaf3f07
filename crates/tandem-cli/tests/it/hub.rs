//! Names of the hub in configurations and on the command line, against a local server.

use std::collections::BTreeMap;
use std::fs;

use crate::hub_server::{COMMIT, Server, Stored};
use crate::workshop::{Outcome, Workshop};

/// A workshop whose model is `o/m` and whose rows are `o/d` on the hub, not here.
struct Online {
    shop: Workshop,
    server: Server,
}

impl Online {
    fn new() -> Self {
        let shop = Workshop::new();
        let file = |path: &str, is_large| Stored { bytes: shop.bytes(path), is_large };
        let mut model = BTreeMap::new();
        for entry in fs::read_dir(shop.path("model")).unwrap().flatten() {
            let name = entry.file_name().into_string().unwrap();
            model.insert(name.clone(), file(&format!("model/{name}"), name.ends_with("safetensors")));
        }
        let rows = BTreeMap::from([("train.jsonl".to_owned(), file("preferences.jsonl", true))]);
        let repos = BTreeMap::from([("models/o/m".to_owned(), model), ("datasets/o/d".to_owned(), rows)]);
        let toml = shop.dpo_toml("run").replace("\"model\"", "\"o/m\"");
        shop.write("hub.toml", &toml.replace("\"preferences.jsonl\"", "\"hf://o/d/train\""));
        Self { shop, server: Server::with(repos) }
    }

    fn run(&self, arguments: &[&str]) -> Outcome {
        self.run_with(arguments, &[])
    }

    fn run_with(&self, arguments: &[&str], variables: &[(&str, &str)]) -> Outcome {
        let mut command = self.shop.command(arguments);
        for name in [
            "HF_HUB_CACHE",
            "HUGGINGFACE_HUB_CACHE",
            "HF_HUB_OFFLINE",
            "HF_TOKEN",
            "HUGGING_FACE_HUB_TOKEN",
            "HF_TOKEN_PATH",
        ] {
            command.env_remove(name);
        }
        command.env("HF_ENDPOINT", &self.server.endpoint).env("HF_HOME", self.shop.path("home"));
        let output = command.envs(variables.iter().copied()).output().expect("the built command runs");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Outcome { code: output.status.code(), stdout: text(&output.stdout), stderr: text(&output.stderr) }
    }
}

#[test]
fn a_run_from_the_hub_has_the_bits_of_a_run_from_folders() {
    let online = Online::new();
    let shop = &online.shop;
    shop.write("dpo.toml", &shop.dpo_toml("local"));
    online.run(&["train", "dpo.toml"]).expect(0);
    assert_eq!(online.server.requests().len(), 0);
    online.run(&["train", "hub.toml"]).expect(0).says(&["download model.safetensors"]);
    assert_eq!(shop.bytes("local/final/model.safetensors"), shop.bytes("run/final/model.safetensors"));
    // The resolved config names the commit, and is itself a config that needs no hub.
    let resolved = shop.read("run/config.toml");
    for repo in ["models--o--m", "datasets--o--d"] {
        assert!(resolved.contains(&format!("home/hub/{repo}/snapshots/{COMMIT}")), "{resolved}");
    }
    online.server.requests();
    let offline = [("HF_HUB_OFFLINE", "1")];
    online.run_with(&["train", "hub.toml", "--overwrite"], &offline).expect(0);
    online.run(&["plan", "run/config.toml"]).expect(0);
    assert_eq!(online.server.requests().len(), 0);
}

#[test]
fn commands_take_names_of_the_hub() {
    let online = Online::new();
    let local = online.run(&["generate", "model", "--raw", "--max-new-tokens", "4", "the"]).expect(0);
    let remote = online.run(&["generate", "o/m@main", "--raw", "--max-new-tokens", "4", "the"]).expect(0);
    assert_eq!(local.stdout, remote.stdout);
    online.run(&["init", "hf://o/m", "new", "--seed", "3"]).expect(0);
    assert_eq!(online.shop.bytes("new/model.safetensors"), online.shop.bytes("model/model.safetensors"));
}

#[test]
fn plans_and_random_weights_download_no_weights() {
    let online = Online::new();
    online.run(&["plan", "hub.toml", "--assume-tokens", "64"]).expect(0);
    online.run(&["plan", "hub.toml"]).expect(0);
    online.run(&["data", "hub.toml"]).expect(0);
    online.run(&["init", "o/m", "new"]).expect(0);
    online.run(&["train", "hub.toml", "--set", "weights=random", "--set", "train.steps=1"]).expect(0);
    let weights = |path: &str| path.contains("model.safetensors");
    assert!(!online.server.requests().iter().any(|request| weights(&request.path)));
}

#[test]
fn a_path_that_is_not_there_may_be_a_name() {
    let online = Online::new();
    online.run(&["train", "hub.toml", "--set", "model=o/other"]).expect(2).says(&[
        "--set model=o/other: `model` (no such path as o/other; read as a name of the hub)",
        "no model o/other (HTTP 404)",
    ]);
    let run = online.run(&["train", "hub.toml", "--set", "data.train=o/d"]);
    run.expect(2).says(&["`data.train`", "hf://o/d/train"]);
    online.run(&["generate", "o/other", "x"]).expect(2).says(&["o/other", "no such path", "HTTP 404"]);
    online.server.requests();
    // Other mistakes come first, and other paths are no names.
    online.run(&["train", "hub.toml", "--set", "train.step=1"]).expect(2).says(&["train.steps"]);
    online.run(&["train", "hub.toml", "--set", "model=./o/m"]).expect(2).says(&["o/m"]);
    assert!(!online.server.requests().iter().any(|request| request.path.contains("o/m")));
    let offline = [("HF_HUB_OFFLINE", "1")];
    online.run_with(&["generate", "o/n", "x"], &offline).expect(2).says(&["HF_HUB_OFFLINE"]);
}

#[test]
fn the_token_comes_from_the_environment_or_its_file() {
    let online = Online::new();
    online.server.set(|state| state.token = Some("hf_x"));
    online.run(&["data", "hub.toml"]).expect(2).says(&["no model o/m (HTTP 401)", "HF_TOKEN"]);
    online.run_with(&["data", "hub.toml"], &[("HF_TOKEN", "hf_x")]).expect(0);
    fs::remove_dir_all(online.shop.path("home")).unwrap();
    fs::create_dir(online.shop.path("home")).unwrap();
    online.shop.write("home/token", "hf_x\n");
    online.run(&["data", "hub.toml"]).expect(0);
    let elsewhere = online.shop.path("elsewhere");
    online.run_with(&["data", "hub.toml"], &[("HF_HUB_CACHE", elsewhere.to_str().unwrap())]).expect(0);
    assert!(elsewhere.join("models--o--m/refs/main").is_file());
}

#[test]
fn a_launcher_downloads_before_it_starts_ranks() {
    let online = Online::new();
    let run = online.run(&["launch", "-n", "2", "train", "hub.toml", "--set", "model=o/other"]).expect(2);
    assert_eq!(run.stderr.matches("HTTP 404").count(), 1, "{}", run.stderr);
}

#[test]
fn a_hub_that_cannot_be_reached_is_no_mistake() {
    let online = Online::new();
    online.server.set(|state| state.statuses = vec![(500, "", "Retry-After: 0\r\n"); 5]);
    online.run(&["train", "hub.toml"]).expect(1).says(&["`model`", "after 5 attempts", "HTTP 500"]);
}
