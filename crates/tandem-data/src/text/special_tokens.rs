//! Special tokens (BOS, EOS, padding, …) as the files of a model's folder name them.

use std::collections::HashSet;

use serde_json::Value;
use tokenizers::AddedToken;

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
    /// `special_tokens_map.json`. A model may name further ones: by a key that ends in `_token`, or in
    /// `extra_special_tokens`.
    pub(super) fn named(&self) -> Vec<(String, String)> {
        let named = self.definitions().into_iter();
        named.filter_map(|(name, token)| Some((name?.to_owned(), content(token)?))).collect()
    }

    /// Returns special tokens without an attribute.
    pub(super) fn extra(&self) -> Vec<String> {
        let unnamed = self.definitions().into_iter().filter(|(name, _)| name.is_none());
        unnamed.filter_map(|(_, token)| content(token)).collect()
    }

    /// Returns the special tokens of all attributes and lists.
    pub(super) fn special(&self) -> Vec<AddedToken> {
        self.definitions().into_iter().filter_map(|(_, token)| added_token(token, true)).collect()
    }

    /// Returns definitions of special tokens with their attributes: each attribute once, then tokens without one.
    fn definitions(&self) -> Vec<(Option<&str>, &Value)> {
        let files = [&self.tokenizer_config, &self.special_tokens_map];
        let mut all: Vec<(Option<&str>, &Value)> = Vec::new();
        for name in NAMES {
            all.extend(files.iter().map(|file| (Some(name), &file[name])));
        }
        let keys = self.tokenizer_config.as_object().into_iter().flatten();
        all.extend(
            keys.filter(|(key, _)| key.ends_with("_token")).map(|(key, token)| (Some(key.as_str()), token)),
        );
        let lists = ["extra_special_tokens", "additional_special_tokens"];
        let lists: Vec<&Value> = lists.iter().flat_map(|list| files.map(|file| &file[list])).collect();
        for named in lists.iter().filter_map(|list| list.as_object()) {
            all.extend(named.iter().map(|(name, token)| (Some(name.as_str()), token)));
        }
        for unnamed in lists.iter().filter_map(|list| list.as_array()) {
            all.extend(unnamed.iter().map(|token| (None, token)));
        }
        let mut seen = HashSet::new();
        all.retain(|(name, token)| content(token).is_some() && name.is_none_or(|name| seen.insert(name)));
        all
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

/// Returns a token with the flags of its object; those that the object lacks are as in `tokenizers`.
pub(super) fn added_token(token: &Value, special: bool) -> Option<AddedToken> {
    let flag = |name: &str| token[name].as_bool();
    let added = AddedToken::from(content(token)?, special)
        .lstrip(flag("lstrip").unwrap_or(false))
        .rstrip(flag("rstrip").unwrap_or(false))
        .single_word(flag("single_word").unwrap_or(false))
        .normalized(flag("normalized").unwrap_or(!special));
    Some(added)
}

/// Returns the text of a token, which is a string or an object with `content`.
fn content(value: &Value) -> Option<String> {
    value.as_str().or_else(|| value["content"].as_str()).map(str::to_string)
}
