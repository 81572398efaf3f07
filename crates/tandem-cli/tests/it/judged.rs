//! `tandem eval --judge`: two that answer, and who says which is better.

use std::process::Command;
use std::time::{Duration, Instant};

use crate::workshop::{Outcome, Workshop};
use serde_json::{Value, json};

const LENGTH: &str = "[[judges]]\nkind = \"length\"\nunit = \"characters\"\nper_unit = -1\n";

/// Two models, prompts of both kinds, and a judge that likes short answers.
fn shop() -> Workshop {
    let shop = Workshop::new();
    shop.run(&["init-weights", "source", "other", "--seed", "4"]).expect(0);
    shop.write_rows("prompts.jsonl", 8, |i| {
        let text = format!("Count to {i}:{}", " and on".repeat(i));
        let prompt = if i < 4 { json!(text) } else { json!([{"role": "user", "content": text}]) };
        json!({"prompt": prompt, "gold": format!("{i}"), "chosen": [{"role": "assistant", "content": "no"}]})
    });
    shop.write("judges.toml", LENGTH);
    shop
}

const SHORT: [&str; 4] = ["--max-new-tokens", "8", "--device", "cpu"];

fn eval(shop: &Workshop, more: &[&str]) -> Outcome {
    let judge = ["eval", "--judge", "judges.toml", "--model", "model", "--prompts", "prompts.jsonl"];
    shop.run(&[&judge[..], &SHORT, more].concat())
}

fn json_of(outcome: Outcome) -> Value {
    let outcome = outcome.expect(0);
    serde_json::from_str(&outcome.stdout).unwrap_or_else(|e| panic!("{e}:\n{}", outcome.stdout))
}

