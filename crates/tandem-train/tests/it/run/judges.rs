//! The panel of a config, and reward models that judge.
//!
//! Numbers: the first steps of TRL's runs in `goldens/small/reward.json`, which are of the weights that they start from.

use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use serde_json::{Map, Value};
use tandem_judge::{Assessment, Candidate, JudgeError, Panel, Prompt, PromptWithCompletions};
use tandem_kernels::{DType, Device};
use tandem_train::config::load_judges;
use tandem_train::events::Silent;
use tandem_train::inputs::RunInputs;
use tandem_train::plan::Plan;
use tandem_train::run::run_dir::RunDirPolicy;
use tandem_train::run::spawn;
use tandem_train::{Config, Outcome, Result, judges};
use tempfile::TempDir;

use super::ranks::log;
use super::reward::{classifier, golden, goldens};
use crate::small::Small;

/// Stderr lines of the judges of these tables.
type Said = Arc<Mutex<Vec<(String, String)>>>;

fn panel(folder: &Path, tables: &str) -> (Result<Panel>, Said) {
    let path = folder.join("judges.toml");
    fs::write(&path, tables).unwrap();
    let sections = load_judges(&path).unwrap_or_else(|e| panic!("{e}"));
    let device = Device::cpu(2, 256 << 20).unwrap();
    let said = Said::default();
    let heard = said.clone();
    let on_line: judges::JudgeLine =
        Arc::new(move |judge, line| heard.lock().unwrap().push((judge.to_owned(), line.to_owned())));
    (judges::panel(&sections, &device, DType::F32, &on_line), said)
}

/// A small reward model beside the judges' file.
fn with_model() -> TempDir {
    let folder = TempDir::new().unwrap();
    classifier(&golden(), &folder.path().join("model"));
    folder
}

const REWARD: &str = "[[judges]]\nkind = \"reward\"\nmodel = \"model\"\n";

