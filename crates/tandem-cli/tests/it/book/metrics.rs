//! `docs/metrics.md`: the table of `metrics.jsonl`, from the comment on its record.

use crate::workshop::Workshop;

use super::blocks::{read, root};

const RECORD: &str = "crates/tandem-train/src/metrics/record.rs";

const INTRODUCTION: &str = "\
# Metrics

<!-- Generated from crates/tandem-train/src/metrics/record.rs: do not edit.
     TANDEM_BLESS=1 cargo test -p tandem-cli --test it metrics_page writes this file. -->

`metrics.jsonl` in the run's folder has a JSON object per line: one per step, and one per evaluation.
`step` is the number of optimizer steps done. `split` is `\"train\"` or `\"eval\"`. Names are those of
TRL, without the prefix `eval_`. A value that is not finite is `null`. A method writes the metrics that
it has.

";

const END: &str = "
[Online runs](online.md#metrics) have more, with their differences from TRL. [Troubles](troubles.md)
says which courses of these numbers are a warning. `tandem runs` lists runs with their last metrics.
";

/// Rows of the table in the comment on `Record`.
fn rows() -> Vec<String> {
    let source = read(RECORD);
    source.lines().filter_map(|line| line.strip_prefix("/// |")).map(|row| format!("|{row}\n")).collect()
}

/// `docs/metrics.md` is the table of the source; `TANDEM_BLESS=1` writes it.
#[test]
fn metrics_page() {
    let page = format!("{INTRODUCTION}{}{END}", rows().concat());
    if std::env::var_os("TANDEM_BLESS").is_some() {
        std::fs::write(root().join("docs/metrics.md"), &page).expect("written");
    }
    let bless = "TANDEM_BLESS=1 cargo test -p tandem-cli --test it metrics_page writes it";
    assert!(page == read("docs/metrics.md"), "docs/metrics.md differs from {RECORD}: {bless}");
}

#[test]
fn every_metric_of_a_run_is_in_the_page() {
    let rows = rows();
    let names: Vec<&str> = rows
        .iter()
        .filter_map(|row| row.split('|').nth(1))
        .flat_map(|cell| cell.split('`').skip(1).step_by(2))
        .collect();
    let shop = Workshop::new();
    shop.write_online("online");
    shop.write(
        "sft.toml",
        &shop
            .dpo_toml("sft")
            .replace("\"dpo\"", "\"sft\"")
            .replace("[data]", "[data]\ntake = \"chosen\"\neval = \"preferences.jsonl\""),
    );
    shop.write("reward.toml", &shop.dpo_toml("reward").replace("\"dpo\"", "\"reward\""));
    let distill = shop
        .read("sft.toml")
        .replace("\"sft\"", "\"distill\"")
        .replace("[data]", "[reference]\nmodel = \"model\"\n[data]");
    let own = format!("{distill}[distill]\nlmbda = 0.5\n[online]\nmax_new_tokens = 8\n");
    shop.write("distill.toml", &own);
    let grpo = shop.read("online.toml").replace("\"online\"", "\"grpo\"");
    shop.write("grpo.toml", &format!("{grpo}[objective]\nbeta = 0.01\n"));
    let mut missing = Vec::new();
    for (file, run) in [
        ("dpo.toml", "run"),
        ("sft.toml", "sft"),
        ("reward.toml", "reward"),
        ("online.toml", "online"),
        ("grpo.toml", "grpo"),
        ("distill.toml", "distill"),
    ] {
        shop.run(&["train", file, "--set", "train.steps=2"]).expect(0);
        for line in shop.read(&format!("{run}/metrics.jsonl")).lines() {
            let record: serde_json::Value = serde_json::from_str(line).expect("a record");
            for name in record.as_object().expect("an object").keys() {
                let listed = names.iter().any(|listed| {
                    let start = listed.trim_end_matches(['*']).trim_end_matches("NAME");
                    *listed == name || (start.len() < listed.len() && name.starts_with(start))
                });
                if !listed && !matches!(&**name, "step" | "split") && !missing.contains(name) {
                    missing.push(name.clone());
                }
            }
        }
    }
    assert!(missing.is_empty(), "the comment on Record has no {missing:?}");
}
