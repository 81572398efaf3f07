//! Text to token ids and back, as transformers 5 with the files of a model's folder.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::slice;

use serde_json::Value;
use tokenizers::normalizers::Sequence;
use tokenizers::pre_tokenizers::metaspace::PrependScheme;
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{AddedToken, Encoding, ModelWrapper, NormalizerWrapper, PreTokenizerWrapper};

use crate::contained::contained;
use crate::error::DataError;
use crate::source::record::Message;
use crate::text::byte_alphabet::bytes_of;
use crate::text::chat_template::{ChatTemplate, RenderOptions};
use crate::text::folder::TokenizerFolder;
use crate::text::special_tokens::{TokenFiles, added_token};
use crate::text::tokenizer_budget::{check_growth, check_size};

/// A tokenizer with its special tokens and chat template.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    folder: PathBuf,
    named: Vec<(String, String)>,
    eos: Vec<u32>,
    pad: Option<u32>,
    chat_template: Option<ChatTemplate>,
    byte_level: bool,
    fingerprint: blake3::Hash,
}

impl Tokenizer {
    /// Loads a model's folder: `tokenizer.json`, and where they exist `tokenizer_config.json`,
    /// `special_tokens_map.json`, `generation_config.json`, `config.json` and
    /// `chat_template.jinja`. A GGUF file stands for the folder that it was made from.
    pub fn from_folder(folder: impl AsRef<Path>) -> Result<Self, DataError> {
        Self::read(folder.as_ref(), &TokenizerFolder::open(folder.as_ref(), None)?)
    }

    /// Loads a model's folder with the tokenizer files of an adapter's folder, which come before the
    /// model's: a `tokenizer.json` with all beside it, otherwise each file for itself. The template of
    /// `chat_template.jinja` or `tokenizer_config.json` comes before the model's in either.
    ///
    /// # Errors
    /// As [`from_folder`](Self::from_folder); if the adapter's tokenizer gives a token of the model's
    /// another name, or has ids beyond the model's vocabulary.
    pub fn from_model(folder: &Path, adapter: Option<&Path>) -> Result<Self, DataError> {
        let source = TokenizerFolder::open(folder, adapter)?;
        let tokenizer = Self::read(folder, &source)?;
        if source.changes_tokens()? {
            tokenizer.check_base(folder, &source)?;
        }
        Ok(tokenizer)
    }

