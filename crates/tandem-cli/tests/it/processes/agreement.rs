//! Ranks that were started with different things, or that nobody joins.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::job::signal;
use super::{configure, injected};
use crate::workshop::{Workshop, free_port};

/// Starts one of two ranks as any launcher would, its stderr in a file.
fn rank(shop: &Workshop, rank: &str, port: u16, arguments: &[&str]) -> Child {
    rank_with(shop, rank, port, arguments, &[])
}

/// Starts a rank whose environment has more variables.
fn rank_with(
    shop: &Workshop,
    rank: &str,
    port: u16,
    arguments: &[&str],
    variables: &[(&str, String)],
) -> Child {
    let mut command: Command = shop.command(arguments);
    command.envs(variables.iter().map(|(name, value)| (name, value)));
    if !arguments.iter().any(|argument| argument.contains("meeting_deadline")) {
        command.args(["--set", "compute.meeting_deadline=100"]);
    }
    command.env("RANK", rank).env("WORLD_SIZE", "2").env("LOCAL_RANK", rank);
    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
    let log = std::fs::File::create(shop.path(&format!("rank{rank}.txt"))).unwrap();
    command.stdout(Stdio::null()).stderr(log).spawn().unwrap()
}

/// Runs two ranks and expects both to end with code 2 and the same words.
#[track_caller]
fn refused(shop: &Workshop, first: &[&str], second: &[&str], words: &[&str]) {
    let port = free_port();
    let ranks = [rank(shop, "0", port, first), rank(shop, "1", port, second)];
    for (number, mut rank) in ranks.into_iter().enumerate() {
        let code = rank.wait().unwrap().code();
        let stderr = shop.read(&format!("rank{number}.txt"));
        assert_eq!(code, Some(2), "{stderr}");
        for word in words {
            assert!(stderr.contains(word), "no {word:?} in:\n{stderr}");
        }
    }
    assert!(!shop.path("run/metrics.jsonl").exists(), "they trained");
}

#[test]
fn ranks_with_different_configs_models_or_data_do_not_train() {
    let shop = Workshop::new();
    let config = configure(&shop, "run", 4);
    let train = |setting: &'static str| ["train", &config, "--set", setting];
    for (setting, key, value) in [
        ("train.learning_rate=0.123", "train.learning_rate is ", "0.123 on rank 1"),
        ("seed=77", "seed is ", "77 on rank 1"),
        ("objective.beta=0.77", "objective.beta is ", "0.77 on rank 1"),
        ("compute.sharding=zero3", "compute.sharding is \"ddp\" on rank 0", "\"zero3\" on rank 1"),
    ] {
        refused(&shop, &["train", &config], &train(setting), &["ranks disagree", key, value]);
    }
    // More steps, of which a rank would wait for one that has ended.
    refused(
        &shop,
        &["train", &config],
        &train("train.steps=5"),
        &["train.steps is 4 on rank 0, but 5 on rank 1"],
    );
    // Another row, and one other bit of the weights, at a path of their own.
    let rows = shop.read("preferences.jsonl").replacen("Count to 7", "Count to 8", 1);
    shop.write("other.jsonl", &rows);
    refused(
        &shop,
        &["train", &config],
        &train("data.train=other.jsonl"),
        &["data.train is 24 rows, tokens with hash", "on rank 1"],
    );
    Command::new("cp").arg("-r").arg(shop.path("model")).arg(shop.path("other")).status().unwrap();
    let mut weights = shop.bytes("other/model.safetensors");
    *weights.last_mut().unwrap() ^= 1;
    std::fs::write(shop.path("other/model.safetensors"), weights).unwrap();
    refused(
        &shop,
        &["train", &config],
        &train("model=other"),
        &["model, file model.safetensors is ", "other/model.safetensors) on rank 1"],
    );
    // The same model and data at other paths.
    Command::new("cp").arg("-r").arg(shop.path("model")).arg(shop.path("copy")).status().unwrap();
    let port = free_port();
    let first = rank(&shop, "0", port, &["train", &config]);
    let second =
        rank(&shop, "1", port, &["train", &config, "--set", "model=copy", "--set", "compute.threads=1"]);
    for mut rank in [first, second] {
        assert_eq!(rank.wait().unwrap().code(), Some(0), "{}", shop.read("rank1.txt"));
    }
}

#[test]
fn a_run_folder_that_is_not_shared_is_refused_before_the_first_step() {
    let shop = Workshop::new();
    let config = configure(&shop, "run", 4);
    let elsewhere = ["train", &config, "--set", "output=elsewhere"];
    refused(
        &shop,
        &["train", &config],
        &elsewhere,
        &["/run: rank 0 wrote it", "rank 1 cannot see it", "shared run folder"],
    );
}

#[test]
fn a_rank_that_cannot_write_into_the_run_folder_is_told_before_the_first_step() {
    let shop = Workshop::new();
    let config = configure(&shop, "run", 4);
    let path = |name: &str| shop.path(name).display().to_string();
    let fault = [
        ("LD_PRELOAD", injected::library(&shop).display().to_string()),
        ("FAULT_CALL", "open".to_owned()),
        ("FAULT_AT", "1".to_owned()),
        ("FAULT_COUNT", "1000".to_owned()),
        ("FAULT_ERRNO", "30".to_owned()),
        ("FAULT_UNDER", path("run/.seen-")),
        ("FAULT_SEEN", path("seen")),
    ];
    let (port, train) = (free_port(), ["train", &config]);
    let ranks = [rank(&shop, "0", port, &train), rank_with(&shop, "1", port, &train, &fault)];
    for (number, mut rank) in ranks.into_iter().enumerate() {
        let code = rank.wait().unwrap().code();
        let stderr = shop.read(&format!("rank{number}.txt"));
        assert_eq!(code, Some(2), "{stderr}");
        assert!(stderr.contains("rank 1 cannot write into the run's folder"), "{stderr}");
        assert!(stderr.contains("Read-only file system"), "{stderr}");
    }
    assert!(!shop.path("run/metrics.jsonl").exists(), "they trained");
}

#[test]
fn a_rank_that_nobody_joins_says_so_and_ends_at_a_signal_at_once() {
    let shop = Workshop::new();
    let config = configure(&shop, "run", 4);
    let port = free_port();
    for (number, signal_name, code, words) in [
        ("0", "-TERM", 143, "rank 0: waiting for rank 1 ("),
        ("1", "-INT", 130, "rank 1: waiting for the store of rank 0 at 127.0.0.1:"),
    ] {
        let mut rank = rank(&shop, number, port, &["train", &config]);
        let (began, log) = (Instant::now(), format!("rank{number}.txt"));
        while !shop.read(&log).contains(words) {
            assert!(began.elapsed() < Duration::from_secs(120), "{}", shop.read(&log));
            std::thread::sleep(Duration::from_millis(20));
        }
        signal(&rank.id().to_string(), signal_name);
        assert_eq!(rank.wait().unwrap().code(), Some(code), "{}", shop.read(&log));
        assert!(shop.read(&log).contains("stopped by a signal while it waited for"), "{}", shop.read(&log));
    }
    // Not a lost peer, which a loop of restarts would wait for again.
    let brief = ["train", &config, "--set", "compute.meeting_deadline=1"];
    let mut alone = rank(&shop, "1", port, &brief);
    assert_eq!(alone.wait().unwrap().code(), Some(2));
    assert!(shop.read("rank1.txt").contains("no store at 127.0.0.1:"), "{}", shop.read("rank1.txt"));
}