fn samples(shop: &Workshop) -> Vec<Value> {
    shop.read("out.jsonl").lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// How many samples ended so.
fn count(samples: &[Value], outcome: &str) -> u64 {
    samples.iter().filter(|sample| sample["outcome"] == outcome).count() as u64
}

#[test]
fn the_better_answers_are_counted() {
    let shop = shop();
    let more =
        ["--against", "other", "--samples", "out.jsonl", "--temperature", "1", "--seed", "3", "--json"];
    let found = json_of(eval(&shop, &more));
    let samples = samples(&shop);
    assert_eq!(samples.len(), 8);
    for (line, sample) in (1..).zip(&samples) {
        assert_eq!(sample["row"], format!("prompts.jsonl:{line}"));
        let scores = ["model", "against"].map(|side| {
            let answer = &sample[side];
            let characters = answer["text"].as_str().unwrap().chars().count() as f64;
            assert_eq!(answer["score"].as_f64().unwrap(), -characters, "{sample}");
            assert_eq!(answer["judges"]["length"]["said"]["length"].as_f64(), Some(characters));
            -characters
        });
        let expected = match scores[0].total_cmp(&scores[1]) {
            std::cmp::Ordering::Greater => "win",
            std::cmp::Ordering::Equal => "tie",
            std::cmp::Ordering::Less => "loss",
        };
        assert_eq!(sample["outcome"], expected);
    }
    let [wins, losses, ties] = ["win", "loss", "tie"].map(|outcome| count(&samples, outcome));
    assert!(wins + losses > 0, "both are the same");
    assert_eq!(
        (&found["wins"], &found["losses"], &found["ties"]),
        (&json!(wins), &json!(losses), &json!(ties))
    );
    assert_eq!(found["win_rate"].as_f64().unwrap(), (wins as f64 + ties as f64 / 2.0) / 8.0);
    let mean = |side: &str, what: &str| {
        samples.iter().map(|sample| sample[side][what].as_f64().unwrap()).sum::<f64>() / 8.0
    };
    for side in ["model", "against"] {
        for (what, of) in [("mean_score", "score"), ("mean_tokens", "tokens")] {
            assert!((found[side][what].as_f64().unwrap() - mean(side, of)).abs() < 1e-9, "{side}: {what}");
        }
    }
    assert_eq!(found["judges"][0]["judged"], 16);

    // A text is continued as it is, and what is drawn is what `generate` draws.
    let texts: Vec<&str> = samples[..4].iter().map(|sample| sample["prompt"].as_str().unwrap()).collect();
    let draw = ["--raw", "--temperature", "1", "--seed", "3"];
    let generated = shop.run(&[&["generate", "other"], &texts[..], &draw, &SHORT].concat()).expect(0).stdout;
    for sample in &samples[..4] {
        let [prompt, answer] = [&sample["prompt"], &sample["against"]["text"]].map(|v| v.as_str().unwrap());
        assert!(generated.contains(&format!("> {prompt}\n{answer}\n")), "{answer:?} not in\n{generated}");
    }
    eval(&shop, &more).expect(2).says(&["out.jsonl already exists"]);
}

#[test]
fn a_model_is_as_good_as_itself() {
    let shop = shop();
    let outcome = eval(&shop, &["--against", "model", "--temperature", "1"]).expect(0);
    for line in
        ["win rate  0.500, 95 % between 0.215 and 0.785", "prompts   0 wins, 0 losses, 8 ties, 0 unscored"]
    {
        assert!(outcome.stdout.contains(line), "{}", outcome.stdout);
    }
}

#[test]
fn answers_that_are_there_are_judged_beside_the_models() {
    let shop = shop();
    shop.write("judges.toml", "[[judges]]\nkind = \"exact\"\nfield = \"gold\"\n");
    let found = json_of(eval(&shop, &["--against-column", "gold", "--json"]));
    assert_eq!((&found["losses"], &found["win_rate"]), (&json!(8), &json!(0.0)));
    assert_eq!(found["against"]["mean_score"], 1.0);
    assert_eq!(found["against"]["name"], "`gold` of prompts.jsonl");
    shop.write("judges.toml", LENGTH);
    let found = json_of(eval(&shop, &["--against-column", "chosen", "--json"]));
    assert_eq!(found["against"]["mean_characters"], 2.0, "a list of one message is its content");
    eval(&shop, &["--against-column", "prompt"]).expect(0);
    eval(&shop, &["--against-column", "golden"])
        .expect(2)
        .says(&["prompts.jsonl:1: `golden` should be a text or a list of one message, but is missing"]);
}

#[test]
fn a_reward_model_judges_and_long_texts_have_no_score() {
    let shop = shop();
    shop.run(&["train", "dpo.toml", "--set", "method=reward", "--set", "train.steps=1"]).expect(0);
    let reward = "[[judges]]\nkind = \"reward\"\nmodel = \"run/final\"\nmax_length = 60\n";
    shop.write("judges.toml", &format!("{reward}{LENGTH}weight = 0\n"));
    let found = json_of(eval(&shop, &["--against", "other", "--samples", "out.jsonl", "--json"]));
    let samples = samples(&shop);
    let unscored = count(&samples, "unscored");
    assert!((1..8).contains(&unscored), "{unscored} of 8 are too long");
    assert_eq!(found["unscored"], unscored);
    assert_eq!(found["wins"].as_u64().unwrap() + found["losses"].as_u64().unwrap(), 8 - unscored);
    for sample in &samples {
        let verdict = &sample["model"]["judges"]["reward"];
        assert_eq!(sample["model"]["score"], verdict["score"], "the other judge does not count");
        let is_long = verdict["said"].as_str().is_some_and(|why| why.contains("expected at most 60"));
        assert_eq!(verdict["score"].is_null(), is_long, "{verdict}");
    }
}

/// The head that scores comes from the adapter's folder, and the padding token from its tokenizer, as in training.
#[test]
fn a_reward_models_adapter_is_merged_and_judges() {
    let shop = shop();
    let train = ["train", "dpo.toml", "--set", "method=reward", "--set", "adapter.rank=4"];
    let evaluated = ["--set", "data.eval=preferences.jsonl", "--set", "train.learning_rate=1e-2"];
    shop.run(&[&train[..], &evaluated].concat()).expect(0).says(&["tandem merge", "run/final"]);
    shop.run(&["merge", "run/final", "merged"]).expect(0);
    let last = shop.metrics("run").into_iter().rev().find(|record| record["split"] == "eval").unwrap();
    let evaluate = ["eval", "dpo.toml", "--set", "method=reward", "--set", "model=merged"];
    let found = shop.run(&[&evaluate[..], &evaluated[..2]].concat()).expect(0);
    let found: Value = serde_json::from_str(&found.stdout).unwrap();
    for key in ["loss", "mean_reward", "max_reward"] {
        let (merged, trained) = (found[key].as_f64().unwrap(), last[key].as_f64().unwrap());
        assert!((merged - trained).abs() < 1e-4, "{key}: {merged} and {trained}");
    }
    shop.write("judges.toml", "[[judges]]\nkind = \"reward\"\nmodel = \"merged\"\n");
    json_of(eval(&shop, &["--against", "other", "--json"]));
    shop.write("judges.toml", "[[judges]]\nkind = \"reward\"\nmodel = \"run/final\"\n");
    eval(&shop, &["--against", "other"])
        .expect(2)
        .says(&["run/final", "a whole model is needed: `tandem merge`"]);
}

const COMMAND: &str = "[[judges]]\nkind = \"command\"\ntimeout_s = 30\nrestarts = 1\nfirst_pause_s = 0.01\n";

#[test]
fn a_judge_that_dies_or_says_nothing_ends_it_and_one_that_abstains_gives_no_score() {
    let shop = shop();
    shop.write("judges.toml", &format!("{COMMAND}command = [\"sh\", \"-c\", \"echo alas >&2; exit 3\"]\n"));
    let outcome = eval(&shop, &["--against", "other", "--samples", "out.jsonl"]).expect(2);
    assert_eq!(outcome.stdout, "");
    assert!(!shop.path("out.jsonl").exists());
    outcome.says(&["judge `command`: alas", "judge `command`: the command `sh -c", "ended 2 times in a row"]);

    let garbage = "while read -r line; do echo what; done";
    shop.write("judges.toml", &format!("{COMMAND}command = [\"sh\", \"-c\", {garbage:?}]\n"));
    let outcome = eval(&shop, &["--against", "other"]).expect(2);
    assert_eq!(outcome.stdout, "");
    outcome.says(&["judge `command`: 0 of 16 answers scored: received a line that answers no item: what"]);
    shop.write(
        "judges.toml",
        &format!("{COMMAND}may_abstain = true\ncommand = [\"sh\", \"-c\", {garbage:?}]\n"),
    );
    let outcome = eval(&shop, &["--against", "other", "--samples", "out.jsonl"]).expect(2);
    assert_eq!(outcome.stdout, "");
    outcome.says(&["none of 8 prompts has two answers with a score; the last reason: judge `command`: "]);
    let samples = samples(&shop);
    assert_eq!(count(&samples, "unscored"), 8);
    assert!(samples.iter().all(|sample| sample["model"]["score"].is_null()));
}

#[test]
fn an_interruption_ends_it_while_a_judge_thinks() {
    let shop = shop();
    let hang = "read -r line; touch thinking; cat > /dev/null";
    shop.write("judges.toml", &format!("{COMMAND}command = [\"sh\", \"-c\", {hang:?}]\n"));
    let arguments = [
        "eval",
        "--judge",
        "judges.toml",
        "--model",
        "model",
        "--against",
        "other",
        "--prompts",
        "prompts.jsonl",
    ];
    let mut child = shop.start(&[&arguments[..], &SHORT].concat());
    let start = Instant::now();
    while !shop.path("thinking").exists() {
        assert!(child.try_wait().unwrap().is_none(), "it ended before the judge was asked");
        assert!(start.elapsed() < Duration::from_secs(600), "the judge was not asked within ten minutes");
        std::thread::sleep(Duration::from_millis(5));
    }
    let status = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(status.success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

#[test]
fn what_is_wrong_is_said_before_anything_is_generated() {
    let shop = shop();
    let against = ["--against", "other"];
    shop.write("judges.toml", "[[judges]]\nkind = \"length\"\nmxa = 3\n");
    eval(&shop, &against)
        .expect(2)
        .says(&["judges.toml:3: unknown key `judges[0].mxa`; did you mean `judges[0].max`?"]);
    shop.write("judges.toml", LENGTH);
    eval(&shop, &["--against", "nowhere"]).expect(2).says(&["nowhere"]);
    eval(&shop, &["--against", "other", "--against-adapter", "none"]).expect(2).says(&["none"]);
    eval(&shop, &["--against", "other", "--samples", "no/folder.jsonl"]).expect(2).says(&["no/folder.jsonl"]);
    shop.write("prompts.jsonl", &format!("{{\"prompt\": \"{}\"}}\n", "and on ".repeat(300)));
    eval(&shop, &against).expect(2).says(&[
        "prompts.jsonl:1: the prompt has ",
        "leaves no room in the 256 positions of model: shorten it",
    ]);
    shop.write("prompts.jsonl", "{\"prompt\": \"a\"}\n{\"promt\": \"b\"}\n");
    eval(&shop, &against)
        .expect(2)
        .says(&["prompts.jsonl:2: expected the keys `prompt`", "did you mean `prompt`"]);
    shop.write("prompts.jsonl", "{\"prompt\": \"a\"}\n{\"prompt\": \"\"}\n");
    eval(&shop, &against).expect(2).says(&["prompts.jsonl:2: `prompt` is empty"]);
    shop.write("prompts.jsonl", "\n");
    eval(&shop, &against).expect(2).says(&["no rows in prompts.jsonl"]);
}

#[test]
fn a_completion_ends_where_the_context_ends() {
    let shop = shop();
    let options = ["--against", "other", "--samples", "out.jsonl"];
    let judge = ["eval", "--judge", "judges.toml", "--model", "model", "--prompts", "prompts.jsonl"];
    let long = ["--max-new-tokens", "300", "--device", "cpu"];
    shop.run(&[&judge[..], &options, &long].concat()).expect(0);
    assert_eq!(samples(&shop).len(), 8);
}

#[test]
fn options_go_with_what_they_are_for() {
    let shop = shop();
    for option in
        [["--temperature", "1"], ["--against", "other"], ["--samples", "out.jsonl"], ["--device", "cpu"]]
    {
        shop.run(&[&["eval", "dpo.toml"], &option[..]].concat()).expect(2).says(&["--judge <JUDGES.TOML>"]);
    }
    shop.run(&["eval", "--judge", "judges.toml", "--model", "model"])
        .expect(2)
        .says(&["--prompts", "--against"]);
    eval(&shop, &["--against", "other", "--against-column", "gold"]).expect(2).says(&["cannot be used with"]);
    for more in [&["--set", "train.steps=1"][..], &["--checkpoint", "model"], &["dpo.toml"]] {
        let text = "RUN.TOML, --set and --checkpoint apply to the held-out data of a run";
        eval(&shop, &[&["--against", "other"], more].concat()).expect(2).says(&[text]);
    }
    shop.run(&["eval"]).expect(2).says(&["RUN.TOML"]);
}
