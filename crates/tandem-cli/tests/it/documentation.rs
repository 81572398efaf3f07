//! Documents that agree with the program. `docs/config.md` has its test in `tandem-train`.

use std::path::Path;

use crate::workshop::Workshop;
use tandem_train::config::Config;
use tandem_train::metrics::Trouble;

fn document(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
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

#[test]
fn the_troubles_have_the_sources_of_their_page() {
    let document = document("docs/troubles.md");
    for trouble in Trouble::ALL {
        assert!(!trouble.sources().is_empty(), "{trouble:?}");
        for [name, address] in trouble.sources() {
            assert!(document.contains(&format!("[{name}]({address})")), "{trouble:?}: {name}, {address}");
        }
    }
}

/// Names in `[workspace.dependencies]`, without the workspace's own crates.
fn direct_dependencies() -> Vec<String> {
    let manifest: toml::Table = document("Cargo.toml").parse().unwrap();
    let listed = manifest["workspace"]["dependencies"].as_table().unwrap();
    let mut names: Vec<String> = listed.keys().filter(|name| !name.starts_with("tandem-")).cloned().collect();
    names.sort();
    names
}

#[test]
fn every_dependency_has_its_reason() {
    let page = document("docs/dependencies.md");
    let mut explained: Vec<&str> = page
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once("` | "))
        .filter(|(_, reason)| reason.trim_end_matches(" |").len() > 10)
        .map(|(name, _)| name)
        .collect();
    explained.sort_unstable();
    assert_eq!(explained, direct_dependencies(), "docs/dependencies.md against Cargo.toml");
}

/// A crate takes its dependencies from the list of the workspace, so that none is left out of it.
#[test]
fn crates_have_no_dependency_beside_the_list() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut used = std::collections::BTreeSet::new();
    for entry in std::fs::read_dir(root.join("crates")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let manifest: toml::Table = document(&format!("crates/{name}/Cargo.toml")).parse().unwrap();
        let targets = manifest.get("target").and_then(toml::Value::as_table);
        let tables =
            targets.into_iter().flat_map(|targets| targets.values().filter_map(toml::Value::as_table));
        for table in tables.chain([&manifest]) {
            for kind in ["dependencies", "dev-dependencies", "build-dependencies"] {
                let Some(dependencies) = table.get(kind).and_then(toml::Value::as_table) else { continue };
                for (dependency, how) in dependencies {
                    let inherited = how.get("workspace").and_then(toml::Value::as_bool);
                    assert_eq!(inherited, Some(true), "{name}: {dependency} has a version of its own");
                    used.insert(dependency.clone());
                }
            }
        }
    }
    let unused: Vec<String> = direct_dependencies().into_iter().filter(|name| !used.contains(name)).collect();
    assert!(unused.is_empty(), "no crate uses {unused:?}");
}
