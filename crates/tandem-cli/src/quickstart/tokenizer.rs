//! Tokenizer and chat template of the quickstart's model, as `transformers` files.

use std::path::Path;

use tandem_data::tokenizer_train::TokenizerRecipe;

/// Vocabulary size: 256 bytes, special tokens, and a merge or two per word.
pub(crate) const VOCABULARY: usize = 512;

const TEMPLATE: &str = "\
{%- for message in messages -%}
{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}";

/// Trains a byte-level BPE on `texts` and writes it with the template into `folder`.
pub(crate) fn train(texts: impl Iterator<Item = String> + Send, folder: &Path) -> anyhow::Result<()> {
    let recipe = TokenizerRecipe {
        vocab_size: VOCABULARY,
        eos_token: "<|end|>".into(),
        extra_tokens: vec!["<|user|>".into(), "<|assistant|>".into()],
        chat_template: Some(TEMPLATE.into()),
        ..TokenizerRecipe::default()
    };
    Ok(recipe.train(texts, folder)?)
}
