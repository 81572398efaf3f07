//! Every setting of `examples/phi2-two-a10` for real, on a sixteenth of Phi-2, two ranks, and a 256th of the memory.
//!
//! The memory of a run is a sum of products of two sizes, and each size is divided by 16:
//!
//! * weights, gradients, states: width × width, width × feed-forward, vocabulary × width;
//! * activations: tokens × width, tokens × feed-forward, and tokens × heads;
//! * logits: tokens × vocabulary; adapters: rank × width.
//!
//! So width (2560 → 160), feed-forward (10240 → 640), heads (32 → 2; a head stays 80 wide, 32 of them rotated), vocabulary
//! (51200 → 3200), tokens of a micro-batch (2048 → 128) and the adapter's rank (16 → 1) shrink together, the 32 blocks stay, and
//! the cap is a 256th of the card's 24 GB. Width alone, with the vocabulary and the tokens as they are, would leave tables and
//! activations a sixteenth: no one cap would then mean the same for all settings. What does not shrink by 256: norms and biases
//! (width alone), and units of 4-bit weights, of which a matrix of 160 × 160 fills 1.56 but takes 2. [`RATIO`] is what that comes
//! to: so the small model gets the whole of its card, while of the large one's 23.1 GB (21.5 GiB) are a program's. The verdicts are
//! compared, too.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::workshop::{self, Workshop};
use serde_json::{Value, json};

/// Memory of a rank of the small model, times 256, against that of one of Phi-2.
const RATIO: std::ops::Range<f64> = 0.95..1.1;

const CAP: u64 = 24_000_000_000 / 256;

/// Largest difference between what was planned and what the arena took, relative.
const TOLERANCE: f64 = 0.05;

fn example() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/phi2-two-a10").canonicalize().unwrap()
}

/// The verdict on the example itself: whether it fits, and what a rank needs.
fn verdict(plan: &str) -> (bool, u64) {
    let plan: Value = serde_json::from_str(plan).unwrap_or_else(|e| panic!("{e}: {plan}"));
    (plan["fits"].as_bool().unwrap(), plan["needed_bytes"].as_u64().unwrap())
}

fn whole(name: &str, toml: &str) -> (bool, u64) {
    let command = toml.lines().nth(1).and_then(|line| line.strip_prefix("# tandem ")).expect("the command");
    let mut tandem = Command::new(env!("CARGO_BIN_EXE_tandem"));
    let output =
        tandem.args(command.split_whitespace()).arg("--json").current_dir(example()).output().unwrap();
    let verdict = verdict(&String::from_utf8(output.stdout).unwrap());
    let expected = if verdict.0 { 0 } else { 2 };
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(expected), "{name}: {stderr}");
    verdict
}

