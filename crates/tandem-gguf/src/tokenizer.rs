//! `tokenizer.json` and `tokenizer_config.json` from metadata.

use std::collections::HashMap;

use serde_json::{Map, Value as Json, json};

use crate::pre_tokenizer::{KNOWN, PreTokenizer, named};
use crate::{Gguf, Result};

/// Types of tokens in `tokenizer.ggml.token_type`.
const UNKNOWN: i64 = 2;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;
const UNUSED: i64 = 5;

/// Ids of special tokens in the metadata, with their keys in `config.json`.
const IDS: [(&str, &str); 3] = [
    ("bos_token_id", "bos_token_id"),
    ("eos_token_id", "eos_token_id"),
    ("padding_token_id", "pad_token_id"),
];

/// Parts of a `tokenizer.json` in which kinds of BPE differ.
struct Scheme<'a> {
    normalizer: Json,
    pre_tokenizer: Json,
    post_processor: Json,
    decoder: Json,
    /// Token for what is not in the vocabulary.
    unknown: Option<&'a str>,
    /// Whether a word of the vocabulary is one token, whatever the merges.
    ignore_merges: bool,
    merges: Vec<Json>,
}

impl Gguf {
    /// Returns the ids of special tokens, under their keys in `config.json`.
    pub(crate) fn token_ids(&self) -> Result<Vec<(&'static str, u64)>> {
        let mut ids = Vec::new();
        for (theirs, ours) in IDS {
            ids.extend(self.token_id(theirs)?.map(|id| (ours, id)));
        }
        Ok(ids)
    }

    fn token_id(&self, key: &str) -> Result<Option<u64>> {
        let key = format!("tokenizer.ggml.{key}");
        let Some(id) = self.int(&key)? else { return Ok(None) };
        let count = self.texts("tokenizer.ggml.tokens")?.map_or(0, <[String]>::len);
        // llama.cpp takes the largest 32-bit number for none.
        if id == u64::from(u32::MAX) {
            return Ok(None);
        }
        if id >= count as u64 {
            return Err(self.error(format!("{key} is {id}, but tokenizer.ggml.tokens has {count}")));
        }
        Ok(Some(id))
    }

    /// Returns the ids that end a turn or a message, EOS first.
    pub(crate) fn end_ids(&self) -> Result<Vec<u64>> {
        let mut ids = Vec::new();
        for key in ["eos_token_id", "eot_token_id", "eom_token_id"] {
            ids.extend(self.token_id(key)?.filter(|id| !ids.contains(id)));
        }
        Ok(ids)
    }

    fn tokens(&self) -> Result<&[String]> {
        let tokens = self.texts("tokenizer.ggml.tokens")?;
        tokens.ok_or_else(|| self.error("tokenizer.ggml.tokens is missing: the file has no tokenizer"))
    }

