//! Files of the HF folder that a GGUF file stands for.

use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use serde_json::{Value as Json, json};

use crate::{Gguf, GgufError, Result, TensorInfo};

/// Files of an HF folder in memory, by name.
#[derive(Clone, Debug, Default)]
pub struct FolderFiles(Vec<(&'static str, Vec<u8>)>);

impl FolderFiles {
    /// Returns the contents of a file.
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        self.0.iter().find(|(known, _)| *known == name).map(|(_, bytes)| bytes.as_slice())
    }

    fn push_json(&mut self, name: &'static str, value: &Json) {
        let text = serde_json::to_string_pretty(value).expect("JSON values print");
        self.0.push((name, (text + "\n").into_bytes()));
    }
}

impl Gguf {
    /// Returns the files of tokenizer and chat template.
    ///
    /// # Errors
    /// If the tokenizer is of a kind that is not supported, or contradicts itself.
    pub fn tokenizer_files(&self) -> Result<FolderFiles> {
        let mut files = FolderFiles::default();
        files.push_json("tokenizer.json", &self.tokenizer()?);
        files.push_json("tokenizer_config.json", &self.tokenizer_config()?);
        files.push_json("generation_config.json", &self.generation_config()?);
        Ok(files)
    }

    /// Returns a `generation_config.json`: the ids of special tokens.
    ///
    /// # Errors
    /// If an id is not one of the vocabulary.
    pub fn generation_config(&self) -> Result<Json> {
        let mut config: serde_json::Map<_, _> =
            self.token_ids()?.into_iter().map(|(key, id)| (key.to_owned(), id.into())).collect();
        match self.end_ids()?.as_slice() {
            [] => {}
            [one] => _ = config.insert("eos_token_id".into(), json!(one)),
            several => _ = config.insert("eos_token_id".into(), json!(several)),
        }
        Ok(Json::Object(config))
    }

    /// Reads a small tensor of f32.
    pub(crate) fn read_f32(&self, info: &TensorInfo) -> Result<Vec<f32>> {
        let mut bytes = vec![0; info.bytes.len()];
        let mut read = || {
            let mut file = tandem_files::open(self.path())?;
            file.seek(SeekFrom::Start(info.bytes.start as u64))?;
            file.read_exact(&mut bytes)
        };
        read().map_err(|e| GgufError::io(self.path(), e))?;
        let mut values = vec![0.0; info.shape.iter().product()];
        info.quant.read(&bytes, 0, &mut values);
        Ok(values)
    }
}

/// Files that say what a folder's GGUF file says itself.
const CONTRADICTING: [&str; 4] =
    ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"];

/// Returns the GGUF file that a path stands for: the file itself, or the only one of a folder
/// without other weights. `None` if the path is an ordinary model folder, or does not exist.
///
/// # Errors
/// If a folder without other weights has several GGUF files, or files that contradict it.
pub fn find(path: &Path) -> Result<Option<PathBuf>> {
    let is_gguf = |path: &Path| path.extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf"));
    if path.is_file() {
        return Ok(is_gguf(path).then(|| path.to_owned()));
    }
    let Ok(entries) = std::fs::read_dir(path) else { return Ok(None) };
    let mut found = Vec::new();
    for entry in entries {
        let file = entry.map_err(|e| GgufError::io(path, e))?.path();
        let ends = |end: &str| file.to_string_lossy().ends_with(end);
        if ends(".safetensors")
            || ends(".safetensors.index.json")
            || ends("policy.pt")
            || ends("pytorch_model.bin")
        {
            return Ok(None);
        }
        if is_gguf(&file) {
            found.push(file);
        }
    }
    found.sort();
    match found.as_slice() {
        [] => Ok(None),
        [file] => {
            let beside = CONTRADICTING.iter().find(|name| path.join(name).exists());
            match beside {
                None => Ok(Some(file.clone())),
                Some(name) => Err(GgufError::format(
                    path,
                    format!(
                        "holds {name} beside {}, which has its own; name the .gguf file to use what it holds",
                        file.file_name().unwrap_or_default().to_string_lossy()
                    ),
                )),
            }
        }
        [first, second, ..] => Err(GgufError::format(
            path,
            format!(
                "holds several GGUF files, such as {} and {}; name one of them",
                first.file_name().unwrap_or_default().to_string_lossy(),
                second.file_name().unwrap_or_default().to_string_lossy()
            ),
        )),
    }
}
