//! Helpers of several tests.

use std::sync::atomic::AtomicBool;

use serde_json::{Map, Value};
use tandem_judge::{Candidate, Judge, Prompt, PromptWithCompletions, Result, Verdict};

pub static GO: AtomicBool = AtomicBool::new(false);

pub fn group<'a>(
    prompt: &'a str,
    row: &'a Map<String, Value>,
    answers: &'a [&'a str],
) -> PromptWithCompletions<'a> {
    let answers = answers.iter().map(|text| Candidate { text, tokens: text.len(), is_ended: true }).collect();
    PromptWithCompletions { place: "rows.jsonl:7", prompt: Prompt::Text(prompt), row, answers }
}

/// Returns the verdicts of one group's responses.
pub fn judge(judge: &mut dyn Judge, prompt: &str, answers: &[&str]) -> Result<Vec<Verdict>> {
    let row = Map::new();
    let mut verdicts = judge.judge(&[group(prompt, &row, answers)], &GO)?;
    assert_eq!(verdicts.len(), 1);
    Ok(verdicts.remove(0))
}

pub fn scores(verdicts: &[Verdict]) -> Vec<Option<f64>> {
    verdicts.iter().map(|verdict| verdict.score).collect()
}
