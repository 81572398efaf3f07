//! Files of a data set's split, by the rules of Python's `datasets`.
//!
//! A repository's README may list configs and the files of their splits. Without such a list, names
//! decide: `data/<split>-00000-of-00002.parquet`, else a folder, else a file named like the split.
//! `datasets/data_files.py` of version 4 is the source of the keywords and their order.

use glob::{MatchOptions, Pattern};
use yaml_rust2::{Yaml, YamlLoader};

use crate::hub::{Choice, Files};

/// Formats, in the order of preference; one split is read in one format.
const FORMATS: [&[&str]; 4] = [&["parquet"], &["jsonl", "json", "ndjson"], &["arrow"], &["csv", "tsv"]];

/// JSON files that describe a repository.
const NO_DATA: [&str; 5] =
    ["config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"];

const KEYWORDS: [(&str, &[&str]); 3] = [
    ("train", &["train", "training"]),
    ("validation", &["validation", "valid", "dev", "val"]),
    ("test", &["test", "testing", "eval", "evaluation"]),
];

/// A config (subset) of a data set.
struct Config {
    name: String,
    is_default: bool,
    splits: Vec<Split>,
}

/// Name and files.
type Split = (String, Vec<String>);

/// Chooses the files of `rest`: `split`, `config/split`, or a file or pattern of the repository.
pub(crate) fn choose(files: &mut Files<'_>, rest: &str, is_cache: bool) -> Choice {
    let data: Vec<String> = files.names().iter().filter(|name| is_data(name)).cloned().collect();
    if files.has(rest) {
        return Ok(vec![rest.to_owned()]);
    }
    if data.is_empty() {
        let script = files.names().iter().any(|name| name.ends_with(".py"));
        let advice = match script {
            true => {
                "a Python script makes its rows; its Parquet copy may be at @refs/convert/parquet".to_owned()
            }
            false => files.found(),
        };
        return Err(files.missing(format!("it has no Parquet, JSON, Arrow or CSV file; {advice}")));
    }
    if rest.contains(['*', '?', '[']) {
        let found = matching(&data, rest).map_err(|reason| files.missing(reason))?;
        return match found.is_empty() {
            false => whole(files, one_format(found), is_cache),
            true => Err(files.missing(format!("no file of it matches {rest}; {}", files.found()))),
        };
    }
    let readme = if files.has("README.md") { files.read("README.md")? } else { String::new() };
    let configs = configs(&readme, &data).map_err(|reason| files.missing(format!("README.md: {reason}")))?;
    let (config, split) = match rest.rsplit_once('/') {
        Some((config, split)) => (Some(config), split),
        None => (None, rest),
    };
    let splits = match config {
        Some(config) => match configs.iter().find(|other| other.name == config) {
            Some(config) => config.splits.clone(),
            None => folder_splits(&data, config),
        },
        None => default(&configs).map_or(Vec::new(), |config| config.splits.clone()),
    };
    let found = splits.into_iter().find(|(name, _)| name == split).map(|(_, found)| one_format(found));
    match found.filter(|found| !found.is_empty()) {
        Some(found) => whole(files, found, is_cache),
        None => {
            let names: Vec<String> = configs.iter().flat_map(names).collect();
            let like = format!("hf://{}/{}", files.repo(), names.first().map_or("train", String::as_str));
            let wanted = match rest {
                "" => "the name gives no split".to_owned(),
                rest => format!("it has no split {rest}"),
            };
            Err(files.missing(format!("{wanted}; it has {}: name one, as {like}", names.join(", "))))
        }
    }
}

/// Names of a config's splits, as a user writes them.
fn names(config: &Config) -> Vec<String> {
    let name = |split: &Split| match config.is_default {
        true => split.0.clone(),
        false => format!("{}/{}", config.name, split.0),
    };
    config.splits.iter().map(name).collect()
}

fn default(configs: &[Config]) -> Option<&Config> {
    configs.iter().find(|config| config.is_default)
}

/// Refuses a part of a split: a cache may hold some files of several.
fn whole(files: &Files<'_>, found: Vec<String>, is_cache: bool) -> Choice {
    if is_cache {
        for name in &found {
            let Some((start, count, end)) = shard(name) else { continue };
            let is_there = |index: usize| files.has(&format!("{start}-{index:05}-of-{count:05}{end}"));
            if let Some(lacking) = (0..count).find(|index| !is_there(*index)) {
                return Err(files.missing(format!("shard {lacking} of {count} of {start} is missing")));
            }
        }
    }
    Ok(found)
}

