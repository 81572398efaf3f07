//! The floors of this crate, asserted: each room imports rooms of lower floors only.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// Rooms by floor, from bottom to top. Rooms of one floor do not import each other.
const FLOORS: &[&[&str]] = &[
    &["draw", "objective", "size"],
    &["config"],
    &["error"],
    &["disk", "metrics", "pool"],
    &["events", "trackers"],
    &["recipe"],
    &["placement"],
    &["parallel"],
    &["weights"],
    &["gradients", "judges"],
    &["inputs", "optimizer"],
    &["reference"],
    &["checkpoint"],
    &["step"],
    &["online", "samples"],
    &["plan"],
    &["profile"],
    &["run"],
];

#[test]
fn rooms_import_rooms_of_lower_floors_only() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let exports = exports(&code(&fs::read_to_string(root.join("lib.rs")).unwrap()));
    let mut files = Vec::new();
    sources(&root, &mut Vec::new(), &mut files);
    let mut rooms = BTreeSet::new();
    let mut wrong = Vec::new();
    for (path, text) in &files {
        let room = path[0].as_str();
        rooms.insert(room);
        for import in imports(path, text, &exports) {
            if import != room && !is_below(&import, room) {
                wrong.push(format!("{} imports {import}", path.join("/")));
            }
        }
    }
    assert!(wrong.is_empty(), "imports from the same floor or a higher one:\n{}", wrong.join("\n"));
    let known: BTreeSet<&str> = FLOORS.iter().copied().flatten().copied().collect();
    assert_eq!(rooms, known, "every room has a floor");
}

#[test]
fn an_upward_import_is_found_wherever_it_stands() {
    let exports = exports("pub use run::{Options, Trainer};pub use error::{Result, TrainError};");
    let found = |path: &[&str], text: &str| -> Vec<String> {
        let path: Vec<String> = path.iter().map(|&part| part.to_owned()).collect();
        imports(&path, text, &exports).into_iter().filter(|room| !is_below(room, &path[0])).collect()
    };
    let policy = ["weights", "policy"];
    for text in [
        "use crate::run::trainer;",
        "use crate::{Result, run::spawn};",
        "use crate::{\n    Trainer,\n    parallel::{Mesh, Partition},\n};",
        "fn f() { crate::run::spawn::train() }",
        "fn f<'a>(x: &'a str) { let quote = '\"'; super::super::run::train(x) }",
    ] {
        assert_eq!(found(&policy, text), ["run"], "{text}");
    }
    assert_eq!(found(&["weights"], "use super::run::Trainer;"), ["run"]);
    for text in [
        "use crate::{Result, TrainError};\nuse crate::parallel::{Mesh, run};\nuse super::run;",
        "// crate::run\n/* crate::run /* nested */ crate::run */ const A: &str = \"crate::run \\\" crate::run\";",
        "const A: &str = r#\"crate::run \" crate::run\"#;",
        "#[cfg(test)]\nmod tests { use crate::run::Trainer; fn f() { { crate::run::x() } } }",
        "#[cfg(test)]\npub(crate) fn on(disk: Arc<dyn crate::run::Disk>) { disk.on() }\nuse crate::config::Config;",
    ] {
        assert_eq!(found(&policy, text), [] as [&str; 0], "{text}");
    }
}

fn floor(room: &str) -> Option<usize> {
    FLOORS.iter().position(|rooms| rooms.contains(&room))
}

fn is_below(import: &str, room: &str) -> bool {
    floor(import).zip(floor(room)).is_some_and(|(import, room)| import < room)
}

/// Collects the sources below a folder by module path; tests and the crate's root are left out.
fn sources(folder: &Path, path: &mut Vec<String>, files: &mut Vec<(Vec<String>, String)>) {
    for entry in fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap().path();
        let name = entry.file_stem().unwrap().to_str().unwrap().to_owned();
        if name == "tests" || (path.is_empty() && ["lib", "floors"].contains(&&*name)) {
            continue;
        }
        if entry.is_dir() {
            path.push(name);
            sources(&entry, path, files);
            path.pop();
        } else if entry.extension().is_some_and(|extension| extension == "rs") {
            let own = (name != "mod").then_some(name);
            files.push((path.iter().cloned().chain(own).collect(), fs::read_to_string(&entry).unwrap()));
        }
    }
}

/// Returns the rooms that names re-exported by the crate's root come from.
fn exports(root: &str) -> BTreeMap<String, String> {
    let mut exports = BTreeMap::new();
    for line in root.split(';').filter_map(|item| item.trim().strip_prefix("pub use ")) {
        let (room, names) = line.split_once("::").unwrap();
        let names = names.split(|c: char| !c.is_alphanumeric()).filter(|name| !name.is_empty());
        exports.extend(names.map(|name| (name.to_owned(), room.to_owned())));
    }
    exports
}

