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
