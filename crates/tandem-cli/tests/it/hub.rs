//! Names of the hub in configurations and on the command line, against a local server.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

use crate::hub_server::{COMMIT, Server, Stored};
use crate::workshop::{Outcome, Workshop};

/// A workshop whose model is `o/m` and whose rows are `o/d` on the hub, not here.
struct Online {
    shop: Workshop,
    server: Server,
}

/// Files of a folder of the workshop, as the hub stores them.
fn stored(shop: &Workshop, folder: &str) -> BTreeMap<String, Stored> {
    let names = fs::read_dir(shop.path(folder)).unwrap().flatten();
    let names = names.map(|entry| entry.file_name().into_string().unwrap());
    let file = |name: String| {
        let bytes = shop.bytes(&format!("{folder}/{name}"));
        let is_large = name.ends_with("safetensors");
        (name, Stored { bytes, is_large })
    };
    names.map(file).collect()
}

impl Online {
    fn new() -> Self {
        let shop = Workshop::new();
        let rows = Stored { bytes: shop.bytes("preferences.jsonl"), is_large: true };
        let rows = BTreeMap::from([("train.jsonl".to_owned(), rows)]);
        let repos = BTreeMap::from([
            ("models/o/m".to_owned(), stored(&shop, "model")),
            ("datasets/o/d".to_owned(), rows),
        ]);
        let toml = shop.dpo_toml("run").replace("\"model\"", "\"o/m\"");
        shop.write("hub.toml", &toml.replace("\"preferences.jsonl\"", "\"hf://o/d/train\""));
        Self { shop, server: Server::with(repos) }
    }

    /// Puts a folder of the workshop on the hub.
    fn publish(&self, name: &str, folder: &str) {
        let files = stored(&self.shop, folder);
        self.server.set(|state| _ = state.repos.insert(format!("models/{name}"), files));
    }

    fn run(&self, arguments: &[&str]) -> Outcome {
        self.run_with(arguments, &[])
    }

    fn run_with(&self, arguments: &[&str], variables: &[(&str, &str)]) -> Outcome {
        let mut command = self.shop.command(arguments);
        self.serve(&mut command);
        let output = command.envs(variables.iter().copied()).output().expect("the built command runs");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Outcome { code: output.status.code(), stdout: text(&output.stdout), stderr: text(&output.stderr) }
    }

    /// Makes a command ask this hub, with a cache in the workshop.
    fn serve(&self, command: &mut Command) {
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
    online.run(&["init-weights", "hf://o/m", "new", "--seed", "3"]).expect(0);
    assert_eq!(online.shop.bytes("new/model.safetensors"), online.shop.bytes("model/model.safetensors"));
}

#[test]
fn plans_and_random_weights_download_no_weights() {
    let online = Online::new();
    online.run(&["plan", "hub.toml", "--assume-tokens", "64"]).expect(0);
    online.run(&["plan", "hub.toml"]).expect(0);
    online.run(&["data", "hub.toml"]).expect(0);
    online.run(&["init-weights", "o/m", "new"]).expect(0);
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

#[test]
fn an_adapter_of_the_hub_starts_a_run_and_a_generation() {
    let online = Online::new();
    let shop = &online.shop;
    shop.write("dpo.toml", &shop.dpo_toml("lora"));
    online.run(&["train", "dpo.toml", "--set", "adapter.rank=4"]).expect(0);
    online.publish("o/a", "lora/final");
    let start = |config: &str, adapter: &str, output: &str| {
        let (adapter, output) = (format!("adapter.start={adapter}"), format!("output={output}"));
        online
            .run(&["train", config, "--set", &adapter, "--set", &output, "--set", "train.steps=2"])
            .expect(0);
    };
    start("dpo.toml", "lora/final", "local");
    start("hub.toml", "o/a@main", "remote");
    let adapter = |run: &str| shop.bytes(&format!("{run}/final/adapter_model.safetensors"));
    assert_eq!(adapter("local"), adapter("remote"));
    assert_ne!(adapter("local"), adapter("lora"));
    let generate = |model: &str, adapter: &str| {
        online
            .run(&["generate", model, "--adapter", adapter, "--raw", "--max-new-tokens", "4", "the"])
            .expect(0)
    };
    assert_eq!(generate("model", "lora/final").stdout, generate("o/m", "o/a").stdout);
}

#[test]
fn a_reward_model_of_the_hub_judges() {
    let online = Online::new();
    let shop = &online.shop;
    shop.write("reward.toml", &shop.dpo_toml("reward").replace("\"dpo\"", "\"reward\""));
    online.run(&["train", "reward.toml"]).expect(0);
    online.publish("o/r", "reward/final");
    let run = |judge: &str, output: &str| {
        shop.write_online(output);
        let length = "kind = \"length\"\nper_unit = 1.0\nunit = \"characters\"";
        let toml = shop.read("online.toml");
        assert!(toml.contains(length), "{toml}");
        shop.write(
            "judged.toml",
            &toml.replace(length, &format!("kind = \"reward\"\nmodel = \"{judge}\"\nmax_length = 64")),
        );
        online.run(&["train", "judged.toml"]).expect(0);
        shop.bytes(&format!("{output}/final/model.safetensors"))
    };
    assert_eq!(run("reward/final", "local"), run("o/r", "remote"));
}

/// A file that may not grow stands for a full disk: the write fails, and what is whole stays.
#[cfg(unix)]
#[test]
fn a_download_that_the_disk_refuses_names_the_file_and_goes_on_later() {
    let online = Online::new();
    let limited = |limit: &str| {
        let script = format!("trap '' XFSZ; ulimit -f {limit}; exec \"$0\" \"$@\"");
        let mut command = Command::new("bash");
        command.args(["-c", &script, env!("CARGO_BIN_EXE_tandem"), "generate", "o/m", "--raw", "the"]);
        command.args(["--max-new-tokens", "4"]).current_dir(online.shop.path("."));
        online.serve(&mut command);
        command.output().expect("bash runs")
    };
    let refused = limited("8");
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(1), "{message}");
    assert!(message.contains("home/hub") && message.contains("File too large"), "{message}");
    let snapshot = online.shop.path(&format!("home/hub/models--o--m/snapshots/{COMMIT}/model.safetensors"));
    assert!(!snapshot.exists(), "half a file is not taken for the whole");
    let whole = limited("unlimited");
    assert!(whole.status.success(), "{}", String::from_utf8_lossy(&whole.stderr));
    assert_eq!(fs::read(snapshot).unwrap(), online.shop.bytes("model/model.safetensors"));
}
