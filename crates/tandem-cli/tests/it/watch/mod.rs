//! `tandem watch` and `tandem report`: over HTTP, as files, and in a real browser where there is one.

mod browser;
mod page;

use std::fmt::Write;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::time::Instant;

use crate::workshop::Workshop;
use page::Watch;
use serde_json::{Value, json};

const EVIL: &str = "<script>document.title='hacked'</script>";

/// A line of `metrics.jsonl`.
fn line(step: usize) -> String {
    let x = step as f64 / 1000.0;
    let record = json!({
        "step": step, "split": "train", "loss": 0.7 * (-x).exp(), "rewards/chosen": x.sin(), "rewards/rejected": -x,
        "rewards/accuracies": 0.5, "rewards/margins": x, "logps/chosen": -19.0 - x, "logps/rejected": -20.0 - x,
        "logits/chosen": 0.1, "logits/rejected": 0.2, "entropy": 1.0, "mean_token_accuracy": 0.6, "num_tokens": step * 512,
        "grad_norm": 1.0 + (x * 50.0).sin(), "learning_rate": 1e-5, "epoch": x, "tokens_per_second": 50_000.0,
        "time": step, "memory": 3_000_000_000u64,
    });
    format!("{record}\n")
}

/// A folder that looks like a run of so many steps, with samples that hold markup.
fn write_run(folder: &Path, steps: usize) {
    fs::create_dir_all(folder).unwrap();
    let config = "# written by tandem\nmethod = \"dpo\"\n[objective]\nbeta = 0.1\n";
    fs::write(folder.join("config.toml"), config).unwrap();
    fs::write(folder.join("metrics.jsonl"), (1..=steps).map(line).collect::<String>()).unwrap();
    let mut samples = String::new();
    for step in [0, steps] {
        let answer = json!({ "text": format!("answer of step {step} {EVIL}"), "tokens": 5, "score": 0.5, "judges": {} });
        let sample = json!({
            "step": step, "split": "eval", "place": "eval.jsonl:1", "row": 0, "prompt": format!("say {EVIL}"),
            "chosen": EVIL, "rejected": "no", "answers": [answer],
        });
        writeln!(samples, "{sample}").unwrap();
    }
    fs::write(folder.join("samples.jsonl"), samples).unwrap();
}

fn append(folder: &Path, text: &str) {
    let mut file = File::options().append(true).open(folder.join("metrics.jsonl")).unwrap();
    file.write_all(text.as_bytes()).unwrap();
}

/// Returns a panel of an update, if it has changed.
fn panel<'a>(update: &'a Value, id: &str) -> Option<&'a str> {
    let changed = update["changed"].as_array().expect("a list");
    changed.iter().find(|panel| panel["id"] == id)?["html"].as_str()
}

#[test]
fn a_run_that_has_only_begun_is_followed_step_by_step() {
    let shop = Workshop::new();
    let run = shop.path("run");
    fs::create_dir_all(&run).unwrap();
    fs::write(run.join(".lock"), "").unwrap();
    let watch = Watch::start(&shop, &["run"]);
    let mut events = watch.events();
    let first = events.next();
    assert!(panel(&first, "runs").unwrap().contains("waiting for the first step"), "{first}");
    assert!(first["title"].as_str().unwrap().starts_with("run – "));
    write_run(&run, 2);
    let update = events.until(|update| panel(update, "curve loss").is_some());
    assert!(panel(&update, "runs").unwrap().contains("step 2"), "{update}");
    assert!(panel(&update, "samples").unwrap().contains("answer of step 2"), "{update}");
    // A torn line is not a record.
    let third = line(3);
    append(&run, &third[..20]);
    append(&run, &third[20..]);
    let update = events.until(|update| panel(update, "runs").is_some_and(|html| html.contains("step 3")));
    assert!(panel(&update, "curve loss").is_some() && panel(&update, "samples").is_none(), "{update}");
    // A run that resumes cuts its file back.
    fs::write(run.join("metrics.jsonl"), line(1)).unwrap();
    events.until(|update| panel(update, "runs").is_some_and(|html| html.contains("step 1,")));
}

#[test]
fn a_real_run_is_shown_with_plan_keys_and_log() {
    let shop = Workshop::new();
    shop.run(&["train", "dpo.toml"]).expect(0);
    shop.run(&["train", "dpo.toml", "--set", "output=runs/second", "--set", "objective.beta=0.7"]).expect(0);
    let watch = Watch::start(&shop, &["run", "runs"]);
    let update = watch.events().next();
    let runs = panel(&update, "runs").unwrap();
    assert!(runs.contains("step 6 of 6, finished") && runs.contains("second"), "{runs}");
    assert!(panel(&update, "plans").unwrap().contains("aria-label=\"memory by phase\""));
    let keys = panel(&update, "keys").unwrap();
    let (differing, _) = keys.split_once("<details").unwrap();
    assert!(differing.contains("objective.beta") && !differing.contains("train.steps"), "{differing}");
    assert!(panel(&update, "logs").unwrap().contains("step 6/6"), "{update}");
    for metric in ["loss", "rewards/margins", "memory", "learning_rate"] {
        let html =
            panel(&update, &format!("curve {metric}")).unwrap_or_else(|| panic!("no curve of {metric}"));
        assert!(html.contains("#0B0000") && html.contains("#0B0001"), "both runs are in {html}");
    }
}

