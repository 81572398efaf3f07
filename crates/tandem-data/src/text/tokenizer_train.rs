//! Training of a small byte-level BPE tokenizer, written as the files of a model's folder.

use std::path::Path;

use serde_json::json;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, NormalizerWrapper, TokenizerBuilder};

use crate::error::DataError;

/// Properties of the tokenizer.
#[derive(Clone, Debug)]
pub struct TokenizerRecipe {
    /// Number of ids, including special tokens and the 256 bytes; fewer if the texts have no more
    /// merges.
    pub vocab_size: usize,
    /// Padding token, id 0.
    pub pad_token: String,
    /// Beginning-of-sequence token, id 1. It is not added to plain text.
    pub bos_token: String,
    /// End-of-sequence token, id 2.
    pub eos_token: String,
    /// Further special tokens, such as the role markers of the chat template.
    pub extra_tokens: Vec<String>,
    /// Chat template, written as `chat_template.jinja`.
    pub chat_template: Option<String>,
}

impl Default for TokenizerRecipe {
    fn default() -> Self {
        Self {
            vocab_size: 1024,
            pad_token: "<pad>".into(),
            bos_token: "<s>".into(),
            eos_token: "</s>".into(),
            extra_tokens: Vec::new(),
            chat_template: None,
        }
    }
}

impl TokenizerRecipe {
    /// Learns merges from `texts` and writes `tokenizer.json`, `tokenizer_config.json` and, if set,
    /// `chat_template.jinja` into `folder`. The same texts give the same files.
    pub fn train<S: AsRef<str> + Send>(
        &self,
        texts: impl Iterator<Item = S> + Send,
        folder: &Path,
    ) -> Result<(), DataError> {
        let special: Vec<_> = [&self.pad_token, &self.bos_token, &self.eos_token]
            .into_iter()
            .chain(&self.extra_tokens)
            .map(|token| AddedToken::from(token.as_str(), true))
            .collect();
        let least = 256 + special.len();
        if self.vocab_size < least {
            return Err(DataError::Option(format!(
                "a vocabulary of {} ids cannot hold 256 bytes and {} special tokens: expected at least {least}",
                self.vocab_size,
                special.len()
            )));
        }
        let path = folder.join("tokenizer.json");
        let failed =
            |e: tokenizers::Error| DataError::Tokenizer { path: path.clone(), reason: e.to_string() };
        let mut trainer = BpeTrainer::builder()
            .vocab_size(self.vocab_size)
            .min_frequency(2)
            .show_progress(false)
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .special_tokens(special)
            .build();
        let byte_level = ByteLevel::default().add_prefix_space(false);
        let mut tokenizer = TokenizerBuilder::new()
            .with_model(BPE::default())
            .with_normalizer(None::<NormalizerWrapper>)
            .with_pre_tokenizer(Some(byte_level))
            .with_post_processor(Some(byte_level.trim_offsets(false)))
            .with_decoder(Some(byte_level))
            .build()
            .map_err(failed)?;
        tokenizer.train(&mut trainer, texts).map_err(failed)?;

        std::fs::create_dir_all(folder).map_err(DataError::io("creating", folder))?;
        let write = |name: &str, text: String| {
            let path = folder.join(name);
            std::fs::write(&path, text).map_err(DataError::io("writing", &path))
        };
        write("tokenizer.json", tokenizer.to_string(true).map_err(failed)?)?;
        let config = json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "pad_token": self.pad_token,
            "additional_special_tokens": self.extra_tokens,
            "clean_up_tokenization_spaces": false,
        });
        write("tokenizer_config.json", format!("{config:#}\n"))?;
        match &self.chat_template {
            Some(template) => write("chat_template.jinja", template.clone()),
            None => Ok(()),
        }
    }
}