    /// Returns a `tokenizer.json`.
    ///
    /// # Errors
    /// If the tokenizer is of a kind that is not supported, or contradicts itself.
    pub(crate) fn tokenizer(&self) -> Result<Json> {
        let pieces = self.text("tokenizer.ggml.model")? == Some(SENTENCEPIECE);
        let pre = if pieces { None } else { Some(self.pre_tokenizer()?) };
        let tokens = self.tokens()?;
        let types = self.ints("tokenizer.ggml.token_type")?.unwrap_or_default();
        if !types.is_empty() {
            self.check_one_per_token("tokenizer.ggml.token_type", types.len())?;
        }
        let mut ids: HashMap<&str, usize> = HashMap::with_capacity(tokens.len());
        let (mut vocab, mut added) = (Map::new(), Vec::new());
        for (id, token) in tokens.iter().enumerate() {
            let kind = types.get(id).copied().unwrap_or(1);
            if kind == UNUSED {
                continue;
            }
            if let Some(other) = ids.insert(token, id) {
                return Err(
                    self.error(format!("tokenizer.ggml.tokens holds {token:?} as {other} and as {id}"))
                );
            }
            vocab.insert(token.clone(), id.into());
            let is_unknown = pieces && kind == UNKNOWN;
            if is_unknown || matches!(kind, CONTROL | USER_DEFINED) {
                added.push(json!({
                    "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": kind != USER_DEFINED,
                }));
            }
        }
        let scheme = match pre {
            Some(pre) => self.byte_level(pre, &ids)?,
            None => self.sentencepiece(&ids)?,
        };
        Ok(json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": added,
            "normalizer": scheme.normalizer,
            "pre_tokenizer": scheme.pre_tokenizer,
            "post_processor": scheme.post_processor,
            "decoder": scheme.decoder,
            "model": {
                "type": "BPE",
                "dropout": null,
                "unk_token": scheme.unknown,
                "continuing_subword_prefix": null,
                "end_of_word_suffix": null,
                "fuse_unk": pieces,
                "byte_fallback": pieces,
                "ignore_merges": scheme.ignore_merges,
                "vocab": vocab,
                "merges": scheme.merges,
            },
        }))
    }

    /// Returns byte-level BPE, whose merges the file lists.
    fn byte_level(&self, pre: PreTokenizer, ids: &HashMap<&str, usize>) -> Result<Scheme<'_>> {
        let processor =
            json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": true});
        Ok(Scheme {
            normalizer: pre.normalizer,
            pre_tokenizer: pre.pre_tokenizer,
            post_processor: self.post_processor(pre.adds_bos, Some(processor))?,
            decoder: json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}),
            unknown: None,
            ignore_merges: pre.ignore_merges,
            merges: self.merges(ids)?,
        })
    }

    /// Returns a SentencePiece model as transformers converts it: BPE whose merges follow from the
    /// pieces' scores, with bytes for what is no piece.
    fn sentencepiece(&self, ids: &HashMap<&str, usize>) -> Result<Scheme<'_>> {
        let tokens = self.tokens()?;
        let scores = self.floats("tokenizer.ggml.scores")?.unwrap_or_default();
        self.check_one_per_token("tokenizer.ggml.scores", scores.len())?;
        let architecture = self.text("general.architecture")?.unwrap_or_default();
        let prefix = self.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
        let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE});
        // Of Phi 3 each text between special tokens begins with a space, of others the first one.
        let (normalizer, pre_tokenizer) = match prefix {
            false => (replace, Json::Null),
            true if architecture == "phi3" => {
                let prepend = json!({"type": "Prepend", "prepend": SPACE});
                (json!({"type": "Sequence", "normalizers": [prepend, replace]}), Json::Null)
            }
            true => {
                let first = json!({"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": false});
                (Json::Null, first)
            }
        };
        let mut decoders = vec![
            json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        if prefix {
            decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        let unknown = self.token_id("unknown_token_id")?.map(|id| tokens[id as usize].as_str());
        Ok(Scheme {
            normalizer,
            pre_tokenizer,
            post_processor: self.post_processor(true, None)?,
            decoder: json!({"type": "Sequence", "decoders": decoders}),
            unknown,
            ignore_merges: false,
            merges: merges_of_scores(tokens, ids, scores),
        })
    }

    fn check_one_per_token(&self, key: &str, found: usize) -> Result<()> {
        match self.tokens()?.len() {
            tokens if tokens == found => Ok(()),
            tokens => Err(self.error(format!("{key} has {found} elements, tokenizer.ggml.tokens {tokens}"))),
        }
    }

    fn pre_tokenizer(&self) -> Result<PreTokenizer> {
        match self.text("tokenizer.ggml.model")? {
            Some("gpt2") => {}
            Some(other) => {
                return Err(self.error(format!(
                    "tokenizer.ggml.model is \"{other}\", which is not supported; known: gpt2 (byte-level BPE), llama (SentencePiece). \
                     Use the model's HF folder"
                )));
            }
            None => return Err(self.error("tokenizer.ggml.model is missing: the file has no tokenizer")),
        }
        let pre = self.text("tokenizer.ggml.pre")?.ok_or_else(|| {
            self.error(
                "tokenizer.ggml.pre is missing, which says how texts are divided before byte-level BPE: the file was written before \
                 April 2024; take a newer one, or the model's HF folder",
            )
        })?;
        named(pre).ok_or_else(|| {
            self.error(format!(
                "tokenizer.ggml.pre is \"{pre}\", which is not supported; known: {}. Use the model's HF folder",
                KNOWN.join(", ")
            ))
        })
    }

    fn merges(&self, ids: &HashMap<&str, usize>) -> Result<Vec<Json>> {
        let merges = self.texts("tokenizer.ggml.merges")?;
        let merges = merges.ok_or_else(|| self.error("tokenizer.ggml.merges is missing"))?;
        let pair = |(index, merge): (usize, &String)| {
            // A first part is never empty, but may be a space itself.
            let first = merge.chars().next().map_or(0, char::len_utf8);
            let parts =
                merge[first..].split_once(' ').map(|(head, right)| (&merge[..first + head.len()], right));
            let known = parts.filter(|(left, right)| {
                let joined = format!("{left}{right}");
                [*left, *right, joined.as_str()].iter().all(|token| ids.contains_key(token))
            });
            known.map(|(left, right)| json!([left, right])).ok_or_else(|| {
                self.error(format!(
                    "tokenizer.ggml.merges[{index}] is {merge:?}, not two tokens that make a third"
                ))
            })
        };
        merges.iter().enumerate().map(pair).collect()
    }

    /// Returns the post-processor, which adds BOS and EOS after `first`.
    fn post_processor(&self, adds_bos: bool, first: Option<Json>) -> Result<Json> {
        let tokens = self.tokens()?;
        let token = |flag: &str, default: bool, key: &str| -> Result<Option<(String, u64)>> {
            let flag = format!("tokenizer.ggml.{flag}");
            if !self.flag(&flag)?.unwrap_or(default) {
                return Ok(None);
            }
            let id = self.token_id(key)?;
            let id =
                id.ok_or_else(|| self.error(format!("{flag} is true, but tokenizer.ggml.{key} is missing")))?;
            Ok(Some((tokens[id as usize].clone(), id)))
        };
        let adds_bos = adds_bos && self.token_id("bos_token_id")?.is_some();
        let bos = token("add_bos_token", adds_bos, "bos_token_id")?;
        let eos = token("add_eos_token", false, "eos_token_id")?;
        if bos.is_none() && eos.is_none() {
            return Ok(first.unwrap_or(Json::Null));
        }
        let piece = |(token, _): &(String, u64), type_id: u32| json!({"SpecialToken": {"id": token, "type_id": type_id}});
        let text = |id: &str, type_id: u32| json!({"Sequence": {"id": id, "type_id": type_id}});
        let around = |id: &str, type_id: u32| {
            let before = bos.iter().map(|token| piece(token, type_id));
            let after = eos.iter().map(|token| piece(token, type_id));
            before.chain([text(id, type_id)]).chain(after).collect::<Vec<_>>()
        };
        let special = bos
            .iter()
            .chain(&eos)
            .map(|(token, id)| (token.clone(), json!({"id": token, "ids": [id], "tokens": [token]})));
        let pair = [around("A", 0), around("B", 1)].concat();
        let template = json!({
            "type": "TemplateProcessing",
            "single": around("A", 0),
            "pair": pair,
            "special_tokens": special.collect::<Map<_, _>>(),
        });
        Ok(match first {
            None => template,
            Some(first) => json!({"type": "Sequence", "processors": [first, template]}),
        })
    }

    /// Returns a `tokenizer_config.json`: names of special tokens, and chat templates.
    pub(crate) fn tokenizer_config(&self) -> Result<Json> {
        let tokens = self.tokens()?;
        let mut config = Map::new();
        for (name, key) in [
            ("bos_token", "bos_token_id"),
            ("eos_token", "eos_token_id"),
            ("unk_token", "unknown_token_id"),
            ("pad_token", "padding_token_id"),
        ] {
            if let Some(id) = self.token_id(key)? {
                config.insert(name.into(), tokens[id as usize].as_str().into());
            }
        }
        config.insert("clean_up_tokenization_spaces".into(), false.into());
        let name = self.text("general.architecture")?.unwrap_or_default();
        if let Some(positions) = self.int(&format!("{name}.context_length"))? {
            config.insert("model_max_length".into(), positions.into());
        }
        config.insert("tokenizer_class".into(), "PreTrainedTokenizerFast".into());
        let mut templates = Vec::new();
        for key in self.keys().filter(|key| {
            key.strip_prefix(TEMPLATE).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        }) {
            let name = key.trim_start_matches(TEMPLATE).trim_start_matches('.');
            templates.push((if name.is_empty() { "default" } else { name }, self.text(key)?));
        }
        templates.sort_unstable();
        let template = match templates.as_slice() {
            [] => return Ok(Json::Object(config)),
            [("default", template)] => json!(template),
            several => several.iter().map(|(name, text)| json!({"name": name, "template": text})).collect(),
        };
        config.insert("chat_template".into(), template);
        Ok(Json::Object(config))
    }
}

