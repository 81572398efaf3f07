//! A judge that is a reward model.
//!
//! Prompt and completion are tokenised like reward-model rows, by the reward model's own tokenizer
//! and chat template. A text that is too long has no score: truncation would cut the scored end.

use std::fmt::Display;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Map, Value};
use tandem_data::record::{Message, Text};
use tandem_data::row;
use tandem_data::tokenizer::Tokenizer;
use tandem_judge::{Counts, Judge, JudgeError, Prompt, PromptWithCompletions, Verdict};
use tandem_kernels::{DType, Device};
use tandem_model::ModelFolder;

use crate::TrainError;
use crate::config::{RewardSection, whole_format};
use crate::judges::reward_model::{Answers, RewardModel};

/// A reward model, ready to judge.
pub(crate) struct RewardJudge {
    name: String,
    tokenizer: Tokenizer,
    model: RewardModel,
    max_length: usize,
    micro_batch_tokens: usize,
    counts: Counts,
}

impl RewardJudge {
    /// Loads the model and its tokenizer. It computes on `device`, in `dtype`.
    pub(crate) fn open(
        name: impl Into<String>,
        section: &RewardSection,
        device: &Device,
        dtype: DType,
    ) -> Result<Self, JudgeError> {
        let name = name.into();
        let RewardSection { model: folder, max_length, micro_batch_tokens, format } = section;
        let format = format.unwrap_or(whole_format(dtype));
        let open = || -> crate::Result<_> {
            let positions = ModelFolder::open_reward(folder, 0)?.spec().max_positions;
            let max_length = positions.min(*max_length);
            let tokenizer = Tokenizer::from_folder(folder)?;
            Ok((tokenizer, RewardModel::open(folder, device, format, dtype, max_length)?, max_length))
        };
        let (tokenizer, model, max_length) = open().map_err(|error| failed(&name, error))?;
        let micro_batch_tokens = *micro_batch_tokens;
        Ok(Self { name, tokenizer, model, max_length, micro_batch_tokens, counts: Counts::default() })
    }

    /// Takes the memory that judging takes, on a device that computes nothing.
    pub(crate) fn dry_run(&mut self) -> Result<(), JudgeError> {
        self.model.dry_run(self.micro_batch_tokens).map_err(|error| failed(&self.name, error))
    }

    /// The tokens of each answer of a group, after its prompt.
    fn tokens(&self, group: &PromptWithCompletions<'_>) -> Result<Vec<Vec<u32>>, JudgeError> {
        let at = |error: &dyn Display| {
            failed(&self.name, TrainError::Mismatch { reason: format!("{}: {error}", group.place) })
        };
        let prompt = prompt(&group.prompt);
        let nothing = Map::new();
        let kwargs = group.row.get("chat_template_kwargs").and_then(Value::as_object).unwrap_or(&nothing);
        let tools = match group.row.get("tools") {
            Some(Value::String(json)) => serde_json::from_str(json).map_err(|error| at(&error))?,
            other => other.cloned().filter(|tools| !tools.is_null()),
        };
        let whole = |answer: &str| {
            let answer = match prompt {
                Text::Plain(_) => Text::Plain(answer.to_owned()),
                Text::Chat(_) => Text::Chat(vec![assistant(answer)]),
            };
            row::whole(&prompt, &answer, tools.as_ref(), kwargs, &self.tokenizer)
        };
        group.answers.iter().map(|answer| whole(answer.text).map_err(|error| at(&error))).collect()
    }

    /// Message for a text of `tokens` tokens without a score.
    fn unscorable(&self, length: usize) -> Option<String> {
        let longest = self.max_length;
        match length {
            0 => Some("there is no token to score".to_owned()),
            length if length > longest => Some(format!(
                "prompt and completion have {length} tokens, expected at most {longest} (`max_length`, or the model's positions)"
            )),
            _ => None,
        }
    }

    /// Verdicts for texts that go through the model together.
    fn score(&mut self, portion: &[Vec<&[u32]>]) -> Result<Vec<Verdict>, JudgeError> {
        let answers: Vec<_> = portion.iter().map(|answers| Answers { prompt: &[], answers }).collect();
        let scores = self.model.score(&answers).map_err(|error| failed(&self.name, error))?;
        let verdict = |score: f32| match score.is_finite() {
            true => Verdict::new(f64::from(score), Value::Null),
            false => Verdict::none(format!("the score is {score}")),
        };
        Ok(scores.into_iter().map(verdict).collect())
    }
}

impl Judge for RewardJudge {
    fn name(&self) -> &str {
        &self.name
    }

    fn judge(
        &mut self,
        groups: &[PromptWithCompletions<'_>],
        stop: &AtomicBool,
    ) -> Result<Vec<Vec<Verdict>>, JudgeError> {
        let tokens = groups.iter().map(|group| self.tokens(group)).collect::<Result<Vec<_>, _>>()?;
        let lengths = tokens.iter().map(|texts| texts.iter().map(Vec::len));
        let unscored: Vec<Vec<_>> =
            lengths.map(|lengths| lengths.map(|length| self.unscorable(length)).collect()).collect();
        let mut scored = Vec::new();
        for portion in portions(&tokens, &unscored, self.micro_batch_tokens) {
            if stop.load(Ordering::Relaxed) {
                return Err(JudgeError::Stopped);
            }
            scored.extend(self.score(&portion)?);
        }
        let mut scored = scored.into_iter();
        let mut verdict = |why: Option<String>| match why {
            Some(why) => Verdict::none(why),
            None => scored.next().expect("one for each text that can be scored"),
        };
        let verdicts: Vec<Vec<_>> =
            unscored.into_iter().map(|group| group.into_iter().map(&mut verdict).collect()).collect();
        self.counts.add_verdicts(&verdicts);
        Ok(verdicts)
    }

    fn counts(&self) -> Counts {
        self.counts
    }
}

/// Batches of scorable texts of about this many tokens, in order. Texts of a group stay together:
/// their common prompt is computed once.
fn portions<'a>(
    tokens: &'a [Vec<Vec<u32>>],
    unscored: &[Vec<Option<String>>],
    limit: usize,
) -> Vec<Vec<Vec<&'a [u32]>>> {
    let (mut portions, mut taken) = (vec![Vec::new()], 0);
    for (texts, unscored) in tokens.iter().zip(unscored) {
        let mut group: Vec<&[u32]> = Vec::new();
        for (text, _) in texts.iter().zip(unscored).filter(|(_, why)| why.is_none()) {
            if taken > 0 && taken + text.len() > limit {
                portions.last_mut().expect("there is one").push(std::mem::take(&mut group));
                portions.push(Vec::new());
                taken = 0;
            }
            taken += text.len();
            group.push(text);
        }
        portions.last_mut().expect("there is one").push(group);
    }
    portions
}

fn prompt(prompt: &Prompt<'_>) -> Text {
    match prompt {
        Prompt::Text(text) => Text::Plain((*text).to_owned()),
        Prompt::Messages(messages) => {
            let message = |value: &Value| value.as_object().cloned().unwrap_or_default();
            Text::Chat(messages.iter().map(message).collect())
        }
    }
}

fn assistant(content: &str) -> Message {
    let pair = |key: &str, value: &str| (key.to_owned(), value.into());
    [pair("role", "assistant"), pair("content", content)].into_iter().collect()
}

fn failed(judge: &str, error: TrainError) -> JudgeError {
    JudgeError::Model { judge: judge.to_owned(), source: Box::new(error) }
}
