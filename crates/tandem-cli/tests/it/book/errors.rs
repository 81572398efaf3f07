//! `docs/guides/errors.md` quotes messages that the program has.

use std::fs;
use std::path::{Path, PathBuf};

use super::blocks::{read, root};

const PAGE: &str = "docs/guides/errors.md";

/// Source files of the workspace with strings that end in a backslash joined, as the compiler does it.
pub fn sources() -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    for crate_folder in fs::read_dir(root().join("crates")).unwrap() {
        collect(&crate_folder.unwrap().path().join("src"), &mut found);
    }
    found
}

fn collect(folder: &Path, found: &mut Vec<(PathBuf, String)>) {
    for entry in fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display())) {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).unwrap();
            found.push((path, joined(&text)));
        }
    }
}

/// Joins the lines of a string that is cut by backslashes, and takes the backslash of a quotation mark away.
fn joined(text: &str) -> String {
    let mut parts = text.split("\\\n");
    let mut joined = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        joined.push_str(part.trim_start());
    }
    joined.replace("\\\"", "\"")
}

/// Returns whether the parts of `message` between its `…` follow one another within a line of `source`.
fn has_message(source: &str, message: &str) -> bool {
    let parts: Vec<&str> = message.split('…').map(str::trim).filter(|part| !part.is_empty()).collect();
    source.lines().any(|line| {
        let mut rest = line;
        parts.iter().all(|part| match rest.find(part) {
            Some(at) => {
                rest = &rest[at + part.len()..];
                true
            }
            None => false,
        })
    })
}

/// Messages that the page quotes: code in the first column of its tables.
fn quoted(page: &str) -> Vec<(usize, &str)> {
    let rows = page.lines().enumerate();
    rows.filter_map(|(index, line)| Some((index + 1, line.strip_prefix("| `")?.split_once("` |")?.0)))
        .collect()
}

#[test]
fn every_quoted_message_is_in_the_source() {
    let sources = sources();
    let page = read(PAGE);
    let quoted = quoted(&page);
    assert!(quoted.len() > 20, "{} messages only", quoted.len());
    for (line, message) in &quoted {
        let longest = message.split('…').map(|part| part.trim().len()).max();
        assert!(longest >= Some(8), "{PAGE}:{line}: {message} is too short to find");
    }
    let missing: Vec<String> = quoted
        .iter()
        .filter(|(_, message)| !sources.iter().any(|(_, source)| has_message(source, message)))
        .map(|(line, message)| format!("{PAGE}:{line}: {message}"))
        .collect();
    assert!(missing.is_empty(), "no source has\n{}", missing.join("\n"));
}

#[test]
fn a_message_is_found_in_its_parts_and_only_in_their_order() {
    let source = joined("    #[error(\"{path}: no \\\n        rows of \\\"{name}\\\" in {count}\")]");
    assert!(has_message(&source, "…: no rows of \"…\" in …"));
    assert!(!has_message(&source, "…: in … no rows"));
    assert!(!has_message(&source, "…: no row in …"));
}
