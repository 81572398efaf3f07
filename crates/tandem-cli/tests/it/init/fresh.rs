//! Runs from answers: flags, or a person at a terminal.

use std::os::unix::process::ExitStatusExt;

use serde_json::json;
use tandem_train::Config;
use tandem_train::config::JudgeKind;

use super::shop;
use crate::processes::pty::Terminal;
use crate::workshop::Workshop;

const TOLD: [&str; 7] = ["init", "--method", "dpo", "--model", "model", "--data", "preferences.jsonl"];

#[test]
fn flags_alone_write_a_run_that_trains() {
    let shop = shop();
    let outcome = shop.run(&[&TOLD[..], &["--devices", "cpu"]].concat()).expect(0);
    assert!(
        outcome.stdout.contains("it fits") && outcome.stdout.contains("tandem train run.toml"),
        "{outcome:?}"
    );
    shop.run(&["train", "run.toml", "--set", "train.epochs=1", "--set", "data.cache=cache"]).expect(0);
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

/// Rows for the methods that `shop` has none for.
fn shop_of_all_methods() -> Workshop {
    let shop = shop();
    shop.write_rows("prompts.jsonl", 24, |i| json!({ "prompt": format!("Count to {i}:"), "answer": "8" }));
    shop.write_rows(
        "labelled.jsonl",
        24,
        |i| json!({ "prompt": format!("Count to {i}:"), "completion": " one two", "label": i % 2 == 0 }),
    );
    shop.write("rules.toml", "[[judges]]\nkind = \"length\"\nunit = \"characters\"\nper_unit = 0.5\n");
    shop
}

#[test]
fn every_method_writes_a_run_that_trains() {
    let shop = shop_of_all_methods();
    for (method, rows, more) in [
        ("sft", "demonstrations", &[][..]),
        ("reward", "preferences", &[]),
        ("kto", "labelled", &[]),
        ("distill", "demonstrations", &["--teacher", "model"]),
        ("online", "prompts", &["--judge", "rules.toml", "--eval-data", "prompts.jsonl"]),
        ("grpo", "prompts", &["--judge", "runs/reward/final", "--judge", "rules.toml"]),
    ] {
        let file = format!("{method}.toml");
        let rows = format!("{rows}.jsonl");
        let told =
            ["init", &file, "--method", method, "--model", "model", "--data", &rows, "--devices", "cpu"];
        let outcome = shop.run(&[&told[..], more].concat()).expect(0);
        assert!(outcome.stdout.contains("it fits"), "{method}: {outcome:?}");
        let config = Config::load::<&str>(&shop.path(&file), &[]).unwrap();
        assert_eq!(config.method.name(), method);
        let mut sets = vec!["data.cache=cache", "train.steps=1", "train.batch_size=2"];
        if !config.judges.is_empty() {
            sets.push("online.max_new_tokens=4");
        }
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        shop.run(&[&["train", &file], &sets[..]].concat()).expect(0);
    }
    let grpo = Config::load::<&str>(&shop.path("grpo.toml"), &[]).unwrap();
    let names: Vec<_> = grpo.judges.iter().map(|judge| &judge.name[..]).collect();
    assert_eq!(names, ["reward", "length"]);
    let distill = Config::load::<&str>(&shop.path("distill.toml"), &[]).unwrap();
    assert!(distill.reference.model.is_some_and(|teacher| teacher.ends_with("model")));
}

/// Paths of a file of judges start from its folder, those of the run from the run's.
#[test]
fn paths_of_judges_are_those_of_their_file() {
    let shop = shop_of_all_methods();
    std::fs::create_dir(shop.path("panel")).unwrap();
    shop.write(
        "panel/two.toml",
        "[[judges]]\nname = \"fair\"\nweight = 2.0\nkind = \"reward\"\nmodel = \"../judge\"\n\
         [[judges]]\nkind = \"endpoint\"\nbase_url = \"http://localhost:1/v1\"\nmodel = \"a/b\"\ncache = \"asked\"\n",
    );
    std::fs::create_dir(shop.path("judge")).unwrap();
    let told = ["init", "deep/run.toml", "--method", "grpo", "--model", "model", "--data", "prompts.jsonl"];
    shop.run(&[&told[..], &["--judge", "panel/two.toml", "--judge", "judge", "--no-plan"]].concat())
        .expect(0);
    let config = Config::load::<&str>(&shop.path("deep/run.toml"), &[]).unwrap();
    let [fair, endpoint, second] = &config.judges[..] else { panic!("{:?}", config.judges) };
    assert_eq!((&fair.name[..], fair.weight, &second.name[..]), ("fair", 2.0, "reward"));
    let path = |name: &str| shop.path(name).canonicalize().unwrap();
    for judge in [fair, second] {
        let JudgeKind::Reward(reward) = &judge.kind else { panic!("{judge:?}") };
        assert_eq!(reward.model.canonicalize().unwrap(), path("judge"));
    }
    let JudgeKind::Endpoint(endpoint) = &endpoint.kind else { panic!("{endpoint:?}") };
    assert_eq!(endpoint.model, "a/b");
    let cache = endpoint.cache.as_ref().unwrap();
    assert_eq!(cache.parent().unwrap().canonicalize().unwrap(), path("panel"));
}

#[test]
fn a_method_without_its_judge_or_teacher_is_refused_and_rows_show_methods() {
    let shop = shop_of_all_methods();
    let told = |method: &'static str, rows: &'static str| {
        let all = ["init", "--model", "model", "--data", rows, "--method", method];
        all[..if method.is_empty() { 5 } else { 7 }].to_vec()
    };
    for (arguments, more, said) in [
        (told("", "labelled.jsonl"), &[][..], "rows of labelled.jsonl fit kto ("),
        (told("", "prompts.jsonl"), &[], "rows of prompts.jsonl fit online and grpo ("),
        (told("", "demonstrations.jsonl"), &[], "rows of demonstrations.jsonl fit sft and distill ("),
        (told("", "preferences.jsonl"), &[], "rows of preferences.jsonl fit dpo, kto and reward ("),
        (told("grpo", "prompts.jsonl"), &[], "--judge is missing: give a reward model's folder, or a file"),
        (told("online", "prompts.jsonl"), &[], "--judge is missing"),
        (told("distill", "demonstrations.jsonl"), &[], "--teacher is missing: give the teacher's folder"),
        (told("kto", "labelled.jsonl"), &["--judge", "rules.toml"], "--method kto generates no completions"),
        (told("grpo", "prompts.jsonl"), &["--judge", "rules.toml", "--teacher", "model"], "remove --teacher"),
        (told("grpo", "prompts.jsonl"), &["--judge", "none.toml"], "none.toml: cannot read"),
        (told("kto", "demonstrations.jsonl"), &[], "expected the keys `prompt`, `completion` and `label`"),
    ] {
        shop.run(&[&arguments[..], more].concat()).expect(2).says(&[said]);
        assert!(!shop.path("run.toml").exists(), "{said}");
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
    assert!(!outcome.stdout.contains("start it:"), "{outcome:?}");
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

/// Answers the questions of `tandem init FILE`, as a person at a terminal.
fn answer(shop: &Workshop, file: &str, answers: &[(&str, &str)]) -> Config {
    let (mut terminal, mut job) = Terminal::start(&shop.command(&["init", file, "--devices", "cpu"]));
    for (question, answer) in answers {
        terminal.wait_for(question);
        terminal.enter(answer);
    }
    let status = job.launcher.wait().unwrap();
    assert!(status.success(), "{}", terminal.shown());
    Config::load::<&str>(&shop.path(file), &[]).unwrap()
}

/// A person answers: arrow keys choose, texts are typed. The method that the rows fit is offered first.
#[test]
fn questions_are_asked_at_a_terminal() {
    let shop = shop_of_all_methods();
    let config = answer(
        &shop,
        "asked.toml",
        &[
            ("Model (", "model\r"),
            ("Training rows", "preferences.jsonl\r"),
            ("Held-out rows", "\r"),
            ("Training method", "\r"),
            ("What trains", "\x1b[B\r"),
            ("Most memory", "2GiB\r"),
        ],
    );
    assert_eq!(config.method.name(), "dpo");
    assert!(config.adapter.is_some());
    assert_eq!(config.compute.memory, Some(2 << 30));
    let config = answer(
        &shop,
        "judged.toml",
        &[
            ("Model (", "model\r"),
            ("Training rows", "prompts.jsonl\r"),
            ("Held-out rows", "\r"),
            ("Training method", "\x1b[B\r"),
            ("Judge (", "rules.toml\r"),
            ("What trains", "\r"),
            ("Most memory", "\r"),
        ],
    );
    assert_eq!((config.method.name(), config.judges.len()), ("grpo", 1));
    let config = answer(
        &shop,
        "taught.toml",
        &[
            ("Model (", "model\r"),
            ("Training rows", "demonstrations.jsonl\r"),
            ("Held-out rows", "\r"),
            // Up from sft, the first, to distill, the last.
            ("Training method", "\x1b[A\r"),
            ("Teacher (", "model\r"),
            ("What trains", "\r"),
            ("Most memory", "\r"),
        ],
    );
    assert_eq!(config.method.name(), "distill");
}

/// A list hides the cursor, which the shell would not show again.
#[test]
fn ctrl_c_in_a_list_leaves_the_cursor_shown() {
    let shop = shop_of_all_methods();
    let arguments = ["init", "stopped.toml", "--model=model", "--data=preferences.jsonl"];
    let (mut terminal, mut job) = Terminal::start(&shop.command(&arguments));
    terminal.wait_for("Held-out rows");
    terminal.enter("\r");
    terminal.wait_for("Training method");
    terminal.press_ctrl_c();
    let status = job.launcher.wait().unwrap();
    assert_eq!(status.signal(), Some(2), "{}", terminal.shown());
    // What a process printed last is read after it has ended.
    terminal.wait_for("\x1b[?25h");
    let shown = terminal.shown();
    assert!(shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l"), "{shown:?}");
    assert!(!shop.path("stopped.toml").exists());
}

/// The former `tandem init CONFIG OUTPUT` is told where it went.
#[test]
fn random_weights_have_a_command_of_their_own() {
    let shop = shop();
    shop.run(&["init", "source", "other"]).expect(2).says(&["tandem init-weights source other"]);
}
