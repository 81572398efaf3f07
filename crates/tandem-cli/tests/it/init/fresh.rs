//! Runs from answers: flags, or a person at a terminal.

use std::time::{Duration, Instant};

use tandem_train::Config;

use super::shop;
use crate::processes::pty::Terminal;

const TOLD: [&str; 7] = ["init", "--method", "dpo", "--model", "model", "--data", "preferences.jsonl"];

#[test]
fn flags_alone_write_a_run_that_trains() {
    let shop = shop();
    let outcome = shop.run(&[&TOLD[..], &["--devices", "cpu"]].concat()).expect(0);
    assert!(
        outcome.stdout.contains("it fits") && outcome.stdout.contains("tandem train run.toml"),
        "{outcome:?}"
    );
    shop.run(&["train", "run.toml", "--set", "train.epochs=0.1", "--set", "data.cache=cache"]).expect(0);
    // Nothing that exists is replaced unasked.
    shop.run(&TOLD).expect(2).says(&["run.toml already exists", "--overwrite"]);
    shop.run(&[&TOLD[..], &["--overwrite", "--train", "qlora", "--no-plan"]].concat()).expect(0);
    let config = Config::load::<&str>(&shop.path("run.toml"), &[]).unwrap();
    assert!(config.adapter.is_some() && config.compute.format.is_some());
}

#[test]
fn a_missing_answer_names_its_flag() {
    let shop = shop();
    for (index, flag) in ["--method", "--model", "--data"].into_iter().enumerate() {
        let mut arguments = TOLD.to_vec();
        arguments.drain(1 + 2 * index..3 + 2 * index);
        shop.run(&arguments).expect(2).says(&[&format!("{flag} is missing")]);
        assert!(!shop.path("run.toml").exists());
    }
}

/// The same command with the right model is not refused because of the wrong one.
#[test]
fn answers_that_are_wrong_leave_no_file() {
    let shop = shop();
    let wrong = ["init", "--method", "dpo", "--model", "nowhere", "--data", "preferences.jsonl"];
    shop.run(&wrong).expect(2).says(&["nowhere: no such model folder"]);
    assert!(!shop.path("run.toml").exists());
    shop.run(&TOLD).expect(0);
    let before = shop.read("run.toml");
    shop.run(&[&wrong[..], &["--overwrite"]].concat()).expect(2);
    assert_eq!(shop.read("run.toml"), before);
}

/// Batches are cut and activations dropped until the run fits; what trains stays.
#[test]
fn a_run_that_does_not_fit_is_changed_until_it_does() {
    let shop = shop();
    let row = |i: usize| {
        let text = |word: &str| format!("{word} ").repeat(40 + i % 3);
        serde_json::json!({ "prompt": "Go on:", "chosen": text("one"), "rejected": text("two") })
    };
    shop.write_rows("long.jsonl", 24, row);
    let told = ["init", "--method", "dpo", "--model", "model", "--data", "long.jsonl", "--devices", "cpu"];
    let plain = shop.run(&[&told[..], &["plain.toml"]].concat()).expect(0).stdout;
    assert!(plain.contains("it fits"), "{plain}");
    let needed: f64 = plain.split("it fits: ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
    let goal = format!("{:.1}MiB", needed * 0.6);
    let outcome = shop.run(&[&told[..], &["small.toml", "--memory", &goal]].concat()).expect(0).stdout;
    assert!(outcome.contains("which does not fit; changed: ") && outcome.contains("it fits"), "{outcome}");
    let text = shop.read("small.toml");
    assert!(text.contains("# so that it fits"), "{text}");
    let [small, plain] =
        ["small.toml", "plain.toml"].map(|name| Config::load::<&str>(&shop.path(name), &[]).unwrap());
    assert_eq!(small.train.batch_size, plain.train.batch_size);
    assert!(small.adapter.is_none());
    shop.run(&["train", "small.toml", "--set", "train.steps=1", "--set", "data.cache=cache"]).expect(0);
    let outcome = shop.run(&[&told[..], &["no.toml", "--memory", "100KiB"]].concat()).expect(2);
    assert!(outcome.stdout.contains("does not fit") || outcome.stdout.contains("no change"), "{outcome:?}");
}

/// Devices of another machine are planned for, and the file says so.
#[test]
fn devices_that_are_not_here_are_planned_for() {
    let shop = shop();
    let outcome = shop.run(&[&TOLD[..], &["--devices", "2xA10"]].concat()).expect(0);
    assert!(outcome.stdout.contains("2 x A10"), "{outcome:?}");
    assert!(shop.read("run.toml").contains("devices = \"cuda\""));
    shop.run(&[&TOLD[..], &["--devices", "2xA11", "--overwrite"]].concat()).expect(2).says(&["A11"]);
}

/// A person answers: arrow keys choose, texts are typed.
#[test]
fn questions_are_asked_at_a_terminal() {
    let shop = shop();
    let (mut terminal, mut job) = Terminal::start(&shop.command(&["init", "asked.toml", "--devices", "cpu"]));
    let answers = [
        ("Training method", "\r"),
        ("Model (", "model\r"),
        ("Training rows", "preferences.jsonl\r"),
        ("Held-out rows", "\r"),
        ("What trains", "\x1b[B\r"),
        ("Most memory", "2GiB\r"),
    ];
    for (question, answer) in answers {
        let start = Instant::now();
        while !terminal.shown().contains(question) {
            assert!(start.elapsed() < Duration::from_secs(60), "{question}: {}", terminal.shown());
            std::thread::sleep(Duration::from_millis(10));
        }
        terminal.enter(answer);
    }
    let status = job.launcher.wait().unwrap();
    assert!(status.success(), "{}", terminal.shown());
    let config = Config::load::<&str>(&shop.path("asked.toml"), &[]).unwrap();
    assert_eq!(config.method.name(), "dpo");
    assert!(config.adapter.is_some());
    assert_eq!(config.compute.memory, Some(2 << 30));
}

/// The former `tandem init CONFIG OUTPUT` is told where it went.
#[test]
fn random_weights_have_a_command_of_their_own() {
    let shop = shop();
    shop.run(&["init", "source", "other"]).expect(2).says(&["tandem init-weights source other"]);
}
