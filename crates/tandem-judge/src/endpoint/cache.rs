//! Replies on disk, one line of JSON each, appended.
//!
//! Several runs may share a folder. A truncated or mixed-up line is ignored, and its request
//! repeated.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use blake3::Hash;
use serde_json::{Value, json};

use super::choice::Choice;

const FILE: &str = "replies.jsonl";

/// A parsed reply.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Reply {
    /// The choice.
    pub choice: Choice,
    /// The reply's text.
    pub said: String,
}

/// Cached replies of a folder.
#[derive(Debug)]
pub(super) struct Cache {
    path: PathBuf,
    file: File,
    known: HashMap<Hash, Reply>,
}

impl Cache {
    /// Reads a folder's replies; creates the folder if it is missing.
    pub(super) fn open(folder: &Path) -> Result<Self, (PathBuf, io::Error)> {
        let path = folder.join(FILE);
        let open = || {
            std::fs::create_dir_all(folder)?;
            let mut file = OpenOptions::new().read(true).append(true).create(true).open(&path)?;
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes)?;
            if bytes.last().is_some_and(|byte| *byte != b'\n') {
                file.write_all(b"\n")?;
            }
            let known = bytes.split(|byte| *byte == b'\n').filter_map(parse).collect();
            Ok((file, known))
        };
        match open() {
            Ok((file, known)) => Ok(Self { path, file, known }),
            Err(source) => Err((path, source)),
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn get(&self, key: &Hash) -> Option<&Reply> {
        self.known.get(key)
    }

    /// Stores a reply in one write, so that lines of several runs do not mix.
    pub(super) fn put(&mut self, key: Hash, reply: Reply) -> io::Result<()> {
        let line = json!({ "key": key.to_string(), "choice": reply.choice.as_str(), "said": reply.said });
        self.file.write_all(format!("{line}\n").as_bytes())?;
        self.known.insert(key, reply);
        Ok(())
    }
}

fn parse(line: &[u8]) -> Option<(Hash, Reply)> {
    let line: Value = serde_json::from_slice(line).ok()?;
    let key = Hash::from_hex(line["key"].as_str()?).ok()?;
    let choice = Choice::parse(line["choice"].as_str()?)?;
    Some((key, Reply { choice, said: line["said"].as_str()?.to_owned() }))
}
