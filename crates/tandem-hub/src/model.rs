//! Files of a model or an adapter that are needed; the rest of its repository is not downloaded.

use crate::hub::{Choice, Files};

/// Part of a model's repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelFiles {
    /// Config, tokenizer, chat template and weights.
    Whole,
    /// All but the weights.
    WithoutWeights,
    /// A PEFT adapter, with the tokenizer and chat template beside it.
    Adapter,
}

/// Tokenizer and templates, as `transformers` names them.
const TOKENIZER: [&str; 10] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
];

/// Configurations of a model.
const CONFIGS: [&str; 5] = [
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
];

const TEMPLATES: &str = "additional_chat_templates/";
const INDEX: &str = "model.safetensors.index.json";

impl ModelFiles {
    /// Chooses the files. `is_cache`: the listing is the cache's, which may lack files.
    pub(crate) fn choose(self, files: &mut Files<'_>, is_cache: bool) -> Choice {
        if self == Self::Adapter {
            let names = ["adapter_config.json", "adapter_model.safetensors"];
            return match names.iter().find(|name| !files.has(name)) {
                None => {
                    let is_needed = |name: &&String| names.contains(&name.as_str()) || is_tokenizer(name);
                    Ok(files.names().iter().filter(is_needed).cloned().collect())
                }
                Some(name) => {
                    Err(files.missing(format!("it has no {name}, so it is no adapter; {}", files.found())))
                }
            };
        }
        if !files.has("config.json") {
            return Err(files.missing(format!("it has no config.json, so it is no model; {}", files.found())));
        }
        let is_small = |name: &&String| CONFIGS.contains(&name.as_str()) || is_tokenizer(name);
        let mut chosen: Vec<String> = files.names().iter().filter(is_small).cloned().collect();
        if is_cache && self == Self::Whole && !files.has("tokenizer.json") {
            return Err(files.missing("tokenizer.json is missing".to_owned()));
        }
        if self == Self::Whole {
            chosen.extend(weights(files)?);
        }
        Ok(chosen)
    }
}

/// Returns whether the file is one of the tokenizer or a chat template.
fn is_tokenizer(name: &str) -> bool {
    TOKENIZER.contains(&name) || (name.starts_with(TEMPLATES) && name.ends_with(".jinja"))
}

fn weights(files: &mut Files<'_>) -> Choice {
    let whole = |name: &str| Ok(vec![name.to_owned()]);
    if files.has("model.safetensors") {
        return whole("model.safetensors");
    }
    if !files.has(INDEX) {
        if files.has("pytorch_model.bin") {
            return whole("pytorch_model.bin");
        }
        let gguf = files.names().iter().find(|name| name.ends_with(".gguf")).cloned();
        let advice = match gguf {
            Some(name) => format!("for a GGUF name the file, as hf://{}/{name}", files.repo()),
            None => files.found(),
        };
        return Err(files.missing(format!(
            "it has no weights of a known name (model.safetensors, {INDEX}, pytorch_model.bin); {advice}"
        )));
    }
    let index: serde_json::Value = serde_json::from_str(&files.read(INDEX)?)
        .map_err(|error| files.missing(format!("{INDEX} is not JSON ({error})")))?;
    let map = index.get("weight_map").and_then(serde_json::Value::as_object);
    let shards = map
        .map(|map| map.values().map(|shard| shard.as_str().map(str::to_owned)).collect::<Option<Vec<_>>>());
    let Some(Some(mut shards)) = shards else {
        return Err(files.missing(format!("{INDEX} has no weight_map of names")));
    };
    shards.sort();
    shards.dedup();
    match shards.iter().find(|shard| !files.has(shard)) {
        Some(shard) => Err(files.missing(format!("{INDEX} names {shard:?}, which is missing"))),
        None => {
            shards.push(INDEX.to_owned());
            Ok(shards)
        }
    }
}