/// Returns the rooms that a module's text names, as `crate::room` or through enough `super`s.
fn imports(path: &[String], text: &str, exports: &BTreeMap<String, String>) -> BTreeSet<String> {
    let code = code(text);
    let tokens = tokens(&code);
    let mut found = BTreeSet::new();
    let mut at = 0;
    while at < tokens.len() {
        let start = at;
        while tokens.get(at) == Some(&"super") && tokens.get(at + 1) == Some(&"::") {
            at += 2;
        }
        let is_root = at > start && at - start == 2 * path.len();
        if tokens.get(at) == Some(&"crate") && tokens.get(at + 1) == Some(&"::") {
            at += 2;
        } else if !is_root {
            at = at.max(start + 1);
            continue;
        }
        for name in heads(&tokens[at..]) {
            found.insert(exports.get(name).cloned().unwrap_or_else(|| name.to_owned()));
        }
        at += 1;
    }
    found
}

/// Returns the first segments of a path or of a group of paths.
fn heads<'a>(tokens: &[&'a str]) -> Vec<&'a str> {
    if tokens.first() != Some(&"{") {
        return tokens.first().copied().into_iter().collect();
    }
    let (mut heads, mut depth, mut begins) = (Vec::new(), 0, false);
    for &token in tokens {
        match token {
            "{" => depth += 1,
            "}" => depth -= 1,
            _ if begins => heads.push(token),
            _ => {}
        }
        begins = depth == 1 && ["{", ","].contains(&token);
        if depth == 0 {
            break;
        }
    }
    heads
}

/// Splits code into identifiers, `::` and single other characters.
fn tokens(code: &str) -> Vec<&str> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let (mut tokens, mut rest) = (Vec::new(), code.trim_start());
    while let Some(first) = rest.chars().next() {
        let len = match first {
            c if is_word(c) => rest.find(|c| !is_word(c)).unwrap_or(rest.len()),
            ':' if rest.starts_with("::") => 2,
            c => c.len_utf8(),
        };
        let (token, after) = rest.split_at(len);
        tokens.push(token);
        rest = after.trim_start();
    }
    tokens
}

/// Removes comments, literals and items under `#[cfg(test)]`.
fn code(text: &str) -> String {
    let plain = without_literals(text);
    let (mut code, mut rest) = (String::new(), &plain[..]);
    while let Some((before, after)) = rest.split_once("#[cfg(test)]") {
        code += before;
        let (mut depth, mut end) = (0, after.len());
        for (at, c) in after.char_indices() {
            match c {
                '{' => depth += 1,
                '}' => depth -= 1,
                _ => {}
            }
            if depth == 0 && ['}', ';'].contains(&c) {
                end = at + 1;
                break;
            }
        }
        rest = &after[end..];
    }
    code + rest
}

fn without_literals(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let after_escapes = |text: &str, quote: char| {
            let mut escaped = false;
            let end = text.char_indices().find(|&(_, c)| {
                let ends = c == quote && !escaped;
                escaped = c == '\\' && !escaped;
                ends
            });
            end.map_or(text.len(), |(at, c)| at + c.len_utf8())
        };
        let skipped = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            let (mut depth, mut at) = (0, 0);
            loop {
                match rest.get(at..at + 2) {
                    Some("/*") => (depth, at) = (depth + 1, at + 2),
                    Some("*/") => (depth, at) = (depth - 1, at + 2),
                    None if at + 2 > rest.len() => break rest.len(),
                    _ => at += 1,
                }
                if depth == 0 {
                    break at;
                }
            }
        } else if let Some(hashes) =
            rest.strip_prefix('r').map(|raw| raw.len() - raw.trim_start_matches('#').len())
            && rest[1 + hashes..].starts_with('"')
            && !out.ends_with(|c: char| c.is_alphanumeric() || c == '_')
        {
            let end = format!("\"{}", "#".repeat(hashes));
            let body = 2 + hashes;
            rest[body..].find(&end).map_or(rest.len(), |at| body + at + end.len())
        } else if first == '"' {
            1 + after_escapes(&rest[1..], '"')
        } else if first == '\'' {
            // A lifetime has no closing quote after one character.
            let mut chars = rest[1..].chars();
            match (chars.next(), chars.next()) {
                (Some('\\'), _) => 1 + after_escapes(&rest[1..], '\''),
                (Some(c), Some('\'')) => 2 + c.len_utf8(),
                _ => 0,
            }
        } else {
            0
        };
        if skipped > 0 {
            out.push(' ');
            rest = &rest[skipped..];
        } else {
            out.push(first);
            rest = &rest[first.len_utf8()..];
        }
    }
    out
}
