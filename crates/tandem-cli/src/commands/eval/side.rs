//! One side of a comparison: a model, or given completions.

use std::path::Path;

use serde_json::Value;
use tandem_data::prompts::PromptRow;
use tandem_data::tokenizer::Tokenizer;

use crate::args::{ComputeArguments, WeightArguments};
use crate::exit::mistake;
use crate::generation::answers::Watch;
use crate::generation::loaded::{positions_of, tokenizer_of};
use crate::generation::{CompletionText, Wanted, answers};

pub(crate) enum Side {
    /// A model, its tokenizer and the tokenised prompts.
    Model { weights: WeightArguments, tokenizer: Box<Tokenizer>, prompts: Vec<Vec<u32>> },
    /// Given completions.
    Given(Vec<CompletionText>),
}

impl Side {
    /// Opens a model; loads only its tokenizer.
    ///
    /// # Errors
    /// A prompt is empty, or leaves no room in the model's context.
    pub(crate) fn model(weights: WeightArguments, rows: &[PromptRow]) -> anyhow::Result<Self> {
        let positions = positions_of(&weights.model, usize::MAX).map_err(tandem_train::TrainError::from)?;
        let tokenizer = tokenizer_of(&weights)?;
        let folder = weights.model.display();
        let mut prompts = Vec::with_capacity(rows.len());
        for row in rows {
            let tokens = row.tokens(&tokenizer).map_err(|error| at(row, &error))?;
            if tokens.is_empty() {
                return Err(at(row, &"`prompt` is empty; give a text, or leave the row out"));
            }
            if tokens.len() >= positions {
                return Err(mistake(format!(
                    "{}: the prompt has {} tokens, which leaves no room in the {positions} positions of {folder}: shorten it",
                    row.place,
                    tokens.len()
                )));
            }
            prompts.push(tokens);
        }
        Ok(Self::Model { weights, tokenizer: Box::new(tokenizer), prompts })
    }

    /// Reads completions from a column of the rows: a string or one message. The tokenizer of
    /// `folder` counts their tokens.
    pub(crate) fn column(name: &str, rows: &[PromptRow], folder: &Path) -> anyhow::Result<Self> {
        let tokenizer = Tokenizer::from_folder(folder).map_err(tandem_train::TrainError::from)?;
        let answer = |row: &PromptRow| {
            let value = row.row().get(name);
            let text = value.and_then(text_of).ok_or_else(|| {
                let found = value.map_or("is missing", |_| "is something else");
                at(row, &format!("`{name}` should be a text or a list of one message, but {found}"))
            })?;
            let tokens = tokenizer.encode_rendered(text).map_err(|error| at(row, &error))?.len();
            Ok(CompletionText { text: text.to_owned(), tokens, is_ended: true })
        };
        rows.iter().map(answer).collect::<anyhow::Result<_>>().map(Self::Given)
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Model { prompts, .. } => prompts.len(),
            Self::Given(answers) => answers.len(),
        }
    }

    /// Returns the completions; `None` if stopped.
    pub(crate) fn answers(
        self,
        wanted: &Wanted<'_>,
        compute: &ComputeArguments,
        watch: &mut dyn Watch,
    ) -> tandem_train::Result<Option<Vec<CompletionText>>> {
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
