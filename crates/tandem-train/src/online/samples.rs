//! `samples.jsonl`: completions and judges' replies, one line per prompt.

use serde_json::{Map, Value, json};

use super::advantages::Advantages;
use super::answers::{Answer, Batch, CompletedPrompt};
use super::pairs::Paired;
use super::render::SampleRenderer;
use crate::Result;

/// The lines of a batch that the 1-based `step` trains on, with its pairs, if it is made into such. `names` are the
/// judges'.
pub(crate) fn lines(
    step: u64,
    batch: &Batch,
    paired: Option<&[Paired]>,
    compared: Option<&Advantages>,
    names: &[String],
    shown: &SampleRenderer<'_>,
) -> Result<Vec<Value>> {
    let line = |(place, answered): (usize, &CompletedPrompt)| -> Result<Value> {
        let answers = answered.answers.iter().map(|answer| of_answer(answer, names, shown));
        let mut line = json!({
            "step": step,
            "place": shown.prompts.origin(answered.row as usize).to_string(),
            "row": answered.row,
            "prompt": shown.prompt(answered)?,
            "answers": answers.collect::<Result<Vec<_>>>()?,
            "answered_after": batch.answered_after,
        });
        match (compared, paired) {
            (Some(compared), _) => line["advantages"] = json!(compared.advantages[place]),
            (None, Some(paired)) => line["pairs"] = json!(paired[place].pairs),
            (None, None) => {}
        }
        Ok(line)
    };
    // Rows of a distillation that keep their given completions have no answers.
    let prompts = batch.prompts.iter().enumerate();
    prompts.filter(|(_, answered)| !answered.answers.is_empty()).map(line).collect()
}

fn of_answer(answer: &Answer, names: &[String], shown: &SampleRenderer<'_>) -> Result<Value> {
    let judges: Map<String, Value> = names
        .iter()
        .zip(&answer.opinions)
        .map(|(name, opinion)| (name.clone(), json!({ "score": opinion.score, "said": opinion.said })))
        .collect();
    let mut line = json!({
        "text": shown.text(answer)?,
        "tokens": shown.length(answer),
        "ended": answer.is_ended,
        "log_prob": answer.log_prob,
        "score": answer.score,
        "judges": judges,
    });
    if !answer.turns.is_empty() {
        line["conversation"] = json!(shown.conversation(answer)?);
    }
    Ok(line)
}