    /// Compares the tokens of an adapter's tokenizer with its base's.
    fn check_base(&self, base: &Path, source: &TokenizerFolder) -> Result<(), DataError> {
        let broken = |reason| DataError::Tokenizer { path: source.place("tokenizer.json"), reason };
        let base_source = TokenizerFolder::open(base, None)?;
        let theirs = match base_source.read("tokenizer.json")? {
            Some(_) => Some(Self::read(base, &base_source)?),
            None => None,
        };
        // A GGUF file lists the model's tokens.
        let listed = || theirs.as_ref().map(|theirs| theirs.vocab_size() as u64);
        let limit = TokenFiles::read(&base_source)?.vocab_size().or_else(listed);
        let mut tokens: Vec<(u32, String)> =
            self.inner.get_vocab(true).into_iter().map(|(token, id)| (id, token)).collect();
        tokens.sort_unstable();
        for (id, token) in tokens {
            match theirs.as_ref().and_then(|theirs| theirs.token(id)) {
                Some(base_token) if base_token != token => {
                    return Err(broken(format!(
                        "token {id} is {token:?}, but {base_token:?} in the base model {}; an adapter's tokenizer \
                         must name the base's tokens as the base does: remove the tokenizer's files from the adapter's \
                         folder, or give the base model that it was trained on",
                        base.display()
                    )));
                }
                None if limit.is_some_and(|limit| u64::from(id) >= limit) => {
                    return Err(broken(format!(
                        "token {token:?} has the id {id}, beyond the vocab_size {} of the base model {}; remove the \
                         tokenizer's files from the adapter's folder, or give the base model that it was trained on",
                        limit.unwrap_or_default(),
                        base.display()
                    )));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn read(folder: &Path, source: &TokenizerFolder) -> Result<Self, DataError> {
        let path = source.place("tokenizer.json");
        let json = source.require("tokenizer.json")?;
        let broken = |reason: String| DataError::Tokenizer { path: path.clone(), reason };
        check_size(&json).map_err(broken)?;
        let text = std::str::from_utf8(&json).map_err(|e| broken(e.to_string()))?;
        // Parsed by a function that is compiled in its own crate; a generic one is compiled in this one, with all beneath it.
        let inner = contained(|| text.parse::<tokenizers::Tokenizer>()).map_err(broken)?;
        let mut inner = inner.map_err(|e| broken(e.to_string()))?;
        check_growth(&inner).map_err(broken)?;
        // Tokenisation truncates and pads elsewhere; transformers disables both in a plain call,
        // too.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| broken(e.to_string()))?;
        remove_dropout(&mut inner);
        let files = TokenFiles::read(source)?;
        let named = files.named();
        let config = source.place("tokenizer_config.json");
        files.check().map_err(|reason| DataError::Tokenizer { path: config, reason })?;
        contained(|| complete_vocabulary(&mut inner, &files)).map_err(broken)?;
        let prefix = set_prefix_space(&mut inner, &files);
        set_post_processor(&mut inner, &files, &named).map_err(broken)?;
        let splits = files.flag("split_special_tokens") == Some(true);
        inner.set_encode_special_tokens(splits);

        let id = |name: &str| {
            let (_, token) = named.iter().find(|(n, _)| n == name)?;
            inner.token_to_id(token)
        };
        let mut eos = files.ids("eos_token_id");
        eos.extend(id("eos_token").filter(|id| !eos.contains(id)));
        let pad = id("pad_token").or_else(|| files.ids("pad_token_id").first().copied());
        let chat_template =
            ChatTemplate::from_folder(source.template_folder(), &files.tokenizer_config, named.clone())?;

        let mut hasher = blake3::Hasher::new();
        let template = chat_template.as_ref().map(ChatTemplate::sources);
        // The ends of turns decide which tokens are scored.
        for part in [json, serde_json::to_vec(&(&named, files.extra(), template, &eos)).unwrap_or_default()] {
            hasher.update(&(part.len() as u64).to_le_bytes()).update(&part);
        }
        // The post-processor and the added tokens were just changed: their present state is hashed.
        hasher.update(&serde_json::to_vec(&inner.get_post_processor()).unwrap_or_default());
        hasher.update(&serde_json::to_vec(&inner.get_added_vocabulary()).unwrap_or_default());
        hasher.update(&[u8::from(splits)]);
        // Of a folder without the key, the fingerprint is as before.
        prefix.iter().for_each(|&adds| _ = hasher.update(&[u8::from(adds)]));
        let decoder = serde_json::to_string(&inner.get_decoder()).unwrap_or_default();
        let byte_level = decoder.contains("\"ByteLevel\"");
        let folder = source.overriding("tokenizer.json").unwrap_or(folder).to_owned();
        Ok(Self { inner, folder, named, eos, pad, chat_template, byte_level, fingerprint: hasher.finalize() })
    }

    /// Replaces the folder's chat template.
    pub fn with_chat_template(mut self, source: &str) -> Result<Self, DataError> {
        let sources = vec![("default".to_owned(), source.to_owned())];
        self.chat_template = Some(ChatTemplate::new(sources, self.named.clone())?);
        let mut hasher = blake3::Hasher::new();
        hasher.update(self.fingerprint.as_bytes()).update(source.as_bytes());
        self.fingerprint = hasher.finalize();
        Ok(self)
    }

    /// Encodes plain text, with the special tokens that the tokenizer adds itself.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, DataError> {
        self.encode_with(text, true)
    }

    /// Encodes text of a chat template, which contains its special tokens already.
    pub fn encode_rendered(&self, text: &str) -> Result<Vec<u32>, DataError> {
        self.encode_with(text, false)
    }

    /// Encodes a conversation.
    pub fn encode_chat(&self, messages: &[Message], options: RenderOptions) -> Result<Vec<u32>, DataError> {
        self.encode_rendered(&self.chat_template()?.render(messages, options)?)
    }

    /// Encodes rendered text; also returns the bytes that each token covers.
    pub(crate) fn encode_with_offsets(&self, text: &str) -> Result<(Vec<u32>, Vec<Range<usize>>), DataError> {
        let encoding = self.contained(|| self.inner.encode(text, false))?;
        let offsets = encoding.get_offsets().iter().map(|&(start, end)| start..end).collect();
        Ok((encoding.get_ids().to_vec(), offsets))
    }

    fn encode_with(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, DataError> {
        let encoding: Encoding = self.contained(|| self.inner.encode_fast(text, add_special_tokens))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Decodes ids.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String, DataError> {
        self.contained(|| self.inner.decode(ids, skip_special_tokens))
    }

    /// Returns the text of an id inside of a text. Some decoders leave out the space at the beginning of one.
    pub fn text_inside(&self, id: u32, skip_special_tokens: bool) -> Result<String, DataError> {
        let first = self.decode(&[id], skip_special_tokens)?;
        let twice = self.decode(&[id, id], skip_special_tokens)?;
        Ok(twice.strip_prefix(&first).map(str::to_owned).unwrap_or(first))
    }

    /// Returns the bytes that an id stands for. A token that is a part of a character has its own bytes.
    pub fn bytes(&self, id: u32) -> Result<Vec<u8>, DataError> {
        let text = self.text_inside(id, false)?;
        let own = || {
            let token = self.token(id)?;
            let hex = || token.strip_prefix("<0x")?.strip_suffix('>');
            match self.byte_level {
                true => bytes_of(&token),
                false => u8::from_str_radix(hex()?, 16).ok().map(|byte| vec![byte]),
            }
        };
        let is_part = text.contains('\u{fffd}');
        Ok(is_part.then(own).flatten().unwrap_or_else(|| text.into_bytes()))
    }

    /// Returns the vocabulary entry of an id, as in `tokenizer.json`.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Returns the id of a vocabulary entry.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Returns the number of ids, added tokens included.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// Returns the ids that end generation: those of `generation_config.json` or `config.json`, and
    /// the tokenizer's EOS.
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos
    }

    /// Returns the id of the tokenizer's EOS, which plain-text responses are trained to end in.
    pub fn eos_id(&self) -> Option<u32> {
        self.eos_token().ok().and_then(|token| self.id(token))
    }

    /// Returns the texts of [`eos_ids`](Self::eos_ids).
    pub(crate) fn eos_texts(&self) -> Vec<String> {
        self.eos.iter().filter_map(|&id| self.decode(&[id], false).ok()).filter(|t| !t.is_empty()).collect()
    }

    /// Returns a completion's tokens without a final one of [`eos_ids`](Self::eos_ids).
    pub fn without_end<'t>(&self, tokens: &'t [u32]) -> &'t [u32] {
        match tokens {
            [rest @ .., last] if self.eos.contains(last) => rest,
            whole => whole,
        }
    }

    /// Returns the padding id.
    pub fn pad_id(&self) -> Option<u32> {
        self.pad
    }

    /// Returns the padding id of a reward model, as TRL chooses it: the tokenizer's own padding token, else its EOS.
    /// An id in the model's config does not count.
    pub fn pad_or_eos_id(&self) -> Option<u32> {
        let own = self.named.iter().find(|(name, _)| name == "pad_token");
        own.and_then(|(_, token)| self.id(token)).or_else(|| self.eos_id())
    }

    /// Returns the text of the EOS token, which ends plain-text responses.
    pub fn eos_token(&self) -> Result<&str, DataError> {
        let found = self.named.iter().find(|(name, _)| name == "eos_token");
        found.map(|(_, token)| token.as_str()).ok_or_else(|| DataError::Tokenizer {
            path: self.folder.join("tokenizer_config.json"),
            reason: "no `eos_token`, which must end every plain-text response; add it to the file".into(),
        })
    }

    /// Returns the chat template.
    pub fn chat_template(&self) -> Result<&ChatTemplate, DataError> {
        self.chat_template.as_ref().ok_or_else(|| DataError::NoChatTemplate { folder: self.folder.clone() })
    }

    /// Returns whether vocabulary entries are bytes in GPT-2's printable alphabet.
    pub(crate) fn is_byte_level(&self) -> bool {
        self.byte_level
    }

    /// Returns a hash of everything that determines the ids of a text or a conversation.
    pub fn fingerprint(&self) -> blake3::Hash {
        self.fingerprint
    }

    /// Returns the folder that the tokenizer was loaded from.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the underlying `tokenizers` object.
    pub fn inner(&self) -> &tokenizers::Tokenizer {
        &self.inner
    }

    /// Runs the tokenizer, which panics over some normalisers and decoders of a damaged file.
    fn contained<T>(&self, run: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, DataError> {
        let refused =
            |reason: String| DataError::Tokenizer { path: self.folder.join("tokenizer.json"), reason };
        contained(run).map_err(refused)?.map_err(|e| refused(e.to_string()))
    }
}

/// Adds tokens that only the other files define, in transformers' order.
fn complete_vocabulary(inner: &mut tokenizers::Tokenizer, files: &TokenFiles) {
    let known = inner.get_added_tokens_decoder();
    let listed = files.added().into_iter().filter_map(|(_, token)| {
        let special = token["special"].as_bool().unwrap_or(false);
        token.is_object().then(|| added_token(token, special)).flatten()
    });
    let mut missing: Vec<AddedToken> = Vec::new();
    for token in listed.chain(files.special()) {
        if !known.values().chain(&missing).any(|other| other.content == token.content) {
            missing.push(token);
        }
    }
    inner.add_tokens(&missing);
}

/// Puts a space before a text, or none, as `add_prefix_space` of `tokenizer_config.json` says. Returns that, if it
/// changes anything. transformers reads the key for tokenizers that have a class of their own.
fn set_prefix_space(inner: &mut tokenizers::Tokenizer, files: &TokenFiles) -> Option<bool> {
    let class = files.tokenizer_config["tokenizer_class"].as_str().unwrap_or_default();
    let is_read =
        !matches!(class, "" | "PreTrainedTokenizerFast" | "PreTrainedTokenizer" | "TokenizersBackend");
    let adds = files.flag("add_prefix_space").filter(|_| is_read)?;
    let mut changed = false;
    if let Some(mut whole) = inner.get_pre_tokenizer().cloned() {
        let parts = match &mut whole {
            PreTokenizerWrapper::Sequence(parts) => parts.as_mut(),
            part => slice::from_mut(part),
        };
        for part in parts {
            match part {
                PreTokenizerWrapper::ByteLevel(part) if part.add_prefix_space != adds => {
                    part.add_prefix_space = adds;
                }
                PreTokenizerWrapper::Metaspace(part)
                    if (part.prepend_scheme != PrependScheme::Never) != adds =>
                {
                    part.prepend_scheme = if adds { PrependScheme::First } else { PrependScheme::Never };
                }
                _ => continue,
            }
            changed = true;
        }
        inner.with_pre_tokenizer(Some(whole));
    }
    let steps = match inner.get_normalizer() {
        Some(NormalizerWrapper::Sequence(steps)) => steps.as_ref(),
        whole => whole.map_or(&[][..], slice::from_ref),
    };
    let is_prepend = |step: &NormalizerWrapper| matches!(step, NormalizerWrapper::Prepend(_));
    if !adds && steps.iter().any(is_prepend) {
        let others = steps.iter().filter(|step| !is_prepend(step)).cloned().collect();
        inner.with_normalizer(Some(Sequence::new(others)));
        changed = true;
    }
    changed.then_some(adds)
}

/// Removes the dropout of merges, which would tokenise a text otherwise each time.
fn remove_dropout(inner: &mut tokenizers::Tokenizer) {
    if let ModelWrapper::BPE(model) = inner.get_model()
        && model.dropout.is_some()
    {
        let mut model = model.clone();
        model.dropout = None;
        inner.with_model(model);
    }
}

/// Replaces the post-processor by a template of BOS and EOS if `tokenizer_config.json` has flags
/// for them or `tokenizer.json` has no post-processor, as transformers 4; version 5 reads the flags only without
/// `tokenizer.json`. Without the flag of a side, the tokens of that side stay.
fn set_post_processor(
    inner: &mut tokenizers::Tokenizer,
    files: &TokenFiles,
    named: &[(String, String)],
) -> Result<(), String> {
    let flags = [files.flag("add_bos_token"), files.flag("add_eos_token")];
    if flags == [None, None] && inner.get_post_processor().is_some() {
        return Ok(());
    }
    let old = serde_json::to_value(inner.get_post_processor()).map_err(|e| e.to_string())?;
    let around = |side: usize, name: &str| -> Vec<(String, u32)> {
        let tokens = match flags[side] {
            Some(false) => Vec::new(),
            Some(true) => named.iter().filter(|(n, _)| n == name).map(|(_, token)| token.clone()).collect(),
            None => added_around(&old)[side].clone(),
        };
        let with_id = |token: String| inner.token_to_id(&token).map(|id| (token, id));
        tokens.into_iter().filter_map(with_id).collect()
    };
    let (before, after) = (around(0, "bos_token"), around(1, "eos_token"));
    let mut pieces: Vec<String> = Vec::new();
    pieces.extend(before.iter().map(|(token, _)| token.clone()));
    pieces.push("$A".into());
    pieces.extend(after.iter().map(|(token, _)| token.clone()));
    let template = TemplateProcessing::builder()
        .try_single(pieces)
        .map_err(|e| e.to_string())?
        .special_tokens(before.into_iter().chain(after).collect::<Vec<_>>())
        .build()
        .map_err(|e| e.to_string())?;
    inner.with_post_processor(Some(template));
    Ok(())
}

/// Returns the tokens that a post-processor puts before and after a text.
fn added_around(processor: &Value) -> [Vec<String>; 2] {
    let mut around = [Vec::new(), Vec::new()];
    match processor["type"].as_str() {
        Some("TemplateProcessing") => {
            let mut side = 0;
            for piece in processor["single"].as_array().into_iter().flatten() {
                if piece.get("Sequence").is_some() {
                    side = 1;
                } else if let Some(name) = piece["SpecialToken"]["id"].as_str() {
                    let tokens = processor["special_tokens"][name]["tokens"].as_array();
                    let tokens = tokens.into_iter().flatten().filter_map(Value::as_str);
                    around[side].extend(tokens.map(str::to_owned));
                }
            }
        }
        Some("BertProcessing" | "RobertaProcessing") => {
            let token = |name: &str| processor[name][0].as_str().map(str::to_owned);
            around = ["cls", "sep"].map(|name| token(name).into_iter().collect());
        }
        Some("Sequence") => {
            for inner in processor["processors"].as_array().into_iter().flatten() {
                let [before, after] = added_around(inner);
                around[0].splice(0..0, before);
                around[1].extend(after);
            }
        }
        _ => {}
    }
    around
}
