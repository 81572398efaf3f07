//! The documents say what the program does.

use std::collections::BTreeSet;
use std::path::Path;

use crate::workshop::Workshop;
use tandem_train::config::{Config, Problem};

fn document(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Keys that the program knows in a table, as it lists them when it meets one that it does not know.
fn known_keys(shop: &Workshop, table: &str) -> BTreeSet<String> {
    let key = if table.is_empty() { "zzzzzzzz=1".to_owned() } else { format!("{table}.zzzzzzzz=1") };
    let run = if table == "online" { "online.toml" } else { "dpo.toml" };
    let error = Config::load(&shop.path(run), &[key]).expect_err("an unknown key is refused");
    let Problem::UnknownKey { known, .. } = error.problem else { panic!("{error}") };
    known.into_iter().map(str::to_owned).collect()
}

/// First cells, in backquotes, of the tables under a heading of `docs/config.md`.
fn documented_keys(text: &str, heading: &str) -> BTreeSet<String> {
    let start = text.find(&format!("\n## {heading}\n")).unwrap_or_else(|| panic!("no heading {heading}"));
    let section = text[start + 4..].split("\n## ").next().unwrap_or_default();
    // Tables within a table are under headings of their own.
    let own = section.split("\n### ").next().unwrap_or_default();
    own.lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once('`'))
        .map(|(key, _)| key.to_owned())
        .collect()
}

#[test]
fn every_key_is_documented_and_every_documented_key_exists() {
    let (shop, text) = (Workshop::new(), document("docs/config.md"));
    shop.write_online("run");
    let tables = ["adapter", "reference", "data", "online", "objective", "train", "compute"];
    for table in tables {
        let mut known = known_keys(&shop, table);
        // A test of `tandem-train` compares what it holds.
        known.remove("server");
        assert_eq!(documented_keys(&text, &format!("`[{table}]`")), known, "[{table}]");
    }
    let mut top = known_keys(&shop, "");
    tables.iter().for_each(|table| assert!(top.remove(*table), "{table}"));
    // What a judge's table may hold depends on its kind: a test of `tandem-train` compares that.
    assert!(top.remove("judges") && text.contains("\n## `[[judges]]`\n"));
    assert_eq!(documented_keys(&text, "At the top"), top);
}

#[test]
fn the_readmes_example_is_a_valid_configuration() {
    let text = document("README.md");
    let example =
        text.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).expect("a block of TOML");
    let shop = Workshop::new();
    shop.write("first.toml", example);
    let config = Config::load::<&str>(&shop.path("first.toml"), &[]).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(config.train.batch_size, 8);
}

#[test]
fn the_exit_codes_of_the_help_and_of_the_document_agree() {
    let help = Workshop::new().run(&["--help"]).expect(0).stdout;
    let (_, help) = help.split_once("Exit codes:").expect("the help lists exit codes");
    let listed: Vec<&str> = help.lines().filter_map(|line| line.split_whitespace().next()).collect();
    let document = document("docs/exit-codes.md");
    let documented: Vec<&str> = document
        .lines()
        .filter_map(|line| line.strip_prefix("| ")?.split(' ').next())
        .filter(|code| code.parse::<u8>().is_ok())
        .collect();
    assert_eq!(listed, documented);
}
