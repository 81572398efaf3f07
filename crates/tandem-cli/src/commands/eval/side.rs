//! One of the two that are compared: a model that answers, or answers that are there.

use std::path::Path;

use serde_json::Value;
use tandem_data::prompts::PromptRow;
use tandem_data::tokenizer::Tokenizer;
use tandem_model::decode::Flow;

use crate::args::{ComputeArguments, WeightArguments};
use crate::exit::mistake;
use crate::generation::loaded::positions_of;
use crate::generation::{Answered, Wanted, answers};

/// What answers, looked at before anything is computed.
pub enum Side {
    /// A model, with its tokenizer and the prompts in its tokens.
    Model { weights: WeightArguments, tokenizer: Box<Tokenizer>, prompts: Vec<Vec<u32>> },
    /// Answers.
    Given(Vec<Answered>),
}

impl Side {
    /// A model. Only its tokenizer is loaded yet.
    ///
    /// # Errors
    /// If there is no such model, or a prompt does not fit it.
    pub fn model(
        weights: WeightArguments,
        rows: &[PromptRow],
        max_new_tokens: usize,
    ) -> anyhow::Result<Self> {
        let positions = positions_of(&weights.model, usize::MAX).map_err(tandem_train::TrainError::from)?;
        let tokenizer = Tokenizer::from_folder(&weights.model).map_err(tandem_train::TrainError::from)?;
        let folder = weights.model.display();
        let mut prompts = Vec::with_capacity(rows.len());
        for row in rows {
            let tokens = row.tokens(&tokenizer).map_err(|error| at(row, &error))?;
            if tokens.is_empty() {
                return Err(at(row, &"`prompt` is empty; give a text, or leave the row out"));
            }
            if tokens.len() + max_new_tokens > positions {
                let (length, place) = (tokens.len(), &row.place);
                return Err(mistake(format!(
                    "{place}: the prompt has {length} tokens; with {max_new_tokens} of an answer (--max-new-tokens) that is more \
                     than the {positions} positions of {folder}"
                )));
            }
            prompts.push(tokens);
        }
        Ok(Self::Model { weights, tokenizer: Box::new(tokenizer), prompts })
    }

    /// Answers that stand in a column of the rows: a text, or one message. Their tokens are counted with the tokenizer of `folder`.
    ///
    /// # Errors
    /// If a row has none.
    pub fn column(name: &str, rows: &[PromptRow], folder: &Path) -> anyhow::Result<Self> {
        let tokenizer = Tokenizer::from_folder(folder).map_err(tandem_train::TrainError::from)?;
        let answer = |row: &PromptRow| {
            let value = row.row().get(name);
            let text = value.and_then(text_of).ok_or_else(|| {
                let found = value.map_or("is not there", |_| "is something else");
                at(row, &format!("`{name}` should be a text or a list of one message, and {found}"))
            })?;
            let tokens = tokenizer.encode_rendered(text).map_err(|error| at(row, &error))?.len();
            Ok(Answered { text: text.to_owned(), tokens, is_ended: true })
        };
        rows.iter().map(answer).collect::<anyhow::Result<_>>().map(Self::Given)
    }

    /// How many prompts it answers.
    pub fn len(&self) -> usize {
        match self {
            Self::Model { prompts, .. } => prompts.len(),
            Self::Given(answers) => answers.len(),
        }
    }

    /// The answers; `None` if it was told to stop.
    ///
    /// # Errors
    /// If the model cannot be loaded, or memory does not suffice.
    pub fn answers(
        self,
        wanted: &Wanted<'_>,
        compute: &ComputeArguments,
        watch: &mut dyn FnMut(usize) -> Flow,
    ) -> tandem_train::Result<Option<Vec<Answered>>> {
        match self {
            Self::Given(answers) => Ok(Some(answers)),
            Self::Model { weights, tokenizer, prompts } => {
                answers::all(&weights, *tokenizer, prompts, wanted, compute, watch)
            }
        }
    }
}

fn text_of(value: &Value) -> Option<&str> {
    match value {
        Value::String(text) => Some(text),
        Value::Array(messages) => match &messages[..] {
            [message] => message["content"].as_str(),
            _ => None,
        },
        _ => None,
    }
}

fn at(row: &PromptRow, problem: &dyn std::fmt::Display) -> anyhow::Error {
    mistake(format!("{}: {problem}", row.place))
}
