//! Fenced blocks of the book's pages, and the comment before each that says how a test treats it.
//!
//! | comment on the line before a block | meaning |
//! |---|---|
//! | none, at a block of `sh` or `console` | a test runs it; every command exits with 0 |
//! | `<!-- exits with 2 -->` | a test runs it; the last command exits with this code |
//! | `<!-- not run: REASON -->` | no test runs it; its commands are parsed |
//! | `<!-- run by FILE -->` | this script of the repository runs it |
//! | `<!-- file: NAME -->` | a test writes the block into this file |
//! | `<!-- prints -->` | the commands of the block before print these lines; `…` stands for anything |

use std::fs;
use std::path::{Path, PathBuf};

/// Treatment of a block by a test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Treatment {
    /// Run, with this exit code.
    Run(i32),
    /// Not run, for this reason.
    NotRun(String),
    /// Run by this file of the repository.
    RunBy(String),
    /// Written into this file.
    File(String),
    /// Compared with the output of the block before.
    Prints,
    /// Only to be read.
    Read,
}

/// A fenced block of a page.
#[derive(Clone, Debug)]
pub struct Block {
    /// Page and 1-based line of the opening fence, as in messages.
    pub place: String,
    pub text: String,
    pub treatment: Treatment,
}

impl Block {
    pub fn has_commands(&self) -> bool {
        !matches!(self.treatment, Treatment::File(_) | Treatment::Prints | Treatment::Read)
    }

    /// The block's text with lines that end in a backslash joined.
    pub fn lines(&self) -> Vec<String> {
        self.text.replace("\\\n", " ").lines().map(str::to_owned).collect()
    }
}

/// Root of the repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the repository")
}

/// Pages of the book and the README, relative to the root, in order of their names.
pub fn pages() -> Vec<String> {
    let mut pages = vec!["README.md".to_owned()];
    collect(&root(), "docs", &mut pages);
    pages.sort();
    pages
}

fn collect(root: &Path, folder: &str, pages: &mut Vec<String>) {
    for entry in fs::read_dir(root.join(folder)).expect("a folder of pages") {
        let entry = entry.expect("an entry");
        let name = format!("{folder}/{}", entry.file_name().to_string_lossy());
        if entry.path().is_dir() {
            collect(root, &name, pages);
        } else if name.ends_with(".md") {
            pages.push(name);
        }
    }
}

pub fn read(page: &str) -> String {
    fs::read_to_string(root().join(page)).unwrap_or_else(|e| panic!("{page}: {e}"))
}

/// Blocks of a page in their order.
///
/// # Panics
/// If a comment is none of the table above, or a block of commands has no fence.
pub fn blocks(page: &str) -> Vec<Block> {
    let text = read(page);
    let mut blocks = Vec::new();
    let mut open: Option<(usize, String, Treatment)> = None;
    let mut before = "";
    for (index, line) in text.lines().enumerate() {
        let place = format!("{page}:{}", index + 1);
        if let Some((first, content, treatment)) = &mut open {
            if line == "```" {
                let place = format!("{page}:{first}");
                blocks.push(Block { place, text: content.clone(), treatment: treatment.clone() });
                open = None;
            } else {
                content.push_str(line);
                content.push('\n');
            }
        } else if let Some(info) = line.strip_prefix("```") {
            open = Some((index + 1, String::new(), treatment(&place, info, before)));
        } else {
            let mut words = line.split_whitespace();
            let quoted = line.starts_with("    ") && !line.trim_start().starts_with("error:");
            assert!(
                !quoted || words.all(|word| word != "tandem"),
                "{place}: put commands into a block of ```sh"
            );
        }
        before = line;
    }
    assert!(open.is_none(), "{page}: a block without an end");
    blocks
}

fn treatment(place: &str, info: &str, before: &str) -> Treatment {
    let comment = before.strip_prefix("<!-- ").and_then(|rest| rest.strip_suffix(" -->"));
    let is_shell = matches!(info, "sh" | "console");
    match comment {
        None if is_shell => Treatment::Run(0),
        None => Treatment::Read,
        Some(comment) => {
            let after = |start: &str| comment.strip_prefix(start).map(str::to_owned);
            let code = after("exits with ").and_then(|code| code.parse().ok());
            let found = after("not run: ").map(Treatment::NotRun);
            let found = found.or_else(|| after("run by ").map(Treatment::RunBy));
            let found = found.or_else(|| code.map(Treatment::Run)).filter(|_| is_shell);
            let found = found.or_else(|| after("file: ").map(Treatment::File).filter(|_| !is_shell));
            let found =
                found.or_else(|| (comment == "prints" && info == "text").then_some(Treatment::Prints));
            found.unwrap_or_else(|| {
                panic!("{place}: {before} is no comment that a block of {info:?} can have")
            })
        }
    }
}

/// Arguments of every `tandem` that a line of shell calls, the program's own name first. `None`: the line has an
/// open quotation mark.
pub fn commands(line: &str) -> Option<Vec<Vec<String>>> {
    let mut calls: Vec<Vec<String>> = Vec::new();
    let mut open = false;
    let mut cargo = false;
    for word in shlex::split(line)? {
        let ends = matches!(&*word, "|" | "||" | "&" | "&&" | ";" | ">" | ">>" | "<" | "2>" | "2>&1");
        if ends {
            (open, cargo) = (false, false);
        } else if open {
            calls.last_mut().expect("an open call").push(word);
        } else if word == "tandem" || (cargo && word == "--") {
            open = true;
            calls.push(vec!["tandem".to_owned()]);
        } else if word == "tandem-cli" {
            cargo = true;
        }
    }
    Some(calls)
}