/// `phi/` with a config and a tokenizer, and pairs of about 64 tokens.
fn shop() -> Workshop {
    let shop = Workshop::new();
    let text = fs::read_to_string(example().join("phi-2/config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    for name in
        ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size"]
    {
        config[name] = json!(config[name].as_u64().unwrap() / 16);
    }
    for token in ["bos_token_id", "eos_token_id"] {
        config[token] = json!(2);
    }
    fs::create_dir(shop.path("phi")).unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(shop.path("source").join(name), shop.path("phi").join(name)).unwrap();
    }
    shop.write("phi/config.json", &config.to_string());
    // The tokenizer has seen no digits: each is a token.
    let digits = |seed: usize, count: usize| -> String {
        (0..count).map(|i| char::from(b'0' + ((seed * 7 + i * i * 3 + i) % 10) as u8)).collect()
    };
    shop.write_rows(
        "pairs.jsonl",
        16,
        |i| json!({"prompt": digits(i, 20), "chosen": digits(i + 1, 20), "rejected": digits(i + 4, 20)}),
    );
    shop
}

/// Settings that turn the example's config into the small run.
fn settings(toml: &str, cap: u64) -> Vec<String> {
    let mut settings: Vec<String> = [
        "model=phi",
        "weights=random",
        "output=run",
        "data.train=pairs.jsonl",
        "data.cache=cache",
        "data.max_length=64",
        "train.batch_size=8",
        "compute.devices=cpu:2",
        "compute.threads=1",
    ]
    .map(str::to_owned)
    .to_vec();
    settings.push(format!("compute.memory={cap}B"));
    let value = |key: &str| {
        let line = toml.lines().find_map(|line| line.strip_prefix(key)?.trim_start().strip_prefix('='));
        line.map(|value| value.trim().trim_matches('"').to_owned())
    };
    if let Some(rank) = value("rank") {
        settings.push(format!("adapter.rank={}", rank.parse::<usize>().unwrap() / 16));
    }
    if value("start").is_some() {
        settings.push("adapter.start=sft-adapter".to_owned());
    }
    if value("micro_batch_size").is_none() {
        let tokens = value("micro_batch_tokens").map_or(2048, |tokens| tokens.parse::<usize>().unwrap());
        settings.push(format!("train.micro_batch_tokens={}", tokens / 16));
    }
    settings.iter().flat_map(|text| ["--set".to_owned(), text.clone()]).collect()
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn what_the_plan_accepts_runs_to_its_end_under_the_cap_and_the_rest_is_refused() {
    let shop = shop();
    let mut names: Vec<String> = workshop::entries(&example());
    names.retain(|name| name.ends_with(".toml"));
    // The adapter of the first is what those with two begin with.
    names.sort_by_key(|name| name.starts_with("two-adapters"));
    let (mut accepted, mut refused) = (0, 0);
    for name in names {
        let toml = fs::read_to_string(example().join(&name)).unwrap();
        let full = whole(&name, &toml);
        shop.write(&name, &toml);
        let run_within = |cap: u64, command: &[&str]| {
            let settings = settings(&toml, cap);
            let words: Vec<&str> =
                command.iter().copied().chain(settings.iter().map(String::as_str)).collect();
            shop.run(&words)
        };
        // What is offloaded lies in the host's memory, beside a card's; where the device is the processor both are capped.
        let free = run_within(1 << 40, &["plan", &name, "--json"]).expect(0).stdout;
        let host = serde_json::from_str::<Value>(&free).unwrap()["ranks"][0]["plan"]["host_bytes"].as_u64();
        let host = host.unwrap();
        let run = |command: &[&str]| run_within(CAP + host, command);
        let planned = run(&["plan", &name, "--json"]);
        let (fits, needed) = verdict(&planned.stdout);
        let plan = planned.expect(if fits { 0 } else { 2 }).stdout;
        let needed = needed - host;
        let ratio = needed as f64 * 256.0 / full.1 as f64;
        println!("{name}: {:.2} GiB, {needed} bytes, {ratio:.3}", full.1 as f64 / f64::from(1 << 30));
        assert_eq!(fits, full.0, "{name}: {needed} bytes of {CAP}, and of the whole model {}", full.1);
        assert!(RATIO.contains(&ratio), "{name}: {ratio}");
        let tokens =
            serde_json::from_str::<Value>(&plan).unwrap()["ranks"][0]["plan"]["max_micro_batch_tokens"]
                .as_u64();
        assert!(tokens.is_some_and(|tokens| tokens <= 128), "{name}: {tokens:?}");
        if !fits {
            let outcome = run(&["train", &name]).expect(2);
            outcome.says(&[
                "nothing was loaded",
                "it does not fit",
                "the cheapest change with which it fits",
            ]);
            let left = workshop::entries(&shop.path("run"));
            assert!(left.iter().all(|file| file == ".lock"), "{name}: {left:?}");
            refused += 1;
            continue;
        }
        run(&["train", &name]).expect(0);
        let planned: Value = serde_json::from_str(&shop.read("run/plan.json")).unwrap();
        let planned = planned["arena_bytes"].as_u64().unwrap();
        let log = shop.read("run/metrics.jsonl");
        let last: Value = serde_json::from_str(log.lines().last().unwrap()).unwrap();
        let taken = last["arena"].as_u64().unwrap();
        assert!(taken <= CAP && planned <= CAP, "{name}: {taken} taken, {planned} planned");
        let error = (taken as f64 / planned as f64 - 1.0).abs();
        assert!(error <= TOLERANCE, "{name}: {taken} taken, {planned} planned");
        assert_eq!(last["step"], 2, "{name}: two steps of eight pairs");
        if name == "base-adapter.toml" {
            fs::rename(shop.path("run/final"), shop.path("sft-adapter")).unwrap();
        }
        fs::remove_dir_all(shop.path("run")).unwrap();
        accepted += 1;
    }
    assert!(accepted > 4 && refused > 0, "{accepted} accepted, {refused} refused");
}