fn rows(file: &str, count: usize) -> Vec<Map<String, Value>> {
    let text = fs::read_to_string(goldens().join(file)).unwrap();
    text.lines().take(count).map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The chosen and the rejected answer of each row, judged.
fn judge(panel: &mut Panel, rows: &[Map<String, Value>]) -> Vec<Vec<Assessment>> {
    let text = |row: &Map<String, Value>, key: &str| match &row[key] {
        Value::String(text) => text.clone(),
        messages => messages[0]["content"].as_str().unwrap().to_owned(),
    };
    let texts: Vec<_> = rows.iter().map(|row| ["chosen", "rejected"].map(|key| text(row, key))).collect();
    let groups: Vec<_> = rows
        .iter()
        .zip(&texts)
        .map(|(row, texts)| PromptWithCompletions {
            place: "rows.jsonl:1",
            prompt: match &row["prompt"] {
                Value::String(text) => Prompt::Text(text),
                messages => Prompt::Messages(messages.as_array().unwrap()),
            },
            row,
            answers: texts.iter().map(|text| Candidate { text, tokens: 1, is_ended: true }).collect(),
        })
        .collect();
    panel.judge(&groups, &AtomicBool::new(false)).unwrap()
}

/// Conversations and plain texts become the tokens of TRL's rows, and score as TRL's model does before its first step.
#[test]
fn a_reward_model_judges_as_trl_scores() {
    let folder = with_model();
    for (run, file) in [("reward", "pref_conv.jsonl"), ("reward_margin", "pref_margin.jsonl")] {
        let golden = golden();
        let expected = &golden["runs"][run]["steps"][0];
        for tables in [REWARD.to_owned(), format!("{REWARD}micro_batch_tokens = 100\n")] {
            let (panel, _) = panel(folder.path(), &tables);
            let mut panel = panel.unwrap();
            let found = judge(&mut panel, &rows(file, 8));
            let totals: Vec<[f64; 2]> =
                found.iter().map(|pair| [pair[0].total.unwrap(), pair[1].total.unwrap()]).collect();
            let mean = |of: fn(&[f64; 2]) -> f64| totals.iter().map(of).sum::<f64>() / totals.len() as f64;
            let numbers = [
                ("mean_reward", mean(|[c, r]| (c + r) / 2.0)),
                ("margin", mean(|[c, r]| c - r)),
                ("accuracy", mean(|[c, r]| f64::from(c > r))),
            ];
            for (key, ours) in numbers {
                let theirs = expected[key].as_f64().unwrap();
                // Two f32 implementations; rewards are of order one.
                assert!((ours - theirs).abs() < 1e-5, "{run}: {key} is {ours}, TRL has {theirs}");
            }
            let (_, counts) = panel.counts().next().unwrap();
            assert_eq!((counts.judged, counts.unscored), (16, 0));
        }
    }
}

#[test]
fn what_is_too_long_has_no_score_and_the_others_have_theirs() {
    let folder = with_model();
    let rows = rows("pref_conv.jsonl", 8);
    let mut whole = panel(folder.path(), REWARD).0.unwrap();
    let mut short = panel(folder.path(), &format!("{REWARD}max_length = 60\n")).0.unwrap();
    let (whole, short) = (judge(&mut whole, &rows), judge(&mut short, &rows));
    let mut unscored = 0;
    for (whole, short) in whole.iter().flatten().zip(short.iter().flatten()) {
        match (whole.total, short.total) {
            // Other texts beside it: sums in another order.
            (Some(whole), Some(short)) => assert!((whole - short).abs() < 1e-5, "{whole} {short}"),
            (_, total) => {
                assert_eq!(total, None);
                let why = short.verdicts[0].said.as_str().unwrap();
                assert!(why.contains("tokens, expected at most 60 (`max_length`"), "{why}");
                unscored += 1;
            }
        }
    }
    assert!((1..16).contains(&unscored), "{unscored} of 16");
}

#[test]
fn a_panel_adds_up_what_its_judges_say() {
    let folder = with_model();
    let tables = format!(
        "{REWARD}weight = 2\n[[judges]]\nkind = \"length\"\nunit = \"characters\"\nper_unit = 0.5\nweight = -1\n\
         [[judges]]\nkind = \"command\"\nweight = 0\ncommand = [\"sh\", \"-c\", \"echo ready >&2; exec cat >&2\"]\n\
         timeout_s = 0.1\nstart_timeout_s = 0.1\nrestarts = 100\nfirst_pause_s = 0.01\nlongest_pause_s = 0.01\n"
    );
    let (panel, said) = panel(folder.path(), &tables);
    let mut panel = panel.unwrap();
    assert_eq!(panel.names().collect::<Vec<_>>(), ["reward", "length", "command"]);
    let rows = rows("pref_conv.jsonl", 1);
    let found = judge(&mut panel, &rows);
    for (assessment, key) in found[0].iter().zip(["chosen", "rejected"]) {
        let length = rows[0][key][0]["content"].as_str().unwrap().chars().count() as f64;
        let reward = assessment.verdicts[0].score.unwrap();
        assert_eq!(assessment.total, Some(2.0 * reward - length / 2.0));
        assert_eq!(assessment.verdicts[2].score, None, "it never answers, and does not count");
    }
    drop(panel);
    assert!(said.lock().unwrap().contains(&("command".to_owned(), "ready".to_owned())));
}

#[test]
fn what_cannot_judge_is_refused_with_its_name() {
    let folder = with_model();
    let refused = |tables: &str| tandem_train::chain(&panel(folder.path(), tables).0.err().unwrap());
    let language = goldens().join("model");
    let text = refused(&format!("[[judges]]\nkind = \"reward\"\nname = \"r\"\nmodel = {language:?}\n"));
    assert!(text.starts_with("judge `r`: ") && text.contains("has no head that scores texts"), "{text}");
    let text = refused("[[judges]]\nkind = \"reward\"\nmodel = \"nowhere\"\n");
    assert!(text.starts_with("judge `reward`: ") && text.contains("nowhere"), "{text}");
    let text = refused("[[judges]]\nkind = \"command\"\ncommand = [\"/no/such/program\"]\n");
    assert!(text.contains("judge `command`: the command `/no/such/program` cannot be started"), "{text}");
    let endpoint = "[[judges]]\nkind = \"endpoint\"\nbase_url = \"http://localhost:1/v1\"\nmodel = \"m\"\n";
    let text = refused(&format!("{endpoint}api_key_env = \"TANDEM_NO_SUCH_KEY\"\n"));
    assert!(text.contains("judge `endpoint`: ") && text.contains("TANDEM_NO_SUCH_KEY"), "{text}");
}

#[test]
fn a_reward_model_stops_when_it_is_asked_to() {
    let folder = with_model();
    let mut panel = panel(folder.path(), REWARD).0.unwrap();
    let row = Map::new();
    let answers = vec![Candidate { text: "yes", tokens: 1, is_ended: true }];
    let group =
        PromptWithCompletions { place: "rows.jsonl:1", prompt: Prompt::Text("so?"), row: &row, answers };
    let error = panel.judge(&[group], &AtomicBool::new(true)).unwrap_err();
    assert!(matches!(error, JudgeError::Stopped), "{error}");
}

/// The first rank, which alone has them, may take no more than was planned.
#[test]
fn the_plan_counts_the_reward_models_of_an_online_run() {
    let small = Small::new("online");
    classifier(&golden(), &small.path("model"));
    let path = small.file("run");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, format!("{}{REWARD}", text.split("[[judges]]").next().unwrap())).unwrap();
    for ahead in ["online.overlap=false", "online.overlap=true"] {
        let settings = ["compute.devices=cpu:2", "train.steps=2", "online.max_new_tokens=40", ahead];
        let load = |more: &[&str]| {
            Config::load(&path, &[&settings, more].concat()).unwrap_or_else(|e| panic!("{e}"))
        };
        let config = load(&[]);
        let prepared = RunInputs::open(&config, &mut Silent).unwrap();
        let plans = [0, 1].map(|rank| Plan::make(&config, &prepared, rank, 2).unwrap());
        let [first, second] = plans.each_ref().map(Plan::needs);
        assert!(first.judges > 0 && second.judges == 0, "{first:?} {second:?}");
        // Two ranks share what trains nearly evenly.
        let own = first.arena - first.judges;
        assert!(own.abs_diff(second.arena) < own / 50, "{first:?} {second:?}");
        let cap = format!("compute.memory={}B", first.ram());
        let outcome =
            spawn::train(&load(&[&cap]), RunDirPolicy::Overwrite, &mut Silent, &AtomicBool::new(false));
        assert!(matches!(outcome, Ok(Outcome::Finished(_))), "{ahead}: {outcome:?}");
        let scored = log(&small, "run").iter().all(|line| line["unscored"] == 0);
        assert!(scored, "{ahead}");
    }
}
