//! Tokenizer and chat template in an adapter's folder, which take the place of its base's.

use std::io;
use std::path::{Path, PathBuf};

use crate::{MAX_CONFIG, read};

/// Files of tokenizer and chat template in a model's or an adapter's folder.
pub const TOKENIZER_FILES: [&str; 10] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    CHAT_TEMPLATE,
    "chat_template.json",
];

/// File of the default chat template.
pub const CHAT_TEMPLATE: &str = "chat_template.jinja";

/// Folder of further chat templates, each a `.jinja` file with the template's name.
pub const FURTHER_TEMPLATES: &str = "additional_chat_templates";

/// Tokenizer files of an adapter's folder. Each takes the place of the base's file of that name; with a
/// `tokenizer.json`, they take the place of all the base's.
#[derive(Clone, Debug)]
pub struct TokenizerOverride {
    folder: PathBuf,
    /// Names of [`TOKENIZER_FILES`] in the folder.
    names: Vec<&'static str>,
    has_template: bool,
}

impl TokenizerOverride {
    /// Looks which files the folder has.
    ///
    /// # Errors
    /// `tokenizer_config.json` cannot be read, or is no JSON.
    pub fn open(folder: &Path) -> io::Result<Self> {
        let names: Vec<_> =
            TOKENIZER_FILES.into_iter().filter(|name| folder.join(name).symlink_metadata().is_ok()).collect();
        let mut has_template = names.contains(&CHAT_TEMPLATE);
        if names.contains(&"tokenizer_config.json") && !has_template {
            let bytes = read(&folder.join("tokenizer_config.json"), MAX_CONFIG)?;
            let config: serde_json::Value = serde_json::from_slice(&bytes)?;
            has_template = config.get("chat_template").is_some_and(|template| !template.is_null());
        }
        Ok(Self { folder: folder.to_owned(), names, has_template })
    }

    /// Returns the adapter's folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the names of the files that the folder has.
    pub fn names(&self) -> &[&'static str] {
        &self.names
    }

    /// Returns whether the folder's chat template is used, or its tokenizer without one. The base's
    /// template files then are not.
    pub fn replaces_template(&self) -> bool {
        self.has_template || self.is_whole()
    }

    /// Returns whether the base's file of that name is not used.
    pub fn hides(&self, name: &str) -> bool {
        let is_template = [CHAT_TEMPLATE, "chat_template.json"].contains(&name);
        self.names.contains(&name)
            || (is_template && self.replaces_template())
            || (self.is_whole() && TOKENIZER_FILES.contains(&name))
    }

    fn is_whole(&self) -> bool {
        self.names.contains(&"tokenizer.json")
    }
}
