//! Text to token ids and back, as transformers 5 with the files of a model's folder.

use std::ops::Range;
use std::path::{Path, PathBuf};

use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{AddedToken, Encoding, ModelWrapper};

use crate::contained::contained;
use crate::error::DataError;
use crate::source::record::Message;
use crate::text::chat_template::{ChatTemplate, RenderOptions};
use crate::text::folder::TokenizerFolder;
use crate::text::special_tokens::TokenFiles;
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
        let folder = folder.as_ref().to_path_buf();
        let source = TokenizerFolder::open(&folder)?;
        let path = source.place("tokenizer.json");
        let json = source.require("tokenizer.json")?;
        let broken = |reason: String| DataError::Tokenizer { path: path.clone(), reason };
        check_size(&json).map_err(broken)?;
        let inner = contained(|| tokenizers::Tokenizer::from_bytes(&json)).map_err(broken)?;
        let mut inner = inner.map_err(|e| broken(e.to_string()))?;
        check_growth(&inner).map_err(broken)?;
        // Tokenisation truncates and pads elsewhere; transformers disables both in a plain call,
        // too.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| broken(e.to_string()))?;
        remove_dropout(&mut inner);
        let files = TokenFiles::read(&source)?;
        let named = files.named();
        let config = source.place("tokenizer_config.json");
        files.check().map_err(|reason| DataError::Tokenizer { path: config, reason })?;
        contained(|| complete_vocabulary(&mut inner, &files, &named)).map_err(broken)?;
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
        let chat_template = ChatTemplate::from_folder(&folder, &files.tokenizer_config, named.clone())?;

        let mut hasher = blake3::Hasher::new();
        let template = chat_template.as_ref().map(ChatTemplate::sources);
        for part in [json, serde_json::to_vec(&(&named, files.extra(), template)).unwrap_or_default()] {
            hasher.update(&(part.len() as u64).to_le_bytes()).update(&part);
        }
        // The post-processor and the added tokens were just changed: their present state is hashed.
        hasher.update(&serde_json::to_vec(&inner.get_post_processor()).unwrap_or_default());
        hasher.update(&serde_json::to_vec(&inner.get_added_vocabulary()).unwrap_or_default());
        hasher.update(&[u8::from(splits)]);
        let decoder = serde_json::to_string(&inner.get_decoder()).unwrap_or_default();
        let byte_level = decoder.contains("\"ByteLevel\"");
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
fn complete_vocabulary(inner: &mut tokenizers::Tokenizer, files: &TokenFiles, named: &[(String, String)]) {
    let known = inner.get_added_tokens_decoder();
    let is_added = |content: &str| known.values().any(|t| t.content == content);
    let mut missing = Vec::new();
    for (_, description) in files.added() {
        let flag = |name: &str| description[name].as_bool();
        let Some(content) = description["content"].as_str() else { continue };
        if !is_added(content) {
            let special = flag("special").unwrap_or(false);
            missing.push(
                AddedToken::from(content, special)
                    .lstrip(flag("lstrip").unwrap_or(false))
                    .rstrip(flag("rstrip").unwrap_or(false))
                    .single_word(flag("single_word").unwrap_or(false))
                    .normalized(flag("normalized").unwrap_or(!special)),
            );
        }
    }
    for content in named.iter().map(|(_, token)| token).chain(&files.extra()) {
        if !is_added(content) && !missing.iter().any(|t| t.content == *content) {
            missing.push(AddedToken::from(content.as_str(), true));
        }
    }
    inner.add_tokens(&missing);
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
/// `tokenizer.json`.
fn set_post_processor(
    inner: &mut tokenizers::Tokenizer,
    files: &TokenFiles,
    named: &[(String, String)],
) -> Result<(), String> {
    let flags = [files.flag("add_bos_token"), files.flag("add_eos_token")];
    if flags == [None, None] && inner.get_post_processor().is_some() {
        return Ok(());
    }
    let token = |name: &str, wanted: Option<bool>| {
        let found = named.iter().find(|(n, _)| n == name).filter(|_| wanted == Some(true))?;
        Some((found.1.clone(), inner.token_to_id(&found.1)?))
    };
    let (bos, eos) = (token("bos_token", flags[0]), token("eos_token", flags[1]));
    let mut pieces: Vec<String> = Vec::new();
    pieces.extend(bos.iter().map(|(token, _)| token.clone()));
    pieces.push("$A".into());
    pieces.extend(eos.iter().map(|(token, _)| token.clone()));
    let template = TemplateProcessing::builder()
        .try_single(pieces)
        .map_err(|e| e.to_string())?
        .special_tokens(bos.into_iter().chain(eos).collect::<Vec<_>>())
        .build()
        .map_err(|e| e.to_string())?;
    inner.with_post_processor(Some(template));
    Ok(())
}