#[test]
fn a_run_that_begins_beside_another_joins_the_page_and_goes_on_there() {
    let shop = Workshop::new();
    shop.run(&["train", "dpo.toml", "--set", "output=runs/first"]).expect(0);
    let watch = Watch::start(&shop, &["runs"]);
    let mut events = watch.events();
    let first = events.next();
    assert!(!panel(&first, "runs").unwrap().contains("runs/second"), "{first}");
    let mut train = shop.start(&["train", "dpo.toml", "--set", "output=runs/second"]);
    let finished = |update: &Value| {
        panel(update, "runs").is_some_and(|html| {
            html.contains("runs/second") && html.matches("step 6 of 6, finished").count() == 2
        })
    };
    let update = events.until(finished);
    assert!(train.wait().unwrap().success());
    assert!(update["title"].as_str().unwrap().starts_with("first, second"), "{update}");
}

#[test]
fn strangers_are_refused_and_pages_load_nothing_else() {
    let shop = Workshop::new();
    write_run(&shop.path("run"), 3);
    let watch = Watch::start(&shop, &["run"]);
    let own = watch.address().to_owned();
    let (_, port) = own.rsplit_once(':').unwrap();
    for host in [own.clone(), format!("localhost:{port}"), format!("[::1]:{port}")] {
        let (status, head, body) = watch.get("/", &host);
        assert_eq!(status, 200, "{host}");
        assert!(head.contains("content-security-policy: default-src 'none'; script-src 'self'"), "{head}");
        assert!(body.contains("data-room=\"learning\""));
    }
    for path in ["/", "/events", "/page.js"] {
        let (status, _, body) = watch.get(path, &format!("evil.example:{port}"));
        assert_eq!((status, body.contains("data-room")), (403, false), "{path}");
    }
    for path in ["/page.css", "/page.js", "/live.js", "/icon.svg"] {
        let (status, _, body) = watch.get(path, &own);
        assert!(
            status == 200 && !body.replace("http://www.w3.org/2000/svg", "").contains("://"),
            "{path}: {body}"
        );
    }
    assert_eq!(watch.get("/../Cargo.toml", &own).0, 404);
    assert_eq!(watch.send("POST", "/", &own).0, 405);
}

#[test]
fn folders_without_a_run_and_taken_ports_are_named() {
    let shop = Workshop::new();
    fs::create_dir_all(shop.path("empty")).unwrap();
    for command in ["watch", "report"] {
        shop.run(&[command, "nowhere"]).expect(2).says(&["nowhere: no such folder"]);
        shop.run(&[command, "empty", "model"]).expect(2).says(&["no run in empty, model"]);
    }
    write_run(&shop.path("run"), 1);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    shop.run(&["watch", "run", "--port", &port]).expect(2).says(&["cannot listen at", "--port"]);
    shop.run(&["report", "run", "--out", "empty"]).expect(2).says(&["--out empty: it is a folder"]);
    shop.run(&["report", "run", "--out", "nowhere/report.html"]).expect(2).says(&["nowhere/report.html"]);
}

#[test]
fn a_report_is_one_file_that_asks_for_nothing_and_shows_text_as_text() {
    let shop = Workshop::new();
    let name = "run <script>alert(1)<!--";
    write_run(&shop.path(name), 3);
    shop.write("report.html", "an old one");
    let outcome = shop.run(&["report", name]).expect(0);
    assert!(outcome.stdout.starts_with("report.html: "), "{}", outcome.stdout);
    let page = shop.read("report.html");
    assert!(page.contains("answer of step 3 &lt;script&gt;document.title"), "the answer is shown as text");
    assert!(page.contains("run &lt;script&gt;alert(1)&lt;!--"), "and so is the folder");
    let scripts: Vec<&str> = page.split("<script").skip(1).collect();
    let own =
        |script: &&&str| script.starts_with(" nonce=\"") || script.starts_with(" type=\"application/json\">");
    assert_eq!(scripts.iter().filter(own).count(), scripts.len(), "{scripts:?}");
    for start in page.match_indices("://").map(|(at, _)| at) {
        let before = &page[start.saturating_sub(16)..start];
        assert!(before.ends_with("href=\"https"), "an address outside a link: {before}");
    }
    assert!(!shop.path("report.html.tmp").exists());
    let refused = shop.run(&["report", name, "--out", "/dev/null"]).expect(2).stderr;
    assert!(refused.contains("--out /dev/null: it is not a regular file"), "{refused}");
}

#[test]
fn names_of_runs_do_not_write_to_the_terminal() {
    let shop = Workshop::new();
    write_run(&shop.path("a\u{1b}[2Jb\nc"), 3);
    let table = shop.run(&["runs", "."]).expect(0).stdout;
    assert!(table.contains("a\\u{1b}[2Jb\\nc"), "{table}");
}

/// The file is read in parts of 64 MiB; a report has all of them.
#[test]
fn a_report_has_the_end_of_a_long_log() {
    let shop = Workshop::new();
    write_run(&shop.path("run"), 0);
    for step in 1..=3 {
        append(&shop.path("run"), &format!("{}{}\n", line(step).trim_end(), " ".repeat(40 << 20)));
    }
    append(&shop.path("run"), &line(4));
    shop.run(&["report", "run"]).expect(0);
    let page = shop.read("report.html");
    assert!(page.contains("step 4"), "{}", page.matches("step ").count());
}

/// Prints what `docs/watch.md` says of speed; nothing is timed here that could fail.
#[test]
fn a_report_of_ten_thousand_steps_is_small() {
    let shop = Workshop::new();
    write_run(&shop.path("run"), 10_000);
    let began = Instant::now();
    shop.run(&["report", "run"]).expect(0);
    let (took, size) = (began.elapsed(), fs::metadata(shop.path("report.html")).unwrap().len());
    println!("a report of 10,000 steps: {took:.2?}, {} KiB", size >> 10);
    assert!(size < 2 << 20, "{size} bytes");
}
