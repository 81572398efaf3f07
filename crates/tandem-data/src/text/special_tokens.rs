//! Special tokens (BOS, EOS, padding, …) as the files of a model's folder name them.

use serde_json::Value;

use crate::error::DataError;
use crate::text::folder::TokenizerFolder;
use crate::text::tokenizer_budget::check_tokens;

/// Attribute names in transformers' order.
const NAMES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// JSON files of a model's folder that define tokens; an absent file is null.
pub(crate) struct TokenFiles {
    pub tokenizer_config: Value,
    special_tokens_map: Value,
    config: Value,
    generation_config: Value,
}

impl TokenFiles {
    pub(super) fn read(folder: &TokenizerFolder) -> Result<Self, DataError> {
        let read = |name: &str| -> Result<Value, DataError> {
            let Some(bytes) = folder.read(name)? else { return Ok(Value::Null) };
            serde_json::from_slice(&bytes).map_err(|e| DataError::Tokenizer {
                path: folder.place(name),
                reason: format!("not valid JSON: {e}"),
            })
        };
        Ok(Self {
            tokenizer_config: read("tokenizer_config.json")?,
            special_tokens_map: read("special_tokens_map.json")?,
            config: read("config.json")?,
            generation_config: read("generation_config.json")?,
        })
    }

    /// Checks the types of named tokens, and the lengths of all that these files add.
    pub(super) fn check(&self) -> Result<(), String> {
        for name in NAMES {
            for file in [&self.tokenizer_config, &self.special_tokens_map] {
                let value = &file[name];
                if !value.is_null() && content(value).is_none() {
                    let shown: String = value.to_string().chars().take(60).collect();
                    return Err(format!(
                        "{name} is {shown}, expected a token or an object with its `content`"
                    ));
                }
            }
        }
        let (named, extra) = (self.named(), self.extra());
        let added = self.added().into_iter().filter_map(|(_, token)| token["content"].as_str());
        check_tokens(named.iter().map(|(_, token)| token).chain(&extra).map(String::as_str).chain(added))
    }

    /// Returns named special tokens as `(attribute, token)`; `tokenizer_config.json` overrides
    /// `special_tokens_map.json`.
    pub(super) fn named(&self) -> Vec<(String, String)> {
        NAMES
            .iter()
            .filter_map(|&name| {
                let token = content(&self.tokenizer_config[name])
                    .or_else(|| content(&self.special_tokens_map[name]))?;
                Some((name.to_string(), token))
            })
            .collect()
    }

    /// Returns special tokens without an attribute.
    pub(super) fn extra(&self) -> Vec<String> {
        let mut tokens = Vec::new();
        for list in ["extra_special_tokens", "additional_special_tokens"] {
            for file in [&self.tokenizer_config, &self.special_tokens_map] {
                let values: Vec<_> = match &file[list] {
                    Value::Array(values) => values.iter().collect(),
                    Value::Object(named) => named.values().collect(),
                    _ => continue,
                };
                tokens.extend(values.into_iter().filter_map(content));
            }
        }
        tokens
    }

    /// Returns the tokens of `added_tokens_decoder` as `(id, description)`, by id.
    pub(super) fn added(&self) -> Vec<(u32, &Value)> {
        let mut added: Vec<_> = self.tokenizer_config["added_tokens_decoder"]
            .as_object()
            .into_iter()
            .flatten()
            .filter_map(|(id, token)| Some((id.parse().ok()?, token)))
            .collect();
        added.sort_by_key(|&(id, _)| id);
        added
    }

    /// Returns a flag of `tokenizer_config.json`.
    pub(super) fn flag(&self, name: &str) -> Option<bool> {
        self.tokenizer_config[name].as_bool()
    }

    /// Returns the number of the model's token ids, if `config.json` says it.
    pub(super) fn vocab_size(&self) -> Option<u64> {
        let places = [&self.config, &self.config["text_config"]];
        places.into_iter().find_map(|file| file["vocab_size"].as_u64())
    }

    /// Returns ids under `name` in `generation_config.json`, else in `config.json` or its text model's
    /// part: one number or a list.
    pub(super) fn ids(&self, name: &str) -> Vec<u32> {
        let ids = |file: &Value| -> Vec<u32> {
            match &file[name] {
                Value::Array(list) => list.iter().filter_map(as_id).collect(),
                one => as_id(one).into_iter().collect(),
            }
        };
        // A vision–language model has its text model's configuration inside.
        let places = [&self.generation_config, &self.config, &self.config["text_config"]];
        places.into_iter().map(ids).find(|ids| !ids.is_empty()).unwrap_or_default()
    }
}

fn as_id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

/// Returns the text of a token, which is a string or an object with `content`.
fn content(value: &Value) -> Option<String> {
    value.as_str().or_else(|| value["content"].as_str()).map(str::to_string)
}
