//! `samples.jsonl`: what was answered, and what the judges said of it; a line a prompt.

use serde_json::{Map, Value, json};
use tandem_data::token_cache::TokenCache;
use tandem_data::tokenizer::Tokenizer;

use super::answers::{Answer, Answered, Batch};
use super::judging::{row, without_end};
use super::pairs::Paired;
use crate::Result;

/// The lines of a batch that the 1-based `step` trains on.
///
/// # Errors
/// If a token is unknown.
pub fn lines(
    step: u64,
    batch: &Batch,
    paired: &[Paired],
    names: &[String],
    cache: &TokenCache,
    tokenizer: &Tokenizer,
) -> Result<Vec<Value>> {
    let line = |(answered, paired): (&Answered, &Paired)| -> Result<Value> {
        let answers = answered.answers.iter().map(|answer| shown(answer, names, tokenizer));
        Ok(json!({
            "step": step,
            "place": cache.origin(answered.row as usize).to_string(),
            "row": answered.row,
            "prompt": row(answered, cache)["prompt"],
            "answers": answers.collect::<Result<Vec<_>>>()?,
            "pairs": paired.pairs,
            "answered_after": batch.answered_after,
        }))
    };
    batch.prompts.iter().zip(paired).map(line).collect()
}

fn shown(answer: &Answer, names: &[String], tokenizer: &Tokenizer) -> Result<Value> {
    let tokens = without_end(&answer.tokens, tokenizer);
    let judges: Map<String, Value> = names
        .iter()
        .zip(&answer.opinions)
        .map(|(name, opinion)| (name.clone(), json!({ "score": opinion.score, "said": opinion.said })))
        .collect();
    Ok(json!({
        "text": tokenizer.decode(tokens, true)?,
        "tokens": tokens.len(),
        "ended": answer.is_ended,
        "log_prob": answer.log_prob,
        "score": answer.score,
        "judges": judges,
    }))
}
