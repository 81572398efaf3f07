//! Samples of `samples.jsonl`: the answers to a prompt at several steps, kept in little memory.

use std::collections::{BTreeMap, VecDeque};

use serde_json::Value;

/// Most prompts that are kept of a run; the ones that were not answered for longest go first.
const PROMPTS: usize = 60;
/// Most steps of a prompt that are kept: the first and the last ones.
const STEPS: usize = 6;
/// Most answers of a prompt at a step.
const ANSWERS: usize = 4;
/// Most characters of a text.
const CHARACTERS: usize = 4000;

/// Answers to a prompt at a step.
pub(super) struct Sample {
    pub step: u64,
    pub answers: Vec<Answer>,
    /// Number of answers that were left out.
    pub left_out: usize,
}

/// A completion and what judges made of it.
pub(super) struct Answer {
    pub text: String,
    pub tokens: Option<u64>,
    pub is_ended: bool,
    pub score: Option<f64>,
    /// Name, score and reply of each judge.
    pub judges: Vec<(String, Option<f64>, String)>,
}

/// A prompt with its answers by step.
pub(super) struct Prompt {
    pub is_eval: bool,
    pub text: String,
    /// Where the row is from.
    pub place: String,
    pub chosen: Option<String>,
    pub rejected: Option<String>,
    pub samples: Vec<Sample>,
}

/// The prompts of a run, the last answered one at the end.
#[derive(Default)]
pub(super) struct Samples {
    prompts: VecDeque<Prompt>,
}

impl Samples {
    /// Takes a line of the file; returns whether it was one.
    pub(super) fn take(&mut self, line: &str) -> bool {
        let Ok(line) = serde_json::from_str::<Value>(line) else { return false };
        let (Some(step), Some(answers)) = (line["step"].as_u64(), line["answers"].as_array()) else {
            return false;
        };
        let text = |name: &str| line[name].as_str().map(limited);
        let prompt = limited(&in_words(&line["prompt"]));
        let is_eval = line["split"] == "eval";
        let sample = Sample {
            step,
            answers: answers.iter().take(ANSWERS).map(Answer::read).collect(),
            left_out: answers.len().saturating_sub(ANSWERS),
        };
        let known = self.prompts.iter().position(|known| known.is_eval == is_eval && known.text == prompt);
        let mut prompt = known.and_then(|index| self.prompts.remove(index)).unwrap_or_else(|| Prompt {
            is_eval,
            text: prompt,
            place: text("place").unwrap_or_default(),
            chosen: text("chosen"),
            rejected: text("rejected"),
            samples: Vec::new(),
        });
        prompt.samples.retain(|known| known.step != step);
        prompt.samples.push(sample);
        if prompt.samples.len() > STEPS {
            prompt.samples.remove(STEPS / 2);
        }
        self.prompts.push_back(prompt);
        if self.prompts.len() > PROMPTS {
            self.prompts.pop_front();
        }
        true
    }

    /// Returns the prompts, those of held-out rows first, then the last answered ones.
    pub(super) fn prompts(&self) -> impl Iterator<Item = &Prompt> {
        let held_out = self.prompts.iter().filter(|prompt| prompt.is_eval);
        held_out.chain(self.prompts.iter().rev().filter(|prompt| !prompt.is_eval))
    }

    /// Returns a prompt's answers.
    pub(super) fn find(&self, is_eval: bool, text: &str) -> Option<&Prompt> {
        self.prompts.iter().find(|prompt| prompt.is_eval == is_eval && prompt.text == text)
    }
}

impl Answer {
    fn read(answer: &Value) -> Self {
        let judges: BTreeMap<_, _> = answer["judges"].as_object().into_iter().flatten().collect();
        let judge = |(name, opinion): (&String, &Value)| {
            let said = opinion["said"].as_str().map(limited).unwrap_or_default();
            (name.clone(), opinion["score"].as_f64(), said)
        };
        Self {
            text: limited(answer["text"].as_str().unwrap_or_default()),
            tokens: answer["tokens"].as_u64(),
            is_ended: answer["ended"] != false,
            score: answer["score"].as_f64(),
            judges: judges.into_iter().map(judge).collect(),
        }
    }
}

fn limited(text: &str) -> String {
    super::html::cut(text, CHARACTERS)
}

/// Returns a prompt, a text or a list of messages, as a text.
fn in_words(prompt: &Value) -> String {
    let message = |message: &Value| {
        let role = message["role"].as_str().unwrap_or("?");
        match &message["content"] {
            Value::String(content) => format!("{role}: {content}"),
            content => format!("{role}: {content}"),
        }
    };
    match prompt {
        Value::String(text) => text.clone(),
        Value::Array(messages) => messages.iter().map(message).collect::<Vec<_>>().join("\n"),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn line(step: u64, prompt: Value, text: &str) -> String {
        json!({ "step": step, "prompt": prompt, "split": "eval", "answers": [{ "text": text, "score": 0.5 }] })
            .to_string()
    }

    #[test]
    fn a_prompt_keeps_its_first_and_last_steps() {
        let mut samples = Samples::default();
        for step in 0..20 {
            assert!(samples.take(&line(step, json!("hello"), &format!("answer {step}"))));
        }
        let prompt = samples.find(true, "hello").expect("kept");
        let steps: Vec<u64> = prompt.samples.iter().map(|sample| sample.step).collect();
        assert_eq!(steps, [0, 1, 2, 17, 18, 19]);
        assert_eq!(prompt.samples[5].answers[0].text, "answer 19");
        assert!(samples.find(false, "hello").is_none(), "training rows are others");
    }

    #[test]
    fn old_prompts_go_and_broken_lines_are_refused() {
        let mut samples = Samples::default();
        for row in 0..200 {
            samples.take(&line(1, json!([{ "role": "user", "content": row.to_string() }]), "yes"));
        }
        assert_eq!(samples.prompts().count(), PROMPTS);
        assert!(samples.find(true, "user: 199").is_some() && samples.find(true, "user: 0").is_none());
        assert!(!samples.take("{\"step\": 1}") && !samples.take("[]") && !samples.take("{"));
    }
}
