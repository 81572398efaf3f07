//! Samples of `samples.jsonl`: the answers to a prompt at several steps, kept in little memory.

use std::collections::{BTreeMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};

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
    /// Hash of what makes it another prompt: the split, the whole text, and the answers that the row has.
    pub key: u64,
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
        let prompt = in_words(&line["prompt"]);
        let is_eval = line["split"] == "eval";
        let mut hasher = DefaultHasher::new();
        (is_eval, &prompt, line["chosen"].as_str(), line["rejected"].as_str()).hash(&mut hasher);
        let key = hasher.finish();
        let sample = Sample {
            step,
            answers: answers.iter().take(ANSWERS).map(Answer::read).collect(),
            left_out: answers.len().saturating_sub(ANSWERS),
        };
        let known = self.prompts.iter().position(|known| known.key == key);
        let mut prompt = known.and_then(|index| self.prompts.remove(index)).unwrap_or_else(|| Prompt {
            key,
            is_eval,
            text: limited_within(&prompt),
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

    /// Returns the prompt of a key.
    pub(super) fn find(&self, key: u64) -> Option<&Prompt> {
        self.prompts.iter().find(|prompt| prompt.key == key)
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

/// Leaves out the middle of a long text: prompts differ at their ends.
fn limited_within(text: &str) -> String {
    const HALF: usize = CHARACTERS / 2;
    let ends = text.char_indices().nth(HALF).zip(text.char_indices().nth_back(HALF - 1));
    match ends {
        Some(((first, _), (last, _))) if first < last => format!("{} … {}", &text[..first], &text[last..]),
        _ => text.to_owned(),
    }
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
        let prompt = samples.prompts().next().expect("kept");
        let steps: Vec<u64> = prompt.samples.iter().map(|sample| sample.step).collect();
        assert_eq!(steps, [0, 1, 2, 17, 18, 19]);
        assert_eq!(prompt.samples[5].answers[0].text, "answer 19");
        let of_training = line(20, json!("hello"), "answer").replace("eval", "train");
        assert!(samples.take(&of_training));
        assert_eq!(samples.prompts().count(), 2, "training rows are others");
    }

    #[test]
    fn prompts_with_one_beginning_or_other_answers_of_the_row_are_several() {
        let mut samples = Samples::default();
        let beginning = "x".repeat(2 * CHARACTERS);
        for end in ["one", "two"] {
            samples.take(&line(1, json!(format!("{beginning} {end}")), end));
        }
        for chosen in ["gold", "silver"] {
            let mut row: Value = serde_json::from_str(&line(1, json!("same"), chosen)).expect("JSON");
            row["chosen"] = chosen.into();
            samples.take(&row.to_string());
        }
        let found: Vec<_> = samples.prompts().map(|prompt| &prompt.samples[0].answers[0].text).collect();
        assert_eq!(found, ["one", "two", "gold", "silver"]);
        let text = &samples.prompts().nth(1).expect("the second").text;
        assert!(text.ends_with(" two") && text.chars().count() == CHARACTERS + 3, "{}", text.len());
        assert_eq!(limited_within(&"é".repeat(CHARACTERS)), "é".repeat(CHARACTERS));
    }

    #[test]
    fn old_prompts_go_and_broken_lines_are_refused() {
        let mut samples = Samples::default();
        for row in 0..200 {
            samples.take(&line(1, json!([{ "role": "user", "content": row.to_string() }]), "yes"));
        }
        assert_eq!(samples.prompts().count(), PROMPTS);
        let has = |text: &str| samples.prompts().any(|prompt| prompt.text == text);
        assert!(has("user: 199") && !has("user: 0"));
        assert!(!samples.take("{\"step\": 1}") && !samples.take("[]") && !samples.take("{"));
    }
}