/// Parts of `start-00000-of-00002end`: start, count, end.
fn shard(name: &str) -> Option<(&str, usize, &str)> {
    let middle = name.find("-of-")?;
    let digits = |text: Option<&str>| text.is_some_and(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
    let start = middle.checked_sub(6)?;
    let (after, count) = (name.get(start + 1..middle), name.get(middle + 4..middle + 9));
    let is_shard = digits(after) && digits(count) && name.as_bytes()[start] == b'-';
    is_shard.then(|| Some((&name[..start], count?.parse().ok()?, &name[middle + 9..])))?
}

/// Returns the format's place in [`FORMATS`].
fn format(name: &str) -> Option<usize> {
    let lower = name.to_lowercase();
    let name = lower.strip_suffix(".gz").or_else(|| lower.strip_suffix(".zst")).unwrap_or(&lower);
    let (_, ending) = name.rsplit_once('.')?;
    FORMATS.iter().position(|endings| endings.contains(&ending))
}

fn is_data(name: &str) -> bool {
    let base = name.rsplit('/').next().unwrap_or(name);
    let is_hidden = name.split('/').any(|part| part.starts_with('.') || part.starts_with("__"));
    format(name).is_some() && !is_hidden && !NO_DATA.contains(&base)
}

/// Keeps the preferred format.
fn one_format(found: Vec<String>) -> Vec<String> {
    let best = found.iter().filter_map(|name| format(name)).min();
    found.into_iter().filter(|name| format(name) == best).collect()
}

/// The configs that README.md lists; else one, from the files' names.
fn configs(readme: &str, data: &[String]) -> Result<Vec<Config>, String> {
    let mut configs = listed(readme, data)?;
    if configs.is_empty() {
        configs.push(Config { name: "default".to_owned(), is_default: true, splits: splits(data) });
    }
    if default(&configs).is_none() {
        let only = configs.len() == 1;
        let named = configs.iter_mut().find(|config| only || config.name == "default");
        named.into_iter().for_each(|config| config.is_default = true);
    }
    Ok(configs)
}

/// Configs in the YAML at the beginning of README.md.
fn listed(readme: &str, data: &[String]) -> Result<Vec<Config>, String> {
    let text = readme.replace("\r\n", "\n");
    let Some(header) = text.strip_prefix("---\n").and_then(|text| text.split("\n---").next()) else {
        return Ok(Vec::new());
    };
    let documents =
        YamlLoader::load_from_str(header).map_err(|error| format!("its header is not YAML ({error})"))?;
    let Some(list) = documents.first().and_then(|document| document["configs"].as_vec()) else {
        return Ok(Vec::new());
    };
    let mut configs = Vec::new();
    for entry in list {
        let name = entry["config_name"].as_str().unwrap_or("default").to_owned();
        let is_default = entry["default"].as_bool().unwrap_or(false);
        let folder =
            entry["data_dir"].as_str().map(|folder| folder.trim_start_matches("./").trim_matches('/'));
        let splits = match (&entry["data_files"], folder) {
            (Yaml::BadValue | Yaml::Null, None) => splits(data),
            (Yaml::BadValue | Yaml::Null, Some(folder)) => folder_splits(data, folder),
            (list, folder) => data_files(list, folder.unwrap_or_default(), data)?,
        };
        configs.push(Config { name, is_default, splits });
    }
    Ok(configs)
}

/// Splits of a `data_files` value: patterns, or tables of a split and its patterns.
fn data_files(value: &Yaml, folder: &str, data: &[String]) -> Result<Vec<Split>, String> {
    let find = |patterns: &Yaml| {
        let mut found = Vec::new();
        let one = std::slice::from_ref(patterns);
        for pattern in patterns.as_vec().map_or(one, Vec::as_slice) {
            let pattern = pattern.as_str().ok_or("a pattern in data_files is no string")?;
            let pattern = pattern.trim_start_matches("./");
            let pattern = if folder.is_empty() { pattern.to_owned() } else { format!("{folder}/{pattern}") };
            for name in matching(data, &pattern)? {
                if !found.contains(&name) {
                    found.push(name);
                }
            }
        }
        Ok::<_, String>(found)
    };
    match value {
        Yaml::Hash(table) => {
            let split = |(name, patterns): (&Yaml, &Yaml)| {
                Ok((name.as_str().unwrap_or("train").to_owned(), find(patterns)?))
            };
            table.iter().map(split).collect()
        }
        Yaml::Array(entries) if entries.iter().any(|entry| entry.as_hash().is_some()) => {
            let split = |entry: &Yaml| {
                Ok((entry["split"].as_str().unwrap_or("train").to_owned(), find(&entry["path"])?))
            };
            entries.iter().map(split).collect()
        }
        patterns => Ok(vec![("train".to_owned(), find(patterns)?)]),
    }
}

fn matching(data: &[String], pattern: &str) -> Result<Vec<String>, String> {
    let options = MatchOptions { require_literal_separator: true, ..MatchOptions::default() };
    let glob = Pattern::new(pattern).map_err(|error| format!("the pattern {pattern:?}: {error}"))?;
    // `*` matches brackets of the pattern too, so a literal name comes first.
    let matches = |name: &&String| *name == pattern || glob.matches_with(name, options);
    Ok(data.iter().filter(matches).cloned().collect())
}

/// Splits of the files in a folder.
fn folder_splits(data: &[String], folder: &str) -> Vec<Split> {
    let prefix = format!("{folder}/");
    let inner: Vec<String> =
        data.iter().filter_map(|name| Some(name.strip_prefix(&prefix)?.to_owned())).collect();
    let outer = |(split, files): Split| (split, files.iter().map(|name| format!("{prefix}{name}")).collect());
    splits(&inner).into_iter().map(outer).collect()
}

/// Splits by the files' names.
fn splits(data: &[String]) -> Vec<Split> {
    if data.is_empty() {
        return Vec::new();
    }
    let mut sharded: Vec<Split> = Vec::new();
    for name in data {
        let split = shard(name)
            .and_then(|(start, ..)| start.strip_prefix("data/"))
            .filter(|split| !split.contains('/'));
        let Some(split) = split else { continue };
        match sharded.iter_mut().find(|(other, _)| other == split) {
            Some((_, files)) => files.push(name.clone()),
            None => sharded.push((split.to_owned(), vec![name.clone()])),
        }
    }
    if !sharded.is_empty() {
        return sharded;
    }
    let by = |has: &dyn Fn(&str, &str) -> bool| -> Vec<Split> {
        let split = |(name, keywords): &(&str, &[&str])| {
            let found = data.iter().filter(|file| keywords.iter().any(|keyword| has(file, keyword)));
            ((*name).to_owned(), found.cloned().collect())
        };
        KEYWORDS.iter().map(split).filter(|(_, files): &Split| !files.is_empty()).collect()
    };
    let in_folder = |file: &str, keyword: &str| {
        let folders = file.rsplit_once('/').map_or("", |(folders, _)| folders);
        folders.split('/').any(|folder| has_word(folder, keyword))
    };
    let in_name = |file: &str, keyword: &str| {
        let name = file.rsplit('/').next().unwrap_or(file);
        // A file's name goes on after the keyword, at least with its ending.
        name != keyword && has_word(name, keyword)
    };
    for found in [by(&in_folder), by(&in_name)] {
        if !found.is_empty() {
            return found;
        }
    }
    vec![("train".to_owned(), data.to_vec())]
}

/// Returns whether a name has a keyword between separators or ends.
fn has_word(name: &str, keyword: &str) -> bool {
    let is_separator = |byte: u8| matches!(byte, b'-' | b'.' | b'_' | b' ' | b'0'..=b'9');
    let bytes = name.as_bytes();
    name.match_indices(keyword).any(|(at, _)| {
        let end = at + keyword.len();
        (at == 0 || is_separator(bytes[at - 1])) && (end == bytes.len() || is_separator(bytes[end]))
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn of(names: &[&str], readme: &str) -> BTreeMap<String, Vec<String>> {
        let data: Vec<String> =
            names.iter().filter(|name| is_data(name)).map(|name| (*name).to_owned()).collect();
        let configs = configs(readme, &data).expect("configs");
        let named = |config: &Config| {
            names_of(config)
                .into_iter()
                .zip(config.splits.iter().map(|(_, files)| one_format(files.clone())))
                .collect::<Vec<_>>()
        };
        configs.iter().flat_map(named).collect()
    }

    fn names_of(config: &Config) -> Vec<String> {
        super::names(config)
    }

    #[test]
    fn shards_name_their_splits() {
        let found = of(
            &[
                "data/train_sft-00000-of-00002.parquet",
                "data/train_sft-00001-of-00002.parquet",
                "data/test-00000-of-00001-ab12.parquet",
                "README.md",
            ],
            "",
        );
        assert_eq!(found["train_sft"].len(), 2);
        assert_eq!(found["test"], ["data/test-00000-of-00001-ab12.parquet"]);
    }

    #[test]
    fn names_and_folders_name_their_splits() {
        let found = of(&["train.jsonl", "dev_2.jsonl", "my-test.jsonl.gz", "strain.jsonl"], "");
        assert_eq!(found["train"], ["train.jsonl"]);
        assert_eq!(found["validation"], ["dev_2.jsonl"]);
        assert_eq!(found["test"], ["my-test.jsonl.gz"]);
        let found = of(&["a/train/1.csv", "a/valid/2.csv"], "");
        assert_eq!((found["train"].len(), found["validation"].len()), (1, 1));
        assert_eq!(
            of(&["x.parquet", "y.parquet", "dataset_infos.json"], "")["train"],
            ["x.parquet", "y.parquet"]
        );
        assert_eq!(of(&["train.jsonl", "train.parquet"], "")["train"], ["train.parquet"]);
    }

    #[test]
    fn readme_lists_configs() {
        let readme = "---\nlicense: mit\nconfigs:\n- config_name: en\n  default: true\n  data_files:\n  - split: train\n    path: en/train-*\n  - split: dev\n    path: [en/dev.jsonl, extra/**]\n- config_name: de\n  data_dir: de\n---\n# Title\n";
        let found = of(
            &["en/train-1.jsonl", "en/train-2.jsonl", "en/dev.jsonl", "extra/a/b.jsonl", "de/test.csv"],
            readme,
        );
        assert_eq!(found["train"], ["en/train-1.jsonl", "en/train-2.jsonl"]);
        assert_eq!(found["dev"], ["en/dev.jsonl", "extra/a/b.jsonl"]);
        assert_eq!(found["de/test"], ["de/test.csv"]);
    }
}
