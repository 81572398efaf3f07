//! Files of a run and those that they name, in the order in which settings count.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::Given;
use crate::config::error::{Place, Result};
use crate::config::foreign::command_line::CommandLine;
use crate::config::foreign::document::{Document, at};
use crate::config::foreign::{Program, trl};

/// All documents of a run.
pub(super) struct Sources {
    pub documents: Vec<Document>,
    /// Method that the name of a command's script says.
    pub method: Option<Given>,
    /// Words of a command that stand for arguments which no file tells.
    pub left_out: Vec<String>,
    kind: Option<Program>,
    pub seen: Vec<PathBuf>,
}

impl Sources {
    /// Reads files, and those that they name. `kind` is the program where the content does not tell.
    pub(super) fn of(files: &[PathBuf], kind: Option<Program>) -> Result<Self> {
        let mut sources =
            Self { documents: Vec::new(), method: None, left_out: Vec::new(), kind, seen: Vec::new() };
        for file in files {
            sources.read(file, kind)?;
        }
        Ok(sources)
    }

    fn read(&mut self, path: &Path, kind: Option<Program>) -> Result<()> {
        if self.seen.iter().any(|seen| seen == path) {
            return Ok(());
        }
        self.seen.push(path.to_owned());
        let text = match path.as_os_str() == "-" {
            true => std::io::read_to_string(std::io::stdin()),
            false => tandem_files::read_text(path, tandem_files::MAX_CONFIG),
        };
        let unreadable = |error| at(path, None, format!("cannot read the file: {error}"));
        let text = text.map_err(unreadable)?;
        if let Some(document) = Document::parse(path, &text, kind)? {
            self.add(document)?;
            return Ok(());
        }
        let Some(command) = CommandLine::parse(path, &text, kind)? else {
            return Err(at(
                path,
                None,
                "expected YAML, JSON or the command line of a training script, found neither of them",
            ));
        };
        if let Some(method) = command.method {
            self.method = Some(Given {
                setting: "method".to_owned(),
                value: method.into(),
                place: Place::File { path: path.to_owned(), line: Some(command.line) },
                program: Program::Trl,
            });
        }
        self.left_out.extend(command.left_out);
        for (file, kind) in command.files {
            self.read(&beside(path, &file), kind.or(self.kind.filter(|_| kind.is_none())))?;
        }
        for document in command.documents {
            self.add(document)?;
        }
        Ok(())
    }

    /// Adds a document, and the files of Accelerate and DeepSpeed that it names before it.
    fn add(&mut self, mut document: Document) -> Result<()> {
        if let (Program::Trl, Some(Value::String(name))) =
            (document.program, document.settings.get("accelerate_config"))
        {
            let file = beside(&document.path, name);
            let is_file = file.is_file();
            let profile = trl::profile(name).filter(|_| !is_file);
            let is_told = is_file || profile.is_some();
            if is_file {
                self.read(&file, Some(Program::Accelerate))?;
            } else if let Some(mut settings) = profile {
                settings.retain(|name, _| !document.settings.contains_key(name));
                let (path, program) = (document.path.clone(), Program::Accelerate);
                self.documents.push(Document { path, program, settings, lines: document.lines.clone() });
            }
            if is_told {
                document.settings.remove("accelerate_config");
            }
        }
        let named = document
            .settings
            .get("deepspeed")
            .or_else(|| document.settings.get("deepspeed_config")?.get("deepspeed_config_file"))
            .or_else(|| document.settings.get("deepspeed_config_file"));
        if let Some(Value::String(file)) = named {
            let file = beside(&document.path, file);
            if file.is_file() {
                self.read(&file, Some(Program::DeepSpeed))?;
            }
        }
        self.documents.push(document);
        Ok(())
    }

    /// Whether a setting of one document has one of these names.
    pub(super) fn has(&self, names: &[&str]) -> bool {
        self.documents.iter().any(|document| names.iter().any(|name| document.settings.contains_key(*name)))
    }

    /// Returns a setting of one document.
    pub(super) fn given(&self, name: &str) -> Option<Given> {
        self.documents.iter().find_map(|document| {
            Some(Given {
                setting: name.to_owned(),
                value: document.settings.get(name)?.clone(),
                place: document.place(name),
                program: document.program,
            })
        })
    }

    /// Whether the command runs GKD, or a setting is that of `GKDConfig` alone.
    pub(super) fn is_gkd(&self) -> bool {
        self.method.as_ref().is_some_and(|given| given.value == "gkd")
            || self.has(&["lmbda", "seq_kd", "max_new_tokens"])
    }
}

/// A path that a file names: relative to the current folder as for the other program, or beside the file.
pub(super) fn beside(file: &Path, named: &str) -> PathBuf {
    let named = Path::new(named);
    match named.exists() {
        true => named.to_owned(),
        false => file.parent().unwrap_or(Path::new("")).join(named),
    }
}