/// `tokenizer.ggml.model` of SentencePiece models.
const SENTENCEPIECE: &str = "llama";

/// Character for a space in SentencePiece's pieces.
const SPACE: &str = "\u{2581}";

/// Lists the two pieces that make a third, for every way of cutting it: the best piece first, and of
/// its cuts that with the best parts.
fn merges_of_scores(tokens: &[String], ids: &HashMap<&str, usize>, scores: &[f32]) -> Vec<Json> {
    let mut merges = Vec::new();
    for (id, piece) in tokens.iter().enumerate().filter(|(id, piece)| ids.get(piece.as_str()) == Some(id)) {
        let cut = |at: usize| Some((*ids.get(&piece[..at])?, *ids.get(&piece[at..])?));
        let mut cuts: Vec<_> = piece.char_indices().skip(1).filter_map(|(at, _)| cut(at)).collect();
        cuts.sort_by(|a, b| scores[b.0].total_cmp(&scores[a.0]).then(scores[b.1].total_cmp(&scores[a.1])));
        merges.extend(cuts.into_iter().map(|(left, right)| (scores[id], left, right)));
    }
    merges.sort_by(|a, b| b.0.total_cmp(&a.0));
    merges.into_iter().map(|(_, left, right)| json!([tokens[left], tokens[right]])).collect()
}

/// Key of the chat template; the keys of further templates add a dot and a name.
const TEMPLATE: &str = "tokenizer.chat_template";
