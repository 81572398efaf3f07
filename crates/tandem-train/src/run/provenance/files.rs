//! Files that a run reads, by the key that names them.

use std::fs;
use std::path::{Path, PathBuf};

use tandem_data::token_cache::TokenCache;

use crate::config::{AdapterSection, AdapterStart, Config, JudgeKind, Weights};
use crate::inputs::RunInputs;
use crate::run::agreement::OWN_KEYS;
use crate::run::provenance::HashedInput;
use crate::{Result, TrainError};

/// A file that a run reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::run) struct InputFile {
    /// Key of the config that leads to it.
    pub name: String,
    /// The file.
    pub path: PathBuf,
}

/// Returns whether a key names a path, or a machine's own resources.
pub(in crate::run) fn is_place(config: &Config, key: &str) -> bool {
    let is_model = |(index, kind): (usize, &JudgeKind)| {
        matches!(kind, JudgeKind::Reward(_)) && key == format!("judges[{index}].model")
    };
    OWN_KEYS.contains(&key) || config.judges.iter().map(|judge| &judge.kind).enumerate().any(is_model)
}

/// Returns the files of weights and rows.
pub(in crate::run) fn input_files(config: &Config, prepared: &RunInputs) -> Result<Vec<InputFile>> {
    let mut files = weight_files(config, prepared)?;
    for (index, judge) in config.judges.iter().enumerate() {
        if let JudgeKind::Reward(reward) = &judge.kind {
            let name = format!("judges[{index}].model");
            files.extend(
                files_of(&reward.model)?.into_iter().map(|path| InputFile { name: name.clone(), path }),
            );
        }
    }
    for (name, cache) in [("data.train", Some(&prepared.train)), ("data.eval", prepared.eval.as_ref())] {
        let paths = cache.into_iter().flat_map(TokenCache::files);
        files.extend(paths.map(|path| InputFile { name: name.to_owned(), path: path.clone() }));
    }
    Ok(files)
}

/// Returns the files of each model of the run.
pub(in crate::run) fn weight_files(config: &Config, prepared: &RunInputs) -> Result<Vec<InputFile>> {
    let mut all = vec![("model", vec![prepared.folder.config().path().to_path_buf()])];
    if config.weights != Weights::Random {
        all.push(("model", prepared.folder.weight_file().map_or(Ok(Vec::new()), |file| with_shards(&file))?));
    }
    let mut folders = vec![("reference.model", config.reference.model.as_ref())];
    folders.push(("reference.adapter", config.reference.adapter.as_ref()));
    if let Some(AdapterSection { start: AdapterStart::Folder(path), .. }) = &config.adapter {
        folders.push(("adapter.start", Some(path)));
    }
    for (name, path) in folders {
        if let Some(path) = path {
            all.push((name, files_of(path)?));
        }
    }
    let named = |(name, paths): (&str, Vec<PathBuf>)| {
        let name = name.to_owned();
        paths.into_iter().map(move |path| InputFile { name: name.clone(), path })
    };
    Ok(all.into_iter().flat_map(named).collect())
}

/// Returns a weight file, or all shards that its index lists.
fn with_shards(file: &Path) -> Result<Vec<PathBuf>> {
    match file.parent() {
        Some(folder) if file.extension().is_some_and(|extension| extension == "json") => files_of(folder),
        _ => Ok(vec![file.to_path_buf()]),
    }
}

/// Returns the files of a folder that describe or hold weights, in the order of their names.
fn files_of(path: &Path) -> Result<Vec<PathBuf>> {
    if path.is_file() {
        return Ok(vec![path.to_path_buf()]);
    }
    let is_wanted = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        ["config.json", "adapter_config.json"].contains(&&*name)
            || [".safetensors", ".pt", ".bin", ".gguf"].iter().any(|end| name.ends_with(end))
    };
    let listed = fs::read_dir(path).map_err(TrainError::io("list", path))?;
    let listed: std::io::Result<Vec<_>> = listed.map(|entry| entry.map(|entry| entry.path())).collect();
    let mut files = listed.map_err(TrainError::io("list", path))?;
    files.retain(|path| path.is_file() && is_wanted(path));
    files.sort();
    Ok(files)
}

/// Says which files are others than the record's, of the keys that are wanted.
pub(in crate::run) fn different_files(
    recorded: &[HashedInput],
    files: &[InputFile],
    hashed: &[HashedInput],
    is_wanted: impl Fn(&str) -> bool,
) -> Vec<String> {
    let mut names: Vec<&str> = recorded.iter().map(|file| file.name.as_str()).collect();
    names.dedup();
    names.retain(|name| is_wanted(name));
    names.into_iter().flat_map(|name| different_files_of(name, recorded, files, hashed)).collect()
}

/// Says which files of a key are others than the record's.
fn different_files_of(
    name: &str,
    recorded: &[HashedInput],
    files: &[InputFile],
    hashed: &[HashedInput],
) -> Vec<String> {
    let recorded: Vec<&HashedInput> = recorded.iter().filter(|file| file.name == name).collect();
    let own: Vec<(&HashedInput, &PathBuf)> = hashed
        .iter()
        .zip(files.iter().map(|file| &file.path))
        .filter(|(file, _)| file.name == name)
        .collect();
    // A single file may have another name.
    let is_single = recorded.len() == 1 && own.len() == 1;
    let mut found = Vec::new();
    for file in &recorded {
        match own.iter().find(|(other, _)| is_single || other.file == file.file) {
            Some((other, _)) if other.blake3 == file.blake3 => {}
            Some((other, path)) => {
                let hashes = hashes_in_words(&file.blake3, &other.blake3);
                found.push(format!("{name}: {} ({}): {hashes}", file.file, path.display()));
            }
            None => found.push(format!("{name}: {} is missing here", file.file)),
        }
    }
    for (file, path) in &own {
        if !is_single && !recorded.iter().any(|other| other.file == file.file) {
            found.push(format!("{name}: {} is not in the record", path.display()));
        }
    }
    found
}

/// Says that two hashes of an input differ.
pub(in crate::run) fn hashes_in_words(recorded: &str, own: &str) -> String {
    format!("BLAKE3 {recorded} in the record, {own} here")
}
